"""Running logic."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


def _truth(x: Tensor) -> Tensor:
    return x.to(torch.bool)


@monoid(identity=False, lift=_truth)
def any(left: Tensor, right: Tensor) -> Tensor:
    """Whether any was true so far: y[t] = x[0] ≠ 0 or … or x[t] ≠ 0.

    Inputs: x, a number of any dtype; NaN counts as true, as in `torch.any`.
    Element: one bool.
    Outputs: y, bool.
    Identity: False.
    Cost: 1 operation; reads one number, writes one bool.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.any, torch.tensor([0.0, 0.0, 0.5, 0.0]))
    tensor([False, False,  True,  True])
    """
    return left | right


@monoid(identity=True, lift=_truth)
def all(left: Tensor, right: Tensor) -> Tensor:
    """Whether all were true so far: y[t] = x[0] ≠ 0 and … and x[t] ≠ 0.

    Inputs: x, a number of any dtype; NaN counts as true, as in `torch.all`.
    Element: one bool.
    Outputs: y, bool.
    Identity: True.
    Cost: 1 operation; reads one number, writes one bool.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.all, torch.tensor([2.0, 1.0, 0.0, 1.0]))
    tensor([ True,  True, False, False])
    """
    return left & right


@monoid(identity=0)
def xor(left: Tensor, right: Tensor) -> Tensor:
    """Running exclusive or of the bits: y[t] = x[0] ^ … ^ x[t].

    Inputs: x, an integer or bool.
    Element: the same.
    Outputs: y, in the dtype of x: the bits that are set in an odd number of the x.
    Identity: 0.
    Cost: 1 operation; reads one integer, writes one.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.xor, torch.tensor([1, 2, 4, 2]))
    tensor([1, 3, 7, 5])
    """
    return left ^ right
