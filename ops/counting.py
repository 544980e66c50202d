"""Counting."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0, lift=lambda x: x.to(torch.bool).to(torch.int64))
def count(left: Tensor, right: Tensor) -> Tensor:
    """How many of x[0], …, x[t] are not zero.

    Inputs: x, a number of any dtype or a bool; NaN counts.
    Element: one int64.
    Outputs: the count, int64.
    Identity: 0.
    Cost: 1 operation; reads one number, writes one int64.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.count, torch.tensor([True, False, True, True]))
    tensor([1, 1, 2, 3])
    """
    return left + right
