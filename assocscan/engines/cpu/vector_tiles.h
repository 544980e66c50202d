// Scans over vectors: tiles in the caches, and moving them from and to memory.
//
// A tile holds a leaf for CHUNK steps, STATES states and WIDTH lanes (neighbouring entries of one batch
// dimension), or only for one step, state or lane where the leaf does not vary along them: V[T][N][W].
#pragma once
#include <cstdlib>

#include "threads.h"

#define INLINE_METHOD inline __attribute__((always_inline))
#define WRITES_MEMORY asm volatile("" ::: "memory")  // see layout.h

struct Leaf {
    char* data;
    i64 step, lane, state, sequence, worker;  // strides in bytes
    const i64* outer;
};

struct Span { i64 begin, count; };

// Where a tile of a leaf begins in memory, and its strides in bytes, in the order of the scan.
struct Place { char* data; i64 step, state, lane; };

static inline i64 magnitude(i64 x) { return x < 0 ? -x : x; }

// Calls f(index in the tile, address) for all elements of a tile; the innermost loop is over the
// smallest stride in memory.
template <int T, int N, int W, class F>
INLINE void for_each_element(const Place& at, int steps, int lanes, F f) {
    const int count = T > 1 ? steps : 1, wide = W > 1 ? lanes : 1;
    if (W > 1 && (N == 1 || magnitude(at.lane) <= magnitude(at.state))
        && (T == 1 || magnitude(at.lane) <= magnitude(at.step))) {
        for (int t = 0; t < count; ++t)
            for (int n = 0; n < N; ++n)
                for (int w = 0; w < wide; ++w)
                    f((t * N + n) * W + w, at.data + t * at.step + n * at.state + w * at.lane);
    } else if (T > 1 && (N == 1 || magnitude(at.step) < magnitude(at.state))) {
        for (int w = 0; w < wide; ++w)
            for (int n = 0; n < N; ++n)
                for (int t = 0; t < count; ++t)
                    f((t * N + n) * W + w, at.data + t * at.step + n * at.state + w * at.lane);
    } else {
        for (int t = 0; t < count; ++t)
            for (int w = 0; w < wide; ++w)
                for (int n = 0; n < N; ++n)
                    f((t * N + n) * W + w, at.data + t * at.step + n * at.state + w * at.lane);
    }
}

// Lanes from `lanes` on read zero.
template <class V, class M, int T, int N, int W>
static void load_tile(V* tile, const Place& at, int steps, int lanes) {
    WRITES_MEMORY;
    if (W > 1 && lanes < W)
        for (int k = 0; k < (T > 1 ? steps : 1) * N * W; ++k) tile[k] = 0;
    if (W > 1 && N == 1 && lanes == W && at.lane == (i64)sizeof(M)) {
        for (int t = 0; t < (T > 1 ? steps : 1); ++t) {
            const M* from = (const M*)(at.data + t * at.step);
            for (int w = 0; w < W; ++w) tile[t * W + w] = from_memory<V>(from[w]);
        }
        return;
    }
    for_each_element<T, N, W>(at, steps, lanes, [tile](int k, const char* p) {
        tile[k] = from_memory<V>(*(const M*)p);
    });
}

template <class V, class M, int T, int N, int W>
static void store_tile(const V* tile, const Place& at, int steps, int lanes) {
    WRITES_MEMORY;
    if (W > 1 && N == 1 && lanes == W && at.lane == (i64)sizeof(M)) {
        for (int t = 0; t < (T > 1 ? steps : 1); ++t) {
            M* to = (M*)(at.data + t * at.step);
            for (int w = 0; w < W; ++w) to[w] = to_memory<M>(tile[t * W + w]);
        }
        return;
    }
    for_each_element<T, N, W>(at, steps, lanes, [tile](int k, char* p) {
        *(M*)p = to_memory<M>(tile[k]);
    });
}

// Adds a tile to memory.
template <class V, class M, int T, int N, int W>
static void add_tile(const V* tile, const Place& at, int steps, int lanes) {
    WRITES_MEMORY;
    for_each_element<T, N, W>(at, steps, lanes, [tile](int k, char* p) {
        *(M*)p = to_memory<M>(from_memory<V>(*(const M*)p) + tile[k]);
    });
}

// The tiles of a sum over lanes: of whole blocks, and of a partial last block, of which `lanes` count.
template <class V> struct LaneTiles {
    const V *whole, *partial;  // nullptr where there is no such block
    int lanes;
};

// Sums over the lanes of tiles; adds the sums to memory, or stores them.
template <class V, class M, int T, int N>
static void store_sums(const LaneTiles<V>& tiles, const Place& at, int steps, bool adds) {
    WRITES_MEMORY;
    for_each_element<T, N, 1>(at, steps, 1, [=](int k, char* p) {
        V sum = adds ? from_memory<V>(*(const M*)p) : V(0);
        for (int w = 0; tiles.whole && w < WIDTH; ++w) sum += tiles.whole[k * WIDTH + w];
        for (int w = 0; tiles.partial && w < tiles.lanes; ++w) sum += tiles.partial[k * WIDTH + w];
        *(M*)p = to_memory<M>(sum);
    });
}
