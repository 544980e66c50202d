// The machine's part of the emulator, compiled once for all kernels.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace emulator {

Machine* machine = nullptr;

static u32 draw(u32 below) {
    u64& x = machine->random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return (u32)((x >> 20) % below);
}
[[noreturn]] static void give_up();
void fail(const char* words) {
    if (machine->error.empty()) machine->error = words;
    give_up();
}

// Saves what a call must preserve, switches stacks, restores.
__attribute__((naked, noinline)) static void switch_stack(void** save, void* load) {
    asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
}
static void to_scheduler() {
    Fiber* self = machine->current;
    switch_stack(&self->stack_pointer, machine->scheduler);
}
void block_self() {
    machine->current->blocked = true;
    to_scheduler();
}
static void wake(std::vector<Fiber*>& sleepers) {
    for (Fiber* f : sleepers) {
        f->blocked = false;
        machine->ready.push_back(f);
    }
    sleepers.clear();
}
void yield(bool spinning) {
    if (spinning && ++machine->spins > MAX_SPINS)
        fail("no progress: every block polls a slot that nobody fills");
    machine->ready.push_back(machine->current);
    to_scheduler();
}
void progress() { machine->spins = 0; }
[[noreturn]] static void give_up() {
    machine->current->blocked = true;
    while (true) to_scheduler();
}

u64 meet(Meeting& m, int count, bool wait, int place, u32 value) {
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
void check_range(const void* p, int bytes, const char* what) {
    const u64 a = (u64)p;
    for (const Range& r : machine->ranges)
        if (a >= (r.begin & ~15ull) && a + bytes <= ((r.end + 15) & ~15ull)) return;
    char words[160];
    snprintf(words, sizeof words, "%s of %d bytes outside of every tensor, at %p", what, bytes, p);
    fail(words);
}
static GateState& gate_state(u64* gate) {
    Block& b = here();
    if (*gate >= b.gates.size()) fail("a gate is used before it is opened");
    return b.gates[*gate];
}
// As synccheck: a phase that nobody has waited for must not be followed by another.
static void arrive_once(GateState& g) {
    if (g.pending == 0) fail("more arrivals at a gate than it was opened for");
    if (!g.awaited) fail("a gate turns again and nobody has waited for it");
    --g.pending;
}
static void settle(GateState& g) {
    if (g.pending == 0 && g.bytes == 0) {
        g.phase ^= 1, g.pending = g.expected, g.awaited = !g.waiting.empty();
        progress();
        wake(g.waiting);
    }
}
static void run_pending(size_t k) {
    Pending p = std::move(machine->pending[k]);
    machine->pending.erase(machine->pending.begin() + k);
    p.run();
    progress();
}

void open_gate(u64* gate, int arrivals) {
    auto& gates = here().gates;
    *gate = gates.size();
    gates.emplace_back();
    gates.back().expected = gates.back().pending = arrivals;
}
void arrive_at(u64* gate) {
    GateState& g = gate_state(gate);
    arrive_once(g);
    settle(g);
    yield(false);
}
void expect_at(u64* gate, u32 bytes) {
    GateState& g = gate_state(gate);
    arrive_once(g);
    g.bytes += bytes;
    settle(g);
}
void wait_at(u64* gate, u32 parity) {
    GateState& g = gate_state(gate);
    while ((g.phase & 1) == parity) {  // the phase of that parity is not complete
        g.waiting.push_back(machine->current);
        block_self();
    }
    g.awaited = true;
}

void copy_later(void* to, const void* from, int bytes, int valid) {
    if ((u64)to % bytes || (u64)from % bytes) fail("an asynchronous copy is not aligned");
    if (valid < 0 || valid > bytes) fail("an asynchronous copy has another size");
    if (valid) check_range(from, valid, "a copy");
    memset(to, 0xff, bytes);
    machine->current->open.push_back([=] {
        memcpy(to, from, valid);
        memset((char*)to + valid, 0, bytes - valid);
    });
}
void commit_copies() {
    Fiber* f = machine->current;
    f->groups.push_back(std::move(f->open));
    f->open.clear();
}
void wait_for_copies(size_t groups) {
    Fiber* f = machine->current;
    while (f->groups.size() > groups) {
        for (auto& copy : f->groups.front()) copy();
        f->groups.pop_front();
    }
    yield(false);
}

void load_later(void* to, const void* from, u32 bytes, u64* gate) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0)
        fail("a bulk load is not aligned");
    check_range(from, (int)bytes, "a bulk load");
    memset(to, 0xff, bytes);
    GateState* g = &gate_state(gate);
    machine->pending.push_back({machine->next_number++, [=] {
                                    memcpy(to, from, bytes);
                                    g->bytes -= bytes;
                                    settle(*g);
                                }});
}
void store_later(void* to, const void* from, u32 bytes) {
    if ((u64)to % 16 || (u64)from % 16 || bytes % 16 || bytes == 0)
        fail("a bulk store is not aligned");
    check_range(to, (int)bytes, "a bulk store");
    const int number = machine->next_number++;
    machine->current->stores.push_back(number);
    machine->pending.push_back({number, [=] { memcpy(to, from, bytes); }});
}
void wait_for_stores() {
    Fiber* f = machine->current;
    yield(false);
    for (int number : f->stores)
        for (size_t k = 0; k < machine->pending.size(); ++k)
            if (machine->pending[k].number == number) {
                run_pending(k);
                break;
            }
    f->stores.clear();
}

void finish_fiber() {
    machine->current->finished = true;
    progress();
    to_scheduler();
}

int run(void (*fiber)(), int blocks, int threads, int shared_bytes, u64 seed, u64 clock_step,
        const u64* ranges, int count, char* words) {
    Machine m;
    machine = &m;
    m.blocks = blocks, m.threads = threads;
    m.random = seed * 2654435761u + 88172645463325252ull;
    m.clock_step = clock_step;
    for (int k = 0; k < count; ++k) m.ranges.push_back({ranges[2 * k], ranges[2 * k + 1]});
    std::vector<std::unique_ptr<Block>> all;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<void*> memory;
    for (int b = 0; b < blocks; ++b) {
        all.push_back(std::make_unique<Block>());
        Block& block = *all.back();
        block.index = b;
        block.warps.resize(threads / WARP);
        block.shared = (char*)aligned_alloc(128, (shared_bytes + 127) / 128 * 128);
        memset(block.shared, 0xff, shared_bytes);
        memory.push_back(block.shared);
        char* stacks = (char*)aligned_alloc(4096, (size_t)STACK * threads);
        memory.push_back(stacks);
        for (int t = 0; t < threads; ++t) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber* f = fibers.back().get();
            f->block = &block, f->thread = t;
            void** top = (void**)(stacks + (size_t)STACK * (t + 1)) - 2;
            *top = (void*)fiber;  // `ret` goes there, with the stack as after a call
            f->stack_pointer = top - 6;
            m.ready.push_back(f);
        }
    }
    size_t left = fibers.size();
    while (left > 0 && m.error.empty()) {
        if (!m.pending.empty() && (m.ready.empty() || draw(8) == 0)) {
            run_pending(draw((u32)m.pending.size()));
            continue;
        }
        if (m.ready.empty()) {
            m.error = "deadlock: every thread waits";
            for (auto& b : all)
                for (int k = 0; k < 16; ++k)
                    if (b->barriers[k].arrived)
                        m.error += " [block " + std::to_string(b->index) + " barrier " +
                                   std::to_string(k) + ": " +
                                   std::to_string(b->barriers[k].arrived) + " arrived]";
            break;
        }
        const u32 k = draw((u32)m.ready.size());
        Fiber* f = m.ready[k];
        m.ready[k] = m.ready.back();
        m.ready.pop_back();
        m.current = f;
        switch_stack(&m.scheduler, f->stack_pointer);
        if (f->finished) --left;
    }
    while (!m.pending.empty()) run_pending(0);
    if (m.error.empty())
        for (auto& b : all)
            for (int k = 0; k < 16; ++k)
                if (b->barriers[k].arrived)
                    m.error = "a block ended with arrivals left at barrier " + std::to_string(k);
    for (void* p : memory) free(p);
    machine = nullptr;
    snprintf(words, 1000, "%s", m.error.c_str());
    return m.error.empty() ? 0 : 1;
}

}  // namespace emulator
