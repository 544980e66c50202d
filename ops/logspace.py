"""Running sums of numbers that are stored as logarithms.

    logaddexp:  y[t] = log(exp(x[0]) + … + exp(x[t]))        identity −inf

The element is one float, real or complex, the logarithm of what is summed. With `high` the element
of greater real part the combination is high + log1p(exp(low − high)), which neither overflows nor
loses the smaller one. An infinite `low` adds nothing, so that two equal infinities combine to
themselves and, where torch.logaddexp yields NaN, pass on a finite gradient: probabilities of zero
(x = −inf) are ordinary data here.

Cost per element: about 40 flops (one exp, one log1p), reads and writes one number.

Source: N. J. Higham, "Accuracy and stability of numerical algorithms", 2nd ed., section 27.8.

>>> import math, torch
>>> from assocscan import associative_scan, ops
>>> p = torch.tensor([0.0, 0.5, 0.25, 0.25])
>>> associative_scan(ops.logaddexp, p.log()).exp()
tensor([0.0000, 0.5000, 0.7500, 1.0000])
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=-math.inf)
def logaddexp(left: Tensor, right: Tensor) -> Tensor:
    """log(exp(left) + exp(right))."""
    left_higher = left.real >= right.real
    high = torch.where(left_higher, left, right)
    low = torch.where(left_higher, right, left)
    difference = torch.where(torch.isinf(low.real), -math.inf, low - high)
    ratio = torch.exp(difference)
    # A complex log1p has no generated form; log(1 + ratio) costs accuracy only where y is near 0.
    return high + (torch.log(1 + ratio) if ratio.is_complex() else torch.log1p(ratio))
