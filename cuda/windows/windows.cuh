// Moving windows over [outer, steps, inner], and their gradient, without a word between threads.
//
// Before this file the generator (source.py) writes the operator, as for the CPU's windows, and
//   KIND           which of four kernels this is: TOTALS, RESULTS, PULL, GATHER
//   TILE           the steps of a thread
//   LANES          channels of a block whose rows are read as they lie; 0: warps read through shared
//                  memory, since fewer than 32 channels are neighbours
//   HAS_MIDDLE, HAS_ENDS, LEAVES, STAGE_BYTES
//   INPUTS(F), OUTPUTS(F), ...      one F(name, value, memory, leaf, part, components) per scalar
//
// The axis is cut into tiles. Windows of the steps first … first + TILE − 1 begin, step by step, at
// first − shift … first − shift + TILE − 1 (shift = width − 1): the tail of the tile. With z the tail,
// x the tile and M the steps between the two,
//
//     y[i] = (z[i] ∘ … ∘ z[TILE − 1]) ∘ M ∘ (x[0] ∘ … ∘ x[i])
//
// M has the same number of steps for every tile: `middle` whole tiles, and before them the last
// `ends` steps of one more. TOTALS combines both of every tile; windows of `middle` of these totals
// are the same problem with TILE times fewer steps (HAS_MIDDLE: they are given); RESULTS makes y. So
// x is read three times, once from the L2 where tail and tile are under way together.
//
// Backward, a step has a gradient as part of its own tile (its head), as part of another tile's tail,
// and as part of totals. PULL makes the first two, and the cotangents of M; GATHER adds all three.
//
// Steps before the first one are left out, rather than an identity that an operator need not have.
// So are cotangents that do not exist: a zero times an infinite slope would be NaN.
#pragma once

constexpr bool HAS_M = HAS_MIDDLE || HAS_ENDS;
constexpr bool STAGED = LANES == 0;
constexpr int ALL_THREADS = 128;
constexpr int SHARED_BYTES = STAGED ? ALL_THREADS / 32 * STAGE_BYTES : 0;
constexpr int TILES_OF_BLOCK = STAGED ? 1 : ALL_THREADS / (STAGED ? 1 : LANES);

struct Params {
    char* port[LEAVES];
    i64 steps, inner, shift, middle, ends, tiles, count, groups, runs, reverse;
};

// Where a thread is. Steps are in the scan's order: with `reverse`, step 0 is the last in memory.
struct Place {
    i64 row, channel, tile;
    i64 first;        // the first step of the tile
    bool exists;
    // STAGED: the steps of the warp, and the thread's step and channel among them
    i64 warp_first;
    int warp_steps, own;
    char* stage;

    INLINE_MEMBER i64 in_memory(const Params& P, i64 step) const {
        return P.reverse ? P.steps - 1 - step : step;
    }
    INLINE_MEMBER i64 of_tile(const Params& P, i64 number) const {
        return (row * (P.tiles - 1) + number) * P.inner + channel;
    }
};

INLINE Place place_of(const Params& P) {
    Place at;
    const int thread = thread_index();
    i64 block = block_index();
    const i64 run = block % P.runs;
    block /= P.runs;
    const i64 group = block % P.groups;
    at.row = block / P.groups;
    if constexpr (STAGED) {
        const int inner = (int)P.inner, lane = thread % 32, tiles = 32 / inner;
        at.channel = lane % inner;
        const i64 first = (run * (ALL_THREADS / 32) + thread / 32) * tiles;
        at.tile = first + lane / inner;
        at.exists = lane < tiles * inner && at.tile < P.count;
        at.warp_first = first * TILE;
        at.warp_steps = tiles * TILE;
        at.own = lane / inner * TILE;
        at.stage = shared_memory() + thread / 32 * STAGE_BYTES;
    } else {
        at.channel = group * LANES + thread % LANES;
        at.tile = run * TILES_OF_BLOCK + thread / LANES;
        at.exists = at.channel < P.inner && at.tile < P.count;
    }
    at.first = at.tile * TILE;
    return at;
}

// The scalars of a leaf at a thread's steps, from `shift` steps before its tile on. ALL: all of them
// exist. Through shared memory, each leaf in turn: what is there is read before the next one comes.
template <class M, int COMPONENTS, bool ALL>
struct Steps {
    M* base;
    i64 stride, from, end;

    INLINE_MEMBER Steps(const Params& P, const Place& at, int leaf, i64 shift, i64 limit) {
        base = (M*)P.port[leaf] + at.row * P.steps * P.inner * COMPONENTS;
        from = at.first - shift;
        end = limit;
        if constexpr (STAGED) {
            stride = P.inner * COMPONENTS * (P.reverse ? -1 : 1);
            base = (M*)at.stage + at.channel * COMPONENTS +
                   (P.reverse ? at.warp_steps - 1 - at.own : at.own) * P.inner * COMPONENTS;
        } else {
            stride = P.inner * COMPONENTS * (P.reverse ? -1 : 1);
            base += (at.in_memory(P, from) * P.inner + at.channel) * COMPONENTS;
        }
    }
    INLINE_MEMBER bool here(int i) const { return ALL || (from + i >= 0 && from + i < end); }
    INLINE_MEMBER M get(int i, int part) const {
        if constexpr (STAGED) return base[i * stride + part];
        else return here(i) ? base[i * stride + part] : M{};
    }
    INLINE_MEMBER void put(int i, int part, M x) const {
        if (STAGED || here(i)) base[i * stride + part] = x;
    }
};

// Copies the scalars of a leaf at a warp's steps to shared memory, or from there.
template <class M, int COMPONENTS, bool STORES>
INLINE void stage(const Params& P, const Place& at, int leaf, i64 shift, i64 limit) {
    if constexpr (STAGED) {
        const i64 size = P.inner * COMPONENTS;
        M* const row = (M*)P.port[leaf] + at.row * P.steps * size;
        const i64 first = at.warp_first - shift;
        // The steps that exist: [low, high) in the order of memory.
        const i64 begin = first < 0 ? 0 : first;
        const i64 end = first + at.warp_steps < limit ? first + at.warp_steps : limit;
        const i64 low = P.reverse ? P.steps - end : begin, high = P.reverse ? P.steps - begin : end;
        const i64 zero = (P.reverse ? P.steps - (first + at.warp_steps) : first) * size;
        M* const shared = (M*)at.stage;
        const int count = at.warp_steps * (int)size;
        sync_warp();
        UNROLL_BY(TILE * COMPONENTS) for (int k = 0; k < TILE * COMPONENTS; ++k) {
            const int e = k * 32 + thread_index() % 32;
            if (e < count && zero + e >= low * size && zero + e < high * size) {
                if constexpr (STORES) row[zero + e] = shared[e];
                else shared[e] = row[zero + e];
            }
        }
        sync_warp();
    }
}

// Functions that load or store arrays of structs, TILE steps each.
#define LOAD_PORT(name, value, memory, leaf, part, components)                       \
    {                                                                                \
        if (part == 0) stage<memory, components, false>(P, at, leaf, shift, limit);  \
        const Steps<memory, components, ALL> from(P, at, leaf, shift, limit);        \
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)                                        \
            v[i].name = from_memory<value>(from.get(i, part));                       \
    }
#define STORE_PORT(name, value, memory, leaf, part, components)                      \
    {                                                                                \
        if (STAGED && part == 0) sync_warp();                                        \
        const Steps<memory, components, ALL> to(P, at, leaf, shift, limit);          \
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)                                        \
            if (at.exists) to.put(i, part, to_memory<memory>(v[i].name));            \
        if (part == components - 1)                                                  \
            stage<memory, components, true>(P, at, leaf, shift, limit);              \
    }
#define STEPS_IO(NAME, VALUE, LIST, PORT)                                            \
    template <bool ALL>                                                              \
    INLINE void NAME(VALUE (&v)[TILE], const Params& P, const Place& at, i64 shift,  \
                     i64 limit) {                                                    \
        LIST(PORT)                                                                   \
    }
// Those that load or store a number of each tile.
#define GET_PORT(name, value, memory, leaf, part, components) \
    v.name = from_memory<value>(((const memory*)P.port[leaf])[at.of_tile(P, number)]);
#define PUT_PORT(name, value, memory, leaf, part, components) \
    ((memory*)P.port[leaf])[at.of_tile(P, number)] = to_memory<memory>(v.name);
#define TILES_IO(NAME, VALUE, LIST, PORT, CONST)                                      \
    INLINE void NAME(CONST VALUE& v, const Params& P, const Place& at, i64 number) { \
        LIST(PORT)                                                                   \
    }
#define NOTHING
STEPS_IO(load_inputs, Raw, INPUTS, LOAD_PORT)

#if KIND == TOTALS
TILES_IO(put_whole, State, MIDDLE, PUT_PORT, const)
TILES_IO(put_ends, State, ENDS, PUT_PORT, const)

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    Raw x[TILE];
    load_inputs<ALL>(x, P, at, 0, P.steps);
    if (!at.exists) return;
    State total;
    UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i) {
        const State e = lift(x[i]);
        total = i == TILE - 1 ? e : combine(e, total);
        if (HAS_ENDS && i == TILE - P.ends) put_ends(total, P, at, at.tile);
    }
    if (HAS_MIDDLE) put_whole(total, P, at, at.tile);
}
#endif

#if KIND == RESULTS || KIND == PULL
TILES_IO(get_middle, State, MIDDLE, GET_PORT, NOTHING)
TILES_IO(get_ends, State, ENDS, GET_PORT, NOTHING)

// M of a tile that is not the first: of two parts, of which the first may not exist.
struct Middle {
    State ends, whole, both;
    bool has_ends;
    INLINE_MEMBER Middle(const Params& P, const Place& at) {
        has_ends = HAS_ENDS && at.tile - 1 - P.middle >= 0;
        if (HAS_MIDDLE) get_middle(whole, P, at, at.tile - 1);
        if (has_ends) get_ends(ends, P, at, at.tile - 1 - P.middle);
        both = !has_ends ? whole : HAS_MIDDLE ? combine(ends, whole) : ends;
    }
};

// What comes before x in every window of a tile: s[i] combines z[i], …, z[TILE − 1] and M. It exists
// from step `low` on.
struct Before {
    State s[TILE];
    int low;
    INLINE_MEMBER bool has(int i) const { return i >= low; }
};

template <bool ALL>
INLINE void combine_before(Before& before, const Raw (&z)[TILE], const Params& P, const Place& at) {
    const i64 from = at.first - P.shift;
    const bool between = HAS_M && (ALL || at.tile > 0);
    State last;
    if (between) last = Middle(P, at).both;
    UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i) {
        if (ALL || from + i >= 0) {
            const State e = lift(z[i]);
            const bool has = between || i < TILE - 1;
            last = has ? combine(e, last) : e;
        }
        before.s[i] = last;
    }
    before.low = ALL || between || from >= 0 ? 0 : from + TILE > 0 ? (int)-from : TILE;
}
#endif

#if KIND == RESULTS
STEPS_IO(store_outputs, Out, OUTPUTS, STORE_PORT)

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    Raw x[TILE], z[TILE];
    load_inputs<ALL>(x, P, at, 0, P.steps);
    load_inputs<ALL>(z, P, at, P.shift, P.steps);
    Out y[TILE];
    if (at.exists) {
        Before before;
        combine_before<ALL>(before, z, P, at);
        State p;
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)
            if (ALL || at.first + i < P.steps) {
                const State e = lift(x[i]);
                p = i == 0 ? e : combine(p, e);
                y[i] = lower(ALL || before.has(i) ? combine(before.s[i], p) : p, x[i]);
            }
    }
    store_outputs<ALL>(y, P, at, 0, P.steps);
}
#endif

#if KIND == PULL
STEPS_IO(load_given, OutCotangent, GIVEN, LOAD_PORT)
STEPS_IO(store_heads, RawCotangent, HEADS, STORE_PORT)
STEPS_IO(store_tails, RawCotangent, TAILS, STORE_PORT)
TILES_IO(put_middle, Cotangent, MIDDLE_COTANGENT, PUT_PORT, const)
TILES_IO(put_ends, Cotangent, ENDS_COTANGENT, PUT_PORT, const)

// Sums of cotangents, of which some do not exist.
struct Sum {
    Cotangent value;
    bool exists = false;
    INLINE_MEMBER void add(const Cotangent& c) {
        value = exists ? added(value, c) : c;
        exists = true;
    }
};

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    Raw x[TILE], z[TILE];
    OutCotangent g[TILE];
    load_inputs<ALL>(x, P, at, 0, P.steps);
    load_inputs<ALL>(z, P, at, P.shift, P.steps);
    load_given<ALL>(g, P, at, 0, P.steps);
    RawCotangent heads[TILE], tails[TILE];
    if (at.exists) {
        Before before;
        combine_before<ALL>(before, z, P, at);
        State p[TILE];
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)
            if (ALL || at.first + i < P.steps) {
                const State e = lift(x[i]);
                p[i] = i == 0 ? e : combine(p[i == 0 ? 0 : i - 1], e);
            }
        Cotangent of_before[TILE];
        Sum of_p;
        UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i)
            if (ALL || at.first + i < P.steps) {
                if (ALL || before.has(i)) {
                    const State w = combine(before.s[i], p[i]);
                    const Pair both = combine_vjp(before.s[i], p[i], lower_vjp(w, g[i]));
                    of_before[i] = both.left;
                    of_p.add(both.right);
                } else {
                    of_p.add(lower_vjp(p[i], g[i]));
                }
                if (i == 0) {
                    heads[i] = lift_vjp(x[i], of_p.value);
                } else {
                    const Pair both = combine_vjp(p[i == 0 ? 0 : i - 1], lift(x[i]), of_p.value);
                    heads[i] = lift_vjp(x[i], both.right);
                    of_p.value = both.left;
                }
            }
        const i64 from = at.first - P.shift;
        const bool between = HAS_M && (ALL || at.tile > 0);
        Sum carry;
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) {
            if ((ALL || before.has(i)) && (ALL || at.first + i < P.steps)) carry.add(of_before[i]);
            if (ALL || (from + i >= 0 && carry.exists)) {
                if (i < TILE - 1 || between) {
                    State rest;
                    if (i < TILE - 1) rest = before.s[i < TILE - 1 ? i + 1 : i];
                    else rest = Middle(P, at).both;
                    const Pair both = combine_vjp(lift(z[i]), rest, carry.value);
                    tails[i] = lift_vjp(z[i], both.left);
                    carry.value = both.right;
                } else {
                    tails[i] = lift_vjp(z[i], carry.value);
                }
            }
        }
        if (between) {
            const Middle m(P, at);
            Cotangent of_whole = carry.value;
            if (m.has_ends) {
                Cotangent of_ends = carry.value;
                if (HAS_MIDDLE) {
                    const Pair both = combine_vjp(m.ends, m.whole, carry.value);
                    of_ends = both.left, of_whole = both.right;
                }
                put_ends(of_ends, P, at, at.tile - 1 - P.middle);
            }
            if (HAS_MIDDLE) put_middle(of_whole, P, at, at.tile - 1);
        }
    }
    store_heads<ALL>(heads, P, at, 0, P.steps);
    store_tails<ALL>(tails, P, at, P.shift, P.tiles * TILE - P.shift);
}
#endif

#if KIND == GATHER
STEPS_IO(load_heads, RawCotangent, HEADS, LOAD_PORT)
STEPS_IO(load_tails, RawCotangent, TAILS, LOAD_PORT)
STEPS_IO(store_gradients, RawCotangent, GRADIENTS, STORE_PORT)
TILES_IO(get_whole, Cotangent, MIDDLE_COTANGENT, GET_PORT, NOTHING)
TILES_IO(get_ends, Cotangent, ENDS_COTANGENT, GET_PORT, NOTHING)

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    // The last steps are in the tail of no tile.
    const i64 limit = P.tiles * TILE - P.shift;
    RawCotangent total[TILE], tail[TILE];
    load_heads<ALL>(total, P, at, 0, P.steps);
    load_tails<ALL>(tail, P, at, 0, limit);
    UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)
        if (ALL || at.first + i < limit) total[i] = summed(total[i], tail[i]);
    if constexpr (HAS_M) {
        Raw x[TILE];
        load_inputs<ALL>(x, P, at, 0, P.steps);
        if (at.exists && at.tile < P.tiles - 1) {
            State rest[TILE];
            UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i) {
                const State e = lift(x[i]);
                rest[i] = i == TILE - 1 ? e : combine(e, rest[i == TILE - 1 ? i : i + 1]);
            }
            const bool has_ends = HAS_ENDS && at.tile + 1 + P.middle < P.tiles;
            bool exists = HAS_MIDDLE;
            Cotangent c, of_ends;
            if (HAS_MIDDLE) get_whole(c, P, at, at.tile);
            if (has_ends) get_ends(of_ends, P, at, at.tile);
            UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) {
                if (has_ends && i == TILE - P.ends) {
                    c = exists ? added(c, of_ends) : of_ends;
                    exists = true;
                }
                if (exists) {
                    if (i < TILE - 1) {
                        const Pair both =
                            combine_vjp(lift(x[i]), rest[i < TILE - 1 ? i + 1 : i], c);
                        total[i] = summed(total[i], lift_vjp(x[i], both.left));
                        c = both.right;
                    } else {
                        total[i] = summed(total[i], lift_vjp(x[i], c));
                    }
                }
            }
        }
    }
    store_gradients<ALL>(total, P, at, 0, P.steps);
}
#endif

// Whether all steps of a thread's tile and of its tail exist.
INLINE bool is_whole(const Params& P, const Place& at) {
    if (KIND == TOTALS) return at.exists;
    const bool whole = at.exists && at.first + TILE <= P.steps;
    if (KIND == GATHER) return whole && at.first + TILE <= P.tiles * TILE - P.shift;
    return whole && at.first >= P.shift && (!HAS_M || at.tile > 0) &&
           (!HAS_ENDS || at.tile - 1 - P.middle >= 0);
}

KERNEL(ALL_THREADS, 1) scan(PARAMETERS(Params, P)) {
    const Place at = place_of(P);
    if constexpr (STAGED) {
        if (all_lanes(is_whole(P, at))) run<true>(P, at);
        else run<false>(P, at);
    } else {
        if (!at.exists) return;
        if (is_whole(P, at)) run<true>(P, at);
        else run<false>(P, at);
    }
}

LAUNCH_NUMBERS
