// The copies of a walk: tiles from memory to the ring in shared memory.
//
// A tile's row is what it holds of a leaf for one step. Leaves whose rows begin in memory at
// multiples of 16 bytes (WIDE) are copied in pieces of 16 bytes, which the lanes take in turn,
// whatever channels they hold. If each lane copied the numbers of its own channels, that would be
// four to eight times as many instructions, which then take longer than the steps do. Of other
// leaves a lane copies its own cell. Leaves that are the same at every step (STILL) are not copied
// (walk_reads.cuh).
#pragma once
#include "walk_place.cuh"

// A leaf's row in a stage of the ring: the cells of the 32 lanes, side by side.
template <class Leaf>
struct Row {
    typedef ::Cell<Leaf, CHANNELS> Cell;
    static constexpr int ELEMENT = Leaf::SCALARS * (int)sizeof(typename Leaf::Memory);  // bytes
    static constexpr int BYTES = 32 * (Leaf::WIDE ? Cell::BYTES : Cell::STRIDE);
    static constexpr int PIECES = BYTES / 16;  // of 16 bytes, in a WIDE row
    // Whether a row has fewer pieces than there are lanes, which then copy several rows at once.
    static constexpr bool SPREAD = Leaf::WIDE && PIECES < 32;
    static_assert(Leaf::STILL || ITEMS * BYTES <= Leaf::GROUP, "leaves do not overlap");
};

// The bytes from a step of leaf J to the next.
template <int J>
INLINE i64 step_of(const Params& P) {
    return REVERSE ? -P.input_step[J] : P.input_step[J];
}
// The address of leaf J at the tile's first step and first channel. A SHIFTED leaf is read one step
// later.
template <int J>
INLINE const char* address_of(const Params& P, const Place& place) {
    return P.input[J] + outer_offset(P.input_outer[J], P, place.row) +
           place.at(Input<J>::SHIFTED ? 1 : 0) * P.input_step[J] + place.channel * P.input_lane[J];
}
// The address that is k steps after `start`, the address of the tile's first step; null if the
// sequence has no such step.
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

// Copies of a leaf those steps and channels of a tile that exist; the others become zero.
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

// The tile that is loaded next.
struct Loading {
    Place place;
    // Of each leaf, the address of the next piece or cell that the lane copies. It goes on with the
    // copies of whole tiles. Tiles that are not whole do not use it (copy_some); no whole tile of the
    // same chain follows one.
    const char* from[INPUT_COUNT];

    // The addresses at `place`, where copies start.
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
    // Copies AHEAD steps of a whole tile, from its step `first` on. Called for each `first` in
    // turn; where they are not `wanted`, it copies nothing.
    INLINE_MEMBER void copy(const Params& P, char* stage, int first, bool wanted, int lane) {
#define COPY(J) if constexpr (!Input<J>::STILL) copy_leaf<J>(P, stage, first, wanted, lane);
        INPUTS(COPY)
#undef COPY
    }
    template <int J>
    INLINE_MEMBER void copy_leaf(const Params& P, char* stage, int first, bool wanted, int lane) {
        typedef Row<Input<J>> R;
        // LEAST rows have a piece for every lane. If those are more than AHEAD, one call copies
        // them, and the next calls find nothing to do.
        constexpr int LEAST = R::SPREAD ? 32 / R::PIECES : 1;
        constexpr int COUNT = AHEAD > LEAST ? AHEAD : LEAST < ITEMS ? LEAST : ITEMS;
        if (COUNT > AHEAD && first % COUNT != 0) return;
        const i64 step = step_of<J>(P);
        char* const to = stage + Input<J>::AT + first * R::BYTES;
        if constexpr (Input<J>::WIDE) {
            UNROLL for (int k = 0; k < COUNT * R::PIECES; k += 32)
                if (COUNT * R::PIECES % 32 == 0 || lane < COUNT * R::PIECES)
                    copy_async_16(to + 16 * (k + lane), from[J] + k / R::PIECES * step, wanted);
        } else if (wanted) {
            UNROLL for (int k = 0; k < COUNT; ++k)
                R::Cell::copy(to + k * R::BYTES + lane * R::Cell::STRIDE, from[J] + k * step,
                              R::Cell::BYTES);
        }
        from[J] += COUNT * step;
    }
    // Copies all of the tile, if there is one.
    INLINE_MEMBER void copy_tile(const Params& P, char* stage, int lane) {
        if (!place.exists(P)) return;
        if (place.whole(P) > 0) {
            ROLLED for (int first = 0; first < ITEMS; first += AHEAD) copy(P, stage, first, true, lane);
        } else {
#define COPY(J) if constexpr (!Input<J>::STILL) copy_some<J>(P, place, stage, lane);
            INPUTS(COPY)
#undef COPY
        }
    }
    // Goes on by so many tiles.
    INLINE_MEMBER void next(const Params& P, int lane, int tiles) {
        if (!place.exists(P)) return;
        place.next(P, tiles);
        if (place.step == 0 && place.exists(P)) find(P, lane);
    }
};
