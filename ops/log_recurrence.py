"""First-order recurrences of positive numbers that are stored as logarithms."""

import math

from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.logspace import logaddexp

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, -math.inf))
def log_affine(left: Pair, right: Pair) -> Pair:
    """h[t] = a[t] · h[t−1] + b[t], with all numbers given by their logarithms.

    Inputs: (log a, log b), real floats; −∞ stands for 0.
    Element: the same, the map h ↦ a·h + b.
    Outputs: (log(a[0] · … · a[t]), log h[t]), with h starting from 0.
    Identity: (0, −∞).
    Cost: about 42 flops (one exp, one log1p); reads two numbers, writes two.

    (α₁, β₁) ∘ (α₂, β₂) = (α₁ + α₂, log(exp(α₂ + β₁) + exp β₂)). Gates near 0 and products of
    thousands of them do not underflow. Errors are relative to the logarithms: a product whose
    logarithm is −6000 has three digits in float32.

    Source: F. A. Heinsen, arXiv:2311.06281, 2023; L. Feng et al., "Were RNNs all we needed?",
    arXiv:2410.01201, 2024 (minGRU and minLSTM in log space).

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> a, b = torch.full((4,), 0.5), torch.tensor([8.0, 0.0, 0.0, 1.0])
    >>> associative_scan(ops.log_affine, (a.log(), b.log()))[1].exp()
    tensor([8., 4., 2., 2.])
    """
    a1, b1 = left
    a2, b2 = right
    return a1 + a2, logaddexp.combine(a2 + b1, b2)
