"""Derivatives of `nonlinear_recurrence` beside autograd through a loop; what is saved for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_calls import (
    GRU,
    LSTM,
    decayed,
    differentiable,
    draw,
    each_backend,
    each_case,
    gradients,
    run,
    tracked,
)
from steps import Case, Given, arguments, gru, loop
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import FallbackWarning, nonlinear_recurrence
from assocscan.engines.base import fallback_warning


@pytest.mark.exhaustive
@each_backend
def test_gradients_past_nan(backend: str) -> None:
    """A NaN in one chain leaves the gradients of the others alone."""
    x = draw(2, 9, 3)
    x[0, 2, 0] = torch.nan
    x.requires_grad_()
    mask = torch.zeros(9, 1, dtype=torch.bool)
    mask[5] = True
    weight = draw(2, 9, 3, seed=1)
    for reset in (None, mask):
        want = loop(decayed, x, 0.5, params=0.7, reset=reset)[0]
        (expected,) = torch.autograd.grad(want, x, weight)
        for _ in range(2):
            got = nonlinear_recurrence(decayed, x, 0.5, params=0.7, reset=reset, backend=backend)
            (found,) = torch.autograd.grad(got, x, weight)
            assert_close(found, expected, equal_nan=True)
        assert found[1].isfinite().all() and found[0, :, 1:].isfinite().all()


@pytest.mark.thinned(16)
@each_backend
@each_case
def test_gradients(case: Case, backend: str) -> None:
    for length in (9, 1):
        given, leaves = tracked(arguments(case, length))
        want = differentiable(loop(case.step, given.xs, given.init, params=given.params))
        weights = [torch.randn_like(t) for t in want]
        for w in weights:
            w[:1] = 0  # nothing flows into a row, so that its gradients are exactly 0
        expected = gradients(want, leaves, weights)
        for _ in range(3):
            got = differentiable(run(case, given, backend=backend))
            assert_close(gradients(got, leaves, weights), expected)


@pytest.mark.thinned(7)
@each_backend
@pytest.mark.parametrize("which", ["xs", "init", "params", "final"])
def test_some_gradients(which: str, backend: str) -> None:
    """Of one argument alone; of the last state alone."""
    given, leaves = tracked(arguments(GRU, 6))
    x, h, p = leaves[1], leaves[3], leaves[5]
    wanted = {"xs": x, "init": h, "params": p, "final": x}[which]
    given = pytree.tree_map(lambda t: t if t is wanted else t.detach(), given)
    part = 1 if which == "final" else 0
    want = loop(gru, given.xs, given.init, params=given.params)[part]
    weight = draw(*want.shape, seed=6)
    (expected,) = torch.autograd.grad(want, wanted, weight)
    for _ in range(3):
        (found,) = torch.autograd.grad(run(GRU, given, backend=backend)[part], wanted, weight)
        assert found.shape == wanted.shape
        assert_close(found, expected)


@pytest.mark.thinned(7)
@each_backend
def test_gradients_of_broadcast_arguments(backend: str) -> None:
    """They are summed to the shapes of the arguments."""
    shapes = (1, 9, 3), (2, 9, 1), (3,), (1, 1), ()
    leaves = [draw(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
    a, b, h, p, q = leaves

    def step(h: Any, x: Any, params: Any) -> Any:
        return torch.tanh(params[0] * h + x[0]) * torch.cos(params[1] * x[1])

    want = loop(step, (a, b), h, params=(p, q))[0]
    weight = draw(*want.shape, seed=6)
    expected = torch.autograd.grad(want, leaves, weight)
    for _ in range(3):
        got = nonlinear_recurrence(step, (a, b), h, params=(p, q), backend=backend)
        found = torch.autograd.grad(got, leaves, weight)
        assert [t.shape for t in found] == [t.shape for t in leaves]
        assert_close(found, expected)


@pytest.mark.exhaustive
@each_backend
def test_one_tensor_in_several_places(backend: str) -> None:
    t = draw(2, 2, 2).requires_grad_()

    def step(h: Any, x: Any, params: Any) -> Any:
        return torch.sin(h * x[0] + params * x[1])

    def result(function: Callable[..., Any]) -> Tensor:
        return function(step, (t, t), t[:, 0], params=t[:, 1])

    (expected,) = torch.autograd.grad(loop(step, (t, t), t[:, 0], params=t[:, 1])[0].sum(), t)
    for _ in range(2):
        got = nonlinear_recurrence(step, (t, t), t[:, 0], params=t[:, 1], backend=backend)
        assert_close(torch.autograd.grad(got.sum(), t)[0], expected)


@pytest.mark.exhaustive
@each_backend
@each_case
def test_second_derivatives(case: Case, backend: str) -> None:
    """By finite differences, in both modes of autograd."""
    if backend == "triton" and case.name not in ("gru", "logistic", "integrate_and_fire"):
        pytest.skip("Triton's interpreter is slow; what it runs is derived as for the CPU")
    given, leaves = tracked(arguments(case, 3, batch=1, channels=2, seed=3))
    spec = pytree.tree_structure(given)
    everything = pytree.tree_leaves(given)
    places = [k for k, t in enumerate(everything) if isinstance(t, Tensor) and t.requires_grad]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed = [*everything]
        for k, t in zip(places, tensors, strict=True):
            changed[k] = t
        return tuple(differentiable(run(case, pytree.tree_unflatten(changed, spec),
                                        backend=backend)))  # fmt: skip

    assert torch.autograd.gradcheck(
        function, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.exhaustive
@each_backend
def test_second_derivatives_beside_the_loop(backend: str) -> None:
    def second(function: Callable[[Given], Any]) -> tuple[Tensor, ...]:
        given, leaves = tracked(arguments(GRU, 5, batch=1))
        first = torch.autograd.grad(function(given).square().sum(), leaves, create_graph=True)
        terms = torch.stack([(g * g).sum() * (k + 1) for k, g in enumerate(first)])
        return torch.autograd.grad(terms.sum(), leaves)

    want = second(lambda given: loop(gru, given.xs, given.init, params=given.params)[0])
    for _ in range(2):
        assert_close(second(lambda given: run(GRU, given, backend=backend)[0]), want)


@pytest.mark.thinned(7)
@each_backend
def test_forward_mode(backend: str) -> None:
    given = arguments(GRU, 5)
    leaves, spec = pytree.tree_flatten(given)
    tangents = [draw(*t.shape, seed=40 + k) for k, t in enumerate(leaves)]

    def through(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: function(pytree.tree_unflatten(list(tensors), spec))

    _, want = torch.func.jvp(
        through(lambda g: loop(gru, g.xs, g.init, params=g.params)), tuple(leaves), tuple(tangents)
    )
    for _ in range(2):
        _, got = torch.func.jvp(
            through(lambda g: run(GRU, g, backend=backend)), tuple(leaves), tuple(tangents)
        )
        assert_close(got, want)


def saved_by(call: Callable[[], Any]) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass."""
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call()
    return kept


@pytest.mark.thinned(7)
@pytest.mark.parametrize("case", [GRU, LSTM], ids=lambda case: case.name)
def test_only_states_are_saved(case: Case) -> None:
    """Beside the arguments: the gates are computed again."""
    given, leaves = tracked(arguments(case, 64, channels=5))
    for _ in range(2):
        results: list[Any] = []
        kept = saved_by(lambda results=results: results.append(run(case, given, backend="cpu")))
        states = pytree.tree_leaves(results[0][0])
        addresses = {t.data_ptr() for t in (*leaves, *states)}
        of_steps = [t for t in kept if t.dim() == 3]
        assert {t.data_ptr() for t in of_steps} <= addresses
        assert len({t.data_ptr() for t in of_steps}) == len(given.xs) + len(states)
        assert sum(t.untyped_storage().nbytes() for t in kept if t.dim() < 3) < 4096


@pytest.mark.exhaustive
def test_states_that_lower_hides_are_saved_once() -> None:
    given, leaves = tracked(arguments(LSTM, 64, channels=5))
    for _ in range(2):
        kept = saved_by(lambda: run(LSTM, given, lower=lambda h: h[0], backend="cpu"))
        large = {t.data_ptr() for t in kept if t.dim() == 3} - {t.data_ptr() for t in leaves}
        assert len(large) == 2  # h, which is returned, and c


@pytest.mark.parametrize("method", ["auto", "newton"])
def test_a_custom_function_counts_wherever_its_derivative_differs(method: str) -> None:
    """A surrogate that is 0 on the elements that are tried is another derivative elsewhere."""

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (v,) = ctx.saved_tensors
            return g * (1 - v.abs()).clamp(min=0)

    def step(h: Tensor, x: Tensor) -> Tensor:
        return 0.9 * h + x - Spike.apply(h - 3.0)

    x = torch.full((1, 4), 2.4, dtype=torch.float64, requires_grad=True)
    expected = torch.tensor([[2.355, 2.71, 1.9, 1.0]], dtype=torch.float64)
    nonlinear_recurrence(step, x.detach(), 0.0, method=method)
    fallback_warning._WARNED.clear()
    with pytest.warns(FallbackWarning, match="autograd"):
        y = nonlinear_recurrence(step, x, 0.0, method=method)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)
        y = nonlinear_recurrence(step, x, 0.0, method=method)
