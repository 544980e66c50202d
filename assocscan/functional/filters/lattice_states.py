"""A rational filter as a state-space model whose products of matrices do not grow.

The filter B(z) / A(z), with coefficients b and a in powers of z⁻¹ and a[0] = 1, is

    z[t] = M z[t−1] + g x[t],    y[t] = b[0] x[t] + c · z[t−1]

for many choices of the state z. In the companion form (z the last values of y) the powers of M
first grow, by 10⁵ and more where poles lie close together, and decay later. A loop never forms
these powers; a tree of products does, and loses what they have in excess. Here z is that of the
normalized lattice filter instead: its components are uncorrelated where x is white noise, so that
M Mᵀ + g gᵀ = I, and no power of M is larger than 1.

With k the reflection coefficients of A (step-down recursion) and s[m] = √(1 − k[m]²), counted from
1, with k[0] = 1,

    M[i, j] = −k[i] k[j+1] s[i+1] … s[j]  for j ≥ i,    M[i, i−1] = (1 − k[i]²) / s[i]
    g[i] = k[i] s[i+1] … s[n]

and c follows from the coefficients of B in the basis of the backward prediction errors (a
lattice-ladder filter). A filter that is not strictly stable has some |k| ≥ 1: then s is the root of
|1 − k²|, or 1 where that is 0. An oscillator without damping is a rotation; an unstable filter
grows as it must. If the recursion divides by 0 on the way, as for several poles at one place of the
unit circle, the filter keeps the transposed direct form II, in which scipy's loop computes.

The functions return D = σ M − I in place of M: narrow filters have poles close to 1, and products
of numbers close to 1 keep more digits as sums of small deviations. The sign σ is −1 for a filter of
first order whose pole is negative, and 1 for all others.

Source: A. H. Gray, J. D. Markel, "A normalized digital filter structure", IEEE Transactions on
Acoustics, Speech, and Signal Processing 23(3), 1975; J. D. Markel, A. H. Gray, "Linear Prediction
of Speech", 1976, chapter 5 (step-down recursion).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...monoids.monoid import Monoid
from .double_double import ComplexDoubleDouble, DoubleDouble, exactly

States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Rows = tuple[list[list[Tensor]], list[Tensor], list[Tensor]]
Number = Any  # a Tensor, a DoubleDouble or a ComplexDoubleDouble
# Complex coefficients: a 1 − |k|² below this is lost to rounding.
LOST_IN_FLOAT64, LOST_IN_TWICE_THE_PRECISION = 1e-8, 1e-13
# The order up to which `exact_states` is compiled in seconds.
MOST_EXACT = {torch.float64: 8, torch.complex128: 4}


def states(b: Tensor, a: Tensor) -> States:
    """σ, D [n, n], g [n], c [n] and b[0] of coefficients a [n + 1] and b of at most as many, n ≥ 1,
    in float64 or complex128. a[0] may be any number: all are divided by it."""
    return chosen(*coefficients(b, a), lambda x: x)


def exact_states(b: Tensor, a: Tensor) -> States:
    """`states` of float64 or complex128 coefficients, computed in twice the precision: a rounding
    here acts on every step of the scan in the same way, a loop's differ from step to step."""
    return chosen(*coefficients(b, a), exactly)


def coefficients(b: Tensor, a: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """b and a as numbers, with a[0] = 1 and zeros behind b."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    rows = [[row[i].to(wide) for i in range(row.shape[-1])] for row in (b, a)]
    first, one = rows[1][0], torch.ones_like(rows[1][0])
    numerator = [x / first for x in rows[0]]
    numerator += [torch.zeros_like(one)] * (len(rows[1]) - len(numerator))
    return numerator, [one, *(x / first for x in rows[1][1:])]


def chosen(b: list[Tensor], a: list[Tensor], number: Callable[[Tensor], Number]) -> States:
    """The lattice's states, or the direct form's where the lattice's are not finite."""
    n, one = len(a) - 1, number(a[0])
    k, lattice = normalized_lattice([number(x) for x in b], [number(x) for x in a], one)
    direct = direct_form(b, a)
    sign = torch.ones_like(a[0])
    if n == 1:
        sign = torch.where(real(lattice[0][0][0]) < 0, -1.0, 1.0).to(sign.dtype)
    for i in range(n):  # 1 is taken off before the product is rounded
        less, more = (value(shift - conjugate(k[i]) * k[i + 1]) for shift in (-one, one))
        lattice[0][i][i] = torch.where(real(sign) < 0, -more, less)
        direct[0][i][i] = direct[0][i][i] - 1.0
    whole = [packed(rows) for rows in (lattice, direct)]
    is_finite = torch.cat([x.abs().flatten() for x in whole[0]]).amax() < math.inf
    matrix, entering, leaving = (torch.where(is_finite, x, y) for x, y in zip(*whole, strict=True))
    return torch.where(is_finite, sign, 1.0).to(sign.dtype), matrix, entering, leaving, b[0]


def packed(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    matrix, entering, leaving = rows
    whole = torch.stack([torch.stack(row) for row in matrix])
    return whole, torch.stack(entering), torch.stack(leaving)


def direct_form(b: list[Tensor], a: list[Tensor]) -> Rows:
    """M, g and c of the transposed direct form II."""
    n, zero = len(a) - 1, torch.zeros_like(a[0])
    one = torch.ones_like(zero)
    shift = [[one if j == i + 1 else zero for j in range(n)] for i in range(n)]
    matrix = [[-a[i + 1], *row[1:]] for i, row in enumerate(shift)]
    return matrix, [b[i] - a[i] * b[0] for i in range(1, n + 1)], [one] + [zero] * (n - 1)


def normalized_lattice(b: list[Number], a: list[Number], one: Number) -> tuple[list[Number], Rows]:
    """The reflection coefficients, and M, g and c."""
    n = len(a) - 1
    backward = [[one]] * (n + 1)  # of order m: the coefficients of the backward prediction error
    k, square = [one] * (n + 1), [one] * (n + 1)  # square[m] = 1 − |k[m]|²
    rest = a
    for m in range(n, 0, -1):
        backward[m] = [conjugate(x) for x in reversed(rest)]
        k[m] = rest[m]
        square[m], rest = stepped_down(rest, one)
    taps, left = [one] * (n + 1), list(b)
    for m in range(n, -1, -1):
        taps[m] = left[m]
        left = [x - taps[m] * y for x, y in zip(left, backward[m][:m], strict=False)]
    squares = [real(value(x)) for x in square]
    roots = [torch.where(x == 0, 1.0, x.abs().sqrt()) for x in squares]
    reflections = [value(x) for x in k]
    matrix = [[entry(reflections, squares, roots, i, j) for j in range(n)] for i in range(n)]
    entering = [conjugate(reflections[i]) * product(roots[i + 1 :]) for i in range(n)]
    leaving, total = [], taps[0] - taps[0]
    for j in range(n):
        total = total + taps[j] * conjugate(k[j])
        weight = value(taps[j + 1] * square[j + 1] - k[j + 1] * total)
        leaving.append(weight / product(roots[j + 1 :]))
    return k, (matrix, entering, leaving)


def stepped_down(a: list[Number], one: Number) -> tuple[Number, list[Number]]:
    """1 − |k|², and the coefficients of the prediction error of the next lower order:
    (a − k ã) / (1 − |k|²), with ã the conjugate in reversed order.

    For real coefficients the parts that are equal and opposite in a and ã are divided by 1 + k and
    1 − k: their difference, which may be much smaller than both, would be rounded otherwise. Where
    1 − |k|² is 0 and a is k ã, as for an oscillator without damping, the part that would be 0 / 0
    is 0. Complex coefficients are not divided in this way: they are NaN where the difference is
    lost to the roundings of the arithmetic, or of the coefficients.
    """
    m, k = len(a) - 1, a[-1]
    if is_complex(k):
        square = one - k * conjugate(k)
        turned = [conjugate(x) for x in reversed(a)]
        lower = [(x - k * y) / square.real for x, y in zip(a[1:m], turned[1:m], strict=True)]
        least = LOST_IN_FLOAT64 if isinstance(k, Tensor) else LOST_IN_TWICE_THE_PRECISION
        is_lost = real(value(square)).abs() < least
        return square, [one, *(replaced(x, is_lost, math.nan) for x in lower)]
    even, odd = half(one / (one + k)), half(one / (one - k))
    lower = [one] * m
    for i in range(1, m // 2 + 1):
        equal, opposite = scaled(a[i] + a[m - i], even), scaled(a[i] - a[m - i], odd)
        lower[i], lower[m - i] = equal + opposite, equal - opposite
    return (one - k) * (one + k), lower


def scaled(x: Number, factor: Number) -> Number:
    """x · factor; 0 where x is 0, whatever the factor is."""
    return replaced(x * factor, value(x) == 0, 0.0)


def replaced(x: Number, where: Tensor, other: float) -> Number:
    """x; `other` where the condition holds."""
    if isinstance(x, ComplexDoubleDouble):
        return ComplexDoubleDouble(replaced(x.real, where, other), replaced(x.imag, where, other))
    if isinstance(x, DoubleDouble):
        return DoubleDouble(*(torch.where(where, other, part) for part in (x.high, x.low)))
    return torch.where(where, other, x)


def entry(k: list[Tensor], squares: list[Tensor], roots: list[Tensor], i: int, j: int) -> Tensor:
    if j < i - 1:
        return torch.zeros_like(k[0])
    if j == i - 1:
        return (squares[i] / roots[i]).to(k[0].dtype)
    weight: Tensor = -conjugate(k[i]) * k[j + 1] * product(roots[i + 1 : j + 1])
    return weight


def product(factors: list[Tensor]) -> Tensor | float:
    result: Tensor | float = 1.0
    for factor in factors:
        result = factor * result
    return result


def conjugate(x: Number) -> Number:
    return x.conj() if is_complex(x) else x


def is_complex(x: Number) -> bool:
    return isinstance(x, ComplexDoubleDouble) or (isinstance(x, Tensor) and x.is_complex())


def real(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


def value(x: Number) -> Tensor:
    rounded: Tensor = x if isinstance(x, Tensor) else x.value
    return rounded


def half(x: Number) -> Number:
    return x.scaled(0.5) if isinstance(x, DoubleDouble) else 0.5 * x


def later(left: States, right: States) -> States:
    return right


def as_given(state: States, xs: tuple[Tensor, Tensor]) -> States:
    """In the dtype of the coefficients."""
    sign, matrix, entering, leaving, first = (t.to(xs[1].dtype) for t in state)
    return sign, matrix, entering, leaving, first


def kernel_of(name: str, function: Callable[[Tensor, Tensor], States]) -> Monoid:
    """An operator for an axis of one step, so that the engines make a kernel of the function."""
    return Monoid(later, name=name, element_ndim=1, lift=function, lower=as_given)


STATES = kernel_of("filter_states", states)
EXACT_STATES = kernel_of("exact_filter_states", exact_states)
