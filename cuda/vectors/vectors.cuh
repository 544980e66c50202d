// What the kernels of scans over vectors have in common: rows of leaves to shared memory, the states
// of a thread, and sums over threads that are exchanged in few shuffles.
//
// The constants THREADS, SPREAD, EACH, STATES, CHUNK and the type Index are the kernel's (`text.py`).
#pragma once

INLINE i64 clamped(i64 x, i64 most) { return x < 0 ? 0 : x > most ? most : x; }

INLINE int min_int(int a, int b) { return a < b ? a : b; }

constexpr float LOG2E = 1.4426950408889634f;

// ---- rows of a leaf: `steps` rows of `present` items, in shared memory PITCH bytes apart ----
// COPIED items are copied at a time; items that are not present become zero. All addresses of a
// thread follow from its first one, by steps that are the same for all tiles.
template <class M, int ITEMS, int PITCH, int COPIED>
INLINE void stage_rows(char* to, const M* from, Index step, Index item, int steps, Index present) {
    constexpr int COPIES = (ITEMS + COPIED - 1) / COPIED;  // of a row
    constexpr bool REGULAR = THREADS % COPIES == 0;        // a thread has the same items of each row
    constexpr int ROUNDS = (CHUNK * COPIES + THREADS - 1) / THREADS;
    int row = thread_index() / COPIES, n = thread_index() % COPIES * COPIED;
    const M* at = from + row * step + n * item;
    UNROLL for (int e = 0; e < ROUNDS; ++e) {
        if constexpr (!REGULAR) {
            const int copy = thread_index() + e * THREADS;
            row = copy / COPIES, n = copy % COPIES * COPIED;
            at = from + row * step + n * item;
        }
        if (row < steps) {
            const bool valid = n < present;
            char* place = to + row * PITCH + n * (int)sizeof(M);
            if constexpr (COPIED * sizeof(M) >= 4)
                copy_async<COPIED * (int)sizeof(M)>(place, valid ? at : from, valid);
            else
                *(M*)place = valid ? *at : M{};
        }
        if constexpr (REGULAR) row += THREADS / COPIES, at += THREADS / COPIES * step;
    }
}

// ---- COUNT adjacent items, at a multiple of their size ----
template <class T, class M, int COUNT, int WORDS>
INLINE void unpack(T (&to)[COUNT], const u32 (&words)[WORDS]) {
    UNROLL for (int n = 0; n < COUNT; ++n) {
        M item;
        if constexpr (sizeof(M) == 4) {
            __builtin_memcpy(&item, words + n, 4);
        } else if constexpr (sizeof(M) == 8) {
            __builtin_memcpy(&item, words + 2 * n, 8);
        } else if constexpr (sizeof(M) == 2) {
            const uint16_t half = (uint16_t)(words[n / 2] >> (n % 2 * 16));
            __builtin_memcpy(&item, &half, 2);
        } else {
            const uint8_t byte = (uint8_t)(words[n / 4] >> (n % 4 * 8));
            __builtin_memcpy(&item, &byte, 1);
        }
        to[n] = from_memory<T>(item);
    }
}
// The bytes of one load, for items that take BYTES together: a power of two, or a multiple of 4.
template <int BYTES>
constexpr int load_bytes = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : BYTES;
template <class T, class M, int COUNT>
INLINE void load_items(T (&to)[COUNT], const char* from) {
    constexpr int BYTES = COUNT * (int)sizeof(M), WIDE = load_bytes<BYTES>;
    if constexpr (WIDE >= 4) {
        u32 words[BYTES / 4];
        UNROLL for (int n = 0; n < BYTES; n += WIDE) load<WIDE>(words + n / 4, from + n);
        unpack<T, M>(to, words);
    } else {
        UNROLL for (int n = 0; n < COUNT; ++n) to[n] = from_memory<T>(((const M*)from)[n]);
    }
}
// The same from memory that is frozen.
template <class T, class M, int COUNT>
INLINE void load_frozen_items(T (&to)[COUNT], Frozen from) {
    constexpr int BYTES = COUNT * (int)sizeof(M), WIDE = load_bytes<BYTES>;
    static_assert((WIDE & (WIDE - 1)) == 0, "no load has so many bytes");
    u32 words[(BYTES + 3) / 4];
    UNROLL for (int n = 0; n < BYTES; n += WIDE) load_frozen<WIDE>(words + n / 4, from + n);
    unpack<T, M>(to, words);
}
template <class T, class M>
INLINE T load_frozen_item(Frozen from) {
    T one[1];
    load_frozen_items<T, M>(one, from);
    return one[0];
}
template <class T, int COUNT>
INLINE void store_items(char* to, const T (&from)[COUNT]) {
    if constexpr (sizeof(T) == 4 && COUNT % 4 == 0) {
        UNROLL for (int n = 0; n < COUNT; n += 4) {
            u32 words[4];
            UNROLL for (int e = 0; e < 4; ++e) __builtin_memcpy(words + e, from + n + e, 4);
            store<16>(to + 4 * n, words);
        }
    } else {
        UNROLL for (int n = 0; n < COUNT; ++n) ((T*)to)[n] = from[n];
    }
}

template <class M, int COUNT>
INLINE void store_adjacent(M* to, const M (&from)[COUNT]) {
    constexpr int BYTES = COUNT * (int)sizeof(M), WIDE = load_bytes<BYTES>;
    u32 words[BYTES / 4];
    __builtin_memcpy(words, from, BYTES);
    UNROLL for (int n = 0; n < BYTES; n += WIDE) store<WIDE>((char*)to + n, words + n / 4);
}

// Rows of 16-bit items that a thread copied by `stage_rows`, widened to rows WIDE_PITCH bytes apart.
template <class T, class M, int ITEMS, int PITCH, int COPIED, int WIDE_PITCH>
INLINE void widen_rows(char* to, const char* from) {
    constexpr int COPIES = (ITEMS + COPIED - 1) / COPIED;
    constexpr int ROUNDS = (CHUNK * COPIES + THREADS - 1) / THREADS;
    UNROLL for (int e = 0; e < ROUNDS; ++e) {
        const int copy = thread_index() + e * THREADS;
        const int row = copy / COPIES, n = copy % COPIES * COPIED;
        if (row >= CHUNK) break;
        T items[COPIED];
        load_items<T, M>(items, from + row * PITCH + n * (int)sizeof(M));
        store_items(to + row * WIDE_PITCH + n * (int)sizeof(T), items);
    }
}

// ---- carries in memory: the bits of each value in an item of ITEM bytes ----
template <int BYTES>
INLINE void stage_bytes(char* to, const char* from, bool valid) {
    constexpr int WIDE = load_bytes<BYTES>;
    UNROLL for (int n = 0; n < BYTES; n += WIDE) copy_async<WIDE>(to + n, from + n, valid);
}
template <class T, int ITEM>
INLINE T load_bits(const char* from) {
    if constexpr (sizeof(T) == 1) return (T)(*(const uint8_t*)from);
    else return *(const T*)from;
}
template <class T, int ITEM>
INLINE void store_bits(char* to, T x) {
    if constexpr (sizeof(T) == ITEM) *(T*)to = x;
    else if constexpr (ITEM == 8 && sizeof(T) == 4) *(T*)to = x;
    else if constexpr (ITEM == 8) *(i64*)to = (i64)x;
    else *(int32_t*)to = (int32_t)x;
}
template <class T, int ITEM, int COUNT>
INLINE void load_carry(T (&to)[COUNT], const char* from) {
    if constexpr (sizeof(T) == 4 && ITEM == 4) load_items<T, T, COUNT>(to, from);
    else UNROLL for (int n = 0; n < COUNT; ++n) to[n] = load_bits<T, ITEM>(from + n * ITEM);
}
template <class T, int ITEM, int COUNT>
INLINE void store_carry(char* to, const T (&from)[COUNT]) {
    if constexpr (sizeof(T) == 4 && ITEM == 4) store_items(to, from);
    else UNROLL for (int n = 0; n < COUNT; ++n) store_bits<T, ITEM>(to + n * ITEM, from[n]);
}

// ---- combinations of two values ----
struct Add {
    template <class T> static INLINE_MEMBER T of(T a, T b) { return (T)(a + b); }
};
struct Max {
    template <class T> static INLINE_MEMBER T of(T a, T b) { return maximum(a, b); }
};
struct Min {
    template <class T> static INLINE_MEMBER T of(T a, T b) { return minimum(a, b); }
};

template <class T>
INLINE T exchanged(T x, int mask) {
    if constexpr (sizeof(T) == 8) {
        u32 words[2];
        __builtin_memcpy(words, &x, 8);
        words[0] = shuffle_xor(words[0], mask);
        words[1] = shuffle_xor(words[1], mask);
        __builtin_memcpy(&x, words, 8);
        return x;
    } else if constexpr (sizeof(T) == 4) {
        u32 word;
        __builtin_memcpy(&word, &x, 4);
        word = shuffle_xor(word, mask);
        __builtin_memcpy(&x, &word, 4);
        return x;
    } else {
        return (T)shuffle_xor((u32)x, mask);
    }
}
// Combines each of COUNT values over LANES threads that are STRIDE apart, always in the same order.
// Thread number `t` of them gets the value number t / (LANES / COUNT) in v[0]; where there are more
// values than threads, COUNT / LANES of them, from number t * (COUNT / LANES) on.
template <class Op, int LANES, int STRIDE, class T, int COUNT>
INLINE void combine_over(T (&v)[COUNT]) {
    if constexpr (LANES > 1) {
        constexpr int MASK = LANES / 2 * STRIDE;
        if constexpr (COUNT > 1) {
            const bool upper = (thread_index() & MASK) != 0;
            T kept[COUNT / 2];
            UNROLL for (int e = 0; e < COUNT / 2; ++e) {
                const T sent = upper ? v[e] : v[e + COUNT / 2];
                const T own = upper ? v[e + COUNT / 2] : v[e];
                kept[e] = Op::of(own, exchanged(sent, MASK));
            }
            combine_over<Op, LANES / 2, STRIDE>(kept);
            UNROLL for (int e = 0; e < COUNT / 2; ++e) v[e] = kept[e];
        } else {
            v[0] = Op::of(v[0], exchanged(v[0], MASK));
            combine_over<Op, LANES / 2, STRIDE>(v);
        }
    }
}
// Gradients of a row at ROW_TOGETHER steps, after `combine_over` over the warp: the threads that hold a
// value leave it in `to`, which is the place of this thread's first state at the first step.
template <class T, int COUNT>
INLINE void store_row(T* to, const T (&v)[COUNT]) {
    constexpr int OVER = 32 / SPREAD, HELD = COUNT > OVER ? COUNT / OVER : 1;
    constexpr int HOLDERS = COUNT < OVER ? OVER / COUNT : 1;  // of the same value
    const int t = thread_index() % 32 / SPREAD;
    if (t % HOLDERS != 0) return;
    UNROLL for (int n = 0; n < HELD; ++n) {
        const int item = t / HOLDERS * HELD + n;
        to[item / EACH * STATES + item % EACH] = v[n];
    }
}
