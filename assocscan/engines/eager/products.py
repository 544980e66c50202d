"""Products of floats by torch operations, with the kinds of the factors (`transforms.with_kinds`).

autograd differentiates these operations, so that the kind takes the place of an aggregate only
where their product would be NaN: elsewhere the slope of p₁ is the aggregate.
"""

from __future__ import annotations

import torch

from .scan import Combine, Leaves


def with_kinds(factors: Leaves, carry: Leaves | None) -> tuple[Combine, Leaves, Leaves | None]:
    """How elements (p, q) are combined, those of the factors, and the carry as one."""
    return combine, element(factors), None if carry is None else element(carry)


def element(factors: Leaves) -> Leaves:
    (p,) = factors
    q = p.detach()
    is_usual = (q - q == 0) & (q != 0)
    return [p, torch.where(is_usual, torch.where(q < 0, -1.0, torch.ones_like(q)), q)]


def combine(left: Leaves, right: Leaves) -> Leaves:
    (p1, q1), (p2, q2) = left, right
    before, product = p1.detach(), (p1 * p2).detach()
    lost = (before + before == before) & (product != product)
    p = p1 * torch.where(lost, q2, p2)
    if p1.requires_grad:
        # 0 · (an aggregate that overflowed): the slope is infinite, as that of the root of p₁.
        zero = lost & (before == 0)
        p = p + torch.where(zero, q2 * torch.sqrt(torch.where(zero, p1, 1.0)), -0.0)
    return [p, q1 * q2]
