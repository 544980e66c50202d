"""A rational filter as a state-space model whose products of matrices do not grow.

The filter B(z) / A(z), with coefficients b and a in powers of z⁻¹ and a[0] = 1, is

    z[t] = M z[t−1] + g x[t],    y[t] = b[0] x[t] + c · z[t−1]

for many choices of the state z. In the companion form (z the last values of y) the powers of M
first grow, by 10⁵ and more where poles lie close together, and decay later. A loop never forms
these powers; a tree of products does, and loses as many digits as they grow. Here z is that of the
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
unit circle, or some |k| is well above 1, the filter keeps the transposed direct form II, in which
scipy's loop computes.

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
from .double_double import ComplexDoubleDouble, DoubleDouble, exactly, of_parts, parts

States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Reflections = tuple[list[Any], list[Any], list[Any]]
Rows = tuple[list[list[Tensor]], list[Tensor], list[Tensor]]
Number = Any  # a Tensor, a DoubleDouble or a ComplexDoubleDouble
# Complex coefficients: a 1 − |k|² below this is lost to rounding.
LOST_IN_FLOAT64, LOST_IN_TWICE_THE_PRECISION = 1e-8, 1e-13
# The order up to which `exact_states` is compiled in seconds.
MOST_EXACT = {torch.float64: 8, torch.complex128: 4}
# Rounding makes |k| of an undamped filter a little larger than 1. Where a |k| is well above 1,
# powers of M grow faster in the lattice than in the direct form.
MOST_REFLECTED = 1.1
# The order up to which GPUs compute `exact_states` in one kernel.
MOST_AT_ONCE_ON_GPUS = {torch.float64: 3, torch.complex128: 1}


def states(b: Tensor, a: Tensor) -> States:
    """σ, D [n, n], g [n], c [n] and b[0] of coefficients a [n + 1] and b of at most as many, n ≥ 1,
    in float64 or complex128. a[0] may be any number: all are divided by it."""
    return states_of(*coefficients(b, a), lambda x: x)


def exact_states(b: Tensor, a: Tensor) -> States:
    """`states` of float64 or complex128 coefficients, computed in twice the precision: a rounding
    here acts on every step of the scan in the same way, a loop's differ from step to step."""
    return states_of(*coefficients(b, a), exactly)


def coefficients(b: Tensor, a: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """b and a as numbers, with a[0] = 1 and zeros behind b."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    rows = [[row[i].to(wide) for i in range(row.shape[-1])] for row in (b, a)]
    first, one = rows[1][0], torch.ones_like(rows[1][0])
    numerator = [x / first for x in rows[0]]
    numerator += [torch.zeros_like(one)] * (len(rows[1]) - len(numerator))
    return numerator, [one, *(x / first for x in rows[1][1:])]


def states_of(b: list[Tensor], a: list[Tensor], number: Callable[[Tensor], Number]) -> States:
    one = number(a[0])
    return chosen(b, a, one, *reflections([number(x) for x in b], [number(x) for x in a], one))


def chosen(
    b: list[Tensor], a: list[Tensor], one: Number, k: list[Number], square: list[Number],
    taps: list[Number],
) -> States:  # fmt: skip
    """The lattice's states, or the direct form's where the lattice's are not finite or the filter
    is far from stable."""
    n, lattice, direct = len(a) - 1, in_lattice(k, square, taps), direct_form(b, a)
    sign = torch.ones_like(a[0])
    if n == 1:
        sign = torch.where(real(lattice[0][0][0]) < 0, -1.0, 1.0).to(sign.dtype)
    for i in range(n):  # 1 is taken off before the product is rounded
        less, more = (value(shift - conjugate(k[i]) * k[i + 1]) for shift in (-one, one))
        lattice[0][i][i] = torch.where(real(sign) < 0, -more, less)
        direct[0][i][i] = direct[0][i][i] - 1.0
    whole = [packed(rows) for rows in (lattice, direct)]
    is_finite = torch.cat([x.abs().flatten() for x in whole[0]]).amax() < math.inf
    is_lattice = is_finite & (largest_reflection(k) < MOST_REFLECTED)
    matrix, entering, leaving = (torch.where(is_lattice, x, y) for x, y in zip(*whole, strict=True))
    return torch.where(is_lattice, sign, 1.0).to(sign.dtype), matrix, entering, leaving, b[0]


def largest_reflection(k: list[Number]) -> Tensor:
    return torch.stack([real(value(x).abs()) for x in k[1:]]).amax()


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


def reflections(b: list[Number], a: list[Number], one: Number) -> Reflections:
    """Three lists with an entry for each order m = 0, …, n: k[m], 1 − |k[m]|² and the tap v[m] of
    the ladder. The entries of order 0 are 1, 1 and what is left of b."""
    n = len(a) - 1
    k, square, taps = [one] * (n + 1), [one] * (n + 1), [one] * (n + 1)
    for m in range(n, 0, -1):
        k[m], taps[m] = a[m], b[m]
        square[m], a, b = lower_order(a, b, one)
    taps[0] = b[0]
    return k, square, taps


def lower_order(
    a: list[Number], b: list[Number], one: Number
) -> tuple[Number, list[Number], list[Number]]:
    """One step from order m to m − 1: 1 − |k|² with k = a[m]; the coefficients of the next lower a;
    and b − b[m] ã without its last entry, with ã the conjugates of a in reversed order."""
    square, lower = stepped_down(a, one)
    tap = b[-1]
    return square, lower, [x - tap * conjugate(y) for x, y in zip(b[:-1], a[:0:-1], strict=True)]


def in_lattice(k: list[Number], square: list[Number], taps: list[Number]) -> Rows:
    """M, g and c."""
    n = len(k) - 1
    squares = [real(value(x)) for x in square]
    roots = [torch.where(x == 0, 1.0, x.abs().sqrt()) for x in squares]
    rounded = [value(x) for x in k]
    matrix = [[entry(rounded, squares, roots, i, j) for j in range(n)] for i in range(n)]
    entering = [conjugate(rounded[i]) * product(roots[i + 1 :]) for i in range(n)]
    leaving, total = [], taps[0] - taps[0]
    for j in range(n):
        total = total + taps[j] * conjugate(k[j])
        weight = value(taps[j + 1] * square[j + 1] - k[j + 1] * total)
        leaving.append(weight / product(roots[j + 1 :]))
    return matrix, entering, leaving


def stepped_down(a: list[Number], one: Number) -> tuple[Number, list[Number]]:
    """1 − |k|², and the coefficients of the prediction error of the next lower order:
    (a − k ã) / (1 − |k|²), with ã the conjugate in reversed order.

    For real coefficients the parts that are equal and opposite in a and ã are divided by 1 + k and
    1 − k: their difference, which may be much smaller than both, would be rounded otherwise. Where
    1 − |k|² is 0 and a is k ã, as for an oscillator without damping, 0 / 0 counts as
    0. Complex coefficients are not divided in this way: they are NaN where the difference is
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


# `exact_states` as one kernel for each order that the recursion steps down, for GPUs: Triton's
# compiler takes a time that grows with the square of a kernel's size, 107 s for one of order 8.


def exact_states_by_order(b: Tensor, a: Tensor, run: Callable[..., Any]) -> States:
    """`exact_states`, with b of as many coefficients as a, both [..., n + 1].

    run(op, leaves): the scan of an axis of one step.
    """
    first = a[..., :1]
    b, a = b / first, a / first
    rest, left = ((torch.stack([t, torch.zeros_like(t)], -1)) for t in (a, b))
    one = rest[..., :1, :]
    k, square, taps = [], [], []
    for _ in range(a.shape[-1] - 1):
        k.append(rest[..., -1:, :])
        taps.append(left[..., -1:, :])
        found, rest, left = run(LOWER_ORDER, (rest, left))
        square.append(found[..., None, :])
    rows = [[end, *reversed(of)] for end, of in ((one, k), (one, square), (left, taps))]
    whole: States = run(STATES_OF_REFLECTIONS, (b, a, *(torch.cat(row, -2) for row in rows)))
    return whole


def lower_order_of_pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square, rest, left = lower_order(unpaired(a), unpaired(b), exactly(torch.ones_like(a[0][0])))
    return pair(square), torch.stack([pair(x) for x in rest]), torch.stack([pair(x) for x in left])


def states_of_pairs(b: Tensor, a: Tensor, k: Tensor, square: Tensor, taps: Tensor) -> States:
    of_b, of_a = ([t[i] for i in range(t.shape[-1])] for t in (b, a))
    one = exactly(of_a[0])
    return chosen(of_b, of_a, one, unpaired(k), unpaired(square), unpaired(taps))


def unpaired(t: Tensor) -> list[Number]:
    """The numbers of a tensor [n, 2] of their two parts."""
    return [of_parts(t[i][0], t[i][1]) for i in range(t.shape[0])]


def pair(x: Number) -> Tensor:
    return torch.stack(parts(x))


LOWER_ORDER = Monoid(
    later, name="lower_order_of_a_filter", element_ndim=2, lift=lower_order_of_pairs
)
STATES_OF_REFLECTIONS = Monoid(
    later, name="filter_states_of_reflections", element_ndim=(1, 1, 2, 2, 2), lift=states_of_pairs
)
