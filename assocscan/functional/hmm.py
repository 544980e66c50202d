"""Hidden Markov models in parallel over time: filtering and the most probable path.

    p(z[0] = i) = exp(initial[i])       p(z[t] = j | z[t−1] = i) = exp(transition[i, j])
    p(y[t] | z[t] = j) = exp(likelihood[t, j])

All probabilities are given by their logarithms, in shapes initial [..., K], transition [..., K, K]
or [..., T, K, K] and likelihood [..., T, K]; the first two broadcast to the last.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..api.tensor_subclasses import overridable, takes_parts
from ..monoids.combinators import with_lift, with_lower
from ..monoids.monoid import Monoid
from .argument_errors import check_floats, named_scan
from .operands import expanded_elements

__all__ = ["HMMResult", "ViterbiResult", "hmm_filter", "viterbi"]


@takes_parts
class HMMResult(NamedTuple):
    """What `hmm_filter` returns: log_probability [..., T, K] and log_evidence [...]."""

    log_probability: Tensor
    log_evidence: Tensor


@takes_parts
class ViterbiResult(NamedTuple):
    """What `viterbi` returns: path [..., T] (int64) and the logarithm of its probability [...]."""

    path: Tensor
    log_probability: Tensor


@overridable
def hmm_filter(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> HMMResult:
    """log p(z[t] | y[0], …, y[t]) for all t at once, and log p(y).

    >>> import torch, assocscan
    >>> initial = torch.tensor([0.5, 0.5]).log()
    >>> transition = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    >>> likelihood = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> filtered, evidence = assocscan.hmm_filter(initial, transition, likelihood)
    >>> filtered.exp()
    tensor([[0.8000, 0.2000],
            [0.9193, 0.0807],
            [0.3606, 0.6394]])

    A probability of 0 is −∞, and has a finite derivative. Differentiable in all three; the
    derivative of the evidence in likelihood[t, j] is the smoothed probability p(z[t] = j | y). The
    messages grow by about their evidence per step: long series want float64.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype.
        ValueError: shapes do not fit.

    Cost per step: K² exp and K log where a state walks along the axis, K³ and K² in a tree.

    Source: S. Hassan, S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of inference in
    hidden Markov models", IEEE Transactions on Signal Processing 69, 2021.
    """
    engine: Any = {"backend": backend, "deterministic": deterministic}
    messages = forward(FORWARD, initial, transition, likelihood, **engine)
    total = messages.logsumexp(-1, keepdim=True)
    return HMMResult(messages - total, total[..., -1, 0])


@overridable
def viterbi(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> ViterbiResult:
    """The most probable sequence of states, and the logarithm of its joint probability with y.

    >>> import torch, assocscan
    >>> initial = torch.tensor([0.5, 0.5]).log()
    >>> transition = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    >>> likelihood = torch.tensor([[0.8, 0.2], [0.2, 0.8], [0.1, 0.9]]).log()
    >>> assocscan.viterbi(initial, transition, likelihood).path
    tensor([1, 1, 1])

    Two scans: of the heaviest paths' weights, forwards, and of the maps from each state to the best
    one before it, backwards. At ties the smaller state wins. The probability is differentiable.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype.
        ValueError: shapes do not fit.

    Cost per step: 2K² flops where a state walks along the axis, 2K³ in a tree, and K² bytes times
    the dtype's for the search of the maps.

    Source: as `hmm_filter`; A. J. Viterbi, IEEE Transactions on Information Theory 13(2), 1967.
    """
    engine: Any = {"backend": backend, "deterministic": deterministic}
    weights = forward(HEAVIEST, initial, transition, likelihood, **engine)
    best = weights[..., -1, :].max(-1)
    with torch.no_grad():
        K = likelihood.shape[-1]
        steps = expanded_elements(transition, tuple(likelihood.shape[:-1]), (K, K), "transition")
        before = (weights[..., :-1, :, None] + steps[..., 1:, :, :]).argmax(-2)
        last = best.indices.unsqueeze(-1)
        carry = last.expand(*last.shape[:-1], K)
        path = named_scan(NAMES, BACKTRACK, before, -1, reverse=True, init=carry, **engine)
    return ViterbiResult(torch.cat([path, last], -1), best.values)


def forward(
    op: Monoid, initial: Tensor, transition: Tensor, likelihood: Tensor, **engine: Any
) -> Tensor:
    """The forward messages [..., T, K]; `initial` enters as the carry, in every row."""
    check_floats("likelihood", likelihood, initial=initial, transition=transition)
    *batch, T, K = likelihood.shape
    initial = expanded_elements(initial, tuple(batch), (K,), "initial")
    transition = expanded_elements(transition, (*batch, T), (K, K), "transition")
    first = (torch.arange(T, device=likelihood.device) == 0).expand(*batch, T)
    carry = initial.unsqueeze(-2).expand(*batch, K, K)
    xs = likelihood, first, transition
    messages: Tensor = named_scan(NAMES, op, xs, -1, init=carry, **engine)
    return messages


def step(likelihood: Tensor, first: Tensor, transition: Tensor) -> Tensor:
    """The weights of one step; at the first, states stay what they are."""
    K = likelihood.shape[-1]
    stay = torch.eye(K, device=likelihood.device) > 0
    neutral = torch.where(stay, 0.0, -math.inf).to(likelihood.dtype)
    return torch.where(first, neutral, transition) + likelihood[None, :]


def first_row(state: Tensor) -> Tensor:
    return state[0]


NAMES = {"xs": "likelihood", "xs[2]": "transition", "init": "initial"}
FORWARD, HEAVIEST = (
    with_lower(with_lift(op, step, element_ndim=(1, 0, 2)), first_row)
    for op in (ops.log_matmul, ops.max_matmul)
)
BACKTRACK = with_lower(ops.finite_state, first_row)
