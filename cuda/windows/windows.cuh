// Moving windows over [outer, steps, inner], and their gradient, without a word between threads.
//
// Before this file the generator (source.py) writes the operator, as for the CPU's windows, and
//   KIND           which of four kernels this is: TOTALS, RESULTS, PULL, GATHER
//   TILE, EVEN     the steps of the larger tiles; whether all have as many
//   LANES          channels of a block whose rows are read as they lie; 0: warps read through shared
//                  memory, since fewer than 32 channels are neighbours
//   HAS_M, LEAVES, STAGE_BYTES
//   INPUTS(F), OUTPUTS(F), ...      one F(name, value, memory, leaf, part, components) per scalar
//
// The axis is cut into tiles, `period` of them in every `shift` = width − 1 steps: the windows that
// end in a tile begin in the tile `period` before it, step by step. With z that tile, x their own
// and M what lies between, `period` − 1 whole tiles,
//
//     y[i] = (z[i] ∘ … ∘ z[last]) ∘ M ∘ (x[0] ∘ … ∘ x[i])
//
// TOTALS combines every tile; windows of `period` − 1 of these totals, one M for every tile, are the
// same problem with TILE times fewer steps; RESULTS makes y. So x is read twice, and a third time as
// z from a cache: blocks that are neighbours have tiles that lie `period` apart.
//
// Backward, a step has a gradient from windows that end in its tile (it is x), that begin in it (it
// is z), and through its tile's total. PULL makes the cotangents of every M, of which those of totals
// follow by the same way; GATHER makes all three parts and adds them.
//
// Tiles before the first one are left out, rather than an identity that an operator need not have.
// So are cotangents that do not exist: a zero times an infinite slope would be NaN.
#pragma once

constexpr bool STAGED = LANES == 0;
constexpr int ALL_THREADS = 128;
constexpr int SHARED_BYTES = STAGED ? ALL_THREADS / 32 * STAGE_BYTES : 0;
constexpr int TILES_OF_BLOCK = STAGED ? 1 : ALL_THREADS / (STAGED ? 1 : LANES);

// Of every `period` tiles the first `larger` have `base` + 1 steps, the others `base`. A thread takes
// `walk` tiles that lie `period` apart, of which there are `walks` in the axis.
struct Params {
    char* port[LEAVES];
    i64 steps, inner, shift;
    int period, base, larger, tiles, count, walk, walks, groups, runs, reverse;
};

INLINE i64 first_step(const Params& P, int tile) {
    const int part = tile % P.period;
    return tile / P.period * P.shift + (i64)part * P.base + (part < P.larger ? part : P.larger);
}

// Where a thread is. Steps are in the scan's order: with `reverse`, step 0 is the last in memory.
struct Place {
    i64 row, channel, first;  // the tile's first step
    int tile, size;           // and its steps, though the axis may end before
    bool works, stores;       // whether there is such a tile, and such a channel too
    // STAGED: the steps of the warp, and the thread's step among them
    i64 warp_first;
    int warp_steps, own;
    char* stage;

    // The steps of the tile that lies so many steps later.
    INLINE_MEMBER int there(const Params& P, i64 offset) const {
        const i64 left = P.steps - first - offset;
        return left >= size ? size : left > 0 ? (int)left : 0;
    }
    INLINE_MEMBER i64 in_memory(const Params& P, i64 step) const {
        return P.reverse ? P.steps - 1 - step : step;
    }
    INLINE_MEMBER i64 of_tile(const Params& P, int number) const {
        return (row * (P.tiles - 1) + number) * P.inner + channel;
    }
};

INLINE Place place_of(const Params& P) {
    Place at;
    const int thread = thread_index();
    unsigned block = (unsigned)block_index();
    const int run = (int)(block % P.runs);
    block /= P.runs;
    const int group = (int)(block % P.groups);
    at.row = block / P.groups;
    if constexpr (STAGED) {
        const int inner = (int)P.inner, lane = thread % 32, tiles = 32 / inner;
        const int begin = (run * (ALL_THREADS / 32) + thread / 32) * tiles;
        const bool idle = lane >= tiles * inner;
        at.channel = idle ? 0 : lane % inner;
        at.tile = idle ? begin : begin + lane / inner;
        at.works = at.stores = !idle && at.tile < P.count;
        at.warp_first = first_step(P, begin);
        at.warp_steps = (int)(first_step(P, begin + tiles) - at.warp_first);
        at.stage = shared_memory() + thread / 32 * STAGE_BYTES;
    } else {
        const int slot = run * TILES_OF_BLOCK + thread / LANES;
        const i64 channel = (i64)group * LANES + thread % LANES;
        at.channel = channel < P.inner ? channel : P.inner - 1;  // a warp stays together
        at.tile = slot % P.walks * P.walk * P.period + slot / P.walks;
        at.works = at.tile < P.count && slot < P.walks * P.period;
        at.stores = at.works && channel < P.inner;
    }
    at.first = first_step(P, at.tile);
    at.size = P.base + (EVEN || at.tile % P.period < P.larger);
    if constexpr (STAGED) at.own = (int)(at.first - at.warp_first);
    return at;
}

// Whether a tile that lies `period` apart from the thread's own, and of which `count` steps exist, is
// whole; through shared memory, those of all lanes, and the tiles before them.
INLINE bool is_whole(const Params& P, const Place& at, int tile, int count) {
    const bool whole = at.works && count == at.size;
    if constexpr (STAGED) return all_lanes(whole && (KIND == TOTALS || tile >= P.period));
    return whole;
}

// Whether there is a tile `period` before this one. ALL: where it is_whole.
template <bool ALL> INLINE bool has_z(const Params& P, int tile) {
    return (ALL && STAGED) || tile >= P.period;
}

// Whether a tile of `count` steps has step i. ALL: it has at least TILE − 1.
template <bool ALL> INLINE bool has(int i, int count) {
    return ALL ? EVEN || i < TILE - 1 || count == TILE : i < count;
}

// The scalars of a leaf at the `count` steps that begin `offset` after the thread's tile. Through
// shared memory, each leaf in turn: what is there is read before the next one comes.
template <class M, int COMPONENTS, bool ALL>
struct Steps {
    M* base;
    i64 stride;
    int count;

    INLINE_MEMBER Steps(const Params& P, const Place& at, int leaf, i64 offset, int steps) {
        count = steps;
        stride = P.inner * COMPONENTS * (P.reverse ? -1 : 1);
        if constexpr (STAGED) {
            base = (M*)at.stage + at.channel * COMPONENTS +
                   (P.reverse ? at.warp_steps - 1 - at.own : at.own) * P.inner * COMPONENTS;
        } else {
            base = (M*)P.port[leaf] + at.row * P.steps * P.inner * COMPONENTS +
                   (at.in_memory(P, at.first + offset) * P.inner + at.channel) * COMPONENTS;
        }
    }
    INLINE_MEMBER M get(int i, int part) const {
        return has<ALL>(i, count) ? base[i * stride + part] : M{};
    }
    INLINE_MEMBER void put(int i, int part, M x) const {
        if (has<ALL>(i, count)) base[i * stride + part] = x;
    }
};

// Copies the scalars of a leaf at a warp's steps to shared memory, or from there.
template <class M, int COMPONENTS, bool STORES>
INLINE void stage(const Params& P, const Place& at, int leaf, i64 offset) {
    if constexpr (STAGED) {
        const i64 size = P.inner * COMPONENTS;
        M* const row = (M*)P.port[leaf] + at.row * P.steps * size;
        const i64 first = at.warp_first + offset, last = first + at.warp_steps;
        // The steps that exist: [low, high) in the order of memory.
        const i64 begin = first < 0 ? 0 : first, end = last < P.steps ? last : P.steps;
        const i64 low = P.reverse ? P.steps - end : begin, high = P.reverse ? P.steps - begin : end;
        const i64 zero = (P.reverse ? P.steps - last : first) * size;
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

// Functions that load or store arrays of structs: the `count` steps that begin `offset` after the
// tile. Those that load end at a barrier: without one the compiler moves each load down to where it
// is used, and every one of them is waited for alone.
#define LOAD_PORT(name, value, memory, leaf, part, components)                       \
    {                                                                                \
        if (part == 0) stage<memory, components, false>(P, at, leaf, offset);        \
        const Steps<memory, components, ALL> from(P, at, leaf, offset, count);       \
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)                               \
            v[i].name = from_memory<value>(from.get(i, part));                       \
    }
#define STORE_PORT(name, value, memory, leaf, part, components)                      \
    {                                                                                \
        if (STAGED && part == 0) sync_warp();                                        \
        const Steps<memory, components, ALL> to(P, at, leaf, offset, count);         \
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)                               \
            if (at.stores) to.put(i, part, to_memory<memory>(v[i].name));            \
        if (part == components - 1) stage<memory, components, true>(P, at, leaf, offset); \
    }
#define STEPS_IO(NAME, VALUE, LIST, PORT, THEN)                                      \
    template <bool ALL>                                                              \
    INLINE void NAME(VALUE (&v)[TILE], const Params& P, const Place& at, i64 offset, \
                     int count) {                                                    \
        LIST(PORT)                                                                   \
        THEN                                                                         \
    }
// Those that load or store the numbers of one tile.
#define GET_PORT(name, value, memory, leaf, part, components) \
    v.name = from_memory<value>(((const memory*)P.port[leaf])[at.of_tile(P, number)]);
#define PUT_PORT(name, value, memory, leaf, part, components) \
    ((memory*)P.port[leaf])[at.of_tile(P, number)] = to_memory<memory>(v.name);
#define TILES_IO(NAME, VALUE, LIST, PORT, CONST)                                      \
    INLINE void NAME(CONST VALUE& v, const Params& P, const Place& at, int number) {  \
        LIST(PORT)                                                                    \
    }
#define NOTHING
STEPS_IO(load_inputs, Raw, INPUTS, LOAD_PORT, sync_warp();)

#if KIND == TOTALS
TILES_IO(put_total, State, TOTAL, PUT_PORT, const)

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    Raw x[TILE];
    load_inputs<ALL>(x, P, at, 0, at.size);
    if (!at.stores) return;
    State total;
    bool begun = false;
    UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i)
        if (has<ALL>(i, at.size)) {
            const State e = lift(x[i]);
            total = begun ? combine(e, total) : e;
            begun = true;
        }
    put_total(total, P, at, at.tile);
}
#else
#if HAS_M
TILES_IO(get_middle, State, MIDDLE, GET_PORT, NOTHING)
#else
INLINE void get_middle(State&, const Params&, const Place&, int) {}
#endif

// What comes before the x of every window of a tile: suffixes[i] combines z[i], z[i + 1], … and M.
// `from_z`, `between`: whether there is a z, and an M. m: M.
template <bool ALL>
INLINE void suffixes_of(State (&suffixes)[TILE], const Raw (&z)[TILE], const State& m, bool from_z,
                        bool between, int size) {
    State last = m;
    bool begun = between;
    UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i) {
        if (from_z && has<ALL>(i, size)) {
            const State e = lift(z[i]);
            last = begun ? combine(e, last) : e;
            begun = true;
        }
        suffixes[i] = last;
    }
}
#endif

#if KIND == RESULTS
STEPS_IO(store_outputs, Out, OUTPUTS, STORE_PORT, )

template <bool ALL> INLINE void run(const Params& P, const Place& at) {
    const bool from_z = has_z<ALL>(P, at.tile), between = HAS_M && at.tile > 0;
    const int count = at.there(P, 0);
    Raw x[TILE], z[TILE];
    load_inputs<ALL>(x, P, at, 0, count);
    if (STAGED || from_z) load_inputs<ALL>(z, P, at, -P.shift, from_z ? at.size : 0);
    Out y[TILE];
    if (at.works) {
        State m, suffixes[TILE], p;
        if (between) get_middle(m, P, at, at.tile - 1);
        suffixes_of<ALL>(suffixes, z, m, from_z, between, at.size);
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)
            if (has<ALL>(i, count)) {
                const State e = lift(x[i]);
                p = i == 0 ? e : combine(p, e);
                y[i] = lower(from_z || between ? combine(suffixes[i], p) : p, x[i]);
            }
    }
    store_outputs<ALL>(y, P, at, 0, count);
}
#endif

#if KIND == PULL || KIND == GATHER
STEPS_IO(load_given, OutCotangent, GIVEN, LOAD_PORT, sync_warp();)

// Sums of cotangents, of which some do not exist.
struct Sum {
    Cotangent value;
    bool exists = false;
    INLINE_MEMBER void add(const Cotangent& c) {
        value = exists ? added(value, c) : c;
        exists = true;
    }
};

// Takes the cotangents of suffixes[0], …, suffixes[i] in turn from those of z[i] and of what follows:
// the next suffix, M, or nothing.
template <bool ALL>
INLINE Cotangent taken_through(Sum& sum, int i, const Raw& z, const State (&suffixes)[TILE],
                               const State& m, bool between, int size) {
    const bool last = i == TILE - 1 || !has<ALL>(i + 1, size);
    if (last && !between) return sum.value;
    const Pair both = combine_vjp(lift(z), last ? m : suffixes[i < TILE - 1 ? i + 1 : i], sum.value);
    sum.value = both.right;
    return both.left;
}
#endif

// A thread walks from tile to tile, `period` apart: the x of one pair is the z of the next.
#if KIND == PULL
TILES_IO(put_middle, Cotangent, MIDDLE_COTANGENT, PUT_PORT, const)

template <bool ALL>
INLINE void pull(const Raw (&z)[TILE], const Raw (&x)[TILE], const OutCotangent (&g)[TILE],
                 const Params& P, const Place& at, int tile, int count) {
    const bool from_z = has_z<ALL>(P, tile);
    State m, suffixes[TILE], p;
    get_middle(m, P, at, tile - 1);
    suffixes_of<ALL>(suffixes, z, m, from_z, true, at.size);
    Sum sum;
    UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) {
        if (has<ALL>(i, count)) {
            const State e = lift(x[i]);
            p = i == 0 ? e : combine(p, e);
            const Cotangent c = lower_vjp(combine(suffixes[i], p), g[i]);
            sum.add(combine_vjp(suffixes[i], p, c).left);
        }
        if (from_z && has<ALL>(i, at.size))
            taken_through<ALL>(sum, i, z[i], suffixes, m, true, at.size);
    }
    if (at.stores) put_middle(sum.value, P, at, tile - 1);
}

INLINE void run(const Params& P, const Place& at) {
    Raw z[TILE], x[TILE];
    OutCotangent g[TILE];
    const bool begins = at.tile >= P.period;
    load_inputs<false>(z, P, at, -P.shift, begins ? at.size : 0);
    for (int k = 0; k < P.walk; ++k) {
        const i64 offset = k * P.shift;
        const int tile = at.tile + k * P.period, count = at.there(P, offset);
        if (!STAGED && count == 0) break;
        if (is_whole(P, at, tile, count) && tile > 0) {
            load_inputs<true>(x, P, at, offset, count);
            load_given<true>(g, P, at, offset, count);
            pull<true>(z, x, g, P, at, tile, count);
        } else {
            load_inputs<false>(x, P, at, offset, count);
            load_given<false>(g, P, at, offset, count);
            if (at.works && tile > 0 && count > 0) pull<false>(z, x, g, P, at, tile, count);
        }
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) z[i] = x[i];
    }
}
#endif

#if KIND == GATHER
STEPS_IO(store_gradients, RawCotangent, GRADIENTS, STORE_PORT, )
#if HAS_M
TILES_IO(get_total, Cotangent, TOTAL_COTANGENT, GET_PORT, NOTHING)
#else
INLINE void get_total(Cotangent&, const Params&, const Place&, int) {}
#endif

// The windows that end in x: what they add to the gradient of z, and the cotangents of the prefixes
// p of x.
template <bool ALL>
INLINE void from_ends(RawCotangent (&total)[TILE], State (&p)[TILE], Cotangent (&of_p)[TILE],
                      const Raw (&z)[TILE], const Raw (&x)[TILE], const OutCotangent (&g)[TILE],
                      const Params& P, const Place& at, int tile, int count, bool of_z) {
    const bool from_z = has_z<ALL>(P, tile), between = HAS_M && tile > 0;
    State m, suffixes[TILE];
    if (between) get_middle(m, P, at, tile - 1);
    suffixes_of<ALL>(suffixes, z, m, from_z, between, at.size);
    Sum sum;
    UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) {
        if (has<ALL>(i, count)) {
            const State e = lift(x[i]);
            p[i] = i == 0 ? e : combine(p[i == 0 ? 0 : i - 1], e);
            if (from_z || between) {
                const Cotangent c = lower_vjp(combine(suffixes[i], p[i]), g[i]);
                const Pair both = combine_vjp(suffixes[i], p[i], c);
                sum.add(both.left);
                of_p[i] = both.right;
            } else {
                of_p[i] = lower_vjp(p[i], g[i]);
            }
        }
        if (of_z && has<ALL>(i, at.size)) {
            const Cotangent c = taken_through<ALL>(sum, i, z[i], suffixes, m, HAS_M, at.size);
            total[i] = summed(total[i], lift_vjp(z[i], c));
        }
    }
}

// The parts of the gradient of x that need no later tile: of windows that end there, and through
// the tile's total.
template <bool ALL>
INLINE void own_parts(RawCotangent (&total)[TILE], const State (&p)[TILE],
                      const Cotangent (&of_p)[TILE], const Raw (&x)[TILE], const Params& P,
                      const Place& at, int tile, int count) {
    Sum sum;
    UNROLL_BY(TILE) for (int i = TILE - 1; i >= 0; --i)
        if (has<ALL>(i, count)) {
            sum.add(of_p[i]);
            if (i == 0) {
                total[i] = lift_vjp(x[i], sum.value);
            } else {
                const Pair both = combine_vjp(p[i == 0 ? 0 : i - 1], lift(x[i]), sum.value);
                total[i] = lift_vjp(x[i], both.right);
                sum.value = both.left;
            }
        }
    if (HAS_M && tile < P.tiles - 1) {
        State none, suffixes[TILE];
        suffixes_of<ALL>(suffixes, x, none, true, false, at.size);
        Sum whole;
        Cotangent c;
        get_total(c, P, at, tile);
        whole.add(c);
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i)
            if (has<ALL>(i, at.size)) {
                c = taken_through<ALL>(whole, i, x[i], suffixes, none, false, at.size);
                total[i] = summed(total[i], lift_vjp(x[i], c));
            }
    }
}

// The pair of z and x, of which x lies `offset` after the thread's first tile.
template <bool ALL>
INLINE void pair(RawCotangent (&total)[TILE], const Raw (&z)[TILE], Raw (&x)[TILE], const Params& P,
                 const Place& at, i64 offset, int tile, int count, bool of_z, bool of_x) {
    OutCotangent g[TILE];
    State p[TILE];
    Cotangent of_p[TILE];
    load_inputs<ALL>(x, P, at, offset, count);
    load_given<ALL>(g, P, at, offset, count);
    const bool works = ALL || (at.works && count > 0);
    if (works) from_ends<ALL>(total, p, of_p, z, x, g, P, at, tile, count, of_z);
    if (of_z)
        store_gradients<ALL>(total, P, at, offset - P.shift, at.there(P, offset - P.shift));
    if (works && of_x) own_parts<ALL>(total, p, of_p, x, P, at, tile, count);
}

INLINE void run(const Params& P, const Place& at) {
    Raw z[TILE], x[TILE];
    RawCotangent total[TILE];
    load_inputs<false>(z, P, at, -P.shift, at.tile >= P.period ? at.size : 0);
    for (int k = 0; k <= P.walk; ++k) {
        const i64 offset = k * P.shift;
        const int tile = at.tile + k * P.period, count = at.there(P, offset);
        if (!STAGED && count == 0) {  // the tile before was the last one
            const int last = at.there(P, offset - P.shift);
            if (last == at.size) store_gradients<true>(total, P, at, offset - P.shift, last);
            else store_gradients<false>(total, P, at, offset - P.shift, last);
            break;
        }
        if (is_whole(P, at, tile, count))
            pair<true>(total, z, x, P, at, offset, tile, count, k > 0, k < P.walk);
        else
            pair<false>(total, z, x, P, at, offset, tile, count, k > 0, k < P.walk);
        UNROLL_BY(TILE) for (int i = 0; i < TILE; ++i) z[i] = x[i];
    }
}
#endif

#if KIND == TOTALS || KIND == RESULTS
INLINE void run(const Params& P, const Place& at) {
    if (is_whole(P, at, at.tile, at.there(P, 0))) run<true>(P, at);
    else run<false>(P, at);
}
#endif

KERNEL(ALL_THREADS, MIN_BLOCKS) scan(PARAMETERS(Params, P)) {
    const Place at = place_of(P);
    if (STAGED || at.works) run(P, at);
}

LAUNCH_NUMBERS
