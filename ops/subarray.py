"""Largest sum of consecutive elements."""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

State = tuple[Tensor, Tensor, Tensor, Tensor]


@monoid(
    identity=(0.0, -math.inf, -math.inf, -math.inf),
    lift=lambda x: (x, x, x, x),
    lower=lambda state: state[3],
)
def max_subarray(left: State, right: State) -> State:
    """Largest sum of consecutive elements: y[t] = max over 0 ≤ i ≤ j ≤ t of x[i] + … + x[j].

    Inputs: x, a real number.
    Element: (total, prefix, suffix, best) of a stretch: the sum of all of it, of its best
        beginning, of its best end, and of its best part, none of them empty. x enters as (x, x, x,
        x).
    Outputs: y = best, in the dtype of x.
    Identity: (0, −∞, −∞, −∞), for floats. With integers −∞ saturates and sums wrap: scan
        inclusively.
    Cost: 8 flops; reads one number, writes one.

    Source: J. Bentley, "Programming pearls: algorithm design techniques", Communications of the ACM
    27(9), 1984 (Kadane's problem; the element is that of his divide-and-conquer algorithm).

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.max_subarray, torch.tensor([-2.0, 3.0, -1.0, 4.0, -9.0, 5.0]))
    tensor([-2.,  3.,  3.,  6.,  6.,  6.])
    """
    t1, p1, s1, b1 = left
    t2, p2, s2, b2 = right
    across = torch.maximum(torch.maximum(b1, b2), s1 + p2)
    return t1 + t2, torch.maximum(p1, t1 + p2), torch.maximum(s2, s1 + t2), across
