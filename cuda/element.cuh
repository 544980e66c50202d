// Elements in registers: exchanged between lanes, combined, scanned across a warp, read from slots.
//
// Nothing is padded. Elements beyond the end of a row are computed from whatever is in memory; they
// come after all elements that exist, so that no result depends on them.
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

// left ∘ right, or the one of them that exists.
INLINE State join(bool has_left, const State& left, bool has_right, const State& right) {
    const State both = combine(left, right);
    return has_left ? (has_right ? both : left) : right;
}

// The inclusive scan of one element per lane over lanes that are STEP apart, among the first WIDTH
// lanes.
template <int STEP, int WIDTH>
INLINE State warp_scan(State s, int lane) {
    UNROLL for (int d = STEP; d < WIDTH; d *= 2) {
        const State left = shuffle_up(s, d);
        const State both = combine(left, s);
        s = lane >= d ? both : s;
    }
    return s;
}

// The same; `before` is the product of the lanes before. Lanes below STEP have none.
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

// Reads the slots at(k) for each bit k of `missing`, and removes the bits of those that were ready.
// All are polled together, and again, until those of `urgent` were ready in every lane. The masks
// are the same in all lanes of the warp, and every lane takes part.
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
