// The CPU scan: load -> lift -> scan -> lower -> store over [rows, length, lanes].
//
// Before this file the generator writes the operator and its ports:
//   struct State, Live, Raw, Out        State: what the aggregate of several steps must hold.
//                                       Live: the part of it that a sequential carry needs.
//   lift, combine, advance, begin, lower, identity
//   INPUTS(F), OUTPUTS(F), LIVE(F), STATE(F), INITS(F), FINALS(F)     the ports, one F(...) each
//   LEAVES, SHIFTED[], MOVES[] (whether a leaf has values at every step), DIRECT, EXCLUSIVE, HAS_INIT,
//   HAS_EDGE, HAS_FINAL, REDUCES, SMALL, SEGMENTED, SHORT, RUN, WIDE, STEPS, LANES
//   PRODUCT           whether combine is the product of two floats
//   FORGETS           whether combine selects, so that NaN in an aggregate may be left out
//   SLOTS, SLOT[]     SLOT[leaf] numbers the leaves that go through a tile, of which there are SLOTS;
//                     it is -1 for a leaf that is read or written in place
// A leaf is one tensor; a port is one scalar of its element, at a constant offset.
//
// Two forms, chosen by copy_or_tile.py:
//   direct   the innermost dimensions are the lanes: one step of all lanes of a job is one SIMD loop,
//            and the carries of at most LANES lanes stay in the first-level cache. Neighbouring lanes
//            are up to 16 scalars apart in a leaf that is read in place. Leaves with a SLOT go through
//            tiles of STEPS x LANES.
//   staged   the rows are the lanes: tiles of STEPS x WIDE are transposed through a buffer. For a
//            single row the lanes are WIDE segments of it, which are scanned side by side and then
//            joined (two combines per element instead of one), if SEGMENTED.
//
// A job is a row and a block of its lanes (direct), or a block of rows (staged); of packed sequences,
// those of it that begin in one part of the axis. Each thread takes one job after another. If there are
// fewer jobs than threads (threads_and_jobs.py decides), the axis of each job is cut into chunks: thread
// 0 scans the first chunk while the others reduce the following ones to their totals; then the carries
// are computed and all remaining chunks are scanned at once. If only the final carry is wanted
// (REDUCES), the second pass is not needed. Sequences of one row with fewer than SHORT steps are scanned
// from memory to memory, without tiles; if the operator selects, those of at most RUN steps in runs
// (short_sequences.h).
//
// A SHIFTED leaf is read at the next step in scan order (in a backward scan, y[t-1]). The last step
// of the scan is the edge: there the leaf has its boundary value, or zero if it has none.
#pragma once
#include "worker_threads.h"

// What `assocscan_run` returns; engines/base/commands.py raises the error of NO_MEMORY.
constexpr int DONE = 0, NO_MEMORY = 1;

// Of packed sequences, at least so many jobs per thread, where there are as many sequences.
constexpr i64 JOBS_PER_THREAD = 16;

// An array on the heap, or in this object if it is one small T: a call on a few numbers takes 20 us,
// and an allocation would add 1 us.
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
    problem.reverse = args[3];
    problem.dims = args[4];
    problem.sequences = args[5];
    problem.offsets = (const i64*)args[6];
    problem.lane_dims = args[8];
    problem.sizes = args + 10;
    problem.lane_sizes = problem.sizes + problem.dims;
    const i64 dims = problem.dims + problem.lane_dims;
    const i64* cursor = problem.sizes + dims;
    for (int k = 0; k < LEAVES; ++k, cursor += 4 + dims)
        problem.leaf[k] = {(char*)cursor[0], cursor[1], cursor[2], cursor[3],
                           cursor + 4, cursor + 4 + problem.dims};
}

// The parts of the axis that packed sequences are shared out by: enough that long sequences beside
// short ones do no harm, and each as long as can be, because threads that write to neighbouring memory
// wait for the same pages.
static i64 count_parts(const Problem& problem, i64 chains, i64 threads) {
    const i64 wanted = (threads * JOBS_PER_THREAD + chains - 1) / chains;
    const i64 most = problem.sequences < problem.length ? problem.sequences : problem.length;
    return threads == 1 || most < 2 ? 1 : wanted < most ? wanted : most;
}

static int run_jobs(Jobs& jobs, i64 threads) {
    Array<Scratch> scratch;
    Array<Worker> workers;
    if (!scratch.allocate(threads) || !workers.allocate(threads)) return NO_MEMORY;
    Array<Runs> runs;
    if (RUN && jobs.problem->offsets && !runs.allocate(threads)) return NO_MEMORY;
    for (i64 k = 0; k < threads; ++k) scratch.data[k].runs = runs.data ? runs.data + k : nullptr;
    jobs.scratch = scratch.data;
    parallel(threads, job_worker, &jobs, workers.data);
    return DONE;
}

static int run_cut_jobs(const Jobs& jobs, i64 threads) {
    Array<Scratch> scratch;
    Array<Worker> workers;
    Array<Chunks> chunks;
    Array<LiveLanes> enter, entered;
    Array<StateLanes> total;
    if (!scratch.allocate(threads) || !workers.allocate(threads) || !chunks.allocate(1)
        || !enter.allocate(threads) || !entered.allocate(threads) || !total.allocate(threads))
        return NO_MEMORY;
    Chunks& cut = *chunks.data;
    cut.problem = jobs.problem;
    cut.threads = threads;
    cut.scratch = scratch.data;
    cut.enter = enter.data;
    cut.entered = entered.data;
    cut.total = total.data;
    for (i64 k = 0; k < jobs.count; ++k) {
        rows_of(jobs, k, cut.job);
        enter_sequence(*jobs.problem, 0, cut.job);
        run_chunks(cut, workers.data);
    }
    return DONE;
}

// args: length, inner, threads, reverse, dims, sequences, offsets, block, lane_dims, cuts_axis,
// sizes[dims], lane_sizes[lane_dims], then per leaf: data, step, lane, sequence, outer[dims],
// across[lane_dims].
extern "C" int assocscan_run(const i64* args) {
    Array<Problem> memory;
    if (!memory.allocate(1)) return NO_MEMORY;
    Problem& problem = *memory.data;
    read_problem(args, problem);
    const i64 block = args[7];
    i64 rows = 1;
    if (DIRECT) for (i64 d = 0; d < problem.dims; ++d) rows *= problem.sizes[d];
    const i64 blocks = (problem.inner + block - 1) / block;
    const i64 threads = args[2], parts = count_parts(problem, rows * blocks, threads);
    Jobs jobs = {&problem, rows, block, blocks, parts, rows * blocks * parts, 0, nullptr};
    return args[9] ? run_cut_jobs(jobs, threads) : run_jobs(jobs, threads);
}
