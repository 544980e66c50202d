"""Means and variances of weighted observations, of which each fades the ones before it.

An observation (x, d, n) multiplies all weights before it by d and has the weight n itself. A
stretch of them is (d, w, m): the product of its d, the sum of its weights and its weighted mean.
For the variance there are also v, the weighted mean of the squares of the distances from m, and u,
which is 1 − Σ w[s]² / w²: v / u is the unbiased variance. A step without observation is (1, 0, 0):
it changes no digit of what came before.

Two stretches side by side have the shares s = w₂ / w and r = d₂ w₁ / w of w = d₂ w₁ + w₂, and

    m = r m₁ + s m₂,    v = r v₁ + s v₂ + r s (m₂ − m₁)²,    u = r² u₁ + s² u₂ + 2 r s

No term of v and u is negative, so that none cancels another. The mean is that of the stretch with
the larger share, moved towards the other one: equal means stay as they are, and what has faded
takes no digits from what has not. The weight of a stretch with an observation does not underflow,
as its last one has the weight n.

How much an observation fades the ones before it depends on the steps without observations between
them, `FADES`.

Source: D. H. D. West, "Updating mean and variance estimates: an improved method", Communications of
the ACM 22(9), 1979.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...monoids.monoid import Monoid

Mean = tuple[Tensor, Tensor, Tensor]
Moments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Fade = tuple[Tensor, Tensor]


def is_observed(x: Tensor) -> Tensor:
    """Neither NaN nor infinite: pandas leaves infinite values out, too."""
    return x - x == 0


def _shares(d2: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the weights, and the shares of the left and of the right stretch in it."""
    faded = d2 * w1
    w = faded + w2
    whole = torch.where(w > 0, w, 1)
    return w, faded / whole, w2 / whole


def _moved(m1: Tensor, m2: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """r m₁ + s m₂ of shares whose sum is 1, or 0 where neither is of an observation."""
    is_late = s > r
    large, small = torch.where(is_late, m2, m1), torch.where(is_late, m1, m2)
    share = torch.where(is_late, r, s)
    return large + (small * share - large * share)


def weighted_mean(left: Mean, right: Mean) -> Mean:
    d1, w1, m1 = left
    d2, w2, m2 = right
    w, r, s = _shares(d2, w1, w2)
    return d1 * d2, w, _moved(m1, m2, r, s)


def weighted_moments(left: Moments, right: Moments) -> Moments:
    d1, w1, m1, v1, u1 = left
    d2, w2, m2, v2, u2 = right
    w, r, s = _shares(d2, w1, w2)
    delta = m2 - m1
    v = r * v1 + s * v2 + (r * delta) * (s * delta)
    u = (r * r) * u1 + (s * s) * u2 + 2 * (r * s)
    return d1 * d2, w, _moved(m1, m2, r, s), v, u


def adjusted(x: Tensor, fade: Tensor) -> Mean:
    """Every observation has the weight 1."""
    valid = is_observed(x)
    one = torch.ones_like(x)
    return torch.where(valid, fade, one), torch.where(valid, one, 0), torch.where(valid, x, 0)


def normalised(x: Tensor, fade: Tensor, alpha: Tensor) -> Mean:
    """The weights are divided by their sum after each observation: those before have the sum 1."""
    valid = is_observed(x)
    total = fade + alpha
    return (
        torch.where(valid, fade / total, 1),
        torch.where(valid, alpha / total, 0),
        torch.where(valid, x, 0),
    )


def of_moments(lift: Callable[..., Mean]) -> Callable[..., Moments]:
    def lifted(*xs: Tensor) -> Moments:
        d, w, m = lift(*xs)
        return d, w, m, torch.zeros_like(m), torch.zeros_like(m)

    return lifted


def mean_of(state: Mean) -> Tensor:
    return torch.where(state[1] > 0, state[2], torch.nan)


def biased(state: Moments) -> Tensor:
    return torch.where(state[1] > 0, state[3], torch.nan)


def unbiased(state: Moments) -> Tensor:
    u = state[4]
    is_known = u > 0
    return torch.where(is_known, state[3] / torch.where(is_known, u, 1), torch.nan)


def last_and_gap(left: Fade, right: Fade) -> Fade:
    return torch.where(right[1], right[0], left[0] * right[0]), left[1] | right[1]


def gap_fades(x: Tensor, alpha: Tensor) -> Fade:
    valid = is_observed(x)
    return torch.where(valid, 1, 1 - alpha), valid


def gap_stays(x: Tensor, alpha: Tensor) -> Fade:
    valid = is_observed(x)
    return torch.where(valid, torch.ones_like(alpha), 1), valid


def fade_of(state: Fade, xs: tuple[Tensor, Tensor]) -> Tensor:
    return torch.where(state[1], state[0] * (1 - xs[1]), 0)


def fades(name: str, lift: Any) -> Monoid:
    """Exclusive scans of (x, alpha): the product of 1 − alpha over the steps from the last
    observation to this step, this one's included; 0 before the first one."""
    return Monoid(last_and_gap, identity=(1.0, False), name=name, lift=lift, lower=fade_of)


FADES = {False: fades("ewm_fades", gap_fades), True: fades("ewm_fades_ignoring", gap_stays)}
LIFTS: dict[bool, Callable[..., Mean]] = {True: adjusted, False: normalised}
MEANS = {
    adjust: Monoid(
        weighted_mean, identity=(1.0, 0.0, 0.0), name=f"ewm_mean_{lift.__name__}", lift=lift,
        lower=mean_of,
    )
    for adjust, lift in LIFTS.items()
}  # fmt: skip
# By (adjust, bias).
VARIANCES = {
    (adjust, lower is biased): Monoid(
        weighted_moments, identity=(1.0, 0.0, 0.0, 0.0, 0.0),
        name=f"ewm_var_{lift.__name__}_{lower.__name__}", lift=of_moments(lift), lower=lower,
    )
    for adjust, lift in LIFTS.items() for lower in (biased, unbiased)
}  # fmt: skip
