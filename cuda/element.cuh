// Elements in registers: exchanged between lanes, combined, scanned across a warp.
//
// Nothing is padded. Elements beyond the end of a row are computed from whatever is in memory; they
// come after all elements that exist, so that no result depends on them.
#pragma once

// from_words for the templates of wait_for_slots.cuh, which are defined before State.
INLINE void read_words(const u32* words, State& s) { s = from_words(words); }

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
