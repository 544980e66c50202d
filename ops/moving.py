"""Exponential moving average and variance.

The weights are w[s] = d[s+1] · … · d[t], the product of the decays after s. With a constant
d = 1 − α these are the weights of pandas' `ewm(adjust=True)`: no weight is given to a start at 0.
For the form m[t] = d·m[t−1] + (1 − d)·x[t] take `linear_recurrence(d, (1 - d) * x, axis=…)`.

Source: D. H. D. West, "Updating mean and variance estimates: an improved method", Communications of
the ACM 22(9), 1979.
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
    """Exponential moving average: m[t] = Σ w[s]·x[s] / Σ w[s], with w[s] = d[s+1] · … · d[t].

    Inputs: (x, d), real floats: the value and the decay. A constant decay is a tensor that is
        expanded along the axis, which costs no memory. d[0] is not used.
    Element: (d, w, s): the product of the decays, the sum of the weights, and the weighted sum.
    Outputs: m = s / w; NaN where there is no element yet, and from a NaN in x on. For gaps take
        `ewm_mean(x, 1 - d)`.
    Identity: (1, 0, 0).
    Cost: 6 flops; reads x and d, writes one number.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x, half = torch.tensor([4.0, 1.0, 1.0]), torch.tensor([0.5]).expand(3)
    >>> associative_scan(ops.ema, (x, half))
    tensor([4.0000, 2.0000, 1.4286])
    """
    d1, w1, s1 = left
    d2, w2, s2 = right
    return d1 * d2, d2 * w1 + w2, d2 * s1 + s2


def _lift_variance(x: Tensor, decay: Tensor) -> State:
    distance = (x - x).detach()  # 0; NaN where x is infinite or NaN, and so is its variance
    return decay, torch.ones_like(x), x, distance


def _lower_variance(state: State) -> Pair:
    _, w, m, q = state
    return torch.where(w > 0, m, torch.nan), q / w


@monoid(identity=(1.0, 0.0, 0.0, 0.0), lift=_lift_variance, lower=_lower_variance)
def ema_variance(left: State, right: State) -> State:
    """Exponential moving average and variance: v[t] = Σ w[s]·(x[s] − m[t])² / Σ w[s].

    Inputs: (x, d), real floats: the value and the decay, as in `ema`.
    Element: (d, w, m, q): the product of the decays, the sum of the weights, the mean, and the
        weighted squares of the distances from it.
    Outputs: (m, v), v = q / w; NaN where there is no element yet, and v from an infinite or NaN x
        on.
    Identity: (1, 0, 0, 0).
    Cost: 15 flops; reads x and d, writes two numbers.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x, half = torch.tensor([4.0, 1.0, 1.0]), torch.tensor([0.5]).expand(3)
    >>> associative_scan(ops.ema_variance, (x, half))[1]
    tensor([0.0000, 2.0000, 1.1020])
    """
    d1, w1, m1, q1 = left
    d2, w2, m2, q2 = right
    faded = d2 * w1
    w = faded + w2
    delta = m2 - m1
    share = w2 / torch.where(w > 0, w, 1)
    return d1 * d2, w, m1 + delta * share, d2 * q1 + q2 + delta * delta * faded * share
