// Where packed sequences begin and end: found from `offsets` while the data of a tile are under way.
//
// The sequences lie one after another in one row. A boundary is a value of `offsets`, as a position
// in the scan's order: a sequence starts there, and another ends at the position before. The role
// `boundaries`, one warp, sets a bit for each boundary in a tile and after its last position. Main
// reads the bits of its own steps. No array of the length of the axis is needed.
//
// Each of BOUNDARY_WARPS warps takes a tile in turn. What counts is how many loads wait for one
// another (each takes 1 to 2 us while the memory is busy), and few instructions, since the warps run
// beside those of main. So a warp searches the entries of its next TOGETHER tiles at once, two
// searches per tile, one for each lane: between SAMPLES of `offsets`, which the warp holds, from where
// the entry would be if sequences between two samples were equally long. The entries of its first tile
// are loaded from where they would be if all sequences were, since a search would come too late.
// rows_boundaries.cuh and lanes_boundaries.cuh say when the bits of a tile may be written
// (`await_place`) and who waits for them (`hand_bits_over`).
//
// Wrong offsets cause no access out of bounds: entries that lie outside of a tile are left out. Each
// block checks a part of the offsets and tells the host through the alarm.
#pragma once

constexpr int TOGETHER = 16;  // tiles whose entries a warp searches at once
constexpr int SAMPLES = 128;  // four per lane
constexpr int PROBES = 8;     // entries that a lane compares in a round of a search
constexpr int NEAR = 16;      // a search ends so many entries from the wanted one
constexpr int LOOKS = 10;     // entries of a tile that a lane loads together

// The lowest value of `offsets` that is a boundary of a tile; the highest is TILE_STEPS more. May be
// below 0 in the last tile of a reverse scan.
INLINE i64 lowest_boundary(const Params& P, int tile) {
    const i64 first = (i64)tile * TILE_STEPS;
    return REVERSE ? P.length + skipped(P) - first - TILE_STEPS : first;
}

INLINE i64 shuffle_from(i64 x, int lane) {
    const u32 low = shuffle_from((u32)(u64)x, lane), high = shuffle_from((u32)((u64)x >> 32), lane);
    return (i64)((u64)high << 32 | low);
}

// The entries of `offsets` from `begin` to `end`.
struct Range {
    int begin, end;
};

// Every `apart`-th entry of `offsets`, and the last: number 4 l + k is known[k] of lane l.
struct Samples {
    i64 known[4];
    int apart;

    INLINE_MEMBER void load(const Params& P) {
        apart = sequences_of(P) / (SAMPLES - 1) + 1;
        UNROLL for (int k = 0; k < 4; ++k)
            known[k] = offset_at(P, entry(P, thread_index() % 32 * 4 + k));
    }
    INLINE_MEMBER int entry(const Params& P, int sample) const {
        const i64 at = (i64)sample * apart;
        return at < sequences_of(P) ? (int)at : sequences_of(P);
    }
    // The samples between which the first entry that is not below `value` lies; `guess`: probably
    // close to it. Every lane asks for another value.
    INLINE_MEMBER Range between(const Params& P, i64 value, int& guess) const {
        int lane = 0;
        UNROLL for (int d = 16; d > 0; d /= 2)
            lane += shuffle_from(known[0], lane + d) < value ? d : 0;
        i64 before = shuffle_from(known[0], lane);
        i64 after = shuffle_from(known[0], lane < 31 ? lane + 1 : 31);
        int sample = 4 * lane;
        UNROLL for (int k = 3; k > 0; --k) {
            const i64 here = shuffle_from(known[k], lane);
            if (here >= value) after = here;
            else if (sample == 4 * lane) sample += k, before = here;
        }
        const int last = sequences_of(P);
        const Range range = {entry(P, sample),
                             sample == SAMPLES - 1 ? last + 1 : entry(P, sample + 1)};
        const float share = (float)(value - before) / (float)(after > before ? after - before : 1);
        const float ahead = share * (float)(range.end - range.begin);
        guess = ahead > 0 ? least(range.begin + (int)ahead, range.end) : range.begin;
        return range;
    }
};

// Where the first entry that is not below `value` lies. The first round of the search looks around
// the guess; another one leaves 1 / (PROBES + 1) of the entries. Every lane searches another value.
INLINE Range search(const Params& P, const Samples& samples, i64 value) {
    int guess;
    Range range = samples.between(P, value, guess);
    i64 from = guess - PROBES / 2 * NEAR, apart = NEAR;
    ROLLED while (!all_lanes(range.end - range.begin <= NEAR)) {
        i64 found[PROBES];
        UNROLL for (int k = 0; k < PROBES; ++k) {
            const i64 at = from + (k + 1) * apart - 1;
            found[k] = at < range.begin ? value - 1 : at < range.end ? offset_at(P, (int)at) : value;
        }
        int below = 0;
        UNROLL for (int k = 0; k < PROBES; ++k) below += found[k] < value;
        const i64 after = from + below * apart, next = after + apart - 1;  // `next` is not below
        if (below < PROBES && next < range.end)
            range.end = next < range.begin ? range.begin : (int)next;
        if (below > 0 && after > range.begin)
            range.begin = after < range.end ? (int)after : range.end;
        from = range.begin, apart = (range.end - range.begin + PROBES) / (PROBES + 1);
    }
    return range;
}

// What a warp knows of its next tiles, each lane of one.
struct Tiles {
    int row, first, end;  // entries of the tile lie from `first` on and before `end`
    i64 low;              // lowest_boundary
    // Of tile number `it` of the block, and every BOUNDARY_WARPS-th after it.
    INLINE_MEMBER void find(const Params& P, const Samples& samples, int it, int tiles) {
        const int lane = thread_index() % 32, most = tiles - 1 - (tiles - 1 - it) % BOUNDARY_WARPS;
        const Walk walk = Walk::at(P, least(it + lane / 2 * BOUNDARY_WARPS, most));
        row = row_of(walk), low = lowest_boundary(P, walk.tile);
        const Range range = search(P, samples, lane % 2 == 0 ? low : low + TILE_STEPS + 1);
        first = (int)shuffle_from((u32)range.begin, lane & ~1);
        end = (int)shuffle_from((u32)range.end, lane | 1);
    }
};

// Some entries of `offsets`, a warp's worth, as distances from a tile's lowest boundary: −1 for those
// below it, TILE_STEPS + 1 for those after the tile.
struct Entries {
    int first, count, end;  // the entries are those from `first` on, 32 `count` of them
    int distance[LOOKS];
    // Those of the range, if they are not too many.
    INLINE_MEMBER void load(const Params& P, i64 low, Range range) {
        first = range.begin, end = range.end, count = least((end - first + 31) / 32, LOOKS);
        const int entry = first + thread_index() % 32, left = sequences_of(P) - entry;
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            if (k >= count) break;
            const i64 d = 32 * k <= left ? offset_at(P, entry + 32 * k) - low : TILE_STEPS + 1;
            distance[k] = (u64)d <= TILE_STEPS ? (int)d : d < 0 ? -1 : TILE_STEPS + 1;
        }
    }
    // As many entries as can be loaded together, from this one on.
    INLINE_MEMBER void load_from(const Params& P, i64 low, int entry) {
        const int begin = entry < 0 ? 0 : least(entry, sequences_of(P));
        load(P, low, {begin, begin + 32 * LOOKS});
    }
    // Entries around the middle of a tile, if all sequences are equally long.
    INLINE_MEMBER void guess(const Params& P, i64 low) {
        const float share = (float)(low + TILE_STEPS / 2) / (float)P.length;
        load_from(P, low, (int)(share * (float)sequences_of(P)) - 16 * LOOKS);
    }
    // Whether the first that is not below the tile is among them.
    INLINE_MEMBER bool hold_first() const {
        bool below = true;
        UNROLL for (int k = 0; k < LOOKS; ++k) below = below && (k >= count || distance[k] < 0);
        const bool begin = first == 0 || (int)shuffle_from((u32)distance[0], 0) < 0;
        return begin && !all_lanes(below);
    }
};

// Notes which entry of `offsets` a bit of the tile stands for (`Ranks`); `repeats`: the entry
// before is equal. The sequence between them is empty, then, and has no position at which main could
// store its final.
INLINE void note_entry(const Params& P, u32* tile, int row, int bit, int entry, bool repeats) {
    const int word = bit / 32;
    raise_shared(tile + Ranks::RANKS + word, Ranks::rank_of(entry));
    if (!repeats) return;
    set_shared_bits(tile + Ranks::REPEATS + word, 1u << bit % 32);
    store_empty_final(P, row, entry - 1);
}

// Sets the bits of the tile's entries, of which the first are loaded.
INLINE void set_bits(const Params& P, u32* tile, int row, i64 low, Entries& entries) {
    const int lane = thread_index() % 32;
    int before = -1, last = 0;  // the entry before those of the warp, and the lane's last one
    ROLLED while (true) {
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            if (k >= entries.count) break;
            const int d = entries.distance[k], bit = REVERSE ? TILE_STEPS - d : d;
            last = d;
            bool repeats = false;
            if constexpr (NUMBERED) {
                const int left = (int)shuffle_up((u32)d, 1);
                repeats = (lane > 0 ? left : before) == d;
                before = (int)shuffle_from((u32)d, 31);
            }
            if ((u32)d <= TILE_STEPS) {
                set_shared_bits(tile + bit / 32, 1u << bit % 32);
                if constexpr (NUMBERED)
                    note_entry(P, tile, row, bit, entries.first + 32 * k + lane, repeats);
            }
        }
        if (!all_lanes(last <= TILE_STEPS)) break;  // entries do not decrease: no others are ours
        const int next = entries.first + 32 * entries.count;
        entries.load(P, low, {next, entries.end > next ? entries.end : next + 32});
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
    Samples samples;
    Tiles found;
    int next = TOGETHER;  // of those that were found together
    auto ring = RingCursor<BOUNDARY_PLACES>::after(number);
    ROLLED for (int it = number; it < tiles; it += BOUNDARY_WARPS) {
        Entries entries;
        int row;
        i64 low;
        bool guessed = it == number;
        if (guessed) {
            const Walk walk = Walk::at(P, it);
            row = row_of(walk), low = lowest_boundary(P, walk.tile);
            entries.guess(P, low);
            samples.load(P);
            if (!entries.hold_first()) {
                int first;
                samples.between(P, low, first);
                entries.load_from(P, low, first - 3 * NEAR);
            }
            guessed = entries.hold_first();
        }
        if (!guessed) {
            if (next == TOGETHER) found.find(P, samples, it, tiles), next = 0;
            row = (int)shuffle_from((u32)found.row, 2 * next);
            low = shuffle_from(found.low, 2 * next);
            entries.load(P, low, {(int)shuffle_from((u32)found.first, 2 * next),
                                  (int)shuffle_from((u32)found.end, 2 * next)});
            ++next;
        }
        await_place(shared, it, ring);
        u32* const tile = shared.boundaries[ring.place];
        ROLLED for (int k = lane; k < TILE_WORDS / 4; k += 32) store_zeros(tile + 4 * k);
        sync_warp();
        set_bits(P, tile, row, low, entries);
        hand_bits_over(shared, it, ring);
        ring.advance(BOUNDARY_WARPS);
    }
    finish_boundaries(tiles);
    check_offsets(P, number);
}
