// The scan of [outer, steps, channels] along its steps; channels are adjacent in memory.
//
// A tile is TILE_STEPS steps of BLOCK_CHANNELS channels. A chain is the row of tiles along the
// axis. A main thread has CHANNELS channels and ITEMS consecutive steps of every tile. It copies
// its own cells into a ring of STAGES tiles and refills each cell right after its last use, so that
// loads need no barrier. A tile is waited for in PARTS.
//
// Every warp of a block has one role:
//
//   main         phase A(i + LEAD): load (wait for a tile's copies), reduce, publish to the block:
//                each warp writes its total; phase B(i): look back (take the prefix that another
//                role has written), scan the same cells again, store. PREFIX_ROLES other roles find
//                the prefix:
//   warp_totals  scans the totals of a tile's warps. A lane is a channel, as in the next three
//                roles.
//
// Of packed sequences another role, `boundaries`, finds where they start (boundaries.cuh).
//
// The last of these roles writes for every warp the state before it, the tile's prefix included.
// Where nothing is written but finals (ONLY_FINAL), phase B is for a chain's last tile; of the
// others main waits for the prefix, which keeps the order of the rings, and does not read it.
// MODE says how a carry goes from tile to tile:
//
// SERIAL: a block owns its chains. warp_totals keeps the carry in registers.
//
// CHAINED: tiles are dealt to the blocks in the order of steps, all chains side by side.
//   chained         reads the inclusive prefix of the tile before from its slot, publishes its own.
// For one to two blocks per chain: a hand-over takes a third of a tile's time.
//
// LOOKBACK: `ranks` blocks share a chain. Block r has the tiles r, r + ranks, …: one of each wave
// of `ranks` tiles. A group is `radix` tiles of a wave. warp_totals publishes the tile's aggregate.
//   group_lookback  combines the aggregates of the earlier tiles of this tile's group. In the last
//                   tile of a group it publishes the group's aggregate.
//   wave_lookback   combines the aggregates of the wave's groups: the earlier ones for this tile's
//                   prefix, then the others for the carry into the next wave.
// The prefix is (carry into the wave) ∘ (earlier groups) ∘ (earlier tiles of the group).
//
// The shape alone decides how elements are grouped: results are bitwise equal from run to run.
//
// Why it cannot deadlock:
//  - All blocks run at once (cooperative launch), and every block takes its tiles in ascending
//    order.
//  - A tile's aggregate needs its inputs only: main does A before B, warp_totals waits for main
//    only. A group's aggregate needs those of its tiles, a chained prefix that of an earlier tile.
//  - group_lookback, which publishes groups, never waits for wave_lookback, which reads them.
// Why no slot of a ring is overwritten too early: named barriers, in rings of LEAD + 1, go from
// role to role: TOTALS_READY main → warp_totals; TILE_READY warp_totals → group_lookback or
// chained; GROUP_READY group_lookback → wave_lookback; PREFIX_READY the last role → main. Main
// passes PREFIX_READY(i) and reads the slot before it arrives at TOTALS_READY(i + LEAD + 1).
// warp_totals passes that before it arrives at TILE_READY(i + LEAD + 1), and every later role
// passes the barrier before its own, before they write the same slot again. The bits of boundaries
// have LEAD + 3 places (lanes_boundaries.cuh), handed over by MARKED, a ring of two barriers: the
// role arrives for tile i + 2 after main has reduced tile i.
#pragma once
#include "steps.cuh"
#include "lookback_reference.cuh"
#include "lanes_cells.cuh"
#include "lanes_lookback.cuh"
#include "lanes_boundaries.cuh"

struct Main {
    Thread thread;
    int lane, warp;
    // Of the tiles that are reduced but not yet scanned: the product of the warp's elements before
    // ours.
    State before[LEAD][CHANNELS];

    INLINE_MEMBER void start() {
        const int index = thread_index();
        lane = index % 32, warp = index / 32;
        thread.column = index % COLUMNS, thread.group = index / COLUMNS, thread.lane = lane;
    }
    // Removes the oldest of those products.
    INLINE_MEMBER void take(State (&oldest)[CHANNELS]) {
        UNROLL for (int v = 0; v < CHANNELS; ++v) oldest[v] = before[0][v];
        UNROLL for (int d = 0; d + 1 < LEAD; ++d)
            UNROLL for (int v = 0; v < CHANNELS; ++v) before[d][v] = before[d + 1][v];
    }
};

// ---- load: start the copies of a tile ----

// How many tiles are loaded at once at the start. Where blocks wait for each other, the others
// follow when the first has arrived: it would arrive late if all were in flight.
constexpr int FILLED = WAITS ? 2 : STAGES;

// The copies of a tile of the block, if it `exists`.
INLINE void load_tile(const Params& P, const Thread& thread, char* stage, const Walk& walk,
                      bool exists) {
    if (exists) {
        Cells cells;
        Addresses from;
        cells.find(P, walk, thread);
        find_addresses(from, P, cells);
        if (TEAMS) sync_warp();  // the cells were read
        if (is_whole(P, walk)) copy_tile<true>(P, cells, from, thread, stage);
        else copy_tile<false>(P, cells, from, thread, stage);
    } else {
        UNROLL for (int part = 0; part < PARTS; ++part) copies_commit();
    }
}
INLINE void load_first_tiles(const Params& P, const Thread& thread, char* ring, Walk& loading,
                             int tiles) {
    ROLLED for (int k = 0; k < STAGES; ++k) {
        if (FILLED < STAGES && k == FILLED) copies_wait<(FILLED - 1) * PARTS>();
        load_tile(P, thread, ring + k * STAGE_BYTES, loading, k < tiles);
        loading.next(P);
    }
}

// ---- reduce: the product of a thread's elements of a tile, then of the warp's ----

// Part PART and those after it. After this tile, STAGES − 1 others were loaded if it is the first,
// at least STAGES − 1 − LEAD from then on, and one more if `refilled`.
template <int PART>
INLINE void reduce_parts(const Params& P, const Main& main, State (&total)[CHANNELS],
                         const Cells& cells, ThreadBoundaries& boundaries,
                         const Addresses& from, char* stage, bool first, bool refilled) {
    constexpr int REST = PARTS - 1 - PART;
    if (first) copies_wait<(STAGES - 1) * PARTS + REST>();
    else if (refilled) copies_wait<(STAGES - LEAD) * PARTS + REST>();
    else copies_wait<(STAGES - 1 - LEAD) * PARTS + REST>();
    if (TEAMS) sync_warp();
    UNROLL_BY(UNROLLED) for (int i = part_begin(PART); i < part_begin(PART + 1); ++i) {
        InputWords words;
        read_item(words, P, cells, from, main.thread, stage, i);
        if (HAS_INIT) boundaries.enter(P, cells, i);
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            const Position at =
                boundaries.position(P, cells, i, v, v < cells.channels, false, false);
            const State element = element_at(P, raw_of(words, v), at);
            total[v] = i == 0 ? element : combine(total[v], element);
        }
    }
    if constexpr (PART + 1 < PARTS)
        reduce_parts<PART + 1>(P, main, total, cells, boundaries, from, stage, first, refilled);
}
// The last lanes of the warp get its total.
INLINE void reduce(const Params& P, const Shared& shared, int it, Main& main, const Walk& walk,
                   char* stage, bool first, bool refilled, State (&total)[CHANNELS]) {
    Cells cells;
    Addresses from;
    cells.find(P, walk, main.thread);
    if (ANY_SKEWED) find_addresses(from, P, cells);
    await_bits(it);
    ThreadBoundaries boundaries;
    boundaries.read(P, shared, it, main.thread, cells.step, HAS_INIT);
    reduce_parts<0>(P, main, total, cells, boundaries, from, stage, first, refilled);
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        warp_scan<COLUMNS>(total[v], main.before[LEAD - 1][v], main.lane);
}

// ---- publish: a warp's total, to the role warp_totals ----
INLINE void publish(const Main& main, Shared& shared, int slot, const State (&total)[CHANNELS]) {
    if (main.lane >= 32 - COLUMNS)
        put_states<CHANNELS>(shared.warp_states[slot][main.warp], main.thread.column * CHANNELS,
                             total);
    arrive(TOTALS_READY + slot, TOTALS_READY_THREADS);
}

// ---- look back: what stands before the thread's elements, from what another role has written ----
INLINE void look_back(const Main& main, Shared& shared, int slot, const Walk& walk,
                      State (&carry)[CHANNELS]) {
    wait_for(PREFIX_READY + slot, PREFIX_READY_THREADS);
    // Warp 0 of a chain's first tile has nothing before it.
    if (ENTERS || walk.tile > 0 || main.warp > 0) {
        State before[CHANNELS];
        get_states<CHANNELS>(before, shared.warp_states[slot][main.warp],
                             main.thread.column * CHANNELS);
        UNROLL for (int v = 0; v < CHANNELS; ++v)
            carry[v] = join(true, before[v], main.lane >= COLUMNS, carry[v]);
    }
}

// ---- scan, store, and load into the same cells, step by step ----

// A tile that is scanned: where its outputs go, and the tile that takes its place in the ring.
struct Move {
    Cells cells, next;
    ThreadBoundaries boundaries;
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

template <bool WHOLE>
INLINE void scan(const Params& P, const Cells& cells, ThreadBoundaries& boundaries,
                 State (&carry)[CHANNELS], const InputWords& words, int i, bool first,
                 OutputValues& values) {
    const int channels = WHOLE ? CHANNELS : cells.channels;
    boundaries.enter(P, cells, i);
    UNROLL for (int v = 0; v < CHANNELS; ++v) {
        const bool last = SEGMENTED ? boundaries.ends(i) && (WHOLE || i < cells.left)
                                    : (!WHOLE || i + 1 == ITEMS) && i + 1 == cells.left;
        const Position at = boundaries.position(P, cells, i, v, v < channels, first, last);
        take_step(P, values, v, raw_of(words, v), carry[v], at);
    }
}
template <bool WHOLE>
INLINE void store(const Params& P, const Thread& thread, Move& move, char* stage, int i,
                  const OutputValues& values) {
    const int channels = WHOLE ? CHANNELS : move.cells.channels;
    if (WHOLE || i < move.cells.left) {
#define STORE(J)                                                                         \
    {                                                                                    \
        typedef Cell<Output<J>, CHANNELS> C;                                             \
        u32 packed[C::WORDS];                                                            \
        pack<Output<J>::Memory, Output<J>::Value, C::SCALARS>(packed, values.output##J); \
        if constexpr (WHOLE && way_out(J) >= 0)                                          \
            put_cell<way_out(J)>(packed, thread, stage, i);                              \
        else                                                                             \
            store_cell<C::BYTES, Output<J>::ALIGN>(                                      \
                move.to[J], packed,                                                      \
                channels * Output<J>::SCALARS * (int)sizeof(Output<J>::Memory));         \
    }
        OUTPUTS(STORE)
#undef STORE
    }
    if constexpr (WHOLE && TEAMS) {
        sync_warp();
#define STORE(J)                                                                        \
    if constexpr (way_out(J) >= 0)                                                      \
        store_pieces<way_out(J)>(move.to[J], CHANNELS * P.output_lane[J], thread, stage, i);
        OUTPUTS(STORE)
#undef STORE
    }
    UNROLL for (int j = 0; j < OUTPUT_COUNT; ++j) move.to[j] += move.to_step[j];
}

template <bool WHOLE>
INLINE void load(const Params& P, const Thread& thread, Move& move, char* stage, int i, bool refill,
                 bool commits) {
    if (refill) {
        if (WHOLE && TEAMS) sync_warp();  // the cells were read
        copy_item<WHOLE>(P, move.next, move.later, thread, stage, i);
    }
    if (commits && part_of(i + 1) != part_of(i)) copies_commit();
}

// All steps of a tile. The words of a step are read before the step before it is computed. WHOLE:
// all cells of the tile exist, and of the one that is loaded.
template <bool WHOLE>
INLINE void scan_tile(const Params& P, const Thread& thread, Move& move, State (&carry)[CHANNELS],
                      char* stage, bool begins, bool refill, bool commits) {
    InputWords words;
    read_item(words, P, move.cells, move.from, thread, stage, 0);
    auto step = [&](int i) {
        const InputWords now = words;
        if (i + 1 < ITEMS) read_item(words, P, move.cells, move.from, thread, stage, i + 1);
        OutputValues values;
        scan<WHOLE>(P, move.cells, move.boundaries, carry, now, i, begins && i == 0, values);
        store<WHOLE>(P, thread, move, stage, i, values);
        load<WHOLE>(P, thread, move, stage, i, refill, commits);
    };
    if constexpr (WHOLE) {
        UNROLL_BY(UNROLLED) for (int i = 0; i < ITEMS; ++i) step(i);
    } else {
        ROLLED for (int i = 0; i < ITEMS; ++i) step(i);
    }
}

// Loads the first tiles; then, for every tile: reduce, publish, LEAD tiles later look back, and
// step by step scan, store, load (into the cells of that step). A tile that is not scanned is
// replaced in the ring before the next one is waited for.
INLINE void main_role(const Params& P, Shared& shared, char* ring, int tiles) {
    Main main;
    main.start();
    Walk walk, loading, reducing;  // the tiles that are scanned, loaded and reduced
    walk.start(P), loading.start(P), reducing.start(P);
    RingCursor<STAGES> stage;
    RingCursor<RING> slot;
    RingCursor<STAGES> reducing_stage;
    RingCursor<RING> reducing_slot;
    load_first_tiles(P, main.thread, ring, loading, tiles);
    ROLLED for (int it = -LEAD; it < tiles; ++it) {
        State carry[CHANNELS];
        main.take(carry);
        char* const here = ring + stage.place * STAGE_BYTES;
        const bool refill = it + STAGES < tiles;
        const bool is_reduced_only = it >= 0 && !is_scanned(P, walk.tile);
        if (is_reduced_only) load_tile(P, main.thread, here, loading, refill);
        if (it + LEAD < tiles) {
            State total[CHANNELS];
            reduce(P, shared, it + LEAD, main, reducing,
                   ring + reducing_stage.place * STAGE_BYTES, it == -LEAD, is_reduced_only, total);
            publish(main, shared, reducing_slot.place, total);
            reducing.next(P), reducing_stage.advance(), reducing_slot.advance();
        }
        if (it < 0) continue;
        if (is_reduced_only) {
            wait_for(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        } else {
            Move move;
            move.start(P, walk, loading, main.thread, refill);
            move.boundaries.read(P, shared, it, main.thread, move.cells.step, true);
            const bool begins = !ENTERS && move.cells.step == 0;  // item 0 is the first of the row
            look_back(main, shared, slot.place, walk, carry);
            if (is_whole(P, walk)) {
                const bool apart = refill && !is_whole(P, loading);  // that one needs bounds
                scan_tile<true>(P, main.thread, move, carry, here, begins, refill && !apart,
                                !apart);
                if (TEAMS && apart) sync_warp();  // outputs have left through the cells
                if (apart) copy_tile<false>(P, move.next, move.later, main.thread, here);
            } else {
                scan_tile<false>(P, main.thread, move, carry, here, begins, refill, true);
            }
        }
        walk.next(P), loading.next(P);
        stage.advance(), slot.advance();
    }
    copies_wait<0>();
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    const int warp = thread_index() / 32, tiles = Walk::count(P);
    const u32 tag = WAITS && warp >= WARPS ? launch_tag(P.header) : 0;
    open_barriers(TOTALS_READY, RING, TOTALS_READY_THREADS);
    open_barriers(PREFIX_READY, RING, PREFIX_READY_THREADS);
    if (WAITS) open_barriers(TILE_READY, RING, TILE_READY_THREADS);
    if (MODE == LOOKBACK) open_barriers(GROUP_READY, RING, GROUP_READY_THREADS);
    if (SEGMENTED) open_barriers(MARKED, 2, MARKED_THREADS);
    barriers_opened();
    Watchdog watchdog;
    watchdog.start(P.header, P.alarm, tag);
    if (warp < WARPS) main_role(P, shared, shared_memory() + RING_AT, tiles);
    else if (warp < WARPS + ROLE_WARPS) warp_totals_role(P, shared, warp - WARPS, tiles, tag);
    else if (SEGMENTED && warp == BOUNDARIES_WARP) find_boundaries(P, shared, tiles);
    else if constexpr (WAITS && REFERENCE) {
        if (warp >= WARPS + (PREFIX_ROLES - 1) * ROLE_WARPS)
            reference_role(P, shared, warp - WARPS, tiles, tag, watchdog);
    } else if constexpr (MODE == CHAINED) {
        chained_role(P, shared, warp - WARPS, tiles, tag, watchdog);
    } else if constexpr (MODE == LOOKBACK) {
        if (warp < WARPS + 2 * ROLE_WARPS)
            group_lookback_role(P, shared, warp - WARPS, tiles, tag, watchdog);
        else wave_lookback_role(P, shared, warp - WARPS, tiles, tag, watchdog);
    }
    // The last role of a tile has seen what the others published for it.
    if (WAITS && warp >= WARPS + (PREFIX_ROLES - 1) * ROLE_WARPS && warp < BOUNDARIES_WARP) {
        sync_warp();
        if (thread_index() % 32 == 0)
            finish(P.header, tag, block_count() * ROLE_WARPS, P.slots, P.slot_bytes);
    }
}

LAUNCH_NUMBERS
