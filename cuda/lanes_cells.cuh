// The cells of a thread in the tiles of lanes_scan.cuh: places in shared memory, addresses, copies.
#pragma once
#include "lanes_memory.cuh"

// A leaf's region of a stage: Leaf::AT is its first byte, Leaf::GROUP the bytes of a group of
// steps. Both, and struct Shared, are generated (`SharedMemory` in kernel.py).
template <class Leaf>
struct Region {
    typedef ::Cell<Leaf, CHANNELS> Cell;
    static constexpr int ROW = COLUMNS * Cell::STRIDE;
    static_assert(ITEMS * ROW <= Leaf::GROUP, "groups do not overlap");
};

struct Thread {
    int column, group;
    // The thread's cell of leaf J at an item.
    template <int J>
    INLINE_MEMBER char* cell(char* stage, int item) const {
        typedef Region<Input<J>> R;
        return stage + Input<J>::AT + group * Input<J>::GROUP + item * R::ROW +
               column * R::Cell::STRIDE;
    }
};

// The position of a thread's cells in one tile: row, first channel and first step.
struct Cells {
    i64 row, channel, step;
    int channels;  // how many of its channels exist
    int left;      // how many of its ITEMS steps exist; ITEMS + 1 if the step after them does too

    INLINE_MEMBER void find(const Params& P, const Walk& walk, const Thread& thread) {
        const int m = row_of(P, walk.chain);
        row = m;
        channel = (i64)(walk.chain - m * P.channel_blocks) * BLOCK_CHANNELS +
                  thread.column * CHANNELS;
        step = (i64)walk.tile * TILE_STEPS + thread.group * ITEMS;
        const i64 more = P.channels - channel;
        channels = more < 0 ? 0 : more < CHANNELS ? (int)more : CHANNELS;
        const i64 steps = P.length - step;
        left = steps < 0 ? 0 : steps <= ITEMS ? (int)steps : ITEMS + 1;
    }
    // The address of leaf J at item 0, as if it existed.
    template <int J>
    INLINE_MEMBER const char* address(const Params& P) const {
        const i64 at = step + (Input<J>::SHIFTED ? 1 : 0);
        const i64 t = REVERSE ? P.length - 1 - at : at;
        return P.input[J] + outer_offset(P.input_outer[J], P, row) + t * P.input_step[J] +
               channel * P.input_lane[J];
    }
    // The address of leaf J at item i, and how many of its bytes exist. `at` is the address if the
    // step exists; else it is that of the boundary value, or nothing is copied.
    template <int J>
    INLINE_MEMBER const char* source(const Params& P, const char* at, int i, int& valid) const {
        const int k = i + (Input<J>::SHIFTED ? 1 : 0);
        valid = k < left ? (Input<J>::ONE ? (channels > 0 ? 1 : 0) : channels) *
                               Input<J>::SCALARS * (int)sizeof(typename Input<J>::Memory)
                         : 0;
        if constexpr (Input<J>::BOUNDARY >= 0) {
            if (k == left) {
                valid = (Input<J>::ONE ? (channels > 0 ? 1 : 0) : channels) * Input<J>::SCALARS *
                        (int)sizeof(typename Input<J>::Memory);
                return P.boundary[Input<J>::BOUNDARY] +
                       outer_offset(P.boundary_outer[Input<J>::BOUNDARY], P, row) +
                       channel * P.boundary_lane[Input<J>::BOUNDARY];
            }
        }
        return valid > 0 ? at : P.input[J];
    }
};

struct Addresses {
    const char* input[INPUT_COUNT];
};

INLINE void find_addresses(Addresses& a, const Params& P, const Cells& cells) {
#define FIND(J) a.input[J] = cells.address<J>(P);
    INPUTS(FIND)
#undef FIND
}
// Starts the copies of one step, and moves the addresses to the next. WHOLE: all cells exist.
template <bool WHOLE>
INLINE void copy_item(const Params& P, const Cells& cells, Addresses& a, const Thread& thread,
                      char* stage, int item) {
#define COPY(J)                                                                            \
    {                                                                                      \
        typedef Region<Input<J>>::Cell C;                                                  \
        char* cell = thread.cell<J>(stage, item);                                          \
        if constexpr (WHOLE) {                                                             \
            C::copy(cell, a.input[J], C::BYTES);                                           \
        } else {                                                                           \
            int valid;                                                                     \
            const char* from = cells.source<J>(P, a.input[J], item, valid);                \
            C::copy(cell, from, valid);                                                    \
        }                                                                                  \
        a.input[J] += REVERSE ? -P.input_step[J] : P.input_step[J];                        \
    }
    INPUTS(COPY)
#undef COPY
}
// Starts the copies of a tile, one group of copies for each part.
template <bool WHOLE>
INLINE void copy_tile(const Params& P, const Cells& cells, Addresses& a, const Thread& thread,
                      char* stage) {
    auto one = [&](int i) {
        copy_item<WHOLE>(P, cells, a, thread, stage, i);
        if (part_of(i + 1) != part_of(i)) copies_commit();
    };
    if constexpr (WHOLE) {
        UNROLL for (int i = 0; i < ITEMS; ++i) one(i);
    } else {
        ROLLED for (int i = 0; i < ITEMS; ++i) one(i);
    }
}
// Reads the words of a step. Addresses are needed only for skewed leaves.
INLINE void read_item(InputWords& words, const Params& P, const Cells& cells, const Addresses& a,
                      const Thread& thread, char* stage, int item) {
#define READ(J)                                                                                \
    {                                                                                          \
        const char* from = 0;                                                                  \
        if constexpr (Region<Input<J>>::Cell::SKEWED) {                                        \
            int valid;                                                                         \
            from = cells.source<J>(P, a.input[J] + (REVERSE ? -item : item) * P.input_step[J], \
                                   item, valid);                                               \
        }                                                                                      \
        Region<Input<J>>::Cell::read(words.input##J, thread.cell<J>(stage, item), from);       \
    }
    INPUTS(READ)
#undef READ
}
