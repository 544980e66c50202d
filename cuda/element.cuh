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

// The states in slots first, first + apart, … of which `open` says that they are wanted. Several
// looks are under way at a time, and all that were too early are made again together, until the
// first `urgent` of them are there. Every lane of the warp takes part.
template <int COUNT>
INLINE void await_slots(State (&found)[COUNT], bool (&open)[COUNT], int urgent, const char* first,
                        i64 apart, u32 tag, Watchdog& watchdog) {
    while (true) {
        Look<WORDS> look[COUNT];
        bool all = true;
        UNROLL for (int k = 0; k < COUNT; ++k)
            if (open[k]) look[k].load(first + k * apart);
        UNROLL for (int k = 0; k < COUNT; ++k)
            if (open[k]) {
                u32 w[WORDS];
                open[k] = !look[k].ready(w, tag);
                found[k] = from_words(w);
                all = all && !(open[k] && k < urgent);
            }
        if (all_lanes(all)) break;
        if (all_lanes(watchdog.stops())) break;
    }
    watchdog.found();
}
