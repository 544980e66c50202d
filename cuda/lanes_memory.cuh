// Tiles of lanes_scan.cuh: shape, place in shared memory, addresses of their cells.
#pragma once
#include "ring.cuh"

constexpr int COLUMNS = BLOCK_CHANNELS / CHANNELS;  // threads along the channels
constexpr int GROUPS = THREADS / COLUMNS;           // threads along the steps
constexpr int TILE_STEPS = GROUPS * ITEMS;
constexpr int WARPS = THREADS / 32;
constexpr int ROLE_WARPS = (BLOCK_CHANNELS + 31) / 32;  // warps of each further role
constexpr bool WAITS = MODE != SERIAL;
constexpr int PREFIX_ROLES = MODE == LOOKBACK ? 3 : MODE == CHAINED ? 2 : 1;  // besides main
// The warp behind those, which finds the boundaries of packed sequences.
constexpr int BOUNDARIES_WARP = WARPS + ROLE_WARPS * PREFIX_ROLES;
constexpr int BOUNDARY_WARPS = SEGMENTED ? 1 : 0;
constexpr int ALL_THREADS = 32 * (BOUNDARIES_WARP + BOUNDARY_WARPS);
static_assert(COLUMNS <= 32 && 32 % COLUMNS == 0, "a warp spans whole rows of a tile");
static_assert(THREADS % COLUMNS == 0 && THREADS % 64 == 0, "tile shape");
constexpr int RING = LEAD + 1;
static_assert(LEAD >= 1 && LEAD < STAGES && (1 + PREFIX_ROLES) * RING + 2 * BOUNDARY_WARPS < 16,
              "stages and barriers");
constexpr int TOTALS_READY = 1, PREFIX_READY = 1 + RING;
constexpr int TILE_READY = 1 + 2 * RING, GROUP_READY = 1 + 3 * RING;
constexpr int MARKED = 1 + (1 + PREFIX_ROLES) * RING, MARKED_THREADS = THREADS + 32;
constexpr int TOTALS_READY_THREADS = THREADS + 32 * (ROLE_WARPS + BOUNDARY_WARPS);
constexpr int PREFIX_READY_THREADS = THREADS + 32 * ROLE_WARPS;
constexpr int TILE_READY_THREADS = 2 * 32 * ROLE_WARPS, GROUP_READY_THREADS = TILE_READY_THREADS;

// A tile is waited for in PARTS, one after another, where its copies were started just before. Each
// part is one group of asynchronous copies.
constexpr int PARTS = STAGES - LEAD == 1 && UNROLLED == ITEMS ? least(4, ITEMS) : 1;
constexpr int part_of(int item) { return item * PARTS / ITEMS; }
constexpr int part_begin(int part) { return (part * ITEMS + PARTS - 1) / PARTS; }

// A leaf's region of a stage: Leaf::AT is its first byte, Leaf::GROUP the bytes of a group of
// steps. Both, and struct Shared, are generated (`SharedMemory` in kernel.py).
template <class Leaf>
struct Region {
    typedef ::Cell<Leaf, CHANNELS> Cell;
    static constexpr int ROW = COLUMNS * Cell::STRIDE;
    static_assert(ITEMS * ROW <= Leaf::GROUP, "groups do not overlap");
};

// The words of one state per channel, in shared memory by word and channel.
template <int COUNT>
INLINE void put_states(u32 (*to)[BLOCK_CHANNELS], int channel, const State* states) {
    u32 w[COUNT][WORDS];
    UNROLL for (int v = 0; v < COUNT; ++v) to_words(states[v], w[v]);
    UNROLL for (int k = 0; k < WORDS; ++k) {
        u32 row[COUNT];
        UNROLL for (int v = 0; v < COUNT; ++v) row[v] = w[v][k];
        constexpr int WIDTH = largest_power(4 * COUNT, 16);
        UNROLL for (int v = 0; v < COUNT; v += WIDTH / 4)
            store<WIDTH>((char*)&to[k][channel + v], row + v);
    }
}
template <int COUNT>
INLINE void get_states(State* states, const u32 (*from)[BLOCK_CHANNELS], int channel) {
    u32 w[COUNT][WORDS];
    UNROLL for (int k = 0; k < WORDS; ++k) {
        u32 row[COUNT];
        constexpr int WIDTH = largest_power(4 * COUNT, 16);
        UNROLL for (int v = 0; v < COUNT; v += WIDTH / 4)
            load<WIDTH>(row + v, (const char*)&from[k][channel + v]);
        UNROLL for (int v = 0; v < COUNT; ++v) w[v][k] = row[v];
    }
    UNROLL for (int v = 0; v < COUNT; ++v) states[v] = from_words(w[v]);
}

// The tiles of a block, in the order in which it takes them.
struct Walk {
    int chain, tile;
    INLINE_MEMBER void start(const Params& P) {
        chain = WAITS ? block_index() % P.chains : block_index();
        tile = WAITS ? block_index() / P.chains : 0;
    }
    INLINE_MEMBER void next(const Params& P) {
        if (MODE == LOOKBACK) {
            tile += P.ranks;
        } else if (MODE == CHAINED) {  // block_count() tiles on, all chains of a step in turn
            tile += P.ranks;
            chain += P.rest;
            if (chain >= P.chains) chain -= P.chains, ++tile;
        } else if (++tile == P.tiles) {
            tile = 0;
            chain += block_count();
        }
    }
    static INLINE_MEMBER int count(const Params& P) {
        if (MODE == LOOKBACK) return (P.tiles - block_index() / P.chains + P.ranks - 1) / P.ranks;
        if (MODE == CHAINED)
            return (P.chains * P.tiles - block_index() + block_count() - 1) / block_count();
        return (P.chains - block_index() + block_count() - 1) / block_count() * P.tiles;
    }
};

// The row of a chain: chain / channel_blocks.
INLINE int row_of(const Params& P, int chain) {
    return (int)((u64)(u32)chain * P.blocks_inverse >> P.blocks_shift);
}
// Whether all cells of a tile exist, those of shifted leaves included.
INLINE bool is_whole(const Params& P, const Walk& walk) {
    const int block = walk.chain - row_of(P, walk.chain) * P.channel_blocks;
    return (i64)(walk.tile + 1) * TILE_STEPS + (ANY_SHIFTED ? 1 : 0) <= P.length &&
           (i64)(block + 1) * BLOCK_CHANNELS <= P.channels;
}

struct Thread {
    int column, group;
    // The thread's cell of leaf J at an item.
    template <int J>
    INLINE_MEMBER char* cell(char* stage, int item) const {
        typedef Region<Input<J>> R;
        return stage + Input<J>::AT + group * Input<J>::GROUP + item * R::ROW +
               column * R::Cell::STRIDE;
    }
};

// The position of a thread's cells in one tile: row, first channel and first step.
struct Cells {
    i64 row, channel, step;
    int channels;  // how many of its channels exist
    int left;      // how many of its ITEMS steps exist; ITEMS + 1 if the step after them does too

    INLINE_MEMBER void find(const Params& P, const Walk& walk, const Thread& thread) {
        const int m = row_of(P, walk.chain);
        row = m;
        channel = (i64)(walk.chain - m * P.channel_blocks) * BLOCK_CHANNELS +
                  thread.column * CHANNELS;
        step = (i64)walk.tile * TILE_STEPS + thread.group * ITEMS;
        const i64 more = P.channels - channel;
        channels = more < 0 ? 0 : more < CHANNELS ? (int)more : CHANNELS;
        const i64 steps = P.length - step;
        left = steps < 0 ? 0 : steps <= ITEMS ? (int)steps : ITEMS + 1;
    }
    // The address of leaf J at item 0, as if it existed.
    template <int J>
    INLINE_MEMBER const char* address(const Params& P) const {
        const i64 at = step + (Input<J>::SHIFTED ? 1 : 0);
        const i64 t = REVERSE ? P.length - 1 - at : at;
        return P.input[J] + outer_offset(P.input_outer[J], P, row) + t * P.input_step[J] +
               channel * P.input_lane[J];
    }
    // The address of leaf J at item i, and how many of its bytes exist. `at` is the address if the
    // step exists; else it is that of the boundary value, or nothing is copied.
    template <int J>
    INLINE_MEMBER const char* source(const Params& P, const char* at, int i, int& valid) const {
        const int k = i + (Input<J>::SHIFTED ? 1 : 0);
        valid = k < left ? (Input<J>::ONE ? (channels > 0 ? 1 : 0) : channels) *
                               Input<J>::SCALARS * (int)sizeof(typename Input<J>::Memory)
                         : 0;
        if constexpr (Input<J>::BOUNDARY >= 0) {
            if (k == left) {
                valid = (Input<J>::ONE ? (channels > 0 ? 1 : 0) : channels) * Input<J>::SCALARS *
                        (int)sizeof(typename Input<J>::Memory);
                return P.boundary[Input<J>::BOUNDARY] +
                       outer_offset(P.boundary_outer[Input<J>::BOUNDARY], P, row) +
                       channel * P.boundary_lane[Input<J>::BOUNDARY];
            }
        }
        return valid > 0 ? at : P.input[J];
    }
};

struct Addresses {
    const char* input[INPUT_COUNT];
};

INLINE void find_addresses(Addresses& a, const Params& P, const Cells& cells) {
#define FIND(J) a.input[J] = cells.address<J>(P);
    INPUTS(FIND)
#undef FIND
}
// Starts the copies of one step, and moves the addresses to the next. WHOLE: all cells exist.
template <bool WHOLE>
INLINE void copy_item(const Params& P, const Cells& cells, Addresses& a, const Thread& thread,
                      char* stage, int item) {
#define COPY(J)                                                                            \
    {                                                                                      \
        typedef Region<Input<J>>::Cell C;                                                  \
        char* cell = thread.cell<J>(stage, item);                                          \
        if constexpr (WHOLE) {                                                             \
            C::copy(cell, a.input[J], C::BYTES);                                           \
        } else {                                                                           \
            int valid;                                                                     \
            const char* from = cells.source<J>(P, a.input[J], item, valid);                \
            C::copy(cell, from, valid);                                                    \
        }                                                                                  \
        a.input[J] += REVERSE ? -P.input_step[J] : P.input_step[J];                        \
    }
    INPUTS(COPY)
#undef COPY
}
// Starts the copies of a tile, one group of copies for each part.
template <bool WHOLE>
INLINE void copy_tile(const Params& P, const Cells& cells, Addresses& a, const Thread& thread,
                      char* stage) {
    auto one = [&](int i) {
        copy_item<WHOLE>(P, cells, a, thread, stage, i);
        if (part_of(i + 1) != part_of(i)) copies_commit();
    };
    if constexpr (WHOLE) {
        UNROLL for (int i = 0; i < ITEMS; ++i) one(i);
    } else {
        ROLLED for (int i = 0; i < ITEMS; ++i) one(i);
    }
}
// Reads the words of a step. Addresses are needed only for skewed leaves.
INLINE void read_item(InputWords& words, const Params& P, const Cells& cells, const Addresses& a,
                      const Thread& thread, char* stage, int item) {
#define READ(J)                                                                                \
    {                                                                                          \
        const char* from = 0;                                                                  \
        if constexpr (Region<Input<J>>::Cell::SKEWED) {                                        \
            int valid;                                                                         \
            from = cells.source<J>(P, a.input[J] + (REVERSE ? -item : item) * P.input_step[J], \
                                   item, valid);                                               \
        }                                                                                      \
        Region<Input<J>>::Cell::read(words.input##J, thread.cell<J>(stage, item), from);       \
    }
    INPUTS(READ)
#undef READ
}
