// What a lane of a walk reads. The elements of a step come from a tile in shared memory. Leaves
// that are the same at every step (STILL) are read from memory once, at the start of a chain.
#pragma once
#include "walk_copies.cuh"

// The words of a lane's cell of leaf J at step `item` of the tile in `stage`, which begins `on`
// steps after `place`. Where they lie in memory matters for SKEWED cells only (cells.cuh).
template <int J>
INLINE void read_leaf(u32* words, const Params& P, const Place& place, i64 on, const char* stage,
                      int lane, int item) {
    typedef Row<Input<J>> R;
    const char* const row = stage + Input<J>::AT + item * R::BYTES;
    if constexpr (!Input<J>::WIDE) {
        const char* from = 0;
        if constexpr (R::Cell::SKEWED) {
            from = source_of<J>(P, place, address_of<J>(P, place), on + item);
            from = from != 0 && channels_of(P, place, lane) > 0
                       ? from + lane * CHANNELS * P.input_lane[J] : P.input[J];
        }
        R::Cell::read(words, row + lane * R::Cell::STRIDE, from);
    } else if constexpr (R::Cell::BYTES == 1) {
        words[0] = *(const uint8_t*)(row + lane);
    } else {
        load_in_order<R::Cell::BYTES>(words, row + R::Cell::BYTES * lane);
    }
}

// Writes scalar i of some words. Small ones must come in order: the first in a word clears the
// others.
template <class Memory>
INLINE void put_scalar(u32* words, int i, Memory x) {
    if constexpr (sizeof(Memory) >= 4) {
        __builtin_memcpy(words + i * (int)sizeof(Memory) / 4, &x, sizeof(Memory));
    } else {
        constexpr int PER_WORD = 4 / (int)sizeof(Memory), BITS = 8 * (int)sizeof(Memory);
        u32 bits = 0;
        __builtin_memcpy(&bits, &x, sizeof(Memory));
        if (i % PER_WORD == 0) words[i / PER_WORD] = 0;
        words[i / PER_WORD] |= bits << BITS * (i % PER_WORD);
    }
}
// A lane's elements of the STILL leaf J, and of all of them.
template <int J>
INLINE void read_still(u32* words, const Params& P, const Place& place, int lane) {
    typedef typename Input<J>::Memory Memory;
    constexpr int COUNT = Input<J>::SCALARS;
    const int channels = channels_of(P, place, lane);
    const char* const from = address_of<J>(P, place) + lane * CHANNELS * P.input_lane[J];
    UNROLL for (int v = 0; v < (Input<J>::ONE ? 1 : CHANNELS); ++v)
        UNROLL for (int i = 0; i < COUNT; ++i)
            put_scalar(words, v * COUNT + i,
                       v < channels ? ((const Memory*)(from + v * P.input_lane[J]))[i] : Memory());
}
INLINE void read_still(InputWords& words, const Params& P, const Place& place, int lane) {
#define READ(J) \
    if constexpr (Input<J>::STILL) read_still<J>(words.input##J, P, place, lane);
    INPUTS(READ)
#undef READ
}
// A lane's elements of a step, of all leaves.
INLINE void read_step(InputWords& words, const InputWords& still, const Params& P,
                      const Place& place, i64 on, const char* stage, int lane, int item) {
#define READ(J)                                                                  \
    if constexpr (Input<J>::STILL) {                                             \
        UNROLL for (int k = 0; k < Cell<Input<J>, CHANNELS>::WORDS; ++k)         \
            words.input##J[k] = still.input##J[k];                               \
    } else {                                                                     \
        read_leaf<J>(words.input##J, P, place, on, stage, lane, item);           \
    }
    INPUTS(READ)
#undef READ
}
