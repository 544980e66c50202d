"""Hidden Markov models in parallel over time: filtering and the most probable path.

    p(z[0] = i) = exp(initial[i])       p(z[t] = j | z[t−1] = i) = exp(transition[i, j])
    p(y[t] | z[t] = j) = exp(likelihood[t, j])

All probabilities are given by their logarithms, in shapes initial [..., K], transition [..., K, K]
or [..., T, K, K] and likelihood [..., T, K]; the first two broadcast to the last. transition[t]
leads to step t, so transition[0] is not read. The smoother is in `smoother`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...api.flags_and_backends import checked_backend
from ...api.tensor_subclasses import overridable, takes_parts
from ...engines.base.shifted_leaves import at_last_steps, carry_shape, edge_mask
from ...errors import ScanValueError
from ...monoids.combinators import with_lower
from ...monoids.monoid import Monoid
from ...ops.normalised_paths import Paths, element, log_paths, max_paths, whole
from ...ops.semiring import log_sum
from ...torch_state import loadable
from ..argument_errors import check_floats, check_mask, named_scan
from ..operands import carry_dtype, checked_offsets, expanded_elements
from .many_states import can_run_here, filtered, has_many_states
from .path_of_many_states import maps_back, path_of_many

__all__ = ["HMMResult", "ViterbiResult", "hmm_filter", "viterbi"]


@loadable
@takes_parts
class HMMResult(NamedTuple):
    """What `hmm_filter` returns: log_probability [..., T, K] and log_evidence [...]."""

    log_probability: Tensor
    log_evidence: Tensor


@loadable
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
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
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

    All arguments are logarithms, of one floating dtype, for T ≥ 1 steps and K ≥ 1 states. They need
    not be normalised: any weights are taken, the results at each step are normalised, and
    log_evidence is the logarithm of the sum of the weights of all paths. So nothing warns where
    probabilities are passed in place of logarithms: look for values above 0 in `initial` and
    `transition`, which logarithms of probabilities never are. (In `likelihood` those of densities
    may be.)

    initial: [K] or [..., K]. initial[i] = log p(z[0] = i), before y[0] is seen.
    transition: [K, K]; [T, K, K] where it changes in time; [..., 1, K, K] where it differs between
        series; [..., T, K, K] for both. [B, K, K] is read as [T, K, K]. transition[t][i, j] =
        log p(z[t] = j | z[t−1] = i): rows are the state before, and transition[t] leads to step t.
        transition[0] is not read.
    likelihood: [..., T, K]. likelihood[t, j] = log p(y[t] | z[t] = j).
    observed: bool [T] or [..., T]. Where it is False, y[t] was not observed: likelihood[t] counts
        as log 1 for every state, whatever it holds.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along T. initial is then
        [S, ..., K], S before the leading dimensions of likelihood, or [..., K] if all begin alike
        (which is meant where both fit); transition[t] of a sequence's first step is not read.

    Leading dimensions broadcast to those of likelihood. 16-bit floats are computed in float32 and
    rounded once. Returns, in the dtype of likelihood:

    log_probability: [..., T, K]. log_probability[t, j] = log p(z[t] = j | y[0], …, y[t]).
    log_evidence: [...], log p(y[0], …, y[T−1]); [S, ...] with `offsets`.

    A probability of 0 is −∞, and has a finite derivative. Write no −10⁹ in its place: where the
    logarithm of a state's probability is so low, derivatives of this logarithm lose digits (in
    float32 half of them at −10⁴, all at −10⁹). Differentiable in all three, more than once; the
    derivative of the evidence in likelihood[t, j] is the smoothed probability
    p(z[t] = j | y), of which `hmm_smoother` gives the logarithm.

    A likelihood of NaN makes all states NaN from its step on. Observations that no path of states
    can give do, too, and make the evidence −∞. Of +∞ in an argument nothing is promised.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype, or `observed` not one of bool.
        ValueError: shapes do not fit, or there is no step or no state. With `offsets` a sequence
            may be empty.

    Up to 8 states: a scan of K×K matrices of logarithms. A power of e that the weights of all
    states share is kept as a whole number of its own, so that posteriors of 10⁵ steps are as exact
    in float32 as in a loop that normalises every step. Cost per step: K² exp and K log where a
    state walks along the axis, K³ and K² in a tree.

    More than 8 states: no kernel is compiled. A tree of matrix products in float64 gives all
    steps; then each step is taken again from the one before, and compared. If all agree, the
    logarithms of filtered probabilities are right to 2 · 10⁻¹² T, and usually to 10⁻¹³; they are
    rounded once to the dtype of the result. Where one step disagrees, numbers have underflowed, and
    a loop over time in log space, also in float64, computes everything anew: where a state that is
    possible is e⁶⁰⁰ times less probable than another, as in models whose transitions are mostly 0.
    Cost per step: 2K³ flops and 3K² numbers of memory; the loop takes K² exp and several torch
    operations a step, and is also taken on CPUs where K³ times the number of series is above 2¹⁶.
    A backward pass costs as much as the tree, also after the loop. The comparison waits for the
    device.

    With `offsets`, a named backend, torch.func, torch.compile, CUDA graphs, or deterministic
    algorithms on a GPU, models of more than 8 states are scanned like smaller ones, but by torch
    operations: K³ exp and as many numbers of memory per step.

    Source: S. Hassan, S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of inference in
    hidden Markov models", IEEE Transactions on Signal Processing 69, 2021.
    """
    dtype, model, engine = checked_model(
        initial, transition, likelihood, observed, offsets, backend, deterministic
    )
    if engine["backend"] is None:
        found = filtered(*model)
    else:
        found = forward(FORWARD, log_sum, *model, **engine)
    return HMMResult(*(t.to(dtype) for t in found))


@overridable
def viterbi(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    *,
    observed: Tensor | None = None,
    offsets: Tensor | None = None,
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

    The arguments are those of `hmm_filter`: logarithms, which need not be normalised. Nothing
    warns where probabilities are passed instead, but `initial` and `transition` then hold values
    above 0:

    initial: [K] or [..., K], log p(z[0] = i).
    transition: [K, K]; [T, K, K] where it changes in time; [..., 1, K, K] where it differs between
        series; [..., T, K, K] for both. [B, K, K] is read as [T, K, K]. transition[t][i, j] =
        log p(z[t] = j | z[t−1] = i); transition[0] is not read.
    likelihood: [..., T, K], log p(y[t] | z[t] = j).
    observed: bool [T] or [..., T]; y[t] counts where it is True. The path goes on through the other
        steps, whose transitions count: a mask of padding after the end changes the path and its
        probability. For sequences of different lengths pass `offsets`.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along T; initial
        [S, ..., K] or without S.

    Returns:
        path: [..., T], int64. path[t] is the state at step t, from 0 to K − 1. It means nothing
            where log_probability is −∞ or NaN.
        log_probability: [...], log p(path, y); [S, ...] with `offsets`.

    Two scans: of the heaviest paths' weights, forwards, and of the maps from each state to the best
    one before it, backwards. Where two states before are equally good, the smaller one is taken; of
    paths whose probabilities differ by less than the rounding, any one may be returned. The
    probability is differentiable. 16-bit floats are computed in float32.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype, or `observed` not one of bool.
        ValueError: shapes do not fit, or there is no step or no state. With `offsets` a sequence
            may be empty.

    Cost per step: 2K² flops where a state walks along the axis, 2K³ in a tree, and K² numbers of
    memory for the search of the maps. More than 8 states: a loop over time of K² operations a
    step, in float64, without a kernel; or both scans by torch operations, where `hmm_filter` scans.

    Source: as `hmm_filter`; A. J. Viterbi, IEEE Transactions on Information Theory 13(2), 1967.
    """
    dtype, model, engine = checked_model(
        initial, transition, likelihood, observed, offsets, backend, deterministic
    )
    if engine["backend"] is None:
        found, best = path_of_many(*model)
        return ViterbiResult(found, best.to(dtype))
    weights, best = forward(HEAVIEST, torch.amax, *model, **engine)
    _, transition, likelihood = model
    with torch.no_grad():
        maps = maps_back(weights, transition, last_steps(likelihood, engine["offsets"]))
        path: Tensor = named_scan(NAMES, BACKTRACK, maps, -1, reverse=True, **engine)
    return ViterbiResult(path, best.to(dtype))


Model = tuple[Tensor, Tensor, Tensor]  # initial, transition and likelihood


def checked_model(
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    observed: Tensor | None,
    offsets: Tensor | None,
    backend: str | None,
    deterministic: bool | None,
) -> tuple[torch.dtype, Model, dict[str, Any]]:
    """The dtype of the results, the model in that of the computation (16-bit floats in float32),
    and the options of its scans: offsets, which are checked, backend and deterministic. A backend
    of None stands for `many_states`, whose functions compute without scans."""
    check_floats("likelihood", likelihood, initial=initial, transition=transition)
    check_likelihood(initial, transition, likelihood)
    offsets = checked_offsets(offsets, likelihood, likelihood.dim() - 2)
    likelihood, wide = of_observed(likelihood, observed), carry_dtype(likelihood.dtype)
    model = initial.to(wide), transition.to(wide), likelihood.to(wide)
    backend = backend_of(model, offsets, backend, deterministic)
    engine = {"offsets": offsets, "backend": backend, "deterministic": deterministic}
    return initial.dtype, model, engine


def check_likelihood(initial: Tensor, transition: Tensor, likelihood: Tensor) -> None:
    """Raise ScanValueError where initial and transition have as many states as each other, and
    likelihood another number. Other checks take likelihood for right."""
    if initial.dim() < 1 or transition.dim() < 2:
        return
    T, K = likelihood.shape[-2:]
    n = initial.shape[-1]
    if n == K or transition.shape[-2:] != (n, n):
        return
    hint = "; it looks transposed: pass likelihood.mT" if n == T else ""
    raise ScanValueError(
        f"likelihood has shape {list(likelihood.shape)}, expected "
        f"{[*likelihood.shape[:-1], n] if n != T else [*likelihood.shape[:-2], K, T]} "
        f"([..., T, K] with K = {n} from initial and transition){hint}"
    )


def of_observed(likelihood: Tensor, observed: Tensor | None) -> Tensor:
    """The likelihood, log 1 for every state where nothing was observed."""
    if observed is None:
        return likelihood
    check_mask("observed", observed, likelihood, "likelihood")
    try:
        seen = observed.expand(likelihood.shape[:-1])
    except RuntimeError:
        raise ScanValueError(
            f"observed has shape {list(observed.shape)}, which does not broadcast to "
            f"{list(likelihood.shape[:-1])}: that of likelihood without its states"
        ) from None
    return torch.where(seen.unsqueeze(-1), likelihood, 0.0)


def backend_of(
    model: Model, sequences: Tensor | None, backend: str | None, deterministic: bool | None
) -> str | None:
    """The backend of the scans; None for a model of many states that is computed without scans, by
    the functions of `many_states`. Raises ScanValueError for shapes that do not fit such a model.

    sequences: the offsets of packed ones; such a model is scanned, and `forward` checks its shapes.
    """
    initial, transition, likelihood = model
    backend = checked_backend(backend, deterministic)
    if backend != "auto" or not has_many_states(likelihood):
        return backend
    if sequences is not None:
        return "eager"
    *batch, _, K = likelihood.shape
    expanded_elements(initial, tuple(batch), (K,), "initial", SIZES)
    at_each_step(transition, likelihood)
    can_run = can_run_here(likelihood, initial, transition, deterministic=deterministic)
    return None if can_run else "eager"


def at_each_step(transition: Tensor, likelihood: Tensor) -> Tensor:
    """The transition [..., T, K, K], of stride 0 where it is the same at every step."""
    *steps, K = likelihood.shape
    return expanded_elements(transition, tuple(steps), (K, K), "transition", SIZES, in_time=True)


def last_steps(likelihood: Tensor, sequences: Tensor | None) -> Tensor:
    """True [T, 1] at the last step of each sequence."""
    steps = likelihood.shape[-2:-1]
    return edge_mask(steps, 0, True, sequences, likelihood.device)[:, None]


def forward(
    op: Monoid,
    total: Callable[[Tensor, int], Tensor],
    initial: Tensor,
    transition: Tensor,
    likelihood: Tensor,
    offsets: Tensor | None,
    **engine: Any,
) -> tuple[Tensor, Tensor]:
    """What `op` gives at each step [..., T, K], and of each sequence as a whole [...].

    total: how `op` joins weights, for sequences without a step.
    offsets: checked.
    """
    *batch, T, K = likelihood.shape
    axis = len(batch)
    starts = tuple(carry_shape(likelihood[..., 0], axis, offsets))
    initial = expanded_elements(initial, starts, (K,), "initial", SIZES)
    transition = at_each_step(transition, likelihood)
    first = edge_mask((*batch, T), axis, False, offsets, likelihood.device)
    carry = carry_of(initial)
    xs = likelihood, first.expand(*batch, T), transition
    steps, totals = named_scan(NAMES, op, xs, -1, init=carry, offsets=offsets, **engine)
    if offsets is None:
        return steps, totals[..., -1]
    return steps, at_last_steps(totals, axis, False, offsets, total(initial, -1))


def carry_of(weights: Tensor) -> Paths:
    """What enters a scan of paths, from the weights of all states [..., K].

    A product begins with row 0 of the carry; the other rows are not read.
    """
    K, zero = weights.shape[-1], weights.new_zeros(())
    others = (zero.expand(K - 1, K), zero.expand(K - 1)) if K > 1 else ()
    return (weights, zero, *others)


def step(likelihood: Tensor, first: Tensor, transition: Tensor) -> Paths:
    """The weights of one step; at the first, states stay what they are."""
    K = likelihood.shape[-1]
    high = whole(likelihood.amax(0))
    likelihood = likelihood - high
    stay = torch.eye(K, device=likelihood.device) > 0
    alone = torch.where(stay, likelihood, -math.inf)
    weights = torch.where(first, alone, transition + likelihood)
    return element(weights, torch.zeros_like(likelihood), high)


def posterior(state: Paths) -> tuple[Tensor, Tensor]:
    """The distribution of the state, and the evidence so far, from row 0 of a product."""
    weights, c = state[:2]
    total = log_sum(weights, 0)
    return weights - total, total + c.detach()


def best_path(state: Paths) -> tuple[Tensor, Tensor]:
    """The weights of the best paths to each state, up to a constant, and the greatest of them."""
    weights, c = state[:2]
    return weights, weights.amax(0) + c.detach()


def first_row(state: Tensor) -> Tensor:
    return state[0]


SIZES = {"K": "likelihood"}  # whose last size K is, for errors
NAMES = {"xs": "likelihood", "xs[2]": "transition", "init": "initial"}
FORWARD, HEAVIEST = (
    Monoid(combine, name=name, element_ndim=(1, 0, 2), lift=step, lower=lower)
    for combine, name, lower in (
        (log_paths, "hmm_filter", posterior), (max_paths, "viterbi", best_path),
    )
)  # fmt: skip
BACKTRACK = with_lower(ops.finite_state, first_row)
