// A place in a ring of SIZE places, and which turn of the ring it belongs to.
//
// Gates are waited for by the parity of their phase (device.cuh). A gate of a ring has one phase
// per turn, so the parity of the turn is the parity to wait for.
#pragma once

template <int SIZE>
struct RingCursor {
    int place = 0;
    u32 parity = 0;  // of the turn: 0 in the first
    INLINE_MEMBER void advance() {
        if (++place == SIZE) place = 0, parity ^= 1;
    }
    // `steps`: at most SIZE.
    INLINE_MEMBER void advance(int steps) {
        place += steps;
        if (place >= SIZE) place -= SIZE, parity ^= 1;
    }
    // The cursor after `steps` steps.
    static INLINE_MEMBER RingCursor after(int steps) {
        RingCursor cursor;
        cursor.place = steps % SIZE, cursor.parity = (u32)(steps / SIZE) & 1;
        return cursor;
    }
};
