// Elements in registers: as words, between lanes, and joined where one of two may be missing.
//
// Positions, not padding, say which elements exist: those beyond the end of a row come after all
// that exist, so that nothing computed from them is ever used.
#pragma once

INLINE State shuffle_up(const State& s, int lanes) {
    u32 w[WORDS];
    to_words(s, w);
    UNROLL for (int k = 0; k < WORDS; ++k) w[k] = shuffle_up(w[k], lanes);
    return from_words(w);
}
INLINE State shuffle_down(const State& s, int lanes) {
    u32 w[WORDS];
    to_words(s, w);
    UNROLL for (int k = 0; k < WORDS; ++k) w[k] = shuffle_down(w[k], lanes);
    return from_words(w);
}
INLINE State shuffle_from(const State& s, int lane) {
    u32 w[WORDS];
    to_words(s, w);
    UNROLL for (int k = 0; k < WORDS; ++k) w[k] = shuffle_from(w[k], lane);
    return from_words(w);
}

// left ∘ right, of which one may be missing.
INLINE State join(bool has_left, const State& left, bool has_right, const State& right) {
    const State both = combine(left, right);
    return has_left ? (has_right ? both : left) : right;
}

// The inclusive scan of one element per lane, lanes `step` apart, over groups of `width` lanes.
template <int STEP, int WIDTH>
INLINE State warp_scan(State s, int lane) {
    UNROLL for (int d = STEP; d < WIDTH; d *= 2) {
        const State left = shuffle_up(s, d);
        const State both = combine(left, s);
        s = lane >= d ? both : s;
    }
    return s;
}

// The same, and the elements before each lane's, which the lanes below STEP do not have.
template <int STEP>
INLINE void warp_scan(State& s, State& before, int lane) {
    if constexpr (STEP == 16) {
        before = shuffle_up(s, STEP);
        const State both = combine(before, s);
        s = lane >= STEP ? both : s;
    } else if constexpr (STEP < 16) {
        s = warp_scan<STEP, 32>(s, lane);
        before = shuffle_up(s, STEP);
    }
}

INLINE u32 first_bits(int count) {
    return count <= 0 ? 0 : count < 32 ? (1u << count) - 1 : ~0u;
}

// The states in the slots at(0), at(1), … of which `missing` has a bit. They are looked at together;
// those that were not ready in every lane are looked at again, until those of `urgent` are there.
// The masks are the same in all lanes of the warp, and every lane takes part.
template <int COUNT, class At>
INLINE void await_slots(State (&found)[COUNT], u32& missing, u32 urgent, At at, u32 tag,
                        Watchdog& watchdog) {
    while ((missing & urgent) != 0) {
        Look<WORDS> look[COUNT];
        UNROLL for (int k = 0; k < COUNT; ++k)
            if (missing >> k & 1) look[k].load(at(k));
        UNROLL for (int k = 0; k < COUNT; ++k) {
            u32 words[WORDS];
            if ((missing >> k & 1) && all_lanes(look[k].ready(words, tag)))
                found[k] = from_words(words), missing &= ~(1u << k);
        }
        if (missing != 0 && all_lanes(watchdog.stops())) break;
    }
    watchdog.found();
}
