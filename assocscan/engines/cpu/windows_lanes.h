// The lanes of windows.h: where they are, and how they read and write steps.
//
// Lanes are neighbours in memory (UNIT), and their steps are read as they lie; or each is a row, and
// tiles of STEPS steps are transposed.
#pragma once
#include "threads.h"

#include <cstdlib>

#define INLINE_METHOD inline __attribute__((always_inline))
#define WRITES_MEMORY asm volatile("" ::: "memory")
#include "transpose.h"

struct Leaf { char* data; };
// block, segments: the steps of a block, and into how many segments it is cut. tiles: how many of
// inputs are kept. lanes: the most of a job. pieces: the most of a sequence.
struct Problem {
    i64 outer, steps, inner, width, reverse, sequences, block, segments, tiles, lanes, threads,
        pieces, groups, parts, next;
    const i64* offsets;
    Leaf leaf[LEAVES];
    int failed;
};
struct At { char* p[LEAVES]; };

// The first step of a segment of a block, and of the one after the last.
static inline i64 segment_start(const Problem& problem, i64 segment) {
    return segment * problem.block / problem.segments;
}
static inline i64 longest_segment(const Problem& problem) {
    return (problem.block + problem.segments - 1) / problem.segments;
}

// Arrays of a struct's fields, each `pitch` apart.
#define POINTER(name, type, ...) type* name;
#define PLACE(name, type, ...) name = (type*)memory; memory += (count * (i64)sizeof(type) + 63) / 64 * 64;
#define ROOM(name, type, ...) + (count * (i64)sizeof(type) + 63) / 64 * 64
#define GET(name, ...) name[i],
#define SET(name, ...) name[i] = v.name;
#define ARRAYS(NAME, VALUE, LIST) \
    struct NAME { \
        LIST(POINTER) \
        void place(char*& memory, i64 count) { (void)count; LIST(PLACE) (void)memory; } \
        static i64 room(i64 count) { (void)count; return 0 LIST(ROOM); } \
        INLINE_METHOD VALUE get(i64 i) const { (void)i; return {LIST(GET)}; } \
        INLINE_METHOD void set(i64 i, const VALUE& v) { (void)i; (void)v; LIST(SET) } \
    };
ARRAYS(States, State, STATE)
#if GRADIENT
ARRAYS(Cotangents, Cotangent, COTANGENTS)
#endif

struct Inputs {
    INPUTS(POINTER)
    void place(char*& memory, i64 count) { (void)count; INPUTS(PLACE) (void)memory; }
    static i64 room(i64 count) { (void)count; return 0 INPUTS(ROOM); }
};

struct alignas(64) Tile {
#define FIELD(name, value, ...) value name[STEPS][WIDE];
#if GRADIENT
    struct { GIVEN(FIELD) } y;
    struct { GRADIENTS(FIELD) } z;
#else
    struct { OUTPUTS(FIELD) } y;
#endif
#undef FIELD
};

// A job: lanes that each walk along a piece of a chain, in the same order of steps. The first
// `opening` of them begin where their sequence does. The others have a block before, of steps below 0, in
// whose place those read their own first block.
// No lane has more steps than the lane before it.
struct Job {
    const Problem& problem;
    Tile& tile;
    Inputs x;            // tiles of inputs; the tiles of a block are kept, where there is room
    i64 *x_at, y_at;     // the first step of what each of them holds, and of what `tile` holds
    i64 step;            // from one step of a lane to the next, in elements
    int lanes, opening;
    i64 start[WIDE];     // the element at step 0 of each lane; UNIT: lane 0 has it for all
    i64 writes[WIDE];    // the steps of each lane's piece
    i64 reads[WIDE];     // those and, in a gradient, the steps of the block after the piece

    // The number of lanes, the first ones, that have more than t steps.
    template <bool UNIT> int with_more(const i64* steps, i64 t) const {
        if (UNIT) return steps[0] > t ? lanes : 0;
        int w = lanes;
        while (w > 0 && steps[w - 1] <= t) --w;
        return w;
    }
    void forget() {
        for (i64 k = 0; x_at && k < problem.tiles; ++k) x_at[k] = -1;
        y_at = -1;
    }
};

// Lanes of a tile that have equally many steps in it.
struct Run { int lane, lanes, steps; };

static inline Run run_from(const Job& job, int lane, const i64* steps, i64 t) {
    if (lane >= job.lanes || steps[lane] <= t) return {lane, 0, 0};
    const i64 n = steps[lane] - t < STEPS ? steps[lane] - t : STEPS;
    int end = job.lanes;
    while ((steps[end - 1] - t < STEPS ? steps[end - 1] - t : STEPS) != n) --end;
    return {lane, end - lane, (int)n};
}

// Some steps: in memory, `step` elements apart, or from `row` of the tiles of inputs on, and from
// row m of the other tiles on.
struct Here { At at; Tile& tile; Inputs x; i64 step, row; int m; };

static void lanes_of(const Job& job, const Run& run, i64 t, int leaf, i64 shift, char** lane) {
    for (int w = 0; w < run.lanes; ++w) {
        const i64 step = t < 0 && run.lane + w < job.opening ? t + job.problem.block : t;
        lane[w] = job.problem.leaf[leaf].data + shift
            + (job.start[run.lane + w] + step * job.step) * ELEMENT_BYTES[leaf];
    }
}

#define GATHER(rows, name, value, memory, leaf, offset, components) \
    lanes_of(job, run, t + skipped, leaf, offset * (i64)sizeof(memory), lane); \
    gather<value, memory>((value(*)[WIDE])((value*)(rows.name) + run.lane), lane, \
                          job.step * ELEMENT_BYTES[leaf], run.lanes, run.steps - skipped);
#define SCATTER(part, name, value, memory, leaf, offset, components) \
    lanes_of(job, run, t, leaf, offset * (i64)sizeof(memory), lane); \
    scatter<value, memory>((const value(*)[WIDE])&job.tile.part.name[0][run.lane], lane, \
                           job.step * ELEMENT_BYTES[leaf], run.lanes, run.steps);
#define FOR_RUNS(steps) \
    char* lane[WIDE]; \
    (void)lane; \
    for (Run run = run_from(job, 0, steps, t); run.lanes > 0; \
         run = run_from(job, run.lane + run.lanes, steps, t))

// Which of the tiles of inputs is for step t.
static inline i64 place_of(const Problem& problem, i64 t) {
    return (t / STEPS + (problem.block + STEPS) / STEPS) % problem.tiles;
}

// Fills the tile from step t on. GIVES: with cotangents, else with inputs.
template <bool GIVES> static __attribute__((noinline)) void load_tile(const Job& job, i64 t) {
    WRITES_MEMORY;
    // Nothing is read before the block before the first one.
    const int skipped = t < -job.problem.block ? (int)(-job.problem.block - t) : 0;
    FOR_RUNS(job.reads) {
        if constexpr (!GIVES) {
            const i64 row = (place_of(job.problem, t) * STEPS + skipped) * WIDE;
#define F(...) GATHER(row + job.x, __VA_ARGS__)
            INPUTS(F)
#undef F
        }
#if GRADIENT
        else {
#define F(...) GATHER(job.tile.y, __VA_ARGS__)
            GIVEN(F)
#undef F
        }
#endif
    }
}

static __attribute__((noinline)) void store_tile(const Job& job, i64 t) {
    WRITES_MEMORY;
    FOR_RUNS(job.writes) {
#if GRADIENT
#define F(...) SCATTER(z, __VA_ARGS__)
        GRADIENTS(F)
#else
#define F(...) SCATTER(y, __VA_ARGS__)
        OUTPUTS(F)
#endif
#undef F
    }
}

// Step t, whose inputs, and cotangents with GIVES, are there; so are those of the steps after it in the
// same tile. Tiles begin at multiples of STEPS, wherever blocks do.
template <bool UNIT, bool GIVES> INLINE Here reach(Job& job, i64 t) {
    Here here = {{}, job.tile, job.x, job.step, 0, (int)(t & (STEPS - 1))};
    if constexpr (UNIT) {
        const i64 element = job.start[0] + t * job.step;
        for (int k = 0; k < LEAVES; ++k)
            here.at.p[k] = job.problem.leaf[k].data + element * ELEMENT_BYTES[k];
    } else {
        const i64 first = t - here.m, place = place_of(job.problem, first);
        here.row = place * STEPS + here.m;
        if (READS_INPUTS && job.x_at[place] != first) load_tile<false>(job, job.x_at[place] = first);
        if (GIVES && job.y_at != first) load_tile<true>(job, job.y_at = first);
    }
    return here;
}

// Results are made in the order of steps, and leave when their tile is complete.
template <bool UNIT> INLINE void leave(const Job& job, i64 t) {
    if constexpr (!UNIT)
        if (t % STEPS == STEPS - 1 || t == job.writes[0] - 1) store_tile(job, t - t % STEPS);
}

#define MEMORY(memory, leaf, offset, components) \
    ((memory*)(here.at.p[leaf] + k * here.step * ELEMENT_BYTES[leaf]))[w * components + offset]

// Step k from `here` on.
template <bool UNIT> INLINE Raw load_x(const Here& here, int k, i64 w) {
    Raw v;
    (void)w; (void)k; (void)here;
#define F(name, value, memory, leaf, offset, components) \
    if constexpr (UNIT) v.name = from_memory<value>(MEMORY(const memory, leaf, offset, components)); \
    else v.name = here.x.name[(here.row + k) * WIDE + w];
    INPUTS(F)
#undef F
    return v;
}

#define STORE(part, name, value, memory, leaf, offset, components) \
    if constexpr (UNIT) MEMORY(memory, leaf, offset, components) = to_memory<memory>(v.name); \
    else here.tile.part.name[here.m + k][w] = v.name;

#if GRADIENT
template <bool UNIT> INLINE OutCotangent load_g(const Here& here, int k, i64 w) {
    OutCotangent v;
#define F(name, value, memory, leaf, offset, components) \
    if constexpr (UNIT) v.name = from_memory<value>(MEMORY(const memory, leaf, offset, components)); \
    else v.name = here.tile.y.name[here.m + k][w];
    GIVEN(F)
#undef F
    return v;
}

template <bool UNIT>
INLINE void store_gradient(const Here& here, int k, i64 w, const RawCotangent& v) {
#define F(...) STORE(z, __VA_ARGS__)
    GRADIENTS(F)
#undef F
}
#else
template <bool UNIT> INLINE void store_y(const Here& here, int k, i64 w, const Out& v) {
#define F(...) STORE(y, __VA_ARGS__)
    OUTPUTS(F)
#undef F
}
#endif
