// The kernels' device.cuh for the CPU: every CUDA thread is a fiber of one host thread.
//
// A seeded scheduler picks the next fiber at every operation that could wait or be seen by others;
// asynchronous copies happen at some random later time, at the latest when they are waited for, and
// what they will overwrite is poisoned until then. When nobody can go on, that is a deadlock.
// Global memory is checked against the tensors' ranges. x86-64 only.
#pragma once
#include "prelude.h"

typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL(threads, blocks) static void
#define PARAMETERS(type, name) const type& name
#define UNROLL
#define ROLLED
#define UNROLL_BY(COUNT)
#define __grid_constant__
#define LAUNCH_NUMBERS

namespace emulator {

constexpr int STACK = 1 << 16;
constexpr int WARP = 32;
constexpr long MAX_SPINS = 4000000;

struct Block;
struct Fiber {
    void* stack_pointer = nullptr;
    Block* block = nullptr;
    int thread = 0;
    bool blocked = false, finished = false;
    std::deque<std::vector<std::function<void()>>> groups;  // committed copies not yet done
    std::vector<std::function<void()>> open;                // copies not yet committed
    std::vector<int> stores;                                // pending bulk stores, by number
};

struct Meeting {  // of the lanes of a warp, or of a block's threads
    int arrived = 0;
    u64 generation = 0;
    std::vector<Fiber*> waiting;
    u32 values[2][WARP];
};
struct GateState {
    int expected = 0, pending = 0;
    long bytes = 0;
    u32 phase = 0;
    bool awaited = true;  // somebody has seen that the last phase is complete
    std::vector<Fiber*> waiting;
};
struct Block {
    int index = 0;
    char* shared = nullptr;
    std::vector<Meeting> warps;
    Meeting all;
    Meeting barriers[16];
    std::deque<GateState> gates;
    std::vector<Fiber*> fibers;
};
struct Pending {  // a bulk copy under way
    int number;
    std::function<void()> run;
};
struct Range {
    u64 begin, end;
};

struct Machine {
    std::vector<Fiber*> ready;
    std::vector<Pending> pending;
    std::vector<Range> ranges;
    Fiber* current = nullptr;
    void* scheduler = nullptr;
    int blocks = 0, threads = 0, next_number = 0;
    u64 random = 1, clock = 0;
    u64 clock_step = 20;
    long spins = 0;
    std::string error;
};
inline Machine* machine = nullptr;

inline u32 draw(u32 below) {
    u64& x = machine->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (u32)((x >> 20) % below);
}
[[noreturn]] inline void give_up();
inline void fail(const std::string& words) {
    if (machine->error.empty()) machine->error = words;
    give_up();
}

// Saves what a call must preserve, switches stacks, restores.
__attribute__((naked, noinline)) inline void switch_stack(void** save, void* load) {
    asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
}
inline void to_scheduler() {
    Fiber* self = machine->current;
    switch_stack(&self->stack_pointer, machine->scheduler);
}
inline void block_self() {
    machine->current->blocked = true;
    to_scheduler();
}
inline void wake(std::vector<Fiber*>& sleepers) {
    for (Fiber* f : sleepers) {
        f->blocked = false;
        machine->ready.push_back(f);
    }
    sleepers.clear();
}
// Let others run; `spinning` where nothing was achieved.
inline void yield(bool spinning) {
    if (spinning && ++machine->spins > MAX_SPINS)
        fail("no progress: every block polls a slot that nobody fills");
    machine->ready.push_back(machine->current);
    to_scheduler();
}
inline void progress() { machine->spins = 0; }
[[noreturn]] inline void give_up() {
    machine->current->blocked = true;
    while (true) to_scheduler();
}

inline Block& here() { return *machine->current->block; }

// All `count` threads meet; the value of each is kept for the others to read.
inline u64 meet(Meeting& m, int count, bool wait, int place = -1, u32 value = 0) {
    const u64 generation = m.generation;
    if (place >= 0) m.values[generation & 1][place] = value;
    if (++m.arrived == count) {
        m.arrived = 0, ++m.generation;
        progress();
        wake(m.waiting);
    } else if (wait) {
        m.waiting.push_back(machine->current);
        block_self();
    }
    return generation & 1;
}
inline Meeting& warp_of(Fiber* f) { return f->block->warps[f->thread / WARP]; }

inline void check_range(const void* p, int bytes, const char* what) {
    const u64 a = (u64)p;
    for (const Range& r : machine->ranges)
        if (a >= (r.begin & ~15ull) && a + bytes <= ((r.end + 15) & ~15ull)) return;
    char words[160];
    snprintf(words, sizeof words, "%s of %d bytes outside of every tensor, at %p", what, bytes, p);
    fail(words);
}
inline GateState& gate_state(u64* gate) {
    Block& b = here();
    if (*gate >= b.gates.size()) fail("a gate is used before it is opened");
    return b.gates[*gate];
}
// As synccheck: a phase that nobody has waited for must not be followed by another.
inline void arrive_once(GateState& g) {
    if (g.pending == 0) fail("more arrivals at a gate than it was opened for");
    if (!g.awaited) fail("a gate turns again and nobody has waited for it");
    --g.pending;
}
inline void settle(GateState& g) {
    if (g.pending == 0 && g.bytes == 0) {
        g.phase ^= 1, g.pending = g.expected, g.awaited = !g.waiting.empty();
        progress();
        wake(g.waiting);
    }
}
inline void run_pending(size_t k) {
    Pending p = std::move(machine->pending[k]);
    machine->pending.erase(machine->pending.begin() + k);
    p.run();
    progress();
}

}  // namespace emulator

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
INLINE bool all_lanes(bool x) {
    emulator::Meeting& m = emulator::warp_of(emulator::machine->current);
    const u64 kept = emulator::meet(m, 32, true, (int)lane_index(), x);
    for (int k = 0; k < 32; ++k)
        if (!m.values[kept][k]) return false;
    return true;
}
INLINE void sync_warp() { emulator::meet(emulator::warp_of(emulator::machine->current), 32, true); }
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
INLINE void gate_open(Gate* gate, int arrivals) {
    auto& gates = emulator::here().gates;
    *gate = gates.size();
    gates.emplace_back();
    gates.back().expected = gates.back().pending = arrivals;
}
INLINE void gates_opened() {}
INLINE void gate_arrive(Gate* gate) {
    emulator::GateState& g = emulator::gate_state(gate);
    emulator::arrive_once(g);
    emulator::settle(g);
    emulator::yield(false);
}
constexpr int WARP_ARRIVALS = 1;
INLINE void gate_arrive_warp(Gate* gate) {
    sync_warp();
    if (thread_index() % 32 == 0) gate_arrive(gate);
}
INLINE void gate_expect(Gate* gate, u32 bytes) {
    emulator::GateState& g = emulator::gate_state(gate);
    emulator::arrive_once(g);
    g.bytes += bytes;
    emulator::settle(g);
}
INLINE void gate_wait(Gate* gate, u32 parity) {
    emulator::GateState& g = emulator::gate_state(gate);
    while ((g.phase & 1) == parity) {  // the phase of that parity is not complete
        g.waiting.push_back(emulator::machine->current);
        emulator::block_self();
    }
    g.awaited = true;
}
template <int COUNT>
INLINE void gates_wait(Gate* first, Gate* last, u32 parity) {
    if (last - first >= COUNT) emulator::fail("more gates than are looked at together");
    for (Gate* gate = first; gate <= last; ++gate) gate_wait(gate, parity);
}

template <int BYTES>
INLINE void copy_async(void* to, const void* from, bool valid) {
    if ((u64)to % BYTES || (u64)from % BYTES) emulator::fail("an asynchronous copy is not aligned");
    if (valid) emulator::check_range(from, BYTES, "a copy");
    memset(to, 0xff, BYTES);
    emulator::machine->current->open.push_back([=] {
        if (valid) memcpy(to, from, BYTES);
        else memset(to, 0, BYTES);
    });
}
INLINE void copies_commit() {
    emulator::Fiber* f = emulator::machine->current;
    f->groups.push_back(std::move(f->open));
    f->open.clear();
}
template <int GROUPS>
INLINE void copies_wait() {
    emulator::Fiber* f = emulator::machine->current;
    while (f->groups.size() > GROUPS) {
        for (auto& copy : f->groups.front()) copy();
        f->groups.pop_front();
    }
    emulator::yield(false);
}

INLINE void bulk_load(void* to, const void* from, u32 bytes, Gate* gate) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0)
        emulator::fail("a bulk load is not aligned");
    emulator::check_range(from, (int)bytes, "a bulk load");
    memset(to, 0xff, bytes);
    emulator::GateState* g = &emulator::gate_state(gate);
    emulator::machine->pending.push_back({emulator::machine->next_number++, [=] {
                                              memcpy(to, from, bytes);
                                              g->bytes -= bytes;
                                              emulator::settle(*g);
                                          }});
}
INLINE void bulk_store(void* to, const void* from, u32 bytes) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0)
        emulator::fail("a bulk store is not aligned");
    emulator::check_range(to, (int)bytes, "a bulk store");
    emulator::Fiber* f = emulator::machine->current;
    const int number = emulator::machine->next_number++;
    f->stores.push_back(number);
    emulator::machine->pending.push_back({number, [=] { memcpy(to, from, bytes); }});
}
INLINE void bulk_commit() {}
INLINE void bulk_wait_read() {
    emulator::Fiber* f = emulator::machine->current;
    emulator::yield(false);
    for (int number : f->stores)
        for (size_t k = 0; k < emulator::machine->pending.size(); ++k)
            if (emulator::machine->pending[k].number == number) {
                emulator::run_pending(k);
                break;
            }
    f->stores.clear();
}
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
INLINE u32 load_counter(const u32* p) { return *p; }
INLINE void store_counter(u32* p, u32 x) { *p = x; }
INLINE u32 count_up(u32* p) { return (*p)++; }
INLINE void store_system(u32* p, u32 x) { *p = x; }
INLINE u64 nanoseconds() { return emulator::machine->clock += emulator::machine->clock_step; }

INLINE u32 narrow_two_bf16(float first, float second) {
    return (u32)narrow_bf16(first).bits | ((u32)narrow_bf16(second).bits << 16);
}
INLINE u32 narrow_two_f16(float first, float second) {
    return (u32)narrow_f16(first).bits | ((u32)narrow_f16(second).bits << 16);
}
INLINE float exp2_fast(float x) { return exp2f(x); }
