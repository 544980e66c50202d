"""The smoother of hidden Markov models, and observations that are missing, beside loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import ScanTypeError, ScanValueError, hmm_filter, hmm_smoother, viterbi

F32, F64 = torch.float32, torch.float64
HERE = [pytest.param(VectorEngine(name, "cpu"), id=name) for name in ("cpu", "eager")]
every_engine = pytest.mark.parametrize("engine", [*HERE, *VECTOR_ENGINES])
both_here = pytest.mark.parametrize("backend", ["cpu", "eager"])
Model = tuple[Tensor, Tensor, Tensor]


def draw(T: int, K: int, varying: bool = False) -> Model:
    generator = torch.Generator().manual_seed(T + K)
    sizes = ((K,), (T, K, K) if varying else (K, K), (T, K))
    return tuple(torch.randn(s, generator=generator, dtype=F64).log_softmax(-1) for s in sizes)


def smoother_loop(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, normalised at every step in the dtype of the tensors."""
    T = len(likelihood)
    steps = transition.exp().expand(T, *transition.shape[-2:])
    seen, p, ahead = likelihood.exp(), initial.exp(), []
    for t in range(T):
        p = (p if t == 0 else p @ steps[t]) * seen[t]
        p = p / p.sum()
        ahead.append(p)
    back = [torch.ones_like(p)]
    for t in range(T - 1, 0, -1):
        b = steps[t] @ (seen[t] * back[-1])
        back.append(b / b.sum())
    back = back[::-1]
    pairs = [ahead[t][:, None] * steps[t + 1] * (seen[t + 1] * back[t + 1]) for t in range(T - 1)]
    marginals = [a * b / (a * b).sum() for a, b in zip(ahead, back, strict=True)]
    K = p.shape[-1]
    joint = torch.stack([x / x.sum() for x in pairs]) if pairs else p.new_empty(0, K, K)
    return torch.stack(marginals), joint


# On the CPU each size compiles its own kernels, so most tests have two states.
LARGER = [pytest.param(20, K, False, "cpu", marks=pytest.mark.exhaustive) for K in (1, 3, 4)]


@pytest.mark.parametrize(
    "T,K,varying,backend",
    [
        *((T, 2, varying, b) for b in ("cpu", "eager") for T, varying in ((1, 0), (40, 0), (9, 1))),
        *((10, K, False, "eager") for K in (1, 3)),
        *LARGER,
    ],
)
def test_values(T: int, K: int, varying: bool, backend: str) -> None:
    given = draw(T, K, varying)
    marginals, joint = smoother_loop(*given)
    for _ in range(2):
        found = hmm_smoother(*given, pairs=True, backend=backend)
        torch.testing.assert_close(found.log_probability.exp(), marginals)
        torch.testing.assert_close(found.log_pairs.exp(), joint)
    alone = hmm_smoother(*given, backend=backend)
    torch.testing.assert_close(alone, found.log_probability)
    torch.testing.assert_close(alone[-1], hmm_filter(*given).log_probability[-1])


@both_here
def test_batches(backend: str) -> None:
    """Each series with its own model, and all with one."""
    initial, transition, likelihood = draw(7, 2)
    several = torch.stack([likelihood, likelihood.flip(0), 2 * likelihood])
    starts = torch.stack([initial, initial.flip(0), initial])
    moves = torch.stack([transition, transition.flip(0), transition])[:, None]
    found = hmm_smoother(starts, moves, several, pairs=True, backend=backend)
    shared = hmm_smoother(initial, transition, several, pairs=True, backend=backend)
    for k in range(3):
        for got, start, move in ((found, starts[k], moves[k, 0]), (shared, initial, transition)):
            marginals, joint = smoother_loop(start, move, several[k])
            torch.testing.assert_close(got.log_probability[k].exp(), marginals)
            torch.testing.assert_close(got.log_pairs[k].exp(), joint)


def impossible_steps(K: int = 2) -> Model:
    """Some probabilities are 0: of starts, steps and observations."""
    initial, transition, likelihood = draw(12, K)
    initial[1] = transition[1, 0] = likelihood[8, 0] = likelihood[2, 1] = -math.inf
    if K > 2:
        transition[0, 1] = transition[2, 0] = likelihood[4, 2] = -math.inf
    return initial, transition, likelihood


@pytest.mark.parametrize("K,backend", [(2, "cpu"), (2, "eager"), (3, "eager")])
def test_probabilities_of_zero(K: int, backend: str) -> None:
    given = impossible_steps(K)
    marginals, joint = smoother_loop(*given)
    assert (marginals == 0).any() and (joint == 0).any()
    found = hmm_smoother(*given, pairs=True, backend=backend)
    torch.testing.assert_close(tuple(found), (marginals.log(), joint.log()))


@both_here
def test_what_no_path_can_give_is_nan(backend: str) -> None:
    initial, transition, likelihood = draw(6, 2)
    likelihood[3] = -math.inf
    found = hmm_smoother(initial, transition, likelihood, pairs=True, backend=backend)
    assert found.log_probability.isnan().all() and found.log_pairs.isnan().all()


@pytest.mark.thinned(7)
@both_here
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_reaches_its_sequence(which: int, backend: str) -> None:
    """And no other; one in transition[0], which leads to no step, reaches nothing."""
    given = draw(9, 2, varying=True)
    clean = hmm_smoother(*given, offsets=torch.tensor([0, 6, 9]), pairs=True)
    given[0].copy_(torch.tensor([0.25, 0.75]).log())
    if which == 0:
        given = given[0].repeat(2, 1), *given[1:]
        given[0][0, 1] = math.nan
    else:
        given[which][4].view(-1)[1] = math.nan
    found = hmm_smoother(*given, offsets=torch.tensor([0, 6, 9]), pairs=True, backend=backend)
    assert found.log_probability[:6].isnan().all() and found.log_pairs[:5].isnan().all()
    assert found.log_probability[6:].isfinite().all() and found.log_pairs[6:].isfinite().all()
    assert clean.log_probability.isfinite().all()
    initial, transition, likelihood = draw(9, 2, varying=True)
    transition[0] = math.nan
    leaves = [t.requires_grad_() for t in (initial, transition, likelihood)]
    unread = hmm_smoother(*leaves, backend=backend)
    gradients = torch.autograd.grad((unread * unread.detach().sin()).sum(), leaves)
    assert unread.isfinite().all() and all(g.isfinite().all() for g in gradients)


def gradients(run: Callable[..., tuple[Tensor, Tensor]], given: Model, order: int) -> list[Tensor]:
    """Of a sum of the finite results with uneven weights; `order` 2: of the gradients' squares."""
    leaves = [t.clone().requires_grad_() for t in given]
    marginals, joint = run(*leaves)
    mixed = sum(
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum()
        for t in (marginals, joint)
    )
    found = torch.autograd.grad(mixed, leaves, create_graph=order == 2)
    if order == 2:
        found = torch.autograd.grad(sum((g * g).sum() for g in found), leaves)
    return [*found]


@pytest.mark.thinned(7)
@both_here
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["constant", "of steps", "with zeros"])
def test_gradients(name: str, order: int, backend: str) -> None:
    """Of probabilities, beside autograd through the loop; of first and repeated calls."""
    given = {
        "constant": lambda: draw(8, 2),
        "of steps": lambda: draw(6, 2, True),
        "with zeros": impossible_steps,
    }[name]()
    want = gradients(smoother_loop, given, order)

    def smoothed(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        found = hmm_smoother(*leaves, pairs=True, backend=backend)
        return found.log_probability.exp(), found.log_pairs.exp()

    for _ in range(2):
        for g, w in zip(gradients(smoothed, given, order), want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
def test_gradients_of_logarithms() -> None:
    given = [t.requires_grad_() for t in draw(3, 2)]

    def both(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(hmm_smoother(*leaves, pairs=True))

    assert torch.autograd.gradcheck(both, given)
    assert torch.autograd.gradgradcheck(both, given)


@pytest.mark.parametrize("K,backend", [(2, "cpu"), (4, "eager")])
def test_float32(K: int, backend: str) -> None:
    check_float32(1000, K, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("K", [2, 4])
@both_here
def test_a_long_series_in_float32(K: int, backend: str) -> None:
    check_float32(100000, K, backend)


def check_float32(T: int, K: int, backend: str) -> None:
    """The error beside float64 is at most three times that of a loop in float32."""
    given = [t.float() for t in draw(T, K)]
    exact = smoother_loop(*(t.double() for t in given))
    loop = smoother_loop(*given)
    found = hmm_smoother(*given, pairs=True, backend=backend)
    for got, usual, want in zip(found, loop, exact, strict=True):
        error, usual = ((t.double() - want).abs().max() for t in (got.exp(), usual))
        assert error <= 3 * usual + 2e-7


@both_here
def test_likelihoods_with_much_in_common(backend: str) -> None:
    """A density of many numbers: −1000 at every state lose pairs no digits in float32, and the
    difference of neighbouring floats there, 6e-5, is none in what is normalised."""
    initial, transition, likelihood = draw(40, 2)
    likelihood = (50 * likelihood - 1000).float()
    given = initial.float(), transition.float(), likelihood
    shifted = likelihood.double() + 1000  # exact
    exact = smoother_loop(given[0].double(), given[1].double(), shifted)
    found = hmm_smoother(*given, pairs=True, backend=backend)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.exp().double(), want, rtol=0, atol=2e-6)


@both_here
def test_half_precision(backend: str) -> None:
    """Computed in float32, and rounded once."""
    given = [t.bfloat16() for t in draw(50, 2)]
    found = hmm_smoother(*given, pairs=True, backend=backend)
    want = hmm_smoother(*(t.float() for t in given), pairs=True, backend=backend)
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected.bfloat16())


@pytest.mark.slow(2)
@every_engine
def test_every_engine(engine: VectorEngine) -> None:
    """First and repeated calls, with one tensor moved; values and gradients."""
    initial, transition, likelihood = (t.float() for t in draw(20, 2))
    transition[0, 1] = -math.inf
    marginals, _ = smoother_loop(initial, transition, likelihood)
    want = torch.autograd.grad(
        hmm_smoother(initial, transition, likelihood.requires_grad_(), backend="eager")[3, 1],
        likelihood,
    )
    likelihood = likelihood.detach()
    moved = torch.cat([likelihood[:1], likelihood])[1:]
    with engine.running():
        for seen in (likelihood, likelihood, moved):
            given = [t.to(engine.device) for t in (initial, transition, seen)]
            found = hmm_smoother(*given, backend=engine.backend)
            torch.testing.assert_close(found.exp().cpu(), marginals, rtol=1e-5, atol=1e-6)
        if engine.device == "cpu" and engine.backend == "cuda":
            return  # a gradient is emulated for minutes
        given[2].requires_grad_()
        found = hmm_smoother(*given, backend=engine.backend)
        got = torch.autograd.grad(found[3, 1], given[2])
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-4, atol=1e-6)


OFFSETS = torch.tensor([0, 0, 3, 4, 9, 9])


@both_here
def test_packed_sequences(backend: str) -> None:
    """Some of them empty; a pair of states of two sequences has probability 0."""
    _, transition, likelihood = draw(9, 2, varying=True)
    starts = torch.stack([draw(k, 2)[0] for k in range(1, 6)])
    found = hmm_smoother(
        starts, transition, likelihood, pairs=True, offsets=OFFSETS, backend=backend
    )
    for s, (begin, end) in enumerate(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True)):
        if begin == end:
            continue
        marginals, joint = smoother_loop(starts[s], transition[begin:end], likelihood[begin:end])
        torch.testing.assert_close(found.log_probability[begin:end].exp(), marginals)
        torch.testing.assert_close(found.log_pairs[begin : end - 1].exp(), joint)
    assert (found.log_pairs[[2, 3]] == -math.inf).all()


GAPS = torch.tensor([True, False, True, True, False, False, True, True, False])


@pytest.mark.thinned(7)
@both_here
@pytest.mark.parametrize("function", [hmm_filter, viterbi, hmm_smoother])
def test_what_was_not_observed(function: Callable[..., object], backend: str) -> None:
    """Its likelihood counts as log 1, whatever it holds, and has no gradient."""
    initial, transition, likelihood = draw(9, 2)
    both = torch.stack([likelihood, likelihood.flip(0)])
    masks = torch.stack([GAPS, GAPS.flip(0)])
    for seen in (GAPS, masks):
        known = torch.where(seen.unsqueeze(-1), both, 0.0)
        want = function(initial, transition, known, backend=backend)
        filled = torch.where(seen.unsqueeze(-1), both, math.nan).requires_grad_()
        for _ in range(2):
            got = function(initial, transition, filled, observed=seen, backend=backend)
            torch.testing.assert_close(got, want)
    score = got if isinstance(got, Tensor) else got[-1 if function is viterbi else 0]
    (gradient,) = torch.autograd.grad(score.square().sum(), filled)
    assert (gradient[~masks] == 0).all() and gradient[masks].isfinite().all()


def test_wrong_masks() -> None:
    given = draw(9, 2)
    with pytest.raises(ScanTypeError, match=r"observed has dtype torch.float32, expected.*bool"):
        hmm_smoother(*given, observed=torch.ones(9))
    with pytest.raises(ScanValueError, match=r"observed has shape \[9, 2\].*\[9\]"):
        hmm_filter(*given, observed=torch.ones(9, 2) > 0)
    with pytest.raises(ScanTypeError, match="observed is a list"):
        viterbi(*given, observed=[True] * 9)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"likelihood": torch.zeros(0, 2)}, "T ≥ 1"),
        ({"transition": torch.zeros(3, 3)}, r"transition.*expected \[2, 2\]"),
        ({"initial": torch.zeros(3)}, r"initial.*\[2\]"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, Tensor], words: str) -> None:
    given = {"initial": torch.zeros(2), "transition": torch.zeros(2, 2),
             "likelihood": torch.zeros(4, 2)}  # fmt: skip
    with pytest.raises(ScanValueError, match=words):
        hmm_smoother(**{**given, **change})
