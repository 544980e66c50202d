// Tiles of the direct form, for the leaves with a SLOT: their lanes have no single small distance. A
// tile is a buffer of STEPS steps of a job's lanes. Inputs are copied into it before these steps are
// scanned, outputs are copied from it afterwards.
#pragma once
#include "layout.h"
#include "transpose.h"

constexpr i64 LINE = 64;  // the bytes of a cache line

struct alignas(64) DirectTile {
#define FIELD(name, value, memory, leaf, ...) \
    value name[SLOT[leaf] < 0 ? 0 : STEPS][SLOT[leaf] < 0 ? 1 : LANES];
    struct Inputs { INPUTS(FIELD) } x;
    struct Outputs { OUTPUTS(FIELD) } y;
#undef FIELD
};

// Writes the addresses of lanes w to w + WIDE - 1, as far as they exist, to `lane`; returns their
// number.
static inline int tile_lanes(char* at, const i64* shift, int w, int lanes, char** lane) {
    const int n = lanes - w < WIDE ? lanes - w : WIDE;
    for (int k = 0; k < n; ++k) lane[k] = at + shift[w + k];
    return n;
}

// Sets adjacent[g] for each whole group g of WIDE lanes: whether its lanes are contiguous in memory.
template <class S>
static inline void find_adjacent(const i64* shift, int lanes, bool* adjacent) {
    for (int w = 0; w + WIDE <= lanes; w += WIDE) {
        bool all = true;
        for (int k = 1; k < WIDE; ++k) all &= shift[w + k] == shift[w] + k * (i64)sizeof(S);
        adjacent[w / WIDE] = all;
    }
}

// Copies one port, `lanes` x `count` values, into a tile. If consecutive steps of a lane share cache
// lines, lane by lane, with blocks transposed in registers; else step by step, WIDE lanes at a time
// where they are contiguous.
template <class V, class S, int PITCH>
static __attribute__((noinline)) void gather_lanes(
    V (*buffer)[PITCH], char* at, const i64* shift, i64 step, int lanes, int count
) {
    WRITES_MEMORY;
    bool adjacent[PITCH / WIDE + 1];
    find_adjacent<S>(shift, lanes, adjacent);
    if (step <= LINE && step >= -LINE) {
        char* lane[WIDE];
        for (int w = 0; w < lanes; w += WIDE) {
            const int n = tile_lanes(at, shift, w, lanes, lane);
            if (n < WIDE || !adjacent[w / WIDE]) {
                gather<V, S>((V (*)[PITCH])&buffer[0][w], lane, step, n, count);
                continue;
            }
            for (int m = 0; m < count; ++m)
                for (int k = 0; k < WIDE; ++k)
                    buffer[m][w + k] = from_memory<V>(((const S*)(lane[0] + m * step))[k]);
        }
        return;
    }
    for (int m = 0; m < count; ++m, at += step) {
        S line[PITCH];
        int w = 0;
        for (; w + WIDE <= lanes; w += WIDE) {
            if (adjacent[w / WIDE]) std::memcpy(line + w, at + shift[w], WIDE * sizeof(S));
            else for (int k = w; k < w + WIDE; ++k) line[k] = *(const S*)(at + shift[k]);
        }
        for (; w < lanes; ++w) line[w] = *(const S*)(at + shift[w]);
        for (w = 0; w < lanes; ++w) buffer[m][w] = from_memory<V>(line[w]);
    }
}

template <class V, class S, int PITCH>
static __attribute__((noinline)) void scatter_lanes(
    const V (*buffer)[PITCH], char* at, const i64* shift, i64 step, int lanes, int count
) {
    WRITES_MEMORY;
    bool adjacent[PITCH / WIDE + 1];
    find_adjacent<S>(shift, lanes, adjacent);
    if (step <= LINE && step >= -LINE) {
        char* lane[WIDE];
        for (int w = 0; w < lanes; w += WIDE) {
            const int n = tile_lanes(at, shift, w, lanes, lane);
            if (n < WIDE || !adjacent[w / WIDE]) {
                scatter<V, S>((const V (*)[PITCH])&buffer[0][w], lane, step, n, count);
                continue;
            }
            for (int m = 0; m < count; ++m)
                for (int k = 0; k < WIDE; ++k)
                    ((S*)(lane[0] + m * step))[k] = to_memory<S>(buffer[m][w + k]);
        }
        return;
    }
    for (int m = 0; m < count; ++m, at += step) {
        S line[PITCH];
        int w = 0;
        for (; w < lanes; ++w) line[w] = to_memory<S>(buffer[m][w]);
        for (w = 0; w + WIDE <= lanes; w += WIDE) {
            if (adjacent[w / WIDE]) std::memcpy(at + shift[w], line + w, WIDE * sizeof(S));
            else for (int k = w; k < w + WIDE; ++k) *(S*)(at + shift[k]) = line[k];
        }
        for (; w < lanes; ++w) *(S*)(at + shift[w]) = line[w];
    }
}

// Copies `count` steps of all inputs with a SLOT into the tile. At the edge (the last step of the scan,
// if `edge`) a leaf that is read one step ahead has no next step: its last row is not filled, and
// `load_lane` does not read it.
static void load_direct_tile(
    const Problem& problem, const At& at, const Shifts& shifts, DirectTile& tile, int lanes,
    int count, bool edge
) {
#define LOAD(name, value, memory, leaf, offset, ...) \
    if constexpr (SLOT[leaf] >= 0) \
        gather_lanes<value, memory>( \
            tile.x.name, at.p[leaf] + offset * (i64)sizeof(memory), shifts.of[SLOT[leaf]], \
            step_of(problem, leaf), lanes, count - (SHIFTED[leaf] && edge));
    INPUTS(LOAD)
#undef LOAD
}

static void store_direct_tile(
    const Problem& problem, const At& at, const Shifts& shifts, const DirectTile& tile, int lanes,
    int count
) {
#define STORE(name, value, memory, leaf, offset, ...) \
    if constexpr (SLOT[leaf] >= 0) \
        scatter_lanes<value, memory>( \
            tile.y.name, at.p[leaf] + offset * (i64)sizeof(memory), shifts.of[SLOT[leaf]], \
            step_of(problem, leaf), lanes, count);
    OUTPUTS(STORE)
#undef STORE
}
