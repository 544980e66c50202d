"""Running sums and products.

    sum:   y[t] = x[0] + … + x[t]        identity 0
    prod:  y[t] = x[0] · … · x[t]        identity 1

The element is one number of any dtype. Integers wrap and keep their dtype (`assocscan.cumsum` and
`cumprod` promote to int64 as torch does); for bool the sum is "or" and the product is "and".
The gradient of the product divides by nothing, so zeros among the x are harmless.

Cost per element: 1 flop, reads and writes one number.

Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> associative_scan(ops.sum, torch.tensor([3, 1, 4, 1]))
tensor([3, 4, 8, 9])
>>> associative_scan(ops.prod, torch.tensor([3, 1, 4, 1]), inclusive=False)
tensor([ 1,  3,  3, 12])
"""

from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0.0)
def sum(left: Tensor, right: Tensor) -> Tensor:
    """left + right."""
    return left + right


@monoid(identity=1.0)
def prod(left: Tensor, right: Tensor) -> Tensor:
    """left · right."""
    return left * right
