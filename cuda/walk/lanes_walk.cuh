// The walk of [outer, steps, channels] along its steps, one after another, for steps that are not
// associative; channels are adjacent in memory. A block walks along whole chains, one after the
// other. Nothing passes from lane to lane or from block to block.
#pragma once
#include "walker.cuh"

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    char* const ring = shared_memory() + RING_AT;
    Pipeline pipeline;
    NoMarks marks;
    Walker& walker = pipeline.walker;
    walker.lane = thread_index();
    walker.place.chain = block_index();
    walker.place.start(P);
    pipeline.start(P, ring);
    ROLLED while (walker.place.exists(P)) {
        if (walker.place.step == 0) walker.enter(P);
        pipeline.walk(P, ring, marks);
    }
    copies_wait<0>();
}

LAUNCH_NUMBERS
