"""Exponential moving average and variance.

    ema:           m[t] = Σ w[s]·x[s] / Σ w[s]
    ema_variance:  (m[t], v[t]),  v[t] = Σ w[s]·(x[s] − m[t])² / Σ w[s]

with w[s] = d[s+1] · … · d[t], the product of the decays after s: for a constant decay d = 1 − α the
weights α-moving averages have, without the weight that such an average gives to a start at 0 (as in
`pandas.ewm(adjust=True)`, `var(bias=True)`). For the form m[t] = d·m[t−1] + (1 − d)·x[t] take
`linear_recurrence(d, (1 - d) * x)`.

The input is (x, d), real; a constant decay is a tensor expanded along the axis, which costs no
memory, and d[0] is not used. The element of ema is (d, w, s): decay, sum of weights, weighted sum;
that of ema_variance is (d, w, m, q): decay, weights, mean, weighted squares of distances from it.
Identities (1, 0, 0) and (1, 0, 0, 0). The average of nothing is NaN.

Cost per element: ema 6 flops, reads x and d, writes one number; ema_variance 15 flops, writes two.

Source: D. H. D. West, "Updating mean and variance estimates: an improved method", Communications of
the ACM 22(9), 1979.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> x, half = torch.tensor([4.0, 1.0, 1.0]), torch.tensor([0.5]).expand(3)
>>> associative_scan(ops.ema, (x, half))
tensor([4.0000, 2.0000, 1.4286])
>>> associative_scan(ops.ema_variance, (x, half))[1]
tensor([0.0000, 2.0000, 1.1020])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
State = tuple[Tensor, Tensor, Tensor, Tensor]


def _lift_average(x: Tensor, decay: Tensor) -> Triple:
    return decay, torch.ones_like(x), x


@monoid(identity=(1.0, 0.0, 0.0), lift=_lift_average, lower=lambda state: state[2] / state[1])
def ema(left: Triple, right: Triple) -> Triple:
    """(decay, weights, weighted sum) of both."""
    d1, w1, s1 = left
    d2, w2, s2 = right
    return d1 * d2, d2 * w1 + w2, d2 * s1 + s2


def _lift_variance(x: Tensor, decay: Tensor) -> State:
    return decay, torch.ones_like(x), x, torch.zeros_like(x)


def _lower_variance(state: State) -> Pair:
    _, w, m, q = state
    return torch.where(w > 0, m, torch.nan), q / w


@monoid(identity=(1.0, 0.0, 0.0, 0.0), lift=_lift_variance, lower=_lower_variance)
def ema_variance(left: State, right: State) -> State:
    """(decay, weights, mean, squared distances) of both; an empty side weighs nothing."""
    d1, w1, m1, q1 = left
    d2, w2, m2, q2 = right
    faded = d2 * w1
    w = faded + w2
    delta = m2 - m1
    share = w2 / torch.where(w > 0, w, 1)
    return d1 * d2, w, m1 + delta * share, d2 * q1 + q2 + delta * delta * faded * share
