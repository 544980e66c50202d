// The scan of [rows, steps] along contiguous steps.
//
// A tile is TILE_STEPS steps of one row; a main thread has ITEMS consecutive ones. Tiles go through a
// ring of STAGES in shared memory, moved by bulk copies.
//
// Every warp of a block has one role:
//
//   load         one thread: bulk loads of CHUNK steps each, at most FLIGHT in flight (more of them
//                delay the polls of other blocks)
//   main         phase A(i + LEAD): load (wait for a tile's chunks), reduce, publish to the block: each
//                warp writes its total; phase B(i): look back (take the prefix that another role has
//                written), scan the same elements again, store (to shared memory)
//   warp_totals  scans the totals of a tile's warps
//   lookback     finds the prefixes of tiles, where blocks share rows
//   store        one warp: bulk stores, after which the stage is free
//
// SERIAL: a block owns its rows. warp_totals keeps the carry, and writes the state before every warp.
//
// LOOKBACK: all blocks share all rows, tile by tile. With G blocks,
// prefix(tile) = prefix(tile − G) ∘ aggregates of the tiles tile − G … tile − 1.
// LOOKBACKS warps take the tiles of a block in turn. warp_totals publishes aggregates, once per tile.
//
// The shape and the grid alone decide how elements are grouped: results are bitwise equal from run to
// run.
//
// Why it cannot deadlock:
//  - All blocks run at once (cooperative launch), and every block takes its tiles in ascending order.
//  - A tile's aggregate needs its inputs and a free stage. The stage is free once tile i − STAGES is
//    stored, which needs aggregates of lower tiles only (LEAD < STAGES).
//  - The look-back of tile i starts when tile i + LATE is reduced, which main does before B(i)
//    (LATE < LEAD). Before that few slots are ready, and polls take instructions and bandwidth.
// Why no slot of a ring is overwritten too early: named barriers, in rings of LEAD + 1, go from role to
// role: TOTALS_READY main → warp_totals, PREFIX_READY warp_totals or lookback → main. Main reads its slot
// before it arrives at TOTALS_READY(i + LEAD + 1); warp_totals waits for that before it writes the slot
// again, and lookback waits for warp_totals (gates `scanned`). A prefix that one look-back warp hands to
// the next (`handed`) has been read when its place is written again, LOOKBACKS tiles later.
//
// Rows need not begin at multiples of 16 bytes: the aligned bytes around a tile are copied, and
// elements are read at their offset, the skew. Leaves whose tiles are all aligned skip that.
#pragma once
#include "steps.cuh"
#include "rows_memory.cuh"
#include "rows_copy.cuh"
#include "rows_prefix.cuh"

// How many of the thread's steps exist, and of those after them, up to one.
INLINE int steps_left(const Params& P, const Walk& walk) {
    const i64 steps = P.length - (i64)walk.tile * TILE_STEPS - thread_index() * ITEMS;
    return steps < 0 ? 0 : steps <= ITEMS ? (int)steps : ITEMS + 1;
}

// Reduces a tile; returns the elements before ours in the warp.
INLINE State reduce_tile(const Params& P, Shared& shared, const Walk& walk, const char* ring,
                         const RingCursor<STAGES>& stage, const RingCursor<RING>& slot) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    await_items(&shared.full[stage.place * CHUNKS], stage.parity);
    InputWords words;
    read_items(words, P, walk, ring + stage.place * STAGE_BYTES);
    const int left = steps_left(P, walk);
    State total;
    UNROLL for (int i = 0; i < ITEMS; ++i) {
        const Position at = {walk.row, 0, i < left, false, false, mark_of(words, item(i))};
        const State element = element_at(P, raw_of(words, item(i)), at);
        total = i == 0 ? element : combine(total, element);
    }
    State before;
    warp_scan<1>(total, before, lane);
    if (lane == 31) put_state(shared.warp_states[slot.place][warp], total);
    arrive(TOTALS_READY + slot.place, TOTALS_READY_THREADS);
    return before;
}

INLINE void main_role(const Params& P, Shared& shared, char* ring, int tiles) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
    Walk walk, reducing;
    walk.start(P), reducing.start(P);
    State before[LEAD];
    RingCursor<STAGES> stage;
    RingCursor<RING> slot;
    RingCursor<STAGES> reducing_stage;
    RingCursor<RING> reducing_slot;
    ROLLED for (int it = -LEAD; it < tiles; ++it) {
        State carry = before[0];
        UNROLL for (int d = 0; d + 1 < LEAD; ++d) before[d] = before[d + 1];
        if (it + LEAD < tiles) {
            before[LEAD - 1] =
                reduce_tile(P, shared, reducing, ring, reducing_stage, reducing_slot);
            reducing_stage.advance(), reducing_slot.advance();
            reducing.next(P);
        }
        if (it < 0) continue;
        const i64 step = (i64)walk.tile * TILE_STEPS + thread * ITEMS;
        char* const here = ring + stage.place * STAGE_BYTES;
        const bool begins = !ENTERS && step == 0;
        const int left = steps_left(P, walk);
        InputWords words;
        OutputValues values;
        read_items(words, P, walk, here);
        wait_for(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        // Warp 0 of a row's first tile has nothing before it.
        if (ENTERS || walk.tile > 0 || warp > 0)
            carry = join(true, get_state(shared.warp_states[slot.place][warp]), lane > 0, carry);
        UNROLL for (int i = 0; i < ITEMS; ++i) {
            const u32 mark = mark_of(words, item(i));
            const bool last = SEGMENTED ? (mark & ENDS) != 0 && i < left : i + 1 == left;
            const Position at = {walk.row, 0, i < left, begins && i == 0, last, mark};
            take_step(P, values, item(i), raw_of(words, item(i)), carry, at);
        }
        write_items(values, P, walk, here);
        bulk_fence();
        gate_arrive_warp(&shared.done[stage.place]);
        stage.advance(), slot.advance();
        walk.next(P);
    }
}

// By one thread, all in a row: by a warp's lanes side by side it takes 2000 cycles more.
INLINE void open_gates(Shared& shared) {
    UNROLL for (int k = 0; k < STAGES * CHUNKS; ++k) gate_open(&shared.full[k], 1);
    UNROLL for (int k = 0; k < STAGES; ++k) {
        gate_open(&shared.done[k], WARPS * WARP_ARRIVALS);
        gate_open(&shared.vacant[k], WARP_ARRIVALS);
    }
    UNROLL for (int k = 0; k < LOOKBACKS; ++k) gate_open(&shared.handed[k], 1);
    UNROLL for (int k = 0; k < RING; ++k) gate_open(&shared.scanned[k], WARP_ARRIVALS);
    gates_opened();
    bulk_fence();
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    const int warp = thread_index() / 32, tiles = Walk::count(P);
    const u32 tag = WAITS && warp >= WARPS ? launch_tag(P.header) : 0;
    open_barriers(OPEN, 1, ALL_THREADS);
    open_barriers(TOTALS_READY, RING, TOTALS_READY_THREADS), open_barriers(PREFIX_READY, RING, PREFIX_READY_THREADS);
    barriers_opened();
    if (warp == LOAD_WARP) {  // loads without waiting for the others
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
    else if constexpr (WAITS) {
        lookback_role(P, shared, warp - FIRST_LOOKBACK_WARP, tiles, tag, watchdog);
        sync_warp();
        if (thread_index() % 32 == 0)
            finish(P.header, tag, block_count() * LOOKBACKS, P.slots, P.slot_bytes);
    }
}

LAUNCH_NUMBERS
