// Packed sequences in lanes_scan.cuh: the places of the bits of boundaries, and how main reads them.
// All channels have the same.
#pragma once

#if SEQUENCES
constexpr int BOUNDARY_PLACES = LEAD + 3;

// Tile i takes the place of tile i − LEAD − 3. Main has scanned that one when it arrives at
// TOTALS_READY(i − 2), after it has reduced tile i − 2.
INLINE void await_place(Shared&, int it, const RingCursor<BOUNDARY_PLACES>&) {
    if (it >= 2) wait_for(TOTALS_READY + (it - 2) % RING, TOTALS_READY_THREADS);
}
INLINE void hand_bits_over(Shared&, int it, const RingCursor<BOUNDARY_PLACES>&) {
    sync_warp();
    arrive(MARKED + it % 2, MARKED_THREADS);
}
// Every tile's TOTALS_READY counts this role.
INLINE void finish_boundaries(int tiles) {
    ROLLED for (int it = tiles < 2 ? 0 : tiles - 2; it < tiles; ++it)
        wait_for(TOTALS_READY + it % RING, TOTALS_READY_THREADS);
}
INLINE void await_bits(int it) { wait_for(MARKED + it % 2, MARKED_THREADS); }
INLINE const u32* bits_of(const Shared& shared, int place) { return shared.boundaries[place]; }
INLINE int row_of(const Walk&) { return 0; }
INLINE void store_empty_final(const Params&, int, int) {}  // packed_finals.py fills them before
#include "boundaries.cuh"
INLINE void find_boundaries(const Params& P, Shared& shared, int tiles) {
    boundaries_role(P, shared, 0, tiles);
}
#else
INLINE void await_bits(int) {}
INLINE const u32* bits_of(const Shared&, int) { return 0; }
INLINE void find_boundaries(const Params&, Shared&, int) {}
#endif

// The boundaries among a thread's steps of a tile.
struct ThreadBoundaries {
    Boundaries<ITEMS> bits;
    Numbers<ITEMS> numbers;
    INLINE_MEMBER void read(const Params& P, const Shared& shared, int it, const Thread& thread,
                            i64 step, bool numbered) {
        const u32* const tile = bits_of(shared, it % (LEAD + 3));
        bits.read(tile, thread.group * ITEMS);
        if (numbered) numbers.start(P, bits, tile, thread.group * ITEMS, step);
    }
    INLINE_MEMBER void enter(const Params& P, const Cells& cells, int i) {
        numbers.enter(P, bits, i, cells.step + i);
    }
    INLINE_MEMBER bool ends(int i) const { return bits.at(i + 1); }
    INLINE_MEMBER Position position(const Params& P, const Cells& cells, int i, int v, bool exists, bool first,
                                    bool last) const {
        return {(int)cells.row, cells.channel + v, exists, first, last, bits.at(i),
                numbers.valid(P)};
    }
};
