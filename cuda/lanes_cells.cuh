// The cells of a thread in the tiles of lanes_scan.cuh: places in shared memory, addresses, copies.
//
// A thread copies and reads its own cells. If a cell is 2, 4 or 8 pieces of 16 bytes, threads whose
// cells are adjacent in memory would each read a piece at the same time, and memory would be read in
// many short bits. So as many adjacent lanes are a team: of each cell of a team its lanes copy one
// piece each, all at once, and outputs of as many bytes leave through the cells in the same way.
// Between the lanes of a team sync_warp stands before cells are read that others have copied, and
// before others copy into cells that were read. Tiles that are not whole are copied as other cells
// are. The pieces of a cell change places (`key`), so that lanes that read the same piece of
// their cells read different banks.
#pragma once
#include "lanes_memory.cuh"

// A leaf's region of a stage: Leaf::AT is its first byte, Leaf::GROUP the bytes of a group of
// steps. Both, and struct Shared, are generated (`SharedMemory` in kernel.py).
template <class Leaf>
struct Region {
    typedef ::Cell<Leaf, CHANNELS> Cell;
    static constexpr int ROW = COLUMNS * Cell::STRIDE;
    static constexpr int PIECES = Cell::PIECES;
    static constexpr bool SHARED = PIECES == 2 || PIECES == 4 || PIECES == 8;
    static constexpr int TEAM = SHARED && COLUMNS % PIECES == 0 ? PIECES : 1;
    static_assert(ITEMS * ROW <= Leaf::GROUP, "groups do not overlap");
};

// Whether an input has teams.
#define HAS_TEAM(J) || Region<Input<J>>::TEAM > 1
constexpr bool TEAMS = false INPUTS(HAS_TEAM);
#undef HAS_TEAM

struct Thread {
    int column, group, lane;
    // The thread's cell of leaf J at an item.
    template <int J>
    INLINE_MEMBER char* cell(char* stage, int item) const {
        typedef Region<Input<J>> R;
        return stage + Input<J>::AT + group * Input<J>::GROUP + item * R::ROW +
               column * R::Cell::STRIDE;
    }
    // Where pieces of the cells of the lane that is `on` lanes further change places.
    template <int TEAM>
    INLINE_MEMBER int key(int on = 0) const {
        if constexpr (TEAM == 1) return 0;
        else return (lane + on) / (8 / TEAM) % TEAM * 16;
    }
    // The piece of a team's cells that the thread copies, in bytes.
    template <int TEAM>
    INLINE_MEMBER int piece() const { return lane % TEAM * 16; }
    // How many lanes on the k-th lane of the team is, or another one: together they are all lanes,
    // and of the two teams in 8 lanes one begins with an even lane, the other one with an odd one.
    template <int TEAM>
    INLINE_MEMBER int mate(int k) const {
        return (TEAM < 8 ? k ^ (lane / 4 & 1) : k) - lane % TEAM;
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
        constexpr int TEAM = Region<Input<J>>::TEAM;                                       \
        char* cell = thread.cell<J>(stage, item);                                          \
        if constexpr (WHOLE && TEAM > 1) {                                                 \
            UNROLL for (int k = 0; k < TEAM; ++k) {                                        \
                const int on = thread.mate<TEAM>(k), piece = thread.piece<TEAM>();         \
                copy_async<16>(cell + on * C::STRIDE + (piece ^ thread.key<TEAM>(on)),     \
                               a.input[J] + on * (CHANNELS * P.input_lane[J]) + piece,     \
                               true);                                                      \
            }                                                                              \
        } else if constexpr (WHOLE) {                                                      \
            C::copy(cell, a.input[J], C::BYTES);                                           \
        } else {                                                                           \
            int valid;                                                                     \
            const char* from = cells.source<J>(P, a.input[J], item, valid);                \
            C::copy(cell, from, valid, thread.key<TEAM>());                                \
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
        Region<Input<J>>::Cell::read(words.input##J, thread.cell<J>(stage, item), from,        \
                                     thread.key<Region<Input<J>>::TEAM>());                    \
    }
    INPUTS(READ)
#undef READ
}

// ---- outputs through the cells of a team ----

// The bytes of each input's cell if it has teams, else 0; those of each output's, if it is aligned.
#define INPUT_BYTES(J) Region<Input<J>>::TEAM > 1 ? Region<Input<J>>::Cell::BYTES : 0,
#define OUTPUT_BYTES(J) Cell<Output<J>, CHANNELS>::PIECES > 1 ? Cell<Output<J>, CHANNELS>::BYTES : 0,
constexpr int TEAM_INPUTS[] = {INPUTS(INPUT_BYTES) 0};
constexpr int WIDE_OUTPUTS[] = {OUTPUTS(OUTPUT_BYTES) 0};
#undef INPUT_BYTES
#undef OUTPUT_BYTES

// The input through whose cells output `j` leaves: the first one of as many bytes that no output
// before it has; -1 if there is none.
constexpr int way_out(int j) {
    int before = 0;
    for (int k = 0; k < j; ++k) before += WIDE_OUTPUTS[k] == WIDE_OUTPUTS[j];
    for (int k = 0; k < INPUT_COUNT; ++k)
        if (WIDE_OUTPUTS[j] > 0 && TEAM_INPUTS[k] == WIDE_OUTPUTS[j] && before-- == 0) return k;
    return -1;
}
// Puts the words of an output into the thread's cell of input K, which was read.
template <int K>
INLINE void put_cell(const u32* words, const Thread& thread, char* stage, int item) {
    typedef Region<Input<K>> R;
    char* cell = thread.cell<K>(stage, item);
    UNROLL for (int b = 0; b < R::Cell::BYTES; b += 16)
        store<16>(cell + (b ^ thread.key<R::TEAM>()), words + b / 4);
}
// Stores a piece of each of the team's cells. `to`: where the thread's own cell goes; `apart`: the
// bytes from there to the next lane's.
template <int K>
INLINE void store_pieces(char* to, i64 apart, const Thread& thread, char* stage, int item) {
    typedef Region<Input<K>> R;
    char* cell = thread.cell<K>(stage, item);
    UNROLL for (int k = 0; k < R::TEAM; ++k) {
        const int on = thread.mate<R::TEAM>(k), piece = thread.piece<R::TEAM>();
        u32 words[4];
        load<16>(words, cell + on * R::Cell::STRIDE + (piece ^ thread.key<R::TEAM>(on)));
        store<16>(to + on * apart + piece, words);
    }
}
