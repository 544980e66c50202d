// Packed sequences in rows_scan.cuh: the places of the bits of boundaries, and how main reads them.
#pragma once

#if SEQUENCES
// A warp that waits for a place must not be a whole turn of the ring ahead of the last place that it
// waited for: a gate tells phases apart by their parity.
static_assert(BOUNDARY_WARPS <= STAGES, "less than a turn ahead");
constexpr int BOUNDARY_PLACES = STAGES;

INLINE void open_boundary_gates(Shared& shared) {
    UNROLL for (int k = 0; k < STAGES; ++k) gate_open(&shared.marked[k], WARP_ARRIVALS);
}
// Main has scanned the tile that had the place before.
INLINE void await_place(Shared& shared, int it, const RingCursor<STAGES>& place) {
    if (it >= STAGES) gate_wait(&shared.done[place.place], place.parity ^ 1);
}
INLINE void hand_bits_over(Shared& shared, int, const RingCursor<STAGES>& place) {
    gate_arrive_warp(&shared.marked[place.place]);
}
INLINE void finish_boundaries(int) {}
INLINE void await_bits(Shared& shared, const RingCursor<STAGES>& stage) {
    gate_wait(&shared.marked[stage.place], stage.parity);
}
INLINE const u32* bits_of(const Shared& shared, int stage) { return shared.boundaries[stage]; }
INLINE int row_of(const Walk& walk) { return walk.row; }
INLINE void store_empty_final(const Params& P, int row, int sequence) {
    if (HAS_FINAL)
        store_final(P, row, 0, sequence, HAS_INIT ? load_init(P, row, 0, sequence) : identity());
}
#include "boundaries.cuh"
INLINE void find_boundaries(const Params& P, Shared& shared, int number, int tiles) {
    boundaries_role(P, shared, number, tiles);
}
#else
INLINE void open_boundary_gates(Shared&) {}
INLINE void await_bits(Shared&, const RingCursor<STAGES>&) {}
INLINE const u32* bits_of(const Shared&, int) { return 0; }
INLINE void find_boundaries(const Params&, Shared&, int, int) {}
#endif

// The boundaries among a thread's steps of a tile.
struct ThreadBoundaries {
    Boundaries<ITEMS> bits;
    Numbers<ITEMS> numbers;
    i64 step;
    INLINE_MEMBER ThreadBoundaries(const Shared& shared, int stage, const Walk& walk) {
        bits.read(bits_of(shared, stage), thread_index() * ITEMS);
        step = (i64)walk.tile * TILE_STEPS + thread_index() * ITEMS;
    }
    INLINE_MEMBER void number(const Params& P, const Shared& shared, int stage) {
        numbers.start(P, bits, bits_of(shared, stage), thread_index() * ITEMS, step);
    }
    INLINE_MEMBER void enter(const Params& P, int i) { numbers.enter(P, bits, i, step + i); }
    INLINE_MEMBER bool ends(int i) const { return bits.at(i + 1); }
    INLINE_MEMBER bool any_start() const {
        bool any = false;
        UNROLL for (int i = 0; i < ITEMS; ++i) any = any || bits.at(i);
        return any;
    }
    INLINE_MEMBER bool any_end() const {
        bool any = false;
        UNROLL for (int i = 0; i < ITEMS; ++i) any = any || ends(i);
        return any;
    }
    INLINE_MEMBER Position position(const Params& P, const Walk& walk, int i, bool exists, bool first,
                                    bool last) const {
        return {walk.row, 0, exists, first, last, bits.at(i), numbers.valid(P)};
    }
};
