"""The Kalman filter where a step's own noise says little: exact observations, tiny noise, states
without noise, long series in float32. Beside a loop of the same dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kalman_loops import (
    Model,
    filter_loop,
    in_long_double,
    innovations_smoother,
    smoother_loop,
)
from torch import Tensor
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import kalman_filter, rts_smoother

F32, F64 = torch.float32, torch.float64
HERE = [pytest.param(VectorEngine(name, "cpu"), id=name) for name in ("cpu", "eager")]
every_engine = pytest.mark.parametrize("engine", [*HERE, *VECTOR_ENGINES])
either_dtype = pytest.mark.parametrize("dtype", [F32, F64])
Case = tuple[Tensor, Model]


def walk(y: Tensor, R: float, Q: float = 1.0, P: float = 1.0) -> Case:
    one = torch.ones(1, 1, dtype=y.dtype)
    return y[:, None], Model(one, one, Q * one, R * one, one[0] * 0, P * one)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64)


def placed(tensors: tuple[Tensor, ...], device: str) -> list[Tensor]:
    return [t.to(device) for t in tensors]


@pytest.mark.thinned(8)
@every_engine
@either_dtype
def test_an_observed_random_walk(engine: VectorEngine, dtype: torch.dtype) -> None:
    """Exactly, at the first call and later ones, also with y elsewhere in memory and strided."""
    y, model = walk(torch.tensor([1.0, 3.0, 2.0], dtype=dtype), 0.0)
    y, *rest = placed((y, *model), engine.device)
    moved = torch.cat([y[:1], y])[1:]
    strided = torch.cat([y, y], 1)[:, :1]
    with engine.running():
        for given in (y, y, y, moved, strided, y):
            found = kalman_filter(given, *rest, backend=engine.backend)
            torch.testing.assert_close(found.mean, y)
            assert found.covariance.abs().max() < 1e-6
            assert math.isclose(float(found.log_likelihood), -5.756815599, rel_tol=2e-7)


@every_engine
def test_tiny_noise_in_float32(engine: VectorEngine) -> None:
    y, model = walk(noise(30).cumsum(0).float(), 1e-7)
    _, _, total = filter_loop(y, model)
    with engine.running():
        found = kalman_filter(*placed((y, *model), engine.device), backend=engine.backend)
    torch.testing.assert_close(found.log_likelihood.cpu(), total, rtol=5e-7, atol=0)


def outcome(run: Callable[..., tuple[Tensor, ...]], y: Tensor, model: Model) -> tuple[Tensor, ...]:
    """Derivatives of the likelihood, and of a sum of means and covariances."""
    given = [t.clone().requires_grad_() for t in (y, *model)]
    means, covariances, total = run(given[0], Model(*given[1:]))
    mixed = (means * means.detach().cos()).sum() + covariances[-1].sum() + total
    return torch.autograd.grad(mixed, given)


@pytest.mark.thinned(8)
@every_engine
@pytest.mark.parametrize("R", [0.0, 1e-7])
def test_gradients_of_an_observed_random_walk(engine: VectorEngine, R: float) -> None:
    y, model = walk(torch.tensor([1.0, 3.0, 2.0, 2.5], dtype=F64), R)
    want = outcome(filter_loop, y, model)
    with engine.running():
        for _ in range(2):
            got = outcome(
                lambda y, model: kalman_filter(y, *model, backend=engine.backend),
                y.to(engine.device), Model(*placed(model, engine.device)),
            )  # fmt: skip
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g.cpu(), w, rtol=1e-8, atol=1e-8)


def rank_one(*entries: float) -> Tensor:
    column = torch.tensor(entries, dtype=F64)[:, None]
    return column @ column.mT


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=F64)


def first_of(n: int) -> Tensor:
    return torch.eye(n, dtype=F64)[:1]


def states(T: int, n: int, m: int, R: float, rank: int | None = None, vary: bool = False) -> Case:
    """A stable model whose noise has this rank."""
    steps = (T,) if vary else ()
    F = torch.linalg.qr(noise(*steps, n, n))[0] * 0.95
    B = noise(*steps, n, rank or n)
    unit, zero = torch.eye(n, dtype=F64), torch.zeros(n, dtype=F64)
    return noise(T, m, seed=3), Model(
        F, noise(m, n, seed=1), B @ B.mT, R * torch.eye(m, dtype=F64), zero, unit
    )


def regression(T: int, n: int, prior: float) -> Case:
    """Coefficients that stay the same; what is observed varies."""
    H, unit = noise(T, 1, n), torch.eye(n, dtype=F64)
    y = (H @ noise(n, 1, seed=1) + 0.1 * noise(T, 1, 1, seed=2))[..., 0]
    zero, one = torch.zeros(n, dtype=F64), torch.ones(1, 1, dtype=F64)
    return y, Model(unit, H, 0 * unit, 0.01 * one, zero, prior * unit)


def models() -> dict[str, Case]:
    zero, one = torch.zeros(2, dtype=F64), torch.ones(1, 1, dtype=F64)
    unit, first, y = torch.eye(2, dtype=F64), first_of(2), noise(80, 1)
    gaps = y.clone()
    gaps[20:30] = gaps[::7] = math.nan
    moving = Model(matrix([0, 1], [0, 0]), first, rank_one(1, 0.5), 0 * one, zero, unit)
    velocity = matrix([1, 0.1], [0, 1])
    moves, slow = Model(velocity, first, unit, one, zero, unit), rank_one(0, 0.1)
    growing = moves._replace(F=matrix([1.1, 0], [0, 0.9]))
    none, third, three = torch.zeros(3, dtype=F64), first_of(3), torch.eye(3, dtype=F64)
    arma = matrix([0.5, 1, 0], [-0.3, 0, 1], [0.2, 0, 0])
    seasons = matrix([-1, -1, -1], [1, 0, 0], [0, 1, 0])
    two = states(80, 3, 2, 1.0)
    exact_and_noisy = torch.diag(torch.tensor([0.0, 1.0], dtype=F64))
    squared, shocks = rank_one(1, 1), noise(81, 1)
    return {
        "AR(2)": (y, moving._replace(F=matrix([1.5, -0.7], [1, 0]), Q=rank_one(1, 0))),
        "ARMA(1, 1)": (y, moving._replace(F=matrix([0.8, 1], [0, 0]))),
        "ARMA(3, 2)": (y, Model(arma, third, rank_one(1, 0.4, 0.3), 0 * one, none, three)),
        "MA(1), not invertible": (
            shocks[1:] + shocks[:-1],
            moving._replace(Q=squared, covariance=squared + rank_one(1, 0)),
        ),
        "MA(1) with gaps": (gaps, moving),
        "seasons": (y, Model(seasons, third, rank_one(1, 0, 0), 0 * one, none, three)),
        "velocity": (y / 10, moves._replace(Q=slow, R=0 * one)),
        "velocity, nearly exact": (y, moves._replace(Q=slow, R=1e-7 * one)),
        "no noise of states": (y, moves._replace(Q=0 * unit)),
        "hardly observed": (y, growing._replace(H=matrix([1e-3, 1]))),
        "not observed": (y, growing._replace(H=matrix([0, 1]))),
        "a known start": (y, moves._replace(covariance=0 * unit)),
        **{
            f"a start of {known}, precise": (
                y,
                moves._replace(
                    F=matrix([1, 1], [0, 1]),
                    Q=rank_one(0, 1e4),
                    R=1e-8 * one,
                    covariance=known * unit,
                ),
            )
            for known in (0.0, 1e-8, 1.0)
        },
        "one exact, one noisy": (two[0], two[1]._replace(R=exact_and_noisy)),
        "of steps": states(40, 3, 1, 0.0, 1, vary=True),
        "of steps, all exact": states(40, 2, 2, 0.0, vary=True),
        "regression": regression(100, 3, 1.0),
        "regression, a wide prior": regression(100, 4, 1e3),
        "regression, a wider prior": regression(100, 2, 1e5),
        **{f"n = {n}": states(60, n, 1, 0.0, 1) for n in range(1, 7)},
    }


MODELS = models()


def close(found: Tensor, loop: Tensor, exact: Tensor, scale: Tensor) -> None:
    """The error is at most thirty times that of a loop in float32, by which it is scaled for
    float64; that of most models is below ten times."""
    error, usual = ((t.double() - exact).abs().max() for t in (found, loop))
    eps = torch.finfo(found.dtype).eps
    assert error <= eps / torch.finfo(F32).eps * 30 * usual + 20 * eps * scale


def check(y: Tensor, model: Model, dtype: torch.dtype, backend: str) -> None:
    rounded = [t.to(dtype) for t in (y, *model)]
    y, *rest = (t.double() for t in rounded)
    exact = filter_loop(y, Model(*rest))
    loop = filter_loop(y.float(), Model(*(t.float() for t in rest)))
    sizes = [t.abs().max() for t in (exact[0], exact[2], exact[1], rest[2], rest[5])]
    scales = sizes[0], torch.stack(sizes[2:]).max(), sizes[1]
    found = kalman_filter(*rounded, backend=backend)
    for one, other, want, scale in zip(found, loop, exact, scales, strict=True):
        close(one, other, want, scale)


@pytest.mark.thinned(7)
@either_dtype
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, backend: str, dtype: torch.dtype) -> None:
    y, model = MODELS[name]
    if backend == "cpu" and len(model.mean) > 4:
        pytest.skip("larger inverses run eagerly")
    check(y, model, dtype, backend)


def precise(late: bool) -> dict[str, Case]:
    """Precise observations of states that were unknown before. late: the first 50 are missing."""
    one, dt = torch.ones(1, 1, dtype=F64), 0.1
    trend = matrix([1, 1], [0, 1])
    moved = matrix([1, dt, dt * dt / 2], [0, 1, dt], [0, 0, 1])
    found = {}
    for name, F, q, R, P in (
        ("trend, little noise", trend, [1e-6, 1e-7], 1e-6, 1.0),
        ("trend, much noise", trend, [1e3, 1e2], 1e-6, 1.0),
        ("acceleration", moved, [1e-8, 1e-8, 1e-4], 1e-6, 10.0),
        ("position", one, [1e-2], 1e-3, 1e6),
    ):
        n = len(F)
        Q, unit = torch.diag(torch.tensor(q, dtype=F64)), torch.eye(n, dtype=F64)
        x, path = noise(n, seed=1), []
        for step in noise(200, n, seed=2) @ Q.sqrt():
            x = F @ x + step
            path.append(x[:1])
        y = torch.stack(path) + R**0.5 * noise(200, 1, seed=3)
        y[: 50 if late else 0] = math.nan
        found[name] = y, Model(F, first_of(n), Q, R * one, 0 * unit[0], P * unit)
    return found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", precise(False))
def test_float32_is_as_exact_as_a_loop_on_cpus(name: str, late: bool, backend: str) -> None:
    """Elements in float32 would lose all digits here; they are float64."""
    y, model = precise(late)[name]
    y, *rest = (t.float() for t in (y, *model))
    wide = y.double(), Model(*(t.double() for t in rest))
    exact, loop = filter_loop(*wide), filter_loop(y, Model(*rest))
    smooth, smooth_loop = smoother_loop(*exact[:2], wide[1]), smoother_loop(*loop[:2], Model(*rest))
    for _ in range(2):
        found = kalman_filter(y, *rest, backend=backend)
        both = rts_smoother(found.mean, found.covariance, rest[0], rest[2], backend=backend)
        for got, of_loop, want in zip(
            (*found, *both), (*loop, *smooth_loop), (*exact, *smooth), strict=True
        ):
            assert got.dtype == F32
            size = want.abs().amax(0)
            error, usual = (((t - want).abs() / size).max() for t in (got, of_loop))
            assert error <= max(2 * usual, 5e-7), (error, usual)


SMOOTH = (
    "AR(2)",
    "ARMA(1, 1)",
    "MA(1) with gaps",
    "one exact, one noisy",
    "of steps",
    "n = 1",
    "n = 5",
)


SLOW = ("of steps", "one exact, one noisy")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.exhaustive] if n in SLOW else []) for n in SMOOTH],
)
def test_gradients_of_models(name: str) -> None:
    y, model = MODELS[name]
    y = y[:12].contiguous()
    model = Model(*(t[:12] if t.dim() == 3 else t for t in model))
    seen = ~y.isnan()
    want = outcome(filter_loop, y, model)
    backend = "eager" if len(model.mean) > 4 else "cpu"
    for _ in range(2):
        got = outcome(lambda y, model: kalman_filter(y, *model, backend=backend), y, model)
        torch.testing.assert_close(got[0][seen], want[0][seen], rtol=1e-6, atol=1e-6)
        for k, (g, w) in enumerate(zip(got[1:], want[1:], strict=True)):
            # A covariance has as many numbers as a triangle: what counts is the symmetric part.
            g, w = (t + t.mT if k in (2, 3, 5) else t for t in (g, w))
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-6 * float(w.abs().max()) + 1e-9)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", ["ARMA(1, 1)", "MA(1) with gaps", "of steps", "regression"])
def test_packed_sequences(name: str, backend: str) -> None:
    """Some of them empty; each with its own start, in mean and covariance."""
    y, model = MODELS[name]
    offsets = torch.tensor([0, 0, 1, 9, 9, 25, len(y), len(y)])
    starts = noise(len(offsets) - 1, len(model.mean))
    scales = torch.tensor([1.0, 2.0, 0.5, 1.0, 10.0, 100.0, 1.0], dtype=F64)
    wide = scales[:, None, None] * model.covariance
    found = kalman_filter(y, *model[:4], starts, wide, offsets=offsets, backend=backend)
    for s, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start == end:
            assert found.log_likelihood[s] == 0
            continue
        part = slice(start, end)
        F, H, Q = (t[part] if t.dim() == 3 else t for t in model[:3])
        want = filter_loop(y[part], Model(F, H, Q, model.R, starts[s], wide[s]))
        got = found.mean[part], found.covariance[part], found.log_likelihood[s]
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AR(2)", "of steps", "regression"])
def test_batches_with_their_own_starts(name: str) -> None:
    """Of one series and one model, with several covariances; called twice."""
    y, model = MODELS[name]
    wide = torch.tensor([1.0, 100.0], dtype=F64)[:, None, None] * model.covariance
    for _ in range(2):
        found = kalman_filter(y.expand(2, *y.shape), *model[:5], wide)
        for k in range(2):
            want = filter_loop(y, model._replace(covariance=wide[k]))
            got = found.mean[k], found.covariance[k], found.log_likelihood[k]
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("R, length", [(0.0, 100000), (1e-7, 30000)])
def test_long_series_in_float32(R: float, length: int) -> None:
    check(*walk(noise(length).cumsum(0), R), F32, "cpu")
    y, model = MODELS["velocity"]
    y = noise(length // 5).cumsum(0)[:, None] / 100  # a loop of matrices takes its time
    check(y, model._replace(R=R + 0 * model.R, Q=model.Q + 1e-4 * torch.eye(2)), F32, "cpu")


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", ["AR(2)", "n = 1", "n = 3", "velocity, nearly exact"])
def test_smoothers(name: str, backend: str) -> None:
    """What exact observations leave has a singular covariance. Backwards, the covariances of some
    models (n = 3 here) then lose all digits, and means do not."""
    y, model = MODELS[name]
    y = y[:30]
    mean, covariance = innovations_smoother(y, model)
    found = kalman_filter(y, *model, backend=backend)
    got = rts_smoother(*found[:2], model.F, model.Q, backend=backend)
    torch.testing.assert_close(got.mean, mean, rtol=1e-6, atol=1e-6)
    if name != "n = 3":
        torch.testing.assert_close(got.covariance, covariance, rtol=1e-6, atol=1e-6)


def test_gradients_of_smoothers() -> None:
    """Finite, also where covariances are singular."""
    y, model = MODELS["AR(2)"]
    given = [t.clone().requires_grad_() for t in (*filter_loop(y, model)[:2], model.F, model.Q)]
    smoothed = rts_smoother(*given)
    gradients = torch.autograd.grad(smoothed.mean.sum() + smoothed.covariance.sum(), given)
    assert all(g.isfinite().all() for g in gradients)
    exact = walk(noise(6), 0.5)
    means, covariances, _ = filter_loop(*exact)

    def smoothed_of(run: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (means, covariances, exact[1].F, exact[1].Q)]
        mean, covariance = run(*leaves)
        return torch.autograd.grad((mean * mean).sum() + covariance.sum(), leaves)

    def loop(m: Tensor, P: Tensor, F: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        return smoother_loop(m, P, exact[1]._replace(F=F, Q=Q))

    torch.testing.assert_close(smoothed_of(rts_smoother), smoothed_of(loop))


@either_dtype
@pytest.mark.parametrize("square_root", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_the_smoother_of_an_exactly_observed_arma(
    backend: str, square_root: bool, dtype: torch.dtype
) -> None:
    """Products of gains grow by 1e50, as the noise of the moving average runs backwards."""
    F = matrix([1.2, -0.5, 0.2], [1, 0, 0], [0, 1, 0])
    H, Q, none = matrix([1, 0.5, 0.3]), torch.diag(torch.tensor([1.0, 0, 0], dtype=F64)), F[:1, 0]
    x, y = none.expand(3) * 0, []
    for shock in noise(200):
        x = F @ x + Q[0] * shock
        y.append(H @ x)
    model = Model(F, H, Q, 0 * Q[:1, :1], 0 * x, torch.eye(3, dtype=F64))
    series, *given = (t.to(dtype) for t in (torch.stack(y), *model))
    F, H, Q, *_ = given
    found = kalman_filter(series, *given, square_root=square_root, backend=backend)
    mean = rts_smoother(found.mean, found.covariance, F, Q, backend=backend).mean
    near = 1e-6 if dtype == F64 else 1e-5
    torch.testing.assert_close(mean @ H.mT, series, rtol=0, atol=near)
    # The start is forgotten, and what is known is not smoothed.
    torch.testing.assert_close(mean[50:], found.mean[50:], rtol=0, atol=near)


@pytest.mark.parametrize("prior", [1e2, 1e5, 1e8])
@pytest.mark.parametrize("q, r", [(1e-6, 1e-6), (1e-4, 1.0), (1.0, 1.0)])
def test_smoother_after_a_wide_start(q: float, r: float, prior: float) -> None:
    """A trend, in float64, with a first covariance far above all later ones. A loop loses digits of
    the first steps."""
    one, unit = torch.ones(1, 1, dtype=F64), torch.eye(2, dtype=F64)
    y = noise(60, 1).cumsum(0)
    start = torch.zeros(2, dtype=F64), prior * unit
    model = Model(matrix([1, 1], [0, 1]), first_of(2), rank_one(0, q**0.5), r * one, *start)
    exact, loop = in_long_double(y, model), in_long_double(y, model, np.float64)
    filtered = kalman_filter(y, *model)
    found = rts_smoother(filtered.mean, filtered.covariance, model.F, model.Q)
    for one, other, want in zip(found, loop, exact, strict=True):
        error, usual = (np.abs(np.asarray(t) - want).max(0) for t in (one, other))
        assert (error <= 10 * usual + 1e-13 * np.abs(want).max(0)).all()
