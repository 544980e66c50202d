// The walk of [outer, steps, channels] along its steps, for steps that are not associative; channels
// are adjacent in memory.
//
// The step is one program of two parts (step.py): what it computes from its inputs alone, which
// is done for AHEAD steps together while those before are taken, and the rest, for which a lane
// waits.
//
// A block is one warp. It takes chains side by side: those of adjacent channels of a row, or of a
// packed sequence. A lane walks along CHANNELS of them with their states in registers. Tiles are
// ITEMS steps; STAGES of them are in a ring in shared memory, of which one is walked while the
// others are copied. Rows of channels whose addresses are multiples of 16 are copied in pieces of 16
// bytes (WIDE), each by whichever lane comes next: a lane that copied its own numbers alone would
// issue four to eight times as many instructions, which then take longer than the steps do. Of other
// leaves a lane copies its own cells.
#pragma once
#include "lanes_memory.cuh"

static_assert(HAS_INIT && !SEGMENTED && COLUMNS == 32, "a block is one warp");

// The tiles of a block, chain by chain.
struct Place {
    int chain, row, sequence;  // of sequences that are not packed there is one
    i64 channel;               // of lane 0
    i64 begin, length, step;   // where the sequence begins, its steps, the tile's first step

    INLINE_MEMBER bool exists(const Params& P) const { return chain < P.chains; }
    // The first tile of the chain, or of the next one that has steps.
    INLINE_MEMBER void start(const Params& P) {
        ROLLED for (; exists(P); chain += block_count()) {
            find(P);
            if (length > 0) return;
        }
    }
    INLINE_MEMBER void find(const Params& P) {
        step = 0;
        const int m = row_of(P, chain);
        channel = (i64)(chain - m * P.channel_blocks) * BLOCK_CHANNELS;
        row = m, sequence = 0, begin = 0, length = P.length;
#if SEQUENCES
        row = m / sequences_of(P), sequence = m - row * sequences_of(P);
        begin = bounded(P, offset_at(P, sequence));
        const i64 end = bounded(P, offset_at(P, sequence + 1));
        length = end > begin ? end - begin : 0;
#endif
    }
    // Offsets are checked before, but other memory is never touched.
    static INLINE_MEMBER i64 bounded(const Params& P, i64 at) {
        return at < 0 ? 0 : at < P.length ? at : P.length;
    }
    // Goes on by so many tiles.
    INLINE_MEMBER void next(const Params& P, int tiles) {
        step += (i64)tiles * ITEMS;
        if (step < length) return;
        chain += block_count();
        start(P);
    }
    // From this tile on, of how many all steps and channels exist, and the step after them.
    INLINE_MEMBER int whole(const Params& P) const {
        const i64 left = length - step - 1;
        if (!exists(P) || left < ITEMS || channel + BLOCK_CHANNELS > P.channels) return 0;
        return left < (1 << 30) ? (int)left / ITEMS : (1 << 30) / ITEMS;
    }
    // The place in memory of a step that is counted from the tile's first one.
    INLINE_MEMBER i64 at(i64 k) const {
        return REVERSE ? begin + length - 1 - step - k : begin + step + k;
    }
};

// ---- copies ----
//
// A leaf that is the same at every step (STILL) is not copied: a lane reads it at the start.

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

// The words of a lane's elements of leaf J, at an item of the tile that is `on` steps after `place`.
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
    } else if constexpr (R::Cell::BYTES == 2) {
        words[0] = *(const uint16_t*)(row + 2 * lane);
    } else {
        ::load<R::Cell::BYTES>(words, row + R::Cell::BYTES * lane);
    }
}

// Scalar i of some words, which are written in the order of i.
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
// A lane's elements of a leaf that is the same at every step.
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
// A lane's elements of a step.
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

// ---- steps ----

struct Outputs {
    char* to[OUTPUT_COUNT + 1];  // a reduction has no outputs
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

// The walk along the chains of a lane.
struct Walker {
    Place place;         // of the tile that is walked
    i64 left;            // the steps from there to the end
    int channels;        // how many of the lane's channels exist
    InputWords still;
    Outputs outputs;
    State carry[CHANNELS];
    int lane;
    RingCursor<STAGES> stage;

    INLINE_MEMBER i64 channel(int v) const { return place.channel + lane * CHANNELS + v; }
    INLINE_MEMBER void enter(const Params& P) {
        channels = channels_of(P, place, lane);
        UNROLL for (int v = 0; v < CHANNELS; ++v)
            carry[v] = v < channels ? load_init(P, place.row, channel(v), place.sequence)
                                    : identity();
        read_still(still, P, place, lane);
        outputs.find(P, place, lane);
    }
    // What COUNT steps compute without the carry, from step `first` of the tile on. `ends`: whether
    // the last of them is the last of all. `on`: the steps from `place` to the tile.
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
        if (HAS_FINAL && ends)
            UNROLL for (int v = 0; v < CHANNELS; ++v)
                if (v < existing)
                    store_final(P, place.row, channel(v), place.sequence, carry[v]);
    }
    // One tile, of which not all steps or channels need exist.
    template <bool WHOLE>
    INLINE_MEMBER void tile(const Params& P, const char* ring) {
        constexpr int COUNT = WHOLE ? AHEAD : 1;
        ROLLED for (int first = 0; first < ITEMS && first < left; first += COUNT) {
            Ready ready[COUNT][CHANNELS];
            const bool ends = first + COUNT == left;
            prepare(ready, P, 0, ring + stage.place * STAGE_BYTES, first, ends);
            take(P, ready, WHOLE ? CHANNELS : channels, ends);
        }
    }
    // Tiles of which all steps and channels exist, before the last one, while as many others are
    // loaded. Each group of AHEAD steps is prepared while the one before it is taken.
    INLINE_MEMBER void run(const Params& P, char* ring, int tiles, Loading& loading,
                           RingCursor<STAGES>& filled) {
        constexpr int GROUPS_OF_STEPS = ITEMS / AHEAD;
        static_assert(ITEMS % AHEAD == 0, "whole groups of steps");
        Ready next[AHEAD][CHANNELS];
        arrive_at<STAGES - 2>();
        prepare(next, P, 0, ring + stage.place * STAGE_BYTES, 0, false);
        i64 on = 0;
        ROLLED for (int k = 0; k < tiles; ++k) {
            const char* const tile = ring + stage.place * STAGE_BYTES;
            char* const later = ring + filled.place * STAGE_BYTES;
            stage.advance(), filled.advance();
            UNROLL for (int g = 0; g < GROUPS_OF_STEPS; ++g) {
                Ready now[AHEAD][CHANNELS];
                UNROLL for (int j = 0; j < AHEAD; ++j)
                    UNROLL for (int v = 0; v < CHANNELS; ++v) now[j][v] = next[j][v];
                loading.copy(P, later, g * AHEAD, lane);
                if (g + 1 < GROUPS_OF_STEPS) {
                    prepare(next, P, on, tile, (g + 1) * AHEAD, false);
                } else if (k + 1 < tiles) {
                    arrive_at<STAGES - 3>();
                    prepare(next, P, on + ITEMS, ring + stage.place * STAGE_BYTES, 0, false);
                }
                take(P, now, CHANNELS, false);
            }
            copies_commit();
            on += ITEMS;
        }
    }
    // Waits for all copies but the last `PENDING` groups, of all lanes, which have read what was
    // there before.
    template <int PENDING>
    INLINE_MEMBER void arrive_at() const {
        copies_wait<PENDING>();
        sync_warp();
    }
};

// Every tile: wait for its copies, walk along it, and load another one into the place of the tile
// before it, which every lane has read then.
KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    static_assert(STAGES >= 3, "a tile that is walked, one that follows, one that is loaded");
    char* const ring = shared_memory() + RING_AT;
    Walker walker;
    walker.lane = thread_index();
    Place& here = walker.place;
    here.chain = block_index();
    here.start(P);
    Loading loading;
    loading.place = here;
    if (here.exists(P)) loading.find(P, walker.lane);
    RingCursor<STAGES> filled;
    ROLLED for (int k = 0; k < STAGES - 1; ++k) {
        loading.copy_tile(P, ring + k * STAGE_BYTES, walker.lane);
        copies_commit();
        loading.next(P, walker.lane, 1);
        filled.advance();
    }
    ROLLED while (here.exists(P)) {
        if (here.step == 0) walker.enter(P);
        walker.left = here.length - here.step;
        const int whole = here.whole(P), loaded = loading.place.whole(P);
        int tiles = whole < loaded ? whole : loaded;
        if (tiles > 0) {
            walker.run(P, ring, tiles, loading, filled);
        } else {
            tiles = 1;
            walker.arrive_at<STAGES - 2>();
            loading.copy_tile(P, ring + filled.place * STAGE_BYTES, walker.lane);
            copies_commit();
            if (whole > 0) walker.tile<true>(P, ring);
            else walker.tile<false>(P, ring);
            walker.stage.advance(), filled.advance();
        }
        loading.next(P, walker.lane, tiles);
        here.next(P, tiles);
    }
    copies_wait<0>();
}

LAUNCH_NUMBERS
