// Functions of a float in few instructions and without branches, by what the hardware has.
//
// A step that is not associative waits for each of them: 1 / (1 + e^-x) by the library's functions
// takes 90 cycles, here 50. Results below 2^-126 are zero.
#pragma once

// 2^x and 1 / x, accurate to two units in the last place.
INLINE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
INLINE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float sigmoid(float x) { return reciprocal_fast(1 + exp2_fast(x * -0x1.715476p0f)); }

#ifdef COARSE  // all numbers in memory have 16 bits: a relative error of 2^-11 is below their rounding
INLINE float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
// Where |x| is small, x + x^3 p(x^2): p is a minimax fit (Lawson).
INLINE float tanh_of(float x) {
    const float a = __builtin_fabsf(x), square = x * x;
    float p = -0x1.9b3046p-8f;
    p = p * square + 0x1.593d08p-6f;
    p = p * square - 0x1.b9287ap-5f;
    p = p * square + 0x1.110d26p-3f;
    p = p * square - 0x1.55554ap-2f;
    const float small = p * square * a + a;
    const float large = 1 - 2 * reciprocal_fast(1 + exp2_fast(a * 0x1.715476p1f));
    return libm::copysign(a < 0.55f ? small : large, x);
}
#endif
