"""Running sums of numbers that are stored as logarithms."""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=-math.inf)
def logaddexp(left: Tensor, right: Tensor) -> Tensor:
    """Running log-sum-exp: y[t] = log(exp(x[0]) + … + exp(x[t])).

    Inputs: x, a float, real or complex: the logarithm of what is summed. −∞ stands for 0.
    Element: the same number.
    Outputs: y, in the dtype of x.
    Identity: −∞.
    Cost: about 40 flops (one exp, one log1p); reads one number, writes one.

    With `high` the element of greater real part, the combination is high + log1p(exp(low − high)):
    it does not overflow, and the smaller one is not lost. An infinite `low` adds nothing. So two
    equal infinities combine to themselves, and pass on a finite gradient where `torch.logaddexp`
    gives NaN.

    Source: N. J. Higham, "Accuracy and stability of numerical algorithms", 2nd ed., section 27.8.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> p = torch.tensor([0.0, 0.5, 0.25, 0.25])
    >>> associative_scan(ops.logaddexp, p.log()).exp()
    tensor([0.0000, 0.5000, 0.7500, 1.0000])
    """
    left_higher = left.real >= right.real
    high = torch.where(left_higher, left, right)
    low = torch.where(left_higher, right, left)
    difference = torch.where(torch.isinf(low.real), -math.inf, low - high)
    ratio = torch.exp(difference)
    # A complex log1p has no generated form; log(1 + ratio) costs accuracy only where y is near 0.
    return high + (torch.log(1 + ratio) if ratio.is_complex() else torch.log1p(ratio))
