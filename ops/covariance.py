"""Running covariance of two series.

    covariance:  (m[t], k[t], c[t]): the means of x and y and c = Σ (x − m)(y − k) / (t + 1)

The input is (x, y), real. The element is (n, m, k, s): count (int64), both means, and the sum of
the products of distances from them, which is never a difference of large numbers. Identity (0, 0,
0, 0). c is the population covariance; the sample covariance is c · n / (n − 1). Means and
covariance of nothing are NaN. With the variances of `welford`, `product` gives a correlation in the
same pass.

Cost per element: 13 flops, reads two numbers and writes three.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", COMPSTAT 1982.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
>>> associative_scan(ops.covariance, (x, 2 * x))[2]
tensor([0.0000, 0.5000, 1.3333, 7.0000])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Triple = tuple[Tensor, Tensor, Tensor]
State = tuple[Tensor, Tensor, Tensor, Tensor]


def _lift(x: Tensor, y: Tensor) -> State:
    return torch.ones_like(x, dtype=torch.int64), x, y, torch.zeros_like(x)


def _lower(state: State) -> Triple:
    n, m, k, s = state
    known = n > 0
    return torch.where(known, m, torch.nan), torch.where(known, k, torch.nan), s / n


@monoid(identity=(0, 0.0, 0.0, 0.0), lift=_lift, lower=_lower)
def covariance(left: State, right: State) -> State:
    """(count, means, products of distances) of both; an empty side weighs nothing."""
    n1, m1, k1, s1 = left
    n2, m2, k2, s2 = right
    n = n1 + n2
    dx, dy = m2 - m1, k2 - k1
    weight = n2.to(s1.dtype) / torch.clamp(n, min=1)
    return n, m1 + dx * weight, k1 + dy * weight, s1 + s2 + dx * dy * (n1 * weight)
