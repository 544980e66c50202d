// The emulator's entry: builds the grid's fibers and runs them to the end, or to an error.
#pragma once

static const Params* launched;

static void fiber_main() {
    scan(*launched);
    emulator::machine->current->finished = true;
    emulator::progress();
    emulator::to_scheduler();
}

// What the launcher asks of a compiled kernel.
extern "C" int shared_bytes() { return SHARED_BYTES; }
extern "C" int block_threads() { return ALL_THREADS; }
extern "C" int parameter_bytes() { return (int)sizeof(Params); }

// ranges: count pairs of addresses. Returns 0, or 1 with `words` filled in.
extern "C" int emulate(int blocks, const void* params, u64 seed, u64 clock_step, const u64* ranges,
                       int count, char* words) {
    using namespace emulator;
    Machine m;
    machine = &m;
    m.blocks = blocks, m.threads = ALL_THREADS;
    m.random = seed * 2654435761u + 88172645463325252ull;
    m.clock_step = clock_step;
    for (int k = 0; k < count; ++k) m.ranges.push_back({ranges[2 * k], ranges[2 * k + 1]});
    launched = (const Params*)params;
    std::vector<std::unique_ptr<Block>> all;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<void*> memory;
    for (int b = 0; b < blocks; ++b) {
        all.push_back(std::make_unique<Block>());
        Block& block = *all.back();
        block.index = b;
        block.warps.resize(ALL_THREADS / WARP);
        block.shared = (char*)aligned_alloc(128, (SHARED_BYTES + 127) / 128 * 128);
        memset(block.shared, 0xff, SHARED_BYTES);
        memory.push_back(block.shared);
        char* stacks = (char*)aligned_alloc(4096, (size_t)STACK * ALL_THREADS);
        memory.push_back(stacks);
        for (int t = 0; t < ALL_THREADS; ++t) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber* f = fibers.back().get();
            f->block = &block, f->thread = t;
            void** top = (void**)(stacks + (size_t)STACK * (t + 1)) - 2;
            *top = (void*)fiber_main;  // `ret` goes there, with the stack as after a call
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
