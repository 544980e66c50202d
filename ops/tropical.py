"""First-order recurrences in max-plus algebra."""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, -math.inf))
def max_affine(left: Pair, right: Pair) -> Pair:
    """Recurrence in max-plus algebra: h[t] = max(a[t] + h[t−1], b[t]), with h[−1] = −∞.

    Inputs: (a, b), real numbers.
    Element: the same, the map h ↦ max(a + h, b). (a₁, b₁) ∘ (a₂, b₂) = (a₁ + a₂, max(a₂ + b₁, b₂)).
    Outputs: (a[0] + … + a[t], h[t]).
    Identity: (0, −∞), for floats. With integers −∞ saturates and sums wrap: scan inclusively.
    Cost: 3 flops; reads two numbers, writes two.

    With b a level in decibels and a = −r a release of r per step, h is the peak envelope follower
    of audio. With b an arrival and a a duration, it is the time at which a queue is done.

    Source: F. Baccelli, G. Cohen, G. J. Olsder, J.-P. Quadrat, "Synchronization and Linearity",
    1992.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> level = torch.tensor([0.0, 9.0, 2.0, 7.0, 1.0])
    >>> associative_scan(ops.max_affine, (torch.full((5,), -1.5), level))[1]
    tensor([0.0000, 9.0000, 7.5000, 7.0000, 5.5000])
    """
    a1, b1 = left
    a2, b2 = right
    return a1 + a2, torch.maximum(a2 + b1, b2)
