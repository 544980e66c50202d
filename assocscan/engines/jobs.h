// Threads over rows and blocks of lanes, or over chunks of one long row.
#pragma once
#include "direct.h"
#include "staged.h"

#include <pthread.h>

// ---- Threads ----

struct Worker {
    void (*body)(void*, i64);
    void* context;
    i64 index;
};

static void* work(void* argument) {
    const Worker& worker = *(const Worker*)argument;
    worker.body(worker.context, worker.index);
    return nullptr;
}

static void parallel(i64 threads, void (*body)(void*, i64), void* context) {
    Worker workers[threads];
    pthread_t handles[threads];
    bool started[threads];
    for (i64 k = 1; k < threads; ++k) {
        workers[k] = {body, context, k};
        started[k] = pthread_create(&handles[k], nullptr, work, &workers[k]) == 0;
    }
    body(context, 0);
    for (i64 k = 1; k < threads; ++k) {
        if (started[k]) pthread_join(handles[k], nullptr);
        else body(context, k);
    }
}

// ---- Jobs: a block of lanes, or some rows, of one sequence ----

struct Jobs {
    const Problem* problem;
    i64 rows, block, blocks, count, next;
};

struct Job {
    At at[DIRECT ? 1 : WIDE];
    Span span;
    int lanes;
};

static Job job_of(const Jobs& jobs, i64 index) {
    const Problem& problem = *jobs.problem;
    Job job;
    const i64 block = index % jobs.blocks;
    const i64 outer = index / jobs.blocks % jobs.rows;
    const i64 sequence = index / (jobs.blocks * jobs.rows);
    job.span = sequence_span(problem, sequence);
    const i64 first = block * jobs.block;
    const i64 end = first + jobs.block > problem.inner ? problem.inner : first + jobs.block;
    job.lanes = (int)(end - first);
    if constexpr (DIRECT) {
        job.at[0] = locate(problem, outer, first, sequence, job.span);
    } else {
        for (int w = 0; w < job.lanes; ++w)
            job.at[w] = locate(problem, first + w, 0, sequence, job.span);
    }
    return job;
}

static void scan_range(
    const Problem& problem, Job& job, LiveLanes& carry, bool has_carry, i64 count, bool ends
) {
    if constexpr (DIRECT)
        direct_scan(problem, job.at[0], carry, has_carry, job.lanes, count, ends);
    else
        staged_scan(problem, job.at, carry, has_carry, job.lanes, count, ends);
}

static void run_job(const Problem& problem, Job& job) {
    LiveLanes carry;
    At start[DIRECT ? 1 : WIDE];
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) start[w] = job.at[w];
    load_init(start, !DIRECT, carry, job.lanes);
    scan_range(problem, job, carry, false, job.span.count, true);
    store_final(start, !DIRECT, carry, job.lanes);
}

static void job_worker(void* context, i64) {
    Jobs& jobs = *(Jobs*)context;
    for (;;) {
        const i64 index = __atomic_fetch_add(&jobs.next, 1, __ATOMIC_RELAXED);
        if (index >= jobs.count) return;
        Job job = job_of(jobs, index);
        run_job(*jobs.problem, job);
    }
}

// ---- Chunks of one job ----

struct Chunks {
    const Problem* problem;
    const Job* job;
    i64 threads, size;
    LiveLanes* enter;   // the carry that enters chunk k
    StateLanes* total;  // the total of chunk k, 1 <= k < threads
};

static Job chunk_of(const Chunks& chunks, i64 k, i64* count) {
    Job job = *chunks.job;
    const i64 first = k * chunks.size;
    const i64 rest = job.span.count - first;
    *count = k == chunks.threads - REDUCES ? rest : chunks.size;
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) move(*chunks.problem, job.at[w], first);
    return job;
}

static void first_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    i64 count;
    Job job = chunk_of(chunks, k, &count);
    if (k == 0) {
        scan_range(*chunks.problem, job, chunks.enter[0], false, count, false);
    } else if constexpr (DIRECT) {
        direct_reduce(*chunks.problem, job.at[0], chunks.total[k], job.lanes, count);
    } else {
        staged_reduce(*chunks.problem, job.at[0], chunks.total[k], count);
    }
}

static void second_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    i64 count;
    Job job = chunk_of(chunks, k + 1, &count);
    scan_range(*chunks.problem, job, chunks.enter[k], true, count, k + 1 == chunks.threads);
}

// enter[k] is the carry into chunk k + 1: enter[0] is left there by the first chunk's scan.
static void run_chunks(const Problem& problem, const Job& job) {
    const i64 threads = problem.threads;
    LiveLanes* enter = new LiveLanes[threads];
    StateLanes* total = new StateLanes[threads];
    Chunks chunks = {&problem, &job, threads, job.span.count / (threads + !REDUCES), enter, total};
    load_init(job.at, !DIRECT, enter[0], job.lanes);
    parallel(threads, first_pass, &chunks);
    for (i64 k = 1; k < threads; ++k)
        for (int w = 0; w < job.lanes; ++w)
            enter[k].set(w, advance(enter[k - 1].get(w), total[k].get(w)));
    if constexpr (!REDUCES) parallel(threads, second_pass, &chunks);
    store_final(job.at, !DIRECT, enter[threads - 1], job.lanes);
    delete[] enter;
    delete[] total;
}
