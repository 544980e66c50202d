// Newton's method for h[t] = f(h[t−1], x[t]), in windows of the axis, with all iterations of all
// windows in one launch.
//
// A chain is one row of one channel. WARPS_PER_CHAIN warps of a block work on it, and CHAINS chains
// share a block. Each thread has ITEMS adjacent steps of a window, with their inputs in registers,
// and a guess of the state after them, `end`. The unknowns are the ends of all threads, not all
// states (multiple shooting). An iteration is
//
// 1. each thread walks its steps from the end of the thread before, which gives the map F of its
//    steps at that state, and the product J of their Jacobians; the residual r is F − end;
// 2. the corrections d = J d' + r, where d' is that of the thread before, an affine recurrence that
//    starts from 0: scanned across lanes by shuffles, and across warps through shared memory;
// 3. end += d. Where that is LIMIT times as large as any F of the window, or not finite, the end
//    becomes F. Products of many slopes overshoot where a step hardly forgets; without the limit a
//    chain of a GRU with weights around 2 walks many of its windows.
//
// When all residuals of a chain were within the tolerance before 3, each thread walks once more. If
// it arrives at its end, within the tolerance, the window is solved; else iterations go on. After
// MOST iterations the window is walked, lane after lane, from the same registers. Either way the last
// state of a window is exactly what the next one starts from. A chain does not wait for others.
// After each failure in a row, twice as many windows are walked without an attempt.
//
// Compared with a guess of every state: what a step forgets within ITEMS steps needs no iteration,
// the scan has one map per thread, and no Jacobian is kept.
//
// What windows of which length cost: docs/performance/cuda.md.
#pragma once

constexpr int ALL_THREADS = THREADS;
constexpr int WINDOW = 32 * WARPS_PER_CHAIN * ITEMS;
static_assert(SLOPES + 4 * NUMBERS < MESSAGE_WORDS, "messages");
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
// The slope of `first`, then of a map with slope `second`; the offset stays.
INLINE Affine after(const float (&second)[SLOPES], const Affine& first) {
    Affine y = first;
    if constexpr (DIAGONAL) {
        UNROLL for (int i = 0; i < NUMBERS; ++i) y.slope[i] = second[i] * first.slope[i];
    } else {
        UNROLL for (int i = 0; i < NUMBERS; ++i)
            UNROLL for (int j = 0; j < NUMBERS; ++j) {
                float sum = 0;
                UNROLL for (int k = 0; k < NUMBERS; ++k)
                    sum = fused(second[i * NUMBERS + k], first.slope[k * NUMBERS + j], sum);
                y.slope[i * NUMBERS + j] = sum;
            }
    }
    return y;
}
// `first`, then `second`.
INLINE Affine composed(const Affine& first, const Affine& second) {
    Affine y = after(second.slope, first);
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
INLINE bool is_near(float residual, float h) {
    return __builtin_fabsf(residual) <= TOLERANCE * (1 + __builtin_fabsf(h));
}
INLINE float larger(float x, float y) { return x > y ? x : y; }
// The largest of all lanes; none is negative. NaN is larger than all others.
INLINE float largest_of_lanes(float x) { return float_of(largest_of_lanes(bits_of(x))); }
INLINE float limit(float size) { return LIMIT * size <= LARGEST ? LIMIT * size : LARGEST; }
// A guess and its correction; where they are beyond the limit or not finite, f.
INLINE Vector corrected(const Vector& guess, const Vector& d, const Vector& residual,
                        const float (&limits)[NUMBERS]) {
    Vector y;
    bool lost = false;
    UNROLL for (int n = 0; n < NUMBERS; ++n)
        lost = lost || !(__builtin_fabsf(guess.at[n] + d.at[n]) <= limits[n]);
    UNROLL for (int n = 0; n < NUMBERS; ++n)
        y.at[n] = guess.at[n] + (lost ? residual.at[n] : d.at[n]);
    return y;
}
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
    Vector g[ITEMS];                // the states after them
    int row, channel, mine, part, lane;
    i64 first;                      // the thread's first step
    int count;                      // how many steps it has in the window
    Vector last;                    // the state after the window
    int turn, iterations, walked;

    INLINE_MEMBER int entry() const { return part * 32 + lane; }
    INLINE_MEMBER void load(const Params& P, i64 step) {
        UNROLL for (int i = 0; i < ITEMS; ++i)
            if (step + i < P.length) load_raw(next[i], P, from, step + i);
    }
    // The warps of the chain meet.
    INLINE_MEMBER void meet() const {
        if constexpr (WARPS_PER_CHAIN > 1) wait_for(1 + mine, 32 * WARPS_PER_CHAIN);
    }
    // Where a warp tells the others of its chain something. Two take turns, so that one is written
    // while the other is read.
    INLINE_MEMBER u32 (*next_messages(Shared& shared))[MESSAGE_WORDS] {
        turn ^= 1;
        return shared.messages[mine][turn];
    }
    INLINE_MEMBER bool exists(int i) const { return i < count; }
    static INLINE_MEMBER Vector numbers_of(const State& s) {
        Vector y;
        get_numbers(s, y.at);
        return y;
    }

    // Iterates in the window. Returns whether it is solved; all threads of the chain agree.
    INLINE_MEMBER bool solve(Shared& shared) {
        const Vector entering = numbers_of(carry);
        bool finite = true;
        UNROLL for (int n = 0; n < NUMBERS; ++n) finite = finite && is_finite(entering.at[n]);
        if (!finite) return false;
        Vector start = entering, end = entering;  // of the thread's steps
        ROLLED for (int k = 0; k < MOST; ++k) {
            ++iterations;
            Affine all = nothing();
            Vector p = start, r;
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                const Affine step = tangent_of(p, carry, x[i]);
                const Affine both = after(step.slope, all);
                UNROLL for (int j = 0; j < SLOPES; ++j)
                    all.slope[j] = exists(i) ? both.slope[j] : all.slope[j];
                UNROLL for (int n = 0; n < NUMBERS; ++n)
                    p.at[n] = exists(i) ? step.offset.at[n] : p.at[n];
            }
            bool near = true;
            float size[NUMBERS];  // the largest |F|
            UNROLL for (int n = 0; n < NUMBERS; ++n) {
                size[n] = larger(__builtin_fabsf(p.at[n]), __builtin_fabsf(entering.at[n]));
                r.at[n] = p.at[n] - end.at[n];
                near = near && is_near(r.at[n], end.at[n]);
            }
            all.offset = r;
            UNROLL for (int d = 1; d < 32; d *= 2) {
                const Affine both = composed(affine_up(all, d), all);
                if (lane >= d) all = both;
            }
            near = all_lanes(near);
            UNROLL for (int n = 0; n < NUMBERS; ++n) size[n] = largest_of_lanes(size[n]);
            Vector d, first_start = entering;  // at the end of the warps before; the warp's start
            UNROLL for (int n = 0; n < NUMBERS; ++n) d.at[n] = 0;
            if constexpr (WARPS_PER_CHAIN > 1) {
                auto* const messages = next_messages(shared);
                if (lane == 31) {
                    u32* to = messages[part];
                    UNROLL for (int i = 0; i < SLOPES; ++i) *to++ = bits_of(all.slope[i]);
                    UNROLL for (int n = 0; n < NUMBERS; ++n) *to++ = bits_of(all.offset.at[n]);
                    UNROLL for (int n = 0; n < NUMBERS; ++n) *to++ = bits_of(end.at[n]);
                    UNROLL for (int n = 0; n < NUMBERS; ++n) *to++ = bits_of(r.at[n]);
                    UNROLL for (int n = 0; n < NUMBERS; ++n) *to++ = bits_of(size[n]);
                    *to = near;
                }
                meet();
                Vector ended = entering, left;  // the end of the warp before, and its residual
                UNROLL for (int n = 0; n < NUMBERS; ++n) left.at[n] = 0;
                UNROLL for (int q = 0; q < WARPS_PER_CHAIN; ++q) {
                    const u32* of = messages[q];
                    near = near && of[SLOPES + 4 * NUMBERS];
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        size[n] = larger(size[n], float_of(of[SLOPES + 3 * NUMBERS + n]));
                    if (q < part) {
                        Affine a;
                        UNROLL for (int i = 0; i < SLOPES; ++i) a.slope[i] = float_of(of[i]);
                        UNROLL for (int n = 0; n < NUMBERS; ++n) {
                            a.offset.at[n] = float_of(of[SLOPES + n]);
                            ended.at[n] = float_of(of[SLOPES + NUMBERS + n]);
                            left.at[n] = float_of(of[SLOPES + 2 * NUMBERS + n]);
                        }
                        d = applied(a.slope, d, a.offset);
                    }
                }
                UNROLL for (int n = 0; n < NUMBERS; ++n) size[n] = limit(size[n]);
                first_start = corrected(ended, d, left, size);
            } else {
                UNROLL for (int n = 0; n < NUMBERS; ++n) size[n] = limit(size[n]);
            }
            end = corrected(end, applied(all.slope, d, all.offset), r, size);
            UNROLL for (int n = 0; n < NUMBERS; ++n) {
                const float up = lane_up(end.at[n]);
                start.at[n] = lane == 0 ? first_start.at[n] : up;
            }
            if (near && arrives(shared, start, end)) return true;
        }
        return false;
    }
    // Walks each thread's steps from `start`. Returns whether all arrive near their `end`.
    INLINE_MEMBER bool arrives(Shared& shared, const Vector& start, const Vector& end) {
        State s = carry;
        put_numbers(s, start.at);
        UNROLL for (int i = 0; i < ITEMS; ++i) {
            Out out;
            const Vector to = numbers_of(advance(s, ready_of(s, x[i], false), out));
            g[i] = numbers_of(s);
            UNROLL for (int n = 0; n < NUMBERS; ++n)
                g[i].at[n] = exists(i) ? to.at[n] : g[i].at[n];
            put_numbers(s, g[i].at);
        }
        bool near = true;
        UNROLL for (int n = 0; n < NUMBERS; ++n)
            near = near && is_near(g[ITEMS - 1].at[n] - end.at[n], end.at[n]);
        near = all_lanes(near);
        if constexpr (WARPS_PER_CHAIN > 1) {
            auto* const messages = next_messages(shared);
            if (lane == 31) {
                messages[part][NUMBERS] = near;
                UNROLL for (int n = 0; n < NUMBERS; ++n)
                    messages[part][n] = bits_of(g[ITEMS - 1].at[n]);
            }
            meet();
            UNROLL for (int q = 0; q < WARPS_PER_CHAIN; ++q) near = near && messages[q][NUMBERS];
            UNROLL for (int n = 0; n < NUMBERS; ++n)
                last.at[n] = float_of(messages[WARPS_PER_CHAIN - 1][n]);
        } else {
            last = from_lane(g[ITEMS - 1], 31);
        }
        return near;
    }

    // Walks along the window: one lane after the other takes its steps.
    INLINE_MEMBER void walk(Shared& shared) {
        ++walked;
        State s = carry;
        ROLLED for (int q = 0; q < WARPS_PER_CHAIN; ++q) {
            if (q == part)
                ROLLED for (int l = 0; l < 32; ++l) {
                    if (l == lane)
                        UNROLL for (int i = 0; i < ITEMS; ++i) {
                            if (exists(i)) {
                                Out out;
                                s = advance(s, ready_of(s, x[i], false), out);
                            }
                            g[i] = numbers_of(s);
                        }
                    put_numbers(s, from_lane(numbers_of(s), l).at);
                }
            if constexpr (WARPS_PER_CHAIN > 1) {
                auto* const messages = next_messages(shared);
                if (q == part && lane == 31)
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        messages[q][n] = bits_of(g[ITEMS - 1].at[n]);
                meet();
                Vector ended;
                UNROLL for (int n = 0; n < NUMBERS; ++n) ended.at[n] = float_of(messages[q][n]);
                put_numbers(s, ended.at);
            }
        }
        last = numbers_of(s);
    }

    INLINE_MEMBER void run(const Params& P, Shared& shared) {
        carry = load_init(P, row, channel, 0);
        find_inputs(from, P, row, channel);
        turn = iterations = walked = 0;
        int failed = 0, skip = 0;
        const i64 offset = (i64)entry() * ITEMS;
        load(P, offset);
        ROLLED for (i64 begin = 0; begin < P.length; begin += WINDOW) {
            first = begin + offset;
            count = P.length - first < ITEMS ? (int)(P.length - first) : ITEMS;
            UNROLL for (int i = 0; i < ITEMS; ++i) x[i] = next[i];
            load(P, first + WINDOW);
            const bool solved = skip == 0 && solve(shared);
            if (!solved) walk(shared);
            failed = solved ? 0 : skip > 0 || failed == MOST_FAILED ? failed : failed + 1;
            skip = skip > 0 ? skip - 1 : (1 << failed) - 1;
            State s = carry;
            UNROLL for (int i = 0; i < ITEMS; ++i)
                if (exists(i)) {
                    put_numbers(s, g[i].at);
                    store_out(P, row, channel, first + i,
                              lower(s, x[i], first + i + 1 == P.length));
                }
            put_numbers(carry, last.at);
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
