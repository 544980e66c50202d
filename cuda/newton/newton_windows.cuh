// Newton's method for h[t] = f(h[t−1], x[t]), in windows of the axis, with all iterations of all
// windows in one launch.
//
// A chain is one row of one channel. A block has CHAINS of them, which are adjacent in memory: lane l
// of every warp works on chain l % CHAINS, so that SLOTS threads of a warp share one, and the lanes
// that read a step's row are adjacent. Each thread has ITEMS adjacent steps of a window, whose inputs
// it keeps in shared memory, and a guess of the state after them, `end`. The unknowns are these ends
// alone, not all states (multiple shooting). An iteration is
//
// 1. each thread walks its steps from the end of the thread before, which gives the map F of its
//    steps at that state, and the product J of their Jacobians; the residual r is F − end;
// 2. the corrections d = J d' + r, where d' is that of the thread before, an affine recurrence that
//    starts from 0: scanned across lanes by shuffles, and across warps through shared memory;
// 3. end += d. Where that is LIMIT times as large as any state of the window, or not finite, the end
//    becomes F: products of many slopes overshoot where a step hardly forgets.
//
// A window of a chain is solved, and its states are those that were walked last, when every residual
//
// - is CLOSE, as small as roundings, and also PRECISE, small relative to the end itself; or
// - is CLOSE in two iterations in a row; or
// - is within the caller's tolerance for the third time.
//
// CLOSE counts the roundings of each of a thread's states as far as the slopes carry them to the
// thread's end, and at most the roundings of its largest state: a large state that is forgotten before
// the end leaves none there. Where such roundings are as large as the end itself, a first guess would
// be CLOSE; so PRECISE, or a second iteration, is wanted too.
//
// After MOST iterations that did not solve it, a window is walked, thread after thread. Either way the
// last state of a window is exactly what the next one starts from. After each failure in a row, twice
// as many windows of a chain are walked without an attempt. The chains of a block take windows
// together, but what one of them gives does not depend on the others.
//
// Compared with a guess of every state: what a step forgets within ITEMS steps needs no iteration,
// the scan has one map per thread, and no Jacobian is kept. Steps are walked in loops of a few steps:
// all steps of a thread in one piece would be more code than the instruction caches feed.
//
// What windows of which length cost: docs/performance/cuda.md.
#pragma once

constexpr int ALL_THREADS = THREADS, WARPS = THREADS / 32, SLOTS = 32 / CHAINS;
constexpr int WINDOW = WARPS * SLOTS * ITEMS;
constexpr int MOST_FAILED = 4, ENOUGH = 3;
constexpr float LIMIT = 4, LARGEST = 0x1.fffffep127f, CLOSE = 0x1p-22f,
                PRECISE = 0x1p-12f, SMALLEST = 0x1p-126f;
// The lanes of the first chain, as bits.
constexpr u32 LANES_OF_FIRST = 0xffffffffu / (u32)(((u64)1 << CHAINS) - 1);
static_assert(THREADS % 32 == 0 && 32 % CHAINS == 0, "lanes");
constexpr int AT_ONCE = 4;  // steps of a loop that are unrolled

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
// What a step makes of roundings: those that the slopes carry on, and those of its own result.
INLINE Vector carried(const float (&slope)[SLOPES], const Vector& roundings, const Vector& f) {
    Vector y;
    UNROLL for (int i = 0; i < NUMBERS; ++i) {
        y.at[i] = __builtin_fabsf(f.at[i]);
        if constexpr (DIAGONAL) {
            y.at[i] = fused(__builtin_fabsf(slope[i]), roundings.at[i], y.at[i]);
        } else {
            UNROLL for (int j = 0; j < NUMBERS; ++j)
                y.at[i] = fused(__builtin_fabsf(slope[i * NUMBERS + j]), roundings.at[j], y.at[i]);
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
INLINE u32 larger(u32 x, u32 y) { return x > y ? x : y; }
// The bits of |x|; as integers they are in the same order, and NaN is the largest.
constexpr u32 SIGN = 0x80000000u;
INLINE u32 size_of(float x) { return bits_of(x) & ~SIGN; }
// A guess and its correction; where they are LIMIT times as large as a size or not finite, f.
INLINE Vector corrected(const Vector& guess, const Vector& d, const Vector& residual,
                        const u32 (&sizes)[NUMBERS]) {
    Vector y;
    bool lost = false;
    UNROLL for (int n = 0; n < NUMBERS; ++n) {
        const float limit = LIMIT * float_of(sizes[n]);
        lost = lost || !(__builtin_fabsf(guess.at[n] + d.at[n]) <=
                         (limit <= LARGEST ? limit : LARGEST));
    }
    UNROLL for (int n = 0; n < NUMBERS; ++n)
        y.at[n] = guess.at[n] + (lost ? residual.at[n] : d.at[n]);
    return y;
}
INLINE Vector difference(const Vector& x, const Vector& y) {
    Vector d;
    UNROLL for (int n = 0; n < NUMBERS; ++n) d.at[n] = x.at[n] - y.at[n];
    return d;
}
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

// What a warp tells the others about a chain: the map of its steps, the largest |h|, whether a
// residual is not within the tolerance (FAR), not CLOSE, not PRECISE, and of its last thread the end
// and F.
struct alignas(16) Message {
    Affine map;
    u32 sizes[NUMBERS], flags;
    Vector end, f;
};
constexpr u32 FAR = 1, NOT_CLOSE = 2, NOT_PRECISE = 4;
static_assert(sizeof(Message) <= 4 * MESSAGE_WORDS, "messages");

// One chain, as a thread sees it.
struct Chain {
    State carry;                    // the state before the window; parameters among its components
    const char* from[INPUT_COUNT];  // the inputs of the first step of the thread's next window
    Raw next[ITEMS];                // the inputs of the thread's steps in the window after this one
    u32* own;                       // in shared memory, those in this one and the states after them
    Vector last;                    // the state after the window
    i64 first;                      // the thread's first step
    int count;                      // how many steps it has in the window
    int row, channel, place, slot, warp, turn, iterations, walked;
    bool exists;                    // else the block has fewer chains
    bool tries, solved;             // whether the chain is to be iterated in the window; it is done

    INLINE_MEMBER void load(const Params& P, i64 step) {
        UNROLL for (int i = 0; i < ITEMS; ++i)
            if (exists && step + i < P.length) load_raw(next[i], P, from, i);
        advance_inputs(from, P, WINDOW);
    }
    INLINE_MEMBER Raw x(int i) const {
        Raw y;
        get_raw(own + i * CHAINS, y);
        return y;
    }
    INLINE_MEMBER Vector g(int i) const {
        Vector y;
        UNROLL for (int n = 0; n < NUMBERS; ++n)
            get_words(own + (RAW_WORDS + n) * PLANE + i * CHAINS, y.at[n]);
        return y;
    }
    INLINE_MEMBER void put_g(int i, const Vector& y) const {
        UNROLL for (int n = 0; n < NUMBERS; ++n)
            put_words(own + (RAW_WORDS + n) * PLANE + i * CHAINS, y.at[n]);
    }
    // Calls f(i, inputs) for each step of the thread. The inputs of some steps are read before what
    // f writes to shared memory, which the compiler cannot tell from them.
    template <class F> INLINE_MEMBER void each_step(const F& f) const {
        int i = 0;
        ROLLED for (; i + AT_ONCE <= count; i += AT_ONCE) {
            Raw read[AT_ONCE];
            UNROLL for (int j = 0; j < AT_ONCE; ++j) read[j] = x(i + j);
            UNROLL for (int j = 0; j < AT_ONCE; ++j) f(i + j, read[j]);
        }
        ROLLED for (; i < count; ++i) f(i, x(i));
    }
    // Of all chains of the block, as every warp has lanes of each.
    static INLINE_MEMBER bool any(bool x) { return !all_lanes(!x); }
    // Of all lanes of the warp that have this chain.
    INLINE_MEMBER bool all(bool x) const {
        if constexpr (CHAINS == 1)
            return all_lanes(x);
        else
            return (lanes_where(!x) & (LANES_OF_FIRST << place)) == 0;
    }
    INLINE_MEMBER u32 largest(u32 x) const {
        if constexpr (CHAINS == 1) {
            return largest_of_lanes(x);
        } else {
            UNROLL for (int d = CHAINS; d < 32; d *= 2) x = larger(x, shuffle_xor(x, d));
            return x;
        }
    }
    // The value of the slot before; in slot 0 the one given.
    INLINE_MEMBER Vector from_before(const Vector& v, const Vector& at_first) const {
        Vector y;
        UNROLL for (int n = 0; n < NUMBERS; ++n) {
            const float up = float_of(shuffle_up(bits_of(v.at[n]), CHAINS));
            y.at[n] = slot == 0 ? at_first.at[n] : up;
        }
        return y;
    }
    // A message of a warp about this chain. Two take turns, so that one is written while another
    // is read: `meet` begins the next turn.
    INLINE_MEMBER Message& message(Shared& shared, int of_warp) const {
        return *(Message*)shared.messages[turn][of_warp][place];
    }
    INLINE_MEMBER static Vector numbers_of(const State& s) {
        Vector y;
        get_numbers(s, y.at);
        return y;
    }

    // Iterates in the window, until all chains that try are solved.
    INLINE_MEMBER void solve(Shared& shared) {
        const Vector entering = numbers_of(carry);
        Vector start = entering, end = entering;  // of the thread's steps
        int near = 0;                             // how often residuals were within the tolerance
        bool was_close = false;                   // whether they were CLOSE in the iteration before
        ROLLED for (int k = 0; k < MOST; ++k) {
            const bool pending = tries && !solved;
            if (!any(pending)) break;
            iterations += pending;
            Affine map = nothing();
            Vector p = start, r;
            u32 sizes[NUMBERS];  // the largest |h| of the thread's steps, later of the window
            Vector roundings;    // of all h, in units of a rounding, as far as F has them
            UNROLL for (int n = 0; n < NUMBERS; ++n) {
                sizes[n] = size_of(start.at[n]);
                roundings.at[n] = float_of(sizes[n]);
            }
            each_step([&](int i, const Raw& read) {
                const Affine step = tangent_of(p, carry, read);
                map = after(step.slope, map);
                p = step.offset;
                roundings = carried(step.slope, roundings, p);
                UNROLL for (int n = 0; n < NUMBERS; ++n)
                    sizes[n] = larger(sizes[n], size_of(p.at[n]));
                if (pending) put_g(i, p);
            });
            bool is_near = true, is_close = true, is_precise = true;
            UNROLL for (int n = 0; n < NUMBERS; ++n) {
                r.at[n] = p.at[n] - end.at[n];
                const float off = __builtin_fabsf(r.at[n]);
                const float end_size = __builtin_fabsf(end.at[n]), f_size = __builtin_fabsf(p.at[n]);
                is_near = is_near && is_finite(off) && off <= TOLERANCE * (1 + end_size);
                is_precise = is_precise && off <= fused(PRECISE, end_size > f_size ? end_size : f_size,
                                                        SMALLEST);
                is_close = is_close && off <= fused(CLOSE, float_of(sizes[n]), SMALLEST) &&
                           off <= fused(CLOSE, roundings.at[n], SMALLEST);
                sizes[n] = largest(sizes[n]);
            }
            u32 flags = (all(is_near) ? 0 : FAR) | (all(is_close) ? 0 : NOT_CLOSE) |
                        (all(is_precise) ? 0 : NOT_PRECISE);
            const Vector f = p;
            map.offset = r;
            UNROLL for (int d = 1; d < SLOTS; d *= 2) {
                const Affine both = composed(affine_up(map, d * CHAINS), map);
                if (slot >= d) map = both;
            }
            // At the end of the warp before; the warp's start; F at the end of the window.
            Vector d, first_start = entering, leaving;
            UNROLL for (int n = 0; n < NUMBERS; ++n) d.at[n] = 0;
            if constexpr (WARPS > 1) {
                if (slot == SLOTS - 1) {
                    Message& to = message(shared, warp);
                    to.map = map, to.flags = flags, to.end = end, to.f = f;
                    UNROLL for (int n = 0; n < NUMBERS; ++n) to.sizes[n] = sizes[n];
                }
                sync_block();
                UNROLL_BY(AT_ONCE) for (int q = 0; q < WARPS; ++q) {
                    const Message& of = message(shared, q);
                    flags |= of.flags;
                    UNROLL for (int n = 0; n < NUMBERS; ++n)
                        sizes[n] = larger(sizes[n], of.sizes[n]);
                    if (q < warp) d = applied(of.map.slope, d, of.map.offset);
                }
                if (warp > 0) {
                    const Message& of = message(shared, warp - 1);
                    first_start = corrected(of.end, d, difference(of.f, of.end), sizes);
                }
                leaving = message(shared, WARPS - 1).f;
                turn ^= 1;
            } else {
                leaving = from_lane(f, 32 - CHAINS + place);
            }
            near += !(flags & FAR);
            const bool close = !(flags & NOT_CLOSE);
            if (pending && ((close && (was_close || !(flags & NOT_PRECISE))) || near == ENOUGH)) {
                solved = true;
                last = leaving;
            }
            was_close = close;
            const Vector moved = corrected(end, applied(map.slope, d, map.offset), r, sizes);
            UNROLL for (int n = 0; n < NUMBERS; ++n) end.at[n] = pending ? moved.at[n] : end.at[n];
            start = from_before(end, pending ? first_start : start);
        }
    }

    // Walks along the window, where the chain is not solved: one thread after the other takes its
    // steps.
    INLINE_MEMBER void walk(Shared& shared) {
        walked += !solved;
        State s = carry;
        ROLLED for (int q = 0; q < WARPS; ++q) {
            if (q == warp)
                ROLLED for (int l = 0; l < SLOTS; ++l) {
                    if (l == slot && !solved)
                        each_step([&](int i, const Raw& read) {
                            Out out;
                            s = advance(s, ready_of(s, read, false), out);
                            put_g(i, numbers_of(s));
                        });
                    put_numbers(s, from_lane(numbers_of(s), l * CHAINS + place).at);
                }
            if constexpr (WARPS > 1) {
                if (q == warp && slot == 0) message(shared, q).end = numbers_of(s);
                sync_block();
                put_numbers(s, message(shared, q).end.at);
                turn ^= 1;
            }
        }
        if (!solved) last = numbers_of(s);
    }

    INLINE_MEMBER void run(const Params& P, Shared& shared) {
        carry = load_init(P, row, channel, 0);
        first = (warp * SLOTS + slot) * ITEMS;
        own = shared.steps + (warp * SLOTS + slot) * (ITEMS + PAD) * CHAINS + place;
        find_inputs(from, P, row, channel, first);
        turn = iterations = walked = 0;
        int failed = 0, skip = 0;
        load(P, first);
        ROLLED for (i64 begin = 0; begin < P.length; begin += WINDOW, first += WINDOW) {
            const i64 left = P.length - first;
            count = !exists ? 0 : left < ITEMS ? (int)left : ITEMS;
            UNROLL for (int i = 0; i < ITEMS; ++i) put_raw(own + i * CHAINS, next[i]);
            load(P, first + WINDOW);
            const Vector entering = numbers_of(carry);
            tries = exists && skip == 0;
            UNROLL for (int n = 0; n < NUMBERS; ++n) tries = tries && is_finite(entering.at[n]);
            solved = !exists;
            if (any(tries)) solve(shared);
            if (any(!solved)) walk(shared);
            failed = solved ? 0 : skip > 0 || failed == MOST_FAILED ? failed : failed + 1;
            skip = skip > 0 ? skip - 1 : (1 << failed) - 1;
            State s = carry;
            UNROLL_BY(AT_ONCE) for (int i = 0; i < count; ++i) {
                put_numbers(s, g(i).at);
                store_out(P, row, channel, first + i, lower(s, x(i), first + i + 1 == P.length));
            }
            put_numbers(carry, last.at);
        }
        if (exists && warp == 0 && slot == 0) {
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
    const int lane = thread_index() % 32;
    chain.warp = thread_index() / 32, chain.place = lane % CHAINS, chain.slot = lane / CHAINS;
    ROLLED for (int begin = block_index() * CHAINS; begin < P.chains;
                begin += block_count() * CHAINS) {
        const int k = begin + chain.place;
        chain.exists = k < P.chains;
        const int existing = chain.exists ? k : begin;
        chain.row = existing / (int)P.channels;
        chain.channel = existing - chain.row * (int)P.channels;
        chain.run(P, shared);
    }
}

LAUNCH_NUMBERS
