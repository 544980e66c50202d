"""First-order recurrences of positive numbers that are stored as logarithms.

    log_affine:  h[t] = a[t] · h[t−1] + b[t],  all by their logarithms

The element (log a, log b) is the map h ↦ a·h + b; (α₁, β₁) ∘ (α₂, β₂) = (α₁ + α₂,
log(exp(α₂ + β₁) + exp β₂)). The state is (log of the product of the a, log h), h starting from 0.
Identity (0, −∞). Gates near 0 and products of thousands of them neither underflow nor lose digits.

Cost per element: about 42 flops (one exp, one log1p), reads and writes two numbers.

Source: F. A. Heinsen, arXiv:2311.06281, 2023; L. Feng et al., "Were RNNs all we needed?",
arXiv:2410.01201, 2024 (minGRU and minLSTM in log space).

>>> import torch
>>> from assocscan import associative_scan, ops
>>> a, b = torch.full((4,), 0.5), torch.tensor([8.0, 0.0, 0.0, 1.0])
>>> associative_scan(ops.log_affine, (a.log(), b.log()))[1].exp()
tensor([8., 4., 2., 2.])
"""

import math

from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.logspace import logaddexp

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, -math.inf))
def log_affine(left: Pair, right: Pair) -> Pair:
    """The map `left` followed by the map `right`."""
    a1, b1 = left
    a2, b2 = right
    return a1 + a2, logaddexp.combine(a2 + b1, b2)
