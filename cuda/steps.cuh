// One position of a row: its element, its output, and the carry after it.
//
// Packed sequences (SEGMENTED) lie in one row; boundaries.cuh finds where they start and end, in the
// scan's order. The element at a start is combined with the sequence's init and cut off from the
// elements before it.
#pragma once

// Whether a carry enters every row before its first position.
constexpr bool ENTERS = HAS_INIT && !SEGMENTED;
// Whether the final of every row is the only result, as in a reduction. Of all tiles of a row but
// the last, the total is then enough: main does not scan them.
constexpr bool ONLY_FINAL = OUTPUT_COUNT == 0 && !SEGMENTED;
INLINE bool is_scanned(const Params& P, int tile) { return !ONLY_FINAL || tile + 1 == P.tiles; }

// Where sequences start among COUNT consecutive positions and the one after them.
template <int COUNT>
struct Boundaries {
    static constexpr int WORDS_READ = SEGMENTED ? COUNT / 32 + 1 : 1;
    u32 bits[WORDS_READ];
    // From the bits of a tile; `first` is the position in it.
    INLINE_MEMBER void read(const u32* tile, int first) {
        if constexpr (SEGMENTED) {
            const u32* from = tile + first / 32;
            u32 low = from[0];
            UNROLL for (int k = 0; k < WORDS_READ; ++k) {
                const u32 high = from[k + 1];
                bits[k] = funnel_right(low, high, first % 32);
                low = high;
            }
        }
    }
    INLINE_MEMBER bool at(int i) const {
        if constexpr (!SEGMENTED) return false;
        else if constexpr (WORDS_READ == 1) return bits[0] >> i & 1;
        else return bits[i / 32] >> i % 32 & 1;
    }
};

struct Position {
    int row;
    i64 channel;
    bool exists;         // whether its channel (in rows: its step) exists
    bool first;          // nothing comes before it
    bool last;           // the last of its row, or of a packed sequence
    bool starts;         // the first of a packed sequence
    i64 step;            // in the scan's order
    const u32* entries;  // of packed sequences: which entries of `offsets` are boundaries of the tile

    // The number of the packed sequence: that of the last entry of `offsets` up to the position.
    INLINE_MEMBER int sequence(const Params& P) const {
        if constexpr (NUMBERED) {
            const i64 at = REVERSE ? P.length - 1 - step : step;
            // Entries before `begin` are not above `at`, those from `end` on are.
            int begin = (int)entries[0], end = (int)entries[1];
            ROLLED while (begin < end) {
                const int middle = begin + (end - begin) / 2;
                if (offset_at(P, middle) <= at) begin = middle + 1;
                else end = middle;
            }
            return begin < 1 ? 0 : (begin <= sequences_of(P) ? begin : sequences_of(P)) - 1;
        }
        return 0;
    }
};

INLINE State element_at(const Params& P, const Raw& x, const Position& at) {
    State element = lift(x);
    if constexpr (SEGMENTED) {
        if (at.starts) {
            if (HAS_INIT && at.exists)
                element =
                    combine_elements(load_init(P, at.row, at.channel, at.sequence(P)), element);
            cut_off(element);
        }
    }
    return element;
}

INLINE void take_step(const Params& P, OutputValues& values, int v, Raw x, State& carry,
                      const Position& at) {
    if (REPLACES_BOUNDARY && at.last && at.exists)
        replace_boundary(x, P, at.row, at.channel, at.sequence(P));
    const State element = element_at(P, x, at);
    const State sum = combine(carry, element);
    const State after = at.first ? element : sum;
    if constexpr (EXCLUSIVE) {
        State shown = at.first ? identity() : carry;
        if constexpr (SEGMENTED) {
            if (at.starts)
                shown = HAS_INIT && at.exists ? load_init(P, at.row, at.channel, at.sequence(P))
                                              : identity();
        }
        put_outputs(values, v, lower(shown, x, at.last));
    } else {
        put_outputs(values, v, lower(after, x, at.last));
    }
    carry = after;
    if (HAS_FINAL && at.last && at.exists)
        store_final(P, at.row, at.channel, at.sequence(P), carry);
}
