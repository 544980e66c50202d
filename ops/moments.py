"""Running mean and variance.

The count is an int64, exact where a float32 would stop counting at 2²⁴, and takes no part in
derivatives. The mean and the variance of nothing (an exclusive scan's first output) are NaN.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", COMPSTAT 1982; B. P. Welford, Technometrics 4(3), 1962.
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _count_one(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.int64)


def _lift_mean(x: Tensor) -> Pair:
    return x if _is_inexact(x) else x.to(torch.int64), _count_one(x)


def _lower_mean(state: Pair) -> Tensor:
    s, n = state
    return s / n


@monoid(identity=(0.0, 0), lift=_lift_mean, lower=_lower_mean)
def mean(left: Pair, right: Pair) -> Pair:
    """Running mean: m[t] = (x[0] + … + x[t]) / (t + 1).

    Inputs: x, a number, real or complex; integers are summed in int64.
    Element: (s, n): sum and count.
    Outputs: m, in the dtype of x; for integers in the default float dtype.
    Identity: (0, 0).
    Cost: 3 flops; reads one number, writes one.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.mean, torch.tensor([2.0, 4.0, 6.0, 8.0]))
    tensor([2., 3., 4., 5.])
    """
    return left[0] + right[0], left[1] + right[1]


def _lift_welford(x: Tensor) -> Triple:
    x = x if _is_inexact(x) else x.to(torch.get_default_dtype())
    distance = (x - x).detach()  # 0; NaN where x is infinite or NaN, and so is its variance
    return _count_one(x), x, distance.real + distance.imag if x.is_complex() else distance


def _lower_welford(state: Triple) -> Pair:
    n, m, q = state
    return torch.where(n > 0, m, torch.nan), q / n


@monoid(identity=(0, 0.0, 0.0), lift=_lift_welford, lower=_lower_welford)
def welford(left: Triple, right: Triple) -> Triple:
    """Running mean and variance: v[t] = Σ |x[s] − m[t]|² / (t + 1), over s ≤ t.

    Inputs: x, a number, real or complex; integers are converted to the default float dtype.
    Element: (n, m, q): count, mean, and the sum of squared distances from the mean. That sum is
        never a difference of large numbers.
    Outputs: (m, v): the mean and the population variance. The sample variance is v·n / (n − 1). It
        is NaN from an infinite or NaN x on, also where that is the only one.
    Identity: (0, 0, 0).
    Cost: 12 flops; reads one number, writes two.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> mean, variance = associative_scan(ops.welford, torch.tensor([2.0, 4.0, 6.0, 8.0]))
    >>> variance
    tensor([0.0000, 1.0000, 2.6667, 5.0000])
    """
    n1, m1, q1 = left
    n2, m2, q2 = right
    n = n1 + n2
    delta = m2 - m1
    weight = n2.to(q1.dtype) / torch.clamp(n, min=1)
    between = delta * (n1 * weight) * delta.conj()
    return n, m1 + delta * weight, q1 + q2 + between.real
