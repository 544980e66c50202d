// The roles of rows_scan.cuh that find prefixes: warp_totals and lookback.
#pragma once

INLINE void warp_totals_role(const Params& P, Shared& shared, int tiles, u32 tag) {
    const int lane = thread_index() % 32;
    Walk walk;
    walk.start(P);
    State carry = identity();
    RingCursor<RING> slot;
    ROLLED for (int it = 0; it < tiles; ++it) {
        wait_for(TOTALS_READY + slot.place, TOTALS_READY_THREADS);
        const State part = get_state(shared.warp_states[slot.place][lane < WARPS ? lane : 0]);
        const State inclusive = warp_scan<1, WARPS>(part, lane);
        State before = shuffle_up(inclusive, 1);
        if (!WAITS) {
            const bool known = ENTERS || walk.tile > 0;
            if (ENTERS && walk.tile == 0) carry = load_init(P, walk.row, 0, 0);
            before = join(known, carry, lane > 0, before);
            carry = join(known, carry, true, shuffle_from(inclusive, WARPS - 1));
        } else if (lane == WARPS - 1 && walk.tile + 1 < P.tiles) {
            u32 w[WORDS];
            to_words(inclusive, w);
            const i64 index = (i64)walk.row * P.tiles + walk.tile;
            publish<WORDS>(P.slots + index * SLOT_BYTES<WORDS>, w, tag);
        }
        sync_warp();  // all lanes have read
        if (lane < WARPS) put_state(shared.warp_states[slot.place][lane], before);
        if (WAITS) {
            gate_arrive_warp(&shared.scanned[slot.place]);
        } else {
            arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        }
        slot.advance();
        walk.next(P);
    }
}

// The prefixes of all tiles of the block, by one thread (lookback_reference.cuh), in place of
// `lookback_role`.
INLINE void reference_role(const Params& P, Shared& shared, int tiles, u32 tag,
                           Watchdog& watchdog) {
    Walk walk;
    walk.start(P);
    RingCursor<RING> slot;
    RunningPrefix prefix;
    int row = -1;
    for (int it = 0; it < tiles; ++it) {
        gate_wait(&shared.scanned[slot.place], slot.parity);
        if (thread_index() % 32 == 0) {
            if (walk.row != row) {
                row = walk.row;
                prefix.start(ENTERS, ENTERS ? load_init(P, row, 0, 0) : identity());
            }
            auto slot_of = [&](int tile) {
                return P.slots + ((i64)row * P.tiles + tile) * SLOT_BYTES<WORDS>;
            };
            prefix.extend(walk.tile, slot_of, tag, watchdog);
            for (int k = 0; k < WARPS && prefix.exists; ++k) {
                u32* const before = shared.warp_states[slot.place][k];
                put_state(before, join(true, prefix.state, k > 0, get_state(before)));
            }
        }
        arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        slot.advance();
        walk.next(P);
    }
}

// The ordered product of the aggregates of tiles first … end − 1, in lane 0. Each lane polls
// several slots: wide ones that are adjacent, so that little is left to combine between lanes;
// narrow ones 32 apart, so that a poll of the warp reads fewer sectors.
constexpr bool RUNS = SLOT_BYTES<WORDS> >= 32;

INLINE State collect(const Params& P, int first, int end, u32 tag, Watchdog& watchdog,
                     bool& has_any) {
    const int lane = thread_index() % 32;
    State product = identity();
    has_any = false;
    ROLLED for (int base = first; base < end; base += 32 * ROUNDS) {
        const int slots = least(end - base, 32 * ROUNDS), rounds = (slots + 31) / 32;
        const int apart = RUNS ? 1 : 32, ours = RUNS ? lane * rounds : lane;
        State found[ROUNDS];
        u32 missing = first_bits(rounds);
        // Lanes beyond the end poll the last slot.
        await_slots<WORDS>(
            found, missing, ~0u,
            [&](int k) {
                const int slot = base + least(ours + k * apart, slots - 1);
                return P.slots + (i64)slot * SLOT_BYTES<WORDS>;
            },
            tag, watchdog);
        if constexpr (RUNS) {
            State run = found[0];
            UNROLL for (int k = 1; k < ROUNDS; ++k)
                run = join(true, run, k < rounds && ours + k < slots, found[k]);
            UNROLL for (int d = 1; d < 32; d *= 2) {
                const State right = shuffle_down(run, d);
                run = join(true, run, lane + d < 32 && (lane + d) * rounds < slots, right);
            }
            product = join(has_any, product, true, run);
        } else {
            UNROLL for (int d = 1; d < 32; d *= 2) UNROLL for (int k = 0; k < ROUNDS; ++k) {
                const State right = shuffle_down(found[k], d);
                found[k] = join(true, found[k], lane + d < 32 && 32 * k + lane + d < slots, right);
            }
            UNROLL for (int k = 0; k < ROUNDS; ++k)
                product = join(has_any || k > 0, product, k < rounds, found[k]);
        }
        has_any = true;
    }
    return product;
}

// Look-back warp `number` takes the tiles number, number + LOOKBACKS, … of this block. The product
// of aggregates needs nothing of the block's tile before: the prefix of that tile, from the
// look-back warp before, is combined last. The result is combined with the state before each main
// warp.
INLINE void lookback_role(const Params& P, Shared& shared, int number, int tiles, u32 tag,
                      Watchdog& watchdog) {
    const int lane = thread_index() % 32, apart = block_count();
    const int before = (number + LOOKBACKS - 1) % LOOKBACKS;
    Walk walk;
    walk.start(P);
    for (int k = 0; k < number; ++k) walk.next(P);
    // The tiles that no look-back below waits for: synccheck wants a wait for every phase of a
    // gate.
    if (number == 0)
        ROLLED for (int k = 0; k < least(LATE, tiles); ++k) gate_wait(&shared.scanned[k], 0);
    ROLLED for (int it = number; it < tiles; it += LOOKBACKS) {
        const int index = block_index() + it * apart, row_start = index - walk.tile;
        const bool continues = it > 0 && index - apart >= row_start;
        const int slot = it % RING;
        const auto reduced = RingCursor<RING>::after(least(it + LATE, tiles - 1));
        gate_wait(&shared.scanned[reduced.place], reduced.parity);
        bool has_any;
        State prefix =
            collect(P, continues ? index - apart : row_start, index, tag, watchdog, has_any);
        if (it > 0) gate_wait(&shared.handed[before], ((it - 1) / LOOKBACKS) & 1);
        if (lane == 0) {
            if (continues) {
                const bool has_left = ENTERS || walk.tile > apart;
                prefix = join(has_left, get_state(shared.prefix[before]), true, prefix);
            } else if (ENTERS) {
                prefix = join(true, load_init(P, walk.row, 0, 0), has_any, prefix);
            }
        }
        sync_warp();  // all lanes have passed the gate, which may turn twice from here on
        if (lane == 0) {
            put_state(shared.prefix[number], prefix);
            gate_arrive(&shared.handed[number]);
        }
        prefix = shuffle_from(prefix, 0);
        if (lane < WARPS && (ENTERS || walk.tile > 0)) {
            u32* const to = shared.warp_states[slot][lane];
            put_state(to, join(true, prefix, lane > 0, get_state(to)));
        }
        arrive(PREFIX_READY + slot, PREFIX_READY_THREADS);
        for (int k = 0; k < LOOKBACKS; ++k) walk.next(P);
    }
}
