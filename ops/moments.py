"""Running mean and variance.

    mean:     m[t] = (x[0] + … + x[t]) / (t + 1)
    welford:  (m[t], v[t]),  v[t] = Σ |x[s] − m[t]|² / (t + 1)

The input is one number x, real or complex. The element of mean is (s, n), sum and count; that of
welford is (n, m, q): count, mean, and the sum of squared distances from the mean, which is never
formed as a difference of large numbers. Identities (0, 0) and (0, 0, 0).

v is the population variance, defined from the first element on; the sample variance is
v · n / (n − 1). The count is an int64, exact where a float32 would stop counting at 2²⁴, and takes
no part in derivatives. Integer x are summed in int64 by mean and converted to the default float
dtype by welford; both then return that float dtype, as a true division does. The mean and the
variance of nothing (an exclusive scan's first output) are NaN. An infinite x gives a NaN variance.

Cost per element: mean 3 flops, reads and writes one number; welford 12 flops, reads one number
and writes two.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", COMPSTAT 1982; B. P. Welford, Technometrics 4(3), 1962.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> x = torch.tensor([2.0, 4.0, 6.0, 8.0])
>>> associative_scan(ops.mean, x)
tensor([2., 3., 4., 5.])
>>> mean, variance = associative_scan(ops.welford, x)
>>> variance
tensor([0.0000, 1.0000, 2.6667, 5.0000])
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
    """(sum, count) of both."""
    return left[0] + right[0], left[1] + right[1]


def _lift_welford(x: Tensor) -> Triple:
    x = x if _is_inexact(x) else x.to(torch.get_default_dtype())
    return _count_one(x), x, torch.zeros_like(x.real)


def _lower_welford(state: Triple) -> Pair:
    n, m, q = state
    return torch.where(n > 0, m, torch.nan), q / n


@monoid(identity=(0, 0.0, 0.0), lift=_lift_welford, lower=_lower_welford)
def welford(left: Triple, right: Triple) -> Triple:
    """(count, mean, squared distances) of both; an empty side weighs nothing."""
    n1, m1, q1 = left
    n2, m2, q2 = right
    n = n1 + n2
    delta = m2 - m1
    weight = n2.to(q1.dtype) / torch.clamp(n, min=1)
    between = delta * (n1 * weight) * delta.conj()
    return n, m1 + delta * weight, q1 + q2 + between.real
