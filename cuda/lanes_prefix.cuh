// The roles of lanes_scan.cuh that find prefixes: fold, near, far, relay. A lane is a channel.
#pragma once

// A channel's place in a role whose lanes are channels.
struct Lane {
    int channel;  // within the block
    bool ours;
    INLINE_MEMBER void start(int warp) {
        channel = warp % FOLDERS * 32 + thread_index() % 32;
        ours = channel < BLOCK_CHANNELS;
        if (!ours) channel = 0;
    }
};

INLINE State state_of(const u32 (*from)[BLOCK_CHANNELS], int channel) {
    State s;
    get_states<1>(&s, from, channel);
    return s;
}

// The carry that enters a chain, for one channel of it.
INLINE State entering(const Params& P, int chain, const Lane& lane) {
    const int m = chain / P.channel_blocks;
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

// The product of the warps' totals; what stands before each takes its place. Narrow states are all
// loaded first.
INLINE State fold_warps(u32 (*warp_total)[WORDS][BLOCK_CHANNELS], const Lane& lane) {
    constexpr int TOGETHER = WORDS <= 3 ? WARPS : 2;
    State total;
    UNROLL for (int base = 0; base < WARPS; base += TOGETHER) {
        State part[TOGETHER];
        UNROLL for (int k = 0; k < TOGETHER; ++k) part[k] = state_of(warp_total[base + k], lane.channel);
        UNROLL for (int k = 0; k < TOGETHER; ++k) {
            const bool first = base + k == 0;
            if (!first && lane.ours) put_states<1>(warp_total[base + k], lane.channel, &total);
            total = first ? part[k] : combine(total, part[k]);
        }
    }
    return total;
}

INLINE void fold_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag) {
    Lane lane;
    lane.start(warp);
    Walk walk;
    walk.start(P);
    State carry = identity();
    ROLLED for (int it = 0; it < tiles; ++it) {
        const int parity = it & 1;
        wait_for(READY + parity, READY_THREADS);
        State total = fold_warps(shared.warp_total[parity], lane);
        if (WAITS) {
            u32 w[WORDS];
            to_words(total, w);
            if (MODE == AHEAD && lane.ours && walk.tile + 1 < P.tiles)
                publish<WORDS>(tile_slot(P, walk.chain, walk.tile, lane.channel), w, tag);
            if (lane.ours)
                put_states<1>(shared.tile_total[WAITS ? parity : 0], lane.channel, &total);
            arrive(TOTAL + parity, TOTAL_THREADS);
            arrive(PREFIX + parity, PREFIX_THREADS);
        } else {
            if (ENTERS && walk.tile == 0) carry = entering(P, walk.chain, lane);
            if (lane.ours) put_states<1>(shared.prefix[parity], lane.channel, &carry);
            arrive(PREFIX + parity, PREFIX_THREADS);
            carry = !ENTERS && walk.tile == 0 ? total : combine(carry, total);
        }
        walk.next(P);
    }
}

// The ordered product of the aggregates in slots first, first + 1, … up to `end`, `apart` bytes from
// one another; several looks are under way at a time. Every lane of the warp takes part.
INLINE State collect(const char* slot, int first, int end, i64 apart, bool ours, u32 tag,
                     Watchdog& watchdog, bool has_left, State left) {
    ROLLED for (int base = first; base < end; base += LOOKS) {
        State found[LOOKS];
        bool open[LOOKS];
        UNROLL for (int k = 0; k < LOOKS; ++k) open[k] = ours && base + k < end;
        await_slots(found, open, slot + base * apart, apart, tag, watchdog);
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            const bool exists = base + k < end;
            left = exists ? (has_left ? combine(left, found[k]) : found[k]) : left;
            has_left = has_left || exists;
        }
    }
    return left;
}

INLINE void near_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                      Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    const int chain = block_index() % P.chains, rank = block_index() / P.chains;
    const int group = rank / P.radix, first = group * P.radix;
    const bool leads = rank + 1 == (first + P.radix < P.ranks ? first + P.radix : P.ranks);
    const i64 apart = (i64)P.chains * BLOCK_CHANNELS * SLOT_BYTES<WORDS>;
    ROLLED for (int it = 0; it < tiles; ++it) {
        const int parity = it & 1, wave = it * P.ranks;
        const char* slot = tile_slot(P, chain, wave + first, lane.channel);
        State before =
            collect(slot, 0, rank - first, apart, lane.ours, tag, watchdog, false, identity());
        wait_for(TOTAL + parity, TOTAL_THREADS);
        if (leads && lane.ours) {
            const State own = state_of(shared.tile_total[WAITS ? parity : 0], lane.channel);
            const State total = join(rank > first, before, true, own);
            u32 w[WORDS];
            to_words(total, w);
            publish<WORDS>(group_slot(P, chain, it, group, lane.channel), w, tag);
        }
        if (lane.ours)
            put_states<1>(shared.near_total[MODE == AHEAD ? parity : 0], lane.channel, &before);
        arrive(PREFIX + parity, PREFIX_THREADS);
    }
}

INLINE void far_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                     Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    const int chain = block_index() % P.chains, rank = block_index() / P.chains;
    const int group = rank / P.radix;
    const i64 apart = (i64)P.chains * BLOCK_CHANNELS * SLOT_BYTES<WORDS>;
    State carry = ENTERS ? entering(P, chain, lane) : identity();
    ROLLED for (int it = 0; it < tiles; ++it) {
        const int parity = it & 1;
        const char* slot = group_slot(P, chain, it, 0, lane.channel);
        carry = collect(slot, 0, group, apart, lane.ours, tag, watchdog, ENTERS || it > 0, carry);
        wait_for(TOTAL + parity, TOTAL_THREADS);
        if (lane.ours) put_states<1>(shared.prefix[parity], lane.channel, &carry);
        arrive(PREFIX + parity, PREFIX_THREADS);
        if (it + 1 < tiles)
            carry = collect(slot, group, P.groups, apart, lane.ours, tag, watchdog,
                            ENTERS || it > 0 || group > 0, carry);
    }
}

INLINE void relay_role(const Params& P, Shared& shared, int warp, int tiles, u32 tag,
                       Watchdog& watchdog) {
    Lane lane;
    lane.start(warp);
    Walk walk;
    walk.start(P);
    ROLLED for (int it = 0; it < tiles; ++it) {
        const int parity = it & 1;
        const bool has_before = walk.tile > 0;
        State prefix = ENTERS && !has_before ? entering(P, walk.chain, lane) : identity();
        if (has_before) {
            const char* slot = tile_slot(P, walk.chain, walk.tile - 1, lane.channel);
            prefix = collect(slot, 0, 1, 0, lane.ours, tag, watchdog, false, prefix);
        }
        wait_for(TOTAL + parity, TOTAL_THREADS);
        if (lane.ours && walk.tile + 1 < P.tiles) {
            const State own = state_of(shared.tile_total[WAITS ? parity : 0], lane.channel);
            const State next = join(ENTERS || has_before, prefix, true, own);
            u32 w[WORDS];
            to_words(next, w);
            publish<WORDS>(tile_slot(P, walk.chain, walk.tile, lane.channel), w, tag);
        }
        if (lane.ours) put_states<1>(shared.prefix[parity], lane.channel, &prefix);
        arrive(PREFIX + parity, PREFIX_THREADS);
        walk.next(P);
    }
}
