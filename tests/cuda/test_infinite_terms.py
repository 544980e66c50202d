"""NaN and infinities in the CUDA engine's kernels, in the emulator, beside a loop."""

from __future__ import annotations

from math import inf, nan

import cuda_emulator
import pytest
import torch
from cuda_emulator import emulated
from torch import Tensor

from assocscan import Monoid, associative_scan, ops, product
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda.kernel import LanesTile
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.testing import assert_scan_close, reference_scan

REASON = cuda_emulator.why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# Tiles of 32 steps and two channels.
CHOICE = Choice(LanesTile(64, 8, 2, 2, 2), "LOOKBACK")
LENGTH, CHANNELS = 75, 10


def drawn(*element: int) -> Tensor:
    """In each channel but the last one element is NaN or infinite."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((LENGTH, CHANNELS, *element), generator=generator, dtype=torch.float64)
    for channel in range(CHANNELS - 1):
        place, value = (0, 40, 74)[channel // 3], (nan, inf, -inf)[channel % 3]
        x[place, channel].view(-1)[0] = value
    return x


OPERATORS = [
    (product(ops.logaddexp, ops.max, ops.min, ops.online_softmax), ()),
    (ops.max_subarray, ()),
    (ops.log_matmul, (2, 2)),
    (ops.max_matmul, (2, 2)),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("op,element", OPERATORS, ids=lambda value: str(value))
def test_values(op: Monoid, element: tuple[int, ...]) -> None:
    x = drawn(*element)
    with emulated(processors=4), tuning.forced(CHOICE):
        got = associative_scan(op, x, backend="cuda")
    assert_scan_close(got, reference_scan(op, x), LENGTH)


@pytest.mark.slow(2)
@pytest.mark.parametrize("op", [ops.max, ops.logaddexp], ids=["max", "logaddexp"])
def test_gradients(op: Monoid) -> None:
    x = drawn()
    cotangent = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)
    leaf = x.clone().requires_grad_()
    with emulated(processors=4), tuning.forced(CHOICE):
        y = associative_scan(op, leaf, backend="cuda")
        (got,) = torch.autograd.grad(y, leaf, cotangent)
    (want,) = torch.autograd.grad(reference_scan(op, leaf), leaf, cotangent)
    torch.testing.assert_close(got, want, equal_nan=True)
