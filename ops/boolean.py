"""Running logic.

    any:  y[t] = x[0] ≠ 0 or … or x[t] ≠ 0        identity False
    all:  y[t] = x[0] ≠ 0 and … and x[t] ≠ 0      identity True
    xor:  y[t] = x[0] ^ … ^ x[t]                  identity 0

any and all take numbers of any dtype, which a lift turns into bool (NaN counts as true, as in
torch.any); the element and the output are one bool. xor works on the bits of integers, or on bool.

Cost per element: 1 operation, reads one number, writes one bool (xor: one integer).

>>> import torch
>>> from assocscan import associative_scan, ops
>>> associative_scan(ops.any, torch.tensor([0.0, 0.0, 0.5, 0.0]))
tensor([False, False,  True,  True])
>>> associative_scan(ops.xor, torch.tensor([1, 2, 4, 2]))
tensor([1, 3, 7, 5])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


def _truth(x: Tensor) -> Tensor:
    return x.to(torch.bool)


@monoid(identity=False, lift=_truth)
def any(left: Tensor, right: Tensor) -> Tensor:
    """left or right."""
    return left | right


@monoid(identity=True, lift=_truth)
def all(left: Tensor, right: Tensor) -> Tensor:
    """left and right."""
    return left & right


@monoid(identity=0)
def xor(left: Tensor, right: Tensor) -> Tensor:
    """The bits set in exactly one of the two."""
    return left ^ right
