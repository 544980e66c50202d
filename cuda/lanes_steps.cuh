// Of lanes: a thread's copies of a tile, and its steps of one: scan, store, and load into the same
// cells. Used by lanes_scan.cuh and lanes_walk.cuh.
#pragma once
#include "steps.cuh"
#include "lanes_memory.cuh"
#include "lanes_boundaries.cuh"

// ---- load: start the copies of a tile ----

// How many tiles are loaded at once at the start. Where blocks wait for each other, the others
// follow when the first has arrived: it would arrive late if all were in flight.
constexpr int FILLED = WAITS ? 2 : STAGES;

// The copies of a tile of the block, if it `exists`.
INLINE void load_tile(const Params& P, const Thread& thread, char* stage, const Walk& walk,
                      bool exists) {
    if (exists) {
        Cells cells;
        Addresses from;
        cells.find(P, walk, thread);
        find_addresses(from, P, cells);
        if (is_whole(P, walk)) copy_tile<true>(P, cells, from, thread, stage);
        else copy_tile<false>(P, cells, from, thread, stage);
    } else {
        UNROLL for (int part = 0; part < PARTS; ++part) copies_commit();
    }
}
INLINE void load_first_tiles(const Params& P, const Thread& thread, char* ring, Walk& loading,
                             int tiles) {
    ROLLED for (int k = 0; k < STAGES; ++k) {
        if (FILLED < STAGES && k == FILLED) copies_wait<(FILLED - 1) * PARTS>();
        load_tile(P, thread, ring + k * STAGE_BYTES, loading, k < tiles);
        loading.next(P);
    }
}

// ---- scan, store, and load into the same cells, step by step ----

// A tile that is scanned: where its outputs go, and the tile that takes its place in the ring.
struct Move {
    Cells cells, next;
    ThreadBoundaries boundaries;
    Addresses from, later;
    char* to[OUTPUT_COUNT + 1];  // a reduction has no outputs
    i64 to_step[OUTPUT_COUNT + 1];

    INLINE_MEMBER void start(const Params& P, const Walk& walk, const Walk& loading,
                             const Thread& thread, bool refill) {
        cells.find(P, walk, thread);
        if (ANY_SKEWED) find_addresses(from, P, cells);
        if (refill) {
            next.find(P, loading, thread);
            find_addresses(later, P, next);
        }
        const i64 t = REVERSE ? P.length - 1 - cells.step : cells.step;
#define AIM(J)                                                                                   \
    to[J] = P.output[J] + outer_offset(P.output_outer[J], P, cells.row) + t * P.output_step[J] + \
            cells.channel * P.output_lane[J];                                                    \
    to_step[J] = REVERSE ? -P.output_step[J] : P.output_step[J];
        OUTPUTS(AIM)
#undef AIM
    }
};

template <bool WHOLE>
INLINE void scan(const Params& P, const Cells& cells, const ThreadBoundaries& boundaries,
                 State (&carry)[CHANNELS], const InputWords& words, int i, bool first,
                 OutputValues& values) {
    const int channels = WHOLE ? CHANNELS : cells.channels;
    UNROLL for (int v = 0; v < CHANNELS; ++v) {
        const bool last = SEGMENTED ? boundaries.ends(i) && (WHOLE || i < cells.left)
                                    : (!WHOLE || i + 1 == ITEMS) && i + 1 == cells.left;
        const Position at = boundaries.position(cells, i, v, v < channels, first, last);
        take_step(P, values, v, raw_of(words, v), carry[v], at);
    }
}
template <bool WHOLE>
INLINE void store(Move& move, int i, const OutputValues& values) {
    const int channels = WHOLE ? CHANNELS : move.cells.channels;
    if (WHOLE || i < move.cells.left) {
#define STORE(J)                                                                         \
    {                                                                                    \
        typedef Cell<Output<J>, CHANNELS> C;                                             \
        u32 packed[C::WORDS];                                                            \
        pack<Output<J>::Memory, Output<J>::Value, C::SCALARS>(packed, values.output##J); \
        store_cell<C::BYTES, Output<J>::ALIGN>(                                          \
            move.to[J], packed,                                                          \
            channels * Output<J>::SCALARS * (int)sizeof(Output<J>::Memory));             \
    }
        OUTPUTS(STORE)
#undef STORE
    }
    UNROLL for (int j = 0; j < OUTPUT_COUNT; ++j) move.to[j] += move.to_step[j];
}

template <bool WHOLE>
INLINE void load(const Params& P, const Thread& thread, Move& move, char* stage, int i, bool refill,
                 bool commits) {
    if (refill) copy_item<WHOLE>(P, move.next, move.later, thread, stage, i);
    if (commits && part_of(i + 1) != part_of(i)) copies_commit();
}

// All steps of a tile. The words of a step are read before the step before it is computed. WHOLE:
// all cells of the tile exist, and of the one that is loaded.
template <bool WHOLE>
INLINE void scan_tile(const Params& P, const Thread& thread, Move& move, State (&carry)[CHANNELS],
                      char* stage, bool begins, bool refill, bool commits) {
    InputWords words;
    read_item(words, P, move.cells, move.from, thread, stage, 0);
    auto step = [&](int i) {
        const InputWords now = words;
        if (i + 1 < ITEMS) read_item(words, P, move.cells, move.from, thread, stage, i + 1);
        OutputValues values;
        scan<WHOLE>(P, move.cells, move.boundaries, carry, now, i, begins && i == 0, values);
        store<WHOLE>(move, i, values);
        load<WHOLE>(P, thread, move, stage, i, refill, commits);
    };
    if constexpr (WHOLE) {
        UNROLL_BY(UNROLLED) for (int i = 0; i < ITEMS; ++i) step(i);
    } else {
        ROLLED for (int i = 0; i < ITEMS; ++i) step(i);
    }
}
