"""Running sums with the roundings summed beside them."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


def _lift(x: Tensor) -> Pair:
    return x, torch.zeros_like(x)


def _lower(state: Pair) -> Tensor:
    return state[0] + state[1]


def rounding(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """a + b − total, exactly; 0 where that is no number."""
    taken = total - a
    error = (a - (total - taken)) + (b - taken)
    return torch.where(error == error, error, 0)


@monoid(identity=(0.0, 0.0), lift=_lift, lower=_lower)
def compensated_sum(left: Pair, right: Pair) -> Pair:
    """Running sum as if in twice the precision: y[t] = x[0] + … + x[t].

    Inputs: x, a float, real or complex.
    Element: (s, c): the rounded sum, and the sum of what rounding took from it. x enters as (x, 0).
    Outputs: y = s + c.
    Identity: (0, 0).
    Cost: 8 flops; reads one number, writes one.

    Combining adds s₁ and s₂ by Knuth's TwoSum. Its error is exact and joins c₁ + c₂: this is
    Neumaier's variant of Kahan's sum, made symmetric. The error of y is about ε·|y| + n·ε²·Σ|x|,
    where a plain sum's is up to n·ε·Σ|x|. Where s overflows or is NaN, there is nothing to
    compensate, and c takes no part. Derivatives are those of a sum.

    Source: A. Neumaier, "Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen",
    ZAMM 54, 1974; D. E. Knuth, "The Art of Computer Programming", vol. 2, section 4.2.2, theorem B.

    >>> import torch
    >>> from assocscan import ops, reduce
    >>> x = torch.tensor([1.0, 1e8, 1.0, -1e8])
    >>> reduce(ops.compensated_sum, x), reduce(ops.sum, x)
    (tensor(2.), tensor(0.))
    """
    s1, c1 = left
    s2, c2 = right
    s = s1 + s2
    return s, c1 + c2 + rounding(s1.detach(), s2.detach(), s.detach())
