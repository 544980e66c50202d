// A walk along some channels, tile by tile: of whole chains (lanes_walk.cuh) or of parts of them
// (parts_walk.cuh).
//
// A block is one warp. It takes BLOCK_CHANNELS adjacent channels of a row, or of a packed sequence;
// each lane walks along CHANNELS of them and keeps their states in registers.
//
// A tile is ITEMS steps of these channels (walk_place.cuh). STAGES of them are in a ring in shared
// memory: one is walked while the others are copied (walk_copies.cuh).
//
// A state waits for the one before it, and that wait is what a step costs. So a step is two
// functions (step.py): `ready_of` computes all that does not depend on the state that the step
// before leaves, `advance` the rest. AHEAD steps are prepared together, by `ready_of`, while the
// AHEAD steps before them are taken, by `advance`.
#pragma once
#include "walk_reads.cuh"

// Where a lane writes its next outputs, and the bytes from there to those of the next step.
struct Outputs {
    char* to[OUTPUT_COUNT + 1];  // never empty, although a reduction has no outputs
    i64 step[OUTPUT_COUNT + 1];

    INLINE_MEMBER void find(const Params& P, const Place& place, int lane) {
#define AIM(J)                                                                              \
    to[J] = P.output[J] + outer_offset(P.output_outer[J], P, place.row) +                   \
            place.at(0) * P.output_step[J] +                                                \
            (place.channel + lane * CHANNELS) * P.output_lane[J];                           \
    step[J] = REVERSE ? -P.output_step[J] : P.output_step[J];
        OUTPUTS(AIM)
#undef AIM
    }
    INLINE_MEMBER void store(const OutputValues& values, int channels) const {
#define STORE(J)                                                                         \
    {                                                                                    \
        typedef Cell<Output<J>, CHANNELS> C;                                             \
        u32 packed[C::WORDS];                                                            \
        pack<Output<J>::Memory, Output<J>::Value, C::SCALARS>(packed, values.output##J); \
        store_cell<C::BYTES, Output<J>::ALIGN>(to[J], packed,                            \
                                               channels * (C::BYTES / CHANNELS));        \
    }
        OUTPUTS(STORE)
#undef STORE
    }
    INLINE_MEMBER void advance() {
        UNROLL for (int j = 0; j < OUTPUT_COUNT; ++j) to[j] += step[j];
    }
};

// What is done with the states on the way, without a halt: nothing.
struct NoMarks {
    // Called after so many more steps. It may set the sums in `carry` to zero.
    INLINE_MEMBER void pass(State* carry, int steps) const { (void)carry, (void)steps; }
};

// Whether the walker stores the state after the last step.
constexpr bool STORES_FINAL = HAS_FINAL && !IN_PARTS;

// The walk of a lane along its channels.
struct Walker {
    Place place;               // the tile that is walked
    i64 left;                  // the steps from its first one to the end of the walk
    int channels;              // how many of the lane's channels exist
    InputWords still;          // the elements of STILL leaves
    Outputs outputs;
    State carry[CHANNELS];     // the state after the last step that was taken
    int lane;
    RingCursor<STAGES> stage;  // where the tile lies in the ring

    INLINE_MEMBER i64 channel(int v) const { return place.channel + lane * CHANNELS + v; }
    // Starts a chain.
    INLINE_MEMBER void enter(const Params& P) {
        channels = channels_of(P, place, lane);
        restart(P, carry);
        read_still(still, P, place, lane);
        outputs.find(P, place, lane);
    }
    // The states before the first step of a chain.
    INLINE_MEMBER void restart(const Params& P, State* states) const {
        UNROLL for (int v = 0; v < CHANNELS; ++v)
            states[v] = v < channels ? load_init(P, place.row, channel(v), place.sequence)
                                     : identity();
    }
    // Prepares COUNT steps of a tile, from its step `first` on; the tile begins `on` steps after
    // `place`. `ends`: whether the last of them is the last step of the sequence. Of the carry
    // `ready_of` reads the parameters alone, which no step changes.
    template <int COUNT>
    INLINE_MEMBER void prepare(Ready (&ready)[COUNT][CHANNELS], const Params& P, i64 on,
                               const char* tile, int first, bool ends) const {
        InputWords words[COUNT];
        UNROLL for (int k = 0; k < COUNT; ++k)
            read_step(words[k], still, P, place, on, tile, lane, first + k);
        UNROLL for (int k = 0; k < COUNT; ++k)
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                const bool last = k + 1 == COUNT && ends;
                Raw x = raw_of(words[k], v);
                if (REPLACES_BOUNDARY && last && v < channels)
                    replace_boundary(x, P, place.row, channel(v), place.sequence);
                ready[k][v] = ready_of(carry[v], x, last);
            }
    }
    // Takes COUNT steps that are prepared: carries, outputs and, where it `ends`, finals.
    // `existing`: how many of the lane's channels exist.
    template <int COUNT>
    INLINE_MEMBER void take(const Params& P, const Ready (&ready)[COUNT][CHANNELS], int existing,
                            bool ends) {
        UNROLL for (int k = 0; k < COUNT; ++k) {
            OutputValues values;
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                Out out;
                carry[v] = advance(carry[v], ready[k][v], out);
                put_outputs(values, v, out);
            }
            if (existing > 0) outputs.store(values, existing);
            outputs.advance();
        }
        if (STORES_FINAL && ends)
            UNROLL for (int v = 0; v < CHANNELS; ++v)
                if (v < existing)
                    store_final(P, place.row, channel(v), place.sequence, carry[v]);
    }
    // Walks along one tile that may end at any step: its steps are prepared and taken one by one.
    template <class Marks>
    INLINE_MEMBER void tile(const Params& P, const char* ring, Marks& marks) {
        const int steps = left < ITEMS ? (int)left : ITEMS;
        ROLLED for (int first = 0; first < steps; ++first) {
            Ready ready[1][CHANNELS];
            const bool ends = first + 1 == left && place.to_the_last();
            prepare(ready, P, 0, ring + stage.place * STAGE_BYTES, first, ends);
            take(P, ready, channels, ends);
        }
        marks.pass(carry, steps);
    }
    // Walks along so many tiles, and loads as many others, if it `loads`. All of them are whole
    // (`Place::whole`), so that there is no branch inside a tile. Steps are prepared AHEAD steps
    // before they are taken: their instructions do not depend on each other, and the compiler
    // interleaves them. After the last tile AHEAD steps too many are prepared, from whatever is in
    // the ring; nobody takes them.
    template <class Marks>
    INLINE_MEMBER void run(const Params& P, char* ring, int tiles, bool loads, Loading& loading,
                           RingCursor<STAGES>& filled, Marks& marks) {
        static_assert(ITEMS % AHEAD == 0, "whole groups of steps");
        Ready next[AHEAD][CHANNELS];
        arrive_at<STAGES - 2>();
        prepare(next, P, 0, ring + stage.place * STAGE_BYTES, 0, false);
        i64 on = 0;
        ROLLED for (int k = 0; k < tiles; ++k) {
            const char* const tile = ring + stage.place * STAGE_BYTES;
            char* const later = ring + filled.place * STAGE_BYTES;
            stage.advance(), filled.advance();
            const char* const following = ring + stage.place * STAGE_BYTES;
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                Ready now[1][CHANNELS], then[1][CHANNELS];
                UNROLL for (int v = 0; v < CHANNELS; ++v) now[0][v] = next[i % AHEAD][v];
                if (i % AHEAD == 0) loading.copy(P, later, i, loads, lane);
                if (i + AHEAD == ITEMS) arrive_at<STAGES - 3>();
                if (i + AHEAD < ITEMS) prepare(then, P, on, tile, i + AHEAD, false);
                else prepare(then, P, on + ITEMS, following, i + AHEAD - ITEMS, false);
                UNROLL for (int v = 0; v < CHANNELS; ++v) next[i % AHEAD][v] = then[0][v];
                take(P, now, CHANNELS, false);
            }
            copies_commit();
            on += ITEMS;
            marks.pass(carry, ITEMS);
        }
        if (STORES_FINAL && LAST_ALIKE && on == left)
            UNROLL for (int v = 0; v < CHANNELS; ++v)
                store_final(P, place.row, channel(v), place.sequence, carry[v]);
    }
    // Waits until the copies of every lane have arrived, but for those of the last PENDING tiles.
    // Every lane has then read all that it reads of the tiles before: their places may be filled.
    template <int PENDING>
    INLINE_MEMBER void arrive_at() const {
        copies_wait<PENDING>();
        meet();
    }
    // Waits for the other lanes. IN_PARTS the compiler cannot see that they walk together. A barrier
    // of the warp is then a branch, across which it does not interleave steps (8 % of the time). A
    // barrier of the block, here one warp, is no branch.
    static INLINE_MEMBER void meet() {
        if (IN_PARTS) sync_block();
        else sync_warp();
    }
};

// The tiles that a block walks along, and the copies of those that come next.
struct Pipeline {
    static_assert(STAGES >= 3, "a tile that is walked, one that follows, one that is loaded");
    Walker walker;
    Loading loading;
    RingCursor<STAGES> filled;  // the place for the next tile that is loaded

    // Starts to copy the tiles from `walker.place` on. No copies are under way.
    INLINE_MEMBER void start(const Params& P, char* ring) {
        loading.place = walker.place;
        walker.stage = filled = RingCursor<STAGES>();
        if (walker.place.exists(P)) loading.find(P, walker.lane);
        ROLLED for (int k = 0; k < STAGES - 1; ++k) {
            loading.copy_tile(P, ring + k * STAGE_BYTES, walker.lane);
            copies_commit();
            loading.next(P, walker.lane, 1);
            filled.advance();
        }
    }
    // Walks along the next tile, or along as many whole ones as there are. For every tile: wait for
    // its copies, start those of the tile that is STAGES - 1 tiles further on, and walk along it.
    // The copies go to the place of the tile before, which every lane has read (arrive_at).
    template <class Marks>
    INLINE_MEMBER void walk(const Params& P, char* ring, Marks& marks) {
        Place& here = walker.place;
        walker.left = here.end() - here.step;
        const int whole = here.whole(P), loaded = loading.place.whole(P);
        int tiles = whole < loaded ? whole : loaded;
        const bool loads = tiles > 0;
        if (!loads) {  // a tile that is not whole is loaded, or none is left
            tiles = whole > 0 && !loading.place.exists(P) ? whole : 1;
            walker.arrive_at<STAGES - 2>();
            loading.copy_tile(P, ring + filled.place * STAGE_BYTES, walker.lane);
        }
        if (whole > 0) {
            walker.run(P, ring, tiles, loads, loading, filled, marks);
        } else {
            copies_commit();
            walker.tile(P, ring, marks);
            walker.stage.advance(), filled.advance();
        }
        loading.next(P, walker.lane, tiles);
        here.next(P, tiles);
    }
};
