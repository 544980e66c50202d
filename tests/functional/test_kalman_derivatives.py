"""Derivatives of derivatives of Kalman filters and smoothers, in forward mode too.

Each second derivative is taken in four ways, which agree where none of them loses a term; finite
differences say that it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp

from assocscan import kalman_filter, rts_smoother
from assocscan.engines.eager.scan import scan_sequences

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
@pytest.mark.slow(3)
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


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
def test_five_observed_numbers() -> None:
    """Their likelihood has a determinant that no kernel computes."""
    torch.manual_seed(0)
    y, H = torch.randn(3, 5, dtype=F64), torch.randn(5, 1, dtype=F64)
    unit, r = torch.eye(5, dtype=F64), torch.tensor(1.0, dtype=F64)

    def loss(r: Tensor) -> Tensor:
        found: Tensor = kalman_filter(y, ONE, H, ONE, r * unit, ONE[0], ONE).log_likelihood
        return found

    wanted = grad(grad(loss))(r)
    for _ in range(2):
        found = grad(lambda z: jvp(loss, (z,), (torch.ones_like(z),))[1])(r)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(jacfwd(jacfwd(loss))(r), wanted)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_loop_begins_with_the_identity(reverse: bool, packed: bool) -> None:
    """As the tangent of a backward scan that is a loop: three states have one."""
    spec: Any = SimpleNamespace(
        operator=SimpleNamespace(sequential=True), axis=0, length=4, init=None, exclusive=True,
        reverse=reverse,
    )  # fmt: skip
    x, bounds = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64), [0, 3, 4] if packed else [0, 4]
    carry = torch.zeros(len(bounds) - 1 if packed else (), dtype=F64)
    wanted, lasts = torch.empty(4, dtype=F64), []
    for begin, end in pairwise(bounds):
        state = torch.tensor(0.0, dtype=F64)
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            wanted[t] = state
            state = 2 * state + x[t]
        lasts.append(state)
    for _ in range(2):
        states, last, _ = scan_sequences(
            lambda h, x: [2 * h[0] + x[0]], spec, [x], [carry],
            torch.tensor(bounds) if packed else None,
        )  # fmt: skip
        torch.testing.assert_close(states[0], wanted)
        torch.testing.assert_close(last[0], torch.stack(lasts) if packed else lasts[0])
