// What status_and_watchdog.cuh needs, for the CPU; load_word64 and the like come from the file that includes it.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

typedef int64_t i64;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE static inline
#define INLINE_MEMBER inline
#define UNROLL
#define ROLLED
INLINE bool all_lanes(bool x) { return x; }

struct Word64 { u32 part[2]; };
struct Word128 { u32 part[4]; };

// The bicyclic monoid on the first two words, copied to as many as a test wants: not commutative,
// and words of different states are noticed.
template <int WORDS> struct Words {
    u32 w[WORDS];
    static Words of(u32 m, u32 n) {
        Words x;
        for (int k = 0; k < WORDS; ++k) x.w[k] = (k % 2 ? n : m) + 100 * (k / 2);
        return x;
    }
    bool whole() const {
        for (int k = 0; k < WORDS; ++k)
            if (w[k] != w[k % 2] + 100 * (k / 2)) return false;
        return true;
    }
};
template <int WORDS> Words<WORDS> combine(const Words<WORDS>& a, const Words<WORDS>& b) {
    if (WORDS == 1) return Words<WORDS>::of(a.w[0] + b.w[0], 0);
    const u32 m = a.w[0], n = a.w[1 % WORDS], r = b.w[0], s = b.w[1 % WORDS], least = n < r ? n : r;
    return Words<WORDS>::of(m + r - least, s + n - least);
}
template <int WORDS> Words<WORDS> element(int tile, int launch) {
    const u32 x = (u32)(tile * 2654435761u + launch * 40503u) >> 7;
    return Words<WORDS>::of(x % 5, x / 5 % 5);
}
