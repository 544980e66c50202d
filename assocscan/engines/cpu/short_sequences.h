// Short packed sequences of one row, for cheap operators that select: one after the other they would be
// scanned with a branch per step that depends on the numbers.
//
// Neighbouring sequences make a run of at most RUN steps. WIDE runs are the lanes of tiles, and are
// scanned side by side: where a sequence begins the carry is replaced, by a mark and not by a branch,
// because a processor cannot foresee the ends of short sequences. Each sequence is still scanned step by
// step. What the scan needs or leaves once per sequence (init, boundary, final) lies in a table with a
// row per step; one loop over the sequences of a run fills it before the scan, another reads it after.
#pragma once
#include "staged.h"

// How the steps of a run are marked: the first and the last one of a sequence.
constexpr int HEAD = 1, TAIL = 2;

// The row that stands for no step: empty sequences write and read there.
constexpr int NOWHERE = RUN;

static_assert(RUN % STEPS == 0, "the tables hold whole tiles");

struct alignas(64) Runs {
    unsigned char mark[RUN + 1][WIDE];  // 0 but while runs are scanned
    int marks[STEPS][WIDE];               // `mark` of the steps of one tile
#define FIELD(name, value, ...) value name[RUN + 1][WIDE];
    struct Inits { INITS(FIELD) } init;
    struct Finals { FINALS(FIELD) } final;
#undef FIELD
#define FIELD(name, value, memory, leaf, offset, lane, edge, ...) \
    value name[edge < 0 ? 0 : RUN + 1][WIDE];
    struct Boundaries { INPUTS(FIELD) } boundary;
#undef FIELD
    i64 first[WIDE + 1];  // the first sequence of each run
    i64 count[WIDE];      // its steps
};

// The steps of one sequence in its run, from `from` on.
struct Steps {
    i64 from, count;
    INLINE_METHOD i64 head() const { return count ? from : NOWHERE; }
    INLINE_METHOD i64 tail() const { return count ? from + count - 1 : NOWHERE; }
};

INLINE Steps steps_of(const Problem& problem, const Span& run, i64 sequence) {
    const i64 begin = problem.offsets[sequence], end = problem.offsets[sequence + 1];
    return {problem.reverse ? run.begin + run.count - end : begin - run.begin, end - begin};
}

static inline Span run_span(const Problem& problem, const Runs& runs, int w) {
    return {problem.offsets[runs.first[w]], runs.count[w]};
}

// The carries of each sequence of a row.
struct Carries {
    At row;
    i64 between[LEAVES];
    INLINE_METHOD At at(i64 sequence) const {
        At at = row;
        for (int k = 0; k < LEAVES; ++k) at.p[k] += sequence * between[k];
        return at;
    }
};

static inline Carries carries_of(const Problem& problem, const At& row) {
    Carries carries = {row, {}};
    for (int k = 0; k < LEAVES; ++k) carries.between[k] = problem.leaf[k].sequence;
    return carries;
}

// Makes up to WIDE runs from number `sequence` on, until one is longer than RUN, and returns their
// number. A few sequences are spread over all runs.
static int make_runs(const Problem& problem, Runs& runs, i64 sequence, i64 end) {
    const i64* offsets = problem.offsets;
    const i64 share = (offsets[end] - offsets[sequence]) / WIDE + 1;
    int lanes = 0;
    for (; lanes < WIDE && sequence < end; ++lanes) {
        const i64 begin = offsets[sequence], most = begin + RUN;
        const i64 enough = begin + (share < RUN ? share : RUN);
        runs.first[lanes] = sequence;
        while (sequence < end && offsets[sequence + 1] <= most && offsets[sequence] < enough) ++sequence;
        if (sequence == runs.first[lanes]) break;
        runs.count[lanes] = offsets[sequence] - begin;
    }
    for (int w = lanes; w < WIDE; ++w) runs.count[w] = 0;
    for (int w = lanes; w <= WIDE; ++w) runs.first[w] = sequence;
    return lanes;
}

static __attribute__((noinline)) void mark_run(
    const Problem& problem, const Carries& carries, Runs& runs, int w
) {
    WRITES_MEMORY;
    const Span run = run_span(problem, runs, w);
    for (i64 sequence = runs.first[w]; sequence < runs.first[w + 1]; ++sequence) {
        const Steps steps = steps_of(problem, run, sequence);
        const i64 head = steps.head(), tail = steps.tail();
        const At at = carries.at(sequence);
        runs.mark[head][w] = HEAD;
        if constexpr (HAS_EDGE) runs.mark[tail][w] |= TAIL;
        (void)at; (void)tail;
#define COPY(name, value, memory, leaf, offset, lane) \
        runs.init.name[head][w] = from_memory<value>(((const memory*)at.p[leaf])[offset]);
        INITS(COPY)
#undef COPY
#define COPY(name, value, memory, leaf, offset, lane, edge, edge_memory, edge_offset, edge_lane) \
        if constexpr (edge >= 0) \
            runs.boundary.name[tail][w] = from_memory<value>( \
                ((const edge_memory*)at.p[edge < 0 ? 0 : edge])[edge_offset]);
        INPUTS(COPY)
#undef COPY
    }
}

static __attribute__((noinline)) void store_finals(
    const Problem& problem, const Carries& carries, const Shifts& shifts, Runs& runs, int w
) {
    WRITES_MEMORY;
    const Span run = run_span(problem, runs, w);
    for (i64 sequence = runs.first[w]; sequence < runs.first[w + 1]; ++sequence) {
        const At at = carries.at(sequence);
        const i64 tail = steps_of(problem, run, sequence).tail();
        Live carry = initial(at, shifts, 0);
        (void)tail;
#define CHOOSE(name, ...) \
        runs.final.name[NOWHERE][w] = carry.name; \
        carry.name = runs.final.name[tail][w];
        FINALS(CHOOSE)
#undef CHOOSE
        set_final(at, shifts, 0, carry);
    }
}

// Whether the steps of a tile that lie behind the end of a run may be read: all are steps of the row. A
// leaf that is read one step ahead needs one more.
static bool is_inside(const Problem& problem, const Runs& runs, i64 t) {
    const i64 most = t + STEPS + HAS_EDGE;
    const i64 first = problem.offsets[runs.first[0]];
    if (problem.reverse) return first + runs.count[0] >= most;
    return problem.offsets[runs.first[WIDE - 1]] + most <= problem.length;
}

// How many steps of run w the tile that begins with step t reads. The last `ahead` steps of a run are
// not read.
static inline int steps_in_tile(const Runs& runs, int w, i64 t, int ahead) {
    const i64 left = runs.count[w] - ahead - t;
    return (int)(left < 0 ? 0 : left < STEPS ? left : STEPS);
}

// Where step t of each run is in a leaf, `shift` bytes behind its element's beginning.
static inline void lanes_at(const Problem& problem, const At* at, int leaf, i64 shift, i64 t, char** lane) {
    const i64 step = step_of(problem, leaf);
    for (int w = 0; w < WIDE; ++w) lane[w] = at[w].p[leaf] + shift + t * step;
}

static void load_runs(
    const Problem& problem, const At* at, Tile& tile, const Runs& runs, i64 t
) {
    char* lane[WIDE];
    const bool whole = is_inside(problem, runs, t);
#define LOAD(name, value, memory, leaf, offset, ...) { \
        const i64 step = step_of(problem, leaf); \
        lanes_at(problem, at, leaf, offset * (i64)sizeof(memory), t, lane); \
        if (whole) gather<value, memory>(tile.x.name, lane, step, WIDE, STEPS); \
        for (int w = 0; !whole && w < WIDE; ++w) \
            gather<value, memory>((value (*)[WIDE])&tile.x.name[0][w], lane + w, step, 1, \
                                  steps_in_tile(runs, w, t, SHIFTED[leaf])); }
    INPUTS(LOAD)
#undef LOAD
    (void)lane; (void)whole;
}

static void store_runs(
    const Problem& problem, const At* at, const Tile& tile, const Runs& runs, i64 t, bool whole
) {
    char* lane[WIDE];
#define STORE(name, value, memory, leaf, offset, ...) { \
        const i64 step = step_of(problem, leaf); \
        lanes_at(problem, at, leaf, offset * (i64)sizeof(memory), t, lane); \
        if (whole) scatter<value, memory>(tile.y.name, lane, step, WIDE, STEPS); \
        for (int w = 0; !whole && w < WIDE; ++w) \
            scatter<value, memory>((const value (*)[WIDE])&tile.y.name[0][w], lane + w, step, 1, \
                                   steps_in_tile(runs, w, t, 0)); }
    OUTPUTS(STORE)
#undef STORE
    (void)lane;
}

// The carry that enters the sequence whose first step is step t of run w.
INLINE Live entering(const Runs& runs, i64 t, int w) {
    Live v = identity();
    (void)runs; (void)t; (void)w;
#define LOAD(name, ...) v.name = runs.init.name[t][w];
    INITS(LOAD)
#undef LOAD
    return v;
}

INLINE Live choose(bool which, const Live& a, const Live& b) {
    Live v = b;
    (void)which; (void)a;
#define CHOOSE(name, ...) v.name = which ? a.name : b.name;
    LIVE(CHOOSE)
#undef CHOOSE
    return v;
}

INLINE Raw raw_of(const Tile& tile, const Runs& runs, i64 t, int m, int w, bool tail) {
    Raw x = tile.raw(m, w);
    (void)runs; (void)t; (void)tail;
#define CHOOSE(name, value, memory, leaf, offset, lane, edge, ...) \
    if constexpr (SHIFTED[leaf] && edge >= 0) x.name = tail ? runs.boundary.name[t][w] : x.name; \
    else if constexpr (SHIFTED[leaf]) x.name = tail ? (value)0 : x.name;
    INPUTS(CHOOSE)
#undef CHOOSE
    return x;
}

// Row m of the tile, step t of run w.
INLINE void run_step(Tile& tile, Runs& runs, Live& carry, i64 t, int m, int w) {
    const bool head = runs.marks[m][w] & HEAD, tail = HAS_EDGE && runs.marks[m][w] & TAIL;
    const Raw x = raw_of(tile, runs, t, m, w, tail);
    const State s = lift(x);
    const Live before = HAS_INIT ? choose(head, entering(runs, t, w), carry) : carry;
    carry = advance(before, s);
    if constexpr (!HAS_INIT) carry = choose(head, begin(s), carry);
    tile.set_output(m, w, lower(EXCLUSIVE ? before : carry, x, tail));
#define STORE(name, ...) runs.final.name[t][w] = carry.name;
    FINALS(STORE)
#undef STORE
}

// All lanes and steps of a tile: what lies behind the end of a run is computed and not stored.
static __attribute__((noinline)) void tile_of_runs(
    Tile& tile, Runs& runs, LiveLanes& carry, i64 t
) {
    WRITES_MEMORY;
    for (int m = 0; m < STEPS; ++m)
        for (int w = 0; w < WIDE; ++w) runs.marks[m][w] = runs.mark[t + m][w];
    std::memset(runs.mark[t], 0, STEPS * sizeof runs.mark[0]);
#pragma GCC ivdep
    for (int w = 0; w < WIDE; ++w) {
        Live c = carry.get(w);
#pragma GCC unroll 16
        for (int m = 0; m < STEPS; ++m) run_step(tile, runs, c, t + m, m, w);
        carry.set(w, c);
    }
}

// Reads one byte per cache line of the inputs of all runs, in the order of memory: the lanes of a tile
// are too many streams, and too short ones, for the processor to fetch ahead. The first and the last step
// are left out, because a leaf that is read one step ahead may not have them.
static void touch_inputs(const Problem& problem, const At& row, i64 begin, i64 end) {
    constexpr i64 LINE_BYTES = 64;
#define TOUCH(name, value, memory, leaf, ...) { \
        const i64 step = problem.reverse ? -step_of(problem, leaf) : step_of(problem, leaf); \
        const i64 apart = step == 0 ? end : step < LINE_BYTES ? LINE_BYTES / step : 1; \
        for (i64 t = begin + 1; t < end - 1; t += apart) \
            (void)*(const volatile char*)(row.p[leaf] + t * step); }
    INPUTS(TOUCH)
#undef TOUCH
}

// Scans up to WIDE runs of one row, from number `sequence` on and up to the first that is longer than
// RUN. Returns the sequence that follows.
[[maybe_unused]] static __attribute__((noinline)) i64 scan_runs(
    const Problem& problem, const At& row, const Shifts& shifts, Buffers& buffers, LiveLanes& carry,
    Runs& runs, At* at, i64 sequence, i64 end
) {
    WRITES_MEMORY;
    const int lanes = make_runs(problem, runs, sequence, end);
    const Carries carries = carries_of(problem, row);
    touch_inputs(problem, row, problem.offsets[sequence], problem.offsets[runs.first[WIDE]]);
    i64 longest = 0, shortest = RUN;
    for (int w = 0; w < WIDE; ++w) {
        at[w] = row;
        start(problem, at[w], 0, run_span(problem, runs, runs.count[w] ? w : 0));
        mark_run(problem, carries, runs, w);
        longest = runs.count[w] > longest ? runs.count[w] : longest;
        shortest = runs.count[w] < shortest ? runs.count[w] : shortest;
    }
    for (i64 t = 0; t < longest; t += STEPS) {
        load_runs(problem, at, buffers.tile, runs, t);
        tile_of_runs(buffers.tile, runs, carry, t);
        store_runs(problem, at, buffers.tile, runs, t, t + STEPS <= shortest);
    }
    if constexpr (HAS_FINAL)
        for (int w = 0; w < WIDE; ++w) store_finals(problem, carries, shifts, runs, w);
    return runs.first[lanes];
}
