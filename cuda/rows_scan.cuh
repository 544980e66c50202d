// The scan of [rows, steps] along contiguous steps.
//
// A tile is TILE_STEPS steps of one row; a main thread has ITEMS consecutive ones. Tiles travel
// through a ring of STAGES in shared memory, by bulk copies.
//
//   load   one thread: bulk loads in pieces of CHUNK steps, at most FLIGHT under way (more of them
//          delay the polls of other blocks)
//   main   A(i+LEAD): reduce a tile that has arrived; B(i): take the prefix of tile i, scan its
//          elements once more from it, leave the outputs in shared memory
//   fold   scan the warps' totals of a tile. BLOCK (a block owns its rows): keep the carry, and
//          leave for every main warp what stands before it
//   look   finds the prefixes of tiles, where blocks share rows
//   store  one warp: bulk stores, then the stage is free
//
// AHEAD: all blocks share all rows, tile by tile; LOOKERS look warps take the tiles of a block in
// turn: prefix(tile) = prefix(tile − G) ∘ aggregates of tiles tile − G … tile − 1, G blocks.
//
// Aggregates are all that is published, once per tile, and are combined in an order that depends on
// the shape and the grid alone: results are bitwise equal from run to run.
//
// Why it cannot deadlock: all blocks run (cooperative launch), and every block takes its tiles in
// ascending order. The aggregate of a tile waits for its inputs alone, and for a stage that is free
// once tile i − STAGES is stored; that waits for aggregates of lower tiles alone (LEAD < STAGES). A
// look at tile i waits until tile i + LATE is reduced, which main does before B(i) (LATE < LEAD):
// earlier ones find little, and polls take from main's instructions and from the bandwidth.
// Named barriers, in rings of LEAD + 1: READY main → fold, PREFIX fold or look → main. Main has read
// its slot before it arrives at READY(i + LEAD + 1), fold waits for that before it writes the slot
// again, and look waits for fold (gates `folded`). Look warps hand prefixes on in turn (`handed`): a
// prefix has been read when its place is written again, LOOKERS tiles later.
//
// Rows need not begin at multiples of 16 bytes: the aligned bytes around a tile are copied, and
// elements read at their offset, the skew. Leaves of which every tile is aligned skip that.
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
                         int stage, u32 parity, int slot) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    await_items(&shared.full[stage * CHUNKS], parity);
    InputWords words;
    read_items(words, P, walk, ring + stage * STAGE_BYTES);
    const int left = steps_left(P, walk);
    State total;
    UNROLL for (int i = 0; i < ITEMS; ++i) {
        const Position at = {walk.row, 0, i < left, false, false, mark_of(words, item(i))};
        const State element = element_at(P, raw_of(words, item(i)), at);
        total = i == 0 ? element : combine(total, element);
    }
    State before;
    warp_scan<1>(total, before, lane);
    if (lane == 31) put_state(shared.warps[slot][warp], total);
    arrive(READY + slot, READY_THREADS);
    return before;
}

INLINE void main_role(const Params& P, Shared& shared, char* ring, int tiles) {
    const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
    Walk walk, reducing;
    walk.start(P), reducing.start(P);
    State before[LEAD];
    int stage = 0, slot = 0, ahead_stage = 0, ahead_slot = 0;
    u32 ahead_parity = 0;
    ROLLED for (int it = -LEAD; it < tiles; ++it) {
        State carry = before[0];
        UNROLL for (int d = 0; d + 1 < LEAD; ++d) before[d] = before[d + 1];
        if (it + LEAD < tiles) {
            before[LEAD - 1] =
                reduce_tile(P, shared, reducing, ring, ahead_stage, ahead_parity, ahead_slot);
            if (++ahead_stage == STAGES) ahead_stage = 0, ahead_parity ^= 1;
            if (++ahead_slot == RING) ahead_slot = 0;
            reducing.next(P);
        }
        if (it < 0) continue;
        const i64 step = (i64)walk.tile * TILE_STEPS + thread * ITEMS;
        char* const here = ring + stage * STAGE_BYTES;
        const bool begins = !ENTERS && step == 0;
        const int left = steps_left(P, walk);
        InputWords words;
        OutputValues values;
        read_items(words, P, walk, here);
        wait_for(PREFIX + slot, PREFIX_THREADS);
        // Warp 0 of a row's first tile has nothing before it.
        if (ENTERS || walk.tile > 0 || warp > 0)
            carry = join(true, get_state(shared.warps[slot][warp]), lane > 0, carry);
        UNROLL for (int i = 0; i < ITEMS; ++i) {
            const u32 mark = mark_of(words, item(i));
            const bool last = SEGMENTED ? (mark & ENDS) != 0 && i < left : i + 1 == left;
            const Position at = {walk.row, 0, i < left, begins && i == 0, last, mark};
            take_step(P, values, item(i), raw_of(words, item(i)), carry, at);
        }
        write_items(values, P, walk, here);
        bulk_fence();
        gate_arrive_warp(&shared.done[stage]);
        if (++stage == STAGES) stage = 0;
        if (++slot == RING) slot = 0;
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
    UNROLL for (int k = 0; k < LOOKERS; ++k) gate_open(&shared.handed[k], 1);
    UNROLL for (int k = 0; k < RING; ++k) gate_open(&shared.folded[k], WARP_ARRIVALS);
    gates_opened();
    bulk_fence();
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    const int warp = thread_index() / 32, tiles = Walk::count(P);
    const u32 tag = WAITS && warp >= WARPS ? launch_tag(P.header) : 0;
    open_barriers(OPEN, 1, ALL_THREADS);
    open_barriers(READY, RING, READY_THREADS), open_barriers(PREFIX, RING, PREFIX_THREADS);
    barriers_opened();
    if (warp == LOAD) {  // loads without waiting for the others
        if (thread_index() % 32 == 0) open_gates(shared);
        arrive(OPEN, ALL_THREADS);
    } else {
        wait_for(OPEN, ALL_THREADS);
    }
    Watchdog watchdog;
    watchdog.start(P.header, P.alarm, tag);
    if (warp < WARPS) main_role(P, shared, ring, tiles);
    else if (warp == FOLD) fold_role(P, shared, tiles, tag);
    else if (warp == LOAD) {
        if (thread_index() % 32 == 0) load_role(P, shared, ring, tiles);
    } else if (warp == STORE) store_role(P, shared, ring, tiles);
    else if constexpr (WAITS) {
        look_role(P, shared, warp - LOOK, tiles, tag, watchdog);
        sync_warp();
        if (thread_index() % 32 == 0)
            finish(P.header, tag, block_count() * LOOKERS, P.slots, P.slot_bytes);
    }
}

LAUNCH_NUMBERS
