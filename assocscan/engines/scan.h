// The CPU scan: load -> lift -> scan -> lower -> store over [rows, length, lanes].
//
// Before this file the generator writes the operator and its ports:
//   struct State, Live, Raw, Out        State: what a total of many steps must hold.
//                                       Live: the part of it that a sequential carry needs.
//   lift, combine, advance, begin, lower, identity
//   INPUTS(F), OUTPUTS(F), LIVE(F), STATE(F), INITS(F), FINALS(F)     the ports, one F(...) each
//   LEAVES, AHEAD[], DIRECT, EXCLUSIVE, HAS_INIT, HAS_EDGE, SMALL, WIDE, STEPS, LANES
// A leaf is one tensor; a port is one scalar of its element, at a constant offset.
//
// Two ways to walk, chosen by the layout:
//   direct   the innermost dimension is contiguous: one step for all its lanes is one SIMD loop,
//            the carries of LANES lanes stay in the first-level cache.
//   staged   the axis itself is contiguous, or nothing is: tiles of STEPS x WIDE are transposed
//            through a buffer. Lanes are rows; for a single row they are WIDE segments of it,
//            scanned side by side and then joined (two combines per element instead of one).
//
// Threads take rows and blocks of lanes. Where there are fewer of those than threads, the axis is
// cut: thread 0 scans the first chunk while the others reduce the following ones to their totals;
// then the carries are known and all remaining chunks are scanned at once.
//
// A port that is `ahead` reads the next step in scan order (a backward scan's y[t-1]); at the
// last step, the edge, it reads the forward scan's init instead, or zero where there is none.
#include <pthread.h>

#define INLINE_METHOD inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int PREFETCH = 512;  // bytes ahead in each row

// Sequence<0, 1, ..., N - 1>, as Count<N>::type.
template <int... K> struct Sequence {};
template <int N, int... K> struct Count : Count<N - 1, N - 1, K...> {};
template <int... K> struct Count<0, K...> { typedef Sequence<K...> type; };


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
struct LiveLanes {
    LIVE(FIELD)
    INLINE_METHOD Live get(int w) const { return {LIVE(GET)}; }
    INLINE_METHOD void set(int w, const Live& v) { (void)w; (void)v; LIVE(SET) }
};
struct StateLanes {
    STATE(FIELD)
    INLINE_METHOD State get(int w) const { return {STATE(GET)}; }
    INLINE_METHOD void set(int w, const State& v) { (void)w; (void)v; STATE(SET) }
};
#undef FIELD

// ---- Positions ----

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
        const i64 first = problem.reverse ? span.begin + span.count - 1 : span.begin;
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

// ---- Direct: SIMD along contiguous lanes ----

template <bool EDGE>
INLINE Raw load_lane(const At& at, i64 w) {
    Raw x;
#define LOAD(name, value, memory, leaf, offset, lane, edge, edge_memory, edge_offset, edge_lane) \
    if constexpr (!(EDGE && AHEAD[leaf])) \
        x.name = from_memory<value>(((const memory*)at.p[leaf])[w * lane + offset]); \
    else if constexpr (edge >= 0) \
        x.name = from_memory<value>( \
            ((const edge_memory*)at.p[edge < 0 ? 0 : edge])[w * edge_lane + edge_offset]); \
    else \
        x.name = (value)0;
    INPUTS(LOAD)
#undef LOAD
    return x;
}

INLINE void store_lane(const At& at, i64 w, const Out& y) {
#define STORE(name, value, memory, leaf, offset, lane) \
    ((memory*)at.p[leaf])[w * lane + offset] = to_memory<memory>(y.name);
    OUTPUTS(STORE)
#undef STORE
}

template <bool FIRST, bool EDGE>
static __attribute__((noinline)) void direct_step(const At at, LiveLanes& carry, int lanes) {
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const Raw x = load_lane<EDGE>(at, w);
        Live c = carry.get(w);
        const Out y = step<FIRST, EDGE>(c, x);
        carry.set(w, c);
        store_lane(at, w, y);
    }
}

static void direct_scan(
    const Problem& problem, At at, LiveLanes& carry, bool has_carry, int lanes, i64 count, bool ends
) {
    if (!HAS_INIT && !has_carry && count) {
        if constexpr (!HAS_INIT) direct_step<true, false>(at, carry, lanes);
        move(problem, at, 1);
        --count;
    }
    const i64 edge = HAS_EDGE && ends && count ? 1 : 0;
    for (i64 t = 0; t < count - edge; ++t, move(problem, at, 1))
        direct_step<false, false>(at, carry, lanes);
    if (edge) direct_step<false, HAS_EDGE>(at, carry, lanes);
}

template <bool FIRST>
static __attribute__((noinline)) void direct_fold(const At at, StateLanes& total, int lanes) {
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State s = lift(load_lane<false>(at, w));
        total.set(w, FIRST ? s : combine(total.get(w), s));
    }
}

static void direct_reduce(
    const Problem& problem, At at, StateLanes& total, int lanes, i64 count
) {
    direct_fold<true>(at, total, lanes);
    for (i64 t = 1; t < count; ++t) {
        move(problem, at, 1);
        direct_fold<false>(at, total, lanes);
    }
}

// ---- Staged: tiles of STEPS x WIDE transposed through a buffer ----

struct Tile {
#define FIELD(name, value, ...) value name[STEPS][WIDE];
    struct Inputs { INPUTS(FIELD) } x;
    struct Outputs { OUTPUTS(FIELD) } y;
#undef FIELD
#define FIELD(name, type, ...) type name[STEPS][WIDE];
    struct States { STATE(FIELD) } s;
#undef FIELD
    INLINE_METHOD Raw raw(int m, int w) const {
        (void)m; (void)w;
#define LOAD(name, ...) x.name[m][w],
        return {INPUTS(LOAD)};
#undef LOAD
    }
    INLINE_METHOD State state(int m, int w) const {
#define LOAD(name, ...) s.name[m][w],
        return {STATE(LOAD)};
#undef LOAD
    }
    INLINE_METHOD void set_state(int m, int w, const State& v) {
#define STORE(name, ...) s.name[m][w] = v.name;
        STATE(STORE)
#undef STORE
    }
    INLINE_METHOD void set_output(int m, int w, const Out& v) {
        (void)m; (void)w; (void)v;
#define STORE(name, ...) y.name[m][w] = v.name;
        OUTPUTS(STORE)
#undef STORE
    }
};

// Tiles are transposed in blocks of vectors where a lane's steps lie side by side in memory.
template <class V> constexpr int BLOCK = VECTOR_BYTES / (int)sizeof(V) < WIDE
    ? VECTOR_BYTES / (int)sizeof(V) : WIDE;

template <class V> struct Vectors {
    typedef V type __attribute__((vector_size(BLOCK<V> * sizeof(V))));
};

template <class V, int HIGH, int... K>
INLINE typename Vectors<V>::type interleave(
    typename Vectors<V>::type a, typename Vectors<V>::type b, Sequence<K...>
) {
    constexpr int n = BLOCK<V>;
    return __builtin_shufflevector(a, b, (K / 2 + HIGH * (n / 2) + (K & 1) * n)...);
}

// A square of vectors: log2(BLOCK) rounds of interleaving row i with row i + BLOCK / 2.
template <class V>
INLINE void transpose(typename Vectors<V>::type (&rows)[BLOCK<V>]) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type next[n];
#pragma GCC unroll 8
    for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < n / 2; ++i) {
            next[2 * i] = interleave<V, 0>(rows[i], rows[i + n / 2], typename Count<n>::type());
            next[2 * i + 1] = interleave<V, 1>(rows[i], rows[i + n / 2], typename Count<n>::type());
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) rows[i] = next[i];
    }
}

template <class V> constexpr bool has_vectors = sizeof(V) >= 4;

// BLOCK lanes from `w` on, steps m to m + BLOCK; memory in scan order, or against it.
template <class V, class S, bool FORWARD>
INLINE void gather_block(V (*buffer)[WIDE], int m, int w, char* const* lane) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type rows[n];
    for (int k = 0; k < n; ++k) {
        const S* source = (const S*)lane[w + k] + (FORWARD ? m : -(m + n - 1));
        __builtin_prefetch((const char*)source + (FORWARD ? PREFETCH : -PREFETCH));
        V line[n];
        for (int j = 0; j < n; ++j) line[j] = from_memory<V>(source[j]);
        std::memcpy(&rows[k], line, sizeof line);
    }
    transpose<V>(rows);
    for (int j = 0; j < n; ++j)
        std::memcpy(&buffer[m + (FORWARD ? j : n - 1 - j)][w], &rows[j], sizeof rows[j]);
}

template <class V, class S, bool FORWARD>
INLINE void scatter_block(const V (*buffer)[WIDE], int m, int w, char* const* lane) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type rows[n];
    for (int j = 0; j < n; ++j)
        std::memcpy(&rows[j], &buffer[m + (FORWARD ? j : n - 1 - j)][w], sizeof rows[j]);
    transpose<V>(rows);
    for (int k = 0; k < n; ++k) {
        S* target = (S*)lane[w + k] + (FORWARD ? m : -(m + n - 1));
        __builtin_prefetch((const char*)target + (FORWARD ? PREFETCH : -PREFETCH), 1);
        V line[n];
        std::memcpy(line, &rows[k], sizeof line);
        for (int j = 0; j < n; ++j) target[j] = to_memory<S>(line[j]);
    }
}

// One port of a tile: `lanes` x `count` values, each lane from its own address on.
template <class V, class S>
static __attribute__((noinline)) void gather(
    V (*buffer)[WIDE], char* const* lane, i64 step, int lanes, int count
) {
    if constexpr (has_vectors<V>) {
        if (lanes == WIDE && count == STEPS && step == (i64)sizeof(S)) {
            for (int w = 0; w < WIDE; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    gather_block<V, S, true>(buffer, m, w, lane);
            return;
        }
        if (lanes == WIDE && count == STEPS && step == -(i64)sizeof(S)) {
            for (int w = 0; w < WIDE; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    gather_block<V, S, false>(buffer, m, w, lane);
            return;
        }
    }
    for (int w = 0; w < lanes; ++w)
        for (int m = 0; m < count; ++m)
            buffer[m][w] = from_memory<V>(*(const S*)(lane[w] + m * step));
}

template <class V, class S>
static __attribute__((noinline)) void scatter(
    const V (*buffer)[WIDE], char* const* lane, i64 step, int lanes, int count
) {
    if constexpr (has_vectors<V>) {
        if (lanes == WIDE && count == STEPS && step == (i64)sizeof(S)) {
            for (int w = 0; w < WIDE; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    scatter_block<V, S, true>(buffer, m, w, lane);
            return;
        }
        if (lanes == WIDE && count == STEPS && step == -(i64)sizeof(S)) {
            for (int w = 0; w < WIDE; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    scatter_block<V, S, false>(buffer, m, w, lane);
            return;
        }
    }
    for (int w = 0; w < lanes; ++w)
        for (int m = 0; m < count; ++m)
            *(S*)(lane[w] + m * step) = to_memory<S>(buffer[m][w]);
}

// Which elements a tile holds: lane w starts at step `position` of row at[w], or, for segments of
// one row, at step position + w * STEPS of at[0].
struct Place {
    const At* at;
    i64 position;
    int lanes, count;
    bool segments, last;
};

static inline void lane_addresses(
    const Place& place, int leaf, i64 shift, i64 step, char** lane
) {
    for (int w = 0; w < place.lanes; ++w)
        lane[w] = place.segments
            ? place.at[0].p[leaf] + shift + (place.position + w * STEPS) * step
            : place.at[w].p[leaf] + shift + place.position * step;
}

static void load_tile(const Problem& problem, Tile& tile, const Place& place) {
    char* at[WIDE];
#define LOAD(name, value, memory, leaf, offset, lane, edge, edge_memory, edge_offset, edge_lane) { \
        const bool cut = HAS_EDGE && place.last && AHEAD[leaf]; \
        const i64 step = step_of(problem, leaf); \
        lane_addresses(place, leaf, offset * (i64)sizeof(memory), step, at); \
        gather<value, memory>(tile.x.name, at, step, place.lanes, place.count - cut); \
        for (int w = 0; cut && w < place.lanes; ++w) { \
            if constexpr (edge >= 0) \
                tile.x.name[place.count - 1][w] = from_memory<value>( \
                    ((const edge_memory*)place.at[w].p[edge < 0 ? 0 : edge])[edge_offset]); \
            else \
                tile.x.name[place.count - 1][w] = (value)0; \
        } }
    INPUTS(LOAD)
#undef LOAD
    (void)at;
}

static void store_tile(const Problem& problem, const Tile& tile, const Place& place) {
    char* at[WIDE];
#define STORE(name, value, memory, leaf, offset, lane) { \
        const i64 step = step_of(problem, leaf); \
        lane_addresses(place, leaf, offset * (i64)sizeof(memory), step, at); \
        scatter<value, memory>(tile.y.name, at, step, place.lanes, place.count); }
    OUTPUTS(STORE)
#undef STORE
    (void)at;
}

// One step of all lanes; N is their number where it is known at compile time, else 0.
template <int N, bool FIRST, bool EDGE>
INLINE void tile_step(Tile& tile, LiveLanes& carry, int m, int lanes) {
    const int n = N ? N : lanes;
#pragma GCC ivdep
    for (int w = 0; w < n; ++w) {
        Live c = carry.get(w);
        const Out y = step<FIRST, EDGE>(c, tile.raw(m, w));
        carry.set(w, c);
        tile.set_output(m, w, y);
    }
}

static __attribute__((noinline)) void tile_steps(
    Tile& tile, LiveLanes& carry, bool has_carry, const Place& place
) {
    int m = 0;
    if constexpr (!HAS_INIT)
        if (!has_carry) tile_step<0, true, false>(tile, carry, m++, place.lanes);
    const int regular = place.count - (HAS_EDGE && place.last ? 1 : 0);
    for (; m < regular; ++m) tile_step<0, false, false>(tile, carry, m, place.lanes);
    if (m < place.count) tile_step<0, false, HAS_EDGE>(tile, carry, m, place.lanes);
}

// A whole tile without first step or edge. SMALL operators keep their carries in registers: the
// steps are unrolled inside the loop over lanes.
static __attribute__((noinline)) void whole_tile(Tile& tile, LiveLanes& carry) {
    if constexpr (SMALL) {
#pragma GCC ivdep
        for (int w = 0; w < WIDE; ++w) {
            Live c = carry.get(w);
#pragma GCC unroll 16
            for (int m = 0; m < STEPS; ++m)
                tile.set_output(m, w, step<false, false>(c, tile.raw(m, w)));
            carry.set(w, c);
        }
    } else {
        for (int m = 0; m < STEPS; ++m) tile_step<WIDE, false, false>(tile, carry, m, WIDE);
    }
}

// The totals of WIDE segments, and every state within them on the way.
template <bool KEEP>
INLINE void local_scan(Tile& tile, StateLanes& total) {
    if constexpr (SMALL) {
#pragma GCC ivdep
        for (int w = 0; w < WIDE; ++w) {
            State s = lift(tile.raw(0, w));
            if (KEEP) tile.set_state(0, w, s);
#pragma GCC unroll 16
            for (int m = 1; m < STEPS; ++m) {
                s = combine(s, lift(tile.raw(m, w)));
                if (KEEP) tile.set_state(m, w, s);
            }
            total.set(w, s);
        }
    } else {
        for (int m = 0; m < STEPS; ++m) {
#pragma GCC ivdep
            for (int w = 0; w < WIDE; ++w) {
                const State s = lift(tile.raw(m, w));
                const State sum = m ? combine(total.get(w), s) : s;
                total.set(w, sum);
                if (KEEP) tile.set_state(m, w, sum);
            }
        }
    }
}

// WIDE segments of one row side by side, then joined by the carry that enters each.
static __attribute__((noinline)) void segment_scan(Tile& tile, LiveLanes& carry) {
    StateLanes total;
    local_scan<true>(tile, total);
    LiveLanes enter;
    Live c = carry.get(0);
    for (int w = 0; w < WIDE; ++w) {
        enter.set(w, c);
        c = advance(c, total.get(w));
    }
    carry.set(0, c);
    for (int m = 0; m < STEPS; ++m) {
#pragma GCC ivdep
        for (int w = 0; w < WIDE; ++w) {
            const Live c = enter.get(w);
            const int shown = EXCLUSIVE ? m - 1 : m;
            const Live now = shown < 0 ? c : advance(c, tile.state(shown < 0 ? 0 : shown, w));
            tile.set_output(m, w, lower(now, tile.raw(m, w), false));
        }
    }
}

static __attribute__((noinline)) State segment_reduce(Tile& tile) {
    StateLanes total;
    local_scan<false>(tile, total);
    State sum = total.get(0);
    for (int w = 1; w < WIDE; ++w) sum = combine(sum, total.get(w));
    return sum;
}

static void staged_scan(
    const Problem& problem, const At* at, LiveLanes& carry, bool has_carry, int lanes, i64 count,
    bool ends
) {
    Tile tile;
    const i64 edge = HAS_EDGE && ends ? 1 : 0;
    has_carry |= HAS_INIT;
    for (i64 t = 0; t < count;) {
        const i64 left = count - t;
        if (lanes == 1 && has_carry && left - edge >= WIDE * STEPS) {
            const Place place = {at, t, WIDE, STEPS, true, false};
            load_tile(problem, tile, place);
            segment_scan(tile, carry);
            store_tile(problem, tile, place);
            t += WIDE * STEPS;
            continue;
        }
        const i64 most = lanes == 1 && !has_carry ? 1 : STEPS;
        const int steps = (int)(left < most ? left : most);
        const Place place = {at, t, lanes, steps, false, edge && steps == left};
        load_tile(problem, tile, place);
        if (lanes == WIDE && steps == STEPS && has_carry && !place.last) whole_tile(tile, carry);
        else tile_steps(tile, carry, has_carry, place);
        store_tile(problem, tile, place);
        has_carry = true;
        t += steps;
    }
}

static void staged_reduce(const Problem& problem, const At& at, StateLanes& total, i64 count) {
    Tile tile;
    State sum;
    for (i64 t = 0; t < count;) {
        const bool whole = count - t >= WIDE * STEPS;
        const Place place = {&at, t, whole ? WIDE : 1, whole ? STEPS : 1, whole, false};
        load_tile(problem, tile, place);
        const State part = whole ? segment_reduce(tile) : lift(tile.raw(0, 0));
        sum = t ? combine(sum, part) : part;
        t += whole ? WIDE * STEPS : 1;
    }
    total.set(0, sum);
}

// ---- Threads ----

struct Worker {
    void (*body)(void*, i64);
    void* context;
    i64 index;
};

static void* work(void* argument) {
    const Worker& worker = *(const Worker*)argument;
    worker.body(worker.context, worker.index);
    return nullptr;
}

static void parallel(i64 threads, void (*body)(void*, i64), void* context) {
    Worker workers[threads];
    pthread_t handles[threads];
    bool started[threads];
    for (i64 k = 1; k < threads; ++k) {
        workers[k] = {body, context, k};
        started[k] = pthread_create(&handles[k], nullptr, work, &workers[k]) == 0;
    }
    body(context, 0);
    for (i64 k = 1; k < threads; ++k) {
        if (started[k]) pthread_join(handles[k], nullptr);
        else body(context, k);
    }
}

// ---- Jobs: a block of lanes, or some rows, of one sequence ----

struct Jobs {
    const Problem* problem;
    i64 rows, block, blocks, count, next;
};

struct Job {
    At at[DIRECT ? 1 : WIDE];
    Span span;
    int lanes;
};

static Job job_of(const Jobs& jobs, i64 index) {
    const Problem& problem = *jobs.problem;
    Job job;
    const i64 block = index % jobs.blocks;
    const i64 outer = index / jobs.blocks % jobs.rows;
    const i64 sequence = index / (jobs.blocks * jobs.rows);
    job.span = sequence_span(problem, sequence);
    const i64 first = block * jobs.block;
    const i64 end = first + jobs.block > problem.inner ? problem.inner : first + jobs.block;
    job.lanes = (int)(end - first);
    if constexpr (DIRECT) {
        job.at[0] = locate(problem, outer, first, sequence, job.span);
    } else {
        for (int w = 0; w < job.lanes; ++w)
            job.at[w] = locate(problem, first + w, 0, sequence, job.span);
    }
    return job;
}

static void scan_range(
    const Problem& problem, Job& job, LiveLanes& carry, bool has_carry, i64 count, bool ends
) {
    if constexpr (DIRECT)
        direct_scan(problem, job.at[0], carry, has_carry, job.lanes, count, ends);
    else
        staged_scan(problem, job.at, carry, has_carry, job.lanes, count, ends);
}

static void run_job(const Problem& problem, Job& job) {
    LiveLanes carry;
    At start[DIRECT ? 1 : WIDE];
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) start[w] = job.at[w];
    load_init(start, !DIRECT, carry, job.lanes);
    scan_range(problem, job, carry, false, job.span.count, true);
    store_final(start, !DIRECT, carry, job.lanes);
}

static void job_worker(void* context, i64) {
    Jobs& jobs = *(Jobs*)context;
    for (;;) {
        const i64 index = __atomic_fetch_add(&jobs.next, 1, __ATOMIC_RELAXED);
        if (index >= jobs.count) return;
        Job job = job_of(jobs, index);
        run_job(*jobs.problem, job);
    }
}

// ---- Chunks of one job ----

struct Chunks {
    const Problem* problem;
    const Job* job;
    i64 threads, size;
    LiveLanes* enter;   // the carry that enters chunk k
    StateLanes* total;  // the total of chunk k, 1 <= k < threads
};

static Job chunk_of(const Chunks& chunks, i64 k, i64* count) {
    Job job = *chunks.job;
    const i64 first = k * chunks.size;
    const i64 rest = job.span.count - first;
    *count = k == chunks.threads ? rest : chunks.size;
    for (int w = 0; w < (DIRECT ? 1 : job.lanes); ++w) move(*chunks.problem, job.at[w], first);
    return job;
}

static void first_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    i64 count;
    Job job = chunk_of(chunks, k, &count);
    if (k == 0) {
        scan_range(*chunks.problem, job, chunks.enter[0], false, count, false);
    } else if constexpr (DIRECT) {
        direct_reduce(*chunks.problem, job.at[0], chunks.total[k], job.lanes, count);
    } else {
        staged_reduce(*chunks.problem, job.at[0], chunks.total[k], count);
    }
}

static void second_pass(void* context, i64 k) {
    const Chunks& chunks = *(const Chunks*)context;
    i64 count;
    Job job = chunk_of(chunks, k + 1, &count);
    scan_range(*chunks.problem, job, chunks.enter[k], true, count, k + 1 == chunks.threads);
}

// enter[k] is the carry into chunk k + 1: enter[0] is left there by the first chunk's scan.
static void run_chunks(const Problem& problem, const Job& job) {
    const i64 threads = problem.threads;
    LiveLanes* enter = new LiveLanes[threads];
    StateLanes* total = new StateLanes[threads];
    Chunks chunks = {&problem, &job, threads, job.span.count / (threads + 1), enter, total};
    load_init(job.at, !DIRECT, enter[0], job.lanes);
    parallel(threads, first_pass, &chunks);
    for (i64 k = 1; k < threads; ++k)
        for (int w = 0; w < job.lanes; ++w)
            enter[k].set(w, advance(enter[k - 1].get(w), total[k].get(w)));
    parallel(threads, second_pass, &chunks);
    store_final(job.at, !DIRECT, enter[threads - 1], job.lanes);
    delete[] enter;
    delete[] total;
}

constexpr i64 MIN_CHUNK = 4096;

// args: length, inner, threads, reverse, dims, sequences, offsets, block, sizes[dims], then per
// leaf: data, step, lane, sequence, outer[dims].
extern "C" void assocscan_run(const i64* args) {
    Problem problem;
    problem.length = args[0];
    problem.inner = args[1];
    problem.threads = args[2];
    problem.reverse = args[3];
    problem.dims = args[4];
    problem.sequences = args[5];
    problem.offsets = (const i64*)args[6];
    const i64 block = args[7];
    problem.sizes = args + 8;
    const i64* cursor = problem.sizes + problem.dims;
    for (int k = 0; k < LEAVES; ++k, cursor += 4 + problem.dims)
        problem.leaf[k] = {(char*)cursor[0], cursor[1], cursor[2], cursor[3], cursor + 4};
    i64 rows = 1;
    if (DIRECT) for (i64 d = 0; d < problem.dims; ++d) rows *= problem.sizes[d];
    const i64 blocks = (problem.inner + block - 1) / block;
    Jobs jobs = {&problem, rows, block, blocks, rows * blocks * problem.sequences, 0};
    const bool few = jobs.count < problem.threads && problem.sequences == 1;
    if (few && problem.length >= MIN_CHUNK * (problem.threads + 1) && (DIRECT || block == 1)) {
        for (i64 k = 0; k < jobs.count; ++k) run_chunks(problem, job_of(jobs, k));
        return;
    }
    const i64 threads = jobs.count < problem.threads ? jobs.count : problem.threads;
    if (threads > 1) parallel(threads, job_worker, &jobs);
    else job_worker(&jobs, 0);
}
