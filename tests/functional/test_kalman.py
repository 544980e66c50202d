"""Kalman filter and RTS smoother against a plain loop, on the Nile and on random models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kalman_loops import Model, filter_loop, smoother_loop
from torch import Tensor

from assocscan import ScanTypeError, ScanValueError, kalman_filter, rts_smoother
from assocscan.cli.data import nile

F64 = torch.float64
NAN = math.nan


def local_level() -> tuple[Tensor, Model]:
    """Durbin and Koopman, section 2.2.2, with their variances and a wide prior."""
    one = torch.ones(1, 1, dtype=F64)
    prior = (torch.zeros(1, dtype=F64), 1e7 * one)
    return nile()[1][:, None], Model(one, one, 1469.1 * one, 15099.0 * one, *prior)


def random_model(T: int, n: int, m: int, varying: bool = False) -> tuple[Tensor, Model]:
    generator = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    steps = (T,) if varying else ()
    q, r, p = draw(*steps, n, n), draw(m, m), draw(n, n)
    unit = torch.eye(m, dtype=F64)
    return draw(T, m), Model(
        draw(*steps, n, n) / 2, draw(m, n), q @ q.mT, r @ r.mT + unit, draw(n), p @ p.mT
    )


def check(y: Tensor, model: Model, rtol: float = 1e-9) -> None:
    means, covariances, total = filter_loop(y, model)
    found = kalman_filter(y, *model)
    torch.testing.assert_close(found.mean, means, rtol=rtol, atol=rtol)
    torch.testing.assert_close(found.covariance, covariances, rtol=rtol, atol=rtol)
    torch.testing.assert_close(found.log_likelihood, total, rtol=rtol, atol=rtol)
    smoothed = rts_smoother(found.mean, found.covariance, model.F, model.Q)
    wanted = smoother_loop(means, covariances, model)
    torch.testing.assert_close(tuple(smoothed), wanted, rtol=rtol, atol=rtol)


def test_the_nile() -> None:
    y, model = local_level()
    check(y, model, 1e-12)
    y = y.clone()
    y[20:40] = NAN
    check(y, model, 1e-12)


def test_the_nile_against_statsmodels() -> None:
    structural = pytest.importorskip("statsmodels.tsa.statespace.structural")
    y, model = local_level()
    level = structural.UnobservedComponents(y[:, 0].numpy(), "local level")
    level.ssm.initialize_known(model.mean.numpy(), model.covariance.numpy())
    wanted = level.smooth([15099.0, 1469.1])
    found = kalman_filter(y, *model)
    smoothed = rts_smoother(found.mean, found.covariance, model.F, model.Q)
    pairs = (
        (found.mean[:, 0], wanted.filtered_state[0]),
        (found.covariance[:, 0, 0], wanted.filtered_state_cov[0, 0]),
        (smoothed.mean[:, 0], wanted.smoothed_state[0]),
        (smoothed.covariance[:, 0, 0], wanted.smoothed_state_cov[0, 0]),
        (found.log_likelihood, wanted.llf_obs.sum()),
    )
    for got, want in pairs:
        torch.testing.assert_close(got, torch.as_tensor(want, dtype=F64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("varying", [False, True])
def test_two_states_and_two_observations(varying: bool) -> None:
    y, model = random_model(25, 2, 2, varying)
    y[3, 0] = y[7] = NAN
    check(y, model)


def test_a_batch_of_series() -> None:
    y, model = local_level()
    several = torch.stack([y, 2 * y, y.flip(0)])
    found = kalman_filter(several, *model)
    for k, series in enumerate(several):
        alone = kalman_filter(series, *model)
        torch.testing.assert_close(found.mean[k], alone.mean)
        torch.testing.assert_close(found.log_likelihood[k], alone.log_likelihood)


def test_gradient_of_the_likelihood() -> None:
    """In every parameter, of two series with a gap."""
    y, model = local_level()
    y = y[:12].clone() / 1000
    y[4] = NAN
    model = Model(*(t * 1e-6 if k in (2, 3, 5) else t for k, t in enumerate(model)))
    parameters = [t.clone().requires_grad_() for t in model]
    got = torch.autograd.grad(kalman_filter(y, *parameters).log_likelihood, parameters)
    again = [t.clone().requires_grad_() for t in model]
    want = torch.autograd.grad(filter_loop(y, Model(*again))[2], again)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_gradients_of_four_states(recwarn: pytest.WarningsRecorder) -> None:
    """A point that moves in the plane, of which its place is observed: by a generated kernel, in a
    first and a repeated call."""
    unit, zero = torch.eye(2, dtype=F64), torch.zeros(2, 2, dtype=F64)
    noise = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    F = torch.cat((torch.cat((unit, 0.1 * unit), 1), torch.cat((zero, 0.95 * unit), 1)))
    H, wide = torch.cat((unit, zero), 1), torch.eye(4, dtype=F64)
    y = noise.cumsum(0)[:, :2].clone()
    y[7, 0] = y[8] = NAN
    model = Model(F, H, 0.1 * wide, 0.5 * unit, noise[0], 2 * wide)
    for scale in (1.0, 0.5):
        got, want = (
            differentiated(run, y, [scale * t for t in model])
            for run in (kalman_filter, lambda y, *model: filter_loop(y, Model(*model)))
        )
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            g, w = (t + t.mT if k in (2, 3, 5) else t for t in (g, w))
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)
    assert not recwarn.list


def differentiated(run: Any, y: Tensor, model: list[Tensor]) -> tuple[Tensor, ...]:
    """Of the log-likelihood and a sum of the means, in everything that the model has."""
    parameters = [t.clone().requires_grad_() for t in model]
    means, _, likelihood = run(y, *parameters)
    return torch.autograd.grad(likelihood + means.sin().sum(), parameters)


def test_errors() -> None:
    y, model = local_level()
    with pytest.raises(ScanValueError, match="F has shape"):
        kalman_filter(y, torch.eye(3, dtype=F64)[:2], *model[1:])
    with pytest.raises(ScanTypeError, match="dtype"):
        kalman_filter(y.float(), *model)
    with pytest.raises(ScanTypeError, match="float"):
        rts_smoother(1.0, *model[:3])
