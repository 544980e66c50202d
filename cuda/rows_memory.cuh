// Tiles of rows_scan.cuh: shape, place in shared memory, how a thread reads its elements.
#pragma once
#include "ring.cuh"

constexpr int TILE_STEPS = THREADS * ITEMS;
constexpr int WARPS = THREADS / 32;
constexpr bool WAITS = MODE != SERIAL;
constexpr int LOOKBACKS = WAITS ? LOOKBACK_WARPS : 1;
// The warps of the roles behind the main warps.
constexpr int TOTALS_WARP = WARPS, LOAD_WARP = WARPS + 1, STORE_WARP = WARPS + 2;
constexpr int FIRST_LOOKBACK_WARP = WARPS + 3;
constexpr int BOUNDARIES_WARP = FIRST_LOOKBACK_WARP + (WAITS ? LOOKBACKS : 0);
// At least two, of small blocks four, and as many as make a multiple of four: registers are dealt to
// so many warps.
constexpr int FEWEST_BOUNDARY_WARPS = WORDS <= 3 && THREADS <= 384 ? 4 : 2;
constexpr int BOUNDARY_WARPS =
    SEGMENTED ? least(FEWEST_BOUNDARY_WARPS + (8 - FEWEST_BOUNDARY_WARPS - BOUNDARIES_WARP % 4) % 4,
                      STAGES)
              : 0;
constexpr int ALL_THREADS = 32 * (BOUNDARIES_WARP + BOUNDARY_WARPS);
constexpr int RING = LEAD + 1;
constexpr int CHUNKS = (TILE_STEPS + CHUNK - 1) / CHUNK;
constexpr int IN_FLIGHT = least(FLIGHT, STAGES* CHUNKS);
static_assert(THREADS % 32 == 0 && WARPS <= 32, "main warps");
static_assert(LEAD >= 1 && LEAD < STAGES && RING <= 7, "barriers and stages");
static_assert(LATE >= 0 && LATE < LEAD, "a gate turns twice before the second look");
static_assert(!WAITS || LOOKBACKS >= 2, "look-back warps hand prefixes on in turn");
static_assert(CHUNK % 16 == 0, "pieces of bulk copies are multiples of 16 bytes");

constexpr int OPEN = 0, TOTALS_READY = 1, PREFIX_READY = 1 + RING;
constexpr int TOTALS_READY_THREADS = THREADS + 32, PREFIX_READY_THREADS = THREADS + 32;

template <class Leaf>
constexpr int ELEMENT = Leaf::SCALARS * (int)sizeof(typename Leaf::Memory);

// Input<J> and Output<J> say where a leaf lies in a stage: AT, its first byte; REGION, its bytes;
// ALIGNED: no tile has a skew. They and struct Shared are generated (`SharedMemory` in kernel.py).
// An output may have the place of an input.

INLINE void put_state(u32* to, const State& s) {
    u32 w[WORDS];
    to_words(s, w);
    UNROLL for (int k = 0; k < WORDS; ++k) to[k] = w[k];
}
INLINE State get_state(const u32* from) {
    u32 w[WORDS];
    UNROLL for (int k = 0; k < WORDS; ++k) w[k] = from[k];
    return from_words(w);
}

// The tiles of a block, in the order in which it takes them.
struct Walk {
    int row, tile;
    INLINE_MEMBER void start(const Params& P) {
        const int blocks = WAITS ? P.tiles : 1;  // of a row
        row = block_index() / blocks;
        tile = block_index() - row * blocks;
    }
    INLINE_MEMBER void next(const Params& P) {
        if (WAITS) {
            tile += P.rest;
            row += P.ranks;
            if (tile >= P.tiles) tile -= P.tiles, ++row;
        } else if (++tile == P.tiles) {
            tile = 0;
            row += block_count();
        }
    }
    // After `steps` calls of next.
    static INLINE_MEMBER Walk at(const Params& P, int steps) {
        Walk walk;
        const int index = WAITS ? block_index() + steps * block_count() : steps;
        walk.row = index / P.tiles;
        walk.tile = index - walk.row * P.tiles;
        if (!WAITS) walk.row = block_index() + walk.row * block_count();
        return walk;
    }
    static INLINE_MEMBER int count(const Params& P) {
        if (WAITS) return (P.chains * P.tiles - block_index() + block_count() - 1) / block_count();
        return (P.chains - block_index() + block_count() - 1) / block_count() * P.tiles;
    }
    // The lowest index on the axis that the tile covers; below 0 in the last tile of a reverse
    // scan, whose first tile may go on beyond the axis (`skipped`).
    INLINE_MEMBER i64 lowest(const Params& P) const {
        const i64 first = (i64)tile * TILE_STEPS;
        return REVERSE ? P.length + skipped(P) - first - TILE_STEPS : first;
    }
};

// Addresses of a tile are integers: a tile may begin before its tensor.
template <int J>
INLINE u64 input_address(const Params& P, const Walk& walk) {
    const i64 shift = Input<J>::SHIFTED ? (REVERSE ? -1 : 1) : 0;
    const u64 row = (u64)P.input[J] + outer_offset(P.input_outer[J], P, walk.row);
    return row + (Input<J>::ONE ? 0 : (walk.lowest(P) + shift) * ELEMENT<Input<J>>);
}
template <int J>
INLINE u64 output_address(const Params& P, const Walk& walk) {
    return (u64)P.output[J] + outer_offset(P.output_outer[J], P, walk.row) +
           walk.lowest(P) * ELEMENT<Output<J>>;
}
INLINE i64 clamped(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// The bytes of chunk q of leaf J that exist, from `begin` to `end` within its region.
template <int J>
INLINE void piece(const Params& P, const Walk& walk, int q, u64 region, i64& begin, i64& end) {
    typedef Input<J> Leaf;
    const i64 shift = Input<J>::SHIFTED ? (REVERSE ? -1 : 1) : 0, low = walk.lowest(P) + shift;
    const i64 skew = region & 15;
    // Which of the tile's elements exist, in bytes of the region, rounded outwards to 16.
    const i64 first = clamped(-low, 0, TILE_STEPS), last = clamped(P.length - low, 0, TILE_STEPS);
    const i64 exists_from = (first * ELEMENT<Leaf> + skew) & ~15ll,
              exists_to = (last * ELEMENT<Leaf> + skew + 15) & ~15ll;
    const i64 from = (i64)q * CHUNK * ELEMENT<Leaf>,
              to = q + 1 == CHUNKS ? (i64)Leaf::REGION : from + CHUNK * ELEMENT<Leaf>;
    begin = exists_from > from ? exists_from : from;
    end = exists_to < to ? exists_to : to;
    if (first >= last || end < begin) end = begin;
}

// Reads whole words from shared memory, at any offset.
template <int WORD_COUNT, bool ALIGNED, int ACCESS>
INLINE void read_cell(u32* words, const char* from) {
    if constexpr (ALIGNED) {
        UNROLL for (int b = 0; b < 4 * WORD_COUNT; b += ACCESS)
            load<ACCESS>(words + b / 4, from + b);
    } else {
        const u32 skew = (u32)((u64)from & 3);
        const char* whole = from - skew;
        u32 low;
        load<4>(&low, whole);
        UNROLL for (int k = 0; k < WORD_COUNT; ++k) {
            u32 high;
            load<4>(&high, whole + 4 * k + 4);
            words[k] = funnel_right(low, high, 8 * skew);
            low = high;
        }
    }
}
template <class Memory>
INLINE void read_one(u32* words, const char* from, int scalars) {
    UNROLL for (int k = 0; k < scalars; ++k) {
        if constexpr (sizeof(Memory) == 8) {
            const u64 x = *(const u64*)(from + 8 * k);
            words[2 * k] = (u32)x, words[2 * k + 1] = (u32)(x >> 32);
        } else if constexpr (sizeof(Memory) == 4) {
            words[k] = *(const u32*)(from + 4 * k);
        } else if constexpr (sizeof(Memory) == 2) {
            const u32 x = *(const uint16_t*)(from + 2 * k);
            words[k / 2] = k % 2 ? words[k / 2] | x << 16 : x;
        } else {
            const u32 x = *(const uint8_t*)(from + k);
            words[k / 4] = k % 4 ? words[k / 4] | x << (8 * (k % 4)) : x;
        }
    }
}

// Waits for the chunks that hold the warp's elements. A skew moves elements by up to 15 bytes.
INLINE void await_items(Gate* full, u32 parity) {
    constexpr int OURS = 32 * ITEMS, MOST = least((OURS + 15) / CHUNK + 2, CHUNKS);
    const int warp = thread_index() / 32, place = REVERSE ? WARPS - 1 - warp : warp;
    const int first = place * OURS / CHUNK, last = ((place + 1) * OURS + 15) / CHUNK;
    gates_wait<MOST>(full + first, full + least(last, CHUNKS - 1), parity);
}

// Reads the thread's elements of a tile, in the order of memory. (A reverse scan starts with the
// last.)
INLINE void read_items(InputWords& words, const Params& P, const Walk& walk, const char* stage) {
    const int place = REVERSE ? THREADS - 1 - thread_index() : thread_index();
#define READ(J)                                                                                  \
    {                                                                                            \
        typedef Input<J> Leaf;                                                                   \
        const u64 address = input_address<J>(P, walk);                                           \
        if constexpr (Input<J>::ONE) {                                                           \
            read_one<Input<J>::Memory>(words.input##J, (const char*)address, Input<J>::SCALARS); \
        } else {                                                                                 \
            constexpr int CELL = ITEMS * ELEMENT<Leaf>;                                          \
            constexpr bool WHOLE = Leaf::ALIGNED && CELL % 4 == 0;                               \
            const char* cell =                                                                   \
                stage + Leaf::AT + (Leaf::ALIGNED ? 0 : (int)(address & 15)) + place * CELL;     \
            read_cell<(CELL + 3) / 4, WHOLE, largest_power(CELL, 16)>(words.input##J, cell);     \
        }                                                                                        \
    }
    INPUTS(READ)
#undef READ
}
// The place in memory order of the i-th item in the scan's order.
INLINE int item(int i) { return REVERSE ? ITEMS - 1 - i : i; }

INLINE void write_items(const OutputValues& values, const Params& P, const Walk& walk,
                        char* stage) {
    const int place = REVERSE ? THREADS - 1 - thread_index() : thread_index();
#define WRITE(J)                                                                          \
    {                                                                                     \
        typedef Output<J> Leaf;                                                           \
        constexpr int CELL = ITEMS * ELEMENT<Leaf>;                                       \
        constexpr int SCALAR = (int)sizeof(Leaf::Memory);                                 \
        constexpr int ALIGN = Leaf::ALIGNED ? 16 : largest_power(ELEMENT<Leaf>, SCALAR);  \
        u32 packed[(CELL + 3) / 4];                                                       \
        pack<Leaf::Memory, Leaf::Value, ITEMS * Leaf::SCALARS>(packed, values.output##J); \
        const int skew = Leaf::ALIGNED ? 0 : (int)(output_address<J>(P, walk) & 15);      \
        char* cell = stage + Leaf::AT + skew + place * CELL;                              \
        store_cell<CELL, ALIGN>(cell, packed, CELL);                                      \
    }
    OUTPUTS(WRITE)
#undef WRITE
}
