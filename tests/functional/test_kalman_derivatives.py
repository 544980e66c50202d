"""Derivatives of derivatives of Kalman filters and smoothers, in forward mode too.

Each second derivative is taken in four ways, which agree where none of them loses a term; finite
differences say that it is right.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp

from assocscan import kalman_filter, rts_smoother

F64 = torch.float64
ONE = torch.ones(1, 1, dtype=F64)


def smoothed(size: int) -> Callable[[Tensor], Tensor]:
    """A sum of the means, as a function of the noise of the steps."""
    generator = torch.Generator().manual_seed(size)
    mean = torch.randn(4, size, generator=generator, dtype=F64)
    covariance = torch.eye(size, dtype=F64).expand(4, size, size)
    F = 0.5 * torch.randn(size, size, generator=generator, dtype=F64) + torch.eye(size, dtype=F64)
    return lambda q: rts_smoother(mean, covariance, F, q * torch.eye(size, dtype=F64)).mean.sum()


def likelihood(q: Tensor) -> Tensor:
    y = torch.tensor([[1.0], [2.0]], dtype=F64)
    result: Tensor = kalman_filter(
        y, ONE, ONE, ONE, q * ONE, torch.zeros(1, dtype=F64), ONE
    ).log_likelihood
    return result


CASES = {
    "smoother, one state": smoothed(1), "smoother, four states": smoothed(4), "filter": likelihood,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")  # of four states
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("noise", [1.0, 0.7])
def test_second_derivatives_agree(name: str, noise: float) -> None:
    f, q = CASES[name], torch.tensor(noise, dtype=F64)
    one, step = torch.ones_like(q), 1e-4
    wanted = (grad(f)(q + step) - grad(f)(q - step)) / (2 * step)
    found = [
        grad(grad(f))(q), jvp(grad(f), (q,), (one,))[1],
        grad(lambda z: jvp(f, (z,), (one,))[1])(q), jacfwd(jacfwd(f))(q),
    ]  # fmt: skip
    for value in found:
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-7)
