// Occupies a multiprocessor per block for some time, as another program on the same GPU would.
#pragma once

constexpr int ALL_THREADS = 256, SHARED_BYTES = 96 << 10;

struct Params {
    i64 nanoseconds;
};

KERNEL(ALL_THREADS, 1) scan(PARAMETERS(Params, P)) {
    const u64 begin = nanoseconds();
    while (nanoseconds() - begin < (u64)P.nanoseconds) {}
}

LAUNCH_NUMBERS
