// The direct form: one step of all lanes is one SIMD loop; carries stay in the first-level cache.
//
// A leaf without a SLOT is read or written in place: neighbouring lanes have one distance, of up to 16
// scalars. A leaf with a SLOT goes through a tile.
#pragma once
#include "direct_tile.h"

// The position of a step: addresses in memory, and row m of a tile.
struct Here {
    At at;
    const Shifts& shifts;
    DirectTile& tile;
    int m;
};

template <bool EDGE>
INLINE Raw load_lane(const Here& here, i64 w) {
    Raw x;
#define LOAD(name, value, memory, leaf, offset, lane, edge, edge_memory, edge_offset, edge_lane) \
    if constexpr (!(EDGE && SHIFTED[leaf])) { \
        if constexpr (SLOT[leaf] >= 0) x.name = here.tile.x.name[here.m][w]; \
        else x.name = from_memory<value>(((const memory*)here.at.p[leaf])[w * lane + offset]); \
    } else if constexpr (edge >= 0) \
        x.name = from_memory<value>(((const edge_memory*)lane_at<(edge < 0 ? 0 : edge)>( \
            here.at, here.shifts, w, edge_lane * (i64)sizeof(edge_memory)))[edge_offset]); \
    else \
        x.name = (value)0;
    INPUTS(LOAD)
#undef LOAD
    return x;
}

INLINE void store_lane(const Here& here, i64 w, const Out& y) {
#define STORE(name, value, memory, leaf, offset, lane) \
    if constexpr (SLOT[leaf] >= 0) here.tile.y.name[here.m][w] = y.name; \
    else ((memory*)here.at.p[leaf])[w * lane + offset] = to_memory<memory>(y.name);
    OUTPUTS(STORE)
#undef STORE
}

template <bool FIRST, bool EDGE>
static __attribute__((noinline)) void direct_step(const Here here, LiveLanes& carry, int lanes) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const Raw x = load_lane<EDGE>(here, w);
        Live c = carry.get(w);
        const Out y = step<FIRST, EDGE>(c, x);
        carry.set(w, c);
        store_lane(here, w, y);
    }
}

static void direct_scan(
    const Problem& problem, Here here, LiveLanes& carry, bool has_carry, int lanes, i64 count,
    bool ends
) {
    for (i64 left = count; left > 0;) {
        const i64 steps = SLOTS && left > STEPS ? STEPS : left;
        const i64 edge = HAS_EDGE && ends && steps == left ? 1 : 0;
        const At first = here.at;
        if constexpr (SLOTS > 0)
            load_direct_tile(problem, first, here.shifts, here.tile, lanes, (int)steps, edge);
        i64 m = 0;
        auto next = [&] { here.m = (int)++m; move(problem, here.at, 1); };
        here.m = 0;
        if constexpr (!HAS_INIT) {
            if (!has_carry) { direct_step<true, false>(here, carry, lanes); next(); }
            has_carry = true;
        }
        while (m < steps - edge) { direct_step<false, false>(here, carry, lanes); next(); }
        if (m < steps) { direct_step<false, HAS_EDGE>(here, carry, lanes); next(); }
        if constexpr (SLOTS > 0)
            store_direct_tile(problem, first, here.shifts, here.tile, lanes, (int)steps);
        left -= steps;
    }
}

template <bool FIRST>
static __attribute__((noinline)) void direct_fold(const Here here, StateLanes& total, int lanes) {
    WRITES_MEMORY;
#pragma GCC ivdep
    for (int w = 0; w < lanes; ++w) {
        const State s = lift(load_lane<false>(here, w));
        total.set(w, FIRST ? s : combine(total.get(w), s));
    }
}

static void direct_reduce(
    const Problem& problem, Here here, StateLanes& total, int lanes, i64 count
) {
    for (i64 t = 0; t < count; ++t, ++here.m, move(problem, here.at, 1)) {
        if constexpr (SLOTS > 0) {
            here.m %= STEPS;
            const i64 left = count - t;
            if (here.m == 0)
                load_direct_tile(problem, here.at, here.shifts, here.tile, lanes,
                                 (int)(left < STEPS ? left : STEPS), false);
        }
        if (t) direct_fold<false>(here, total, lanes);
        else direct_fold<true>(here, total, lanes);
    }
}
