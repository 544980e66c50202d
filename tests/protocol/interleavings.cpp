// The protocol of status_and_watchdog.cuh under every interleaving of a few blocks: each hands a prefix on to
// the next, several times in one workspace. A step is one access to shared memory. A block
// whose look was too early goes on after the next store.
#include "language.h"

#include <memory>

struct Fiber {
    void* stack_pointer;
    bool finished, waiting;
    std::unique_ptr<char[]> stack;
};
static std::vector<Fiber> fibers;
static int current;
static void* scheduler;

__attribute__((naked, noinline)) static void switch_stack(void**, void*) {
    asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
}
static void step() { switch_stack(&fibers[current].stack_pointer, scheduler); }
static long stores;
static void stored() {
    ++stores;
    for (Fiber& f : fibers) f.waiting = false;
}

template <class T> static T loaded(const void* p) {
    step();
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class T> static void store_step(void* p, const T& x) {
    step();
    memcpy(p, &x, sizeof x);
    stored();
}
INLINE Word64 load_word64(const char* p) { return loaded<Word64>(p); }
INLINE void store_word64(char* p, const Word64& w) { store_step(p, w); }
INLINE Word128 load_word128(const char* p) { return loaded<Word128>(p); }
INLINE void store_word128(char* p, const Word128& w) { store_step(p, w); }
INLINE u32 load_counter(const u32* p) { return *p; }
INLINE void store_counter(u32* p, u32 x) { *p = x; }
INLINE u32 count_up(u32* p) {
    step();
    return (*p)++;
}
INLINE void store_system(u32* p, u32 x) { *p = x; }
INLINE u64 nanoseconds() { return 0; }

#include "status_and_watchdog.cuh"

constexpr int WORDS = PAYLOAD_WORDS, MOST_BLOCKS = 3;
alignas(16) static char workspace[256 + MOST_BLOCKS * SLOT_BYTES<WORDS>];
static int blocks, launches, launch, wrong;

static void chained(int index) {
    Header* header = (Header*)workspace;
    char* slots = workspace + 256;
    const u32 tag = launch_tag(header);
    Words<WORDS> prefix{};
    if (index > 0) {
        Look<WORDS> look;
        while (true) {
            const long before = stores;
            look.load(slots + (index - 1) * SLOT_BYTES<WORDS>);
            if (look.ready(prefix.w, tag)) break;
            fibers[current].waiting = stores == before;
        }
        if (!prefix.whole()) ++wrong;
        Words<WORDS> expected = element<WORDS>(0, launch);
        for (int k = 1; k < index; ++k) expected = combine(expected, element<WORDS>(k, launch));
        if (memcmp(&expected, &prefix, sizeof prefix)) ++wrong;
    }
    const Words<WORDS> own = element<WORDS>(index, launch), next = index ? combine(prefix, own) : own;
    if (index + 1 < blocks) publish<WORDS>(slots + index * SLOT_BYTES<WORDS>, next.w, tag);
    finish(header, tag, blocks, slots, blocks * SLOT_BYTES<WORDS>);
}
static void fiber_main() {
    chained(current);
    fibers[current].finished = true;
    step();
}

// One run along `choices`, which grows by the first choice wherever it has none.
struct Choice { int taken, options; };
static bool run(std::vector<Choice>& choices) {
    memset(workspace, 0, sizeof workspace);
    ((Header*)workspace)->epoch = LAST_EPOCH - 1;  // of the first launch: the next one wraps
    size_t at = 0;
    for (launch = 0; launch < launches; ++launch) {
        for (Fiber& f : fibers) {
            f.finished = f.waiting = false;
            void** top = (void**)(((u64)f.stack.get() + 16384) & ~15ull) - 2;
            *top = (void*)fiber_main;
            f.stack_pointer = top - 6;
        }
        int left = blocks;
        while (left > 0) {
            int able[MOST_BLOCKS], count = 0;
            for (int b = 0; b < blocks; ++b)
                if (!fibers[b].finished && !fibers[b].waiting) able[count++] = b;
            if (count == 0) return false;
            if (at == choices.size()) choices.push_back({0, count});
            current = able[choices[at++].taken];
            switch_stack(&scheduler, fibers[current].stack_pointer);
            if (fibers[current].finished) --left;
        }
    }
    const Header* header = (const Header*)workspace;
    if (header->epoch != (launches > 1 ? (u32)launches - 1 : 0) || header->done != 0) ++wrong;
    return true;
}

// Every interleaving of `blocks_` blocks in `launches_` launches.
static int explore(int blocks_, int launches_) {
    blocks = blocks_, launches = launches_;
    std::vector<Choice> choices;
    for (long runs = 1;; ++runs) {
        if (!run(choices)) return printf("deadlock after %ld runs\n", runs), 2;
        if (wrong) return printf("wrong after %ld runs\n", runs), 1;
        while (!choices.empty() && choices.back().taken + 1 == choices.back().options) choices.pop_back();
        if (choices.empty()) return printf("%d blocks, %d launches: %ld interleavings\n", blocks, launches, runs), 0;
        ++choices.back().taken;
    }
}

int main() {
    fibers.resize(MOST_BLOCKS);
    for (Fiber& f : fibers) f.stack = std::make_unique<char[]>(16384 + 16);
    if (WORDS == 1) return explore(3, 1) + explore(2, 3);
    return explore(2, 1) + explore(2, 2);
}
