"""Running covariance of two series."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Triple = tuple[Tensor, Tensor, Tensor]
State = tuple[Tensor, Tensor, Tensor, Tensor]


def _lift(x: Tensor, y: Tensor) -> State:
    x, y = (t if t.is_floating_point() else t.to(torch.get_default_dtype()) for t in (x, y))
    # 0; NaN where x or y is infinite or NaN, and so is their covariance
    distances = ((x - x) + (y - y)).detach().to(x.dtype)
    return torch.ones_like(x, dtype=torch.int64), x, y, distances


def _lower(state: State) -> Triple:
    n, m, k, s = state
    known = n > 0
    return torch.where(known, m, torch.nan), torch.where(known, k, torch.nan), s / n


@monoid(identity=(0, 0.0, 0.0, 0.0), lift=_lift, lower=_lower)
def covariance(left: State, right: State) -> State:
    """Running means and covariance of two series.

        c[t] = Σ (x[s] − m[t]) · (y[s] − k[t]) / (t + 1),    s ≤ t,  m and k the means of x and y

    Inputs: (x, y), real numbers; integers are converted to the default float dtype.
    Element: (n, m, k, s): the count (int64), both means, and the sum of the products of distances
        from them. That sum is never a difference of large numbers.
    Outputs: (m, k, c), the means and the population covariance. The sample covariance is c·n /
        (n − 1). All are NaN where there is no element yet; c is NaN from an infinite or NaN x or y
        on.
    Identity: (0, 0, 0, 0).
    Cost: 13 flops; reads two numbers, writes three.

    With the variances of x and y it gives a correlation, in one pass:
    `product(ops.covariance, with_lift(ops.welford, lambda x, y: x), with_lift(ops.welford,
    lambda x, y: y))` scans (x, y), and the correlation is c / √(v·w), v and w the variances.

    Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", COMPSTAT 1982.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
    >>> associative_scan(ops.covariance, (x, 2 * x))[2]
    tensor([0.0000, 0.5000, 1.3333, 7.0000])
    """
    n1, m1, k1, s1 = left
    n2, m2, k2, s2 = right
    n = n1 + n2
    dx, dy = m2 - m1, k2 - k1
    weight = n2.to(s1.dtype) / torch.clamp(n, min=1)
    return n, m1 + dx * weight, k1 + dy * weight, s1 + s2 + dx * dy * (n1 * weight)
