// The kernels' device.cuh for the CPU: every CUDA thread is a fiber of one host thread.
//
// A seeded scheduler picks the next fiber at every operation that could wait or be seen by others;
// asynchronous copies happen at some random later time, at the latest when they are waited for, and
// what they will overwrite is poisoned until then. When nobody can go on, that is a deadlock.
// Global memory is checked against the tensors' ranges. x86-64 only. All of that is the machine's
// (machine.h); here are its names in the kernels.
#pragma once
#include "prelude.h"

#define KERNEL(threads, blocks) static void
#define PARAMETERS(type, name) const type& name
#define CALLED static __attribute__((noinline))
#define UNROLL
#define ROLLED
#define UNROLL_BY(COUNT)
#define __grid_constant__
#define LAUNCH_NUMBERS

INLINE int thread_index() { return emulator::machine->current->thread; }
INLINE int block_index() { return emulator::here().index; }
INLINE int block_count() { return emulator::machine->blocks; }
INLINE char* shared_memory() { return emulator::here().shared; }

INLINE u32 lane_index() { return thread_index() % 32; }
INLINE u32 exchange(u32 x, int from) {
    emulator::Meeting& m = emulator::warp_of(emulator::machine->current);
    const int lane = (int)lane_index();
    const u64 kept = emulator::meet(m, 32, true, lane, x);
    return m.values[kept][from];
}
INLINE u32 shuffle_up(u32 x, int lanes) {
    return exchange(x, (int)lane_index() >= lanes ? (int)lane_index() - lanes : (int)lane_index());
}
INLINE u32 shuffle_down(u32 x, int lanes) {
    return exchange(x,
                    (int)lane_index() + lanes < 32 ? (int)lane_index() + lanes : (int)lane_index());
}
INLINE u32 shuffle_from(u32 x, int lane) { return exchange(x, lane); }
INLINE u32 shuffle_xor(u32 x, int mask) { return exchange(x, (int)lane_index() ^ mask); }
INLINE u32 largest_of_lanes(u32 x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const u32 other = shuffle_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}
INLINE bool all_lanes(bool x) {
    emulator::Meeting& m = emulator::warp_of(emulator::machine->current);
    const u64 kept = emulator::meet(m, 32, true, (int)lane_index(), x);
    for (int k = 0; k < 32; ++k)
        if (!m.values[kept][k]) return false;
    return true;
}
INLINE u32 lanes_where(bool x) {
    emulator::Meeting& m = emulator::warp_of(emulator::machine->current);
    const u64 kept = emulator::meet(m, 32, true, (int)lane_index(), x);
    u32 bits = 0;
    for (int k = 0; k < 32; ++k) bits |= (u32)(m.values[kept][k] != 0) << k;
    return bits;
}
INLINE void sync_warp() { emulator::meet(emulator::warp_of(emulator::machine->current), 32, true); }
INLINE void set_shared_bits(u32* word, u32 bits) { *word |= bits; }
INLINE void store_zeros(u32* four) { memset(four, 0, 16); }
INLINE void raise_shared(u32* word, u32 value) { *word = *word < value ? value : *word; }
INLINE int count_bits(u32 x) { return __builtin_popcount(x); }
INLINE int lowest_bit(u32 x) { return __builtin_ffs(x) - 1; }
INLINE void sync_block() { emulator::meet(emulator::here().all, emulator::machine->threads, true); }
INLINE void arrive(int barrier, int threads) {
    emulator::meet(emulator::here().barriers[barrier], threads, false);
    emulator::yield(false);
}
INLINE void wait_for(int barrier, int threads) {
    emulator::meet(emulator::here().barriers[barrier], threads, true);
}
INLINE void open_barriers(int, int, int) {}
INLINE void barriers_opened() {}

typedef u64 Gate;
INLINE void gate_open(Gate* gate, int arrivals) { emulator::open_gate(gate, arrivals); }
INLINE void gates_opened() {}
INLINE void gate_arrive(Gate* gate) { emulator::arrive_at(gate); }
constexpr int WARP_ARRIVALS = 1;
INLINE void gate_arrive_warp(Gate* gate) {
    sync_warp();
    if (thread_index() % 32 == 0) gate_arrive(gate);
}
INLINE void gate_expect(Gate* gate, u32 bytes) { emulator::expect_at(gate, bytes); }
INLINE void gate_wait(Gate* gate, u32 parity) { emulator::wait_at(gate, parity); }
template <int COUNT>
INLINE void gates_wait(Gate* first, Gate* last, u32 parity) {
    if (last - first >= COUNT) emulator::fail("more gates than are looked at together");
    for (Gate* gate = first; gate <= last; ++gate) gate_wait(gate, parity);
}

template <int BYTES>
INLINE void copy_async(void* to, const void* from, bool valid) {
    emulator::copy_later(to, from, BYTES, valid ? BYTES : 0);
}
INLINE void copy_async_part(void* to, const void* from, int valid) {
    emulator::copy_later(to, from, 16, valid);
}
INLINE void copy_async_16(void* to, const void* from, bool wanted) {
    if (wanted) copy_async_part(to, from, 16);
}
INLINE void copies_commit() { emulator::commit_copies(); }
template <int GROUPS>
INLINE void copies_wait() {
    emulator::wait_for_copies(GROUPS);
}

INLINE void bulk_load(void* to, const void* from, u32 bytes, Gate* gate) {
    emulator::load_later(to, from, bytes, gate);
}
INLINE void bulk_store(void* to, const void* from, u32 bytes) {
    emulator::store_later(to, from, bytes);
}
INLINE void bulk_commit() {}
INLINE void bulk_wait_read() { emulator::wait_for_stores(); }
INLINE void bulk_fence() {}

template <int BYTES>
INLINE void load(u32* to, const char* from) {
    if ((u64)from % BYTES) emulator::fail("a load is not aligned");
    memcpy(to, from, BYTES);
}
template <int BYTES>
INLINE void store(char* to, const u32* from) {
    if ((u64)to % BYTES) emulator::fail("a store is not aligned");
    memcpy(to, from, BYTES);
}
typedef const char* Frozen;
INLINE Frozen frozen(const void* p) { return (const char*)p; }
template <int BYTES>
INLINE void load_frozen(u32* to, Frozen at) {
    if ((u64)at % BYTES) emulator::fail("a load from shared memory is not aligned");
    to[0] = 0;
    memcpy(to, at, BYTES);
}
template <int BYTES>
INLINE void load_in_order(u32* to, const char* from) {
    to[0] = 0;
    memcpy(to, from, BYTES);
}
INLINE bool any_bits(u32 x, u32 bits) { return (x & bits) != 0; }
INLINE u32 funnel_right(u32 low, u32 high, u32 bits) {
    return (u32)((((u64)high << 32) | low) >> (bits & 31));
}

struct Word64 {
    u32 part[2];
};
struct Word128 {
    u32 part[4];
};
INLINE Word64 load_word64(const char* p) {
    emulator::check_range(p, 8, "a look at a slot");
    emulator::yield(true);
    Word64 w;
    memcpy(&w, p, 8);
    return w;
}
INLINE void store_word64(char* p, const Word64& w) {
    emulator::check_range(p, 8, "a store to a slot");
    memcpy(p, &w, 8);
    emulator::progress();
    emulator::yield(false);
}
INLINE Word128 load_word128(const char* p) {
    emulator::check_range(p, 16, "a look at a slot");
    emulator::yield(true);
    Word128 w;
    memcpy(&w, p, 16);
    return w;
}
INLINE void store_word128(char* p, const Word128& w) {
    emulator::check_range(p, 16, "a store to a slot");
    memcpy(p, &w, 16);
    emulator::progress();
    emulator::yield(false);
}
// Other threads may run before and after an access to a counter.
INLINE void let_others_run() {
    u64& x = emulator::machine->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    if ((x >> 22) % 8 == 0) emulator::yield(false);
}
INLINE u32 load_counter(const u32* p) {
    emulator::check_range(p, 4, "a counter's load");
    let_others_run();
    const u32 x = *p;
    let_others_run();
    return x;
}
INLINE void store_counter(u32* p, u32 x) {
    emulator::check_range(p, 4, "a counter's store");
    let_others_run();
    *p = x;
    let_others_run();
}
INLINE u32 count_up(u32* p) {
    let_others_run();
    const u32 x = (*p)++;
    let_others_run();
    return x;
}
INLINE void store_system(u32* p, u32 x) { *p = x; }
INLINE u64 nanoseconds() { return emulator::machine->clock += emulator::machine->clock_step; }

INLINE u32 narrow_two_bf16(float first, float second) {
    return (u32)narrow_bf16(first).bits | ((u32)narrow_bf16(second).bits << 16);
}
INLINE u32 narrow_two_f16(float first, float second) {
    return (u32)narrow_f16(first).bits | ((u32)narrow_f16(second).bits << 16);
}
INLINE float exp2_fast(float x) { return exp2f(x); }
INLINE float fused(float x, float y, float z) { return fmaf(x, y, z); }
INLINE double fused(double x, double y, double z) { return fma(x, y, z); }
INLINE float sigmoid_exp2(float x) { return 1 / (1 + exp2f(x)); }
INLINE float tanh_exp2(float x) { return tanhf(x * 0x1.62e43p-2f); }
