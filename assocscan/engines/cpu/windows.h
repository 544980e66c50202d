// Windows of the last `width` steps, and their gradient, over [outer, steps, inner] in one pass.
//
// Before this file the generator (windows.py) writes the operator and its ports:
//   struct State, Raw, Out; lift, combine, lower
//   INPUTS(F), OUTPUTS(F), STATE(F)                  one F(...) per scalar
//   for a gradient: struct Cotangent, OutCotangent, RawCotangent; lower_vjp, combine_vjp, lift_vjp;
//   COTANGENTS(F), GIVEN(F), GRADIENTS(F)
//   LEAVES, GRADIENT
//   WIDEST                       the bytes of the largest number of a state
//   READS_STATES, READS_INPUTS   whether the vjps depend on them
// A leaf is one tensor, contiguous, its element's components innermost.
//
// The axis is cut into blocks of `width` - 1 steps. With P[t] the steps of t's block up to t, and S[t]
// those from t on, a window that ends at t is S[t - width + 1] ∘ P[t]: S of the same place in the block
// before. In the first block it is P[t] alone, and everywhere where `width` is 1.
//
// So that states stay in the first cache, blocks are cut into segments, and P and S are those of a segment.
// What lies between segment i of the block before and segment i of this one, M, is made of the
// segments' totals: of those after segment i there (`later`), and before it here (`earlier`). S begins
// with it:
//     x[t - width + 1] ∘ … ∘ (the segment's last step ∘ M), ∘ P[t].
//
// Backward, μ[t] is the cotangent of S[t] and λ[t] that of P[t]. λ is computed from the end of a block
// to its beginning. A block's windows begin in the block before, so that μ of that block is known
// only now; it is computed from the beginning of that block to its end.
// Where no window begins, μ gets nothing, rather than a zero: 0 × inf would be NaN.
//
// Lanes are chains that are neighbours in memory, where there are many (UNIT); else rows, whose tiles
// of STEPS are transposed. Where chains are too few for the lanes or for the threads, each sequence is
// cut into pieces of whole blocks, which are lanes or jobs of their own. A piece reads the block
// before it too, for S, and in a gradient the block after it, whose windows begin in it. Blocks are
// the same however they are cut into pieces, so that results are.
#pragma once
#include "windows_lanes.h"

constexpr int DONE = 0, NO_MEMORY = 1;
constexpr int MOST_LANES = 256;
constexpr i64 STATES_BYTES = 1 << 20;  // of one array of states, where there are lanes to choose from
constexpr i64 INPUT_BYTES = 3 << 18;  // of the inputs of a block of rows, transposed
constexpr i64 SEGMENT_BYTES = 1 << 15;  // of the states of a segment
// Where an array of the states of rows takes more, states of 64-bit numbers get half as many lanes:
// one vector of 64 bytes. Milliseconds of float64 (1, 2^20) with width 4096, two threads, with half
// and with all: sums 1.6 and 2.7, affine maps 5.4 and 5.1; gradients 2.3 and 2.8, 10.0 and 12.9. Half a
// vector of float32 is slower: logaddexp 9.7 and 7.1.
constexpr i64 FEWER_LANES_BYTES = 1 << 17;
// Of packed sequences, at least so many jobs per thread, where there are as many sequences.
constexpr i64 JOBS_PER_THREAD = 16;

// ---- Loops over the lanes w to end - 1 of some steps ----

// Steps of rows that are taken at once: their states stay in registers meanwhile.
template <bool UNIT> constexpr int RUN = SMALL && !UNIT ? 4 : 1;

// S[t] = x[t] ∘ S[t + 1] of `count` steps; i: where in the array the first of them is. LAST: the last of
// them has nothing after it.
template <bool UNIT, int COUNT, bool LAST>
static __attribute__((noinline)) void suffix_steps(
    const Here here, States S, i64 i, i64 pitch, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        State s = {};
        if constexpr (!LAST) s = S.get(i + COUNT * pitch + w);
#pragma GCC unroll 16
        for (int k = COUNT - 1; k >= 0; --k) {
            const State e = lift(load_x<UNIT>(here, k, w));
            if (LAST && k == COUNT - 1) s = e;
            else s = combine(e, s);
            S.set(i + k * pitch + w, s);
        }
    }
}

// S of the n steps from b on. followed: by what stands at S[n].
template <bool UNIT> static void suffixes(Job& job, States S, i64 b, i64 n, int lanes, bool followed) {
    const i64 pitch = job.lanes;
    for (i64 t = n; t > 0;) {
        const bool last = t == n && !followed;
        const i64 in_tile = UNIT ? t : (b + t - 1) % STEPS + 1;
        const int count = !last && t >= RUN<UNIT> && in_tile >= RUN<UNIT> ? RUN<UNIT> : 1;
        t -= count;
        const Here here = reach<UNIT, false>(job, b + t);
        if (last) suffix_steps<UNIT, 1, true>(here, S, t * pitch, pitch, 0, lanes);
        else if (count == 1) suffix_steps<UNIT, 1, false>(here, S, t * pitch, pitch, 0, lanes);
        else suffix_steps<UNIT, RUN<UNIT>, false>(here, S, t * pitch, pitch, 0, lanes);
    }
}

// to[i] = a[j] ∘ b[k], of all lanes.
static __attribute__((noinline)) void join(
    States to, i64 i, const States a, i64 j, const States b, i64 k, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) to.set(i + w, combine(a.get(j + w), b.get(k + w)));
}

static __attribute__((noinline)) void copy(States to, i64 i, const States from, i64 j, int lanes) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) to.set(i + w, from.get(j + w));
}

#if !GRADIENT
// ALONE: windows that begin in the segment.
template <bool UNIT, int COUNT, bool FIRST, bool ALONE>
static __attribute__((noinline)) void window_steps(
    const Here here, States P, const States S, i64 from, i64 pitch, int w, int end
) {
    WRITES_MEMORY;
    if constexpr (!SMALL && COUNT == 1 && !FIRST && !ALONE) {
        // Long combinations that do not wait for one another: logaddexp takes 13 ms, not 15.5.
#pragma GCC ivdep
        for (int v = w; v < end; ++v)
            P.set(v, combine(P.get(v), lift(load_x<UNIT>(here, 0, v))));
#pragma GCC ivdep
        for (; w < end; ++w)
            store_y<UNIT>(
                here, 0, w, lower(combine(S.get(from + w), P.get(w)), load_x<UNIT>(here, 0, w)));
        return;
    }
#pragma GCC ivdep
    for (; w < end; ++w) {
        State p = {};
        if constexpr (!FIRST) p = P.get(w);
#pragma GCC unroll 16
        for (int k = 0; k < COUNT; ++k) {
            const Raw x = load_x<UNIT>(here, k, w);
            const State e = lift(x);
            if (FIRST && k == 0) p = e;
            else p = combine(p, e);
            store_y<UNIT>(
                here, k, w, lower(ALONE ? p : combine(S.get(from + k * pitch + w), p), x));
        }
        P.set(w, p);
    }
}

// later[i]: the segments i and after of a block; total[i]: segment i; earlier: those before a segment.
struct Arrays {
    States P, S, later, total, earlier;
    static i64 room(const Problem& problem) {
        const i64 lanes = problem.lanes, all = problem.segments > 1 ? problem.segments * lanes : 0;
        return 2 * States::room(lanes) + States::room((longest_segment(problem) + 1) * lanes)
            + 2 * States::room(all);
    }
    void place(char*& memory, const Problem& problem) {
        const i64 lanes = problem.lanes, all = problem.segments > 1 ? problem.segments * lanes : 0;
        P.place(memory, lanes);
        S.place(memory, (longest_segment(problem) + 1) * lanes);
        later.place(memory, all);
        total.place(memory, all);
        earlier.place(memory, lanes);
    }
};

// `later`, of the totals of a block.
static void set_later(const Job& job, Arrays& own) {
    const i64 pitch = job.lanes, last = job.problem.segments - 1;
    copy(own.later, last * pitch, own.total, last * pitch, job.lanes);
    for (i64 k = last - 1; k > 0; --k)
        join(own.later, k * pitch, own.total, k * pitch, own.later, (k + 1) * pitch, job.lanes);
}

// `later` of the blocks before the pieces. Lanes without one read their own first block in its place.
template <bool UNIT> static void totals_before(Job& job, Arrays& own) {
    const Problem& problem = job.problem;
    if (job.opening == job.lanes || problem.segments == 1) return;
    job.move<UNIT>(-problem.block);
    for (i64 k = problem.segments - 1; k > 0; --k) {
        const i64 first = segment_start(problem, k);
        suffixes<UNIT>(job, own.S, first, segment_start(problem, k + 1) - first, job.lanes, false);
        copy(own.total, k * job.lanes, own.S, 0, job.lanes);
    }
    job.move<UNIT>(problem.block);
    set_later(job, own);
}

// S of segment k of the block before b, with all that lies between it and segment k of this block.
template <bool UNIT>
static void suffixes_before(Job& job, Arrays& own, i64 b, i64 k, int lanes) {
    const Problem& problem = job.problem;
    const i64 first = segment_start(problem, k), n = segment_start(problem, k + 1) - first;
    const i64 pitch = job.lanes, m = n * pitch, next = (k + 1) * pitch;
    if (problem.segments > 1) {
        if (k == 0) copy(own.S, m, own.later, next, lanes);
        else if (k == problem.segments - 1) copy(own.S, m, own.earlier, 0, lanes);
        else join(own.S, m, own.later, next, own.earlier, 0, lanes);
    }
    if (b == 0) job.move<UNIT>(-problem.block);
    suffixes<UNIT>(job, own.S, b ? b - problem.block + first : first, n, lanes, problem.segments > 1);
    if (b == 0) job.move<UNIT>(problem.block);
}

// Windows of `count` steps from t on, which are in one tile; here: t is step `i` of the segment.
template <bool UNIT, int COUNT, bool FIRST>
static void windows(Job& job, Arrays& own, i64 t, i64 i, int lanes, int opening, bool earlier) {
    const Here here = reach<UNIT, false>(job, t);
    const i64 pitch = job.lanes;
    if (opening > 0 && earlier)
        window_steps<UNIT, COUNT, FIRST, false>(here, own.P, own.earlier, 0, 0, 0, opening);
    else if (opening > 0)
        window_steps<UNIT, COUNT, FIRST, true>(here, own.P, own.S, 0, 0, 0, opening);
    if (opening < lanes)
        window_steps<UNIT, COUNT, FIRST, false>(here, own.P, own.S, i * pitch, pitch, opening, lanes);
    leave<UNIT>(job, t + COUNT - 1);
}

// Lanes whose piece ends within a block are computed to the end of the block, from what is left in
// the tile, and not stored.
template <bool UNIT> static void pieces(Job& job, Arrays& own) {
    const Problem& problem = job.problem;
    const i64 longest = job.writes[0], segments = problem.segments, pitch = job.lanes;
    totals_before<UNIT>(job, own);
    for (i64 b = 0; b < longest; b += problem.block) {
        const int lanes = job.with_more<UNIT>(job.writes, b);
        const int opening = problem.width == 1 ? lanes : b ? 0 : job.opening;
        for (i64 k = 0; k < segments; ++k) {
            const i64 first = b + segment_start(problem, k), end = b + segment_start(problem, k + 1);
            const i64 n = (end < longest ? end : longest) - first;
            if (n <= 0) break;
            if (opening < lanes) suffixes_before<UNIT>(job, own, b, k, lanes);
            windows<UNIT, 1, true>(job, own, first, 0, lanes, opening, k > 0);
            for (i64 i = 1; i < n;) {
                const i64 left = n - i, in_tile = UNIT ? left : STEPS - (first + i) % STEPS;
                if (left >= RUN<UNIT> && in_tile >= RUN<UNIT>) {
                    windows<UNIT, RUN<UNIT>, false>(job, own, first + i, i, lanes, opening, k > 0);
                    i += RUN<UNIT>;
                } else {
                    windows<UNIT, 1, false>(job, own, first + i, i, lanes, opening, k > 0);
                    ++i;
                }
            }
            if (segments == 1) continue;
            copy(own.total, k * pitch, own.P, 0, lanes);
            if (k == 0) copy(own.earlier, 0, own.P, 0, lanes);
            else join(own.earlier, 0, own.earlier, 0, own.P, 0, lanes);
        }
        if (segments > 1 && b + problem.block < longest) set_later(job, own);
    }
}
#else

template <bool UNIT, bool FIRST>
static __attribute__((noinline)) void prefix_step(
    const Here here, States P, i64 i, i64 before, int lanes
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State e = lift(load_x<UNIT>(here, 0, w));
        P.set(i + w, FIRST ? e : combine(P.get(before + w), e));
    }
}

// λ of P[t]; the part of μ at S[t] of the block before; x's cotangent by P, up to lift.
template <bool UNIT, bool FIRST, bool LAST, bool ALONE>
static __attribute__((noinline)) void pull_step(
    const Here here, const States P, i64 i, i64 before, const States S, Cotangents mu, i64 from,
    Cotangents lambda, Cotangents gx, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        const OutCotangent g = load_g<UNIT>(here, 0, w);
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
            const State e = lift(load_x<UNIT>(here, 0, w));
            const Pair both = combine_vjp(P.get(before + w), e, of_p);
            lambda.set(w, both.left);
            gx.set(i + w, both.right);
        }
    }
}

// x's cotangents of a block. OWN: a window begins here; CARRIED: one began earlier in the block;
// LAST: S[t] is x[t].
template <bool UNIT, bool OWN, bool CARRIED, bool LAST>
static __attribute__((noinline)) void push_step(
    const Here here, const States S, i64 i, i64 next, const Cotangents mu, Cotangents carry,
    const Cotangents gx, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        const Raw x = load_x<UNIT>(here, 0, w);
        Cotangent total = gx.get(i + w);
        if constexpr (OWN || CARRIED) {
            Cotangent m;
            if constexpr (OWN && CARRIED) m = added(mu.get(i + w), carry.get(w));
            else if constexpr (OWN) m = mu.get(i + w);
            else m = carry.get(w);
            if constexpr (LAST) {
                total = added(total, m);
            } else {
                const Pair both = combine_vjp(lift(x), S.get(next + w), m);
                carry.set(w, both.right);
                total = added(total, both.left);
            }
        }
        store_gradient<UNIT>(here, 0, w, lift_vjp(x, total));
    }
}

struct Arrays {
    States P, S, S_before;
    Cotangents mu, gx, gx_before, lambda, carry;
    static i64 room(const Problem& problem) {
        const i64 lanes = problem.lanes, count = problem.block * lanes;
        return 3 * States::room(count) + 3 * Cotangents::room(count) + 2 * Cotangents::room(lanes);
    }
    void place(char*& memory, const Problem& problem) {
        const i64 lanes = problem.lanes, count = problem.block * lanes;
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

// S of the blocks before the pieces. Lanes without one read their own first block in its place.
template <bool UNIT> static void suffixes_before(Job& job, States S) {
    const i64 block = job.problem.block;
    if (!READS_STATES || job.opening == job.lanes) return;
    job.move<UNIT>(-block);
    suffixes<UNIT>(job, S, 0, block, job.lanes, false);
    job.move<UNIT>(block);
}

// Steps of the block at b that its lanes have: n of the first `whole` ones, rest of the others.
struct Block { i64 b, n, rest; int whole, lanes; };

template <bool UNIT> static Block block_at(const Job& job, i64 b) {
    const i64 steps = job.problem.block;
    const int lanes = job.with_more<UNIT>(job.reads, b);
    const int whole = job.with_more<UNIT>(job.reads, b + steps - 1);
    const i64 rest = whole < lanes ? job.reads[whole] - b : steps;
    return {b, whole ? steps : rest, rest, whole, lanes};
}

// P, λ, S and x's cotangent by P of a block, and μ of the block before.
template <bool UNIT> static void pull(Job& job, Arrays& own, const Block& block) {
    const Problem& problem = job.problem;
    const int pitch = job.lanes, opening = problem.width == 1 ? block.lanes : block.b ? 0 : job.opening;
    const bool followed = READS_STATES && job.reads[0] > block.b + problem.block;
    for (i64 t = 0; READS_STATES && t < block.n; ++t) {
        const Here here = reach<UNIT, false>(job, block.b + t);
        const i64 i = t * pitch;
        if (t == 0) prefix_step<UNIT, true>(here, own.P, 0, 0, block.lanes);
        else prefix_step<UNIT, false>(here, own.P, i, i - pitch, block.lanes);
    }
    for (i64 t = block.n - 1; t >= 0; --t) {
        const Here here = reach<UNIT, true>(job, block.b + t);
        const i64 i = t * pitch;
        const int lanes = t < block.rest ? block.lanes : block.whole;
        const int alone = opening < lanes ? opening : lanes;
        const int carried = t == block.n - 1 ? 0 : t == block.rest - 1 ? block.whole : lanes;
        for (int w = 0, end; w < lanes; w = end) {
            end = w < alone && alone < lanes ? alone : lanes;
            if (w < carried && carried < end) end = carried;
#define PULL(FIRST, LAST, ALONE) \
    pull_step<UNIT, FIRST, LAST, ALONE>(here, own.P, i, i - pitch, own.S_before, own.mu, i, \
                                        own.lambda, own.gx, w, end)
#define PULL_ALONE(FIRST, LAST) \
    if (w < alone) PULL(FIRST, LAST, true); \
    else PULL(FIRST, LAST, false)
            if (t == 0 && w >= carried) { PULL_ALONE(true, true); }
            else if (t == 0) { PULL_ALONE(true, false); }
            else if (w >= carried) { PULL_ALONE(false, true); }
            else { PULL_ALONE(false, false); }
#undef PULL_ALONE
#undef PULL
        }
        if (!followed) continue;
        if (t == block.n - 1) suffix_steps<UNIT, 1, true>(here, own.S, i, pitch, 0, lanes);
        else suffix_steps<UNIT, 1, false>(here, own.S, i, pitch, 0, lanes);
    }
}

// Stores the gradients of a block; after: the one that follows it, whose windows begin in it.
template <bool UNIT>
static void push(
    Job& job, Arrays& own, const Block& block, const Block& after, States S, Cotangents gx
) {
    const Problem& problem = job.problem;
    const int pitch = job.lanes, lanes = job.with_more<UNIT>(job.writes, block.b);
    const int carried = problem.width == 1 ? 0 : after.lanes < lanes ? after.lanes : lanes;
    for (i64 t = 0; lanes && t < block.n; ++t) {
        const Here here = reach<UNIT, false>(job, block.b + t);
        const i64 i = t * pitch;
        const bool last = t == problem.block - 1;
        const int owned = t >= after.n ? 0
            : t >= after.rest && after.whole < carried ? after.whole : carried;
        int w = 0;
#define PUSH(OWN, CARRIED, LAST) \
    push_step<UNIT, OWN, CARRIED, LAST>(here, S, i, i + pitch, own.mu, own.carry, gx, w, end)
#define PUSH_LAST(OWN, CARRIED) \
    if (last) PUSH(OWN, CARRIED, true); \
    else PUSH(OWN, CARRIED, false)
        if (int end = owned; w < end) {
            if (t == 0) { PUSH_LAST(true, false); }
            else { PUSH_LAST(true, true); }
            w = end;
        }
        if (int end = t == 0 ? 0 : carried; w < end) {
            PUSH_LAST(false, true);
            w = end;
        }
        if (int end = lanes; w < end) PUSH(false, false, false);
#undef PUSH_LAST
#undef PUSH
        leave<UNIT>(job, block.b + t);
    }
}

template <bool UNIT> static void pieces(Job& job, Arrays& own) {
    Block before = {};
    suffixes_before<UNIT>(job, own.S_before);
    for (i64 b = 0; b < job.reads[0]; b += job.problem.block) {
        const Block block = block_at<UNIT>(job, b);
        pull<UNIT>(job, own, block);
        push<UNIT>(job, own, before, block, own.S_before, own.gx_before);
        const States S = own.S;
        own.S = own.S_before;
        own.S_before = S;
        const Cotangents gx = own.gx;
        own.gx = own.gx_before;
        own.gx_before = gx;
        before = block;
    }
    push<UNIT>(job, own, before, {}, own.S_before, own.gx_before);
}
#endif

// ---- Which lanes a job has ----

// Lane w walks along piece number `piece` of the `count` steps of a chain that begin at `begin`. The
// first pieces may have one block more than the others; the last one's last block may be shorter.
static void enter(Job& job, int w, i64 chain, i64 begin, i64 count, i64 piece, i64 pieces) {
    const Problem& problem = job.problem;
    const i64 block = problem.block, blocks = (count + block - 1) / block;
    const i64 each = blocks / pieces, longer = blocks % pieces;
    const i64 first = (piece * each + (piece < longer ? piece : longer)) * block;
    const i64 end = first + (each + (piece < longer)) * block;
    const i64 read = GRADIENT ? end + block : end;
    job.writes[w] = (end < count ? end : count) - first;
    job.reads[w] = (read < count ? read : count) - first;
    const i64 step = begin + (problem.reverse ? count - 1 - first : first);
    job.start[w] = (chain / problem.inner * problem.steps + step) * problem.inner
        + chain % problem.inner;
}

// The lanes of group number `group` in sequence s, if it has as many.
template <bool UNIT> static void run(Job& job, Arrays& own, i64 group, i64 s) {
    const Problem& problem = job.problem;
    const i64 begin = problem.offsets ? problem.offsets[s] : 0;
    const i64 count = (problem.offsets ? problem.offsets[s + 1] : problem.steps) - begin;
    const i64 blocks = (count + problem.block - 1) / problem.block;
    const i64 cut = blocks < problem.pieces ? blocks : problem.pieces;
    job.forget();
    if constexpr (UNIT) {
        const i64 piece = group % problem.pieces, across = group / problem.pieces;
        const i64 row = (problem.inner + problem.lanes - 1) / problem.lanes;
        const i64 lane = across % row * problem.lanes, left = problem.inner - lane;
        if (piece >= cut) return;
        job.lanes = (int)(left < problem.lanes ? left : problem.lanes);
        job.opening = piece == 0 ? job.lanes : 0;
        enter(job, 0, across / row * problem.inner + lane, begin, count, piece, cut);
    } else {
        const i64 chains = problem.outer * problem.inner, first = group * problem.lanes;
        const i64 left = cut * chains - first;
        if (left <= 0) return;
        job.lanes = (int)(left < problem.lanes ? left : problem.lanes);
        job.opening = 0;
        for (int w = 0; w < job.lanes; ++w) {
            const i64 piece = (first + w) / chains;
            job.opening += piece == 0;
            enter(job, w, (first + w) % chains, begin, count, piece, cut);
        }
    }
    pieces<UNIT>(job, own);
}

static void worker(void* context, i64) {
    Problem& problem = *(Problem*)context;
    const bool rows = problem.inner < WIDE;
    const i64 inputs = rows ? Inputs::room(problem.tiles * STEPS * WIDE) : 0;
    const i64 starts = rows ? (problem.tiles * (i64)sizeof(i64) + 63) / 64 * 64 : 0;
    void* memory = nullptr;
    void* tile = nullptr;
    if (posix_memalign(&memory, 64, (size_t)(Arrays::room(problem) + inputs + starts) + 64)
        || posix_memalign(&tile, 64, sizeof(Tile))) {
        std::free(memory);
        __atomic_store_n(&problem.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    Arrays own;
    char* place = (char*)memory;
    own.place(place, problem);
    Job job = {problem, *(Tile*)tile, {}, nullptr, -1,
               problem.reverse ? -problem.inner : problem.inner, 0, 0, {}, {}, {}};
    if (rows) {
        job.x.place(place, problem.tiles * STEPS * WIDE);
        job.x_at = (i64*)place;
    }
    for (;;) {
        const i64 index = __atomic_fetch_add(&problem.next, 1, __ATOMIC_RELAXED);
        if (index >= problem.groups * problem.parts) break;
        const i64 group = index / problem.parts, part = index % problem.parts;
        const i64 end = (part + 1) * problem.sequences / problem.parts;
        for (i64 s = part * problem.sequences / problem.parts; s < end; ++s) {
            if (problem.inner >= WIDE) run<true>(job, own, group, s);
            else run<false>(job, own, group, s);
        }
    }
    std::free(memory);
    std::free(tile);
}

// The lanes of a job, the pieces of a sequence, and how threads share them: groups of lanes, and parts
// of the sequences.
static void share(Problem& problem) {
    const i64 blocks = (problem.steps + problem.block - 1) / problem.block;
    const i64 threads = problem.sequences < problem.threads ? problem.threads : 1;
    const i64 chains = problem.outer * problem.inner;
    i64 places = threads * WIDE, taken = chains;  // lanes or jobs that there should be, and are
    if (problem.inner >= WIDE) {
        const i64 step = States::room(problem.block * 64) / 64 + 1;
        i64 lanes = GRADIENT ? STATES_BYTES / step / WIDE * WIDE : MOST_LANES;
        lanes = lanes < WIDE ? WIDE : lanes > MOST_LANES ? MOST_LANES : lanes;
        // As many jobs as threads at least.
        while (lanes > WIDE
               && problem.outer * ((problem.inner + lanes - 1) / lanes) < problem.threads)
            lanes = (lanes / 2 + WIDE - 1) / WIDE * WIDE;
        const i64 row = (problem.inner + lanes - 1) / lanes;  // blocks of about one size
        problem.lanes = ((problem.inner + row - 1) / row + WIDE - 1) / WIDE * WIDE;
        places = threads;
        taken = problem.outer * ((problem.inner + problem.lanes - 1) / problem.lanes);
    }
    problem.pieces = (places + taken - 1) / taken;
    if (problem.pieces > blocks) problem.pieces = blocks;
    problem.groups = problem.pieces * taken;
    if (problem.inner < WIDE) {
        if (GRADIENT && WIDEST == 8 && States::room(problem.block * WIDE) > FEWER_LANES_BYTES) problem.lanes /= 2;
        while (problem.lanes > 1 && problem.groups <= (threads - 1) * problem.lanes)
            problem.lanes /= 2;  // all threads get some
        problem.groups = (problem.groups + problem.lanes - 1) / problem.lanes;
    }
    if (!GRADIENT) {
        // As many segments as let the states of one stay in the cache, but not more totals than states.
        const i64 step = States::room(problem.lanes * 64) / 64 + 1;
        i64 most = SEGMENT_BYTES / step, least = problem.block * step / STATES_BYTES;
        if (most < STEPS) most = STEPS;
        if (most < least) most = least;
        problem.segments = (problem.block + most - 1) / most;
    }
    const i64 step = Inputs::room(STEPS * WIDE);
    problem.tiles = problem.block / STEPS + 2;
    if (problem.tiles * step > INPUT_BYTES) problem.tiles = 2;
    const i64 parts = (problem.threads * JOBS_PER_THREAD + problem.groups - 1) / problem.groups;
    problem.parts = problem.threads == 1 ? 1 : parts < problem.sequences ? parts : problem.sequences;
    if (problem.threads > problem.groups * problem.parts)
        problem.threads = problem.groups * problem.parts;
}

// args: outer, steps, inner, width, reverse, sequences, offsets, threads, then the leaves' addresses.
extern "C" int assocscan_run(const i64* args) {
    const i64 block = args[3] > 1 ? args[3] - 1 : 1;
    Problem problem = {args[0], args[1], args[2], args[3], args[4], args[5], block, 1, 2, WIDE,
                       args[7], 1, 1, 1, 0, (const i64*)args[6], {}, 0};
    for (int k = 0; k < LEAVES; ++k) problem.leaf[k].data = (char*)args[8 + k];
    share(problem);
    Worker* workers = (Worker*)std::malloc((size_t)problem.threads * sizeof(Worker));
    if (!workers) return NO_MEMORY;
    parallel(problem.threads, worker, &problem, workers);
    std::free(workers);
    return problem.failed ? NO_MEMORY : DONE;
}
