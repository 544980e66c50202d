// Windows of the last `width` steps, and their gradient, over [outer, steps, inner] in one pass.
//
// Before this file the generator (windows.py) writes the operator and its ports:
//   struct State, Raw, Out; lift, combine, lower
//   INPUTS(F), OUTPUTS(F), STATE(F)                  one F(...) per scalar
//   for a gradient: struct Cotangent, OutCotangent, RawCotangent; lower_vjp, combine_vjp, lift_vjp;
//   COTANGENTS(F), GIVEN(F), GRADIENTS(F)
//   LEAVES, GRADIENT
//   SMALL                        whether it is cheap: a few vector instructions
//   SEGMENT_BYTES, SEGMENT_STEPS
//   READS_STATES, READS_INPUTS   whether the vjps depend on them
// A leaf is one tensor, contiguous, its element's components innermost.
//
// The axis is cut into blocks of `width` - 1 steps. With P[t] the steps of t's block up to t, and S[t]
// those from t on, a window that ends at t is S[t - width + 1] ∘ P[t]: S of the same place in the block
// before. In the first block it is P[t] alone, and everywhere where `width` is 1.
//
// So that states stay in the first cache, blocks are cut into segments: P[t] begins and S[t] ends with
// the segment of t, not with its block.
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
constexpr i64 TOTALS_BYTES = 1 << 20;  // at most, of one array of segments' totals
constexpr i64 BLOCK_BYTES = 1 << 25;  // of cotangents of a block, where there are lanes to choose from
constexpr i64 INPUT_BYTES = 3 << 18;  // of the inputs of a block of rows, transposed
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
        const i64 in_tile = UNIT ? t : ((b + t - 1) & (STEPS - 1)) + 1;
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

// later[k]: the segments k and after of the block before; total[k]: segment k; earlier[k]: segments up to k.
struct Totals {
    States later, total, earlier;
    static i64 room(const Problem& problem) {
        return 3 * States::room(problem.segments > 1 ? problem.segments * problem.lanes : 0);
    }
    void place(char*& memory, const Problem& problem) {
        const i64 count = problem.segments > 1 ? problem.segments * problem.lanes : 0;
        later.place(memory, count);
        total.place(memory, count);
        earlier.place(memory, count);
    }
};

// `later`, of the totals of a block.
static void set_later(const Job& job, Totals& own) {
    const i64 pitch = job.lanes, last = job.problem.segments - 1;
    copy(own.later, last * pitch, own.total, last * pitch, job.lanes);
    for (i64 k = last - 1; k > 0; --k)
        join(own.later, k * pitch, own.total, k * pitch, own.later, (k + 1) * pitch, job.lanes);
}

template <bool UNIT, bool FIRST>
static __attribute__((noinline)) void total_step(const Here here, States total, i64 i, int lanes) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State e = lift(load_x<UNIT>(here, 0, w));
        total.set(i + w, FIRST ? e : combine(total.get(i + w), e));
    }
}

// `later` of the blocks before the pieces, of totals that are combined in the order in which they are
// where the block is in a piece.
template <bool UNIT> static void totals_before(Job& job, Totals& own) {
    const Problem& problem = job.problem;
    if (!READS_STATES || job.opening == job.lanes || problem.segments == 1) return;
    for (i64 k = 1; k < problem.segments; ++k) {
        const i64 first = segment_start(problem, k) - problem.block;
        const i64 end = segment_start(problem, k + 1) - problem.block;
        total_step<UNIT, true>(reach<UNIT, false>(job, first), own.total, k * job.lanes, job.lanes);
        for (i64 t = first + 1; t < end; ++t)
            total_step<UNIT, false>(reach<UNIT, false>(job, t), own.total, k * job.lanes, job.lanes);
    }
    set_later(job, own);
}

// to[i]: what lies between segment k of the block before and segment k of this one. Of lanes that have no
// block before it is what lies in this one before segment k.
static void set_between(const Job& job, const Totals& own, i64 k, States to, i64 i, int lanes, int opening) {
    const i64 pitch = job.lanes, next = (k + 1) * pitch, before = (k - 1) * pitch;
    const int alone = opening < lanes ? opening : lanes;
    if (k == 0) {
        copy(to, i, own.later, next, lanes);
    } else if (k == job.problem.segments - 1) {
        copy(to, i, own.earlier, before, lanes);
    } else {
        join(to, i, own.later, next, own.earlier, before, lanes);
        copy(to, i, own.earlier, before, alone);
    }
}

// Segment k, whose totals are there, is behind.
static void pass_segment(const Job& job, Totals& own, i64 k, int lanes) {
    const i64 pitch = job.lanes, i = k * pitch;
    if (k == 0) copy(own.earlier, 0, own.total, 0, lanes);
    else join(own.earlier, i, own.earlier, i - pitch, own.total, i, lanes);
}

// S of segment k of the block before b. followed: as in `suffixes`.
template <bool UNIT>
static void suffixes_before(Job& job, States S, i64 b, i64 k, int lanes, bool followed) {
    const Problem& problem = job.problem;
    const i64 first = segment_start(problem, k), n = segment_start(problem, k + 1) - first;
    suffixes<UNIT>(job, S, b - problem.block + first, n, lanes, followed);
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

struct Arrays : Totals {
    States P, S;
    static i64 room(const Problem& problem) {
        const i64 lanes = problem.lanes;
        return Totals::room(problem) + States::room(lanes)
            + States::room((longest_segment(problem) + 1) * lanes);
    }
    void place(char*& memory, const Problem& problem) {
        const i64 lanes = problem.lanes;
        Totals::place(memory, problem);
        P.place(memory, lanes);
        S.place(memory, (longest_segment(problem) + 1) * lanes);
    }
};

// Windows of `count` steps from t on, which are in one tile; here: t is step `i` of segment k.
template <bool UNIT, int COUNT, bool FIRST>
static void windows(Job& job, Arrays& own, i64 t, i64 i, int lanes, int opening, i64 k) {
    const Here here = reach<UNIT, false>(job, t);
    const i64 pitch = job.lanes;
    if (opening > 0 && k > 0)
        window_steps<UNIT, COUNT, FIRST, false>(
            here, own.P, own.earlier, (k - 1) * pitch, 0, 0, opening);
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
            if (opening < lanes) {
                const i64 steps = end - first;
                if (segments > 1) set_between(job, own, k, own.S, steps * pitch, lanes, 0);
                suffixes_before<UNIT>(job, own.S, b, k, lanes, segments > 1);
            }
            windows<UNIT, 1, true>(job, own, first, 0, lanes, opening, k);
            for (i64 i = 1; i < n;) {
                const i64 left = n - i, in_tile = UNIT ? left : STEPS - (first + i) % STEPS;
                if (left >= RUN<UNIT> && in_tile >= RUN<UNIT>) {
                    windows<UNIT, RUN<UNIT>, false>(job, own, first + i, i, lanes, opening, k);
                    i += RUN<UNIT>;
                } else {
                    windows<UNIT, 1, false>(job, own, first + i, i, lanes, opening, k);
                    ++i;
                }
            }
            if (segments == 1) continue;
            copy(own.total, k * pitch, own.P, 0, lanes);
            pass_segment(job, own, k, lanes);
        }
        if (segments > 1 && b + problem.block < longest) set_later(job, own);
    }
}
#else

// P[t], and the total of the segment up to t. SEEDED: P begins with what stands at P[t - 1].
template <bool UNIT, bool FIRST, bool SEEDED, bool TOTAL>
static __attribute__((noinline)) void prefix_step(
    const Here here, States P, i64 i, i64 before, States total, i64 at, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        const State e = lift(load_x<UNIT>(here, 0, w));
        P.set(i + w, FIRST && !SEEDED ? e : combine(P.get(before + w), e));
        if constexpr (TOTAL) total.set(at + w, FIRST ? e : combine(total.get(at + w), e));
    }
}

// λ of P[t]; μ at S[t] of the block before, from the window at t alone; x's cotangent by P, up to lift.
// FIRST: nothing stands before x; LAST: P[t] is in no later P; ALONE: the window is P[t].
template <bool UNIT, bool FIRST, bool LAST, bool ALONE>
static __attribute__((noinline)) void pull_step(
    const Here here, const States P, i64 i, i64 before, const States S, Cotangents mu, i64 from,
    Cotangents lambda, Cotangents gx, i64 at, int w, int end
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
            gx.set(at + w, of_p);
        } else {
            const State e = lift(load_x<UNIT>(here, 0, w));
            const Pair both = combine_vjp(P.get(before + w), e, of_p);
            lambda.set(w, both.left);
            gx.set(at + w, both.right);
        }
    }
}

// x's cotangents. OWN: a window begins here; CARRIED: something of μ comes from the step before, or from
// the segment's total; LAST: S[t] is x[t].
template <bool UNIT, bool OWN, bool CARRIED, bool LAST>
static __attribute__((noinline)) void push_step(
    const Here here, const States S, i64 i, i64 next, const Cotangents mu, Cotangents carry,
    const Cotangents gx, i64 at, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        const Raw x = load_x<UNIT>(here, 0, w);
        Cotangent total = gx.get(at + w);
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

// left[i] and right[j] get the cotangents of a and b in a ∘ b, of which `of` is the one. ADDS: to what is
// there.
template <bool ADDS_LEFT, bool ADDS_RIGHT>
static __attribute__((noinline)) void split(
    const States a, i64 at_a, const States b, i64 at_b, const Cotangents of, i64 at,
    Cotangents left, i64 i, Cotangents right, i64 j, int w, int end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w) {
        const Pair both = combine_vjp(a.get(at_a + w), b.get(at_b + w), of.get(at + w));
        left.set(i + w, ADDS_LEFT ? added(both.left, left.get(i + w)) : both.left);
        right.set(j + w, ADDS_RIGHT ? added(both.right, right.get(j + w)) : both.right);
    }
}

template <bool ADDS>
static __attribute__((noinline)) void pass(
    Cotangents to, i64 i, const Cotangents from, i64 j, i64 w, i64 end
) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (; w < end; ++w)
        to.set(i + w, ADDS ? added(to.get(i + w), from.get(j + w)) : from.get(j + w));
}

// P: of a segment, behind what it begins with. S, mu: of the same segment of the block before.
// gx_before: the cotangents of x in that segment by P. gx: the cotangents of x in a block.
// One per lane: lambda, and once the segment has been pulled the cotangent of what P began with;
// carry: what push_step carries; chain: the cotangent of later[k] of the block before.
// One per segment: of_earlier, the cotangent of earlier[k - 1] by segment k; of_total, the cotangent
// of total[k] by the segments after it in its block.
struct Arrays : Totals {
    States P, S;
    Cotangents mu, gx_before, gx, lambda, carry, chain, of_earlier, of_total;
    static i64 room(const Problem& problem) {
        const i64 lanes = problem.lanes, count = longest_segment(problem) * lanes;
        return Totals::room(problem) + States::room(count + lanes) + States::room(count)
            + 2 * Cotangents::room(count) + Cotangents::room(problem.block * lanes)
            + 3 * Cotangents::room(lanes) + 2 * Cotangents::room(problem.segments * lanes);
    }
    void place(char*& memory, const Problem& problem) {
        const i64 lanes = problem.lanes, count = longest_segment(problem) * lanes;
        Totals::place(memory, problem);
        P.place(memory, count + lanes);
        S.place(memory, count);
        mu.place(memory, count);
        gx_before.place(memory, count);
        gx.place(memory, problem.block * lanes);
        lambda.place(memory, lanes);
        carry.place(memory, lanes);
        chain.place(memory, lanes);
        of_earlier.place(memory, problem.segments * lanes);
        of_total.place(memory, problem.segments * lanes);
    }
};

// Steps of the segment at b that its lanes have: n of the first `whole` ones, rest of the others.
struct Block { i64 b, steps, n, rest; int whole, lanes; };

template <bool UNIT> static Block block_at(const Job& job, i64 b, i64 steps) {
    const int lanes = job.with_more<UNIT>(job.reads, b);
    const int whole = job.with_more<UNIT>(job.reads, b + steps - 1);
    const i64 rest = whole < lanes ? job.reads[whole] - b : steps;
    return {b, steps, lanes ? whole ? steps : rest : 0, rest, whole, lanes};
}

// P, λ and x's cotangent by P of segment k, and μ of the same segment of the block before.
template <bool UNIT>
static void pull(Job& job, Arrays& own, const Block& block, i64 k, int opening) {
    const Problem& problem = job.problem;
    const bool totals = problem.segments > 1;
    const int pitch = job.lanes, plain = !totals ? block.lanes : k == 0 ? opening : 0;
    const i64 gx = segment_start(problem, k) * pitch, at = totals ? k * pitch : 0;
    if (READS_STATES && totals) set_between(job, own, k, own.P, 0, block.lanes, opening);
    for (i64 t = 0; READS_STATES && t < block.n; ++t) {
        const Here here = reach<UNIT, false>(job, block.b + t);
        const i64 before = t * pitch, i = before + pitch;
#define PREFIX(FIRST, SEEDED, TOTAL) \
    prefix_step<UNIT, FIRST, SEEDED, TOTAL>(here, own.P, i, before, own.total, at, w, end)
        int w = 0, end = plain;
        if (t == 0 && w < end) {
            if (totals) PREFIX(true, false, true);
            else PREFIX(true, false, false);
            w = end;
        }
        end = block.lanes;
        if (t == 0 && w < end) PREFIX(true, true, true);
        else if (w < end && totals) PREFIX(false, true, true);
        else if (w < end) PREFIX(false, true, false);
#undef PREFIX
    }
    for (i64 t = block.n - 1; t >= 0; --t) {
        const Here here = reach<UNIT, true>(job, block.b + t);
        const i64 before = t * pitch, i = before + pitch;
        const int lanes = t < block.rest ? block.lanes : block.whole;
        const int alone = opening < lanes ? opening : lanes;
        const int carried = t == block.n - 1 ? 0 : t == block.rest - 1 ? block.whole : lanes;
        for (int w = 0, end; w < lanes; w = end) {
            end = w < alone && alone < lanes ? alone : lanes;
            if (w < carried && carried < end) end = carried;
#define PULL(FIRST, LAST, ALONE) \
    pull_step<UNIT, FIRST, LAST, ALONE>(here, own.P, i, before, own.S, own.mu, before, \
                                        own.lambda, own.gx, gx + before, w, end)
#define PULL_ALONE(FIRST, LAST) \
    if (w < alone) PULL(FIRST, LAST, true); \
    else PULL(FIRST, LAST, false)
            const bool first = t == 0 && w < plain;
            if (first && w >= carried) { PULL_ALONE(true, true); }
            else if (first) { PULL_ALONE(true, false); }
            else if (w >= carried) { PULL_ALONE(false, true); }
            else { PULL_ALONE(false, false); }
#undef PULL_ALONE
#undef PULL
        }
    }
    if (READS_STATES && totals) pass_segment(job, own, k, block.lanes);
}

// P of segment k began with M, whose cotangents are given. Makes of them the cotangents of `earlier`
// and, in the `followed` lanes that have a block before, of `later` and of total[k] in that block. The
// last one is in `carry`.
static void pull_totals(
    const Job& job, Arrays& own, i64 k, int lanes, int opening, int followed
) {
    const i64 pitch = job.lanes, last = job.problem.segments - 1, next = (k + 1) * pitch;
    const int alone = opening < lanes ? opening : lanes;
    if (k > 0 && followed) {
        if (k == last) pass<false>(own.carry, 0, own.chain, 0, 0, followed);
        else split<false, false>(own.S, 0, own.later, next, own.chain, 0, own.carry, 0, own.chain, 0,
                                 0, followed);
    }
    if (k == last) {
        pass<false>(own.of_earlier, k * pitch, own.lambda, 0, 0, lanes);
    } else if (k > 0) {
        pass<false>(own.of_earlier, k * pitch, own.lambda, 0, 0, alone);
        const i64 before = (k - 1) * pitch;
        if (followed)
            split<true, false>(own.later, next, own.earlier, before, own.lambda, 0, own.chain, 0,
                               own.of_earlier, k * pitch, alone, lanes);
        else
            split<false, false>(own.later, next, own.earlier, before, own.lambda, 0, own.chain, 0,
                                own.of_earlier, k * pitch, alone, lanes);
    } else {
        pass<false>(own.chain, 0, own.lambda, 0, alone, lanes);
    }
}

// of_total[k] of the block at b.
template <bool UNIT> static void pull_block(const Job& job, Arrays& own, i64 b) {
    const Problem& problem = job.problem;
    const i64 pitch = job.lanes;
    int later = 0;  // the lanes that have a cotangent of earlier[k] from after segment k + 1
    for (i64 k = problem.segments - 2; k >= 0; --k) {
        const int lanes = job.with_more<UNIT>(job.reads, b + segment_start(problem, k + 1));
        const i64 i = k * pitch, next = i + pitch;
        // Cotangents of earlier[k]: in of_earlier[k + 1].
        pass<true>(own.of_earlier, next, own.lambda, 0, 0, later);
        if (k == 0) pass<false>(own.of_total, 0, own.of_earlier, next, 0, lanes);
        else split<false, false>(own.earlier, i - pitch, own.total, i, own.of_earlier, next,
                                 own.lambda, 0, own.of_total, i, 0, lanes);
        later = lanes;
    }
}

// Stores the gradients of segment k of a block; after: the same segment of the block that follows it,
// whose windows begin in it. carried: the lanes that have a cotangent of the segment's total.
template <bool UNIT>
static void push(
    Job& job, Arrays& own, const Block& block, const Block& after, int carried, Cotangents gx,
    i64 at
) {
    const int pitch = job.lanes, lanes = job.with_more<UNIT>(job.writes, block.b);
    const int most = job.problem.width == 1 ? 0 : after.lanes < lanes ? after.lanes : lanes;
    if (carried > lanes) carried = lanes;
    for (i64 t = 0; lanes && t < block.n; ++t) {
        const Here here = reach<UNIT, false>(job, block.b + t);
        const i64 i = t * pitch;
        const bool last = t == block.steps - 1;
        const int owned = t >= after.n ? 0
            : t >= after.rest && after.whole < most ? after.whole : most;
        if (t == 1 && carried < most) carried = most;
        int w = 0;
#define PUSH(OWN, CARRIED, LAST) \
    push_step<UNIT, OWN, CARRIED, LAST>(here, own.S, i, i + pitch, own.mu, own.carry, gx, at + i, \
                                        w, end)
#define PUSH_LAST(OWN, CARRIED) \
    if (last) PUSH(OWN, CARRIED, true); \
    else PUSH(OWN, CARRIED, false)
        if (int end = owned; w < end) {
            if (carried < owned) { PUSH_LAST(true, false); }
            else { PUSH_LAST(true, true); }
            w = end;
        }
        if (int end = carried; w < end) {
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
    const Problem& problem = job.problem;
    const i64 pitch = job.lanes, segments = problem.segments;
    totals_before<UNIT>(job, own);
    for (i64 b = 0; b < job.writes[0] + problem.block; b += problem.block) {
        const int all = job.with_more<UNIT>(job.reads, b);
        const int opening = problem.width == 1 ? all : b ? 0 : job.opening;
        const int followed = b ? all : 0;
        for (i64 k = 0; k < segments; ++k) {
            const i64 first = segment_start(problem, k), steps = segment_start(problem, k + 1) - first;
            const Block block = block_at<UNIT>(job, b + first, steps);
            const Block before = block_at<UNIT>(job, b - problem.block + first, steps);
            if (READS_STATES && (b ? before.whole > 0 : opening < job.lanes))
                suffixes_before<UNIT>(job, own.S, b, k, job.lanes, false);
            if (b && block.lanes) pass<false>(own.gx_before, 0, own.gx, first * pitch, 0, steps * pitch);
            if (block.lanes) pull<UNIT>(job, own, block, k, opening);
            if (segments > 1) pull_totals(job, own, k, block.lanes, opening, followed);
            if (!b) continue;
            int carried = 0;
            if (segments > 1) {
                carried = k ? followed : 0;
                const i64 next = b - problem.block + segment_start(problem, k + 1);
                const int within = k < segments - 1 ? job.with_more<UNIT>(job.reads, next) : 0;
                if (within) {
                    const i64 i = k * pitch;
                    pass<true>(own.carry, 0, own.of_total, i, 0, carried);
                    pass<false>(own.carry, 0, own.of_total, i, carried, within);
                    carried = within;
                }
            }
            if (block.lanes) push<UNIT>(job, own, before, block, carried, own.gx_before, 0);
            else push<UNIT>(job, own, before, block, carried, own.gx, first * pitch);
        }
        if (segments == 1 || b >= job.writes[0]) continue;
        pull_block<UNIT>(job, own, b);
        if (READS_STATES) set_later(job, own);
    }
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
        i64 lanes = MOST_LANES;
#if GRADIENT
        while (lanes > WIDE && Cotangents::room(problem.block * lanes) > BLOCK_BYTES) lanes /= 2;
#endif
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
        while (problem.lanes > 1 && problem.groups <= (threads - 1) * problem.lanes)
            problem.lanes /= 2;  // all threads get some
        problem.groups = (problem.groups + problem.lanes - 1) / problem.lanes;
    }
    // Of segments of one number of steps for any number of threads.
    const i64 most = problem.inner < WIDE ? WIDE : problem.inner < MOST_LANES ? problem.inner : MOST_LANES;
    const i64 states = States::room(most * 64) / 64 + 1;
    i64 steps = SEGMENT_BYTES / states;
    if (steps < SEGMENT_STEPS) steps = SEGMENT_STEPS;
    if (steps < problem.block * states / TOTALS_BYTES) steps = problem.block * states / TOTALS_BYTES;
    problem.segments = (problem.block + steps - 1) / steps;
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
