// The instructions that the kernels use, one function for each.
//
// Besides it only hardware_functions.cuh and the shared scalar.h contain PTX; they and
// cuda_language.cuh have the few other names of CUDA's own. tests/emulator has a second version of
// this file, on which the same kernels run on the CPU.
//
// Needs compute capability 8.0 (asynchronous copies, 128-bit words); bulk copies and gates need
// 9.0.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define PARAMETERS(type, name) const __grid_constant__ type name
#define CALLED static __device__ __noinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define UNROLL_BY(COUNT) PRAGMA(unroll(COUNT))
#define PRAGMA(WORDS) _Pragma(#WORDS)

constexpr u32 EVERY_LANE = 0xffffffffu;

INLINE int thread_index() { return threadIdx.x; }
INLINE int block_index() { return blockIdx.x; }
INLINE int block_count() { return gridDim.x; }

INLINE char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- warps ----
INLINE u32 shuffle_up(u32 x, int lanes) { return __shfl_up_sync(EVERY_LANE, x, lanes); }
INLINE u32 shuffle_down(u32 x, int lanes) { return __shfl_down_sync(EVERY_LANE, x, lanes); }
INLINE u32 shuffle_from(u32 x, int lane) { return __shfl_sync(EVERY_LANE, x, lane); }
INLINE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(EVERY_LANE, x, mask); }
INLINE bool all_lanes(bool x) { return __all_sync(EVERY_LANE, x); }
// A bit for each lane.
INLINE u32 lanes_where(bool x) { return __ballot_sync(EVERY_LANE, x); }
INLINE u32 largest_of_lanes(u32 x) { return __reduce_max_sync(EVERY_LANE, x); }
INLINE void sync_warp() { __syncwarp(); }
// Sets bits of a word in shared memory, which other lanes may change at the same time.
INLINE void set_shared_bits(u32* word, u32 bits) { atomicOr(word, bits); }
INLINE void store_zeros(u32* four) { *(uint4*)four = make_uint4(0, 0, 0, 0); }
INLINE void raise_shared(u32* word, u32 value) { atomicMax(word, value); }
INLINE int count_bits(u32 x) { return __popc(x); }
INLINE int lowest_bit(u32 x) { return __ffs(x) - 1; }

// ---- gates (mbarrier): count arrivals and bytes; a wait names the parity of the phase ----
typedef u64 Gate;
INLINE void gate_open(Gate* gate, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals)
                 : "memory");
}
INLINE void gates_opened() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void gate_arrive(Gate* gate) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}
INLINE void gate_expect(Gate* gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(gate)),
                 "r"(bytes)
                 : "memory");
}
INLINE void gate_wait(Gate* gate, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        " @done bra DONE;\n bra WAIT;\n"
        "DONE:\n}" ::"r"(shared_address(gate)),
        "r"(parity)
        : "memory");
}

INLINE bool gate_test(Gate* gate, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(gate)), "r"(parity)
        : "memory");
    return done != 0;
}
// Waits for the gates from `first` to `last`, at most COUNT; all are tested together.
template <int COUNT>
INLINE void gates_wait(Gate* first, Gate* last, u32 parity) {
    bool all;
    do {
        all = true;
        UNROLL for (int q = 0; q < COUNT; ++q)
            all = gate_test(first + q < last ? first + q : last, parity) && all;
    } while (!all);
}

// ---- barriers of a block: producers arrive and go on, consumers wait; whole warps together ----
INLINE void sync_block() { __syncthreads(); }
#ifndef RACECHECK
INLINE void open_barriers(int, int, int) {}  // named barriers need no initialisation
INLINE void barriers_opened() {}
#ifndef SYNCCHECK
#define BARRIER "bar"
#else
// For compute-sanitizer's synccheck: the forms that need no convergence. It reports `bar.sync` of the
// role `boundaries` of lanes, whose warp has converged (WARPSYNC.ALL stands before BAR.SYNC).
#define BARRIER "barrier"
#endif
// What a thread wrote before it arrived is visible to all threads that the barrier releases.
INLINE void arrive(int barrier, int threads) {
    __syncwarp();
    asm volatile(BARRIER ".arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
INLINE void wait_for(int barrier, int threads) {
    __syncwarp();
    asm volatile(BARRIER ".sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// How many arrivals at a gate one warp makes.
constexpr int WARP_ARRIVALS = 1;
INLINE void gate_arrive_warp(Gate* gate) {
    __syncwarp();
    if (thread_index() % 32 == 0) gate_arrive(gate);
}
#else
// For compute-sanitizer's racecheck: mbarriers in place of named barriers, and every thread arrives
// itself. The tool does not follow several named barriers, nor one lane that arrives for its warp.
INLINE Gate* barrier_gate(int barrier) {
    __shared__ Gate gates[16];
    return gates + barrier;
}
INLINE void open_barriers(int first, int count, int threads) {
    if (thread_index() == 0)
        for (int k = 0; k < count; ++k) gate_open(barrier_gate(first + k), threads);
}
INLINE void barriers_opened() { __syncthreads(); }
INLINE u64 arrive(int barrier, int) {
    u64 phase;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
                 : "=l"(phase)
                 : "r"(shared_address(barrier_gate(barrier)))
                 : "memory");
    return phase;
}
INLINE void wait_for(int barrier, int threads) {
    const u64 phase = arrive(barrier, threads);
    asm volatile(
        "{\n .reg .pred done;\n"
        "WAIT: mbarrier.try_wait.shared.b64 done, [%0], %1;\n"
        " @done bra DONE;\n bra WAIT;\n"
        "DONE:\n}" ::"r"(shared_address(barrier_gate(barrier))),
        "l"(phase)
        : "memory");
}
constexpr int WARP_ARRIVALS = 32;
INLINE void gate_arrive_warp(Gate* gate) { gate_arrive(gate); }
#endif

// ---- asynchronous copies, global to shared, by the thread that will read them ----
template <int BYTES>
INLINE void copy_async(void* to, const void* from, bool valid) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                     "l"(from), "r"(valid ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                     "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0)
                     : "memory");
}
// 16 bytes, of which the first `valid` are read; the rest becomes zero.
INLINE void copy_async_part(void* to, const void* from, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(valid)
                 : "memory");
}
// 16 bytes, if they are `wanted`; without a branch.
INLINE void copy_async_16(void* to, const void* from, bool wanted) {
    asm volatile(
        "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %2, 0;\n"
        " @wanted cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared_address(to)),
        "l"(from), "r"((u32)wanted)
        : "memory");
}
INLINE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS>
INLINE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ---- bulk copies (TMA without a tensor map): multiples of 16 bytes at multiples of 16 ----
INLINE void bulk_load(void* to, const void* from, u32 bytes, Gate* gate) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(gate))
        : "memory");
}
INLINE void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
INLINE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
INLINE void bulk_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- plain accesses of a known width ----
template <int BYTES>
INLINE void load(u32* to, const char* from) {
    if constexpr (BYTES == 16) {
        const uint4 q = *(const uint4*)from;
        to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
    } else if constexpr (BYTES == 8) {
        const uint2 q = *(const uint2*)from;
        to[0] = q.x, to[1] = q.y;
    } else {
        to[0] = *(const u32*)from;
    }
}
template <int BYTES>
INLINE void store(char* to, const u32* from) {
    if constexpr (BYTES == 16) *(uint4*)to = make_uint4(from[0], from[1], from[2], from[3]);
    else if constexpr (BYTES == 8) *(uint2*)to = make_uint2(from[0], from[1]);
    else *(u32*)to = from[0];
}
// Shared memory that nobody writes until the next barrier of the block: such loads may be moved
// across stores, which the compiler cannot know otherwise. `frozen` stands after the barrier before,
// and no load can be moved above it.
typedef u32 Frozen;
INLINE Frozen frozen(const void* p) {
    u32 address = shared_address(p);
    asm volatile("mov.u32 %0, %0;" : "+r"(address)::"memory");
    return address;
}
template <int BYTES>
INLINE void load_frozen(u32* to, Frozen at) {
    if constexpr (BYTES == 16) {
        asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
            : "r"(at));
    } else if constexpr (BYTES == 8) {
        asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
    } else if constexpr (BYTES == 4) {
        asm("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at));
    } else if constexpr (BYTES == 2) {
        asm("{\n .reg .u16 x;\n ld.shared.u16 x, [%1];\n cvt.u32.u16 %0, x;\n}"
            : "=r"(to[0])
            : "r"(at));
    } else {
        asm("{\n .reg .u16 x;\n ld.shared.u8 x, [%1];\n cvt.u32.u16 %0, x;\n}"
            : "=r"(to[0])
            : "r"(at));
    }
}
// Shared memory, by loads that keep their order among each other and with barriers. The assembler
// moves other loads to just before their use, where they are waited for.
template <int BYTES>
INLINE void load_in_order(u32* to, const char* from) {
    const u32 at = shared_address(from);
    if constexpr (BYTES == 4) {
        asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at));
    } else if constexpr (BYTES == 2) {
        asm volatile("{\n .reg .u16 x;\n ld.volatile.shared.u16 x, [%1];\n cvt.u32.u16 %0, x;\n}"
                     : "=r"(to[0])
                     : "r"(at));
    } else {
        load<BYTES>(to, from);
    }
}
// Whether x has some of these bits, by one instruction: compilers shift, mask and compare.
INLINE bool any_bits(u32 x, u32 bits) {
    u32 any;
    asm("{\n .reg .pred p;\n .reg .u32 t;\n and.b32 t, %1, %2;\n setp.ne.u32 p, t, 0;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(any)
        : "r"(x), "r"(bits));
    return any != 0;
}
INLINE u32 funnel_right(u32 low, u32 high, u32 bits) { return __funnelshift_r(low, high, bits); }

// ---- status words: single-copy atomic, through the second-level cache, in no order ----
struct Word64 {
    u32 part[2];
};
struct Word128 {
    u32 part[4];
};
INLINE Word64 load_word64(const char* p) {
    u64 x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return {{(u32)x, (u32)(x >> 32)}};
}
INLINE void store_word64(char* p, const Word64& w) {
    const u64 x = (u64)w.part[0] | ((u64)w.part[1] << 32);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
INLINE Word128 load_word128(const char* p) {
    u64 a, b;
    asm volatile(
        "{\n .reg .b128 t;\n ld.relaxed.gpu.global.b128 t, [%2];\n mov.b128 {%0, %1}, t;\n}"
        : "=l"(a), "=l"(b)
        : "l"(p)
        : "memory");
    return {{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)}};
}
INLINE void store_word128(char* p, const Word128& w) {
    const u64 a = (u64)w.part[0] | ((u64)w.part[1] << 32),
              b = (u64)w.part[2] | ((u64)w.part[3] << 32);
    asm volatile(
        "{\n .reg .b128 t;\n mov.b128 t, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], t;\n}" ::
            "l"(p),
        "l"(a), "l"(b)
        : "memory");
}
INLINE u32 load_counter(const u32* p) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
INLINE void store_counter(u32* p, u32 x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// Acquire and release: orders all that the thread did before the increment, and makes visible what
// came before earlier increments.
INLINE u32 count_up(u32* p) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(p) : "memory");
    return old;
}
INLINE void store_system(u32* p, u32 x) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
INLINE u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// ---- two floats rounded to 16 bits, the first in the lower half ----
INLINE u32 narrow_two_bf16(float first, float second) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
INLINE u32 narrow_two_f16(float first, float second) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}

// What the launcher reads from a compiled kernel.
#define LAUNCH_NUMBERS \
    extern "C" __device__ const int launch_numbers[2] = {ALL_THREADS, SHARED_BYTES};
