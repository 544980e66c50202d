"""Linear recurrences of order k."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.matrix import matrix_affine

Pair = tuple[Tensor, Tensor]


def _lift(c: Tensor, x: Tensor) -> Pair:
    k = c.shape[-1]
    shift = torch.eye(k, dtype=c.dtype, device=c.device)[:-1]
    rest = torch.zeros(k - 1, dtype=x.dtype, device=x.device)
    return torch.cat([c[None], shift]), torch.cat([x[None], rest])


@monoid(
    element_ndim=(1, 0),
    identity=matrix_affine.identity,
    lift=_lift,
    lower=lambda state: state[1][0],
    adjoint=matrix_affine.adjoint,
)
def autoregression(left: Pair, right: Pair) -> Pair:
    """Linear recurrence of order k.

        y[t] = c[t, 1] · y[t−1] + … + c[t, k] · y[t−k] + x[t],    y[t] = 0 for t < 0

    Inputs: (c, x): the coefficients c […, k] and a number x, real, complex or integer. Constant
        coefficients are a c that is expanded along the axis, which costs no memory.
    Element: (A [k, k], b [k]), the map h ↦ A·h + b of the last k values h = (y[t], …, y[t−k+1]). A
        is the companion matrix, c above a shifted identity; b = (x, 0, …, 0). A lift makes them in
        registers, not in memory.
    Outputs: y.
    Identity: (I, 0).
    Cost: 2k³ + 2k² flops in a tree, k of them where a carry walks along; reads x (and c, where it
        varies), writes y.

    Powers of companion matrices may grow long before they decay: for constant coefficients use
    `assocscan.lfilter`, which avoids them.

    Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4.2.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> c = torch.tensor([1, 1]).expand(8, 2)
    >>> x = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])
    >>> associative_scan(ops.autoregression, (c, x))
    tensor([ 1,  1,  2,  3,  5,  8, 13, 21])
    """
    a1, b1 = left
    a2, b2 = right
    return a2 @ a1, a2 @ b1 + b2
