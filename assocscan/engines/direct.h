// The direct walk: one step of all contiguous lanes is one SIMD loop; carries stay in the
// first-level cache.
#pragma once
#include "layout.h"

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
