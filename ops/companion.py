"""Linear recurrences of order k.

    autoregression:  y[t] = c[t, 1] · y[t−1] + … + c[t, k] · y[t−k] + x[t],  y[t] = 0 for t < 0

The input is (c, x): a leaf c […, k] of coefficients and a scalar leaf x; constant coefficients are
c with a size of 1 in the batch, expanded along the axis, and cost no memory. A lift makes of them
the map h ↦ A·h + b of the last k values h = (y[t], …, y[t−k+1]): A is c above a shifted identity,
the companion matrix, b = (x, 0, …). Its zeros and ones exist in registers at most, never in memory.
The state is (A[t] @ … @ A[0], h[t]), the output y[t]. Identity (I, 0). Real or complex.

`lfilter` is the filter made of it.

Cost per element: 2k³ + 2k² flops in a tree, k of them in the walk of a carry; reads x (and c, where
it varies), writes y.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4.2.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> c = torch.tensor([1, 1]).expand(8, 2)
>>> x = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])
>>> associative_scan(ops.autoregression, (c, x))
tensor([ 1,  1,  2,  3,  5,  8, 13, 21])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.matrix import matrix_affine

Pair = tuple[Tensor, Tensor]


def _lift(c: Tensor, x: Tensor) -> Pair:
    k = c.shape[-1]
    shift = torch.eye(k, dtype=c.dtype)[:-1]
    rest = torch.zeros(k - 1, dtype=x.dtype)
    return torch.cat([c[None], shift]), torch.cat([x[None], rest])


@monoid(
    element_ndim=(1, 0),
    identity=matrix_affine.identity,
    lift=_lift,
    lower=lambda state: state[1][0],
    adjoint=matrix_affine.adjoint,
)
def autoregression(left: Pair, right: Pair) -> Pair:
    """The map `left` followed by the map `right`."""
    a1, b1 = left
    a2, b2 = right
    return a2 @ a1, a2 @ b1 + b2
