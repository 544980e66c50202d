// Threads: each takes whole jobs (rows, or blocks of lanes), or each takes one chunk of the same job.
//
// The temporary buffers of a worker are on the heap, allocated once per call, because an element may
// have thousands of components, and the calling thread may have a stack of 256 KiB or less. Stack
// frames are small (28 KB for elements of 300 float64, GCC 12.2).
#pragma once
#include "direct.h"
#include "loop_order.h"
#include "short_sequences.h"
#include "staged.h"
#include "threads.h"

#include <cstdlib>

// ---- Jobs: a block of lanes or of rows, and the sequences that begin in a part of the axis ----

struct Job {
    At at[DIRECT ? 1 : WIDE];  // where the scan of a sequence starts
    At row[DIRECT ? 1 : WIDE]; // the first element of each row
    Shifts shifts;
    Span span;
    int lanes;
};

// Sequences of one row with fewer than BESIDE steps are scanned side by side, as the rows of a tile, if
// the operator is costly: one scanned by itself would use no vector instructions. BATCH of them are
// sorted by length first, so that most of those that share a tile end together.
constexpr int BESIDE = DIRECT || SHORT || RUN ? 0 : 512, BATCH = 1024;

struct Batch {
    int begin[BESIDE + 1];  // where the sequences of a length begin in `order`
    int order[BATCH];       // sequences by length, the longest first; 0 is the batch's first one
    LiveLanes ending;       // the carries of the sequences of a tile that end
};

// The temporary buffers of one worker.
struct Scratch {
    Job job;
    LiveLanes carry;
    Buffers buffers[DIRECT ? 0 : 1];
    DirectTile tile;
    Batch batch[BESIDE ? 1 : 0];
    Runs* runs;  // of packed sequences, if RUN
};

struct Jobs {
    const Problem* problem;
    i64 rows, block, blocks, parts, count, next;
    Scratch* scratch;  // one per worker
};

// The lanes of a job, and where their rows begin.
static void rows_of(const Jobs& jobs, i64 index, Job& job) {
    const Problem& problem = *jobs.problem;
    const i64 block = index % jobs.blocks;
    const i64 outer = index / jobs.blocks % jobs.rows;
    const i64 first = block * jobs.block;
    const i64 end = first + jobs.block > problem.inner ? problem.inner : first + jobs.block;
    job.lanes = (int)(end - first);
    if constexpr (DIRECT) {
        job.row[0] = locate(problem, outer, first);
        if constexpr (SLOTS > 0) find_shifts(problem, first, job.lanes, job.shifts);
    } else {
        for (int w = 0; w < job.lanes; ++w) job.row[w] = locate(problem, first + w, 0);
    }
}

// The first sequence that does not begin before a part of the axis.
static i64 first_sequence(const Problem& problem, i64 part, i64 parts) {
    if (part == 0) return 0;
    if (part == parts) return problem.sequences;
    // Rounded down: part * length / parts may not fit into 64 bits.
    const i64 begin = problem.length / parts * part;
    i64 low = 0, high = problem.sequences;
    while (low < high) {
        const i64 middle = low + (high - low) / 2;
        if (problem.offsets[middle] < begin) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Goes to one sequence of a job's rows.
static inline void enter_sequence(const Problem& problem, i64 sequence, Job& job) {
    job.span = sequence_span(problem, sequence);
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) {
        job.at[w] = job.row[w];
        start(problem, job.at[w], sequence, job.span);
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

// Scans sequences of one row from memory to memory, from number `sequence` on and up to the first that
// has SHORT steps or more, for which tiles and segments cost less than they save. Returns its number.
[[maybe_unused]] static __attribute__((noinline)) i64 walk_sequences(
    const Problem& problem, Scratch& own, i64 sequence, i64 end
) {
    WRITES_MEMORY;
    const i64* offsets = problem.offsets;
    const bool reverse = problem.reverse;
    i64 along[LEAVES], between[LEAVES];  // from one step, and one sequence, to the next
    for (int k = 0; k < LEAVES; ++k) {
        along[k] = problem.leaf[k].step;
        between[k] = problem.leaf[k].sequence;
    }
    const At row = own.job.row[0];
    for (; sequence < end; ++sequence) {
        const i64 count = offsets[sequence + 1] - offsets[sequence];
        if (count >= SHORT) break;
        const i64 first = reverse && count ? offsets[sequence + 1] - 1 : offsets[sequence];
        Here here = {row, own.job.shifts, own.tile, 0};
        for (int k = 0; k < LEAVES; ++k)
            here.at.p[k] += (MOVES[k] ? first * along[k] : 0) + sequence * between[k];
        Live carry = initial(here.at, own.job.shifts, 0);
        i64 left = count;
        auto next = [&] {
            --left;
            for (int k = 0; k < LEAVES; ++k)
                if (MOVES[k]) here.at.p[k] += reverse ? -along[k] : along[k];
        };
        if constexpr (!HAS_INIT) {
            if (left > (HAS_EDGE ? 1 : 0)) {
                store_lane(here, 0, step<true, false>(carry, load_lane<false>(here, 0)));
                next();
            } else if (left == 1) {
                store_lane(here, 0, step<true, HAS_EDGE>(carry, load_lane<HAS_EDGE>(here, 0)));
                next();
            }
        }
        while (left > (HAS_EDGE ? 1 : 0)) {
            store_lane(here, 0, step<false, false>(carry, load_lane<false>(here, 0)));
            next();
        }
        if (HAS_EDGE && left)
            store_lane(here, 0, step<false, HAS_EDGE>(carry, load_lane<HAS_EDGE>(here, 0)));
        set_final(here.at, own.job.shifts, 0, carry);
    }
    return sequence;
}

static __attribute__((noinline)) void scan_sequence(
    const Problem& problem, Scratch& own, i64 sequence
) {
    WRITES_MEMORY;
    Job& job = own.job;
    enter_sequence(problem, sequence, job);
    load_init(job.at, job.shifts, !DIRECT, own.carry, job.lanes);
    scan_range(problem, own, own.carry, false, job.span.count, true);
    store_final(job.at, job.shifts, !DIRECT, own.carry, job.lanes);
}

// Scans the sequences first + order[0], first + order[1], … side by side, the longest first.
[[maybe_unused]] static __attribute__((noinline)) void scan_beside(
    const Problem& problem, Scratch& own, i64 first, const int* order, int lanes
) {
    WRITES_MEMORY;
    Job& job = own.job;
    Buffers& buffers = own.buffers[0];
    LiveLanes& ending = own.batch[0].ending;
    i64 count[WIDE], done = 0;
    for (int w = 0; w < lanes; ++w) {
        const Span span = sequence_span(problem, first + order[w]);
        count[w] = span.count;
        job.at[w] = job.row[0];
        start(problem, job.at[w], first + order[w], span);
    }
    load_init(job.at, job.shifts, true, own.carry, lanes);
    while (lanes > 0) {
        int staying = lanes;  // lanes that go on; the others are as long as the last, and end here
        while (staying > 0 && count[staying - 1] == count[lanes - 1]) --staying;
        i64 steps = count[lanes - 1] - done;
        const i64 edge = HAS_EDGE && staying > 0 && steps > 0 ? 1 : 0;  // a last step that differs
        steps -= edge;
        staged_scan(problem, job.at, buffers, own.carry, done > 0, lanes, steps, !edge);
        for (int w = 0; w < lanes; ++w) move(problem, job.at[w], steps);
        done += steps;
        for (int w = staying; w < lanes; ++w) ending.set(w - staying, own.carry.get(w));
        staged_scan(problem, job.at + staying, buffers, ending, done > 0, lanes - staying, edge, true);
        store_final(job.at + staying, job.shifts, true, ending, lanes - staying);
        lanes = staying;
    }
}

// Scans the sequences of a batch.
[[maybe_unused]] static __attribute__((noinline)) void scan_batch(
    const Problem& problem, Scratch& own, i64 first, int count
) {
    WRITES_MEMORY;
    Batch& batch = own.batch[0];
    const i64* offsets = problem.offsets + first;
    std::memset(batch.begin, 0, sizeof batch.begin);
    for (int k = 0; k < count; ++k) {
        const i64 steps = offsets[k + 1] - offsets[k];
        if (steps >= BESIDE) scan_sequence(problem, own, first + k);
        else ++batch.begin[steps];
    }
    int total = 0;
    for (int steps = BESIDE; steps >= 0; --steps) {
        const int ours = batch.begin[steps];
        batch.begin[steps] = total;
        total += ours;
    }
    for (int k = 0; k < count; ++k) {
        const i64 steps = offsets[k + 1] - offsets[k];
        if (steps < BESIDE) batch.order[batch.begin[steps]++] = k;
    }
    for (int k = 0; k < total; k += WIDE)
        scan_beside(problem, own, first, batch.order + k, total - k < WIDE ? total - k : WIDE);
}

// Scans sequences of one row, those of at most RUN steps in runs.
[[maybe_unused]] static void scan_in_runs(
    const Problem& problem, Scratch& own, i64 first, i64 end
) {
    Job& job = own.job;
    std::memset(own.runs->mark, 0, sizeof own.runs->mark);
    for (i64 sequence = first; sequence < end;) {
        const i64 next = scan_runs(problem, job.row[0], job.shifts, own.buffers[0], own.carry,
                                   *own.runs, job.at, sequence, end);
        if (next == sequence) scan_sequence(problem, own, sequence++);
        else sequence = next;
    }
}

static void scan_sequences(const Problem& problem, Scratch& own, i64 first, i64 end) {
    if constexpr (BESIDE > 0) {
        if (own.job.lanes == 1 && problem.offsets) {
            for (; first < end; first += BATCH)
                scan_batch(problem, own, first, (int)(end - first < BATCH ? end - first : BATCH));
            return;
        }
    }
    if constexpr (RUN > 0) {
        if (own.job.lanes == 1 && problem.offsets) {
            scan_in_runs(problem, own, first, end);
            return;
        }
    }
    for (i64 sequence = first; sequence < end; ++sequence) {
        if constexpr (SHORT > 0) {
            if (own.job.lanes == 1 && problem.offsets)
                sequence = walk_sequences(problem, own, sequence, end);
        }
        if (sequence < end) scan_sequence(problem, own, sequence);
    }
}

static void job_worker(void* context, i64 worker) {
    Jobs& jobs = *(Jobs*)context;
    Scratch& own = jobs.scratch[worker];
    const i64 blocks = jobs.blocks * jobs.rows;
    for (;;) {
        const i64 index = __atomic_fetch_add(&jobs.next, 1, __ATOMIC_RELAXED);
        if (index >= jobs.count) return;
        rows_of(jobs, index % blocks, own.job);
        const i64 part = index / blocks;
        const i64 first = first_sequence(*jobs.problem, part, jobs.parts);
        const i64 end = first_sequence(*jobs.problem, part + 1, jobs.parts);
        scan_sequences(*jobs.problem, own, first, end);
    }
}

// ---- Chunks of one job ----

struct Chunks {
    const Problem* problem;
    i64 threads, size;
    Job job;            // the whole job
    Scratch* scratch;   // one per worker
    LiveLanes* enter;   // enter[k]: the carry after chunk k, which enters chunk k + 1
    LiveLanes* entered; // a copy of it, which the second pass does not change
    StateLanes* total;  // total[k]: the total of chunk k, 1 <= k < threads
};

// Sets `job` to chunk k of the whole job; returns the number of its steps.
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

// Scans chunk k from the carry that enters it, in one thread.
static void scan_chunk(Chunks& chunks, i64 k, LiveLanes& carry) {
    Scratch& own = chunks.scratch[0];
    const i64 count = chunk_of(chunks, k, own.job);
    scan_range(*chunks.problem, own, carry, true, count, k == chunks.threads);
}

static void copy_lanes(LiveLanes& to, const LiveLanes& from, int lanes) {
    for (int w = 0; w < lanes; ++w) to.set(w, from.get(w));
}

// Sets enter[k] to the carry after chunk k: enter[k - 1] combined with total[k]. Without a second pass
// the chunk is scanned from enter[k - 1] if that gave what no loop gives (loop_order.h).
static void carry_after(Chunks& chunks, i64 k) {
    const LiveLanes& before = chunks.enter[k - 1];
    LiveLanes& after = chunks.enter[k];
    bool left_range = false;
    for (int w = 0; w < chunks.job.lanes; ++w) {
        const Live carry = before.get(w);
        const State total = chunks.total[k].get(w);
        const Live found = advance_one(carry, total);
        left_range |= may_leave_range(carry, total, found);
        after.set(w, found);
    }
    if (!REDUCES || !left_range) return;
    copy_lanes(after, before, chunks.job.lanes);
    scan_chunk(chunks, k, after);
}

// After the second pass enter[k] is the carry that left chunk k + 1, by its steps. Where chunk k + 2
// was scanned from another one that no loop gives, it is scanned again.
static void rescan(Chunks& chunks) {
    const int lanes = chunks.job.lanes;
    for (i64 k = 0; k + 1 < chunks.threads; ++k) {
        const LiveLanes& in_order = chunks.enter[k];
        bool replaced = false;
        for (int w = 0; w < lanes; ++w)
            replaced |= is_replaced(chunks.entered[k + 1].get(w), in_order.get(w));
        if (!replaced) continue;
        copy_lanes(chunks.enter[k + 1], in_order, lanes);
        scan_chunk(chunks, k + 2, chunks.enter[k + 1]);
    }
}

// Scans one job with all threads. First pass: thread 0 scans chunk 0, which turns enter[0] from the
// initial carry into the carry after chunk 0; thread k reduces chunk k to total[k]. Then each enter[k]
// follows from enter[k - 1] and total[k]. Second pass: chunk k + 1 is scanned from enter[k]. Without
// outputs (REDUCES) there is no second pass, and the last carry is the result.
static void run_chunks(Chunks& chunks, Worker* workers) {
    const Job& job = chunks.job;
    const i64 threads = chunks.threads;
    LiveLanes* enter = chunks.enter;
    chunks.size = job.span.count / (threads + !REDUCES);
    load_init(job.at, job.shifts, !DIRECT, enter[0], job.lanes);
    parallel(threads, first_pass, &chunks, workers);
    for (i64 k = 1; k < threads; ++k) carry_after(chunks, k);
    if constexpr (!REDUCES) {
        for (i64 k = 0; k < threads; ++k) copy_lanes(chunks.entered[k], enter[k], job.lanes);
        parallel(threads, second_pass, &chunks, workers);
        rescan(chunks);
    }
    store_final(job.at, job.shifts, !DIRECT, enter[threads - 1], job.lanes);
}
