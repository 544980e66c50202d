"""`nonlinear_recurrence(method="newton")`: windows solved by linear scans, beside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from steps import gru
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import (
    ScanTypeError,
    ScanValueError,
    explain_recurrence,
    nonlinear_recurrence,
)
from assocscan.functional.nonlinear import newton
from assocscan.functional.nonlinear.newton import NewtonDispatch, Report
from assocscan.runtime import executable_cache

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64)


def two_numbers(state: Any, x: Any, weights: Any) -> Any:
    """Each depends on the other one before."""
    (h, c), (i, f, o), (u, v, _) = state, x, weights
    c = torch.sigmoid(f + u * h) * c + torch.sigmoid(i) * torch.tanh(v * h)
    return torch.sigmoid(o) * torch.tanh(c), c


def oscillator(z: Tensor, x: Any, weights: Any) -> Tensor:
    """A complex number, damped by its size."""
    return z * (0.9 - 0.1 * z.abs()) + x[0]


def reports() -> Any:
    """Lets a test see what each solution took."""
    found: list[Report] = []
    plain = NewtonDispatch

    def made(*args: Any, **options: Any) -> NewtonDispatch:
        found.append(Report())
        return plain(*args, **options, report=found[-1])

    where = "assocscan.functional.nonlinear.nonlinear_recurrence.NewtonDispatch"
    return mock.patch(where, made), found


CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "gated": (gru, 0.3), "two numbers": (two_numbers, (0.1, -0.2)),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reverse": {"reverse": True},
    "packed": {"offsets": torch.tensor([0, 7, 7, 40, 100])},
    "packed, reverse": {"offsets": torch.tensor([0, 7, 7, 40, 100]), "reverse": True},
    "reset": {"reset": torch.arange(100) % 13 == 3},
}


@pytest.mark.thinned(7)
@every_case
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [100, pytest.param(16, marks=pytest.mark.exhaustive)])
def test_it_is_the_loop(name: str, variant: str, window: int) -> None:
    step, init = CASES[name]
    options = dict(VARIANTS[variant], return_final=True)
    if "reset" in options:
        options["reset"] = options["reset"][None, :]
    xs = tuple(draw(1, 100, 5, seed=k).requires_grad_() for k in range(3))
    weights = tuple((2 * draw(5, seed=k)).requires_grad_() for k in range(3))
    leaves = [*xs, *weights]
    results = []
    for method in ("loop", "newton"):
        with mock.patch.object(newton, "WINDOW", window):
            found = tree_leaves(
                nonlinear_recurrence(step, xs, init, params=weights, method=method, **options)
            )
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=F64).view(t.shape) for t in found]
        gradients = torch.autograd.grad(found, leaves, seeds, allow_unused=True)
        results.append([*found, *(g for g in gradients if g is not None)])
    for walked, solved in zip(*results, strict=True):
        torch.testing.assert_close(solved, walked, rtol=1e-9, atol=1e-9)


def scanning_back() -> Any:
    """Lets gradients be scans on the CPU, too."""
    plain = NewtonDispatch
    where = "assocscan.functional.nonlinear.nonlinear_recurrence.NewtonDispatch"
    return mock.patch(where, lambda *a, **options: plain(*a, **{**options, "scans_back": True}))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_by_scans(variant: str) -> None:
    """As on GPUs, where the derivatives of a step of one number are scanned."""
    options = dict(VARIANTS[variant], return_final=True)
    if "reset" in options:
        options["reset"] = options["reset"][:, None]
    xs = tuple(draw(2, 100, 5, seed=k).requires_grad_() for k in range(3))
    leaves = [*xs, *(draw(5, seed=k).requires_grad_() for k in range(3))]
    start = (0.1 * draw(2, 5)).requires_grad_()
    found = []
    for method in ("loop", "newton"):
        with scanning_back():
            results = nonlinear_recurrence(
                gru, xs, start, params=tuple(leaves[3:]), method=method, **options
            )
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=F64).view(t.shape) for t in results]
        found.append(torch.autograd.grad(results, [*leaves, start], seeds))
    for walked, scanned in zip(*found, strict=True):
        torch.testing.assert_close(scanned, walked, rtol=1e-9, atol=1e-9)


def test_gradients_that_are_not_finite_are_walked() -> None:
    """As where a product of derivatives overflows and a loop multiplies 0 by each of them."""
    x = draw(1, 100, 2).requires_grad_()
    step = lambda h, x: torch.tanh(h) + x  # noqa: E731
    plain, spoilt = executable_cache.run, []

    def run(backend: str, spec: Any, tensors: Any) -> Any:
        results = plain(backend, spec, tensors)
        if spec.exclusive and not spec.operator.sequential and "adjoint" in spec.operator.name:
            spoilt.append(spec)
            results[0][0][:, 3] = torch.inf
        return results

    gradients = []
    with scanning_back(), mock.patch.object(executable_cache, "run", run):
        for method in ("loop", "newton"):
            h = nonlinear_recurrence(step, x, 1.0, method=method)
            gradients.append(torch.autograd.grad(h[:, -1].sum(), x)[0])
    assert len(spoilt) == 1
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


JUMPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "compares": lambda h, x: 0.5 * h + (h > 0).to(h.dtype) + x,
    "spikes": lambda v, x: 0.9 * v + x.abs() - (v > 1).to(v.dtype),
    "straight through": lambda v, x: (
        0.9 * v + x.abs() - (v + ((v > 1).to(v.dtype) - v).detach())
    ),
    "detached": lambda h, x: 0.5 * h + torch.tanh(h).detach() + x,
    "rounds": lambda h, x: h + x - torch.round(h),
    "floors": lambda h, x: 1.5 * h - torch.floor(h) + x,
    "chooses": lambda h, x: torch.where(h > 1, 0.5 * h, 0.5 * h + 1) + x,
    "divides": lambda h, x: 1 / (2 + h.abs()) + x,
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", JUMPS)
def test_derivatives_that_hide_a_jump(name: str) -> None:
    """A constant derivative does not make a step affine."""
    x = draw(3, 50, 2)
    want = nonlinear_recurrence(JUMPS[name], x, 0.0)
    got = nonlinear_recurrence(JUMPS[name], x, 0.0, method="newton")
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


def test_affine_steps_of_every_length_and_size() -> None:
    """No steps; and a start that is far larger than what comes after."""
    step = lambda h, x: 0.5 * h + x  # noqa: E731
    for length, offsets in ((0, None), (0, torch.tensor([0, 0])), (1, None), (200, None)):
        x = draw(3, length, 2).float()
        options: dict[str, Any] = {"return_final": True, "offsets": offsets}
        for init in (0.0, 1e8):
            want = nonlinear_recurrence(step, x, init, **options)
            got = nonlinear_recurrence(step, x, init, method="newton", **options)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_results_have_memory_of_their_own() -> None:
    x = draw(2, 20, 3)
    step = lambda h, x: torch.tanh(h) + x  # noqa: E731
    found = nonlinear_recurrence(
        step, x, 0.0, lower=lambda h, x: (h, x, h, 0 * x + 1), method="newton"
    )
    memory = {t.untyped_storage().data_ptr() for t in (*found, x)}
    assert len(memory) == 5 and all(t.is_contiguous() for t in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_case
def test_on_a_gpu(name: str) -> None:
    """Values and gradients are the loop's, up to the tolerance; twice."""
    step, init = CASES[name]
    xs = tuple(draw(1, 3000, 40, seed=k).float().cuda().requires_grad_() for k in range(3))
    weights = tuple(draw(40, seed=k).float().cuda().requires_grad_() for k in range(3))
    found = []
    for method in ("loop", "newton", "newton"):
        results = tree_leaves(nonlinear_recurrence(step, xs, init, params=weights, method=method))
        total = torch.stack([t.square().sum() for t in results]).sum()
        grads = torch.autograd.grad(total, [*xs, *weights], allow_unused=True)
        found.append([*results, *(g for g in grads if g is not None)])
    for other in found[1:]:
        for walked, solved in zip(found[0], other, strict=True):
            scale = walked.abs().max().item()
            torch.testing.assert_close(solved, walked, rtol=0, atol=1e-4 * scale)


@pytest.mark.slow
def test_how_it_got_there() -> None:
    """Iterations are few where the step contracts; what does not converge is walked."""
    x = draw(2, 3000, 4)
    watch, found = reports()
    with watch:
        calm = nonlinear_recurrence(lambda h, x: torch.tanh(0.9 * h + x), x, 0.0, method="newton")
        wild = nonlinear_recurrence(
            lambda h, x: 3.9 * h * (1 - h) + 0 * x, x, torch.full((2, 4), 0.3, dtype=F64),
            method="newton",
        )  # fmt: skip
        short = nonlinear_recurrence(
            lambda h, x: torch.tanh(0.9 * h + x), x, 0.0, method="newton", max_iterations=1
        )
    assert 1 < found[0].iterations <= 12 and found[0].walked == 0 and found[0].windows == 8
    assert found[1].walked == 8 and found[2].walked == 8 and found[2].iterations == 1
    loop = nonlinear_recurrence(lambda h, x: torch.tanh(0.9 * h + x), x, 0.0)
    torch.testing.assert_close(calm, loop, rtol=1e-12, atol=1e-12)
    assert torch.equal(short, loop)
    assert wild.isfinite().all()
    assert torch.equal(wild, nonlinear_recurrence(
        lambda h, x: 3.9 * h * (1 - h) + 0 * x, x, torch.full((2, 4), 0.3, dtype=F64)
    ))  # fmt: skip


def test_the_tolerance_holds() -> None:
    x = draw(3, 500, 2)
    step = lambda h, x: torch.sin(1.5 * h) + x  # noqa: E731
    for tolerance in (1e-2, 1e-6, 1e-12):
        h = nonlinear_recurrence(step, x, 0.0, method="newton", tolerance=tolerance)
        before = torch.cat([torch.zeros(3, 1, 2, dtype=F64), h[:, :-1]], 1)
        assert ((h - step(before, x)).abs() / (1 + h.abs())).max() <= tolerance


def test_what_a_loop_keeps() -> None:
    """A NaN or an infinite value in one chain stays there; a state that overflows and comes back is
    that of the loop."""
    x = draw(1, 200, 4)
    x[0, 50, 0], x[0, 60, 1] = torch.nan, torch.inf
    step = lambda h, x: torch.where(x > 2, x, torch.exp(0.5 * h) + x)  # noqa: E731
    walked = nonlinear_recurrence(step, x, 0.0)
    solved = nonlinear_recurrence(step, x, 0.0, method="newton")
    assert walked.isnan().any() and walked.isinf().any() and walked[..., 2:].isfinite().any()
    torch.testing.assert_close(solved, walked, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_other_states() -> None:
    """Complex ones are solved; integers, of which there are no derivatives, are walked."""
    z = torch.complex(draw(2, 60, 3), draw(2, 60, 3, seed=1))
    start = torch.zeros(2, 3, dtype=z.dtype)
    args: Any = (oscillator, (z,), start)
    got = nonlinear_recurrence(*args, params=(1.0,), method="newton")
    torch.testing.assert_close(got, nonlinear_recurrence(*args, params=(1.0,)))
    count = lambda n, x: torch.where(x > 0, n + 1, 0)  # noqa: E731
    x = draw(2, 60)
    got = nonlinear_recurrence(count, x, 0, method="newton")
    assert got.dtype == torch.int64
    assert torch.equal(got, nonlinear_recurrence(count, x, 0))


@pytest.mark.slow(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_floats(dtype: torch.dtype) -> None:
    xs = tuple(draw(2, 300, 5, seed=k).to(dtype) for k in range(3))
    weights = tuple(draw(5, seed=k).to(dtype) for k in range(3))
    args: Any = (gru, xs, 0.0)
    walked, last = nonlinear_recurrence(*args, params=weights, return_final=True)
    solved, end = nonlinear_recurrence(*args, params=weights, return_final=True, method="newton")
    assert solved.dtype == dtype and end.dtype == torch.float32
    torch.testing.assert_close(end, last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(solved, walked)


@pytest.mark.slow
def test_lower_and_empty_axes() -> None:
    xs = tuple(draw(2, 30, 5, seed=k) for k in range(3))
    weights = tuple(draw(5, seed=k) for k in range(3))
    given: Any = {"params": weights, "lower": lambda h, x: {"y": h * x[0], "h": h}}
    for length in (30, 1, 0):
        part = tuple(x[:, :length] for x in xs)
        walked = nonlinear_recurrence(gru, part, 0.5, return_final=True, **given)
        solved = nonlinear_recurrence(gru, part, 0.5, return_final=True, method="newton", **given)
        torch.testing.assert_close(solved, walked)


@pytest.mark.exhaustive
def test_second_derivatives() -> None:
    x, w = draw(1, 6, 2).requires_grad_(), draw(2).requires_grad_()

    def solve(x: Tensor, w: Tensor) -> Any:
        return nonlinear_recurrence(
            lambda h, x, w: torch.tanh(w * h + x), x, 0.1, params=w, method="newton"
        )

    assert torch.autograd.gradcheck(solve, (x, w))
    assert torch.autograd.gradgradcheck(solve, (x, w))


def test_affine_steps() -> None:
    """One iteration is exact; the derivative of a choice may let through what a loop does not."""
    from assocscan.autodiff.newton_operator import derive_newton
    from assocscan.functional.nonlinear.step_call import bind_step, gather

    def is_affine(step: Any, init: Any = 0.0) -> bool:
        call = bind_step(
            gather(step, draw(1, 9, 2), init, (), None, None, 1, None), 1, False, False, None
        )
        assert call.traced.operator is not None
        return derive_newton(call.traced.operator).is_affine

    assert is_affine(lambda h, x: torch.sigmoid(x) * h + x)
    assert is_affine(lambda h, x: 0.5 * (h - x) + x / (1 + x * x))
    assert is_affine(lambda h, x: (0.5 * h[0] + x, x * h[1]), (0.0, 1.0))
    assert not is_affine(lambda h, x: torch.tanh(h) + x)
    assert not is_affine(lambda h, x: torch.where(x > 0, x, h))
    assert not is_affine(lambda h, x: (h[1], 0.5 * h[0] + x), (0.0, 1.0))  # coupled: a filter
    x = draw(3, 200, 2)
    got = nonlinear_recurrence(lambda h, x: torch.sigmoid(x) * h + x, x, 1.0, method="newton")
    want = nonlinear_recurrence(lambda h, x: torch.sigmoid(x) * h + x, x, 1.0)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"method": "guess"}, ScanValueError, "method is 'guess', expected one of auto, loop, n"),
        ({"tolerance": 0.0}, ScanValueError, "tolerance is 0.0, expected a positive number"),
        ({"tolerance": "small"}, ScanTypeError, "tolerance is 'small', expected a number"),
        ({"max_iterations": 0}, ScanValueError, "max_iterations is 0, expected at least 1"),
        ({"max_iterations": 2.5}, ScanTypeError, "max_iterations is 2.5, expected an int"),
    ],
)  # fmt: skip
def test_errors(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nonlinear_recurrence(lambda h, x: h + x, draw(1, 4), 0.0, **options)


def test_what_explain_tells() -> None:
    """Which method runs; on request, what the last call took, which is none before the first."""
    xs = tuple(draw(1, 40, 3, seed=k) for k in range(3))
    weights = tuple(draw(3, seed=k) for k in range(3))

    def step(h: Tensor, x: Any, weights: Any) -> Tensor:
        return gru(h, x, weights)

    def explained(**options: Any) -> Any:
        return explain_recurrence(step, xs, 0.1, params=weights, **options)

    assert explained().engine.startswith("cpu") and explained(last=True).solution == ""
    assert explained(method="newton").engine == "newton"
    assert explained(method="newton", last=True).solution == ""
    nonlinear_recurrence(step, xs, 0.1, params=weights, method="newton")
    assert explained(method="newton").solution == ""
    assert explained(method="newton", last=True).solution.endswith("0 of 3 windows were walked")
    nonlinear_recurrence(step, xs, 0.1, params=weights, method="newton", max_iterations=1)
    few = explained(method="newton", max_iterations=1, last=True)
    assert few.solution == "1 iterations, 3 of 3 windows were walked"
    assert "solution" in str(few)
    assert explained(backend="eager", method="newton").engine == "eager"
