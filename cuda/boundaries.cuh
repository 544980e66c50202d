// Where packed sequences begin and end: found from `offsets` while the data of a tile are under way.
//
// The sequences lie one after another in one row. A boundary is a value of `offsets`, as a position
// in the scan's order: a sequence starts there, and another ends at the position before. The role
// `boundaries`, one warp, sets a bit for each boundary in a tile and after its last position. Main
// reads the bits of its own steps. No array of the length of the axis is needed.
//
// Each of BOUNDARY_WARPS warps takes BATCH tiles at a time, in turn, and searches their entries of
// `offsets` together: a search waits for memory a few times, whatever the number of
// tiles. rows_boundaries.cuh and lanes_boundaries.cuh say when the bits of a tile may be written
// (`await_place`) and who waits for them (`hand_bits_over`).
//
// Wrong offsets cause no access out of bounds: entries that lie outside of a tile are left out. Each
// block checks a part of the offsets and tells the host through the alarm.
#pragma once

constexpr int SHARERS = 32 / BATCH;  // lanes that search for the same tile
constexpr int PROBES = 4;            // entries that a lane compares in a round of a search
constexpr int LOOKS = 8;             // entries of a tile that a lane loads together
constexpr int NEAR = 16 * LOOKS;     // a search ends so many entries before the wanted one

// The lowest value of `offsets` that is a boundary of a tile; the highest is TILE_STEPS more. May be
// below 0 in the last tile of a reverse scan.
INLINE i64 lowest_boundary(const Params& P, int tile) {
    const i64 first = (i64)tile * TILE_STEPS;
    return REVERSE ? P.length - first - TILE_STEPS : first;
}

// The sum over the SHARERS lanes of a search.
template <int LANES>
INLINE int sum_of_lanes(int x) {
    UNROLL for (int d = 1; d < LANES; d *= 2) x += (int)shuffle_xor((u32)x, d);
    return x;
}

// An entry of `offsets` at most NEAR before the first that is not below `low`. Lanes that share a
// search get the same. The first round looks around `guess`; every other leaves
// 1 / (SHARERS PROBES + 1) of the entries. Another round costs more than to load some entries that
// are below.
INLINE int near_entry(const Params& P, i64 low, int guess) {
    constexpr int TOGETHER = SHARERS * PROBES;
    const int lane = thread_index() % 32 % SHARERS;
    int begin = 0, end = sequences_of(P) + 1;  // entries before `begin` are below, from `end` not
    i64 from = guess - TOGETHER * NEAR / 4, apart = NEAR / 2;
    from = from < 0 ? 0 : from;
    ROLLED while (!all_lanes(end - begin <= NEAR)) {
        i64 found[PROBES];
        UNROLL for (int k = 0; k < PROBES; ++k) {
            const i64 at = from + (lane * PROBES + k + 1) * apart - 1;
            found[k] = at < begin ? low - 1 : at < end ? offset_at(P, (int)at) : low;
        }
        int below = 0;
        UNROLL for (int k = 0; k < PROBES; ++k) below += found[k] < low;
        below = sum_of_lanes<SHARERS>(below);
        const i64 next = from + (below + 1) * apart - 1;  // the first that is not below
        if (below < TOGETHER && next < end) end = next < begin ? begin : (int)next;
        const i64 after = from + below * apart;
        if (below > 0 && after > begin) begin = after < end ? (int)after : end;
        from = begin, apart = (end - begin + TOGETHER) / (TOGETHER + 1);
    }
    return begin;
}

// Some entries of `offsets`, a warp's worth, as distances from a tile's lowest boundary: −1 for those
// below it, TILE_STEPS + 1 for those after the tile.
struct Entries {
    int distance[LOOKS];
    INLINE_MEMBER void load(const Params& P, i64 low, int first) {
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            const i64 entry = (i64)first + 32 * k + thread_index() % 32;
            const i64 d = entry <= sequences_of(P) ? offset_at(P, (int)entry) - low : TILE_STEPS + 1;
            distance[k] = (u64)d <= TILE_STEPS ? (int)d : d < 0 ? -1 : TILE_STEPS + 1;
        }
    }
};

// Which entries lie in a tile: from `begin` to before `end`. Set where NUMBERED.
struct Inside {
    int begin, end;
};

// Sets the bits of the tile's entries, which are found from entry `first` on; the first of them are
// loaded.
INLINE Inside set_bits(const Params& P, u32* bits, i64 low, int first, Entries& entries) {
    Inside inside = {first, first};
    ROLLED for (bool more = true; more;) {
        int below = 0, ours = 0;
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            const int d = entries.distance[k];
            if (all_lanes(d > TILE_STEPS)) break;  // entries do not decrease
            below += d < 0;
            if (d < 0 || d > TILE_STEPS) continue;
            ++ours;
            const int bit = REVERSE ? TILE_STEPS - d : d;
            set_shared_bits(bits + bit / 32, 1u << bit % 32);
        }
        if constexpr (NUMBERED) {
            below = sum_of_lanes<32>(below);
            inside.begin += below;
            inside.end += below + sum_of_lanes<32>(ours);
        }
        more = (int)shuffle_from((u32)entries.distance[LOOKS - 1], 31) <= TILE_STEPS;
        if (more) {
            first += 32 * LOOKS;
            entries.load(P, low, first);
        }
    }
    return inside;
}

// Checks the warp's part of `offsets` against the rules of packed_offsets.py. A broken one is told to
// the host: word 0 of the alarm says that there is something, words 1 to 3 which rule.
INLINE void check_offsets(const Params& P, int number) {
    const int parts = block_count() * BOUNDARY_WARPS, part = sequences_of(P) / parts + 1;
    const int begin = (block_index() * BOUNDARY_WARPS + number) * part;
    const int end = least(begin + part, sequences_of(P));
    u32 broken = 0;  // by rule
    if (begin == 0) {
        if (offset_at(P, 0) != 0) broken |= 1;
        if (offset_at(P, sequences_of(P)) != P.length) broken |= 2;
    }
    ROLLED for (int at = begin + thread_index() % 32; at < end; at += 32 * LOOKS) {
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            const int entry = least(at + 32 * k, sequences_of(P) - 1);
            if (offset_at(P, entry + 1) < offset_at(P, entry)) broken |= 4;
        }
    }
    if (broken == 0) return;
    UNROLL for (int rule = 0; rule < 3; ++rule)
        if (broken >> rule & 1) store_system(P.alarm + 1 + rule, 1);
    store_system(P.alarm, 2);
}

// `number`: of the warp among those of this role. The loops are rolled: the role runs beside main,
// and code that is executed once per tile would be fetched anew every time.
INLINE void boundaries_role(const Params& P, Shared& shared, int number, int tiles) {
    const int lane = thread_index() % 32;
    Walk walk;
    walk.start(P);
    ROLLED for (int k = 0; k < number * BATCH; ++k) walk.next(P);
    // Of the lane's tile of the last batch: its entry, the entries since the batch before, its place.
    int found = 0, step = 0;
    i64 last = 0;
    ROLLED for (int base = number * BATCH; base < tiles; base += BATCH * BOUNDARY_WARPS) {
        const int count = least(BATCH, tiles - base);
        Walk ahead = walk;
        ROLLED for (int k = 0; k < least(lane / SHARERS, count - 1); ++k) ahead.next(P);
        const i64 low = lowest_boundary(P, ahead.tile);
        // Guess as many entries on as last time; at first as if all sequences were equally long.
        const float share = (float)(low - last) / (float)P.length;
        const bool is_early = base < (number + 2 * BOUNDARY_WARPS) * BATCH;
        const int before = found;
        found = near_entry(P, low, found + (is_early ? (int)(share * sequences_of(P)) : step));
        step = found - before, last = low;
        ahead = walk;
        int first = (int)shuffle_from((u32)found, 0);
        Entries entries;
        entries.load(P, lowest_boundary(P, ahead.tile), first);
        ROLLED for (int b = 0; b < count; ++b) {
            const int here = first;
            Entries now = entries;
            ahead.next(P);
            if (b + 1 < count) {  // under way while the bits of this tile are set
                first = (int)shuffle_from((u32)found, (b + 1) * SHARERS);
                entries.load(P, lowest_boundary(P, ahead.tile), first);
            }
            const auto place = RingCursor<BOUNDARY_PLACES>::after(base + b);
            await_place(shared, base + b, place);
            u32* const bits = shared.boundaries[place.place];
            ROLLED for (int k = lane; k < BOUNDARY_WORDS; k += 32) bits[k] = 0;
            sync_warp();
            const Inside inside = set_bits(P, bits, lowest_boundary(P, walk.tile), here, now);
            if (NUMBERED && lane == 0) {
                shared.entries[place.place][0] = (u32)inside.begin;
                shared.entries[place.place][1] = (u32)inside.end;
            }
            hand_bits_over(shared, base + b, place);
            walk.next(P);
        }
        ROLLED for (int k = 0; k < BATCH * (BOUNDARY_WARPS - 1); ++k) walk.next(P);
    }
    finish_boundaries(tiles);
    check_offsets(P, number);
}
