// Where packed sequences begin and end: found from `offsets` while the data of a tile are under way.
//
// The sequences lie one after another in one row. A boundary is a value of `offsets`, as a position
// in the scan's order: a sequence starts there, and another ends at the position before. The role
// `boundaries`, one warp, sets a bit for each boundary in a tile and after its last position. Main
// reads the bits of its own steps. No array of the length of the axis is needed.
//
// The entries of a tile are found without a search: every warp of the role knows SAMPLES of `offsets`,
// evenly spaced, and interpolates between two of them. So the entries of a tile are loaded by loads
// that do not wait for one another, while the warp writes the bits of the tile before. Only where the
// guess was wrong (sequences of very different lengths side by side) the warp searches between the
// two samples. The first tile's entries are guessed from the number of sequences alone: that of the
// samples would come too late.
//
// Each of BOUNDARY_WARPS warps takes a tile in turn. rows_boundaries.cuh and lanes_boundaries.cuh
// say when the bits of a tile may be written (`await_place`) and who waits for them
// (`hand_bits_over`).
//
// Wrong offsets cause no access out of bounds: entries that lie outside of a tile are left out. Each
// block checks a part of the offsets and tells the host through the alarm.
#pragma once

constexpr int LOOKS = 8;             // entries of a tile that a lane loads together
constexpr int KNOWN = 8;             // samples that a lane holds
constexpr int SAMPLES = 32 * KNOWN;
constexpr int PROBES = 4;            // entries that a lane compares in a round of a search
constexpr int NEAR = 64;             // a search ends so many entries before the wanted one
constexpr int SLACK = 64;            // a guess is so many entries early

// The lowest value of `offsets` that is a boundary of a tile; the highest is TILE_STEPS more. May be
// below 0 in the last tile of a reverse scan.
INLINE i64 lowest_boundary(const Params& P, int tile) {
    const i64 first = (i64)tile * TILE_STEPS;
    return REVERSE ? P.length - first - TILE_STEPS : first;
}

INLINE i64 shuffle_from(i64 x, int lane) {
    const u32 low = shuffle_from((u32)(u64)x, lane), high = shuffle_from((u32)((u64)x >> 32), lane);
    return (i64)((u64)high << 32 | low);
}
// The sum over the lanes of a warp.
INLINE int sum_of_lanes(int x) {
    UNROLL for (int d = 1; d < 32; d *= 2) x += (int)shuffle_xor((u32)x, d);
    return x;
}

// Where a tile's entries of `offsets` are: probably from `first` on, `count` up to the last. The first
// that is not below the tile lies from `begin` to `end`.
struct Place {
    int first, count, begin, end;
};

// A guess from the number of sequences alone: half of the entries that are loaded together lie
// before the middle of the tile.
INLINE Place even_place(const Params& P, i64 low) {
    const int entries = sequences_of(P) + 1;
    const float share = (float)(low + TILE_STEPS / 2) / (float)P.length;
    const int first = (int)(share * (float)entries) - 16 * LOOKS;
    return {first < 0 ? 0 : least(first, entries), 32 * LOOKS, 0, entries};
}

// Every `apart`-th entry of `offsets`, and the last: number 32 k + l is known[k] of lane l.
struct Samples {
    i64 known[KNOWN];
    int apart;

    INLINE_MEMBER void load(const Params& P) {
        apart = sequences_of(P) / (SAMPLES - 1) + 1;
        UNROLL for (int k = 0; k < KNOWN; ++k)
            known[k] = offset_at(P, entry(P, 32 * k + thread_index() % 32));
    }
    INLINE_MEMBER int entry(const Params& P, int sample) const {
        const i64 at = (i64)sample * apart;
        return at < sequences_of(P) ? (int)at : sequences_of(P);
    }
    INLINE_MEMBER i64 at(int sample) const {
        i64 own = known[0];
        UNROLL for (int k = 1; k < KNOWN; ++k) own = sample / 32 == k ? known[k] : own;
        return shuffle_from(own, sample % 32);
    }
    INLINE_MEMBER Place place(const Params& P, i64 low) const {
        int below = 0;
        UNROLL for (int k = 0; k < KNOWN; ++k) below += known[k] < low;
        below = sum_of_lanes(below);
        if (below == 0) below = 1;  // then it is the first entry
        if (below == SAMPLES) return {sequences_of(P), 1, sequences_of(P), sequences_of(P) + 1};
        const i64 before = at(below - 1), after = at(below);
        const int begin = entry(P, below - 1), end = entry(P, below), most = end - begin;
        const float density = (float)most / (float)(after > before ? after - before : 1);
        const float ahead = density * (float)(low > before ? low - before : 0) - (float)SLACK;
        const float count = density * (float)TILE_STEPS + (float)(2 * SLACK);
        const int first = ahead < 0 ? 0 : ahead < (float)most ? (int)ahead : most;
        return {begin + first, count < (float)(32 * LOOKS) ? (int)count : 32 * LOOKS, begin, end};
    }
};

// An entry of `offsets` at most NEAR before the first that is not below `low`, which lies from
// `begin` to `end`. A round leaves 1 / (32 PROBES + 1) of the entries.
INLINE int near_entry(const Params& P, i64 low, int begin, int end) {
    constexpr int TOGETHER = 32 * PROBES;
    ROLLED while (end - begin > NEAR) {
        const int apart = (end - begin + TOGETHER) / (TOGETHER + 1);
        int below = 0;
        i64 found[PROBES];
        UNROLL for (int k = 0; k < PROBES; ++k) {
            const i64 at = begin + (i64)(32 * k + thread_index() % 32 + 1) * apart - 1;
            found[k] = at < end && at <= sequences_of(P) ? offset_at(P, (int)at) : low;
        }
        UNROLL for (int k = 0; k < PROBES; ++k) below += found[k] < low;
        below = sum_of_lanes(below);
        begin += below * apart;
        end = least(end, begin + apart - 1);
    }
    return begin;
}

// Some entries of `offsets`, a warp's worth, as distances from a tile's lowest boundary: −1 for those
// below it, TILE_STEPS + 1 for those after the tile.
struct Entries {
    int first, count;  // the entries are those from `first` on, 32 `count` of them
    int distance[LOOKS];
    INLINE_MEMBER void load(const Params& P, i64 low, const Place& place) {
        first = place.first, count = (place.count + 31) / 32;
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            if (k >= count) break;
            const i64 entry = (i64)first + 32 * k + thread_index() % 32;
            const i64 d = entry <= sequences_of(P) ? offset_at(P, (int)entry) - low : TILE_STEPS + 1;
            distance[k] = (u64)d <= TILE_STEPS ? (int)d : d < 0 ? -1 : TILE_STEPS + 1;
        }
    }
    // Whether the first that is not below the tile is among them, or may be the first of them all.
    INLINE_MEMBER bool hold_first() const {
        bool below = true;
        UNROLL for (int k = 0; k < LOOKS; ++k) below = below && (k >= count || distance[k] < 0);
        const bool begin = first == 0 || (int)shuffle_from((u32)distance[0], 0) < 0;
        return begin && !all_lanes(below);
    }
};

// Notes which entry of `offsets` a bit of the tile stands for (`Numbers`); `repeats`: the entry
// before is equal. The sequence between them is empty, then, and has no position at which main could
// store its final.
INLINE void note_entry(const Params& P, u32* tile, int row, int bit, int entry, bool repeats) {
    const int word = bit / 32;
    raise_shared(tile + Numbers::RANKS + word, Numbers::rank_of(entry));
    if (!repeats) return;
    set_shared_bits(tile + Numbers::REPEATS + word, 1u << bit % 32);
    store_empty_final(P, row, entry - 1);
}

// Sets the bits of the tile's entries, of which the first are loaded.
INLINE void set_bits(const Params& P, u32* tile, int row, i64 low, Entries& entries) {
    const int lane = thread_index() % 32;
    int before = -1;  // the entry before those of the warp
    ROLLED for (bool more = true; more;) {
        bool beyond = false;
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            if (k >= entries.count || beyond) break;
            const int d = entries.distance[k], bit = REVERSE ? TILE_STEPS - d : d;
            beyond = !all_lanes(d <= TILE_STEPS);  // entries do not decrease: the last are
            bool repeats = false;
            if constexpr (NUMBERED) {
                const int left = (int)shuffle_up((u32)d, 1);
                repeats = (lane > 0 ? left : before) == d;
                before = (int)shuffle_from((u32)d, 31);
            }
            if (d >= 0 && d <= TILE_STEPS) {
                set_shared_bits(tile + bit / 32, 1u << bit % 32);
                if constexpr (NUMBERED)
                    note_entry(P, tile, row, bit, entries.first + 32 * k + lane, repeats);
            }
        }
        more = !beyond;
        if (more) entries.load(P, low, {entries.first + 32 * entries.count, 32 * LOOKS});
    }
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
    ROLLED for (int k = 0; k < number; ++k) walk.next(P);
    Entries next;  // of the warp's next tile
    if (number < tiles) {
        const i64 low = lowest_boundary(P, walk.tile);
        next.load(P, low, even_place(P, low));
    }
    Samples samples;
    samples.load(P);
    ROLLED for (int it = number; it < tiles; it += BOUNDARY_WARPS) {
        const i64 low = lowest_boundary(P, walk.tile);
        const int row = row_of(walk);
        ROLLED for (int k = 0; k < BOUNDARY_WARPS; ++k) walk.next(P);
        Entries entries = next;
        if (it + BOUNDARY_WARPS < tiles) {  // under way while the bits of this tile are set
            const i64 after = lowest_boundary(P, walk.tile);
            next.load(P, after, samples.place(P, after));
        }
        if (!entries.hold_first()) {
            const Place place = samples.place(P, low);
            if (it == number) entries.load(P, low, place);
            if (!entries.hold_first())
                entries.load(P, low, {near_entry(P, low, place.begin, place.end), 32 * LOOKS});
        }
        const auto ring = RingCursor<BOUNDARY_PLACES>::after(it);
        await_place(shared, it, ring);
        u32* const tile = shared.boundaries[ring.place];
        ROLLED for (int k = lane; k < TILE_WORDS; k += 32) tile[k] = 0;
        sync_warp();
        set_bits(P, tile, row, low, entries);
        hand_bits_over(shared, it, ring);
    }
    finish_boundaries(tiles);
    check_offsets(P, number);
}
