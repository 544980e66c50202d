// Waits for slots of other blocks: for one (the reference), or for several together (the kernels).
#pragma once
#include "status_and_watchdog.cuh"

// Polls one slot until it is ready.
template <int WORDS>
INLINE void await_slot(const char* slot, u32* payload, u32 tag, Watchdog& watchdog) {
    Look<WORDS> look;
    do look.load(slot);
    while (!look.ready(payload, tag) && !watchdog.stops());
    watchdog.found();
}

// Reads the slots at(k) for each bit k of `missing`, and removes the bits of those that were ready.
// All are polled together, and again, until those of `urgent` were ready in every lane. The masks
// are the same in all lanes of the warp, and every lane takes part. `read_words` makes an Element.
template <int WORDS, class Element, int COUNT, class At>
INLINE void await_slots(Element (&found)[COUNT], u32& missing, u32 urgent, At at, u32 tag,
                        Watchdog& watchdog) {
    while ((missing & urgent) != 0) {
        Look<WORDS> look[COUNT];
        UNROLL for (int k = 0; k < COUNT; ++k)
            if (missing >> k & 1) look[k].load(at(k));
        UNROLL for (int k = 0; k < COUNT; ++k) {
            u32 words[WORDS];
            if ((missing >> k & 1) && all_lanes(look[k].ready(words, tag)))
                read_words(words, found[k]), missing &= ~(1u << k);
        }
        if (missing != 0 && all_lanes(watchdog.stops())) break;
    }
    watchdog.found();
}

// Reads the slots at(k) for each bit k of `missing`, which differ from lane to lane. All lanes of the
// warp take part, until every one has what it waits for.
template <int WORDS, class Element, int COUNT, class At>
INLINE void await_own_slots(Element (&found)[COUNT], u32 missing, At at, u32 tag,
                            Watchdog& watchdog) {
    ROLLED while (!all_lanes(missing == 0)) {
        Look<WORDS> look[COUNT];
        UNROLL for (int k = 0; k < COUNT; ++k)
            if (missing >> k & 1) look[k].load(at(k));
        UNROLL for (int k = 0; k < COUNT; ++k) {
            u32 words[WORDS];
            if ((missing >> k & 1) && look[k].ready(words, tag))
                read_words(words, found[k]), missing &= ~(1u << k);
        }
        if (all_lanes(missing == 0 || watchdog.stops())) break;
    }
    watchdog.found();
}
