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
// The same of packed sequences: the steps of threads at which none ends are not scanned.
constexpr bool ONLY_FINALS = OUTPUT_COUNT == 0 && SEGMENTED;
INLINE bool is_scanned(const Params& P, int tile) { return !ONLY_FINAL || tile + 1 == P.tiles; }

// How many positions at the beginning of a reverse scan of one row do not exist. Tiles begin at
// multiples of ROUND steps, so that they are aligned whatever the row's length.
INLINE int skipped(const Params& P) {
    if constexpr (ROUND > 1) return (int)(-P.length & (ROUND - 1));
    return 0;
}

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
        else return any_bits(bits[i / 32], 1u << i % 32);
    }
};

// How many entries of `offsets` are at most `value` (OR_EQUAL), else below it: not fewer than `known`,
// or in a reverse scan not more, and probably not far from it. `all`: the number of entries. Not
// inlined: it is needed seldom, and the code of all steps of a thread would not fit in the
// instruction cache.
template <bool OR_EQUAL>
CALLED int count_entries(const i64* offsets, int all, i64 value, int known) {
    auto is_before = [&](int entry) {
        return OR_EQUAL ? offsets[entry] <= value : offsets[entry] < value;
    };
    int begin = known < 0 ? 0 : least(known, all), end = begin, apart = 1;
    if constexpr (REVERSE) {
        ROLLED while (begin > 0 && !is_before(begin - 1)) {
            end = begin - 1, begin = end - apart, apart *= 2;
            if (begin < 0) begin = 0;
        }
    } else {
        ROLLED while (end < all && is_before(end)) {
            begin = end + 1, end = least(begin + apart, all), apart *= 2;
        }
    }
    ROLLED while (begin < end) {
        const int middle = begin + (end - begin) / 2;
        if (is_before(middle)) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// Which entries of `offsets` the bits of a tile stand for. After the bits come as many RANKS, one per
// word of bits: that of the word's first entry in the scan's order. The others follow one by one,
// but where several entries are equal, for a bit of REPEATS.
struct Ranks {
    static constexpr int RANKS = BOUNDARY_WORDS, REPEATS = 2 * BOUNDARY_WORDS;
    static constexpr u32 MOST = 0x7fffffff;
    // Raised by the entries of a word, from 0 on, up to that of the first in the scan's order.
    static INLINE_MEMBER u32 rank_of(int entry) { return REVERSE ? entry + 1 : MOST - entry; }
    static INLINE_MEMBER int entry_of(u32 rank) {
        return REVERSE ? (int)rank - 1 : (int)(MOST - rank);
    }
};

// The number of the packed sequence of a position, from one of a thread's COUNT positions to the next.
template <int COUNT>
struct Numbers {
    Boundaries<COUNT> repeats;
    int number = 0;

    // The sequence before the first boundary among the positions and the one after them. `first`,
    // `step`: of position 0, in the tile and in the scan's order.
    INLINE_MEMBER void start(const Params& P, const Boundaries<COUNT>& bits, const u32* tile,
                             int first, i64 step) {
        if constexpr (NUMBERED) {
            repeats.read(tile + Ranks::REPEATS, first);
            int ahead = COUNT + 1;
            UNROLL for (int k = Boundaries<COUNT>::WORDS_READ - 1; k >= 0; --k)
                if (bits.bits[k] != 0) ahead = 32 * k + lowest_bit(bits.bits[k]);
            if (ahead > COUNT) return;
            const int bit = first + ahead, word = bit / 32;
            const u32 earlier = (1u << bit % 32) - 1;
            const int passed = count_bits(tile[word] & earlier);
            const int entry = Ranks::entry_of(tile[Ranks::RANKS + word]);
            number = REVERSE ? entry - passed : entry + passed - 1;
            if (tile[Ranks::REPEATS + word] & earlier)
                number = count_entries<REVERSE>(offsets_of(P), sequences_of(P) + 1,
                                                boundary_at(P, step + ahead), number + 1) - 1;
        }
    }
    // Position i, at `step`, is next.
    INLINE_MEMBER void enter(const Params& P, const Boundaries<COUNT>& bits, int i, i64 step) {
        if constexpr (NUMBERED) {
            if (!bits.at(i)) return;
            number += REVERSE ? -1 : 1;
            if (repeats.at(i))
                number = count_entries<!REVERSE>(offsets_of(P), sequences_of(P) + 1,
                                                 boundary_at(P, step), number + 1) - 1;
        }
    }
    // The value of the entry that is a boundary before a position.
    static INLINE_MEMBER i64 boundary_at(const Params& P, i64 step) {
        return REVERSE ? P.length + skipped(P) - step : step;
    }
    // The number, or another one that exists, where offsets are wrong.
    INLINE_MEMBER int valid(const Params& P) const {
        return number < 0 ? 0 : least(number, sequences_of(P) - 1);
    }
};

struct Position {
    int row;
    i64 channel;
    bool exists;   // whether its channel (in rows: its step) exists
    bool first;    // nothing comes before it
    bool last;     // the last of its row, or of a packed sequence
    bool starts;   // the first of a packed sequence
    int sequence;  // the number of the packed sequence (NUMBERED)
};

INLINE State element_at(const Params& P, const Raw& x, const Position& at) {
    State element = lift(x);
    if constexpr (SEGMENTED) {
        if (at.starts) {
            if (HAS_INIT && at.exists)
                element =
                    combine_elements(load_init(P, at.row, at.channel, at.sequence), element);
            cut_off(element);
        }
    }
    return element;
}

// What comes after a position: its element alone where a sequence starts. Whether one started before
// is not noted.
INLINE State follow(const State& carry, const State& element, const Position& at) {
    const State both = combine_elements(carry, element);
    return SEGMENTED && at.starts ? element : both;
}

INLINE void take_step(const Params& P, OutputValues& values, int v, Raw x, State& carry,
                      const Position& at) {
    if (REPLACES_BOUNDARY && at.last && at.exists)
        replace_boundary(x, P, at.row, at.channel, at.sequence);
    const State element = element_at(P, x, at);
    const State after = at.first ? element : follow(carry, element, at);
    if constexpr (EXCLUSIVE) {
        State shown = at.first ? identity() : carry;
        if constexpr (SEGMENTED) {
            if (at.starts)
                shown = HAS_INIT && at.exists ? load_init(P, at.row, at.channel, at.sequence)
                                              : identity();
        }
        put_outputs(values, v, lower(shown, x, at.last));
    } else {
        put_outputs(values, v, lower(after, x, at.last));
    }
    carry = after;
    if (HAS_FINAL && at.last && at.exists)
        store_final(P, at.row, at.channel, at.sequence, carry);
}
