"""Triton functions with torch's meaning and without undefined behaviour: `scalar.h` for Triton.

Integer division by zero yields 0; shifts by the width or more yield 0 (or the sign); casts out of
range yield what x86 yields. They work on tiles and on the scalars inside a scan alike.

`libdevice` has the mathematical functions of the target, and of torch in Triton's interpreter.
tl.exp, tl.log, … are not used: they are approximations with large relative errors.

Denormals survive where kernels are launched with `enable_reflect_ftz=False`; by default, Triton
asks NVIDIA's libdevice to flush them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

if triton.knobs.runtime.interpret:
    from .corrections import interpreted_libdevice as libdevice
else:
    from triton.language.extra import libdevice  # type: ignore[no-redef]


@triton.jit
def minimum(a, b):
    """NaN wins, and of two zeros the second."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def maximum(a, b):
    """NaN wins, and of two zeros the second."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def smaller_number(a, b):
    """A number wins over NaN."""
    return tl.where((b < a) | (a != a), b, a)


@triton.jit
def larger_number(a, b):
    """A number wins over NaN."""
    return tl.where((b > a) | (a != a), b, a)


@triton.jit
def is_negative(x):
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    elif x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x < 0


@triton.jit
def shift_left(a, n):
    wide = (n < 0) | (n >= a.dtype.primitive_bitwidth)
    return tl.where(wide, 0, a << tl.where(wide, 0, n))


@triton.jit
def shift_right(a, n):
    wide = (n < 0) | (n >= a.dtype.primitive_bitwidth)
    if a.dtype.is_int_signed():
        return a >> tl.where(wide, a.dtype.primitive_bitwidth - 1, n)
    else:
        return tl.where(wide, 0, a >> tl.where(wide, 0, n))


@triton.jit
def gcd(a, b):
    """Euclid's, for as many steps as Fibonacci numbers need, which need the most. It loops, which
    `tl.associative_scan` cannot: `tiles.choose` gives such operators tiles without one."""
    kind: tl.constexpr = a.dtype
    unsigned: tl.constexpr = tl.core.get_int_dtype(kind.primitive_bitwidth, False)
    if kind.is_int_signed():  # the size of the least integer is none of its dtype
        a = tl.abs(a)
        b = tl.abs(b)
    a = a.to(unsigned, bitcast=True)
    b = b.to(unsigned, bitcast=True)
    for _ in range(a.dtype.primitive_bitwidth * 3 // 2):
        rest = tl.where(b == 0, 0, a % tl.where(b == 0, 1, b))
        a = tl.where(b == 0, a, b)
        b = rest
    return a.to(kind, bitcast=True)


@triton.jit
def trunc_divide(a, b):
    if a.dtype.is_int_signed():
        quotient = a // tl.where((b == 0) | (b == -1), 1, b)
        return tl.where(b == 0, 0, tl.where(b == -1, -a, quotient))
    else:
        return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))


@triton.jit
def fmod_of(a, b):
    """The remainder with the sign of a."""
    if a.dtype.is_floating():
        return libdevice.fmod(a, b)
    elif a.dtype.is_int_signed():
        return a % tl.where((b == 0) | (b == -1), 1, b)
    else:
        return tl.where(b == 0, 0, a % tl.where(b == 0, 1, b))


@triton.jit
def remainder_of(a, b):
    """The remainder with the sign of b."""
    r = fmod_of(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)


@triton.jit
def divide(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def floor_divide(a, b):
    r = fmod_of(a, b)
    lower = (r != 0) & ((b < 0) != (r < 0))
    if a.dtype.is_floating():
        ratio = divide(a, b)
        q = divide(a - r, b)
        q = tl.where(lower, q - 1.0, q)
        floored = tl.floor(q)
        nearest = tl.where(q - floored > 0.5, floored + 1.0, floored)
        return tl.where(b == 0, ratio, tl.where(q == 0, libdevice.copysign(q, ratio), nearest))
    else:
        q = trunc_divide(a, b)
        return tl.where(lower, q - 1, q)


@triton.jit
def power(a, n):
    """Integers: aⁿ by squaring, over all bits of n; for n < 0 what is left of 1 / a⁻ⁿ."""
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    result = tl.full((), 1, a.dtype)
    square = a
    for k in tl.static_range(bits):
        result = tl.where(((n >> k) & 1) != 0, result * square, result)
        square = square * square
    if a.dtype.is_int_signed():
        odd = (n & 1) != 0
        inverse = tl.where(a == 1, 1, tl.where(a == -1, tl.where(odd, a, 1), 0))
        return tl.where(n < 0, inverse, result)
    else:
        return result


@triton.jit
def sigmoid(x):
    """In float32 by the hardware's power of two and division, as hardware_functions.cuh has it."""
    if x.dtype == tl.float32:
        return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
    else:
        return divide(tl.full((), 1.0, x.dtype), 1.0 + libdevice.exp(x * -1.0))


@triton.jit
def tanh(x):
    """In float32 1 − 2 / (1 + e^2x), and a minimax fit in x² (Lawson) where |x| is small."""
    if x.dtype == tl.float32:
        square = x * x
        p = square * 0.01643758 - 0.05267181
        p = p * square + 0.13320725
        p = p * square - 0.33332947
        large = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
        return tl.where(tl.abs(x) < 0.55, p * (square * x) + x, large)
    else:
        return libdevice.tanh(x)


@triton.jit
def power_of_two(x):
    """2^x in float32, accurate to two units in the last place; results below 2^-126 may be zero.
    NVIDIA's instruction: Triton would add three that keep such results."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def widened(x):
    """bfloat16 as float32. On NVIDIA GPUs two adjacent ones by two instructions: Triton would take
    each out of its word first."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def fetch(address):
    """Ask for memory that will be read soon. Only on NVIDIA GPUs, into the L2 cache."""
    if is_cuda():
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [address],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def total(x, axis: tl.constexpr):
    """The sum of floats along an axis, which stays, of size 1.

    Several threads get it, and all must get the same bits. In the sum of two products a thread may
    fuse its own one with the addition, and the other thread the other one; in that of two sums with
    0.0 there is nothing to fuse. (`+ 0.0` cannot be left out, since −0.0 + 0.0 is 0.0.)
    """
    return tl.sum(x + 0.0, axis, keep_dims=True)


@triton.jit
def halved(low, high, upper, partner):
    """One round of sums over threads, dimension 1: of two values that each thread has, one for the
    lower threads and one for the upper ones, a thread sends its partner the other's and adds what
    comes to its own. upper: which threads are; partner: their numbers."""
    own = tl.where(upper, high, low)
    sent = tl.where(upper, low, high)
    return own + tl.gather(sent, partner, 1)


@triton.jit
def float_to_int(x, dtype: tl.constexpr):
    """Through int64, or int32 for all smaller integers; what does not fit gives the least one."""
    if dtype == tl.int64:
        fits = (x >= -9223372036854775808.0) & (x < 9223372036854775808.0)
        return tl.where(fits, tl.where(fits, x, 0.0).to(tl.int64), -9223372036854775808)
    else:
        fits = (x > -2147483649.0) & (x < 2147483648.0)
        return tl.where(fits, tl.where(fits, x, 0.0).to(tl.int32), -2147483648).to(dtype)


@triton.jit
def round_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


if triton.knobs.runtime.interpret:  # which has no assembler, and whose casts to bfloat16 truncate
    round_bf16 = libdevice.round_bf16
    power_of_two = libdevice.exp2

    def fetch(address):
        pass
