// The CPU scan over vectors: forward, and backward by recomputation.
//
// Before this file the generator (vectors/source.py) writes
//   STATES, WIDTH, CHUNK, LEAVES, FIRST, BACKWARD, CARRIES (the leaf of the saved carries, or -1)
//   lists of ports, one F(...) each; a port is one scalar of a leaf, at a constant offset in bytes:
//     INPUTS (and the cotangents of the outputs, backward)
//     forward   OUTPUTS, INITS, FINALS
//     backward  SEEDS, ENDS: the cotangents of the finals and of init; the gradients that are kept
//               for every step and lane (TILES), summed over the lanes (TIMES), over the steps (LANES),
//               over both (UNITS)
//   the structs Tiles, Carry, Saved (the carry that is saved); backward also Kept, TileGradients, TimeSums, LaneSums, UnitSums, Sums
//   identity(carry), step<first>(tiles, carry, t)
//   recompute<first>(tiles, history, kept, t), pull<first>(tiles, history, kept, incoming, sums, t)
//
// A row is one entry of the batch dimensions that are neither the axis nor the lanes. A unit is a row
// and a range of its blocks of WIDTH lanes. A worker takes a fixed range of the units, so that what it
// adds up has one order. It walks a unit in chunks of CHUNK steps; in a chunk it takes one block of
// lanes after another. Meanwhile the carries of all blocks are in memory.
//
// Backward, chunks are taken from the last to the first. In a chunk the states of each block are
// computed again from the saved carry, then the steps are taken from the last to the first. The
// gradient of a leaf that does not vary along the axis or the lanes is summed in a buffer and written
// when it is complete. Where several workers, or one for several rows, add to one gradient, each worker
// has a copy of its own (`Leaf.worker`: the bytes of a copy); Python adds the copies. The last block may
// have fewer lanes than WIDTH: its sums are kept in entry [1], and its unused lanes are left out.
#pragma once
#include "vector_tiles.h"

constexpr int DONE = 0, NO_MEMORY = 1;

struct Problem {
    i64 length, lanes, threads, reverse, dims, sequences, rows, splits, blocks;
    const i64 *sizes, *offsets;
    Leaf leaf[LEAVES];
};

// ---- Places in memory ----

static Span sequence_span(const Problem& problem, i64 sequence) {
    if (!problem.offsets) return {0, problem.length};
    const i64 begin = problem.offsets[sequence];
    return {begin, problem.offsets[sequence + 1] - begin};
}

// A row and a range of its blocks of lanes. base: where the row's data begin in each leaf.
struct Unit {
    char* base[LEAVES];
    i64 row, first, last;
};

static Unit unit_of(const Problem& problem, i64 index, i64 worker) {
    Unit unit;
    unit.row = index / problem.splits;
    const i64 split = index % problem.splits;
    unit.first = problem.blocks * split / problem.splits;
    unit.last = problem.blocks * (split + 1) / problem.splits;
    for (int k = 0; k < LEAVES; ++k)
        unit.base[k] = problem.leaf[k].data + worker * problem.leaf[k].worker;
    i64 rest = unit.row;
    for (i64 d = problem.dims - 1; d >= 0; --d) {
        const i64 index_of_row = rest % problem.sizes[d];
        rest /= problem.sizes[d];
        for (int k = 0; k < LEAVES; ++k) unit.base[k] += index_of_row * problem.leaf[k].outer[d];
    }
    return unit;
}

static inline int lanes_of(const Problem& problem, i64 block) {
    const i64 rest = problem.lanes - block * WIDTH;
    return rest < WIDTH ? (int)rest : WIDTH;
}

// A tile of a leaf with an axis: from step `start` of the span on, in the order of the scan.
static inline Place at_step(
    const Problem& problem, const Unit& unit, int k, Span span, i64 start, i64 block, i64 offset
) {
    const Leaf& leaf = problem.leaf[k];
    const i64 index = problem.reverse ? span.begin + span.count - 1 - start : span.begin + start;
    return {unit.base[k] + offset + index * leaf.step + block * WIDTH * leaf.lane,
            problem.reverse ? -leaf.step : leaf.step, leaf.state, leaf.lane};
}

// A tile of a carry of a sequence, or of a leaf without an axis (sequence 0).
static inline Place at_carry(
    const Problem& problem, const Unit& unit, int k, i64 sequence, i64 block, i64 offset
) {
    const Leaf& leaf = problem.leaf[k];
    return {unit.base[k] + offset + sequence * leaf.sequence + block * WIDTH * leaf.lane, 0,
            leaf.state, leaf.lane};
}

// Where the carry that enters a chunk is saved.
static inline char* saved_carry(
    const Problem& problem, const Unit& unit, Span span, i64 sequence, i64 start, i64 block
) {
    const i64 chunk = span.begin / CHUNK + sequence + start / CHUNK;
    const i64 index = (chunk * problem.rows + unit.row) * problem.blocks + block;
    return problem.leaf[CARRIES < 0 ? 0 : CARRIES].data + index * (i64)sizeof(Saved);
}

static void load_inputs(
    const Problem& problem, const Unit& unit, Tiles& tiles, Span span, i64 start, i64 block, int steps
) {
    const int lanes = lanes_of(problem, block);
    (void)lanes;
#define LOAD(name, V, M, leaf, offset, T, N, W, ...) \
    load_tile<V, M, T ? CHUNK : 1, N ? STATES : 1, W ? WIDTH : 1>( \
        &tiles.name[0][0][0], at_step(problem, unit, leaf, span, start, block, offset), steps, lanes);
    INPUTS(LOAD)
#undef LOAD
}

// ---- Memory of a worker ----

template <class X> struct Buffer {
    X* data = nullptr;
    bool allocate(i64 count) {
        return posix_memalign((void**)&data, 64, (size_t)count * sizeof(X)) == 0;
    }
    ~Buffer() { std::free(data); }
};

struct Work {
    const Problem* problem;
    i64 failed;
};

static void run_units(const Problem& problem, i64 worker, Work& work);

static void worker_body(void* context, i64 worker) {
    Work& work = *(Work*)context;
    run_units(*work.problem, worker, work);
}

#if !BACKWARD

static void scan_unit(const Problem& problem, const Unit& unit, Tiles& tiles, Carry* carries) {
    for (i64 sequence = 0; sequence < problem.sequences; ++sequence) {
        const Span span = sequence_span(problem, sequence);
        for (i64 block = unit.first; block < unit.last; ++block) {
            Carry& carry = carries[block - unit.first];
            identity(carry);
#define LOAD(name, V, M, leaf, offset, N) \
            load_tile<V, M, 1, N ? STATES : 1, WIDTH>( \
                &carry.name[0][0], at_carry(problem, unit, leaf, sequence, block, offset), 1, \
                lanes_of(problem, block));
            INITS(LOAD)
#undef LOAD
        }
        for (i64 start = 0; start < span.count; start += CHUNK) {
            const int steps = span.count - start < CHUNK ? (int)(span.count - start) : CHUNK;
            for (i64 block = unit.first; block < unit.last; ++block) {
                Carry& carry = carries[block - unit.first];
                load_inputs(problem, unit, tiles, span, start, block, steps);
                if (CARRIES >= 0)
                    std::memcpy(saved_carry(problem, unit, span, sequence, start, block), &carry,
                                sizeof carry);
                int t = 0;
                if (FIRST && start == 0) step<true>(tiles, carry, t++);
                for (; t < steps; ++t) step<false>(tiles, carry, t);
#define STORE(name, V, M, leaf, offset, T, N, W) \
                store_tile<V, M, CHUNK, N ? STATES : 1, WIDTH>( \
                    &tiles.name[0][0][0], at_step(problem, unit, leaf, span, start, block, offset), \
                    steps, lanes_of(problem, block));
                OUTPUTS(STORE)
#undef STORE
            }
        }
        for (i64 block = unit.first; block < unit.last; ++block) {
            const Carry& carry = carries[block - unit.first];
            (void)carry;
#define STORE(name, V, M, leaf, offset, N) \
            store_tile<V, M, 1, N ? STATES : 1, WIDTH>( \
                &carry.name[0][0], at_carry(problem, unit, leaf, sequence, block, offset), 1, \
                lanes_of(problem, block));
            FINALS(STORE)
#undef STORE
        }
    }
}

static void run_units(const Problem& problem, i64 worker, Work& work) {
    Buffer<Tiles> tiles;
    Buffer<Carry> carries;
    if (!tiles.allocate(1) || !carries.allocate(problem.blocks)) {
        __atomic_store_n(&work.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const i64 units = problem.rows * problem.splits, count = problem.threads;
    for (i64 k = units * worker / count; k < units * (worker + 1) / count; ++k)
        scan_unit(problem, unit_of(problem, k, worker), *tiles.data, carries.data);
}

#else

struct Buffers {
    Tiles tiles;
    Carry history[CHUNK + 1];
    Kept kept;
    TileGradients tile_gradients;
    TimeSums time_sums[2];  // of whole blocks, and of a partial one
    UnitSums unit_sums[2];
};

static void pull_unit(
    const Problem& problem, const Unit& unit, Buffers& own, Carry* incoming, LaneSums* lane_sums
) {
    const bool is_partial = unit.last * WIDTH > problem.lanes;
    const bool has_whole = unit.last - unit.first > is_partial;
    const int rest = (int)(problem.lanes % WIDTH);
    (void)rest; (void)has_whole;
    std::memset((void*)own.unit_sums, 0, sizeof own.unit_sums);
    std::memset((void*)lane_sums, 0, sizeof(LaneSums) * (unit.last - unit.first));
    for (i64 sequence = 0; sequence < problem.sequences; ++sequence) {
        const Span span = sequence_span(problem, sequence);
        for (i64 block = unit.first; block < unit.last; ++block) {
            Carry& mu = incoming[block - unit.first];
            std::memset((void*)&mu, 0, sizeof mu);
#define LOAD(name, V, M, leaf, offset, N) \
            load_tile<V, M, 1, N ? STATES : 1, WIDTH>( \
                &mu.name[0][0], at_carry(problem, unit, leaf, sequence, block, offset), 1, \
                lanes_of(problem, block));
            SEEDS(LOAD)
#undef LOAD
        }
        for (i64 start = (span.count - 1) / CHUNK * CHUNK; start >= 0 && span.count > 0;
             start -= CHUNK) {
            const int steps = span.count - start < CHUNK ? (int)(span.count - start) : CHUNK;
            const bool first = FIRST && start == 0;
            std::memset((void*)own.time_sums, 0, sizeof own.time_sums);
            for (i64 block = unit.first; block < unit.last; ++block) {
                const int lanes = lanes_of(problem, block);
                Sums sums = {own.tile_gradients, own.time_sums[lanes < WIDTH],
                             lane_sums[block - unit.first], own.unit_sums[lanes < WIDTH]};
                Carry& mu = incoming[block - unit.first];
                load_inputs(problem, unit, own.tiles, span, start, block, steps);
                restore(own.history[0], *(const Saved*)saved_carry(problem, unit, span, sequence,
                                                                   start, block));
                int t = 0;
                if (first) recompute<true>(own.tiles, own.history, own.kept, t++);
                for (; t < steps; ++t) recompute<false>(own.tiles, own.history, own.kept, t);
                for (t = steps - 1; t >= (first ? 1 : 0); --t)
                    pull<false>(own.tiles, own.history, own.kept, mu, sums, t);
                if (first) pull<true>(own.tiles, own.history, own.kept, mu, sums, 0);
#define STORE(name, V, M, leaf, offset, N, ADDS) { \
                    const Place at = at_step(problem, unit, leaf, span, start, block, offset); \
                    const V* tile = &own.tile_gradients.name[0][0][0]; \
                    if (ADDS) add_tile<V, M, CHUNK, N ? STATES : 1, WIDTH>(tile, at, steps, lanes); \
                    else store_tile<V, M, CHUNK, N ? STATES : 1, WIDTH>(tile, at, steps, lanes); \
                }
                TILES(STORE)
#undef STORE
            }
#define STORE(name, V, M, leaf, offset, N, ADDS) { \
                const Place at = at_step(problem, unit, leaf, span, start, 0, offset); \
                const V* const whole = has_whole ? &own.time_sums[0].name[0][0][0] : nullptr; \
                const V* const partial = is_partial ? &own.time_sums[1].name[0][0][0] : nullptr; \
                store_sums<V, M, CHUNK, N ? STATES : 1>({whole, partial, rest}, at, steps, ADDS); \
            }
            TIMES(STORE)
#undef STORE
        }
        for (i64 block = unit.first; block < unit.last; ++block) {
            const Carry& mu = incoming[block - unit.first];
            (void)mu;
#define STORE(name, V, M, leaf, offset, N) \
            store_tile<V, M, 1, N ? STATES : 1, WIDTH>( \
                &mu.name[0][0], at_carry(problem, unit, leaf, sequence, block, offset), 1, \
                lanes_of(problem, block));
            ENDS(STORE)
#undef STORE
        }
    }
#define STORE(name, V, M, leaf, offset, N, ADDS) \
    for (i64 block = unit.first; block < unit.last; ++block) { \
        const Place at = at_carry(problem, unit, leaf, 0, block, offset); \
        const V* tile = &lane_sums[block - unit.first].name[0][0][0]; \
        const int lanes = lanes_of(problem, block); \
        if (ADDS) add_tile<V, M, 1, N ? STATES : 1, WIDTH>(tile, at, 1, lanes); \
        else store_tile<V, M, 1, N ? STATES : 1, WIDTH>(tile, at, 1, lanes); \
    }
    LANES(STORE)
#undef STORE
#define STORE(name, V, M, leaf, offset, N, ADDS) { \
        const Place at = at_carry(problem, unit, leaf, 0, 0, offset); \
        const V* const whole = has_whole ? &own.unit_sums[0].name[0][0][0] : nullptr; \
        const V* const partial = is_partial ? &own.unit_sums[1].name[0][0][0] : nullptr; \
        store_sums<V, M, 1, N ? STATES : 1>({whole, partial, rest}, at, 1, ADDS); \
    }
    UNITS(STORE)
#undef STORE
}

static void run_units(const Problem& problem, i64 worker, Work& work) {
    Buffer<Buffers> own;
    Buffer<Carry> incoming;
    Buffer<LaneSums> lane_sums;
    if (!own.allocate(1) || !incoming.allocate(problem.blocks)
        || !lane_sums.allocate(problem.blocks)) {
        __atomic_store_n(&work.failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int k = 0; k < LEAVES; ++k)
        if (problem.leaf[k].worker)
            std::memset(problem.leaf[k].data + worker * problem.leaf[k].worker, 0,
                        (size_t)problem.leaf[k].worker);
    const i64 units = problem.rows * problem.splits, count = problem.threads;
    for (i64 k = units * worker / count; k < units * (worker + 1) / count; ++k)
        pull_unit(problem, unit_of(problem, k, worker), *own.data, incoming.data, lane_sums.data);
}

#endif

// args: length, lanes, threads, reverse, dims, sequences, offsets, rows, splits, blocks, sizes[dims],
// then per leaf: data, step, lane, state, sequence, worker, outer[dims].
extern "C" int assocscan_run(const i64* args) {
    Problem problem;
    problem.length = args[0];
    problem.lanes = args[1];
    problem.threads = args[2];
    problem.reverse = args[3];
    problem.dims = args[4];
    problem.sequences = args[5];
    problem.offsets = (const i64*)args[6];
    problem.rows = args[7];
    problem.splits = args[8];
    problem.blocks = args[9];
    problem.sizes = args + 10;
    const i64* cursor = problem.sizes + problem.dims;
    for (int k = 0; k < LEAVES; ++k, cursor += 6 + problem.dims)
        problem.leaf[k] = {(char*)cursor[0], cursor[1], cursor[2], cursor[3], cursor[4], cursor[5],
                           cursor + 6};
    Work work = {&problem, 0};
    Buffer<Worker> workers;
    if (!workers.allocate(problem.threads)) return NO_MEMORY;
    parallel(problem.threads, worker_body, &work, workers.data);
    return work.failed ? NO_MEMORY : DONE;
}
