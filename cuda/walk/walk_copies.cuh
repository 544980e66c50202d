// The copies of a walk: tiles from memory to the ring in shared memory.
//
// A leaf that is the same at every step (STILL) is not copied: a lane reads it at the start.
#pragma once
#include "walk_place.cuh"

// How a leaf's cells of a step lie in a stage.
template <class Leaf>
struct Row {
    typedef ::Cell<Leaf, CHANNELS> Cell;
    static constexpr int ELEMENT = Leaf::SCALARS * (int)sizeof(typename Leaf::Memory);
    static constexpr int BYTES = 32 * (Leaf::WIDE ? Cell::BYTES : Cell::STRIDE);
    static constexpr int PIECES = BYTES / 16;  // of a WIDE row
    static constexpr bool SPREAD = Leaf::WIDE && PIECES < 32;  // several rows are copied at once
    static_assert(Leaf::STILL || ITEMS * BYTES <= Leaf::GROUP, "leaves do not overlap");
};

template <int J>
INLINE i64 step_of(const Params& P) {
    return REVERSE ? -P.input_step[J] : P.input_step[J];
}
// The address of leaf J at the tile's first step and first channel.
template <int J>
INLINE const char* address_of(const Params& P, const Place& place) {
    return P.input[J] + outer_offset(P.input_outer[J], P, place.row) +
           place.at(Input<J>::SHIFTED ? 1 : 0) * P.input_step[J] + place.channel * P.input_lane[J];
}
// The address of step k, if the address of the tile's first step is `start`; null where nothing is.
template <int J>
INLINE const char* source_of(const Params& P, const Place& place, const char* start, i64 k) {
    const i64 step = place.step + k + (Input<J>::SHIFTED ? 1 : 0);
    return step < place.length ? start + k * step_of<J>(P) : 0;
}
// How many of a lane's channels exist.
INLINE int channels_of(const Params& P, const Place& place, int lane) {
    const i64 left = P.channels - place.channel - lane * CHANNELS;
    return left < 0 ? 0 : left < CHANNELS ? (int)left : CHANNELS;
}

// Some steps of a leaf, of a tile of which not all steps or channels need exist. `start` is the
// address of the tile's first step.
template <int J>
INLINE void copy_some(const Params& P, const Place& place, char* stage, int lane) {
    typedef Row<Input<J>> R;
    const i64 channels = P.channels - place.channel;
    char* const to = stage + Input<J>::AT;
    const char* const start = address_of<J>(P, place);
    if constexpr (Input<J>::WIDE) {
        ROLLED for (int piece = lane; piece < ITEMS * R::PIECES; piece += 32) {
            const int byte = 16 * (piece % R::PIECES);
            const char* from = source_of<J>(P, place, start, piece / R::PIECES);
            const i64 rest = channels * R::ELEMENT - byte;
            const int valid = from == 0 || rest < 0 ? 0 : rest < 16 ? (int)rest : 16;
            copy_async_part(to + 16 * piece, valid > 0 ? from + byte : P.input[J], valid);
        }
    } else {
        ROLLED for (int item = 0; item < ITEMS; ++item) {
            const char* from = source_of<J>(P, place, start, item);
            const int count = from == 0 ? 0 : channels_of(P, place, lane);
            R::Cell::copy(to + item * R::BYTES + lane * R::Cell::STRIDE,
                          count > 0 ? from + lane * CHANNELS * P.input_lane[J] : P.input[J],
                          count == 0 ? 0 : Input<J>::ONE ? R::ELEMENT : count * R::ELEMENT);
        }
    }
}

// The tile that is loaded: where a lane's first piece of each leaf comes from.
struct Loading {
    Place place;
    const char* from[INPUT_COUNT];

    INLINE_MEMBER void find(const Params& P, int lane) {
#define FIND(J)                                                                        \
    if constexpr (!Input<J>::STILL) {                                                  \
        typedef Row<Input<J>> R;                                                       \
        from[J] = address_of<J>(P, place);                                             \
        if constexpr (R::SPREAD)                                                       \
            from[J] += lane / R::PIECES * step_of<J>(P) + 16 * (lane % R::PIECES);     \
        else from[J] += lane * (Input<J>::WIDE ? 16 : CHANNELS * P.input_lane[J]);     \
    }
        INPUTS(FIND)
#undef FIND
    }
    // AHEAD steps of a tile of which all exist, from step `first` on; goes on to the next steps.
    INLINE_MEMBER void copy(const Params& P, char* stage, int first, int lane) {
#define COPY(J) if constexpr (!Input<J>::STILL) copy_leaf<J>(P, stage, first, lane);
        INPUTS(COPY)
#undef COPY
    }
    template <int J>
    INLINE_MEMBER void copy_leaf(const Params& P, char* stage, int first, int lane) {
        typedef Row<Input<J>> R;
        // So many steps at a time, that every lane has a piece if there are enough.
        constexpr int LEAST = R::SPREAD ? 32 / R::PIECES : 1;
        constexpr int COUNT = AHEAD > LEAST ? AHEAD : LEAST < ITEMS ? LEAST : ITEMS;
        if (COUNT > AHEAD && first % COUNT != 0) return;
        const i64 step = step_of<J>(P);
        char* const to = stage + Input<J>::AT + first * R::BYTES;
        if constexpr (Input<J>::WIDE) {
            UNROLL for (int k = 0; k < COUNT * R::PIECES; k += 32)
                if (COUNT * R::PIECES % 32 == 0 || lane < COUNT * R::PIECES)
                    copy_async_part(to + 16 * (k + lane), from[J] + k / R::PIECES * step, 16);
        } else {
            UNROLL for (int k = 0; k < COUNT; ++k)
                R::Cell::copy(to + k * R::BYTES + lane * R::Cell::STRIDE, from[J] + k * step,
                              R::Cell::BYTES);
        }
        from[J] += COUNT * step;
    }
    // All of a tile, if there is one.
    INLINE_MEMBER void copy_tile(const Params& P, char* stage, int lane) {
        if (!place.exists(P)) return;
        if (place.whole(P) > 0) {
            ROLLED for (int first = 0; first < ITEMS; first += AHEAD) copy(P, stage, first, lane);
        } else {
#define COPY(J) if constexpr (!Input<J>::STILL) copy_some<J>(P, place, stage, lane);
            INPUTS(COPY)
#undef COPY
        }
    }
    INLINE_MEMBER void next(const Params& P, int lane, int tiles) {
        if (!place.exists(P)) return;
        place.next(P, tiles);
        if (place.step == 0 && place.exists(P)) find(P, lane);
    }
};
