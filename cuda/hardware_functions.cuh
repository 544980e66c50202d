// Functions of floats in few instructions, where the library's take many.
//
// sigmoid and tanh are made of two instructions of the hardware, for 2^x and for 1 / x, without
// branches. The library's functions have branches, and a step that is not associative waits for each
// of them.
//
// Largest errors, over 70 million floats of all sizes on an H100, in units in the last place: tanh
// 3.8; sigmoid 5 for |x| < 5, 16 for |x| < 20, and 62 beyond, where it is about 1e-36. Results
// below 2^-126 are zero.
//
// Kernels of scans have `sigmoid`, `tanh_of`, `log1p_exp_of`, `sin_of`, `cos_of` and `gcd_of`; the
// others are for the steps of walks (walk/step.py).
#pragma once

// x y + z
INLINE float fused(float x, float y, float z) { return __fmaf_rn(x, y, z); }
INLINE double fused(double x, double y, double z) { return __fma_rn(x, y, z); }

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

// e^x, of which the absolute error counts: at most 2^-24 for x <= 0.
INLINE float exp_of_peak(float x) { return exp2_fast(x * 0x1.715476p0f); }
// The greater one, NaN if one of them is; of two zeros either.
INLINE float peak_of(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// log(1 + e^x) for x <= 0, or NaN: e^x is at most 1, so that its error of |x| 2^-24 of itself is
// below 2^-25 of 1 (2^-24 where the hardware's power is at its worst). Below x = -87, 0.
INLINE float log1p_exp_of(float x) { return log1p_upto_1(exp_of_peak(x)); }

// log(1 + f) + n ln 2 for 1/sqrt 2 <= 1 + f < sqrt 2, by a minimax fit as in elementary.h; so many
// multiples of ln 2 need no second part of it.
INLINE float log_sum(float f, float n, float ln2) {
    float tail = -0x1.41f444p-4f;  // (log(1 + f) - f) / f^2
    tail = fused(tail, f, 0x1.07cfa8p-3f);
    tail = fused(tail, f, -0x1.0cdea6p-3f);
    tail = fused(tail, f, 0x1.226e68p-3f);
    tail = fused(tail, f, -0x1.5478c4p-3f);
    tail = fused(tail, f, 0x1.99a596p-3f);
    tail = fused(tail, f, -0x1.00021ep-2f);
    tail = fused(tail, f, 0x1.55554ap-2f);
    tail = fused(tail, f, -0.5f);
    return fused(n, ln2, fused(tail, f * f, f));
}
// log(x) for x >= 1, infinite or NaN.
INLINE float log_of_sum(float x) {
    const uint32_t root = 0x3f3504f3, u = bits_of(x) - root;
    const float n = (float)((int32_t)u >> 23), f = float_of((u & 0x7fffff) + root) - 1;
    const float y = log_sum(f, n, 0x1.62e43p-1f);
    return x < __builtin_inff() ? y : x;
}
// log(1 + x) for -1 <= x <= 1, or NaN. 1 + x = 2^n (1 + f): n from the rounded sum, f from x itself,
// so that nothing of it is lost.
INLINE float log1p_within_1(float x) {
    const float sum = 1 + x;
    const uint32_t n = (bits_of(sum) - 0x3f3504f3) & 0xff800000;  // times 2^23
    const float scale = float_of(0x3f800000 - n), f = fused(x, scale, scale - 1);
    const float y = log_sum(f, (float)(int32_t)n, 0x1.62e43p-24f);
    return sum == 0 ? -__builtin_inff() : y;
}
// log(1 + e^x) or log(1 - e^x) for x <= 0, or NaN; the error of e^x is that of x, or less.
INLINE float log1p_signed_exp(bool plus, float x) {
    const float y = exp_of_peak(x);
    return log1p_within_1(plus ? y : -y);
}

// sin and cos. x less the nearest multiple of pi / 2, in three parts (Cody and Waite, as in
// elementary.h), then minimax polynomials; both are computed, and one is taken. Beyond 2^16 the
// products with these parts lose digits: there the library's functions. Largest errors as measured
// are in docs/performance/operators.md.
struct Turned { float sin, cos; uint32_t quarters; };

INLINE Turned turned(float x) {
    const float shift = 0x1.8p23f;  // in a sum with `shift` the low bits are the integer
    const float shifted = fused(x, 0x1.45f306p-1f, shift), n = shifted - shift;
    float r = fused(n, -0x1.921fb6p0f, x);
    r = fused(n, 0x1.777a5cp-25f, r);
    r = fused(n, 0x1.ee59dap-50f, r);
    const float square = r * r;
    float s = -0x1.994222p-13f;
    s = fused(s, square, 0x1.110736p-7f);
    s = fused(s, square, -0x1.555546p-3f);
    float c = 0x1.99ea04p-16f;
    c = fused(c, square, -0x1.6c0c2ep-10f);
    c = fused(c, square, 0x1.55554ap-5f);
    c = fused(c, square, -0.5f);
    return {fused(s, square * r, r), fused(c, square, 1.0f), bits_of(shifted)};
}
INLINE bool turns_far(float x) { return !(__builtin_fabsf(x) < 0x1p16f); }
NOT_INLINE float far_sin(float x) { return libm::sin(x); }
NOT_INLINE float far_cos(float x) { return libm::cos(x); }

INLINE float sin_of(float x) {
    if (turns_far(x)) return far_sin(x);
    const Turned t = turned(x);
    const float y = t.quarters & 1 ? t.cos : t.sin;
    return x == 0 ? x : float_of(bits_of(y) ^ (t.quarters & 2) << 30);
}
INLINE float cos_of(float x) {
    if (turns_far(x)) return far_cos(x);
    const Turned t = turned(x);
    const float y = t.quarters & 1 ? t.sin : t.cos;
    return float_of(bits_of(y) ^ (t.quarters + 1 & 2) << 30);
}
INLINE double sin_of(double x) { return libm::sin(x); }
INLINE double cos_of(double x) { return libm::cos(x); }

// Euclid's algorithm. Numbers below 2^24 are exact floats, and a remainder of any sign and size up
// to y will do, so that an approximate quotient takes the place of an integer division; the nearest
// one needs the fewest rounds. Of larger numbers 32 bits are enough, if both fit.
INLINE uint32_t gcd_of_small(uint32_t x, uint32_t y) {
    float u = (float)x, v = (float)y;
    _Pragma("unroll 1") while (v != 0) {
        const float quotient = __builtin_rintf(u * reciprocal_fast(v));
        const float rest = __builtin_fabsf(fused(-quotient, v, u));
        u = v, v = rest;
    }
    return (uint32_t)u;
}
NOT_INLINE uint64_t gcd_of_large(uint64_t x, uint64_t y) {
    _Pragma("unroll 1") while ((x | y) >> 24 != 0 && y != 0) {
        uint64_t rest;
        if ((x | y) >> 32 == 0) rest = (uint32_t)x % (uint32_t)y;
        else rest = x % y;
        x = y, y = rest;
    }
    return y == 0 ? x : gcd_of_small((uint32_t)x, (uint32_t)y);
}
template <class T> INLINE T gcd_of(T a, T b) {
    const uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a;
    const uint64_t y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
    return (x | y) >> 24 == 0 ? (T)gcd_of_small((uint32_t)x, (uint32_t)y) : (T)gcd_of_large(x, y);
}
