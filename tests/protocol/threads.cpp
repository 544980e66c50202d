// The protocol of status_and_watchdog.cuh between real threads, for ThreadSanitizer: blocks publish aggregates of
// their tiles and look ahead for those of others, launch after launch in one workspace.
#include "language.h"

#include <atomic>
#include <thread>

INLINE Word64 load_word64(const char* p) {
    std::this_thread::yield();
    const u64 x = __atomic_load_n((const u64*)p, __ATOMIC_RELAXED);
    return {{(u32)x, (u32)(x >> 32)}};
}
INLINE void store_word64(char* p, const Word64& w) {
    __atomic_store_n((u64*)p, (u64)w.part[0] | (u64)w.part[1] << 32, __ATOMIC_RELAXED);
}
INLINE Word128 load_word128(const char* p) {
    std::this_thread::yield();
    const unsigned __int128 x = __atomic_load_n((const unsigned __int128*)p, __ATOMIC_RELAXED);
    Word128 w;
    memcpy(&w, &x, 16);
    return w;
}
INLINE void store_word128(char* p, const Word128& w) {
    unsigned __int128 x;
    memcpy(&x, &w, 16);
    __atomic_store_n((unsigned __int128*)p, x, __ATOMIC_RELAXED);
}
INLINE u32 load_counter(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
INLINE void store_counter(u32* p, u32 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
INLINE u32 count_up(u32* p) { return __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL); }
INLINE void store_system(u32* p, u32 x) { __atomic_store_n(p, x, __ATOMIC_RELAXED); }
INLINE u64 nanoseconds() { return 0; }

#include "wait_for_slots.cuh"

constexpr int BLOCKS = 4, TILES = 23;
static std::atomic<int> wrong{0};

template <int WORDS> void block(int index, int launch, Header* header, u32* alarm, char* slots) {
    const u32 tag = launch_tag(header);
    Watchdog watchdog;
    watchdog.start(header, alarm, tag);
    Words<WORDS> prefix{}, expected{};
    bool any = false;
    int checked = 0;
    for (int tile = index, seen = 0; tile < TILES; tile += BLOCKS) {
        publish<WORDS>(slots + tile * SLOT_BYTES<WORDS>, element<WORDS>(tile, launch).w, tag);
        for (; seen < tile; ++seen) {
            Words<WORDS> found;
            await_slot<WORDS>(slots + seen * SLOT_BYTES<WORDS>, found.w, tag, watchdog);
            if (!found.whole()) ++wrong;
            prefix = any ? combine(prefix, found) : found;
            any = true;
        }
        for (; checked < tile; ++checked) {
            const Words<WORDS> next = element<WORDS>(checked, launch);
            expected = checked ? combine(expected, next) : next;
        }
        if (tile && memcmp(&expected, &prefix, sizeof prefix)) ++wrong;
    }
    finish(header, tag, BLOCKS, slots, TILES * SLOT_BYTES<WORDS>);
}

template <int WORDS> void launches(int count) {
    std::vector<char> memory(256 + TILES * SLOT_BYTES<WORDS> + 16);
    char* base = (char*)(((u64)memory.data() + 15) & ~15ull);
    Header* header = (Header*)base;
    u32 alarm = 0;
    header->epoch = LAST_EPOCH - 50;  // the epoch wraps on the way
    for (int launch = 0; launch < count; ++launch) {
        std::vector<std::thread> threads;
        for (int b = 0; b < BLOCKS; ++b) threads.emplace_back(block<WORDS>, b, launch, header, &alarm, base + 256);
        for (auto& t : threads) t.join();
    }
    if (header->epoch != (u32)(count - 50) || header->done || alarm) ++wrong;
}

int main() {
    launches<1>(80);
    launches<2>(80);
    launches<6>(80);
    printf("wrong: %d\n", wrong.load());
    return wrong != 0;
}
