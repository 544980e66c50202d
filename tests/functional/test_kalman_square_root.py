"""The Kalman filter by factors of covariances, in float32 where their condition is 1e8, beside a
loop in float64; values and derivatives otherwise as without it."""

from __future__ import annotations

import math

import pytest
import torch
from kalman_loops import Model, filter_loop
from torch import Tensor

from assocscan import ScanTypeError, kalman_filter

F64 = torch.float64
both_here = pytest.mark.parametrize("backend", ["cpu", "eager"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64)


def turned(*values: float) -> Tensor:
    """A covariance with these eigenvalues, along no axis."""
    turn = torch.linalg.qr(draw(len(values), len(values), seed=5))[0]
    return turn @ torch.diag(torch.tensor(values, dtype=F64)) @ turn.mT


def models() -> dict[str, tuple[Tensor, Model]]:
    T, one = 100, torch.ones(1, 1, dtype=F64)
    two, three, dt = torch.eye(2, dtype=F64), torch.eye(3, dtype=F64), 0.01
    moves = torch.tensor([[1, dt], [0, 1]], dtype=F64)
    speeds = torch.tensor([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]], dtype=F64)
    path = (0.1 * draw(T, 1)).cumsum(0)
    zeros = torch.zeros(2, dtype=F64), torch.zeros(3, dtype=F64)
    return {
        "regression, a prior of 1e8 R": (
            draw(T, 1), Model(three, draw(T, 1, 3), 0 * three, 3e-4 * one, zeros[1], 1e4 * three)
        ),
        "noise": (
            draw(T, 1),
            Model(0.9 * two, draw(1, 2), turned(1, 1e-8), one, zeros[0], turned(1, 1e-8)),
        ),
        "a narrow prior": (
            draw(T, 1), Model(two, draw(1, 2), 1e-6 * two, one, zeros[0], turned(1e4, 1e-4))
        ),
        "velocity": (path, Model(moves, two[:1], speeds, 1e-6 * one, zeros[0], 100 * two)),
    }  # fmt: skip


MODELS = models()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", MODELS)
def test_covariances_stay_semidefinite_in_float32(name: str) -> None:
    y, *model = (t.float() for t in (MODELS[name][0], *MODELS[name][1]))
    means, covariances, total = filter_loop(y.double(), Model(*(t.double() for t in model)))
    found = kalman_filter(y, *model, square_root=True, backend="eager")
    P = found.covariance.double()
    assert torch.equal(P, P.mT)
    least, most = torch.linalg.eigvalsh(P)[:, [0, -1]].unbind(-1)
    assert (least >= -most * torch.finfo(torch.float32).eps).all()
    errors = torch.linalg.matrix_norm(P - covariances) / torch.linalg.matrix_norm(covariances)
    assert (errors <= 1e-6).all()
    assert (found.mean - means).abs().max() < 1e-4 * means.abs().max()
    torch.testing.assert_close(found.log_likelihood.double(), total, rtol=1e-5, atol=0)


def ordinary(T: int = 7, n: int = 2, m: int = 2, varying: bool = True) -> tuple[Tensor, Model]:
    steps = (T,) if varying else ()
    q, unit = draw(*steps, n, n), torch.eye(m, dtype=F64)
    model = Model(draw(*steps, n, n, seed=1) / 2, draw(m, n), q @ q.mT, unit / 2, draw(n),
                  turned(*range(1, n + 1)))  # fmt: skip
    return draw(T, m, seed=2), model


@pytest.mark.thinned(7)
@pytest.mark.parametrize("n,m", [(1, 1), (3, 1), (2, 2), (2, 3)])
def test_values(n: int, m: int) -> None:
    y, model = ordinary(n=n, m=m, varying=n != 3)
    y[3, 0] = y[4] = y[0, -1] = math.nan
    want = filter_loop(y, model)
    for backend in ("eager", "cpu") if (n, m) == (2, 2) else ("eager",):
        for _ in range(2):
            found = kalman_filter(y, *model, square_root=True, backend=backend)
            torch.testing.assert_close(tuple(found), want)


def test_a_singular_model() -> None:
    """Noise of rank 1, exact observations, a start that is known."""
    y, model = ordinary(varying=False)
    model = model._replace(Q=torch.ones(2, 2, dtype=F64), H=model.H[:1], R=model.R[:1, :1] * 0)
    given = y[:, :1], model._replace(covariance=0 * model.covariance)
    given[0][0] = math.nan  # known exactly, so it cannot be observed
    found = kalman_filter(given[0], *given[1], square_root=True, backend="eager")
    torch.testing.assert_close(tuple(found), filter_loop(*given))


@both_here
def test_packed_batches_with_inputs(backend: str) -> None:
    y, model = ordinary()
    y = torch.stack([y, y.flip(0)])
    wide = torch.stack([k * model.covariance for k in (1.0, 3.0, 2.0)])[:, None].expand(3, 2, 2, 2)
    options = {
        "controls": draw(7, 1), "B": draw(2, 1), "observed": draw(2, 7, 2) > -1,
        "offsets": torch.tensor([0, 3, 3, 7]), "backend": backend,
    }  # fmt: skip
    want = kalman_filter(y, *model[:5], wide, **options)
    found = kalman_filter(y, *model[:5], wide, square_root=True, **options)
    torch.testing.assert_close(tuple(found), tuple(want))


@pytest.mark.slow
@both_here
def test_gradients(backend: str) -> None:
    """Beside the loop, of first and repeated calls."""
    y, model = ordinary(5)

    def gradients(by_loop: bool) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (y, *model)]
        if by_loop:
            found = filter_loop(leaves[0], Model(*leaves[1:]))
        else:
            found = kalman_filter(*leaves, square_root=True, backend=backend)
        mixed = sum(
            (t * torch.linspace(-1, 2, t.numel(), dtype=F64).view(t.shape)).sum() for t in found
        )
        return [*torch.autograd.grad(mixed, leaves)]

    want = gradients(True)
    for _ in range(2):
        for k, (g, w) in enumerate(zip(gradients(False), want, strict=True)):
            # A covariance has as many numbers as a triangle: what counts is the symmetric part.
            g, w = (t + t.mT if k in (3, 4, 6) else t for t in (g, w))
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


def test_second_derivatives() -> None:
    y, model = ordinary(3, 1, 1, varying=False)

    def likelihood(noise: Tensor, F: Tensor, square_root: bool) -> Tensor:
        given = model._replace(Q=noise.square(), R=noise.exp(), F=F)
        return kalman_filter(y, *given, square_root=square_root, backend="eager").log_likelihood

    at = torch.tensor([[0.7]], dtype=F64), model.F
    hessians = [
        torch.autograd.functional.hessian(lambda *x, by=by: likelihood(*x, by), at)
        for by in (True, False)
    ]
    torch.testing.assert_close(*hessians)


@pytest.mark.exhaustive
def test_transforms() -> None:
    """vmap over series, and a graph of torch.compile."""
    y, model = ordinary(5)

    def likelihood(y: Tensor) -> Tensor:
        return kalman_filter(y, *model, square_root=True, backend="eager").log_likelihood

    several = torch.stack([y, 2 * y])
    want = torch.stack([likelihood(series) for series in several])
    torch.testing.assert_close(torch.func.vmap(likelihood)(several), want)
    compiled = torch.compile(likelihood, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(y), want[0])


def test_errors() -> None:
    y, model = ordinary()
    with pytest.raises(ScanTypeError, match="square_root"):
        kalman_filter(y, *model, square_root="yes")
