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
// 1 - 2 / (1 + e^2x); where |x| is small, x + x^3 p(x^2), a minimax fit (Lawson), of which no step
// waits for the exponential.
INLINE float tanh_of(float x) {
    const float square = x * x;
    float p = 0x1.0d5036p-6f;
    p = __fmaf_rn(p, square, -0x1.af7cccp-5f);
    p = __fmaf_rn(p, square, 0x1.10cef6p-3f);
    p = __fmaf_rn(p, square, -0x1.555452p-2f);
    const float small = __fmaf_rn(p, square * x, x);
    const float large = __fmaf_rn(reciprocal_fast(1 + exp2_fast(x * 0x1.715476p1f)), -2.0f, 1.0f);
    return __builtin_fabsf(x) < 0.55f ? small : large;
}
#endif
