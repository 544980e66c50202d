"""The smoother of a hidden Markov model in parallel over time: what all of y says of each state.

With α[t, i] = p(z[t] = i | y[0], …, y[t]) from `hmm_filter`, the weights of a step
A[t, i, j] = p(z[t] = j | z[t−1] = i) p(y[t] | z[t] = j), and β[t, i] = p(y[t+1], … | z[t] = i),

    p(z[t] = i | y)               ∝ α[t, i] β[t, i]
    p(z[t] = i, z[t+1] = j | y)   ∝ α[t, i] A[t+1, i, j] β[t+1, j]

β[t] is a product of the transposed matrices of steps T−1, …, t+1: an exclusive scan from the end.
What its states have in common is kept apart, as in the filter (`ops.normalised_paths`).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from ...api.flags_and_backends import flag
from ...api.tensor_subclasses import overridable, takes_parts
from ...engines.base.shifted_leaves import carry_shape, edge_mask, previous_state
from ...monoids.monoid import Monoid
from ...ops.normalised_paths import Paths, element, log_paths, whole
from ...ops.semiring import log_sum
from ...torch_state import loadable
from ..argument_errors import named_scan
from .filter_and_viterbi import FORWARD, at_each_step, carry_of, checked_model, forward
from .many_states import smoothed_many

__all__ = ["HMMPosterior", "hmm_smoother"]


@loadable
@takes_parts
class HMMPosterior(NamedTuple):
    """What `hmm_smoother` returns with `pairs`: log_probability [..., T, K] and log_pairs
    [..., T − 1, K, K]."""

    log_probability: Tensor
    log_pairs: Tensor


@overload
def hmm_smoother(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    pairs: Literal[False] = False,
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor: ...
@overload
def hmm_smoother(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    pairs: Literal[True],
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> HMMPosterior: ...
@overload
def hmm_smoother(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    pairs: bool = False,
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | HMMPosterior: ...
@overridable
def hmm_smoother(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    pairs: bool = False,
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | HMMPosterior:
    """log p(z[t] | y) for all t at once: what all observations, later ones too, say of each state.

    >>> import torch, assocscan
    >>> initial = torch.tensor([0.5, 0.5]).log()
    >>> transition = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    >>> likelihood = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.1, 0.9]]).log()
    >>> assocscan.hmm_smoother(initial, transition, likelihood).exp()
    tensor([[0.7828, 0.2172],
            [0.7142, 0.2858],
            [0.3606, 0.6394]])

    With `pairs`, also of two neighbouring states. Summed over t these are the expected numbers of
    steps from i to j, from which EM estimates the transitions:

    >>> smoothed, both = assocscan.hmm_smoother(initial, transition, likelihood, pairs=True)
    >>> both.exp().sum(0)
    tensor([[1.0520, 0.4450],
            [0.0228, 0.4802]])

    The arguments are those of `hmm_filter`: logarithms, which need not be normalised. Nothing
    warns where probabilities are passed instead, but `initial` and `transition` then hold values
    above 0:

    initial: [K] or [..., K], log p(z[0] = i).
    transition: [K, K]; [T, K, K] where it changes in time; [..., 1, K, K] where it differs between
        series; [..., T, K, K] for both. [B, K, K] is read as [T, K, K]. transition[t][i, j] =
        log p(z[t] = j | z[t−1] = i); transition[0] is not read.
    likelihood: [..., T, K], log p(y[t] | z[t] = j).
    pairs: whether to return the probabilities of neighbouring states too.
    observed: bool [T] or [..., T]; y[t] counts where it is True.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along T; initial
        [S, ..., K] or without S.

    Returns a tensor, or with `pairs` a named tuple of it and of the pairs:

    log_probability: [..., T, K]. log_probability[t, j] = log p(z[t] = j | y[0], …, y[T−1]).
    log_pairs: [..., T − 1, K, K]. log_pairs[t, i, j] = log p(z[t] = i, z[t+1] = j | y); −∞ where t
        is the last step of one packed sequence and t + 1 the first of another.

    A probability of 0 is −∞, and has a finite derivative. Differentiable in all three, more than
    once. 16-bit floats are computed in float32 and rounded once.

    Numbers: as exact in float32 as a loop that normalises every step, over any number of steps. A
    likelihood of NaN makes its whole sequence NaN, since all states depend on it; so do
    observations that no path of states can give.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype, `observed` not one of bool, or
            `pairs` no bool.
        ValueError: shapes do not fit, or there is no step or no state. With `offsets` a sequence
            may be empty.

    Cost per step: twice that of `hmm_filter`, and in the same way for more than 8 states; pairs
    take K² exp more, in torch operations.

    Source: as `hmm_filter`; L. R. Rabiner, "A tutorial on hidden Markov models and selected
    applications in speech recognition", Proceedings of the IEEE 77(2), 1989, section III.
    """
    are_wanted = flag("pairs", pairs)
    dtype, model, engine = checked_model(
        initial, transition, likelihood, observed, offsets, backend, deterministic
    )
    _, transition, likelihood = model
    sequences = engine["offsets"]
    *batch, T, K = likelihood.shape
    first = edge_mask((*batch, T), len(batch), False, sequences, likelihood.device)
    if engine["backend"] is None:
        smoothed, filtered, after = smoothed_many(*model)
        transition = at_each_step(transition, likelihood)
    else:
        filtered, _ = forward(FORWARD, log_sum, *model, **engine)
        transition = at_each_step(transition, likelihood)
        xs = likelihood, filtered, first.expand(*batch, T), transition
        starts = carry_shape(likelihood[..., 0], len(batch), sequences)
        carry = carry_of(likelihood.new_zeros(()).expand(*starts, K))
        smoothed, after = named_scan(
            NAMES, BACKWARD, xs, -1, reverse=True, inclusive=False, init=carry, **engine
        )
    smoothed = smoothed.to(dtype)
    if not are_wanted:
        return smoothed
    before = previous_state(filtered, None, len(batch), False, sequences)
    # Of what all states have in common, −1000 of a density, say, float32 would round the sum.
    high = whole(likelihood.detach().amax(-1, keepdim=True))
    both = pairs_of(before, transition, (likelihood - high) + after, first)
    return HMMPosterior(smoothed, both.narrow(-3, 1, T - 1).to(dtype))


def pairs_of(before: Tensor, transition: Tensor, future: Tensor, first: Tensor) -> Tensor:
    """log p(z[t−1] = i, z[t] = j | y) [..., T, K, K]; −∞ at the first step of a sequence.

    before: log p(z[t−1] | y[0], …, y[t−1]).
    future: log p(y[t], y[t+1], … | z[t]) [..., T, K], up to a constant of each step.
    """
    first = first[..., None, None]
    both = before.unsqueeze(-1) + transition + future.unsqueeze(-2)
    both = torch.where(first, 0.0, both)  # which may be NaN there, and its derivatives too
    both = both - both.logsumexp((-2, -1), keepdim=True)
    return torch.where(first, -math.inf, both)


def step_back(likelihood: Tensor, filtered: Tensor, first: Tensor, transition: Tensor) -> Paths:
    """The weights of one step, from the state after it to the one before. That to the first step of
    a sequence is not read: whatever it holds, no derivative does."""
    high = whole(likelihood.amax(0))
    weights = torch.where(first, 0.0, transition + (likelihood - high)).mT
    return element(weights, torch.zeros_like(likelihood), high)


def posterior(state: Paths, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """log p(z[t] | y), and β[t] up to a constant, from row 0 of the product of later steps."""
    after = state[0]
    both = xs[1] + after
    return both - log_sum(both, 0), after


NAMES = {"xs": "likelihood", "xs[1]": "initial", "xs[3]": "transition"}
BACKWARD = Monoid(
    log_paths, name="hmm_smoother", element_ndim=(1, 1, 0, 2), lift=step_back, lower=posterior
)
