// The scan of [rows, steps] along contiguous steps.
//
// A tile is TILE_STEPS steps of one row; a main thread has ITEMS consecutive ones. Tiles go through
// a ring of STAGES in shared memory, moved by bulk copies.
//
// Every warp of a block has one role:
//
//   load         one thread: bulk loads of CHUNK steps each, at most FLIGHT in flight (more of them
//                delay the polls of other blocks)
//   main         phase A(i + LEAD): load (wait for a tile's chunks), reduce, publish to the block:
//                each warp writes its total; phase B(i): look back (take the prefix that another
//                role has written), scan the same elements again, store (to shared memory)
//   warp_totals  scans the totals of a tile's warps
//   lookback     finds the prefixes of tiles, where blocks share rows
//   store        one warp: bulk stores, after which the stage is free
//   boundaries   of packed sequences, some warps: find where they start (boundaries.cuh)
//
// SERIAL: a block owns its rows. warp_totals keeps the carry, and writes the state before every
// warp.
//
// LOOKBACK: all blocks share all rows, tile by tile. With G blocks,
// prefix(tile) = prefix(tile − G) ∘ aggregates of the tiles tile − G … tile − 1.
// LOOKBACKS warps take the tiles of a block in turn. warp_totals publishes aggregates, once per
// tile.
//
// The shape and the grid alone decide how elements are grouped: results are bitwise equal from run
// to run.
//
// Why it cannot deadlock:
//  - All blocks run at once (cooperative launch), and every block takes its tiles in ascending
//    order.
//  - A tile's aggregate needs its inputs and a free stage. The stage is free once tile i − STAGES
//    is stored, which needs aggregates of lower tiles only (LEAD < STAGES).
//  - The look-back of tile i starts when tile i + LATE is reduced, which main does before B(i)
//    (LATE < LEAD). Before that few slots are ready, and polls take instructions and bandwidth.
// Why no slot of a ring is overwritten too early: named barriers, in rings of LEAD + 1, go from
// role to role: TOTALS_READY main → warp_totals, PREFIX_READY warp_totals or lookback → main. Main
// reads its slot before it arrives at TOTALS_READY(i + LEAD + 1); warp_totals waits for that before
// it writes the slot again, and lookback waits for warp_totals (gates `scanned`). A prefix that one
// look-back warp hands to the next (`handed`) has been read when its place is written again,
// LOOKBACKS tiles later. The bits of boundaries have a place per stage: they are handed over by the
// gate `marked`, and the place is free when main has scanned the stage (`done`).
//
// Rows need not begin at multiples of 16 bytes: the aligned bytes around a tile are copied, and
// elements are read at their offset, the skew. Leaves whose tiles are all aligned skip that.
#pragma once
#include "steps.cuh"
#include "lookback_reference.cuh"
#include "rows_memory.cuh"
#include "rows_copy.cuh"
#include "rows_lookback.cuh"
#include "rows_boundaries.cuh"

// How many of the thread's ITEMS steps exist; ITEMS + 1 if the step after them does too.
INLINE int steps_left(const Params& P, const Walk& walk) {
    const i64 length = P.length + skipped(P);
    const i64 steps = length - (i64)walk.tile * TILE_STEPS - thread_index() * ITEMS;
    return steps < 0 ? 0 : steps <= ITEMS ? (int)steps : ITEMS + 1;
}
// How many of the thread's first steps do not exist.
INLINE int steps_skipped(const Params& P, const Walk& walk) {
    return walk.tile == 0 && thread_index() == 0 ? skipped(P) : 0;
}

// Whether the first step that exists is marked as such. A packed sequence starts there anyway.
constexpr bool RESTARTS = ROUND > 1 && !SEGMENTED;

// ---- load: wait for the chunks of a tile, read the thread's elements ----
INLINE void load(const Params& P, Shared& shared, const Walk& walk, const char* ring,
                 const RingCursor<STAGES>& stage, InputWords& words) {
    await_items(&shared.full[stage.place * CHUNKS], stage.parity);
    read_items(words, P, walk, ring + stage.place * STAGE_BYTES);
    await_bits(shared, stage);
}

// ---- reduce: the product of the thread's elements, then of the warp's up to ours and before ours
// ----
INLINE State reduce(const Params& P, const Shared& shared, int stage, const Walk& walk,
                    const InputWords& words, State& before) {
    const int left = steps_left(P, walk), skip = steps_skipped(P, walk);
    const u32 begin = 1u << skip;
    ThreadBoundaries boundaries(shared, stage, walk);
    if (HAS_INIT) boundaries.number(P, shared, stage);
    State total;
    UNROLL for (int i = 0; i < ITEMS; ++i) {
        if (HAS_INIT) boundaries.enter(P, i);
        const Position at = boundaries.position(P, walk, i, i >= skip && i < left, false, false);
        const State element = element_at(P, raw_of(words, item(i)), at);
        const bool is_first = i == 0 || (RESTARTS && i < ROUND && any_bits(begin, 1u << i));
        total = is_first ? element : follow(total, element, at);
    }
    if (boundaries.any_start()) cut_off(total);
    warp_scan<1>(total, before, thread_index() % 32);
    return total;
}

// ---- publish: a warp's total, to the role warp_totals ----
INLINE void publish(Shared& shared, int slot, const State& total) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    if (lane == 31) put_state(shared.warp_states[slot][warp], total);
    arrive(TOTALS_READY + slot, TOTALS_READY_THREADS);
}

// ---- look back: what stands before the thread's elements, from what another role has written ----
INLINE void look_back(Shared& shared, int slot, const Walk& walk, State& carry) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    wait_for(PREFIX_READY + slot, PREFIX_READY_THREADS);
    // Warp 0 of a row's first tile has nothing before it.
    if (ENTERS || walk.tile > 0 || warp > 0)
        carry = join(true, get_state(shared.warp_states[slot][warp]), lane > 0, carry);
}

INLINE void scan(const Params& P, const Shared& shared, int stage, const Walk& walk,
                 const InputWords& words, bool begins, int left, State& carry,
                 OutputValues& values) {
    const int skip = steps_skipped(P, walk);
    ThreadBoundaries boundaries(shared, stage, walk);
    boundaries.number(P, shared, stage);
    UNROLL for (int i = 0; i < ITEMS; ++i) {
        boundaries.enter(P, i);
        const bool last = SEGMENTED ? boundaries.ends(i) && i < left : i + 1 == left;
        const bool first = begins && i == skip, exists = i >= skip && i < left;
        const Position at = boundaries.position(P, walk, i, exists, first, last);
        const State before = carry;
        take_step(P, values, item(i), raw_of(words, item(i)), carry, at);
        if (ENTERS && i + 1 < ROUND && i < skip) carry = before;
    }
}

// ---- store: to shared memory, where the role store takes them ----
INLINE void store(const Params& P, Shared& shared, const Walk& walk, char* ring, int stage,
                  const OutputValues& values) {
    write_items(values, P, walk, ring + stage * STAGE_BYTES);
    bulk_fence();
    gate_arrive_warp(&shared.done[stage]);
}

// For every tile: load, reduce, publish, and LEAD tiles later look back, scan, store. A tile that is
// not scanned is free then: its prefix is waited for, which keeps the order of the rings.
INLINE void main_role(const Params& P, Shared& shared, char* ring, int tiles) {
    Walk walk, reducing;  // the tiles that are scanned and reduced
    walk.start(P), reducing.start(P);
    State before[LEAD];  // of the tiles that are reduced but not yet scanned
    RingCursor<STAGES> stage;
    RingCursor<RING> slot;
    RingCursor<STAGES> reducing_stage;
    RingCursor<RING> reducing_slot;
    ROLLED for (int it = -LEAD; it < tiles; ++it) {
        State carry = before[0];
        UNROLL for (int d = 0; d + 1 < LEAD; ++d) before[d] = before[d + 1];
        if (it + LEAD < tiles) {
            InputWords words;
            load(P, shared, reducing, ring, reducing_stage, words);
            const State total =
                reduce(P, shared, reducing_stage.place, reducing, words, before[LEAD - 1]);
            publish(shared, reducing_slot.place, total);
            reducing_stage.advance(), reducing_slot.advance(), reducing.next(P);
        }
        if (it < 0) continue;
        if (!is_scanned(P, walk.tile)) {
            wait_for(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
            gate_arrive_warp(&shared.done[stage.place]);
            stage.advance(), slot.advance(), walk.next(P);
            continue;
        }
        const bool begins = !ENTERS && (i64)walk.tile * TILE_STEPS + thread_index() * ITEMS == 0;
        const int left = steps_left(P, walk);
        InputWords words;
        OutputValues values;
        read_items(words, P, walk, ring + stage.place * STAGE_BYTES);
        look_back(shared, slot.place, walk, carry);
        if (!ONLY_FINALS || ThreadBoundaries(shared, stage.place, walk).any_end())
            scan(P, shared, stage.place, walk, words, begins, left, carry, values);
        store(P, shared, walk, ring, stage.place, values);
        stage.advance(), slot.advance(), walk.next(P);
    }
}

// One thread opens all gates: the lanes of a warp, side by side, take 2000 cycles longer.
INLINE void open_gates(Shared& shared) {
    UNROLL for (int k = 0; k < STAGES * CHUNKS; ++k) gate_open(&shared.full[k], 1);
    UNROLL for (int k = 0; k < STAGES; ++k) {
        gate_open(&shared.done[k], WARPS * WARP_ARRIVALS);
        gate_open(&shared.vacant[k], WARP_ARRIVALS);
    }
    UNROLL for (int k = 0; k < LOOKBACKS; ++k) gate_open(&shared.handed[k], 1);
    UNROLL for (int k = 0; k < RING; ++k) gate_open(&shared.scanned[k], WARP_ARRIVALS);
    open_boundary_gates(shared);
    gates_opened();
    bulk_fence();
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    const int warp = thread_index() / 32, tiles = Walk::count(P);
    const u32 tag = WAITS && warp >= WARPS ? launch_tag(P.header) : 0;
    open_barriers(OPEN, 1, ALL_THREADS);
    open_barriers(TOTALS_READY, RING, TOTALS_READY_THREADS);
    open_barriers(PREFIX_READY, RING, PREFIX_READY_THREADS);
    barriers_opened();
    if (warp == LOAD_WARP) {  // which starts loading without waiting for the others
        if (thread_index() % 32 == 0) open_gates(shared);
        arrive(OPEN, ALL_THREADS);
    } else {
        wait_for(OPEN, ALL_THREADS);
    }
    Watchdog watchdog;
    watchdog.start(P.header, P.alarm, tag);
    if (warp < WARPS) main_role(P, shared, ring, tiles);
    else if (warp == TOTALS_WARP) warp_totals_role(P, shared, tiles, tag);
    else if (warp == LOAD_WARP) {
        if (thread_index() % 32 == 0) load_role(P, shared, ring, tiles);
    } else if (warp == STORE_WARP) store_role(P, shared, ring, tiles);
    else if (SEGMENTED && warp >= BOUNDARIES_WARP)
        find_boundaries(P, shared, warp - BOUNDARIES_WARP, tiles);
    else if constexpr (WAITS) {
        if constexpr (REFERENCE) {
            if (warp == FIRST_LOOKBACK_WARP) reference_role(P, shared, tiles, tag, watchdog);
        } else {
            lookback_role(P, shared, warp - FIRST_LOOKBACK_WARP, tiles, tag, watchdog);
        }
        sync_warp();
        if (thread_index() % 32 == 0)
            finish(P.header, tag, block_count() * LOOKBACKS, P.slots, P.slot_bytes);
    }
}

LAUNCH_NUMBERS
