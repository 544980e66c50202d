// The staged form: tiles of STEPS x WIDE are transposed through a buffer. The lanes are rows. For a
// single row they are WIDE segments of it, which are scanned side by side and then joined.
#pragma once
#include "layout.h"
#include "loop_order.h"
#include "transpose.h"

struct alignas(64) Tile {
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

// The temporary buffers of one worker.
struct Buffers {
    Tile tile;
    StateLanes total;
    LiveLanes enter;
};

// Whether a step always computes all WIDE lanes, even those that do not exist. Code for fewer lanes
// would be a second text, which takes as long to compile. Not FOR_FEW (-O1), where no loop becomes
// SIMD code.
#ifdef FOR_FEW
constexpr bool ALL_LANES = false;
#else
constexpr bool ALL_LANES = !SMALL;
#endif

constexpr int MIN_SEGMENT = 2;  // shorter rests of a row are scanned step by step, without segments

// The elements of a tile: lane w starts at step `position` of row at[w], or, for segments of one row,
// at step position + w * count of row at[0]. `last`: it contains the last step of the scan.
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
            ? place.at[0].p[leaf] + shift + (place.position + w * place.count) * step
            : place.at[w].p[leaf] + shift + place.position * step;
}

static void load_tile(const Problem& problem, Tile& tile, const Place& place) {
    char* at[WIDE];
#define LOAD(name, value, memory, leaf, offset, lane, edge, edge_memory, edge_offset, edge_lane) { \
        const bool cut = HAS_EDGE && place.last && SHIFTED[leaf]; \
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

// One step of all lanes. N: the number of lanes if it is known at compile time, else 0.
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

// The first `count` steps of one lane: neither the first of a scan without carry, nor the edge.
static __attribute__((noinline)) void lane_steps(Tile& tile, Live& carry, int w, int count) {
    WRITES_MEMORY;
    for (int m = 0; m < count; ++m)
        tile.set_output(m, w, step<false, false>(carry, tile.raw(m, w)));
}

static __attribute__((noinline)) void tile_steps(
    Tile& tile, LiveLanes& carry, bool has_carry, const Place& place
) {
    WRITES_MEMORY;
    constexpr int N = ALL_LANES ? WIDE : 0;
    int m = 0;
    if (ALL_LANES && place.lanes == 1 && has_carry) {
        Live c = carry.get(0);
        m = place.count - (HAS_EDGE && place.last ? 1 : 0);
        lane_steps(tile, c, 0, m);
        carry.set(0, c);
    }
    if constexpr (!HAS_INIT)
        if (!has_carry) tile_step<N, true, false>(tile, carry, m++, place.lanes);
    const int regular = place.count - (HAS_EDGE && place.last ? 1 : 0);
    for (; m < regular; ++m) tile_step<N, false, false>(tile, carry, m, place.lanes);
    if (m < place.count) tile_step<N, false, HAS_EDGE>(tile, carry, m, place.lanes);
}

// A whole tile, without the first step of a scan without carry and without the edge. For SMALL
// operators the steps are unrolled inside the loop over lanes, so that carries stay in registers.
static __attribute__((noinline)) void whole_tile(Tile& tile, LiveLanes& carry) {
    WRITES_MEMORY;
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

// The totals of WIDE segments. KEEP: store the state at every step in the tile too.
template <bool KEEP>
INLINE void local_scan(Tile& tile, StateLanes& total, int steps) {
    if (SMALL && steps == STEPS) {
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
        for (int m = 0; m < steps; ++m) {
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

// The same where the operator is not SMALL: one text for all places.
static __attribute__((noinline)) void called_local_scan(
    Tile& tile, StateLanes& total, int steps
) {
    WRITES_MEMORY;
    local_scan<!REDUCES || PRODUCT>(tile, total, steps);
}

// The segments of a tile step by step, from the carry that enters the first.
static __attribute__((noinline)) void segment_steps(Tile& tile, LiveLanes& carry, int steps) {
    WRITES_MEMORY;
    Live c = carry.get(0);
    for (int w = 0; w < WIDE; ++w) lane_steps(tile, c, w, steps);
    carry.set(0, c);
}

// Whether the state at a step is not finite, or NaN, where the carry that enters its segment is.
static __attribute__((noinline)) bool segments_exceed(
    const Tile& tile, const LiveLanes& enter, int steps
) {
    WRITES_MEMORY;
    for (int m = 0; m < steps; ++m)
        for (int w = 0; w < WIDE; ++w)
            if (any_exceeds(advance_one(enter.get(w), tile.state(m, w)), enter.get(w))) return true;
    return false;
}

// The outputs of a tile of segments, from the carries that enter them and the states of local_scan.
// Returns whether a state may not be what a loop gives, for an operator that FORGETS: of others the
// state after the tile tells.
INLINE bool segment_outputs(Tile& tile, const LiveLanes& enter, int steps) {
    float stray[WIDE] = {};  // 0 as long as all states are finite
    for (int m = 0; m < steps; ++m) {
#pragma GCC ivdep
        for (int w = 0; w < WIDE; ++w) {
            const Live c = enter.get(w);
            const int shown = EXCLUSIVE ? m - 1 : m;
            const Live now = shown < 0 ? c : advance(c, tile.state(shown < 0 ? 0 : shown, w));
            if constexpr (FORGETS) stray[w] += distance_to_finite(now);
            tile.set_output(m, w, lower(now, tile.raw(m, w), false));
        }
    }
    float sum = 0;
    if constexpr (FORGETS)
        for (int w = 0; w < WIDE; ++w) sum += stray[w];
    return sum != 0 && segments_exceed(tile, enter, steps);
}

// Whether the states of local_scan and the carries after each step are in the normal range, for a
// PRODUCT. A template, so that other operators do not compile it.
template <class S> INLINE bool segments_in_range(
    const Tile& tile, const LiveLanes& enter, int steps
) {
    Extent<decltype(size_of(S{}))> extent;
    for (int w = 0; w < WIDE; ++w) extent.start(w);
    for (int m = 0; m < steps; ++m) {
#pragma GCC ivdep
        for (int w = 0; w < WIDE; ++w) {
            const S s = tile.state(m, w);
            extent.add(w, size_of(s));
            extent.add(w, size_of(advance(enter.get(w), s)));
        }
    }
    return extent.in_range();
}

// Scans WIDE segments of one row side by side, then combines each with the carry that enters it. If
// that gave what no loop gives, the tile is scanned again step by step (loop_order.h).
static __attribute__((noinline)) void segment_scan(
    Buffers& buffers, LiveLanes& carry, int steps
) {
    WRITES_MEMORY;
    Tile& tile = buffers.tile;
    StateLanes& total = buffers.total;
    LiveLanes& enter = buffers.enter;
    if constexpr (SMALL) local_scan<!REDUCES || PRODUCT>(tile, total, steps);
    else called_local_scan(tile, total, steps);
    const Live before = carry.get(0);
    Live c = before;
    bool left_range = false;
    for (int w = 0; w < WIDE; ++w) {
        enter.set(w, c);
        const State s = total.get(w);
        const Live after = advance(c, s);
        left_range |= may_leave_range(c, s, after);
        c = after;
    }
    if constexpr (!REDUCES) left_range |= segment_outputs(tile, enter, steps);
    if constexpr (PRODUCT)
        left_range |= goes_on(before) && !segments_in_range<State>(tile, enter, steps);
    if (left_range) segment_steps(tile, carry, steps);
    else carry.set(0, c);
}

static __attribute__((noinline)) State segment_reduce(Buffers& buffers) {
    WRITES_MEMORY;
    StateLanes& total = buffers.total;
    if constexpr (SMALL) local_scan<false>(buffers.tile, total, STEPS);
    else called_local_scan(buffers.tile, total, STEPS);
    State sum = total.get(0);
    for (int w = 1; w < WIDE; ++w) sum = combine_one(sum, total.get(w));
    return sum;
}

static void staged_scan(
    const Problem& problem, const At* at, Buffers& buffers, LiveLanes& carry, bool has_carry,
    int lanes, i64 count, bool ends
) {
    Tile& tile = buffers.tile;
    const i64 edge = HAS_EDGE && ends ? 1 : 0;
    has_carry |= HAS_INIT;
    for (i64 t = 0; t < count;) {
        const i64 left = count - t;
        if (SEGMENTED && lanes == 1 && has_carry && left - edge >= WIDE * MIN_SEGMENT) {
            const i64 most = (left - edge) / WIDE;
            const int steps = (int)(most < STEPS ? most : STEPS);
            const Place place = {at, t, WIDE, steps, true, false};
            load_tile(problem, tile, place);
            segment_scan(buffers, carry, steps);
            store_tile(problem, tile, place);
            t += WIDE * steps;
            continue;
        }
        const i64 most = lanes == 1 && !has_carry ? 1 : STEPS;
        const int steps = (int)(left < most ? left : most);
        const Place place = {at, t, lanes, steps, false, edge && steps == left};
        load_tile(problem, tile, place);
        if (!ALL_LANES && lanes == WIDE && steps == STEPS && has_carry && !place.last)
            whole_tile(tile, carry);
        else tile_steps(tile, carry, has_carry, place);
        store_tile(problem, tile, place);
        has_carry = true;
        t += steps;
    }
}

static void staged_reduce(
    const Problem& problem, const At& at, Buffers& buffers, StateLanes& total, i64 count
) {
    Tile& tile = buffers.tile;
    State sum;
    for (i64 t = 0; t < count;) {
        const bool whole = count - t >= WIDE * STEPS;
        const Place place = {&at, t, whole ? WIDE : 1, whole ? STEPS : 1, whole, false};
        load_tile(problem, tile, place);
        const State part = whole ? segment_reduce(buffers) : lift(tile.raw(0, 0));
        sum = t ? combine_one(sum, part) : part;
        t += whole ? WIDE * STEPS : 1;
    }
    total.set(0, sum);
}
