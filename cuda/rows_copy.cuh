// The roles of rows_scan.cuh that copy tiles: load and store.
#pragma once

INLINE void load_role(const Params& P, Shared& shared, char* ring, int tiles) {
    Walk walk;
    walk.start(P);
    RingCursor<STAGES> stage;
    RingCursor<STAGES * CHUNKS> oldest;  // chunk in flight
    int in_flight = 0;
    ROLLED for (int it = 0; it < tiles; ++it) {
        if (it >= STAGES) gate_wait(&shared.vacant[stage.place], stage.parity ^ 1);  // turn before
        ROLLED for (int q = 0; q < CHUNKS; ++q) {
            if (in_flight == IN_FLIGHT) {
                gate_wait(&shared.full[oldest.place], oldest.parity);
                oldest.advance();
            } else {
                ++in_flight;
            }
            Gate* gate = &shared.full[stage.place * CHUNKS + q];
            u32 bytes = 0;
            i64 begin[INPUT_COUNT], end[INPUT_COUNT];
#define MEASURE(J)                                                         \
    if constexpr (!Input<J>::ONE) {                                        \
        piece<J>(P, walk, q, input_address<J>(P, walk), begin[J], end[J]); \
        bytes += (u32)(end[J] - begin[J]);                                 \
    }
            INPUTS(MEASURE)
#undef MEASURE
            if (bytes == 0) {
                gate_arrive(gate);
                continue;
            }
            gate_expect(gate, bytes);
#define LOAD(J)                                                                   \
    if constexpr (!Input<J>::ONE) {                                               \
        if (end[J] > begin[J]) {                                                  \
            const u64 from = (input_address<J>(P, walk) & ~15ull) + begin[J];     \
            bulk_load(ring + stage.place * STAGE_BYTES + Input<J>::AT + begin[J], \
                      (const void*)from, (u32)(end[J] - begin[J]), gate);         \
        }                                                                         \
    }
            INPUTS(LOAD)
#undef LOAD
        }
        stage.advance();
        walk.next(P);
    }
}

INLINE void store_role(const Params& P, Shared& shared, const char* ring, int tiles) {
    const int lane = thread_index() % 32;
    Walk walk;
    walk.start(P);
    RingCursor<STAGES> stage;
    ROLLED for (int it = 0; it < tiles; ++it) {
        gate_wait(&shared.done[stage.place], stage.parity);
        const i64 low = walk.lowest(P);
        const i64 first = clamped(-low, 0, TILE_STEPS),
                  last = clamped(P.length - low, 0, TILE_STEPS);
#define STORE(J)                                                                                 \
    {                                                                                            \
        typedef Output<J> Leaf;                                                                  \
        const u64 address = output_address<J>(P, walk);                                          \
        const u64 begin = address + first * ELEMENT<Leaf>, end = address + last * ELEMENT<Leaf>; \
        const char* from =                                                                       \
            ring + stage.place * STAGE_BYTES + Leaf::AT +                                        \
            (Leaf::ALIGNED ? 0 : (int)(address & 15));                                           \
        u64 middle = (begin + 15) & ~15ull, rest = end & ~15ull;                                 \
        if (middle > rest) middle = rest = end;                                                  \
        if (lane == 0 && rest > middle)                                                          \
            bulk_store((void*)middle, from + (i64)(middle - address), (u32)(rest - middle));     \
        const u64 head = begin + lane, tail = rest + lane;                                       \
        if (head < middle && head < end)                                                         \
            *(uint8_t*)head = *(const uint8_t*)(from + (i64)(head - address));                   \
        if (tail < end) *(uint8_t*)tail = *(const uint8_t*)(from + (i64)(tail - address));       \
    }
        OUTPUTS(STORE)
#undef STORE
        if (lane == 0) bulk_commit();
        if (it + STAGES < tiles) {
            if (lane == 0) bulk_wait_read();
            gate_arrive_warp(&shared.vacant[stage.place]);
        }
        stage.advance();
        walk.next(P);
    }
    if (lane == 0) bulk_wait_read();
}
