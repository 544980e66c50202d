"""Predictions of a hidden Markov model by a tree of products of matrices of probabilities.

The matrix of a step is exp(A[k]) · diag(exp(w[k])), divided by its greatest entry. Neighbours are
multiplied, then pairs of pairs, and so on. What enters each step comes down the tree as a vector:
the left one of two nodes gets what enters both, the right one that times the left one's product.
Matrices and vectors are divided by their greatest entries on the way.

Whatever underflowed on the way, the result is checked: each step is taken once more, from the
vector that the tree gives before it, and compared with the vector that the tree gives after it.

Why that is enough. Let two vectors agree if their entries do, up to one common factor and up to
factors e^±a of their own. A step is linear and has no negative entry, so vectors that agree up to a
before it agree up to a after it. Where each vector agrees with the step from the one before up to
TOLERANCE, the n-th therefore agrees with the exact one up to n · TOLERANCE, and logarithms of
normalised probabilities are right to 2n · TOLERANCE: 2 · 10⁻⁷ after 10⁵ steps at most, where
rounding was seen to add 10⁻¹⁴ a step. A step adds positive terms. What underflows in it, or was
lost in the vector, is below K e^−700; predictions of states that can occur must be e^−600 or more
(LEAST), or the result is refused. That a prediction of 0 is a true 0 is decided by which states can
be reached at all, not by its value.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990; here with vectors on the way
down.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = 1e-12
LEAST = math.exp(-600)
LOST = math.exp(-700)


def by_products(start: Tensor, transition: Tensor, weights: Tensor) -> Tensor | None:
    """`ahead` of `predictions.Predictions`, or None where it is not known to be right: waits for
    the device to know."""
    high = transition.amax((-2, -1), keepdim=True)
    chance = torch.exp(transition - high)
    seen = torch.exp(weights)
    first = torch.exp(start - start.amax(-1, keepdim=True)).expand_as(weights[..., 0, :])
    before = entering(first, chance, seen)
    ahead = through(before, chance)
    if not bool(is_right(start, transition, weights, before, ahead, seen)):
        return None
    return torch.log(ahead / before.sum(-1, keepdim=True)) + high.squeeze(-1)


def is_right(
    start: Tensor, transition: Tensor, weights: Tensor, before: Tensor, ahead: Tensor, seen: Tensor
) -> Tensor:
    """Whether every step leads from the vector before it to the one after it. NaN does not."""
    after = scaled(ahead[..., :-1, :] * seen[..., :-1, :])
    found = before[..., 1:, :]
    are_equal = ((found - after).abs() <= TOLERANCE * after + LOST).all()
    occurs = torch.cat(
        (
            (start > -math.inf).expand_as(weights[..., 0, :]).unsqueeze(-2),
            (ahead > 0)[..., :-1, :] & (weights > -math.inf)[..., :-1, :],
        ),
        -2,
    )
    possible = through(occurs.to(torch.float32), (transition > -math.inf).to(torch.float32)) > 0
    is_known = torch.where(possible, ahead >= LEAST, ahead == 0).all()
    return are_equal & is_known & (ahead < math.inf).all()


def entering(first: Tensor, chance: Tensor, seen: Tensor) -> Tensor:
    """What enters each of n steps [..., n, K], up to a factor. first [..., K] enters the first one.
    The matrix of a step is chance · diag(seen): chance [..., 1 or n, K, K], seen [..., n, K]."""
    count = seen.shape[-2]
    pairs = count // 2
    if pairs == 0:
        return first.unsqueeze(-2)
    is_one = chance.shape[-3] == 1
    even, odd = (chance if is_one else chance[..., k : 2 * pairs : 2, :, :] for k in (0, 1))
    left, right = (seen[..., k : 2 * pairs : 2, :].unsqueeze(-2) for k in (0, 1))
    above = vectors_down(first, scaled_matrices(((even * left) @ odd) * right))
    both = with_right(above, through(above, even) * left.squeeze(-2))
    if count % 2 == 0:
        return both
    last = through(both[..., -1:, :], odd[..., -1:, :, :]) * right[..., -1, :, :]
    return torch.cat((both, scaled(last)), -2)


def vectors_down(first: Tensor, nodes: Tensor) -> Tensor:
    """What enters each node [..., n, K], up to a factor. nodes [..., n, K, K]."""
    count = nodes.shape[-3]
    pairs = count // 2
    if pairs == 0:
        return first.unsqueeze(-2)
    even, odd = (nodes[..., k : 2 * pairs : 2, :, :] for k in (0, 1))
    above = vectors_down(first, scaled_matrices(even @ odd))
    both = with_right(above, through(above, even))
    if count % 2 == 0:
        return both
    return torch.cat((both, scaled(through(both[..., -1:, :], odd[..., -1:, :, :]))), -2)


def with_right(left: Tensor, right: Tensor) -> Tensor:
    """What enters pairs of nodes, side by side, from what enters the left and the right ones."""
    return torch.stack((left, scaled(right)), -2).flatten(-3, -2)


def through(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each row vector [..., n, K] times its matrix [..., 1 or n, K, K]."""
    if matrices.shape[-3] == 1:
        return vectors @ matrices.squeeze(-3)
    return (vectors.unsqueeze(-2) @ matrices).squeeze(-2)


def scaled(vectors: Tensor) -> Tensor:
    return vectors / vectors.amax(-1, keepdim=True)


def scaled_matrices(nodes: Tensor) -> Tensor:
    return nodes / nodes.amax((-2, -1), keepdim=True)
