// What scalar.h needs of the language when NVRTC or nvcc compiles it, without any header of CUDA's.
#pragma once

#define INLINE static __device__ __forceinline__
#define INLINE_MEMBER __device__ __forceinline__
#define NOT_INLINE static __device__ __noinline__

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define INT32_MIN (-2147483647 - 1)
#define INT64_MIN (-9223372036854775807LL - 1)

namespace std {
using ::memcpy;
}  // namespace std
namespace libm {
using ::acos;
using ::acosh;
using ::asin;
using ::asinh;
using ::atan;
using ::atan2;
using ::atanh;
using ::copysign;
using ::cos;
using ::cosh;
using ::erf;
using ::erfc;
using ::exp;
using ::exp2;
using ::expm1;
using ::floor;
using ::fmod;
using ::hypot;
using ::log;
using ::log10;
using ::log1p;
using ::log2;
using ::pow;
using ::sin;
using ::sinh;
using ::sqrt;
using ::tan;
using ::tanh;
}  // namespace libm
#else
#include <cmath>
#include <cstdint>
#include <cstring>
namespace libm = std;
#endif

#define __builtin_memcpy memcpy
#define __builtin_fabsf fabsf
#define __builtin_fabs fabs
#define __builtin_rintf rintf
#define __builtin_rint rint
#define __builtin_floorf floorf
#define __builtin_floor floor
#define __builtin_ceilf ceilf
#define __builtin_ceil ceil
#define __builtin_truncf truncf
#define __builtin_trunc trunc
#define __builtin_signbit signbit
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000ll)
#define __builtin_inff() __int_as_float(0x7f800000)
#define __builtin_nan(text) __longlong_as_double(0x7ff8000000000000ll)
#define __builtin_nanf(text) __int_as_float(0x7fc00000)
