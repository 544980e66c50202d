// Leaves, positions and carries: shared by the direct and the staged form.
#pragma once

#define INLINE_METHOD inline __attribute__((always_inline))

// The first statement of each function that is not inlined; it works around a bug of GCC 12.2. With
// -O1 the compiler turned such a function's pointers into integers, concluded that the function writes
// no memory, and deleted calls of it. An empty asm statement with a memory clobber prevents that and
// adds no instruction (docs/performance/compilers.md).
#define WRITES_MEMORY asm volatile("" ::: "memory")

struct Leaf {
    char* data;
    i64 step, lane, sequence;  // strides in bytes; lane is 0 for a leaf with a SLOT
    const i64 *outer, *across;
};

struct Problem {
    i64 length, inner, reverse, dims, lane_dims, sequences;
    const i64 *sizes, *lane_sizes, *offsets;
    Leaf leaf[LEAVES];
};

struct At { char* p[LEAVES]; };  // the address of each leaf's element at the current step, first lane

// The distance of each lane from the address in At, in bytes, for the leaves with a SLOT. Other leaves
// have a constant stride between lanes.
struct Shifts { i64 of[SLOTS ? SLOTS : 1][SLOTS ? LANES : 1]; };

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

// The first element of a row (or block of lanes).
static At locate(const Problem& problem, i64 outer, i64 lane) {
    At at;
    for (int k = 0; k < LEAVES; ++k) {
        const Leaf& leaf = problem.leaf[k];
        at.p[k] = leaf.data + lane * leaf.lane;
        if (SHIFTED[k]) at.p[k] += step_of(problem, k);
    }
    for (i64 d = problem.dims - 1; d >= 0; --d) {
        const i64 index = outer % problem.sizes[d];
        outer /= problem.sizes[d];
        for (int k = 0; k < LEAVES; ++k) at.p[k] += index * problem.leaf[k].outer[d];
    }
    return at;
}

// From the first element of a row to where the scan of one of its sequences starts.
static inline void start(const Problem& problem, At& at, i64 sequence, Span span) {
    const i64 first = problem.reverse && span.count ? span.begin + span.count - 1 : span.begin;
    for (int k = 0; k < LEAVES; ++k)
        at.p[k] += first * problem.leaf[k].step + sequence * problem.leaf[k].sequence;
}

// Fills in the shifts of the lanes number first to first + lanes - 1.
static void find_shifts(const Problem& problem, i64 first, int lanes, Shifts& shifts) {
    i64 index[64];  // of the current lane over the lane dimensions: torch's tensors have 64 at most
    i64 rest = first;
    for (i64 d = problem.lane_dims - 1; d >= 0; --d) {
        index[d] = rest % problem.lane_sizes[d];
        rest /= problem.lane_sizes[d];
    }
    for (int w = 0; w < lanes; ++w) {
        for (int k = 0; k < LEAVES; ++k) {
            if (SLOT[k] < 0) continue;
            i64 shift = 0;
            for (i64 d = 0; d < problem.lane_dims; ++d)
                shift += index[d] * problem.leaf[k].across[d];
            shifts.of[SLOT[k] < 0 ? 0 : SLOT[k]][w] = shift;
        }
        for (i64 d = problem.lane_dims - 1; d >= 0 && ++index[d] == problem.lane_sizes[d]; --d)
            index[d] = 0;
    }
}

// The address of one lane of a leaf whose other lanes follow at `distance` bytes.
template <int LEAF>
INLINE char* lane_at(const At& at, const Shifts& shifts, i64 w, i64 distance) {
    if constexpr (SLOT[LEAF] >= 0) return at.p[LEAF] + shifts.of[SLOT[LEAF]][w];
    else return at.p[LEAF] + w * distance;
}

static inline void move(const Problem& problem, At& at, i64 steps) {
    for (int k = 0; k < LEAVES; ++k) at.p[k] += steps * step_of(problem, k);
}

// The carry that enters lane l, and the place of the one that leaves it.
INLINE Live initial(const At& here, const Shifts& shifts, i64 l) {
    Live v = identity();
    (void)here; (void)l; (void)shifts;
#define LOAD(name, value, memory, leaf, offset, lane) \
    v.name = from_memory<value>( \
        ((const memory*)lane_at<leaf>(here, shifts, l, lane * (i64)sizeof(memory)))[offset]);
    INITS(LOAD)
#undef LOAD
    return v;
}

INLINE void set_final(const At& here, const Shifts& shifts, i64 l, const Live& v) {
    (void)here; (void)l; (void)v; (void)shifts;
#define STORE(name, value, memory, leaf, offset, lane) \
    ((memory*)lane_at<leaf>(here, shifts, l, lane * (i64)sizeof(memory)))[offset] = \
        to_memory<memory>(v.name);
    FINALS(STORE)
#undef STORE
}

static void load_init(
    const At* at, const Shifts& shifts, int each, LiveLanes& carry, int lanes
) {
    for (int w = 0; w < lanes; ++w)
        carry.set(w, initial(at[each ? w : 0], shifts, each ? 0 : w));
}

static void store_final(
    const At* at, const Shifts& shifts, int each, const LiveLanes& carry, int lanes
) {
    for (int w = 0; w < lanes; ++w)
        set_final(at[each ? w : 0], shifts, each ? 0 : w, carry.get(w));
}

// ---- One step; the same for all forms ----

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

// ---- The same for one lane, where no loop over lanes becomes SIMD code ----

// An operator that is not SMALL is called there: the compiler takes its time for each place that has
// the operator's text.
template <class S> static __attribute__((noinline)) S called_combine(const S& a, const S& b) {
    return combine(a, b);
}
template <class L, class S>
static __attribute__((noinline)) L called_advance(const L& a, const S& b) { return advance(a, b); }
INLINE State combine_one(const State& a, const State& b) {
    if constexpr (SMALL) return combine(a, b);
    else return called_combine(a, b);
}
INLINE Live advance_one(const Live& a, const State& b) {
    if constexpr (SMALL) return advance(a, b);
    else return called_advance(a, b);
}
