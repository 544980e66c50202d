"""Hidden Markov models of more than 8 states beside a loop in log space and the scan of few states.

`backend="eager"` runs the scan that models of few states take, for any number of states.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from assocscan import ScanTypeError, ScanValueError, hmm_filter, hmm_smoother, viterbi
from assocscan.engines.cpu import compiler
from assocscan.functional.hmm import log_space, predictions, product_tree
from assocscan.functional.hmm.many_states import MOST_IN_KERNELS

K = MOST_IN_KERNELS + 1
F64 = torch.float64
WAYS = ("products", "loop", "chunks")
Model = list[Tensor]


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Kernels for so many states would be compiled for minutes."""
    if "few" not in request.node.name:
        monkeypatch.setattr(compiler, "_compile", mock.Mock(side_effect=AssertionError("compiled")))


def loop(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """The filter in log space, normalised at each step, in float64."""
    initial, transition, likelihood = (t.double() for t in (initial, transition, likelihood))
    found, evidence = [], torch.zeros((), dtype=F64)
    state = initial
    for t in range(likelihood.shape[-2]):
        if t:
            now = transition
            if transition.dim() > 2:
                now = transition[..., min(t, transition.shape[-3] - 1), :, :]
            state = torch.logsumexp(state.unsqueeze(-1) + now, -2)
        joint = state + likelihood[..., t, :]
        seen = torch.logsumexp(joint, -1)
        state = joint - seen.unsqueeze(-1)
        found.append(state)
        evidence = evidence + seen
    return torch.stack(found, -2), evidence


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed + sum(shape)), dtype=F64)


def model(
    states: int, steps: int, batch: tuple[int, ...] = (), varies: bool = False, scale: float = 1.0
) -> Model:
    moves = draw(*batch, steps, states, states) if varies else draw(states, states)
    return [
        draw(states).log_softmax(-1),
        moves.log_softmax(-1),
        scale * draw(*batch, steps, states, seed=1),
    ]


@contextlib.contextmanager
def forced(way: str) -> Iterator[list[bool]]:
    """One way to the predictions; the list says of each tree of products if it was right."""
    were_right: list[bool] = []
    products = product_tree.by_products

    def noted(*given: Tensor) -> Tensor | None:
        found = products(*given)
        were_right.append(found is not None)
        return found

    def count(sums: int, steps: int, device: str) -> int:
        return 5 if way == "chunks" and steps > 5 else 1

    with (
        mock.patch.object(predictions, "by_products", noted),
        mock.patch.object(predictions, "MOST_IN_A_TREE", 1 << 40 if way == "products" else 0),
        mock.patch.object(log_space, "chunk_count", count),
    ):
        yield were_right


def sparse(states: int) -> Tensor:
    """Transitions of which most are impossible, though every state can follow itself."""
    is_none = torch.rand((states, states), generator=generator(3)) < 0.6
    moves = torch.where(is_none, -math.inf, draw(states, states))
    return torch.where(torch.eye(states).bool(), 0.0, moves).log_softmax(-1)


def rotation(states: int) -> Tensor:
    return torch.where(torch.eye(states).roll(1, 1).bool(), 0.0, -math.inf).double()


TRANSITIONS: dict[str, Callable[[int], Tensor]] = {
    "any": lambda K: draw(K, K).log_softmax(-1),
    "nearly certain": lambda K: torch.where(torch.eye(K).bool(), 0.0, math.log(1e-8)).double(),
    "sparse": sparse,
    "left to right": lambda K: torch.where(
        torch.ones(K, K).triu().bool(), draw(K, K), -math.inf
    ).log_softmax(-1),
    "a rotation": rotation,
    "no transition": lambda K: torch.eye(K, dtype=F64).log(),
    "e^100 apart": lambda K: 25 * draw(K, K),
}


def impossible(steps: int, states: int) -> Tensor:
    """Observations that a third of the states cannot have made."""
    x = draw(steps, states)
    never = torch.rand((steps, states), generator=generator(4)) < 0.3
    never[:, 0] = False
    return torch.where(never, -math.inf, x)


LIKELIHOODS: dict[str, Callable[[int, int], Tensor]] = {
    "any": draw,
    "30 apart": lambda *s: 30 * draw(*s),
    "impossible": impossible,
    "10^4 apart": lambda *s: -1e4 * torch.rand(s, generator=generator(5), dtype=F64),
    "-10^4 for all": lambda *s: draw(*s) - 1e4,
}


def check(given: Model, atol: float = 1e-9) -> None:
    """Within 10^-9 in float64, which is the error of the loop itself where numbers are 10^4; equal
    up to one rounding in float32."""
    right, total = loop(*given)
    for _ in range(2):
        posterior, evidence = hmm_filter(*given)
        assert torch.equal(posterior.isinf(), right.isinf())
        assert torch.equal(posterior.isnan(), right.isnan())
        known = right.isfinite()
        torch.testing.assert_close(posterior[known], right[known], rtol=1e-9, atol=atol)
        if known.all(-1).any():
            torch.testing.assert_close(evidence, total, rtol=1e-12, atol=atol)
    short = [t.float() for t in given]
    posterior, evidence = hmm_filter(*short)
    right, total = loop(*short)
    known = right.isfinite()
    torch.testing.assert_close(posterior[known], right[known].float(), rtol=2e-7, atol=1e-7)


@pytest.mark.slow(50)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_hard_models(transition: str, likelihood: str, way: str) -> None:
    for states, steps in ((K, 1), (12, 2), (33, 3), (K, 5), (12, 101)):
        moves, seen = TRANSITIONS[transition](states), LIKELIHOODS[likelihood](steps, states)
        with forced(way):
            check([draw(states).log_softmax(-1), moves, seen])


@pytest.mark.slow
@pytest.mark.parametrize("states", [K, 32])
@pytest.mark.parametrize(
    "transition,likelihood,is_right",
    [
        ("any", "30 apart", True),
        ("nearly certain", "any", True),
        ("nearly certain", "10^4 apart", True),
        ("sparse", "any", True),
        ("sparse", "10^4 apart", False),
        ("left to right", "30 apart", False),
        ("a rotation", "10^4 apart", False),
        ("e^100 apart", "any", True),
    ],
)
def test_long_series(transition: str, likelihood: str, is_right: bool, states: int) -> None:
    """Products are taken where they are right, and nowhere else."""
    given = [
        draw(states).log_softmax(-1),
        TRANSITIONS[transition](states),
        LIKELIHOODS[likelihood](5000, states),
    ]
    with forced("products") as were_right:
        check(given)
    assert set(were_right) == {is_right}


def test_what_is_wrong_in_a_tree_is_seen() -> None:
    """One entry of one vector, changed by 10^-11 of itself or lost."""
    start, transition, weights = model(K, 40)
    transition = transition.unsqueeze(0)
    entering = product_tree.entering
    assert product_tree.by_products(start, transition, weights) is not None
    for factor in (1 + 1e-11, 0.0, math.nan):

        def spoilt(*given: Tensor, factor: float = factor) -> Tensor:
            found = entering(*given).clone()
            found[17, 3] *= factor
            return found

        with mock.patch.object(product_tree, "entering", spoilt):
            assert product_tree.by_products(start, transition, weights) is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch,varies", [((3,), False), ((2, 1), False), ((2,), True), ((), True)])
def test_batches(batch: tuple[int, ...], varies: bool, way: str) -> None:
    for steps in (2, 33, 50):
        with forced(way):
            check(model(K, steps, batch, varies, 3.0))


@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother, viterbi])
@pytest.mark.parametrize("way", WAYS)
def test_transitions_of_one_step_hold_for_all(way: str, function: Any) -> None:
    initial, moves, likelihood = model(K, 20, (2,))
    each = torch.stack((moves, moves.mT))
    with forced(way):
        for few, many in (
            (moves[None], moves.expand(20, K, K).clone()),
            (moves.expand(20, K, K), moves.expand(20, K, K).clone()),
            (each[:, None], each[:, None].expand(2, 20, K, K).clone()),
            (each[:1, None], moves.expand(2, 20, K, K).clone()),
            (moves[None, None], moves),
        ):
            leaves = [[t.clone().requires_grad_() for t in (initial, likelihood)] for _ in range(2)]
            few, many = few.detach(), many.detach()
            found = [
                values(function(leaf[0], moves_of, leaf[1]))
                for moves_of, leaf in zip((few, many), leaves, strict=True)
            ]
            torch.testing.assert_close(found[0], found[1])
            gradients = [
                torch.autograd.grad(weighted(ys), leaf)
                for ys, leaf in zip(found, leaves, strict=True)
            ]
            torch.testing.assert_close(gradients[0], gradients[1])


def values(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def weighted(ys: tuple[Tensor, ...]) -> Tensor:
    """A sum of what is finite, with uneven weights."""
    total = torch.zeros((), dtype=F64)
    for k, y in enumerate(ys):
        if y.is_floating_point():
            part = torch.where(y.isfinite(), y, 0.0).double()
            total = total + (part * draw(*y.shape, seed=k)).sum()
    return total


def gradients(run: Callable[..., Any], given: Model, order: int = 1) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    options = {"materialize_grads": run is loop}  # which does not touch transitions of one step
    total = weighted(values(run(*leaves)))
    found = torch.autograd.grad(total, leaves, create_graph=order == 2, **options)
    if order == 2:
        total = sum((g * g).sum() for g in found)
        return torch.autograd.grad(total, leaves, **options)
    return found


def by_scan(function: Any) -> Callable[..., Any]:
    return lambda *given, **options: function(*given, backend="eager", **options)


@pytest.mark.slow(6)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("varies", [False, True])
def test_gradients(varies: bool, way: str, order: int) -> None:
    for batch, steps in (((2,), 1), ((2,), 2), ((), 3), ((), 12), ((2,), 45)):
        given = model(K, steps, batch, varies, 2.0)
        with forced(way):
            found = gradients(hmm_filter, given, order)
        torch.testing.assert_close(found, gradients(loop, given, order), rtol=1e-7, atol=1e-9)
        short = [t.float() for t in given]
        if order == 1:
            with forced(way):
                found = gradients(hmm_filter, short)
            right = gradients(loop, [t.double() for t in short])
            torch.testing.assert_close(found, tuple(g.float() for g in right), rtol=1e-5, atol=1e-5)


def test_gradients_of_a_long_series() -> None:
    for name in ("nearly certain", "sparse", "left to right"):
        given = [draw(K).log_softmax(-1), TRANSITIONS[name](K), draw(3000, K)]
        found = gradients(hmm_filter, given)
        with forced("loop"):
            right = gradients(hmm_filter, given)
        torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-7)
        # The derivative of the evidence is the smoothed probability.
        seen = given[2].clone().requires_grad_()
        evidence = hmm_filter(*given[:2], seen).log_evidence
        (smoothed,) = torch.autograd.grad(evidence, seen)
        torch.testing.assert_close(smoothed, hmm_smoother(*given).exp(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_where_probabilities_are_zero(way: str) -> None:
    """Finite, and those of the scan where the result is finite."""
    given = model(K, 12)
    given[0][2] = given[1][1, 4] = given[1][5, 0] = given[2][6, 3] = given[2][0, 1] = -math.inf
    given[1][:, 7] = -math.inf  # a state that is never reached
    for function in (hmm_filter, hmm_smoother):
        with forced(way):
            torch.testing.assert_close(values(function(*given)), values(by_scan(function)(*given)))
            found = gradients(function, given)
        right = gradients(by_scan(function), given)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)
        assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("which", range(3))
def test_one_argument_requires_a_gradient(which: int) -> None:
    given = model(K, 14, (2,))
    for function in (hmm_filter, hmm_smoother, viterbi):
        whole = gradients(function, given)[which]
        leaves = list(given)
        leaves[which] = given[which].clone().requires_grad_()
        for _ in range(2):
            (alone,) = torch.autograd.grad(weighted(values(function(*leaves))), leaves[which])
            torch.testing.assert_close(alone, whole)
        result = values(function(*given))
        assert not any(y.requires_grad for y in result)


SPOILT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "NaN": lambda initial, moves, seen: seen[5].__setitem__(1, math.nan),
    "a move of NaN": lambda initial, moves, seen: moves[2].__setitem__(1, math.nan),
    "a start of NaN": lambda initial, moves, seen: initial.__setitem__(1, math.nan),
    "infinite": lambda initial, moves, seen: seen[5].__setitem__(1, math.inf),
    "impossible": lambda initial, moves, seen: seen[5].fill_(-math.inf),
    "impossible at once": lambda initial, moves, seen: initial.fill_(-math.inf),
    "impossible moves": lambda initial, moves, seen: moves.fill_(-math.inf),
}


@pytest.mark.slow(7)
@pytest.mark.parametrize("steps", [9, 70])
@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_probability(what: str, steps: int) -> None:
    """As in the scan of few states."""
    for function in (hmm_filter, hmm_smoother, viterbi):
        given = model(K, steps)
        SPOILT[what](*given)
        found, right = values(function(*given)), values(by_scan(function)(*given))
        if what == "infinite":  # no density of a likelihood: the evidence may be NaN or infinite
            assert function is hmm_smoother or not found[1].isfinite()
            found, right = found[:1], right[:1]
        if function is viterbi:  # a path of probability 0 or NaN means nothing
            found, right = found[1:], right[1:]
        torch.testing.assert_close(found, right, equal_nan=True, msg=function.__name__)
        if "impossible" in what and function is not hmm_smoother:
            assert all(g.isfinite().all() for g in gradients(function, given))


def test_the_transition_of_step_0_is_not_read() -> None:
    for function in (hmm_filter, hmm_smoother, viterbi):
        given = model(K, 40, (), True)
        right = values(function(*given))
        given[1][0] = math.nan
        torch.testing.assert_close(values(function(*given)), right)
        found = gradients(function, given)
        assert all(g.isfinite().all() for g in found) and not found[1][0].any()


@pytest.mark.parametrize("states", [2, K])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_computed_in_float32(dtype: torch.dtype, states: int) -> None:
    """Of few and of many states, whatever the values are; rounded once."""
    for function in (hmm_filter, hmm_smoother, viterbi):
        for value in (0.0, -math.inf):
            given = [t.to(dtype) for t in model(states, 70)]
            given[1][0, 1] = value
            given[1][1, 0] = 2 * value
            options = {"backend": "eager"} if states == 2 else {}
            found = values(function(*given, **options))
            right = values(function(*(t.float() for t in given), **options))
            for a, b in zip(found, right, strict=True):
                assert a.dtype == (dtype if b.is_floating_point() else b.dtype)
                assert torch.equal(a, b.to(a.dtype))
    leaves = [t.to(dtype).requires_grad_() for t in model(states, 20)]
    options = {"backend": "eager"} if states == 2 else {}
    found = torch.autograd.grad(hmm_filter(*leaves, **options).log_evidence, leaves)
    assert all(g.dtype == dtype and g.isfinite().all() for g in found)


@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother, viterbi])
def test_errors(function: Any) -> None:
    """Those of models of few states."""
    for states in (2, K):
        given = model(states, 20)
        with pytest.raises(ScanTypeError, match="deterministic is 'yes', expected True or False"):
            function(*given, deterministic="yes")
        with pytest.raises(ScanValueError, match="backend"):
            function(*given, backend="fast")
        with pytest.raises(ScanTypeError, match="likelihood"):
            function(given[0], given[1], given[2].float())
        with pytest.raises(ScanValueError, match="transition has shape"):
            function(given[0], given[1].expand(19, states, states), given[2])
        with pytest.raises(ScanValueError, match="initial has shape"):
            function(given[0].expand(3, states), *given[1:])


def test_deterministic_is_taken() -> None:
    given = model(K, 100)
    for chosen in (None, True, False):
        found = hmm_filter(*given, deterministic=chosen)
        assert torch.equal(found[0], hmm_filter(*given)[0])


def test_observed() -> None:
    given = model(K, 40, (2,))
    seen = torch.rand((2, 40), generator=generator(1)) < 0.6
    given[2][~seen] = math.nan
    clean = given[2].masked_fill(~seen.unsqueeze(-1), 0.0)
    for function in (hmm_filter, hmm_smoother, viterbi):
        for _ in range(2):
            found = values(function(*given, observed=seen))
            torch.testing.assert_close(found, values(function(*given[:2], clean)))
        leaves = gradients(lambda *t, f=function: f(*t, observed=seen), given)
        assert leaves[2].isfinite().all() and not leaves[2][~seen].any()


def test_repeated_calls_with_one_thing_changed() -> None:
    """The address, the strides, the dtype, whether derivatives are wanted, a value in place."""
    given = model(K, 70, (2,))
    for function in (hmm_filter, hmm_smoother, viterbi):
        right = values(by_scan(function)(*given))

        def same(result: Any, right: tuple[Tensor, ...] = right) -> None:
            for a, b in zip(values(result), right, strict=True):
                close = {} if a.dtype != torch.float32 else {"rtol": 1e-6, "atol": 1e-5}
                torch.testing.assert_close(a.detach(), b.to(a.dtype), **close)

        same(function(*given))
        same(function(*given))
        same(function(*(t.clone() for t in given)))
        strided = [torch.stack((t, t), -1)[..., 0] for t in given]
        same(function(*strided))
        same(function(given[0], given[1].mT.contiguous().mT, given[2].mT.contiguous().mT))
        same(function(given[0].expand(2, K), given[1].expand(2, 70, K, K), given[2]))
        same(function(*(t.float() for t in given)))
        same(function(*(t.clone().requires_grad_() for t in given)))
        with torch.no_grad():
            same(function(*(t.clone().requires_grad_() for t in given)))
        with torch.inference_mode():
            same(function(*given))
        same(function(*given))
        changed = [t.clone() for t in given]
        function(*changed)
        changed[2][:, 3] = 0
        again = values(by_scan(function)(*changed))
        torch.testing.assert_close(values(function(*changed)), again)


@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother, viterbi])
def test_autocast(function: Any) -> None:
    given = [t.float() for t in model(K, 70)]
    right, derivative = values(function(*given)), gradients(function, given)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            found = values(function(*given))
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
            assert all(a.dtype == b.dtype for a, b in zip(found, right, strict=True))
            torch.testing.assert_close(gradients(function, given), derivative)


@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother])
def test_torch_func(function: Any) -> None:
    """grad, vmap and jvp, by the scan of few states."""
    given = model(K, 6)

    def total(*given: Tensor) -> Tensor:
        return weighted(values(function(*given)))

    right = gradients(function, given)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1, 2))(*given), right)
    batch = [torch.stack((t, t.flip(0))) for t in given]
    mapped = values(torch.func.vmap(function)(*batch))
    for k in range(2):
        alone = values(function(*(t[k] for t in batch)))
        torch.testing.assert_close(tuple(y[k] for y in mapped), alone)
    tangents = [draw(*t.shape, seed=7) for t in given]
    value, slope = torch.func.jvp(total, tuple(given), tuple(tangents))
    torch.testing.assert_close(value, total(*given))
    along = sum((g * t).sum() for g, t in zip(right, tangents, strict=True))
    torch.testing.assert_close(slope, along)
    vjp = torch.autograd.grad
    leaves = [t.clone().requires_grad_() for t in given]
    posterior = values(function(*leaves))[0]
    several = draw(3, *posterior.shape, seed=8)
    found = vjp(posterior, leaves, several, is_grads_batched=True, retain_graph=True)
    for k in range(3):
        one = vjp(posterior, leaves, several[k], retain_graph=True)
        torch.testing.assert_close(tuple(g[k] for g in found), one)


@pytest.mark.slow
@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother, viterbi])
def test_compiled(function: Any) -> None:
    given = model(K, 9)
    right = values(function(*given))
    torch._dynamo.reset()
    compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(values(compiled(*given)), right)
    if function is not viterbi:
        torch.testing.assert_close(gradients(compiled, given), gradients(function, given))


def test_what_is_no_memory() -> None:
    given = [t.to("meta") for t in model(K, 9)]
    assert hmm_filter(*given).log_probability.shape == (9, K)
    assert hmm_filter(*model(K, 9, (0,))).log_evidence.shape == (0,)


@pytest.mark.slow(3)
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_smoother(steps: int, varies: bool) -> None:
    given = model(K, steps, (2,), varies, 3.0)
    for way in WAYS:
        with forced(way):
            found = hmm_smoother(*given, pairs=True)
            derivative = gradients(lambda *t: hmm_smoother(*t, pairs=True), given)
        right = hmm_smoother(*given, pairs=True, backend="eager")
        torch.testing.assert_close(tuple(found), tuple(right))
        right = gradients(lambda *t: hmm_smoother(*t, pairs=True, backend="eager"), given)
        torch.testing.assert_close(derivative, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_viterbi(steps: int, varies: bool) -> None:
    given = model(K, steps, (3, 2), varies, 3.0)
    given[1][..., 2, 3] = -math.inf
    right = viterbi(*given, backend="eager")
    for way in WAYS:
        with forced(way):
            found = viterbi(*given)
            assert torch.equal(found.path, right.path)
            torch.testing.assert_close(found.log_probability, right.log_probability)
            derivative = gradients(viterbi, given)
        torch.testing.assert_close(derivative, gradients(by_scan(viterbi), given))


@pytest.mark.slow(4)
@pytest.mark.parametrize("batch", [(), (3,), (2,)])
@pytest.mark.parametrize("function", [hmm_filter, hmm_smoother, viterbi])
def test_packed_sequences_that_begin_differently(
    function: Callable[..., Any], batch: tuple[int, ...]
) -> None:
    """`initial` has a row per sequence; where there are as many series as sequences, too."""
    (_, moves, likelihood), bounds = model(K, 30, batch), [0, 12, 30]
    initial = draw(2, *batch, K, seed=3).log_softmax(-1)
    for _ in range(2):
        found = values(function(initial, moves, likelihood, offsets=torch.tensor(bounds)))[0]
        for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
            part = likelihood[..., begin:end, :]
            alone = values(function(initial[s], moves, part))[0]
            steps = found[..., begin:end] if function is viterbi else found[..., begin:end, :]
            torch.testing.assert_close(steps, alone)


def test_packed_sequences() -> None:
    """By the scan on the eager engine."""
    given, offsets = model(K, 30), torch.tensor([0, 12, 12, 30])
    for function in (hmm_filter, hmm_smoother, viterbi):
        packed = values(function(*given, offsets=offsets))[0]
        for a, b in ((0, 12), (12, 30)):
            alone = values(function(*given[:2], given[2][a:b]))[0]
            torch.testing.assert_close(packed[a:b], alone)


@pytest.mark.parametrize("seed", range(3))
def test_exact_ties_go_to_the_smaller_state(seed: int) -> None:
    """Weights that are whole numbers are added without rounding, so many paths tie."""
    K, T = 9, 2000
    generator = torch.Generator().manual_seed(seed)
    initial, moves, seen = (
        -torch.randint(0, 4, shape, generator=generator).double()
        for shape in ((K,), (K, K), (T, K))
    )
    best, back = initial + seen[0], []
    for t in range(1, T):
        to = best[:, None] + moves
        back.append([int(torch.nonzero(column == column.max())[0, 0]) for column in to.T])
        best = to.amax(0) + seen[t]
    path = [int(torch.nonzero(best == best.max())[0, 0])]
    for before in reversed(back):
        path.append(before[path[-1]])
    found, weight = viterbi(initial, moves, seen)
    assert found.tolist() == path[::-1] and weight == best.max()
