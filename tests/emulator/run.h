// The emulator's entry: what the launcher asks of a compiled kernel, and the run of a grid.
#pragma once

static const Params* launched;

static void fiber_main() {
    scan(*launched);
    emulator::finish_fiber();
}

extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" int block_threads() { return ALL_THREADS; }
extern "C" int parameter_bytes() { return (int)sizeof(Params); }

extern "C" int emulate(int blocks, const void* params, u64 seed, u64 clock_step, const u64* ranges,
                       int count, char* words) {
    launched = (const Params*)params;
    return emulator::run(fiber_main, blocks, ALL_THREADS, SHARED_BYTES, seed, clock_step, ranges,
                         count, words);
}
