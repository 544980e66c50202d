// sigmoid and tanh of floats, in few instructions and without branches: made of two instructions of
// the hardware, for 2^x and for 1 / x. The library's functions have branches, and a step that is
// not associative waits for each of them.
//
// Largest errors, over 70 million floats of all sizes on an H100, in units in the last place: tanh
// 3.8; sigmoid 5 for |x| < 5, 16 for |x| < 20, and 62 beyond, where it is about 1e-36. Results
// below 2^-126 are zero.
//
// All kernels have `sigmoid` and `tanh_of`; the others are for the steps of walks (walk/step.py).
#pragma once

INLINE float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }  // x y + z

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

// 1 / (1 + 2^x), which is sigmoid(-x ln 2).
INLINE float sigmoid_exp2(float x) { return reciprocal_fast(1 + exp2_fast(x)); }
INLINE float sigmoid(float x) { return sigmoid_exp2(x * -0x1.715476p0f); }

// tanh(x ln 2 / 2), which is 1 - 2 / (1 + 2^x). Where x is small, that difference has few right
// digits: there it is x (ln 2 / 2 + x^2 p(x^2)), with a minimax polynomial p (found by Lawson's
// iteration). Both are computed side by side, and one is taken.
INLINE float tanh_exp2(float x) {
    const float square = x * x;
    float p = 0x1.3cdee4p-20f;
    p = fused(p, square, -0x1.092b64p-15f);
    p = fused(p, square, 0x1.5d2f82p-11f);
    p = fused(p, square, -0x1.c6af1ep-7f);
    const float small = fused(p, square * x, x * 0x1.62e43p-2f);
    const float large = fused(reciprocal_fast(1 + exp2_fast(x)), -2.0f, 1.0f);
    return __builtin_fabsf(x) < 1.6f ? small : large;
}
// COARSE, for walks of bfloat16 (`is_coarse` in source.py): tanh in one instruction, with a relative
// error of up to 2^-11.
#ifdef COARSE
INLINE float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
INLINE float tanh_of(float x) { return tanh_exp2(x * 0x1.715476p1f); }
#endif
