"""Numbers of about twice the precision of float64: unevaluated sums of two tensors, and pairs of
such numbers for complex ones.

For coefficients, not for data. Products split a factor by rounding it to float32, so that a
compiler that fuses a product and a sum changes nothing.

Source: T. J. Dekker, "A floating-point technique for extending the available precision", Numerische
Mathematik 18, 1971; D. E. Knuth, "The Art of Computer Programming", vol. 2, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DoubleDouble:
    """high + low, of float64; |low| is at most half a unit in the last place of high."""

    high: Tensor
    low: Tensor

    @property
    def value(self) -> Tensor:
        return self.high

    def __add__(self, other: DoubleDouble) -> DoubleDouble:
        total, error = two_sum(self.high, other.high)
        return renormalized(total, error + (self.low + other.low))

    def __neg__(self) -> DoubleDouble:
        return DoubleDouble(-self.high, -self.low)

    def __sub__(self, other: DoubleDouble) -> DoubleDouble:
        return self + -other

    def __mul__(self, other: DoubleDouble) -> DoubleDouble:
        product, error = two_product(self.high, other.high)
        return renormalized(product, error + (self.high * other.low + self.low * other.high))

    def __truediv__(self, other: DoubleDouble) -> DoubleDouble:
        quotient = float64(self.high / other.high)
        rest = self - other * quotient
        return renormalized(quotient.high, rest.high / other.high)

    def scaled(self, power_of_two: float) -> DoubleDouble:
        return DoubleDouble(self.high * power_of_two, self.low * power_of_two)


@dataclass(frozen=True)
class ComplexDoubleDouble:
    """real + i imag."""

    real: DoubleDouble
    imag: DoubleDouble

    @property
    def value(self) -> Tensor:
        return torch.complex(self.real.value, self.imag.value)

    def conj(self) -> ComplexDoubleDouble:
        return ComplexDoubleDouble(self.real, -self.imag)

    def __add__(self, other: ComplexDoubleDouble) -> ComplexDoubleDouble:
        return ComplexDoubleDouble(self.real + other.real, self.imag + other.imag)

    def __neg__(self) -> ComplexDoubleDouble:
        return ComplexDoubleDouble(-self.real, -self.imag)

    def __sub__(self, other: ComplexDoubleDouble) -> ComplexDoubleDouble:
        return self + -other

    def __mul__(self, other: ComplexDoubleDouble) -> ComplexDoubleDouble:
        real = self.real * other.real - self.imag * other.imag
        return ComplexDoubleDouble(real, self.real * other.imag + self.imag * other.real)

    def __truediv__(self, other: DoubleDouble) -> ComplexDoubleDouble:
        return ComplexDoubleDouble(self.real / other, self.imag / other)


def exactly(x: Tensor) -> DoubleDouble | ComplexDoubleDouble:
    if x.is_complex():
        return ComplexDoubleDouble(float64(x.real), float64(x.imag))
    return float64(x)


def float64(x: Tensor) -> DoubleDouble:
    return DoubleDouble(x, torch.zeros_like(x))


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what rounding took from it."""
    total = a + b
    taken = total - a
    return total, (a - (total - taken)) + (b - taken)


def renormalized(large: Tensor, small: Tensor) -> DoubleDouble:
    """large + small, where |small| is the smaller of the two."""
    total = large + small
    return DoubleDouble(total, small - (total - large))


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product and what rounding took from it, up to 2⁻⁷⁶ of the product."""
    a1, b1 = (x.to(torch.float32).to(torch.float64) for x in (a, b))
    a2, b2 = a - a1, b - b1
    return two_sum(a1 * b1, (a1 * b2 + a2 * b1) + a2 * b2)


def parts(x: DoubleDouble | ComplexDoubleDouble) -> tuple[Tensor, Tensor]:
    """The high part and the low one."""
    if isinstance(x, DoubleDouble):
        return x.high, x.low
    return torch.complex(x.real.high, x.imag.high), torch.complex(x.real.low, x.imag.low)


def of_parts(high: Tensor, low: Tensor) -> DoubleDouble | ComplexDoubleDouble:
    if high.is_complex():
        real, imag = DoubleDouble(high.real, low.real), DoubleDouble(high.imag, low.imag)
        return ComplexDoubleDouble(real, imag)
    return DoubleDouble(high, low)
