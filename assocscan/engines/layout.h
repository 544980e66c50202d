// Leaves, positions and carries: what both walks share.
#pragma once

#define INLINE_METHOD inline __attribute__((always_inline))

struct Leaf {
    char* data;
    i64 step, lane, sequence;  // strides in bytes
    const i64* outer;
};

struct Problem {
    i64 length, inner, threads, reverse, dims, sequences;
    const i64 *sizes, *offsets;
    Leaf leaf[LEAVES];
};

struct At { char* p[LEAVES]; };  // where each leaf stands at the current step, first lane

struct Span { i64 begin, count; };

#define FIELD(name, type, ...) type name[LANES];
#define GET(name, ...) name[w],
#define SET(name, ...) name[w] = v.name;
struct alignas(64) LiveLanes {
    LIVE(FIELD)
    INLINE_METHOD Live get(int w) const { return {LIVE(GET)}; }
    INLINE_METHOD void set(int w, const Live& v) { (void)w; (void)v; LIVE(SET) }
};
struct alignas(64) StateLanes {
    STATE(FIELD)
    INLINE_METHOD State get(int w) const { return {STATE(GET)}; }
    INLINE_METHOD void set(int w, const State& v) { (void)w; (void)v; STATE(SET) }
};
#undef FIELD

static Span sequence_span(const Problem& problem, i64 sequence) {
    if (!problem.offsets) return {0, problem.length};
    const i64 begin = problem.offsets[sequence];
    return {begin, problem.offsets[sequence + 1] - begin};
}

static i64 step_of(const Problem& problem, int leaf) {
    return problem.reverse ? -problem.leaf[leaf].step : problem.leaf[leaf].step;
}

// Where the scan of one row (or block of lanes) starts.
static At locate(const Problem& problem, i64 outer, i64 lane, i64 sequence, Span span) {
    At at;
    for (int k = 0; k < LEAVES; ++k) {
        const Leaf& leaf = problem.leaf[k];
        const i64 first = problem.reverse && span.count ? span.begin + span.count - 1 : span.begin;
        at.p[k] = leaf.data + first * leaf.step + lane * leaf.lane + sequence * leaf.sequence;
        if (AHEAD[k]) at.p[k] += step_of(problem, k);
    }
    for (i64 d = problem.dims - 1; d >= 0; --d) {
        const i64 index = outer % problem.sizes[d];
        outer /= problem.sizes[d];
        for (int k = 0; k < LEAVES; ++k) at.p[k] += index * problem.leaf[k].outer[d];
    }
    return at;
}

static inline void move(const Problem& problem, At& at, i64 steps) {
    for (int k = 0; k < LEAVES; ++k) at.p[k] += steps * step_of(problem, k);
}

static void load_init(const At* at, int each, LiveLanes& carry, int lanes) {
    for (int w = 0; w < lanes; ++w) {
        const At& here = at[each ? w : 0];
        const i64 l = each ? 0 : w;
        Live v = identity();
        (void)here; (void)l;
#define LOAD(name, value, memory, leaf, offset, lane) \
        v.name = from_memory<value>(((const memory*)here.p[leaf])[offset + l * lane]);
        INITS(LOAD)
#undef LOAD
        carry.set(w, v);
    }
}

static void store_final(const At* at, int each, const LiveLanes& carry, int lanes) {
    for (int w = 0; w < lanes; ++w) {
        const At& here = at[each ? w : 0];
        const i64 l = each ? 0 : w;
        const Live v = carry.get(w);
        (void)here; (void)l; (void)v;
#define STORE(name, value, memory, leaf, offset, lane) \
        ((memory*)here.p[leaf])[offset + l * lane] = to_memory<memory>(v.name);
        FINALS(STORE)
#undef STORE
    }
}

// ---- One step, whatever the source ----

template <bool FIRST, bool EDGE>
INLINE Out step(Live& carry, const Raw& x) {
    const State s = lift(x);
    if constexpr (FIRST) {
        static_assert(!EXCLUSIVE || HAS_INIT, "an exclusive scan starts from a carry");
        carry = begin(s);
        return lower(carry, x, EDGE);
    } else {
        const Live before = carry;
        carry = advance(before, s);
        return lower(EXCLUSIVE ? before : carry, x, EDGE);
    }
}
