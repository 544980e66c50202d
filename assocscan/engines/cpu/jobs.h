// Threads over rows and blocks of lanes, or over chunks of one long row.
//
// What a worker writes on its way lies on the heap, allocated once per call: an element may have
// thousands of components, and the calling thread a stack of 256 KiB or less. The frames that are
// left on the stack are small (28 KB for elements of 300 float64, GCC 12.2).
#pragma once
#include "direct.h"
#include "staged.h"

#include <cstdlib>
#include <pthread.h>

// ---- Threads ----

struct Worker {
    void (*body)(void*, i64);
    void* context;
    i64 index;
    pthread_t handle;
    bool started;
};

static void* work(void* argument) {
    const Worker& worker = *(const Worker*)argument;
    worker.body(worker.context, worker.index);
    return nullptr;
}

// Of a worker, whatever the system's default is (`ulimit -s`; 128 KiB in musl).
constexpr size_t STACK_BYTES = 1 << 20;

// body(context, k) for every k < threads; the caller runs the first, and those for which the system
// has no thread.
static void parallel(i64 threads, void (*body)(void*, i64), void* context, Worker* workers) {
    pthread_attr_t attributes;
    if (threads > 1) {
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
    }
    for (i64 k = 1; k < threads; ++k) {
        workers[k] = {body, context, k, {}, false};
        Worker& worker = workers[k];
        worker.started = pthread_create(&worker.handle, &attributes, work, &worker) == 0;
    }
    body(context, 0);
    for (i64 k = 1; k < threads; ++k) {
        if (workers[k].started) pthread_join(workers[k].handle, nullptr);
        else body(context, k);
    }
    if (threads > 1) pthread_attr_destroy(&attributes);
}

// ---- Jobs: a block of lanes, or some rows, of one sequence ----

struct Job {
    At at[DIRECT ? 1 : WIDE];
    Shifts shifts;
    Span span;
    int lanes;
};

// What one worker writes on its way.
struct Scratch {
    Job job;
    LiveLanes carry;
    Buffers buffers[DIRECT ? 0 : 1];
    DirectTile tile;
};

struct Jobs {
    const Problem* problem;
    i64 rows, block, blocks, count, next;
    Scratch* scratch;  // of every worker
};

static void job_of(const Jobs& jobs, i64 index, Job& job) {
    const Problem& problem = *jobs.problem;
    const i64 block = index % jobs.blocks;
    const i64 outer = index / jobs.blocks % jobs.rows;
    const i64 sequence = index / (jobs.blocks * jobs.rows);
    job.span = sequence_span(problem, sequence);
    const i64 first = block * jobs.block;
    const i64 end = first + jobs.block > problem.inner ? problem.inner : first + jobs.block;
    job.lanes = (int)(end - first);
    if constexpr (DIRECT) {
        job.at[0] = locate(problem, outer, first, sequence, job.span);
        if constexpr (SLOTS > 0) find_shifts(problem, first, job.lanes, job.shifts);
    } else {
        for (int w = 0; w < job.lanes; ++w)
            job.at[w] = locate(problem, first + w, 0, sequence, job.span);
    }
}

static void scan_range(
    const Problem& problem, Scratch& own, LiveLanes& carry, bool has_carry, i64 count, bool ends
) {
    const Job& job = own.job;
    if constexpr (DIRECT)
        direct_scan(problem, {job.at[0], job.shifts, own.tile, 0}, carry, has_carry, job.lanes,
                    count, ends);
    else
        staged_scan(
            problem, job.at, own.buffers[0], carry, has_carry, job.lanes, count, ends);
}

static void job_worker(void* context, i64 worker) {
    Jobs& jobs = *(Jobs*)context;
    Scratch& own = jobs.scratch[worker];
    for (;;) {
        const i64 index = __atomic_fetch_add(&jobs.next, 1, __ATOMIC_RELAXED);
        if (index >= jobs.count) return;
        job_of(jobs, index, own.job);
        load_init(own.job.at, own.job.shifts, !DIRECT, own.carry, own.job.lanes);
        scan_range(*jobs.problem, own, own.carry, false, own.job.span.count, true);
        store_final(own.job.at, own.job.shifts, !DIRECT, own.carry, own.job.lanes);
    }
}

// ---- Chunks of one job ----

struct Chunks {
    const Problem* problem;
    i64 threads, size;
    Job job;            // the whole one
    Scratch* scratch;   // of every worker
    LiveLanes* enter;   // the carry that enters chunk k
    StateLanes* total;  // the total of chunk k, 1 <= k < threads
};

// The job of chunk k is left in the worker's scratch; returns its steps.
static i64 chunk_of(const Chunks& chunks, i64 k, Job& job) {
    job = chunks.job;
    const i64 first = k * chunks.size;
    const i64 rest = job.span.count - first;
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) move(*chunks.problem, job.at[w], first);
    return k == chunks.threads - REDUCES ? rest : chunks.size;
}

static void first_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    const Problem& problem = *chunks.problem;
    Scratch& own = chunks.scratch[k];
    const i64 count = chunk_of(chunks, k, own.job);
    if (k == 0) {
        scan_range(problem, own, chunks.enter[0], false, count, false);
    } else if constexpr (DIRECT) {
        direct_reduce(problem, {own.job.at[0], own.job.shifts, own.tile, 0}, chunks.total[k],
                      own.job.lanes, count);
    } else {
        staged_reduce(problem, own.job.at[0], own.buffers[0], chunks.total[k], count);
    }
}

static void second_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    Scratch& own = chunks.scratch[k];
    const i64 count = chunk_of(chunks, k + 1, own.job);
    const bool ends = k + 1 == chunks.threads;
    scan_range(*chunks.problem, own, chunks.enter[k], true, count, ends);
}

// enter[k] is the carry into chunk k + 1: enter[0] is left there by the first chunk's scan.
static void run_chunks(Chunks& chunks, Worker* workers) {
    const Job& job = chunks.job;
    const i64 threads = chunks.threads;
    LiveLanes* enter = chunks.enter;
    chunks.size = job.span.count / (threads + !REDUCES);
    load_init(job.at, job.shifts, !DIRECT, enter[0], job.lanes);
    parallel(threads, first_pass, &chunks, workers);
    for (i64 k = 1; k < threads; ++k)
        for (int w = 0; w < job.lanes; ++w)
            enter[k].set(w, advance(enter[k - 1].get(w), chunks.total[k].get(w)));
    if constexpr (!REDUCES) parallel(threads, second_pass, &chunks, workers);
    store_final(job.at, job.shifts, !DIRECT, enter[threads - 1], job.lanes);
}
