// A look-back that reads one slot after another: the reference of the protocol.
//
// Each thread that takes part finds prefixes alone: of its channel (lanes), or of its row (rows).
// It reads the slots that the fast roles read, in ascending order, and waits for each:
//
//     CHAINED   prefix(tile) = slot of the tile before, which holds an inclusive prefix
//     LOOKBACK  prefix(tile) = init ∘ aggregate(0) ∘ … ∘ aggregate(tile − 1)
//
// The fast roles do the same with fewer waits: they poll several slots together, in several lanes,
// and combine groups of aggregates. Built with -DREFERENCE_LOOKBACK, a kernel has `reference_role`
// (lanes_lookback.cuh, rows_lookback.cuh) in their place; tests/cuda/test_emulated.py compares them.
#pragma once

#ifdef REFERENCE_LOOKBACK
constexpr bool REFERENCE = true;
#else
constexpr bool REFERENCE = false;
#endif

struct RunningPrefix {
    State state;
    bool exists;
    int next;  // the tile whose aggregate comes next

    INLINE_MEMBER void start(bool enters, const State& init) {
        state = init, exists = enters, next = 0;
    }
    // Up to the tile number `tile`, which is not included. slot_of(t) is the slot of tile t.
    template <class SlotOf>
    INLINE_MEMBER void extend(int tile, SlotOf slot_of, u32 tag, Watchdog& watchdog) {
        for (; next < tile; ++next) {
            u32 words[WORDS];
            await_slot<WORDS>(slot_of(next), words, tag, watchdog);
            state = join(exists, state, true, from_words(words));
            exists = true;
        }
    }
};
