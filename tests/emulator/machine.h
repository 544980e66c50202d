// The machine that runs a kernel's fibers: one host thread and a seeded scheduler.
#pragma once
#include <deque>
#include <functional>
#include <string>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

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
extern Machine* machine;

// Ends the run with an error.
[[noreturn]] void fail(const char* words);
// Let others run; `spinning` where nothing was achieved.
void yield(bool spinning);
void progress();
void block_self();
inline Block& here() { return *machine->current->block; }
inline Meeting& warp_of(Fiber* f) { return f->block->warps[f->thread / WARP]; }

// All `count` threads meet; the value of each is kept for the others to read.
u64 meet(Meeting& m, int count, bool wait, int place = -1, u32 value = 0);

void check_range(const void* p, int bytes, const char* what);

void open_gate(u64* gate, int arrivals);
void arrive_at(u64* gate);
void expect_at(u64* gate, u32 bytes);
void wait_at(u64* gate, u32 parity);

// Asynchronous copies happen when they are waited for, bulk copies at some time before.
void copy_later(void* to, const void* from, int bytes, int valid);
void commit_copies();
void wait_for_copies(size_t groups);
void load_later(void* to, const void* from, u32 bytes, u64* gate);
void store_later(void* to, const void* from, u32 bytes);
void wait_for_stores();

// Runs `blocks` times `threads` fibers, to the end of all or to an error. ranges: `count` pairs of
// addresses. Returns 0, or 1 with `words` filled in.
int run(void (*fiber)(), int blocks, int threads, int shared_bytes, u64 seed, u64 clock_step,
        const u64* ranges, int count, char* words);
void finish_fiber();

}  // namespace emulator
