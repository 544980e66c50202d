// The walk of [outer, steps, channels] along its steps, for steps that are not associative; channels
// are adjacent in memory.
//
// A block is one warp, with 32 chains side by side: a thread walks along CHANNELS of them with their
// states in registers. Tiles are ITEMS steps. A thread copies its own cells into a ring of STAGES
// tiles and refills each cell right after its last use, as in lanes_scan.cuh: no thread waits for
// another. A block takes its chains one after the other (SERIAL there).
#pragma once
#include "lanes_steps.cuh"

static_assert(!SEGMENTED && HAS_INIT, "one sequence, which a carry enters");

// The carries that enter a row.
INLINE void enter(const Params& P, const Cells& cells, State (&carry)[CHANNELS]) {
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        carry[v] = v < cells.channels ? load_init(P, (int)cells.row, cells.channel + v, 0)
                                      : identity();
}

// Every tile: wait for its copies, then step by step scan, store, and load a later tile.
KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    const Shared& shared = *(Shared*)shared_memory();
    char* const ring = shared_memory() + RING_AT;
    const int tiles = Walk::count(P);
    Thread thread;
    thread.column = thread_index(), thread.group = 0;
    Walk walk, loading;  // the tiles that are walked, and loaded
    walk.start(P), loading.start(P);
    RingCursor<STAGES> stage;
    load_first_tiles(P, thread, ring, loading, tiles);
    State carry[CHANNELS];
    ROLLED for (int it = 0; it < tiles; ++it) {
        char* const here = ring + stage.place * STAGE_BYTES;
        const bool refill = it + STAGES < tiles;
        Move move;
        move.start(P, walk, loading, thread, refill);
        move.boundaries.read(shared, it, thread);
        if (walk.tile == 0) enter(P, move.cells, carry);
        copies_wait<(STAGES - 1) * PARTS>();
        if (is_whole(P, walk)) {
            const bool apart = refill && !is_whole(P, loading);  // that one needs bounds
            scan_tile<true>(P, thread, move, carry, here, false, refill && !apart, !apart);
            if (apart) copy_tile<false>(P, move.next, move.later, thread, here);
        } else {
            scan_tile<false>(P, thread, move, carry, here, false, refill, true);
        }
        walk.next(P), loading.next(P);
        stage.advance();
    }
    copies_wait<0>();
}

LAUNCH_NUMBERS
