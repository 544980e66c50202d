// Windows of the last `width` steps, and their gradient, over [outer, steps, inner] in one pass.
//
// Before this file the generator (windows.py) writes the operator and its ports:
//   struct State, Raw, Out; lift, combine, lower
//   INPUTS(F), OUTPUTS(F), STATE(F)                  one F(...) per scalar
//   for a gradient: struct Cotangent, OutCotangent, RawCotangent; lower_vjp, combine_vjp, lift_vjp;
//   COTANGENTS(F), GIVEN(F), GRADIENTS(F)
//   LEAVES, GRADIENT
// A leaf is one tensor, contiguous, its element's components innermost.
//
// The axis is cut into blocks of `width` steps. With P[t] the steps of t's block up to t, and S[t]
// those from t on, a window that ends at t is S'[t + 1] ∘ P[t], with S' of the block before; or P[t]
// alone at the last step of a block and in the first block. S' stays in the cache: a job is a few
// chains, its lanes, whose blocks follow one another. Lanes are neighbours in memory where there are
// many of them (UNIT); else they are rows, whose tiles of STEPS are transposed.
//
// Backward, with μ the cotangents of S and λ those of P: λ is computed from the end of a block to its
// beginning. The block's windows also give the last parts of μ in the block before; then μ of that
// block is computed from its beginning to its end.
// Where no window begins, μ gets nothing, rather than a zero: 0 × inf would be NaN.
#pragma once
#include "threads.h"

#include <cstdlib>

#define INLINE_METHOD inline __attribute__((always_inline))
#define WRITES_MEMORY asm volatile("" ::: "memory")
#include "transpose.h"

constexpr int DONE = 0, NO_MEMORY = 1;
constexpr int MOST_LANES = 256;
constexpr i64 STATES_BYTES = 1 << 20;  // of one array of states, where there are lanes to choose from

struct Leaf { char* data; };
struct Problem {
    i64 outer, steps, inner, width, reverse, sequences, lanes, threads, next;
    const i64* offsets;
    Leaf leaf[LEAVES];
    int failed;
};
struct At { char* p[LEAVES]; };

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

struct alignas(64) Tile {
#define FIELD(name, value, ...) value name[STEPS][WIDE];
    struct { INPUTS(FIELD) } x;
#if GRADIENT
    struct { GIVEN(FIELD) } y;
    struct { GRADIENTS(FIELD) } z;
#else
    struct { OUTPUTS(FIELD) } y;
#endif
#undef FIELD
};

// A job: `lanes` chains from number `first` on, and the sequence that it is at.
struct Job {
    const Problem& problem;
    Tile& tile;
    i64 first, row;  // the first chain, and its first element
    int lanes;
    i64 begin, count;
    i64 x_at, y_at;  // the first step of what the tile holds of inputs and of cotangents

    i64 place(i64 t) const { return problem.reverse ? begin + count - 1 - t : begin + t; }
};

static i64 row_of(const Problem& problem, i64 chain) {
    return chain / problem.inner * problem.steps * problem.inner + chain % problem.inner;
}

// Step t: in memory, or in row m of the tile.
struct Here { At at; Tile& tile; int m; };

static void lanes_of(const Job& job, i64 t, int leaf, i64 shift, char** lane) {
    for (int w = 0; w < job.lanes; ++w)
        lane[w] = job.problem.leaf[leaf].data + shift
            + (row_of(job.problem, job.first + w) + job.place(t) * job.problem.inner)
                * ELEMENT_BYTES[leaf];
}

#define GATHER(part, name, value, memory, leaf, offset, components) \
    lanes_of(job, t, leaf, offset * (i64)sizeof(memory), lane); \
    gather<value, memory>(job.tile.part.name, lane, step * ELEMENT_BYTES[leaf], job.lanes, n);
#define SCATTER(part, name, value, memory, leaf, offset, components) \
    lanes_of(job, t, leaf, offset * (i64)sizeof(memory), lane); \
    scatter<value, memory>(job.tile.part.name, lane, step * ELEMENT_BYTES[leaf], job.lanes, n);

// Fills the tile from step t on. GIVES: with cotangents, else with inputs.
template <bool GIVES> static __attribute__((noinline)) void load_tile(const Job& job, i64 t) {
    WRITES_MEMORY;
    char* lane[WIDE];
    const i64 step = job.problem.reverse ? -job.problem.inner : job.problem.inner;
    const int n = job.count - t < STEPS ? (int)(job.count - t) : STEPS;
    (void)lane; (void)step; (void)n;
    if constexpr (!GIVES) {
#define F(...) GATHER(x, __VA_ARGS__)
        INPUTS(F)
#undef F
    }
#if GRADIENT
    else {
#define F(...) GATHER(y, __VA_ARGS__)
        GIVEN(F)
#undef F
    }
#endif
}

static __attribute__((noinline)) void store_tile(const Job& job, i64 t, int n) {
    WRITES_MEMORY;
    char* lane[WIDE];
    const i64 step = job.problem.reverse ? -job.problem.inner : job.problem.inner;
    (void)lane; (void)step;
#if GRADIENT
#define F(...) SCATTER(z, __VA_ARGS__)
    GRADIENTS(F)
#else
#define F(...) SCATTER(y, __VA_ARGS__)
    OUTPUTS(F)
#endif
#undef F
}

// Step t, whose inputs, and cotangents with GIVES, are there. Tiles begin at multiples of STEPS,
// wherever blocks do.
template <bool UNIT, bool GIVES> INLINE Here reach(Job& job, i64 t) {
    Here here = {{}, job.tile, (int)(t % STEPS)};
    if constexpr (UNIT) {
        const i64 element = job.row + job.place(t) * job.problem.inner;
        for (int k = 0; k < LEAVES; ++k)
            here.at.p[k] = job.problem.leaf[k].data + element * ELEMENT_BYTES[k];
    } else {
        const i64 first = t - t % STEPS;
        if (job.x_at != first) load_tile<false>(job, job.x_at = first);
        if (GIVES && job.y_at != first) load_tile<true>(job, job.y_at = first);
    }
    return here;
}

// Results are made in the order of steps, and leave when their tile is complete.
template <bool UNIT> INLINE void leave(const Job& job, i64 t) {
    if constexpr (!UNIT)
        if (t % STEPS == STEPS - 1 || t == job.count - 1)
            store_tile(job, t - t % STEPS, (int)(t % STEPS) + 1);
}

#define LOAD(part, name, value, memory, leaf, offset, components) \
    if constexpr (UNIT) v.name = from_memory<value>( \
        ((const memory*)here.at.p[leaf])[w * components + offset]); \
    else v.name = here.tile.part.name[here.m][w];
#define STORE(part, name, value, memory, leaf, offset, components) \
    if constexpr (UNIT) ((memory*)here.at.p[leaf])[w * components + offset] = \
        to_memory<memory>(v.name); \
    else here.tile.part.name[here.m][w] = v.name;

template <bool UNIT> INLINE Raw load_x(const Here& here, i64 w) {
    Raw v;
    (void)w; (void)here;
#define F(...) LOAD(x, __VA_ARGS__)
    INPUTS(F)
#undef F
    return v;
}

#if GRADIENT
template <bool UNIT> INLINE OutCotangent load_g(const Here& here, i64 w) {
    OutCotangent v;
#define F(...) LOAD(y, __VA_ARGS__)
    GIVEN(F)
#undef F
    return v;
}

template <bool UNIT> INLINE void store_gradient(const Here& here, i64 w, const RawCotangent& v) {
#define F(...) STORE(z, __VA_ARGS__)
    GRADIENTS(F)
#undef F
}
#else
template <bool UNIT> INLINE void store_y(const Here& here, i64 w, const Out& v) {
#define F(...) STORE(y, __VA_ARGS__)
    OUTPUTS(F)
#undef F
}
#endif

// ---- Loops over the lanes of one step ----

// S[t] = x[t] ∘ S[t + 1]; i and next: where in the arrays.
template <bool UNIT, bool LAST>
static __attribute__((noinline)) void suffix_step(
    const Here here, States S, i64 i, i64 next, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State e = lift(load_x<UNIT>(here, w));
        S.set(i + w, LAST ? e : combine(e, S.get(next + w)));
    }
}

template <bool UNIT, bool FIRST>
static __attribute__((noinline)) void prefix_step(
    const Here here, States P, i64 i, i64 before, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State e = lift(load_x<UNIT>(here, w));
        P.set(i + w, FIRST ? e : combine(P.get(before + w), e));
    }
}

#if !GRADIENT
template <bool UNIT, bool FIRST, bool ALONE>
static __attribute__((noinline)) void window_step(
    const Here here, States P, const States S, i64 from, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const Raw x = load_x<UNIT>(here, w);
        const State e = lift(x);
        const State p = FIRST ? e : combine(P.get(w), e);
        P.set(w, p);
        store_y<UNIT>(here, w, lower(ALONE ? p : combine(S.get(from + w), p), x));
    }
}

struct Arrays {
    States P, S;
    static i64 room(i64 width, i64 lanes) { return States::room(lanes) + States::room(width * lanes); }
    void place(char* memory, i64 width, i64 lanes) {
        P.place(memory, lanes);
        S.place(memory, width * lanes);
    }
};

template <bool UNIT> static void sequence(Job& job, Arrays& own) {
    const i64 width = job.problem.width;
    const int lanes = job.lanes;
    for (i64 b = 0; b < job.count; b += width) {
        const i64 n = job.count - b < width ? job.count - b : width;
        for (i64 t = 0; t < n; ++t) {
            const Here here = reach<UNIT, false>(job, b + t);
            const bool alone = b == 0 || t == width - 1;
            const i64 from = (t + 1) * lanes;
#define STEP(FIRST) \
    alone ? window_step<UNIT, FIRST, true>(here, own.P, own.S, 0, lanes) \
          : window_step<UNIT, FIRST, false>(here, own.P, own.S, from, lanes)
            if (t == 0) STEP(true);
            else STEP(false);
#undef STEP
            leave<UNIT>(job, b + t);
        }
        if (b + width >= job.count) break;
        for (i64 t = n - 1; t > 0; --t) {  // no window reads S[0]
            const Here here = reach<UNIT, false>(job, b + t);
            const i64 i = t * lanes;
            if (t == n - 1) suffix_step<UNIT, true>(here, own.S, i, 0, lanes);
            else suffix_step<UNIT, false>(here, own.S, i, i + lanes, lanes);
        }
    }
}
#else

// λ of P[t]; the part of μ at S[t + 1] of the block before; x's cotangent by P, up to lift.
template <bool UNIT, bool FIRST, bool LAST, bool ALONE>
static __attribute__((noinline)) void pull_step(
    const Here here, const States P, i64 i, const States S, Cotangents mu, i64 from,
    Cotangents lambda, Cotangents gx, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const OutCotangent g = load_g<UNIT>(here, w);
        const State p = P.get(i + w);
        Cotangent of_p;
        if constexpr (ALONE) {
            of_p = lower_vjp(p, g);
        } else {
            const State s = S.get(from + w);
            const Pair both = combine_vjp(s, p, lower_vjp(combine(s, p), g));
            mu.set(from + w, both.left);
            of_p = both.right;
        }
        if constexpr (!LAST) of_p = added(of_p, lambda.get(w));
        if constexpr (FIRST) {
            gx.set(i + w, of_p);
        } else {
            const State e = lift(load_x<UNIT>(here, w));
            const Pair both = combine_vjp(P.get(i - lanes + w), e, of_p);
            lambda.set(w, both.left);
            gx.set(i + w, both.right);
        }
    }
}

// x's cotangents of a block. OWN: a window begins here; CARRIED: one began earlier in the block;
// LAST: S[t] is x[t].
template <bool UNIT, bool OWN, bool CARRIED, bool LAST>
static __attribute__((noinline)) void push_step(
    const Here here, const States S, i64 i, const Cotangents mu, Cotangents carry,
    const Cotangents gx, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const Raw x = load_x<UNIT>(here, w);
        Cotangent total = gx.get(i + w);
        if constexpr (OWN || CARRIED) {
            Cotangent m;
            if constexpr (OWN && CARRIED) m = added(mu.get(i + w), carry.get(w));
            else if constexpr (OWN) m = mu.get(i + w);
            else m = carry.get(w);
            if constexpr (LAST) {
                total = added(total, m);
            } else {
                const Pair both = combine_vjp(lift(x), S.get(i + lanes + w), m);
                carry.set(w, both.right);
                total = added(total, both.left);
            }
        }
        store_gradient<UNIT>(here, w, lift_vjp(x, total));
    }
}

struct Arrays {
    States P, S, S_before;
    Cotangents mu, gx, gx_before, lambda, carry;
    static i64 room(i64 width, i64 lanes) {
        return 3 * States::room(width * lanes) + 3 * Cotangents::room(width * lanes)
            + 2 * Cotangents::room(lanes);
    }
    void place(char* memory, i64 width, i64 lanes) {
        const i64 count = width * lanes;
        P.place(memory, count);
        S.place(memory, count);
        S_before.place(memory, count);
        mu.place(memory, count);
        gx.place(memory, count);
        gx_before.place(memory, count);
        lambda.place(memory, lanes);
        carry.place(memory, lanes);
    }
};

// Stores the gradients of a block of n steps from b on. has: the last position of it from which a
// window begins that ends in a later block; 0: there is none.
template <bool UNIT>
static void push(Job& job, Arrays& own, i64 b, i64 n, i64 has, States S, Cotangents gx) {
    const int lanes = job.lanes;
    for (i64 t = 0; t < n; ++t) {
        const Here here = reach<UNIT, false>(job, b + t);
        const i64 i = t * lanes;
        const bool last = t == n - 1;
#define PUSH(OWN, CARRIED) \
    last ? push_step<UNIT, OWN, CARRIED, true>(here, S, i, own.mu, own.carry, gx, lanes) \
         : push_step<UNIT, OWN, CARRIED, false>(here, S, i, own.mu, own.carry, gx, lanes)
        if (t == 0 || has == 0) PUSH(false, false);
        else if (t == 1) PUSH(true, false);
        else if (t <= has) PUSH(true, true);
        else PUSH(false, true);
#undef PUSH
        leave<UNIT>(job, b + t);
    }
}

template <bool UNIT> static void sequence(Job& job, Arrays& own) {
    const i64 width = job.problem.width;
    const int lanes = job.lanes;
    for (i64 b = 0; b < job.count; b += width) {
        const i64 n = job.count - b < width ? job.count - b : width;
        const bool follows = b + width < job.count;
        for (i64 t = 0; t < n; ++t) {
            const Here here = reach<UNIT, false>(job, b + t);
            const i64 i = t * lanes;
            if (t == 0) prefix_step<UNIT, true>(here, own.P, 0, 0, lanes);
            else prefix_step<UNIT, false>(here, own.P, i, i - lanes, lanes);
        }
        for (i64 t = n - 1; t >= 0; --t) {
            const Here here = reach<UNIT, true>(job, b + t);
            const i64 i = t * lanes, from = i + lanes;
            const bool alone = b == 0 || t == width - 1, last = t == n - 1;
#define PULL(FIRST, LAST) \
    alone ? pull_step<UNIT, FIRST, LAST, true>( \
                here, own.P, i, own.S_before, own.mu, 0, own.lambda, own.gx, lanes) \
          : pull_step<UNIT, FIRST, LAST, false>( \
                here, own.P, i, own.S_before, own.mu, from, own.lambda, own.gx, lanes)
            if (t == 0 && last) PULL(true, true);
            else if (t == 0) PULL(true, false);
            else if (last) PULL(false, true);
            else PULL(false, false);
#undef PULL
            if (!follows) continue;
            if (last) suffix_step<UNIT, true>(here, own.S, i, 0, lanes);
            else suffix_step<UNIT, false>(here, own.S, i, from, lanes);
        }
        if (b > 0)
            push<UNIT>(job, own, b - width, width, n < width - 1 ? n : width - 1, own.S_before,
                       own.gx_before);
        if (!follows) {
            push<UNIT>(job, own, b, n, 0, own.S, own.gx);
            break;
        }
        const States S = own.S;
        own.S = own.S_before;
        own.S_before = S;
        const Cotangents gx = own.gx;
        own.gx = own.gx_before;
        own.gx_before = gx;
    }
}
#endif

static void worker(void* context, i64) {
    Problem& problem = *(Problem*)context;
    const i64 longest = problem.width < problem.steps ? problem.width : problem.steps;
    void* memory = nullptr;
    void* tile = nullptr;
    if (posix_memalign(&memory, 64, (size_t)Arrays::room(longest, problem.lanes) + 64)
        || posix_memalign(&tile, 64, sizeof(Tile))) {
        std::free(memory);
        __atomic_store_n(&problem.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    Arrays own;
    own.place((char*)memory, longest, problem.lanes);
    const bool unit = problem.inner >= WIDE;
    const i64 around = unit ? problem.outer : 1;
    const i64 chains = unit ? problem.inner : problem.outer * problem.inner;
    const i64 blocks = (chains + problem.lanes - 1) / problem.lanes;
    for (;;) {
        const i64 index = __atomic_fetch_add(&problem.next, 1, __ATOMIC_RELAXED);
        if (index >= around * blocks) break;
        const i64 lane = index % blocks * problem.lanes;
        const i64 lanes = chains - lane < problem.lanes ? chains - lane : problem.lanes;
        const i64 first = index / blocks * chains + lane;
        Job job = {problem, *(Tile*)tile, first, row_of(problem, first), (int)lanes, 0, 0, -1, -1};
        for (i64 s = 0; s < problem.sequences; ++s) {
            job.begin = problem.offsets ? problem.offsets[s] : 0;
            job.count = (problem.offsets ? problem.offsets[s + 1] : problem.steps) - job.begin;
            job.x_at = job.y_at = -1;
            if (unit) sequence<true>(job, own);
            else sequence<false>(job, own);
        }
    }
    std::free(memory);
    std::free(tile);
}

// args: outer, steps, inner, width, reverse, sequences, offsets, threads, then the leaves' addresses.
extern "C" int assocscan_run(const i64* args) {
    Problem problem = {args[0], args[1], args[2], args[3], args[4], args[5], WIDE, args[7], 0,
                       (const i64*)args[6], {}, 0};
    for (int k = 0; k < LEAVES; ++k) problem.leaf[k].data = (char*)args[8 + k];
    if (problem.inner >= WIDE) {
        const i64 longest = problem.width < problem.steps ? problem.width : problem.steps;
        const i64 step = States::room(longest * 64) / 64 + 1;
        i64 lanes = STATES_BYTES / step / WIDE * WIDE;
        lanes = lanes < WIDE ? WIDE : lanes > MOST_LANES ? MOST_LANES : lanes;
        // As many jobs as threads at least.
        while (lanes > WIDE
               && problem.outer * ((problem.inner + lanes - 1) / lanes) < problem.threads)
            lanes = (lanes / 2 + WIDE - 1) / WIDE * WIDE;
        const i64 blocks = (problem.inner + lanes - 1) / lanes;  // of about one size
        problem.lanes = ((problem.inner + blocks - 1) / blocks + WIDE - 1) / WIDE * WIDE;
    }
    Worker* workers = (Worker*)std::malloc((size_t)problem.threads * sizeof(Worker));
    if (!workers) return NO_MEMORY;
    parallel(problem.threads, worker, &problem, workers);
    std::free(workers);
    return problem.failed ? NO_MEMORY : DONE;
}
