// exp, expm1, log, log1p and tanh of a float without branches or calls, so that a loop over lanes
// that has them is SIMD code.
//
// Errors, over all floats: exp 1.0, log and log1p 0.9, expm1 1.7, tanh 2.6 units in the last place.
// Infinities, NaN, signed zeros, subnormal arguments and results are what IEEE 754 recommends. The
// polynomials are minimax fits (Remez) of the functions named; rests of n ln 2 follow Cody and
// Waite, Software Manual for the Elementary Functions, 1980.
#pragma once

// e^x = 2^n e^r with |r| <= ln 2 / 2: e^r - 1, and 2^n as two factors, each of them normal.
struct Exponential { float rest, low, high; };

INLINE Exponential exponential(float x, float least) {
    const float most = 90, shift = 0x1.8p23f;  // in a sum with `shift` the low bits are the integer
    const float within = x < least ? least : x > most ? most : x;
    const float shifted = within * 0x1.715476p0f + shift, n = shifted - shift;
    // ln 2 in two parts, of which n times the first is exact.
    const float r = (within - n * 0x1.62ep-1f) - n * 0x1.0bfbe8p-15f;
    float tail = 0x1.6db5a2p-10f;  // (e^r - 1 - r) / r^2
    tail = tail * r + 0x1.123c6ap-7f;
    tail = tail * r + 0x1.55545cp-5f;
    tail = tail * r + 0x1.55548ep-3f;
    tail = tail * r + 0.5f;
    const int32_t k = (int32_t)(bits_of(shifted) - bits_of(shift)), half = k >> 1;
    const uint32_t low = (uint32_t)(half + 127) << 23, high = (uint32_t)(k - half + 127) << 23;
    return {tail * (r * r) + r, float_of(low), float_of(high)};
}

INLINE float exp_of(float x) {
    const Exponential e = exponential(x, -105);
    return (e.rest + 1) * e.low * e.high;
}

INLINE float expm1_of(float x) {
    const Exponential e = exponential(x, -20);
    const float y = (e.rest * e.low + (e.low - 1 / e.high)) * e.high;
    return x == 0 ? x : y;
}

INLINE float tanh_of(float x) {
    const float a = __builtin_fabsf(x), t = expm1_of(a > 10 ? 20 : 2 * a);
    return __builtin_copysignf(t / (t + 2), x);
}

// log(x) + k ln 2 + more, of a positive, normal x = 2^n (1 + f) with 1/sqrt 2 <= 1 + f < sqrt 2.
INLINE float log_sum(float x, float k, float more) {
    const uint32_t root = 0x3f3504f3, u = bits_of(x) - root;
    const float n = (float)((int32_t)u >> 23) + k, f = float_of((u & 0x7fffff) + root) - 1;
    float tail = -0x1.41f444p-4f;  // (log(1 + f) - f + f^2 / 2) / f^3
    tail = tail * f + 0x1.07cfa8p-3f;
    tail = tail * f - 0x1.0cdea6p-3f;
    tail = tail * f + 0x1.226e68p-3f;
    tail = tail * f - 0x1.5478c4p-3f;
    tail = tail * f + 0x1.99a596p-3f;
    tail = tail * f - 0x1.00021ep-2f;
    tail = tail * f + 0x1.55554ap-2f;
    const float square = f * f;
    const float small = tail * (square * f) + (n * -0x1.bd0106p-13f + more) - 0.5f * square;
    return small + f + n * 0x1.63p-1f;
}

// `regular` for positive and finite x, else log x.
INLINE float log_or(float x, float regular) {
    const float inf = __builtin_inff();
    return x > 0 ? (x < inf ? regular : x) : x == 0 ? -inf : __builtin_nanf("");
}

INLINE float log_of(float x) {
    const bool tiny = x < 0x1p-126f;
    return log_or(x, log_sum(tiny ? x * 0x1p23f : x, tiny ? -23 : 0, 0));
}

INLINE float log1p_of(float x) {
    const float u = 1 + x;
    const float lost = x < 1 ? x - (u - 1) : 1 - (u - x);  // by the rounding of u
    const float y = log_or(u, log_sum(u, 0, lost / u));
    return u == 1 ? x : y;
}

INLINE double exp_of(double x) { return libm::exp(x); }
INLINE double expm1_of(double x) { return libm::expm1(x); }
INLINE double tanh_of(double x) { return libm::tanh(x); }
INLINE double log_of(double x) { return libm::log(x); }
INLINE double log1p_of(double x) { return libm::log1p(x); }
