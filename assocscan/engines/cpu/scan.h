// The CPU scan: load -> lift -> scan -> lower -> store over [rows, length, lanes].
//
// Before this file the generator writes the operator and its ports:
//   struct State, Live, Raw, Out        State: what the aggregate of several steps must hold.
//                                       Live: the part of it that a sequential carry needs.
//   lift, combine, advance, begin, lower, identity
//   INPUTS(F), OUTPUTS(F), LIVE(F), STATE(F), INITS(F), FINALS(F)     the ports, one F(...) each
//   LEAVES, DIRECT, EXCLUSIVE, HAS_INIT, HAS_EDGE, REDUCES, SMALL, WIDE, STEPS, LANES
//   SHIFTED[]         the leaves that are read one step further
//   SLOTS, SLOT[]     the leaves whose lanes lie in an order of their own are numbered, others are -1
// A leaf is one tensor; a port is one scalar of its element, at a constant offset.
//
// Two ways to walk, chosen by the layout:
//   direct   the innermost dimension is contiguous: one step for all its lanes is one SIMD loop,
//            the carries of LANES lanes stay in the first-level cache. Leaves with a SLOT go
//            through tiles of STEPS x LANES.
//   staged   the axis itself is contiguous, or nothing is: tiles of STEPS x WIDE are transposed
//            through a buffer. Lanes are rows; for a single row they are WIDE segments of it,
//            scanned side by side and then joined (two combines per element instead of one).
//
// Threads take rows and blocks of lanes. Where there are fewer of those than threads, the axis is
// cut: thread 0 scans the first chunk while the others reduce the following ones to their totals;
// then the carries are known and all remaining chunks are scanned at once. Where only the final carry
// is wanted (REDUCES), the totals are all there is to do.
//
// A leaf in SHIFTED is read at the next step in scan order (a backward scan's y[t-1]); at the last
// step, the edge, its boundary value is read instead (the forward scan's init), or zero where there
// is none.
#pragma once
#include "jobs.h"

constexpr i64 MIN_CHUNK = 4096;

// What `assocscan_run` returns; engines/cpu.py words them.
constexpr int DONE = 0, NO_MEMORY = 1;

// Memory on the heap, for one small T on the stack: a call on a few numbers takes 20 us, of which
// allocating would take one.
template <class T> struct Array {
    static constexpr size_t INSIDE = 16 << 10;
    alignas(64) char inside[sizeof(T) <= INSIDE ? sizeof(T) : 1];
    void* outside = nullptr;
    T* data = nullptr;
    bool allocate(i64 count) {
        const size_t bytes = (size_t)count * sizeof(T);
        if (bytes > sizeof inside && posix_memalign(&outside, 64, bytes)) return false;
        data = (T*)(outside ? outside : inside);
        return true;
    }
    ~Array() { std::free(outside); }
};

static void read_problem(const i64* args, Problem& problem) {
    problem.length = args[0];
    problem.inner = args[1];
    problem.threads = args[2];
    problem.reverse = args[3];
    problem.dims = args[4];
    problem.sequences = args[5];
    problem.offsets = (const i64*)args[6];
    problem.lane_dims = args[8];
    problem.sizes = args + 9;
    problem.lane_sizes = problem.sizes + problem.dims;
    const i64 dims = problem.dims + problem.lane_dims;
    const i64* cursor = problem.sizes + dims;
    for (int k = 0; k < LEAVES; ++k, cursor += 4 + dims)
        problem.leaf[k] = {(char*)cursor[0], cursor[1], cursor[2], cursor[3],
                           cursor + 4, cursor + 4 + problem.dims};
}

static int run_jobs(Jobs& jobs, i64 threads) {
    Array<Scratch> scratch;
    Array<Worker> workers;
    if (!scratch.allocate(threads) || !workers.allocate(threads)) return NO_MEMORY;
    jobs.scratch = scratch.data;
    if (threads) parallel(threads, job_worker, &jobs, workers.data);
    return DONE;
}

static int run_cut_jobs(const Jobs& jobs, i64 threads) {
    Array<Scratch> scratch;
    Array<Worker> workers;
    Array<Chunks> chunks;
    Array<LiveLanes> enter;
    Array<StateLanes> total;
    if (!scratch.allocate(threads) || !workers.allocate(threads) || !chunks.allocate(1)
        || !enter.allocate(threads) || !total.allocate(threads)) return NO_MEMORY;
    Chunks& cut = *chunks.data;
    cut.problem = jobs.problem;
    cut.threads = threads;
    cut.scratch = scratch.data;
    cut.enter = enter.data;
    cut.total = total.data;
    for (i64 k = 0; k < jobs.count; ++k) {
        job_of(jobs, k, cut.job);
        run_chunks(cut, workers.data);
    }
    return DONE;
}

// args: length, inner, threads, reverse, dims, sequences, offsets, block, lane_dims, sizes[dims],
// lane_sizes[lane_dims], then per leaf: data, step, lane, sequence, outer[dims], across[lane_dims].
extern "C" int assocscan_run(const i64* args) {
    Array<Problem> memory;
    if (!memory.allocate(1)) return NO_MEMORY;
    Problem& problem = *memory.data;
    read_problem(args, problem);
    const i64 block = args[7];
    i64 rows = 1;
    if (DIRECT) for (i64 d = 0; d < problem.dims; ++d) rows *= problem.sizes[d];
    const i64 blocks = (problem.inner + block - 1) / block;
    Jobs jobs = {&problem, rows, block, blocks, rows * blocks * problem.sequences, 0, nullptr};
    const bool few = jobs.count < problem.threads && problem.sequences == 1;
    if (few && problem.length >= MIN_CHUNK * (problem.threads + 1) && (DIRECT || block == 1))
        return run_cut_jobs(jobs, problem.threads);
    const i64 threads = jobs.count < problem.threads ? jobs.count : problem.threads;
    return run_jobs(jobs, threads);
}
