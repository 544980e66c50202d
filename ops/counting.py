"""Counting.

    count:  y[t] = how many of x[0], …, x[t] are not zero

The input is a number of any dtype or a bool (NaN counts), the element one int64. Identity 0.

Cost per element: 1 operation, reads one number, writes one int64.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> associative_scan(ops.count, torch.tensor([True, False, True, True]))
tensor([1, 1, 2, 3])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0, lift=lambda x: x.to(torch.bool).to(torch.int64))
def count(left: Tensor, right: Tensor) -> Tensor:
    """left + right."""
    return left + right
