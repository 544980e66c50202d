// Scalar functions with torch's meaning and without undefined behaviour.
//
// Integer division by zero yields 0; shifts by the width or more yield 0 (or the sign); casts out
// of range yield what x86 yields. Compiled with -fwrapv, never with -ffast-math.
#pragma once
#ifdef __CUDACC__
#include "cuda_language.cuh"
#else
#include <cstdint>
#include <cstring>
#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#endif
#include "libm.h"
#endif

typedef int64_t i64;

// 16-bit floats as they lie in memory; all arithmetic on them is float.
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

INLINE uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

INLINE float widen(bf16 x) { return float_of((uint32_t)x.bits << 16); }

#ifdef __CUDACC__
INLINE bf16 narrow_bf16(float x) {
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return {y};
}
INLINE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
INLINE f16 narrow_f16(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return {y};
}
#else
INLINE bf16 narrow_bf16(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return {(uint16_t)(x != x ? 0x7fc0 : rounded)};
}
// Half: shift the exponent by a multiplication, which also normalises subnormals.
INLINE float widen(f16 x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16;
    const uint32_t rest = (uint32_t)(x.bits & 0x7fff) << 13;
    const float scaled = float_of(rest) * 0x1p112f;
    const uint32_t special = rest | 0x7f800000;
    return float_of((rest >= 0x0f800000 ? special : bits_of(scaled)) | sign);
}

// Round to nearest even: subnormals by adding a constant, normals by integer carry.
INLINE f16 narrow_f16(float x) {
    const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000;
    const uint32_t normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
    const uint32_t finite = a < 0x38800000 ? subnormal : normal;
    const uint32_t large = a > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {(uint16_t)((a >= 0x477ff000 ? large : finite) | sign)};
}
#endif

INLINE float round_f16(float x) { return widen(narrow_f16(x)); }
INLINE float round_bf16(float x) { return widen(narrow_bf16(x)); }

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// Memory type S <-> value type V.
template <class V, class S> INLINE V from_memory(S x) {
    if constexpr (same<S, f16> || same<S, bf16>) return widen(x);
    else return (V)x;
}
template <class S, class V> INLINE S to_memory(V x) {
    if constexpr (same<S, f16>) return narrow_f16(x);
    else if constexpr (same<S, bf16>) return narrow_bf16(x);
    else return (S)x;
}

template <class T> constexpr bool is_float = false;
template <> constexpr bool is_float<float> = true;
template <> constexpr bool is_float<double> = true;
template <class T> constexpr bool is_signed = (T)-1 < (T)0;
template <class T> constexpr int width = 8 * (int)sizeof(T);
template <> constexpr int width<bool> = 1;

template <class T> INLINE T float_to_int(double x) {
    if constexpr (sizeof(T) == 8)
        return x >= -0x1p63 && x < 0x1p63 ? (T)x : (T)INT64_MIN;
    else
        return (T)(x > -0x1p31 - 1 && x < 0x1p31 ? (int32_t)x : INT32_MIN);
}

template <class T, class S> INLINE T cast(S x) {
    if constexpr (is_float<S> && !is_float<T> && width<T> > 1) return float_to_int<T>((double)x);
    else return (T)x;
}

INLINE bool bit_not(bool x) { return !x; }
template <class T> INLINE T bit_not(T x) { return (T)~x; }

INLINE float absolute(float x) { return __builtin_fabsf(x); }
INLINE double absolute(double x) { return __builtin_fabs(x); }
template <class T> INLINE T absolute(T x) { return (T)(x < 0 ? -x : x); }

// NaN wins, and of two zeros the second, as in torch's vector code; smaller_number and larger_number prefer the number.
#ifdef __CUDACC__
template <class T> INLINE T minimum(T a, T b) {
    if constexpr (is_float<T>) return a < b || a != a ? a : b;
    else return b < a ? b : a;
}
template <class T> INLINE T maximum(T a, T b) {
    if constexpr (is_float<T>) return a > b || a != a ? a : b;
    else return b > a ? b : a;
}
#else
// Two choices in place of one with two conditions: of that, GCC makes branches, which no vector
// instructions have, where a minimum is compared with a third number. The test for NaN is of b. If it
// is of a, in an unrolled scan the result of all choices before, GCC 12 takes seven times as long.
template <class T> INLINE T minimum(T a, T b) {
    if constexpr (is_float<T>) {
        const T least = b <= a ? b : a;
        return b != b ? b : least;
    } else return b < a ? b : a;
}
template <class T> INLINE T maximum(T a, T b) {
    if constexpr (is_float<T>) {
        const T most = b >= a ? b : a;
        return b != b ? b : most;
    } else return b > a ? b : a;
}
#endif
template <class T> INLINE T smaller_number(T a, T b) { return a != a ? b : (b < a ? b : a); }
template <class T> INLINE T larger_number(T a, T b) { return a != a ? b : (b > a ? b : a); }

template <class T> INLINE T shift_left(T a, T n) {
    return n < 0 || n >= (T)width<T> ? (T)0 : (T)(a << n);
}
template <class T> INLINE T shift_right(T a, T n) {
    const bool wide = n < 0 || n >= (T)width<T>;
    if constexpr (is_signed<T>) return (T)(a >> (wide ? (T)(width<T> - 1) : n));
    else return wide ? (T)0 : (T)(a >> n);
}

INLINE float fmod_of(float a, float b) { return libm::fmod(a, b); }
INLINE double fmod_of(double a, double b) { return libm::fmod(a, b); }
template <class T> INLINE T trunc_divide(T a, T b) {
    if (b == 0) return 0;
    if constexpr (is_signed<T>) return b == (T)-1 ? (T)(0 - (uint64_t)a) : (T)(a / b);
    else return (T)(a / b);
}
template <class T> INLINE T fmod_of(T a, T b) {
    if constexpr (is_signed<T>) return b == 0 || b == (T)-1 ? (T)0 : (T)(a % b);
    else return b == 0 ? (T)0 : (T)(a % b);
}
template <class T> INLINE T remainder_of(T a, T b) {
    const T r = fmod_of(a, b);
    return r != 0 && (b < 0) != (r < 0) ? (T)(r + b) : r;
}
template <class T> INLINE T copy_sign(T a, T b) { return libm::copysign(a, b); }
template <class T> INLINE T floor_divide(T a, T b) {
    if constexpr (is_float<T>) {
        if (b == 0) return a / b;
        const T r = libm::fmod(a, b);
        T q = (a - r) / b;
        if (r != 0 && (b < 0) != (r < 0)) q -= 1;
        if (q == 0) return libm::copysign((T)0, a / b);
        const T floored = libm::floor(q);
        return q - floored > (T)0.5 ? floored + 1 : floored;
    } else {
        const T q = trunc_divide(a, b), r = fmod_of(a, b);
        return r != 0 && (b < 0) != (r < 0) ? (T)(q - 1) : q;
    }
}
template <class T> INLINE T power(T a, T b) {
    if constexpr (is_float<T>) {
        return libm::pow(a, b);
    } else {
        if (b < 0) return a == 1 ? (T)1 : (a == (T)-1 ? (b & 1 ? (T)-1 : (T)1) : (T)0);
        uint64_t result = 1, base = (uint64_t)a;
        for (uint64_t n = (uint64_t)b; n; n >>= 1, base *= base)
            if (n & 1) result *= base;
        return (T)result;
    }
}
template <class T> INLINE bool is_nan(T x) { return x != x; }
template <class T> INLINE bool is_inf(T x) { return absolute(x) == (T)__builtin_inf(); }
template <class T> INLINE bool is_negative(T x) {
    if constexpr (is_float<T>) return __builtin_signbit(x);
    else return x < 0;
}
template <class T> INLINE T square_root(T x) { return libm::sqrt(x); }
template <class T> INLINE T reciprocal_sqrt(T x) { return (T)1 / libm::sqrt(x); }
// log(1 + x) for 0 <= x <= 1, or NaN: x + x^2 p(x), a minimax fit (Lawson's iteration). Largest error
// 1.8 units in the last place.
INLINE float log1p_upto_1(float x) {
    float p = 0x1.5f96d2p-8f;
    p = p * x - 0x1.ec9912p-6f;
    p = p * x + 0x1.446bfap-4f;
    p = p * x - 0x1.19ad8ap-3f;
    p = p * x + 0x1.884450p-3f;
    p = p * x - 0x1.fd1320p-3f;
    p = p * x + 0x1.5535dap-2f;
    p = p * x - 0x1.ffff14p-2f;
    return (p * x + 1) * x;
}

#ifdef __CUDACC__
template <class T> INLINE T exp_of(T x) { return libm::exp(x); }
template <class T> INLINE T expm1_of(T x) { return libm::expm1(x); }
template <class T> INLINE T tanh_of(T x) { return libm::tanh(x); }
template <class T> INLINE T log_of(T x) { return libm::log(x); }
template <class T> INLINE T log1p_of(T x) { return libm::log1p(x); }
template <class T> INLINE T sigmoid(T x) { return (T)1 / ((T)1 + exp_of(-x)); }
#include "hardware_functions.cuh"
#else
#include "elementary.h"
template <class T> INLINE T sigmoid(T x) { return (T)1 / ((T)1 + exp_of(-x)); }
INLINE float log1p_exp_of(float x) { return log1p_upto_1(exp_of(x)); }
INLINE float log1p_signed_exp(bool plus, float x) {
    const float y = exp_of(x);
    return log1p_of(plus ? y : -y);
}
INLINE float exp_of_peak(float x) { return exp_of(x); }
INLINE float log_of_sum(float x) { return log_of(x); }
INLINE float peak_of(float a, float b) { return maximum(a, b); }
template <class T> INLINE T sin_of(T x) { return libm::sin(x); }
template <class T> INLINE T cos_of(T x) { return libm::cos(x); }
template <class T> INLINE T gcd_of(T a, T b) {
    uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a, y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
    while (y) { const uint64_t r = x % y; x = y; y = r; }
    return (T)x;
}
#endif
INLINE float round_even(float x) { return __builtin_rintf(x); }
INLINE double round_even(double x) { return __builtin_rint(x); }
INLINE float round_down(float x) { return __builtin_floorf(x); }
INLINE double round_down(double x) { return __builtin_floor(x); }
INLINE float round_up(float x) { return __builtin_ceilf(x); }
INLINE double round_up(double x) { return __builtin_ceil(x); }
INLINE float round_to_zero(float x) { return __builtin_truncf(x); }
INLINE double round_to_zero(double x) { return __builtin_trunc(x); }
