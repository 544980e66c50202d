// Copies tiles of WIDE lanes x STEPS steps between memory, where the steps of a lane are close
// together, and a buffer, where the lanes of a step are contiguous. Whole tiles are transposed in
// squares of vector registers.
#pragma once

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int PREFETCH = 512;  // bytes ahead in each row

// Sequence<0, 1, ..., N - 1>, as Count<N>::type.
template <int... K> struct Sequence {};
template <int N, int... K> struct Count : Count<N - 1, N - 1, K...> {};
template <int... K> struct Count<0, K...> { typedef Sequence<K...> type; };

// The side of a square that is transposed in registers: the values of one vector, at most WIDE. Used
// if the steps of a lane are contiguous in memory.
template <class V> constexpr int BLOCK = VECTOR_BYTES / (int)sizeof(V) < WIDE
    ? VECTOR_BYTES / (int)sizeof(V) : WIDE;

template <class V> struct Vectors {
    typedef V type __attribute__((vector_size(BLOCK<V> * sizeof(V))));
};

template <class V, int HIGH, int... K>
INLINE typename Vectors<V>::type interleave(
    typename Vectors<V>::type a, typename Vectors<V>::type b, Sequence<K...>
) {
    constexpr int n = BLOCK<V>;
    return __builtin_shufflevector(a, b, (K / 2 + HIGH * (n / 2) + (K & 1) * n)...);
}

// Transposes a square of vectors: log2(BLOCK) rounds, which interleave row i with row i + BLOCK / 2.
template <class V>
INLINE void transpose(typename Vectors<V>::type (&rows)[BLOCK<V>]) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type next[n];
#pragma GCC unroll 8
    for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < n / 2; ++i) {
            next[2 * i] = interleave<V, 0>(rows[i], rows[i + n / 2], typename Count<n>::type());
            next[2 * i + 1] = interleave<V, 1>(rows[i], rows[i + n / 2], typename Count<n>::type());
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) rows[i] = next[i];
    }
}

template <class V> constexpr bool has_vectors = sizeof(V) >= 4;

// Lanes w to w + BLOCK - 1, steps m to m + BLOCK - 1. FORWARD: addresses grow in scan order; else
// they fall.
template <class V, class S, bool FORWARD, int PITCH>
INLINE void gather_block(V (*buffer)[PITCH], int m, int w, char* const* lane) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type rows[n];
    for (int k = 0; k < n; ++k) {
        const S* source = (const S*)lane[w + k] + (FORWARD ? m : -(m + n - 1));
        __builtin_prefetch((const char*)source + (FORWARD ? PREFETCH : -PREFETCH));
        V line[n];
        for (int j = 0; j < n; ++j) line[j] = from_memory<V>(source[j]);
        std::memcpy(&rows[k], line, sizeof line);
    }
    transpose<V>(rows);
    for (int j = 0; j < n; ++j)
        std::memcpy(&buffer[m + (FORWARD ? j : n - 1 - j)][w], &rows[j], sizeof rows[j]);
}

template <class V, class S, bool FORWARD, int PITCH>
INLINE void scatter_block(const V (*buffer)[PITCH], int m, int w, char* const* lane) {
    constexpr int n = BLOCK<V>;
    typename Vectors<V>::type rows[n];
    for (int j = 0; j < n; ++j)
        std::memcpy(&rows[j], &buffer[m + (FORWARD ? j : n - 1 - j)][w], sizeof rows[j]);
    transpose<V>(rows);
    for (int k = 0; k < n; ++k) {
        S* target = (S*)lane[w + k] + (FORWARD ? m : -(m + n - 1));
        __builtin_prefetch((const char*)target + (FORWARD ? PREFETCH : -PREFETCH), 1);
        V line[n];
        std::memcpy(line, &rows[k], sizeof line);
        for (int j = 0; j < n; ++j) target[j] = to_memory<S>(line[j]);
    }
}

// Copies one port of a tile: `lanes` x `count` values; lane[w] is the address of lane w's first step.
template <class V, class S, int PITCH>
static __attribute__((noinline)) void gather(
    V (*buffer)[PITCH], char* const* lane, i64 step, int lanes, int count
) {
    WRITES_MEMORY;
    if constexpr (has_vectors<V>) {
        if (lanes % BLOCK<V> == 0 && count == STEPS && step == (i64)sizeof(S)) {
            for (int w = 0; w < lanes; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    gather_block<V, S, true>(buffer, m, w, lane);
            return;
        }
        if (lanes % BLOCK<V> == 0 && count == STEPS && step == -(i64)sizeof(S)) {
            for (int w = 0; w < lanes; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    gather_block<V, S, false>(buffer, m, w, lane);
            return;
        }
    }
    for (int w = 0; w < lanes; ++w)
        for (int m = 0; m < count; ++m)
            buffer[m][w] = from_memory<V>(*(const S*)(lane[w] + m * step));
}

template <class V, class S, int PITCH>
static __attribute__((noinline)) void scatter(
    const V (*buffer)[PITCH], char* const* lane, i64 step, int lanes, int count
) {
    WRITES_MEMORY;
    if constexpr (has_vectors<V>) {
        if (lanes % BLOCK<V> == 0 && count == STEPS && step == (i64)sizeof(S)) {
            for (int w = 0; w < lanes; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    scatter_block<V, S, true>(buffer, m, w, lane);
            return;
        }
        if (lanes % BLOCK<V> == 0 && count == STEPS && step == -(i64)sizeof(S)) {
            for (int w = 0; w < lanes; w += BLOCK<V>)
                for (int m = 0; m < STEPS; m += BLOCK<V>)
                    scatter_block<V, S, false>(buffer, m, w, lane);
            return;
        }
    }
    for (int w = 0; w < lanes; ++w)
        for (int m = 0; m < count; ++m)
            *(S*)(lane[w] + m * step) = to_memory<S>(buffer[m][w]);
}
