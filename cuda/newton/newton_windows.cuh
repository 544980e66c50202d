// Newton's method for h[t] = f(h[t−1], x[t]), in windows of the axis, with all iterations of all
// windows in one launch.
//
// A chain is one row of one channel. WARPS_PER_CHAIN warps of a block work on it, and CHAINS chains
// share a block. Each thread has ITEMS adjacent steps of a window: their inputs, a guess of their
// states, and the tangent of f at that guess are in its registers. An iteration is
//
// 1. f and its Jacobian at the guess before each step, all steps at once; the residual r[t] is
//    f(g[t−1], x[t]) − g[t];
// 2. the corrections d[t] = J[t] d[t−1] + r[t], an affine recurrence that starts from 0: composed by
//    each thread for its steps, scanned across lanes by shuffles, and across warps through shared
//    memory;
// 3. g[t] += d[t]. Where that is LIMIT times as large as any f(g[t−1], x[t]) of the window, or not
//    finite, g[t] becomes f(g[t−1], x[t]). Products of many slopes overshoot where a step hardly
//    forgets; without the limit a chain of a GRU with weights around 2 walks many of its windows.
//
// When all residuals of a chain were within the tolerance before step 3, its window is solved. After
// MOST iterations without that it is walked, lane after lane, from the same registers. Either way the
// last state of a window is exactly what the next one starts from. A chain does not wait for others.
// After each failure in a row, twice as many windows are walked without an attempt.
//
// What windows of which length cost: docs/performance/cuda.md.
#pragma once

constexpr int ALL_THREADS = THREADS;
constexpr int WINDOW = 32 * WARPS_PER_CHAIN * ITEMS;
constexpr int MOST_FAILED = 4;
constexpr float LIMIT = 4, LARGEST = 0x1.fffffep127f;
static_assert(THREADS == 32 * WARPS_PER_CHAIN * CHAINS && CHAINS < 16, "barriers");

// The numbers of a state that a step changes.
struct Vector {
    float at[NUMBERS];
};
// The map d ↦ slope d + offset. A diagonal slope is kept as its diagonal.
struct Affine {
    float slope[SLOPES];
    Vector offset;
};
constexpr int AFFINE_WORDS = SLOPES + NUMBERS;

INLINE Vector applied(const float (&slope)[SLOPES], const Vector& d, const Vector& offset) {
    Vector y;
    UNROLL for (int i = 0; i < NUMBERS; ++i) {
        y.at[i] = offset.at[i];
        if constexpr (DIAGONAL) {
            y.at[i] = fused(slope[i], d.at[i], y.at[i]);
        } else {
            UNROLL for (int j = 0; j < NUMBERS; ++j)
                y.at[i] = fused(slope[i * NUMBERS + j], d.at[j], y.at[i]);
        }
    }
    return y;
}
// `first`, then `second`.
INLINE Affine composed(const Affine& first, const Affine& second) {
    Affine y;
    if constexpr (DIAGONAL) {
        UNROLL for (int i = 0; i < NUMBERS; ++i) y.slope[i] = second.slope[i] * first.slope[i];
    } else {
        UNROLL for (int i = 0; i < NUMBERS; ++i)
            UNROLL for (int j = 0; j < NUMBERS; ++j) {
                float sum = 0;
                UNROLL for (int k = 0; k < NUMBERS; ++k)
                    sum = fused(second.slope[i * NUMBERS + k], first.slope[k * NUMBERS + j], sum);
                y.slope[i * NUMBERS + j] = sum;
            }
    }
    y.offset = applied(second.slope, first.offset, second.offset);
    return y;
}
INLINE Affine nothing() {
    Affine y;
    UNROLL for (int i = 0; i < SLOPES; ++i)
        y.slope[i] = DIAGONAL || i % (NUMBERS + 1) == 0 ? 1.0f : 0.0f;
    UNROLL for (int i = 0; i < NUMBERS; ++i) y.offset.at[i] = 0;
    return y;
}

// f and its Jacobian at one step, in the same form as a map.
INLINE Affine tangent_of(const Vector& h, const State& parameters, const Raw& x) {
    Affine y;
    UNROLL for (int i = 0; i < SLOPES; ++i) y.slope[i] = 0;
    tangent(h.at, parameters, x, y.offset.at, y.slope);
    return y;
}

INLINE bool is_finite(float x) { return __builtin_fabsf(x) <= LARGEST; }  // NaN is not
INLINE float larger(float x, float y) { return x > y ? x : y; }
// The largest of all lanes; none is negative. NaN is larger than all others.
INLINE float largest_of_lanes(float x) { return float_of(largest_of_lanes(bits_of(x))); }
INLINE float lane_up(float x) { return float_of(shuffle_up(bits_of(x), 1)); }
INLINE Vector from_lane(const Vector& v, int lane) {
    Vector y;
    UNROLL for (int i = 0; i < NUMBERS; ++i)
        y.at[i] = float_of(shuffle_from(bits_of(v.at[i]), lane));
    return y;
}
INLINE Affine affine_up(const Affine& a, int lanes) {
    Affine y;
    UNROLL for (int i = 0; i < SLOPES; ++i)
        y.slope[i] = float_of(shuffle_up(bits_of(a.slope[i]), lanes));
    UNROLL for (int i = 0; i < NUMBERS; ++i)
        y.offset.at[i] = float_of(shuffle_up(bits_of(a.offset.at[i]), lanes));
    return y;
}

// One chain, as a thread sees it.
struct Chain {
    State carry;                    // the state before the window; parameters among its components
    const char* from[INPUT_COUNT];  // the inputs of step 0
    Raw next[ITEMS];                // the inputs of the thread's steps in the window after this one
    Raw x[ITEMS];                   // and in this one
    Vector g[ITEMS];                // the guess of the states after them
    int row, channel, mine, part, lane;
    i64 first;                      // the thread's first step
    int iterations, walked;

    INLINE_MEMBER int entry() const { return part * 32 + lane; }
    INLINE_MEMBER void load(const Params& P, i64 step) {
        UNROLL for (int i = 0; i < ITEMS; ++i)
            if (step + i < P.length) load_raw(next[i], P, from, step + i);
    }
    // The warps of the chain meet.
    INLINE_MEMBER void meet() const {
        if constexpr (WARPS_PER_CHAIN > 1) wait_for(1 + mine, 32 * WARPS_PER_CHAIN);
    }
    // The last state of the warps before, for the first lane of a warp; else of the lane before.
    INLINE_MEMBER Vector state_before(const Shared& shared) const {
        Vector y;
        UNROLL for (int i = 0; i < NUMBERS; ++i) y.at[i] = lane_up(g[ITEMS - 1].at[i]);
        if (lane == 0)
            UNROLL for (int i = 0; i < NUMBERS; ++i)
                y.at[i] = part == 0 ? numbers_of(carry).at[i]
                                    : float_of(shared.last[mine][part == 0 ? 0 : part - 1][i]);
        return y;
    }
    static INLINE_MEMBER Vector numbers_of(const State& s) {
        Vector y;
        get_numbers(s, y.at);
        return y;
    }

    // Iterates in the window. Returns whether it is solved; all threads of the chain agree.
    INLINE_MEMBER bool solve(const Params& P, Shared& shared) {
        const Vector entering = numbers_of(carry);
        bool finite = true;
        UNROLL for (int n = 0; n < NUMBERS; ++n) finite = finite && is_finite(entering.at[n]);
        if (!finite) return false;
        UNROLL for (int i = 0; i < ITEMS; ++i) g[i] = entering;
        ROLLED for (int k = 0; k < MOST; ++k) {
            ++iterations;
            Affine steps[ITEMS], all = nothing();
            bool near = true;
            float size[NUMBERS];  // the largest |f|
            UNROLL for (int n = 0; n < NUMBERS; ++n) size[n] = __builtin_fabsf(entering.at[n]);
            Vector p = k == 0 ? entering : state_before(shared);
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                if (first + i < P.length) {
                    steps[i] = tangent_of(p, carry, x[i]);
                } else {  // beyond the end the state stays
                    steps[i] = nothing();
                    steps[i].offset = p;
                }
                UNROLL for (int n = 0; n < NUMBERS; ++n) {
                    size[n] = larger(__builtin_fabsf(steps[i].offset.at[n]), size[n]);
                    const float r = steps[i].offset.at[n] - g[i].at[n];
                    near = near && __builtin_fabsf(r) <=
                                       TOLERANCE * (1 + __builtin_fabsf(g[i].at[n]));
                    steps[i].offset.at[n] = r;
                }
                all = composed(all, steps[i]);
                p = g[i];
            }
            UNROLL for (int d = 1; d < 32; d *= 2) {
                const Affine both = composed(affine_up(all, d), all);
                if (lane >= d) all = both;
            }
            near = all_lanes(near);
            UNROLL for (int n = 0; n < NUMBERS; ++n) size[n] = largest_of_lanes(size[n]);
            Vector d;
            UNROLL for (int n = 0; n < NUMBERS; ++n) d.at[n] = 0;
            if constexpr (WARPS_PER_CHAIN > 1) {
                if (lane == 31) {
                    u32* const to = shared.totals[mine][part];
                    UNROLL for (int i = 0; i < SLOPES; ++i) to[i] = bits_of(all.slope[i]);
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        to[SLOPES + n] = bits_of(all.offset.at[n]);
                    to[AFFINE_WORDS] = near;
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        to[AFFINE_WORDS + 1 + n] = bits_of(size[n]);
                }
                meet();
                UNROLL for (int q = 0; q < WARPS_PER_CHAIN; ++q) {
                    const u32* const of = shared.totals[mine][q];
                    near = near && of[AFFINE_WORDS];
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        size[n] = larger(size[n], float_of(of[AFFINE_WORDS + 1 + n]));
                    if (q < part) {
                        Affine a;
                        UNROLL for (int i = 0; i < SLOPES; ++i) a.slope[i] = float_of(of[i]);
                        UNROLL for (int n = 0; n < NUMBERS; ++n)
                            a.offset.at[n] = float_of(of[SLOPES + n]);
                        d = applied(a.slope, d, a.offset);
                    }
                }
            }
            UNROLL for (int n = 0; n < NUMBERS; ++n)
                size[n] = LIMIT * size[n] <= LARGEST ? LIMIT * size[n] : LARGEST;
            const Affine earlier = affine_up(all, 1);
            if (lane > 0) d = applied(earlier.slope, d, earlier.offset);
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                d = applied(steps[i].slope, d, steps[i].offset);
                bool lost = false;
                UNROLL for (int n = 0; n < NUMBERS; ++n)
                    lost = lost || !(__builtin_fabsf(g[i].at[n] + d.at[n]) <= size[n]);
                UNROLL for (int n = 0; n < NUMBERS; ++n)
                    g[i].at[n] += lost ? steps[i].offset.at[n] : d.at[n];
            }
            if constexpr (WARPS_PER_CHAIN > 1) {
                if (lane == 31)
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        shared.last[mine][part][n] = bits_of(g[ITEMS - 1].at[n]);
                meet();
            }
            if (near) return true;
        }
        return false;
    }

    // Walks along the window: one lane after the other takes its steps.
    INLINE_MEMBER void walk(const Params& P, Shared& shared) {
        ++walked;
        State s = carry;
        ROLLED for (int q = 0; q < WARPS_PER_CHAIN; ++q) {
            if (q == part) {
                ROLLED for (int l = 0; l < 32; ++l) {
                    if (l == lane)
                        UNROLL for (int i = 0; i < ITEMS; ++i) {
                            if (first + i < P.length) {
                                Out out;
                                s = advance(s, ready_of(s, x[i], false), out);
                            }
                            g[i] = numbers_of(s);
                        }
                    put_numbers(s, from_lane(numbers_of(s), l).at);
                }
                if (WARPS_PER_CHAIN > 1 && lane == 31)
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        shared.last[mine][q][n] = bits_of(g[ITEMS - 1].at[n]);
            }
            meet();
            if (WARPS_PER_CHAIN > 1) put_numbers(s, last_of(shared, q).at);
        }
    }
    INLINE_MEMBER Vector last_of(const Shared& shared, int warp) const {
        Vector y;
        UNROLL for (int n = 0; n < NUMBERS; ++n) y.at[n] = float_of(shared.last[mine][warp][n]);
        return y;
    }

    INLINE_MEMBER void run(const Params& P, Shared& shared) {
        carry = load_init(P, row, channel, 0);
        find_inputs(from, P, row, channel);
        iterations = walked = 0;
        int failed = 0, skip = 0;
        const i64 offset = (i64)entry() * ITEMS;
        load(P, offset);
        ROLLED for (i64 begin = 0; begin < P.length; begin += WINDOW) {
            first = begin + offset;
            UNROLL for (int i = 0; i < ITEMS; ++i) x[i] = next[i];
            load(P, first + WINDOW);
            const bool solved = skip == 0 && solve(P, shared);
            if (!solved) walk(P, shared);
            failed = solved ? 0 : skip > 0 || failed == MOST_FAILED ? failed : failed + 1;
            skip = skip > 0 ? skip - 1 : (1 << failed) - 1;
            const Vector last = WARPS_PER_CHAIN > 1 ? last_of(shared, WARPS_PER_CHAIN - 1)
                                                    : from_lane(g[ITEMS - 1], 31);
            State s = carry;
            UNROLL for (int i = 0; i < ITEMS; ++i)
                if (first + i < P.length) {
                    put_numbers(s, g[i].at);
                    store_out(P, row, channel, first + i,
                              lower(s, x[i], first + i + 1 == P.length));
                }
            put_numbers(carry, last.at);
            meet();  // `last` has been read: the next window writes others
        }
        if (entry() == 0) {
            if (HAS_FINAL) store_final(P, row, channel, 0, carry);
            int* const report = (int*)P.report + 3 * ((i64)row * P.channels + channel);
            report[0] = iterations, report[1] = walked;
            report[2] = (int)((P.length + WINDOW - 1) / WINDOW);
        }
    }
};

KERNEL(ALL_THREADS, 1) scan(PARAMETERS(Params, P)) {
    Shared& shared = *(Shared*)shared_memory();
    Chain chain;
    open_barriers(1, CHAINS, 32 * WARPS_PER_CHAIN);
    barriers_opened();
    const int warp = thread_index() / 32;
    chain.lane = thread_index() % 32;
    chain.mine = warp / WARPS_PER_CHAIN, chain.part = warp % WARPS_PER_CHAIN;
    ROLLED for (int k = block_index() * CHAINS + chain.mine; k < P.chains;
                k += block_count() * CHAINS) {
        chain.row = k / (int)P.channels;
        chain.channel = k - chain.row * (int)P.channels;
        chain.run(P, shared);
    }
}

LAUNCH_NUMBERS
