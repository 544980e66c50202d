// Tiles of lanes_scan.cuh and of walks: shape, place in shared memory, addresses of their cells.
#pragma once
#include "ring.cuh"

constexpr int COLUMNS = BLOCK_CHANNELS / CHANNELS;  // threads along the channels
constexpr int GROUPS = THREADS / COLUMNS;           // threads along the steps
constexpr int TILE_STEPS = GROUPS * ITEMS;
constexpr int WARPS = THREADS / 32;
constexpr int ROLE_WARPS = (BLOCK_CHANNELS + 31) / 32;  // warps of each further role
constexpr bool WAITS = MODE == CHAINED || MODE == LOOKBACK;
// Besides main.
constexpr int PREFIX_ROLES = MODE == LOOKBACK ? 3 : MODE == CHAINED ? 2 : MODE == SERIAL ? 1 : 0;
// The warp behind those, which finds the boundaries of packed sequences.
constexpr int BOUNDARIES_WARP = WARPS + ROLE_WARPS * PREFIX_ROLES;
constexpr int BOUNDARY_WARPS = SEGMENTED ? 1 : 0;
constexpr int ALL_THREADS = 32 * (BOUNDARIES_WARP + BOUNDARY_WARPS);
static_assert(COLUMNS <= 32 && 32 % COLUMNS == 0, "a warp spans whole rows of a tile");
static_assert(THREADS % COLUMNS == 0 && (MODE == WALKED ? GROUPS == 1 : THREADS % 64 == 0),
              "tile shape");
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
    // After `steps` calls of next.
    static INLINE_MEMBER Walk at(const Params& P, int steps) {
        Walk walk;
        walk.start(P);
        if (MODE == LOOKBACK) {
            walk.tile += steps * P.ranks;
        } else if (MODE == CHAINED) {
            const int index = block_index() + steps * block_count();
            walk.tile = index / P.chains;
            walk.chain = index - walk.tile * P.chains;
        } else {
            const int chains = steps / P.tiles;
            walk.tile = steps - chains * P.tiles;
            walk.chain += chains * block_count();
        }
        return walk;
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
