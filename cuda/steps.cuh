// One position of a row: its element, its output, and the carry after it.
//
// Packed sequences (SEGMENTED) lie in one row. Marks, an additional input, say where a sequence
// starts (1) and ends (2) in the scan's order, and carry its number. The element at a start is
// combined with the sequence's init and cut off from the elements before it.
#pragma once

// Whether a carry enters every row before its first position.
constexpr bool ENTERS = HAS_INIT && !SEGMENTED;
constexpr u32 STARTS = 1, ENDS = 2;
// Whether the final of every row is the only result, as in a reduction. Of all tiles of a row but
// the last, the total is then enough: main does not scan them.
constexpr bool ONLY_FINAL = OUTPUT_COUNT == 0 && !SEGMENTED;
INLINE bool is_scanned(const Params& P, int tile) { return !ONLY_FINAL || tile + 1 == P.tiles; }

struct Position {
    int row;
    i64 channel;
    bool exists;  // whether its channel (in rows: its step) exists
    bool first;   // nothing comes before it
    bool last;
    u32 mark;
    INLINE_MEMBER int sequence() const { return SEGMENTED ? (int)(mark >> 2) : 0; }
};

INLINE State element_at(const Params& P, const Raw& x, const Position& at) {
    State element = lift(x);
    if constexpr (SEGMENTED) {
        if (at.mark & STARTS) {
            if (HAS_INIT && at.exists)
                element =
                    combine_elements(load_init(P, at.row, at.channel, at.sequence()), element);
            cut_off(element);
        }
    }
    return element;
}

INLINE void take_step(const Params& P, OutputValues& values, int v, Raw x, State& carry,
                      const Position& at) {
    if (REPLACES_BOUNDARY && at.last && at.exists)
        replace_boundary(x, P, at.row, at.channel, at.sequence());
    const State element = element_at(P, x, at);
    const State sum = combine(carry, element);
    const State after = at.first ? element : sum;
    if constexpr (EXCLUSIVE) {
        State shown = at.first ? identity() : carry;
        if constexpr (SEGMENTED) {
            if (at.mark & STARTS)
                shown = HAS_INIT && at.exists ? load_init(P, at.row, at.channel, at.sequence())
                                              : identity();
        }
        put_outputs(values, v, lower(shown, x, at.last));
    } else {
        put_outputs(values, v, lower(after, x, at.last));
    }
    carry = after;
    if (HAS_FINAL && at.last && at.exists)
        store_final(P, at.row, at.channel, at.sequence(), carry);
}
