"""The Kalman filter and smoother with known inputs, and with a mask of what was observed, beside
loops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import kalman_loops
import pytest
import torch
from kalman_loops import Model, at
from torch import Tensor
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import ScanTypeError, ScanValueError, kalman_filter, rts_smoother

F64 = torch.float64
HERE = [pytest.param(VectorEngine(name, "cpu"), id=name) for name in ("cpu", "eager")]
every_engine = pytest.mark.parametrize("engine", [*HERE, *VECTOR_ENGINES])
both_here = pytest.mark.parametrize("backend", ["cpu", "eager"])


class Driven(NamedTuple):
    """A series [T, m], its model, the inputs [T, k] and what they do, [n, k] or [T, n, k]."""

    y: Tensor
    model: Model
    controls: Tensor
    B: Tensor


def case(T: int = 12, n: int = 2, m: int = 2, k: int = 2, varying: bool = False) -> Driven:
    generator = torch.Generator().manual_seed(T + n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    steps = (T,) if varying else ()
    q, unit = draw(*steps, n, n), torch.eye(m, dtype=F64)
    model = Model(
        draw(*steps, n, n) / 2, draw(m, n), q @ q.mT, unit / 2, draw(n), torch.eye(n, dtype=F64)
    )
    return Driven(draw(T, m), model, draw(T, k), draw(*steps, n, k))


def shifts(given: Driven) -> Tensor:
    """B u at each step [T, n]; that of step 0, to which no step leads, is 0."""
    _, _, u, B = given
    steps = [at(B, t) @ u[t] for t in range(1, len(given.y))]
    return torch.stack([torch.zeros_like(given.model.mean), *steps])


def filter_loop(given: Driven, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kalman_loops.filter_loop(given.y, given.model, seen, shifts(given))


def smoother_loop(means: Tensor, covariances: Tensor, given: Driven) -> tuple[Tensor, Tensor]:
    return kalman_loops.smoother_loop(means, covariances, given.model, shifts(given))


def all_seen(given: Driven) -> Tensor:
    return torch.ones_like(given.y) > 0


def both(given: Driven, **options: Any) -> tuple[Tensor, ...]:
    """Filtered means and covariances, the likelihood, smoothed means and covariances."""
    inputs = {"controls": given.controls, "B": given.B}
    packed = {k: v for k, v in options.items() if k != "observed"}
    means, covariances, total = kalman_filter(given.y, *given.model, **inputs, **options)
    F, Q = given.model.F, given.model.Q
    return means, covariances, total, *rts_smoother(means, covariances, F, Q, **inputs, **packed)


def loops(given: Driven, seen: Tensor) -> tuple[Tensor, ...]:
    means, covariances, total = filter_loop(given, seen)
    return means, covariances, total, *smoother_loop(means, covariances, given)


@both_here
@pytest.mark.parametrize("varying", [False, True])
def test_values(varying: bool, backend: str) -> None:
    """Also with an input of NaN at the first step, to which no step leads."""
    given = case(varying=varying)
    want = loops(given, all_seen(given))
    torch.testing.assert_close(both(given, backend=backend), want)
    given.controls[0] = math.nan
    for _ in range(2):
        torch.testing.assert_close(both(given, backend=backend), want)
    still = given._replace(controls=0 * given.controls[1:2])  # one input for all steps
    plain = kalman_filter(given.y, *given.model, backend=backend)
    torch.testing.assert_close(both(still, backend=backend)[:3], tuple(plain))


@pytest.mark.exhaustive
def test_larger_models() -> None:
    given = case(n=5, k=1)
    torch.testing.assert_close(both(given, backend="eager"), loops(given, all_seen(given)))


@pytest.mark.thinned(7)
@both_here
def test_an_unstable_model_that_is_steered(backend: str) -> None:
    """Inputs keep small what would grow by 3^40 without them: in float32 as exact as a loop."""
    T, one = 40, torch.ones(1, 1, dtype=F64)
    noise = torch.randn(T, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    x, states, inputs = torch.ones((), dtype=F64), [], []
    for t in range(T):
        u = -3 * x
        x = 3 * x + u + noise[t, 0] if t else x
        states.append(x)
        inputs.append(u)
    y = torch.stack(states)[:, None] + 0.1 * noise[:, 1:]
    model = Model(3 * one, one, one, 0.01 * one, one[0], one)
    given = Driven(y, model, torch.stack(inputs)[:, None], one)
    single = Driven(y.float(), Model(*(t.float() for t in model)), given.controls.float(),
                    one.float())  # fmt: skip
    seen = all_seen(given)
    exact, loop = filter_loop(given, seen)[0], filter_loop(single, seen)[0]
    found = both(single, backend=backend)[0]
    assert (found - exact).abs().max() < 10 * (loop - exact).abs().max()


def gradients(run: Any, given: Driven, *rest: Any, **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (given.y, *given.model, given.controls, given.B)]
    found = run(Driven(leaves[0], Model(*leaves[1:7]), *leaves[7:]), *rest, **options)
    mixed = sum(
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in found
    )
    return [*torch.autograd.grad(mixed, leaves)]


@pytest.mark.slow
@pytest.mark.thinned(7)
@both_here
@pytest.mark.parametrize("varying", [False, True])
def test_gradients(varying: bool, backend: str) -> None:
    """In the inputs, in B and in everything else; of first and repeated calls."""
    given = case(T=6, varying=varying)
    want = gradients(loops, given, all_seen(given))
    for _ in range(2):
        got = gradients(both, given, backend=backend)
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            # A covariance has as many numbers as a triangle: what counts is the symmetric part.
            g, w = (t + t.mT if k in (3, 4, 6) else t for t in (g, w))
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


@pytest.mark.exhaustive
def test_second_derivatives() -> None:
    """Of the likelihood, in inputs and B, which reach it through the means alone."""
    given = case(T=3)
    inputs = [t.requires_grad_() for t in (given.controls, given.B)]

    def likelihood(controls: Tensor, B: Tensor) -> Tensor:
        return kalman_filter(given.y, *given.model, controls=controls, B=B).log_likelihood

    assert torch.autograd.gradgradcheck(likelihood, inputs)


@pytest.mark.slow
@both_here
def test_masks(backend: str) -> None:
    """Of single numbers and of rows; what was not observed may hold anything."""
    given = case()
    seen = torch.rand(12, 2, generator=torch.Generator().manual_seed(1)) > 0.3
    seen[0, 1] = seen[4] = False
    for mask in (seen, seen[:, 0]):
        every = mask if mask.dim() == 2 else mask[:, None].expand(12, 2)
        want = loops(given, every)
        for junk in (math.nan, math.inf, 5.0):
            hidden = given._replace(y=torch.where(every, given.y, junk))
            got = both(hidden, observed=mask, backend=backend)
            torch.testing.assert_close(got, want)
    gaps = given._replace(y=torch.where(seen, given.y, math.nan))
    by_nan = kalman_filter(gaps.y, *gaps.model, backend=backend)
    by_mask = kalman_filter(given.y, *given.model, observed=seen, backend=backend)
    torch.testing.assert_close(by_nan, by_mask)
    wanted = gradients(loops, given, seen)
    got = gradients(both, given, observed=seen, backend=backend)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[7:], wanted[7:])


@both_here
def test_masks_of_batches(backend: str) -> None:
    given = case(T=5)
    y = torch.stack([given.y, given.y.flip(0)])
    seen = torch.tensor([[True, False, True, True, True], [False, True, True, False, True]])
    found = kalman_filter(y, *given.model, observed=seen, backend=backend)
    for k in range(2):
        still = given._replace(y=y[k], controls=0 * given.controls)
        want = filter_loop(still, seen[k, :, None].expand(5, 2))
        torch.testing.assert_close((found.mean[k], found.covariance[k], found[2][k]), want)


@both_here
def test_nan_that_was_observed(backend: str) -> None:
    """Makes what depends on it NaN, as in a loop: not covariances, nor another sequence."""
    given = case()
    given.y[4, 0] = math.nan
    offsets = torch.tensor([0, 7, 12])
    found = kalman_filter(
        given.y, *given.model, observed=all_seen(given), offsets=offsets, backend=backend
    )
    assert found.mean[4:7].isnan().all() and found.mean[:4].isfinite().all()
    assert found.mean[7:].isfinite().all() and found.covariance.isfinite().all()
    assert found.log_likelihood.isnan().tolist() == [True, False]


@both_here
def test_packed_sequences(backend: str) -> None:
    """The input at the first step of each is not read. Some are empty."""
    given = case(varying=True)
    offsets = torch.tensor([0, 0, 5, 6, 12])
    seen = torch.arange(24).view(12, 2) % 4 != 1
    given.controls[5] = math.nan
    found = both(given, observed=seen, offsets=offsets, backend=backend)
    for s, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if begin == end:
            continue
        F, H, Q, *rest = given.model
        part = Driven(
            given.y[begin:end], Model(F[begin:end], H, Q[begin:end], *rest),
            given.controls[begin:end], given.B[begin:end],
        )  # fmt: skip
        want = loops(part, seen[begin:end])
        for k in (0, 1, 3, 4):
            torch.testing.assert_close(found[k][begin:end], want[k])
        torch.testing.assert_close(found[2][s], want[2])


@every_engine
def test_every_engine(engine: VectorEngine) -> None:
    given = case(T=9, n=1, m=1, k=1)
    seen = torch.arange(9) % 3 != 1
    want = filter_loop(given, seen[:, None])
    y, *model = (t.to(engine.device) for t in (given.y, *given.model))
    inputs = {"controls": given.controls.to(engine.device), "B": given.B.to(engine.device)}
    with engine.running():
        for _ in range(2):
            found = kalman_filter(
                y, *model, **inputs, observed=seen.to(engine.device), backend=engine.backend
            )
            torch.testing.assert_close(tuple(t.cpu() for t in found), want)


def test_the_smoother_reads_no_step_before_the_first() -> None:
    given = case(varying=True)
    means, covariances, _ = filter_loop(given, all_seen(given))
    want = smoother_loop(means, covariances, given)
    for t in (given.model.F, given.model.Q, given.B):
        t[0] = math.nan
    leaves = [t.requires_grad_() for t in (given.model.F, given.model.Q, given.controls)]
    found = rts_smoother(means, covariances, *leaves[:2], controls=leaves[2], B=given.B[1:2])
    again = smoother_loop(means, covariances, given._replace(B=given.B[1:2].expand_as(given.B)))
    torch.testing.assert_close(tuple(found), again)
    torch.testing.assert_close(found.covariance, want[1])
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.mean.sum(), leaves))


def test_wrong_inputs() -> None:
    y, model, controls, B = case()
    with pytest.raises(ScanValueError, match="B is missing"):
        kalman_filter(y, *model, controls=controls)
    with pytest.raises(ScanValueError, match="controls is missing"):
        rts_smoother(y, torch.eye(2, dtype=F64), model.F, model.Q, B=B)
    with pytest.raises(ScanValueError, match=r"B has shape \[3, 2\], expected \[2, 2\]"):
        kalman_filter(y, *model, controls=controls, B=torch.ones(3, 2, dtype=F64))
    with pytest.raises(ScanValueError, match="controls has shape"):
        kalman_filter(y, *model, controls=controls[:5], B=B)
    with pytest.raises(ScanTypeError, match=r"controls has dtype torch.float32"):
        kalman_filter(y, *model, controls=controls.float(), B=B)
    with pytest.raises(ScanTypeError, match=r"observed has dtype torch.int64, expected.*bool"):
        kalman_filter(y, *model, observed=torch.ones(12).long())
    with pytest.raises(ScanValueError, match=r"observed has shape \[5\], expected \[12\]"):
        kalman_filter(y, *model, observed=torch.ones(5) > 0)


UNREAD = {"inf": math.inf, "huge": 1e25, "nan": math.nan}


@pytest.mark.parametrize("what", UNREAD)
@pytest.mark.parametrize("square_root", [False, True])
def test_no_step_reaches_earlier_ones_or_other_sequences(what: str, square_root: bool) -> None:
    """F and Q of the first steps of sequences are not read; a later one spoils what comes behind
    it in its own sequence."""
    T, offsets = 12, torch.tensor([0, 5, 6, 12])
    given = case(T, n=3, varying=True)
    y, F, H, Q, *rest = given.y, *given.model
    want = [
        kalman_loops.filter_loop(y[a:b], Model(F[a:b], H, Q[a:b], *rest))
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    for k in (0, 5, 6):
        F[k], Q[k] = UNREAD[what], UNREAD[what]
    options: Any = {"offsets": offsets, "backend": "eager", "square_root": square_root}
    found = kalman_filter(y, F, H, Q, *rest, **options)
    torch.testing.assert_close(found.mean, torch.cat([w[0] for w in want]))
    torch.testing.assert_close(found.log_likelihood, torch.stack([w[2] for w in want]))
    if square_root and what != "huge":
        return  # eigh refuses them in steps that count
    Q[9] = UNREAD[what]
    found = kalman_filter(y, F, H, Q, *rest, **options)
    torch.testing.assert_close(found.mean[:9], torch.cat([w[0] for w in want])[:9])
    torch.testing.assert_close(found.log_likelihood[:2], torch.stack([w[2] for w in want])[:2])


def test_a_large_step_costs_the_others_no_digits() -> None:
    """float32: noise of 10^12 in one step, beside the loop without it."""
    F, H = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    Q = (0.01 * torch.eye(2)).expand(400, 2, 2).clone()
    y = torch.randn(400, 1, generator=torch.Generator().manual_seed(1)).cumsum(0)
    rest = torch.eye(1), torch.zeros(2), torch.eye(2)
    Q[300] *= 1e14
    offsets = torch.tensor([0, 200, 400])
    found = kalman_filter(y, F, H, Q, *rest, offsets=offsets, backend="eager").mean
    for a, b in ((0, 200), (200, 300)):
        part = Model(*(t.double() for t in (F, H, Q[a:b], *rest)))
        want = kalman_loops.filter_loop(y[a:b].double(), part)[0]
        assert (found[a:b] - want).abs().max() < 1e-6 * want.abs().max()


def test_under_autocast() -> None:
    y, model, *inputs = case(varying=True)
    given = Driven(y.float(), Model(*(t.float() for t in model)), *(t.float() for t in inputs))
    want = both(given, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = both(given, backend="eager")
    for f, w in zip(found, want, strict=True):
        assert f.dtype == torch.float32 and torch.equal(f, w)
