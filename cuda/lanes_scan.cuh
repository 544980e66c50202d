// The scan of [outer, steps, channels] along its steps, channels side by side in memory.
//
// A tile is TILE_STEPS steps of BLOCK_CHANNELS channels; a chain is a row of tiles along the axis.
// A main thread has CHANNELS channels and ITEMS consecutive steps of every tile; it copies its own
// cells into a ring of STAGES tiles and refills each right after its last use, so that loads need no
// barrier. A waits for the PARTS of a tile one after another.
//
//   main   A(i+LEAD): reduce a tile that has arrived, hand the warps' totals to the fold warps;
//          B(i): take the prefix of this tile, scan its cells once more from it, store.
//   fold   lane = channel: scan the warps' totals of a tile. Further roles by MODE:
//
// The last role of them leaves for every warp what stands before it, the prefix included.
//
// BLOCK: a block owns its chains. Fold keeps the carry.
//
// RELAY: the tiles of all chains are dealt to the blocks in the order of time.
//   relay  takes the prefix that the tile before handed on in its slot, and hands on its own.
// For one to two blocks per chain: a hand-over takes a third of a tile's time.
//
// AHEAD: `ranks` blocks share a chain; block r has the tiles r, r + ranks, …: one of each wave of
// `ranks` tiles. Groups are `radix` tiles of a wave. Fold publishes the tile's aggregate at once.
//   near   collects the aggregates of the tiles before this one in its group; the last tile of a
//          group publishes the group's aggregate.
//   far    collects the groups' aggregates of the wave: those before this tile for its prefix, then
//          the others: the carry into the next.
// The prefix is (carry into the wave) ∘ (groups before) ∘ (tiles before in the group).
//
// Everything is grouped by the shape alone: results are bitwise equal from run to run.
//
// Why it cannot deadlock: all blocks run (cooperative launch), and every block takes its tiles in
// ascending order. A tile's aggregate waits for its inputs alone (A before B; fold waits for main
// alone), a group's for aggregates of its tiles, a relayed prefix for that of an earlier tile.
// Named barriers, in rings of LEAD + 1: READY main → fold; TOTAL fold → near, relay; NEAR
// near → far; PREFIX fold, far or relay → main. Main passes PREFIX(i) and has read its slot before it
// arrives at READY(i + LEAD + 1), fold passes that before TOTAL(i + LEAD + 1), near and relay pass
// that, and far what follows, before they write the same slots of the rings again. Far waits for
// groups, and near, which publishes one, never waits for far.
#pragma once
#include "steps.cuh"
#include "lanes_memory.cuh"
#include "lanes_prefix.cuh"

struct Main {
    Thread thread;
    int lane, warp;
    // Of the tiles that A has reduced: the elements before ours in the warp.
    State before[LEAD][CHANNELS];
};

// How many tiles are loaded at once. Where blocks wait for each other, the others follow when the first
// has arrived: it would arrive late if all were under way.
constexpr int FILLED = WAITS ? 2 : STAGES;

// Part PART of A and those after it. After this tile, STAGES − 1 others were loaded if it is the
// first, at least STAGES − 1 − LEAD from then on.
template <int PART>
INLINE void reduce_parts(const Params& P, const Main& main, State (&total)[CHANNELS],
                         const Cells& cells, const Addresses& from, char* stage, bool first) {
    constexpr int REST = PARTS - 1 - PART;
    if (first) copies_wait<(STAGES - 1) * PARTS + REST>();
    else copies_wait<(STAGES - 1 - LEAD) * PARTS + REST>();
    UNROLL_BY(UNROLLED) for (int i = part_begin(PART); i < part_begin(PART + 1); ++i) {
        InputWords words;
        read_item(words, P, cells, from, main.thread, stage, i);
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            const Position at = {(int)cells.row, cells.channel + v, v < cells.channels, false,
                                 false,          mark_of(words, v)};
            const State element = element_at(P, raw_of(words, v), at);
            total[v] = i == 0 ? element : combine(total[v], element);
        }
    }
    if constexpr (PART + 1 < PARTS)
        reduce_parts<PART + 1>(P, main, total, cells, from, stage, first);
}

INLINE void reduce_tile(const Params& P, const Main& main, State (&before)[CHANNELS],
                        Shared& shared, const Walk& walk, char* stage, int slot, bool first) {
    Cells cells;
    Addresses from;
    cells.find(P, walk, main.thread);
    if (ANY_SKEWED) find_addresses(from, P, cells);
    State total[CHANNELS];
    reduce_parts<0>(P, main, total, cells, from, stage, first);
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        warp_scan<COLUMNS>(total[v], before[v], main.lane);
    if (main.lane >= 32 - COLUMNS)
        put_states<CHANNELS>(shared.warps[slot][main.warp], main.thread.column * CHANNELS, total);
    arrive(READY + slot, READY_THREADS);
}

// Where a tile's outputs go, and what takes its place in the ring.
struct Move {
    Cells cells, next;
    Addresses from, later;
    char* to[OUTPUT_COUNT + 1];  // a reduction has no outputs
    i64 to_step[OUTPUT_COUNT + 1];

    INLINE_MEMBER void start(const Params& P, const Walk& walk, const Walk& loading,
                             const Thread& thread, bool refill) {
        cells.find(P, walk, thread);
        if (ANY_SKEWED) find_addresses(from, P, cells);
        if (refill) {
            next.find(P, loading, thread);
            find_addresses(later, P, next);
        }
        const i64 t = REVERSE ? P.length - 1 - cells.step : cells.step;
#define AIM(J)                                                                                   \
    to[J] = P.output[J] + outer_offset(P.output_outer[J], P, cells.row) + t * P.output_step[J] + \
            cells.channel * P.output_lane[J];                                                    \
    to_step[J] = REVERSE ? -P.output_step[J] : P.output_step[J];
        OUTPUTS(AIM)
#undef AIM
    }
};

// Step i of B: scan, store, refill. WHOLE: all of it exists.
template <bool WHOLE>
INLINE void scan_item(const Params& P, const Thread& thread, Move& move, State (&carry)[CHANNELS],
                      const InputWords& words, char* stage, int i, bool first, bool refill) {
    const Cells& cells = move.cells;
    const int channels = WHOLE ? CHANNELS : cells.channels;
    OutputValues values;
    UNROLL for (int v = 0; v < CHANNELS; ++v) {
        const u32 mark = mark_of(words, v);
        const bool last = SEGMENTED ? (mark & ENDS) != 0 && (WHOLE || i < cells.left)
                                    : i + 1 == cells.left;
        const Position at = {(int)cells.row, cells.channel + v, v < channels, first, last, mark};
        take_step(P, values, v, raw_of(words, v), carry[v], at);
    }
    if (WHOLE || i < cells.left) {
#define STORE(J)                                                                         \
    {                                                                                    \
        typedef Cell<Output<J>, CHANNELS> C;                                             \
        u32 packed[C::WORDS];                                                            \
        pack<Output<J>::Memory, Output<J>::Value, C::SCALARS>(packed, values.output##J); \
        store_cell<C::BYTES, Output<J>::ALIGN>(                                          \
            move.to[J], packed,                                                          \
            channels * Output<J>::SCALARS * (int)sizeof(Output<J>::Memory));             \
    }
        OUTPUTS(STORE)
#undef STORE
    }
    UNROLL for (int j = 0; j < OUTPUT_COUNT; ++j) move.to[j] += move.to_step[j];
    if (refill) copy_item<WHOLE>(P, move.next, move.later, thread, stage, i);
}

// B of a tile. The words of a step are read before the step before it is computed.
template <bool WHOLE>
INLINE void scan_tile(const Params& P, const Thread& thread, Move& move, State (&carry)[CHANNELS],
                      char* stage, bool begins, bool refill, bool commits) {
    InputWords words;
    read_item(words, P, move.cells, move.from, thread, stage, 0);
    auto one = [&](int i) {
        const InputWords now = words;
        if (i + 1 < ITEMS) read_item(words, P, move.cells, move.from, thread, stage, i + 1);
        scan_item<WHOLE>(P, thread, move, carry, now, stage, i, begins && i == 0, refill);
        if (commits && part_of(i + 1) != part_of(i)) copies_commit();
    };
    if constexpr (WHOLE) {
        UNROLL_BY(UNROLLED) for (int i = 0; i < ITEMS; ++i) one(i);
    } else {
        ROLLED for (int i = 0; i < ITEMS; ++i) one(i);
    }
}

// The copies of a tile that is loaded as number `index`, if there are so many.
INLINE void load_tile(const Params& P, const Thread& thread, char* ring, const Walk& walk, int index,
                      int tiles) {
    if (index < tiles) {
        Cells cells;
        Addresses from;
        cells.find(P, walk, thread);
        find_addresses(from, P, cells);
        char* const stage = ring + index * STAGE_BYTES;
        if (is_whole(P, walk)) copy_tile<true>(P, cells, from, thread, stage);
        else copy_tile<false>(P, cells, from, thread, stage);
    } else {
        UNROLL for (int part = 0; part < PARTS; ++part) copies_commit();
    }
}

INLINE void main_role(const Params& P, Shared& shared, char* ring, int tiles) {
    Main main;
    const int index = thread_index();
    main.lane = index % 32, main.warp = index / 32;
    main.thread.column = index % COLUMNS, main.thread.group = index / COLUMNS;
    Walk walk, loading, reducing;
    walk.start(P), loading.start(P), reducing.start(P);
    int stage = 0, slot = 0, ahead_stage = 0, ahead_slot = 0;
    ROLLED for (int k = 0; k < STAGES; ++k) {
        if (FILLED < STAGES && k == FILLED) copies_wait<(FILLED - 1) * PARTS>();
        load_tile(P, main.thread, ring, loading, k, tiles);
        loading.next(P);
    }
    ROLLED for (int it = -LEAD; it < tiles; ++it) {
        State carry[CHANNELS];
        UNROLL for (int v = 0; v < CHANNELS; ++v) carry[v] = main.before[0][v];
        UNROLL for (int d = 0; d + 1 < LEAD; ++d)
            UNROLL for (int v = 0; v < CHANNELS; ++v) main.before[d][v] = main.before[d + 1][v];
        if (it + LEAD < tiles) {
            reduce_tile(P, main, main.before[LEAD - 1], shared, reducing,
                        ring + ahead_stage * STAGE_BYTES, ahead_slot, it == -LEAD);
            reducing.next(P);
            if (++ahead_stage == STAGES) ahead_stage = 0;
            if (++ahead_slot == RING) ahead_slot = 0;
        }
        if (it < 0) continue;
        const bool refill = it + STAGES < tiles;
        Move move;
        move.start(P, walk, loading, main.thread, refill);
        const bool begins = !ENTERS && move.cells.step == 0;  // item 0 is the first of the row
        wait_for(PREFIX + slot, PREFIX_THREADS);
        // Warp 0 of a chain's first tile has nothing before it.
        if (ENTERS || walk.tile > 0 || main.warp > 0) {
            State before[CHANNELS];
            get_states<CHANNELS>(before, shared.warps[slot][main.warp],
                                 main.thread.column * CHANNELS);
            UNROLL for (int v = 0; v < CHANNELS; ++v)
                carry[v] = join(true, before[v], main.lane >= COLUMNS, carry[v]);
        }
        char* const here = ring + stage * STAGE_BYTES;
        if (is_whole(P, walk)) {
            const bool apart = refill && !is_whole(P, loading);
            scan_tile<true>(P, main.thread, move, carry, here, begins, refill && !apart, !apart);
            if (apart) copy_tile<false>(P, move.next, move.later, main.thread, here);
        } else {
            scan_tile<false>(P, main.thread, move, carry, here, begins, refill, true);
        }
        walk.next(P), loading.next(P);
        if (++stage == STAGES) stage = 0;
        if (++slot == RING) slot = 0;
    }
    copies_wait<0>();
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    const int warp = thread_index() / 32, tiles = Walk::count(P);
    const u32 tag = WAITS && warp >= WARPS ? launch_tag(P.header) : 0;
    open_barriers(READY, RING, READY_THREADS), open_barriers(PREFIX, RING, PREFIX_THREADS);
    if (MODE != BLOCK) open_barriers(TOTAL, RING, TOTAL_THREADS);
    if (MODE == AHEAD) open_barriers(NEAR, RING, NEAR_THREADS);
    barriers_opened();
    Watchdog watchdog;
    watchdog.start(P.header, P.alarm, tag);
    if (warp < WARPS) main_role(P, shared, shared_memory() + RING_AT, tiles);
    else if (warp < WARPS + FOLDERS) fold_role(P, shared, warp - WARPS, tiles, tag);
    else if constexpr (MODE == RELAY) relay_role(P, shared, warp - WARPS, tiles, tag, watchdog);
    else if constexpr (MODE == AHEAD) {
        if (warp < WARPS + 2 * FOLDERS) near_role(P, shared, warp - WARPS, tiles, tag, watchdog);
        else far_role(P, shared, warp - WARPS, tiles, tag, watchdog);
    }
    // The last role of a tile has seen what the others published for it.
    if (WAITS && warp >= WARPS + (ROLES - 1) * FOLDERS) {
        sync_warp();
        if (thread_index() % 32 == 0)
            finish(P.header, tag, block_count() * FOLDERS, P.slots, P.slot_bytes);
    }
}

LAUNCH_NUMBERS
