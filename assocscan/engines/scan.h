// The CPU scan: load -> lift -> scan -> lower -> store over [rows, length, lanes].
//
// Before this file the generator writes the operator and its ports:
//   struct State, Live, Raw, Out        State: what a total of many steps must hold.
//                                       Live: the part of it that a sequential carry needs.
//   lift, combine, advance, begin, lower, identity
//   INPUTS(F), OUTPUTS(F), LIVE(F), STATE(F), INITS(F), FINALS(F)     the ports, one F(...) each
//   LEAVES, AHEAD[], DIRECT, EXCLUSIVE, HAS_INIT, HAS_EDGE, REDUCES, SMALL, WIDE, STEPS, LANES
// A leaf is one tensor; a port is one scalar of its element, at a constant offset.
//
// Two ways to walk, chosen by the layout:
//   direct   the innermost dimension is contiguous: one step for all its lanes is one SIMD loop,
//            the carries of LANES lanes stay in the first-level cache.
//   staged   the axis itself is contiguous, or nothing is: tiles of STEPS x WIDE are transposed
//            through a buffer. Lanes are rows; for a single row they are WIDE segments of it,
//            scanned side by side and then joined (two combines per element instead of one).
//
// Threads take rows and blocks of lanes. Where there are fewer of those than threads, the axis is
// cut: thread 0 scans the first chunk while the others reduce the following ones to their totals;
// then the carries are known and all remaining chunks are scanned at once. Where only the final carry
// is wanted (REDUCES), the totals are all there is to do.
//
// A port that is `ahead` reads the next step in scan order (a backward scan's y[t-1]); at the
// last step, the edge, it reads the forward scan's init instead, or zero where there is none.
#pragma once
#include "jobs.h"

constexpr i64 MIN_CHUNK = 4096;

// args: length, inner, threads, reverse, dims, sequences, offsets, block, sizes[dims], then per
// leaf: data, step, lane, sequence, outer[dims].
extern "C" void assocscan_run(const i64* args) {
    Problem problem;
    problem.length = args[0];
    problem.inner = args[1];
    problem.threads = args[2];
    problem.reverse = args[3];
    problem.dims = args[4];
    problem.sequences = args[5];
    problem.offsets = (const i64*)args[6];
    const i64 block = args[7];
    problem.sizes = args + 8;
    const i64* cursor = problem.sizes + problem.dims;
    for (int k = 0; k < LEAVES; ++k, cursor += 4 + problem.dims)
        problem.leaf[k] = {(char*)cursor[0], cursor[1], cursor[2], cursor[3], cursor + 4};
    i64 rows = 1;
    if (DIRECT) for (i64 d = 0; d < problem.dims; ++d) rows *= problem.sizes[d];
    const i64 blocks = (problem.inner + block - 1) / block;
    Jobs jobs = {&problem, rows, block, blocks, rows * blocks * problem.sequences, 0};
    const bool few = jobs.count < problem.threads && problem.sequences == 1;
    if (few && problem.length >= MIN_CHUNK * (problem.threads + 1) && (DIRECT || block == 1)) {
        for (i64 k = 0; k < jobs.count; ++k) run_chunks(problem, job_of(jobs, k));
        return;
    }
    const i64 threads = jobs.count < problem.threads ? jobs.count : problem.threads;
    if (threads > 1) parallel(threads, job_worker, &jobs);
    else job_worker(&jobs, 0);
}
