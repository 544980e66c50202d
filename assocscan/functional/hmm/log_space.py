"""Predictions of a hidden Markov model by sums of exponentials, which nothing is too small for, or
by maxima: the weights of the best paths.

One step after the other, in float64. Where matrices are so small that an operation of torch costs
more for being called than for what it computes, the axis is cut into about √n chunks: products of
all steps of each chunk, of all chunks at once; then what enters each chunk, one after the other;
then the steps of all chunks at once. That takes some 3√n operations in place of n, and K times the
work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Chunks pay where the matrices of all batches have fewer sums than this.
MOST_IN_CHUNKS = {"cpu": 1 << 13, "cuda": 1 << 22}
LEAST_STEPS = 32
SUMS_AT_ONCE = 1 << 24  # 128 MB
Total = Callable[[Tensor, int], Tensor]


def by_logarithms(
    start: Tensor, transition: Tensor, weights: Tensor, total: Total = torch.logsumexp
) -> Tensor:
    """`ahead` of `predictions.Predictions`, whatever the arguments are. NaN and infinity pass on as
    in a loop; −∞ for all states stays so. total: how weights are joined; with torch.amax, `ahead`
    are the weights of the best paths, up to a constant for each step."""
    *batch, steps, states = weights.shape
    start = start.expand(*batch, states)
    chunks = chunk_count(math.prod(batch) * states**3, steps, weights.device.type)
    if chunks == 1:
        return walk(start, transition, weights, total)[0]
    length = steps // chunks
    inside = chunks * length
    cut = weights[..., :inside, :].unflatten(-2, (chunks, length))
    moves, rest = transition.unsqueeze(-4), transition
    if transition.shape[-3] > 1:
        moves = transition[..., :inside, :, :].unflatten(-3, (chunks, length))
        rest = transition[..., inside:, :, :]
    ahead, x = walk(entering_chunks(start, moves, cut, total), moves, cut, total)
    ahead = ahead.flatten(-3, -2)
    if inside == steps:
        return ahead
    last = walk(x[..., -1, :], rest, weights[..., inside:, :], total)[0]
    return torch.cat((ahead, last), -2)


def chunk_count(sums: int, steps: int, device: str) -> int:
    """1 where chunks do not pay. sums: K³ and the batch."""
    if steps < LEAST_STEPS or sums > MOST_IN_CHUNKS.get(device, 0):
        return 1
    return max(1, min(math.isqrt(steps), SUMS_AT_ONCE // max(sums, 1)))


def walk(x: Tensor, transition: Tensor, weights: Tensor, total: Total) -> tuple[Tensor, Tensor]:
    """`ahead` [..., n, K] of n steps, one after the other, and x [..., K] after the last one."""
    joint, ahead = [x], []
    for k in range(weights.shape[-2]):
        now = transition[..., min(k, transition.shape[-3] - 1), :, :]
        ahead.append(total(x.unsqueeze(-1) + now, -2))
        x = without_greatest(ahead[-1] + weights[..., k, :])
        joint.append(x)
    if total is not torch.logsumexp:  # nothing is subtracted that would part weights that tie
        return torch.stack(ahead, -2), x
    known = torch.stack(joint[:-1], -2).logsumexp(-1, keepdim=True)
    return torch.stack(ahead, -2) - torch.where(known == -math.inf, 0.0, known), x


def entering_chunks(start: Tensor, transition: Tensor, weights: Tensor, total: Total) -> Tensor:
    """What enters each of C chunks [..., C, K], up to a constant. transition [..., 1 or C, 1 or S,
    K, K], weights [..., C, S, K]."""
    chunks, length = weights.shape[-3:-1]
    product = None
    for k in range(length):
        now = transition[..., min(k, transition.shape[-3] - 1), :, :]
        now = now + weights[..., k, :].unsqueeze(-2)
        if product is None:
            product = now
        else:
            product = total(product.unsqueeze(-1) + now.unsqueeze(-3), -2)
    assert product is not None
    x, found = without_greatest(start), []
    for k in range(chunks):
        found.append(x)
        x = without_greatest(total(x.unsqueeze(-1) + product[..., k, :, :], -2))
    return torch.stack(found, -2)


def without_greatest(x: Tensor) -> Tensor:
    """With 0 as the greatest, if it is finite. Clamped, −∞ can be subtracted from itself."""
    return x - x.amax(-1, keepdim=True).clamp(-1e300, 1e300)
