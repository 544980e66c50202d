"""What a hidden Markov model predicts at each step, for models with many states.

    x[0] = start    ahead[k] = log Σ_i softmax(x[k−1])[i] exp(A[k][i, ·])    x[k] = ahead[k] + w[k]

for k = 1, …, n, all in float64. The values come from a tree of matrix products (`product_tree`),
whose result is checked, or from a loop in log space (`log_space`), which needs no check.

The derivative does not depend on which of them ran. With α[k] = softmax(x[k]) let

    B[k][i, j] = α[k][i] exp(A[k+1][i, j] − ahead[k+1][j]):

the probability of state i at step k, given state j one step later. Its columns sum to 1 wherever
state j can be reached. With c the cotangent of `ahead`, u[k] that of ahead[k] through all later
steps too, and C[k] the sum of c[k],

    u[n] = c[n]        u[k] = c[k] + r[k]        r[k] = B[k] u[k+1] − α[k] C[k+1]

and r[k] is the cotangent of w[k], r[0] of `start`, B[k−1][i, j] u[k][j] of A[k][i, j]. The
matrices B enlarge no error and never overflow, so a tree of their products needs no scaling.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops.semiring import log_sum
from .log_space import by_logarithms
from .product_tree import by_products, through

# Trees of products do more work than a loop, which is slower only for its many small operations.
# On a CPU the loop is as quick for matrices of so many multiplications, all batches together.
MOST_IN_A_TREE = 1 << 16


class Predictions(torch.autograd.Function):
    """`ahead` [..., n, K] for n ≥ 1, of start [..., K], A [..., 1 or n, K, K] and w [..., n, K],
    whose leading dimensions broadcast to those of w. float64; derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, transition: Tensor, weights: Tensor) -> Tensor:
        ahead = None
        if is_for_trees(weights):
            ahead = by_products(start, transition, weights)
        if ahead is None:
            ahead = by_logarithms(start, transition, weights)
        ctx.save_for_backward(start, transition, weights, ahead)
        return ahead

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        start, transition, weights, ahead = ctx.saved_tensors
        is_out_of_reach = ahead == -math.inf
        cotangent = torch.where(is_out_of_reach, 0.0, cotangent)
        x = torch.cat((start.expand_as(ahead[..., 0, :]).unsqueeze(-2), ahead + weights), -2)
        alpha = log_normalised(x[..., :-1, :])
        later = torch.where(is_out_of_reach, math.inf, ahead).unsqueeze(-2)
        before = torch.exp(alpha.unsqueeze(-1) + transition - later)
        sums = alpha.exp() * cotangent.sum(-1, keepdim=True)
        own = cotangent[..., :-1, :] - sums[..., 1:, :]
        matrices = before[..., 1:, :, :]
        u = last = cotangent[..., -1:, :]
        if own.shape[-2]:
            solve = affine_tree if is_for_trees(weights) else affine_loop
            after = solve(matrices, own, last.squeeze(-2))
            u = torch.cat((through(after, matrices.mT) + own, last), -2)
        first = through(u[..., :1, :], before[..., :1, :, :].mT) - sums[..., :1, :]
        r = torch.cat((first, u - cotangent), -2)
        moves = None
        if ctx.needs_input_grad[1]:
            moves = (before * u.unsqueeze(-2)).sum_to_size(transition.shape)
        return r[..., 0, :].sum_to_size(start.shape), moves, r[..., 1:, :]


def is_for_trees(weights: Tensor) -> bool:
    *batch, _, states = weights.shape
    return weights.device.type != "cpu" or math.prod(batch) * states**3 <= MOST_IN_A_TREE


def log_normalised(x: Tensor) -> Tensor:
    """log softmax(x), −∞ where all x are."""
    total = log_sum(x, -1).unsqueeze(-1)
    return x - torch.where(total == -math.inf, 0.0, total)


def affine_tree(matrices: Tensor, own: Tensor, last: Tensor) -> Tensor:
    """y[k+1] for each k, of y[k] = P[k] y[k+1] + d[k] with y[N] = last. P [..., N, K, K], d
    [..., N, K], last [..., K]; returns [..., N, K]."""
    count = own.shape[-2]
    if count == 1:
        return last.unsqueeze(-2)
    even = count // 2 * 2
    end = last.unsqueeze(-2)
    if even < count:
        after_pairs = through(end, matrices[..., even:, :, :].mT) + own[..., even:, :]
    else:
        after_pairs = end
    left, right = (matrices[..., k:even:2, :, :] for k in (0, 1))
    own_left, own_right = (own[..., k:even:2, :] for k in (0, 1))
    joined = through(own_right, left.mT) + own_left
    above = affine_tree(left @ right, joined, after_pairs.squeeze(-2))
    both = torch.stack((through(above, right.mT) + own_right, above), -2)
    both = both.reshape(*own_left.shape[:-2], even, -1)  # torch's older vmap does not know flatten
    return both if even == count else torch.cat((both, end), -2)


def affine_loop(matrices: Tensor, own: Tensor, last: Tensor) -> Tensor:
    """What `affine_tree` gives, step by step."""
    y = last.unsqueeze(-1)
    found = [y]
    steps = zip(matrices.unbind(-3)[:0:-1], own.unsqueeze(-1).unbind(-3)[:0:-1], strict=True)
    for matrix, d in steps:
        y = matrix @ y + d
        found.append(y)
    return torch.stack(found[::-1], -3).squeeze(-1)
