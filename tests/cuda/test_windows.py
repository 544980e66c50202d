"""The CUDA kernels of `windowed` and of its gradient, in the emulator and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda_emulator import why_unavailable
from torch.testing import assert_close
from window_cases import OPERATORS, check, draw, kernels, wide

from assocscan import ops, windowed
from assocscan.cuda import launcher

F32, F64, NAN, INF = torch.float32, torch.float64, torch.nan, torch.inf
NO_GPU = launcher.why_unavailable()
on_emulator = pytest.param("cpu", marks=pytest.mark.skipif(
    why_unavailable() is not None, reason=str(why_unavailable())))  # fmt: skip
on_gpu = pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))])  # fmt: skip
each_device = pytest.mark.parametrize("device", [on_emulator, on_gpu])


# Lanes as they lie and through shared memory, warps that hold several rows of tiles, channels that
# fill no block.
SHAPES = [(2, 100, 40), (1, 257, 1), (2, 150, 3), (1, 90, 130)]
# One tile, tiles of two sizes, and M of several levels.
WIDTHS = [2, 17, 40, 65, 89]
CASES_OF_VALUES = [
    *itertools.product(["max", "affine"], SHAPES, WIDTHS, [False, True]),
    *((name, shape, width, width == 17)
      for name in OPERATORS for shape in SHAPES[::3] for width in (17, 65)
      if name not in ("max", "affine")),
]  # fmt: skip


@pytest.mark.thinned(12)
@each_device
@pytest.mark.parametrize("name, shape, width, reverse", CASES_OF_VALUES)
def test_values_and_gradients(
    name: str, shape: tuple[int, ...], width: int, reverse: bool, device: str
) -> None:
    op, inputs = OPERATORS[name]
    check(op, inputs(*shape), width, device, reverse=reverse, rtol=2e-4, atol=2e-4)


@pytest.mark.thinned(4)
@each_device
@pytest.mark.parametrize("inner", [1, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F64])
def test_dtypes(dtype: torch.dtype, inner: int, device: str) -> None:
    xs = draw(2, 70, inner).to(dtype)
    eps = max(torch.finfo(dtype).eps, 1e-7)
    check(ops.max, xs, 40, device, rtol=eps, atol=0)
    check(ops.sum, xs, 40, device, rtol=8 * eps, atol=8 * eps)
    check(ops.logaddexp, xs, 40, device, rtol=16 * eps, atol=16 * eps)


@each_device
def test_whole_numbers(device: str) -> None:
    xs = (10 * draw(2, 70, 33)).to(torch.int32)
    want = windowed(ops.sum, xs, 40, 1, backend="eager")
    with kernels(device) as ran:
        assert torch.equal(windowed(ops.sum, xs.to(device), 40, 1, backend="cuda").cpu(), want)
    assert ran == ["TOTALS", "RESULTS"]


@pytest.mark.slow
@each_device
@pytest.mark.parametrize("inner", [1, 33])
def test_windows_do_not_read_others(inner: int, device: str) -> None:
    """NaN and infinity are in the windows that contain them, and in no other; a product that meets
    zero and infinity is NaN there alone."""
    x = draw(1, 300, inner)
    x[0, 50], x[0, 120], x[0, 121], x[0, 250] = NAN, INF, 0, -INF
    for op in (ops.sum, ops.max, ops.prod):
        for width in (7, 40, 100):
            want = torch.stack([
                windowed(op, x[:, max(0, t - width + 1) : t + 1], width, 1, backend="eager")[:, -1]
                for t in range(x.shape[1])
            ], 1)  # fmt: skip
            with kernels(device):
                got = windowed(op, x.to(device), width, 1, backend="cuda").cpu()
            assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@each_device
def test_layouts(device: str) -> None:
    """Another axis, strides, a leaf that broadcasts, an address off by one element."""
    check(ops.affine, (draw(1, 90, 1) / 4 + 0.5, draw(2, 90, 34)), 40, device, rtol=1e-4, atol=1e-4)
    check(ops.sum, draw(34, 2, 90).permute(1, 2, 0), 40, device, rtol=1e-4, atol=1e-4)
    check(ops.sum, draw(90, 34), 40, device, axis=0, rtol=1e-4, atol=1e-4)
    check(ops.sum, draw(2, 91, 34)[:, 1:], 40, device, rtol=1e-4, atol=1e-4)
    flat = draw(2 * 90 * 34 + 1)
    check(ops.sum, flat[1:].view(2, 90, 34), 40, device, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@each_device
def test_second_derivatives(device: str) -> None:
    x = draw(1, 30, 2).double()
    with kernels(device):
        assert torch.autograd.gradgradcheck(
            lambda t: windowed(ops.prod, t, 7, 1, backend="cuda"),
            x.to(device).requires_grad_(), nondet_tol=0.0,
        )  # fmt: skip


@pytest.mark.exhaustive
@each_device
def test_parts_of_a_gradient(device: str) -> None:
    """Of one output of two, and of one leaf of two."""
    a, b = (t.to(device) for t in (draw(1, 60, 33) / 4 + 0.5, draw(1, 60, 33, seed=1)))
    for tracked in ((True, False), (False, True)):
        leaves = [t.detach().requires_grad_(r) for t, r in zip((a, b), tracked, strict=True)]
        doubles = [wide(t).requires_grad_(t.requires_grad) for t in leaves]
        wanted = [k for k in range(2) if tracked[k]]
        _, y = windowed(ops.affine, tuple(doubles), 40, 1, backend="eager")
        want = torch.autograd.grad(y.sum(), [doubles[k] for k in wanted])
        with kernels(device):
            _, y = windowed(ops.affine, tuple(leaves), 40, 1, backend="cuda")
            got = torch.autograd.grad(y.sum(), [leaves[k] for k in wanted])
        assert_close([g.cpu().double() for g in got], list(want), rtol=1e-4, atol=1e-4)
