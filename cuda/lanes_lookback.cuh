// The roles of lanes_scan.cuh that find prefixes: warp_totals, group_lookback, wave_lookback,
// chained. A lane is a channel. Where a block has fewer channels than a warp has lanes, CHANNEL_LANES
// lanes share a channel: each reads other warps' totals and other tiles' slots, and shuffles combine
// what they have read, in order.
#pragma once

constexpr int CHANNEL_LANES = BLOCK_CHANNELS < 32 ? 32 / BLOCK_CHANNELS : 1;
static_assert(CHANNEL_LANES == 1 || 32 % BLOCK_CHANNELS == 0, "lanes that share channels");

// The channel of a lane.
struct Lane {
    int channel;  // within the block
    int share;    // which of the lanes of the channel it is
    bool ours;    // whether it is the first of them, which writes what all of them have
    INLINE_MEMBER void start(int warp) {
        const int number = thread_index() % 32;
        channel = CHANNEL_LANES > 1 ? number % BLOCK_CHANNELS : warp % ROLE_WARPS * 32 + number;
        share = CHANNEL_LANES > 1 ? number / BLOCK_CHANNELS : 0;
        ours = share == 0 && channel < BLOCK_CHANNELS;
        if (channel >= BLOCK_CHANNELS) channel = 0;
    }
};

// The inclusive scan over the lanes of a channel, of which the first `count` hold an element.
INLINE State scan_shares(State s, const Lane& lane, int count) {
    ROLLED for (int d = 1; d < count; d *= 2) {
        const State left = shuffle_up(s, d * BLOCK_CHANNELS);
        const State both = combine(left, s);
        if (lane.share >= d && lane.share < count) s = both;
    }
    return s;
}

INLINE State state_of(const u32 (*from)[BLOCK_CHANNELS], int channel) {
    State s;
    get_states<1>(&s, from, channel);
    return s;
}

// The init of a chain, for one channel.
INLINE State entering(const Params& P, int chain, const Lane& lane) {
    const int m = row_of(P, chain);
    const i64 channel = (i64)(chain - m * P.channel_blocks) * BLOCK_CHANNELS + lane.channel;
    return load_init(P, m, channel < P.channels ? channel : 0, 0);
}

INLINE char* tile_slot(const Params& P, int chain, int tile, int channel) {
    return P.slots +
           (((i64)tile * P.chains + chain) * BLOCK_CHANNELS + channel) * SLOT_BYTES<WORDS>;
}
INLINE char* group_slot(const Params& P, int chain, int wave, int group, int channel) {
    return P.group_slots +
           ((((i64)wave * P.groups + group) * P.chains + chain) * BLOCK_CHANNELS + channel) *
               SLOT_BYTES<WORDS>;
}

// Replaces the total of each warp by the product of `running` (if `known`) and the totals before
// it. Returns the product of all. Narrow states are all loaded first.
INLINE State scan_warp_totals(u32 (*warps)[WORDS][BLOCK_CHANNELS], const Lane& lane, bool known,
                              State running) {
    constexpr int TOGETHER = WORDS <= 3 ? WARPS : 2;
    UNROLL for (int base = 0; base < WARPS; base += TOGETHER) {
        State part[TOGETHER];
        UNROLL for (int k = 0; k < TOGETHER; ++k) part[k] = state_of(warps[base + k], lane.channel);
        if (BLOCK_CHANNELS < 32) sync_warp();  // the other lanes of the channel have read them
        UNROLL for (int k = 0; k < TOGETHER; ++k) {
            const bool has = known || base + k > 0;
            if (has && lane.ours) put_states<1>(warps[base + k], lane.channel, &running);
            running = join(has, running, true, part[k]);
        }
    }
    return running;
}

// The same where at least four lanes share a channel: each has EACH warps, side by side.
INLINE State scan_shared_totals(u32 (*warps)[WORDS][BLOCK_CHANNELS], const Lane& lane, bool known,
                                State running) {
    constexpr int EACH = (WARPS + CHANNEL_LANES - 1) / CHANNEL_LANES, USED = (WARPS + EACH - 1) / EACH;
    const int first = lane.share * EACH;
    State upto[EACH];  // the products of the lane's totals, up to each of them
    UNROLL for (int k = 0; k < EACH; ++k) {
        const State part = state_of(warps[least(first + k, WARPS - 1)], lane.channel);
        upto[k] = k == 0 ? part : join(true, upto[k > 0 ? k - 1 : 0], first + k < WARPS, part);
    }
    const State all = scan_shares(upto[EACH - 1], lane, USED);
    State before = shuffle_up(all, BLOCK_CHANNELS);
    const bool has = known || lane.share > 0;
    before = join(known, running, lane.share > 0, before);
    sync_warp();  // all totals are read
    UNROLL for (int k = 0; k < EACH; ++k) {
        if (k > 0) upto[k - 1] = join(has, before, true, upto[k - 1]);
        if (first + k < WARPS && (has || k > 0))
            put_states<1>(warps[first + k], lane.channel, k == 0 ? &before : &upto[k - 1]);
    }
    const State total = shuffle_from(all, (USED - 1) * BLOCK_CHANNELS + lane.channel);
    return join(known, running, true, total);
}

INLINE State scan_totals(u32 (*warps)[WORDS][BLOCK_CHANNELS], const Lane& lane, bool known,
                         const State& running) {
    if constexpr (CHANNEL_LANES >= 4) return scan_shared_totals(warps, lane, known, running);
    else return scan_warp_totals(warps, lane, known, running);
}

// Combines the prefix of a tile with the state before each of its warps. Where a warp has more
// lanes than channels, several lanes share the warps of a channel. Every lane takes part.
INLINE void apply_prefix(u32 (*warps)[WORDS][BLOCK_CHANNELS], const Lane& lane,
                         const State& prefix) {
    constexpr int LEFT = (WARPS + CHANNEL_LANES - 1) / CHANNEL_LANES;
    constexpr int TOGETHER = WORDS <= 3 && LEFT % 4 == 0 ? 4 : LEFT % 2 == 0 ? 2 : 1;
    ROLLED for (int base = 0; base < LEFT; base += TOGETHER) {
        State part[TOGETHER];
        UNROLL for (int k = 0; k < TOGETHER; ++k) {
            const int warp = least((base + k) * CHANNEL_LANES + lane.share, WARPS - 1);
            part[k] = join(true, prefix, warp > 0, state_of(warps[warp], lane.channel));
        }
        if (WARPS % CHANNEL_LANES != 0) sync_warp();  // lanes without a warp have read the last one's
        UNROLL for (int k = 0; k < TOGETHER; ++k) {
            const int warp = (base + k) * CHANNEL_LANES + lane.share;
            if (warp < WARPS && (CHANNEL_LANES > 1 || lane.ours))
                put_states<1>(warps[warp], lane.channel, &part[k]);
        }
    }
}

INLINE void warp_totals_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag) {
    Lane lane;
    lane.start(warp);
    Walk walk;
    walk.start(P);
    State carry = identity();
    RingCursor<RING> slot;
    ROLLED for (int it = 0; it < tiles; ++it) {
        wait_for(TOTALS_READY + slot.place, TOTALS_READY_THREADS);
        if (WAITS) {
            const State total =
                scan_totals(shared.warp_states[slot.place], lane, false, carry);
            u32 w[WORDS];
            to_words(total, w);
            if (MODE == LOOKBACK && lane.ours && walk.tile + 1 < P.tiles)
                publish<WORDS>(tile_slot(P, walk.chain, walk.tile, lane.channel), w, tag);
            if (lane.ours)
                put_states<1>(shared.tile_total[WAITS ? slot.place : 0], lane.channel, &total);
            arrive(TILE_READY + slot.place, TILE_READY_THREADS);
        } else {
            if (ENTERS && walk.tile == 0) carry = entering(P, walk.chain, lane);
            const bool known = ENTERS || walk.tile > 0;
            carry = scan_totals(shared.warp_states[slot.place], lane, known, carry);
            arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        }
        slot.advance();
        walk.next(P);
    }
}

// The prefixes of all tiles, without any other role (lookback_reference.cuh). In LOOKBACK it takes
// the place of group_lookback and wave_lookback, in CHAINED that of chained.
INLINE void reference_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                           Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    Walk walk;
    walk.start(P);
    RingCursor<RING> slot;
    RunningPrefix prefix;
    for (int it = 0; it < tiles; ++it) {
        auto slot_of = [&](int tile) { return tile_slot(P, walk.chain, tile, lane.channel); };
        if (MODE == CHAINED && walk.tile > 0) {
            prefix.start(false, identity());
            prefix.next = walk.tile - 1;  // holds the product of all before it
        } else if (MODE == CHAINED || it == 0) {
            prefix.start(ENTERS, ENTERS ? entering(P, walk.chain, lane) : identity());
        }
        prefix.extend(walk.tile, slot_of, tag, watchdog);
        wait_for(TILE_READY + slot.place, TILE_READY_THREADS);
        if (lane.ours) {
            if (MODE == CHAINED && walk.tile + 1 < P.tiles) {
                const State own = state_of(shared.tile_total[slot.place], lane.channel);
                u32 w[WORDS];
                to_words(join(prefix.exists, prefix.state, true, own), w);
                publish<WORDS>(tile_slot(P, walk.chain, walk.tile, lane.channel), w, tag);
            }
            for (int k = 0; k < WARPS; ++k) {
                u32 (*const before)[BLOCK_CHANNELS] = shared.warp_states[slot.place][k];
                const State state = state_of(before, lane.channel);
                const State whole = join(prefix.exists, prefix.state, k > 0, state);
                if (prefix.exists) put_states<1>(before, lane.channel, &whole);
            }
        }
        arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        slot.advance();
        walk.next(P);
    }
}

// The ordered product of `count` slots, `apart` bytes from one to the next. Every lane of the warp
// takes part, and polls GROUP_LOOKS slots together; lanes that share a channel poll different ones.
INLINE State collect(const Lane& lane, const char* slot, int count, i64 apart, u32 tag,
                     Watchdog& watchdog) {
    State product = identity();
    ROLLED for (int base = 0; base < count; base += CHANNEL_LANES * GROUP_LOOKS) {
        State found[GROUP_LOOKS];
        if constexpr (CHANNEL_LANES > 1) {
            const int first = base + lane.share * GROUP_LOOKS;
            const int mine = count - first, last = least(count - base, CHANNEL_LANES * GROUP_LOOKS) - 1;
            UNROLL for (int k = 0; k < GROUP_LOOKS; ++k) found[k] = identity();
            await_own_slots<WORDS>(
                found, first_bits(least(GROUP_LOOKS, mine)),
                [&](int k) { return slot + (first + k) * apart; }, tag, watchdog);
            State own = found[0];
            UNROLL for (int k = 1; k < GROUP_LOOKS; ++k) own = join(true, own, k < mine, found[k]);
            own = scan_shares(own, lane, last / GROUP_LOOKS + 1);
            own = shuffle_from(own, last / GROUP_LOOKS * BLOCK_CHANNELS + lane.channel);
            product = join(base > 0, product, true, own);
        } else {
            u32 missing = first_bits(least(GROUP_LOOKS, count - base));
            await_slots<WORDS>(
                found, missing, ~0u, [&](int k) { return slot + (base + k) * apart; }, tag,
                watchdog);
            UNROLL for (int k = 0; k < GROUP_LOOKS; ++k)
                product = join(base + k > 0, product, base + k < count, found[k]);
        }
    }
    return product;
}

INLINE void group_lookback_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                      Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    const int chain = block_index() % P.chains, rank = block_index() / P.chains;
    const int group = rank / P.radix, first = group * P.radix;
    const bool leads = rank + 1 == (first + P.radix < P.ranks ? first + P.radix : P.ranks);
    const i64 apart = (i64)P.chains * BLOCK_CHANNELS * SLOT_BYTES<WORDS>;
    RingCursor<RING> slot;
    ROLLED for (int it = 0; it < tiles; ++it) {
        const char* from = tile_slot(P, chain, it * P.ranks + first, lane.channel);
        State before = collect(lane, from, rank - first, apart, tag, watchdog);
        wait_for(TILE_READY + slot.place, TILE_READY_THREADS);
        if (leads && lane.ours) {
            const State own = state_of(shared.tile_total[WAITS ? slot.place : 0], lane.channel);
            const State total = join(rank > first, before, true, own);
            u32 w[WORDS];
            to_words(total, w);
            publish<WORDS>(group_slot(P, chain, it, group, lane.channel), w, tag);
        }
        if (lane.ours)
            put_states<1>(shared.group_prefix[MODE == LOOKBACK ? slot.place : 0], lane.channel,
                          &before);
        arrive(GROUP_READY + slot.place, GROUP_READY_THREADS);
        slot.advance();
    }
}

INLINE void wave_lookback_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                     Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    const int chain = block_index() % P.chains, rank = block_index() / P.chains;
    const int group = rank / P.radix;
    const bool in_group = rank % P.radix > 0;
    const i64 apart = (i64)P.chains * BLOCK_CHANNELS * SLOT_BYTES<WORDS>;
    State carry = ENTERS ? entering(P, chain, lane) : identity();
    RingCursor<RING> slot;
    ROLLED for (int it = 0; it < tiles; ++it) {
        const char* from = group_slot(P, chain, it, 0, lane.channel);
        const int count = it + 1 < tiles ? P.groups : group;
        const bool has_carry = ENTERS || it > 0;
        auto hand_over = [&]() {
            wait_for(GROUP_READY + slot.place, GROUP_READY_THREADS);
            const State group_prefix =
                state_of(shared.group_prefix[MODE == LOOKBACK ? slot.place : 0], lane.channel);
            const bool has_prefix = has_carry || group > 0;
            if ((has_prefix || in_group) && is_scanned(P, it * P.ranks + rank))
                apply_prefix(shared.warp_states[slot.place], lane,
                             join(has_prefix, carry, in_group, group_prefix));
            arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        };
        if (CHANNEL_LANES > 1) {
            const State earlier = collect(lane, from, group, apart, tag, watchdog);
            carry = join(has_carry, carry, group > 0, earlier);
            hand_over();
            const State others =
                collect(lane, from + group * apart, count - group, apart, tag, watchdog);
            carry = join(has_carry || group > 0, carry, count > group, others);
            slot.advance();
            continue;
        }
        if (group == 0) hand_over();
        ROLLED for (int base = 0; base < count; base += WAVE_LOOKS) {
            State found[WAVE_LOOKS];
            u32 missing = first_bits(least(WAVE_LOOKS, count - base));
            auto at = [&](int k) { return from + (base + k) * apart; };
            await_slots<WORDS>(found, missing, first_bits(least(WAVE_LOOKS, group - base)), at,
                               tag, watchdog);
            UNROLL for (int k = 0; k < WAVE_LOOKS; ++k)
                if (base + k < group)
                    carry = join(has_carry || base + k > 0, carry, true, found[k]);
            if (group > base && group <= base + WAVE_LOOKS) hand_over();
            await_slots<WORDS>(found, missing, ~0u, at, tag, watchdog);
            UNROLL for (int k = 0; k < WAVE_LOOKS; ++k)
                if (base + k >= group && base + k < count)
                    carry = join(has_carry || base + k > 0, carry, true, found[k]);
        }
        slot.advance();
    }
}

INLINE void chained_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                       Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    Walk walk;
    walk.start(P);
    RingCursor<RING> slot;
    ROLLED for (int it = 0; it < tiles; ++it) {
        const bool has_before = walk.tile > 0;
        State prefix = ENTERS && !has_before ? entering(P, walk.chain, lane) : identity();
        if (has_before) {
            const char* from = tile_slot(P, walk.chain, walk.tile - 1, lane.channel);
            prefix = collect(lane, from, 1, 0, tag, watchdog);
        }
        wait_for(TILE_READY + slot.place, TILE_READY_THREADS);
        if (lane.ours && walk.tile + 1 < P.tiles) {
            const State own = state_of(shared.tile_total[WAITS ? slot.place : 0], lane.channel);
            const State next = join(ENTERS || has_before, prefix, true, own);
            u32 w[WORDS];
            to_words(next, w);
            publish<WORDS>(tile_slot(P, walk.chain, walk.tile, lane.channel), w, tag);
        }
        if ((ENTERS || has_before) && is_scanned(P, walk.tile))
            apply_prefix(shared.warp_states[slot.place], lane, prefix);
        arrive(PREFIX_READY + slot.place, PREFIX_READY_THREADS);
        slot.advance();
        walk.next(P);
    }
}
