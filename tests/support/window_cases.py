"""Windows by the CUDA kernels, in the emulator or on a GPU, beside the composition of scans in
float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from cuda_emulator import emulated
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import monoid, ops, windowed
from assocscan.cuda.windows import prepare
from assocscan.monoids.monoid import _REGISTRY


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def numbered(*shape: int) -> tuple[Tensor, Tensor]:
    return draw(*shape), torch.arange(shape[1]).view(1, -1, 1).expand(shape).contiguous()


@monoid(identity=0.0, name="test_windows_level", lift=torch.exp,
        lower=lambda state, x: {"level": state.log(), "above": x - state.log()})  # fmt: skip
def level(left: Tensor, right: Tensor) -> Tensor:
    return left + right


OPERATORS: dict[str, tuple[Any, Any]] = {
    "sum": (ops.sum, draw),
    "max": (ops.max, draw),
    "prod": (ops.prod, lambda *shape: 1 + draw(*shape) / 4),
    "logaddexp": (ops.logaddexp, draw),
    "affine": (ops.affine, lambda *shape: (draw(*shape) / 4 + 0.5, draw(*shape, seed=1))),
    "matmul": (ops.matmul, lambda *shape: draw(*shape, 2, 2) / 2),
    "welford": (ops.welford, draw),
    "argmax": (ops.argmax, numbered),
    "level": (level, draw),
}


def clear_prepared_calls() -> None:
    for op in _REGISTRY.values():
        op.windows.clear()


@contextlib.contextmanager
def kernels(device: str) -> Iterator[list[str]]:
    """The names of the kernels of the calls that are prepared."""
    ran: list[str] = []
    launch = prepare.launch

    def noted(commands: Any, cut: Any, op: Any, kind: str, slots: Any) -> None:
        ran.append(kind)
        launch(commands, cut, op, kind, slots)

    clear_prepared_calls()
    with (
        mock.patch.object(prepare, "launch", noted),
        emulated() if device == "cpu" else contextlib.nullcontext(),
    ):
        yield ran


def put(xs: Any, device: str) -> list[Tensor]:
    leaves = [t.to(device) for t in pytree.tree_leaves(xs)]
    return [t.detach().requires_grad_(t.is_floating_point()) for t in leaves]


def wide(t: Tensor) -> Tensor:
    t = t.detach().cpu()
    return t.double().requires_grad_() if t.is_floating_point() else t


def check(
    op: Any, xs: Any, width: int, device: str, axis: int = 1, reverse: bool = False,
    **close: float,
) -> None:  # fmt: skip
    """Values with and without a gradient, and gradients, beside the composition in float64."""
    spec = pytree.tree_structure(xs)
    leaves = put(xs, device)
    doubles = [wide(t) for t in leaves]
    want = windowed(op, pytree.tree_unflatten(doubles, spec), width, axis, reverse, backend="eager")
    tensors = [y for y in pytree.tree_leaves(want) if y.is_floating_point()]
    dtype = next(t.dtype for t in leaves if t.is_floating_point())
    weights = [draw(*y.shape, seed=k).to(dtype).double() for k, y in enumerate(tensors)]
    floats = [t for t in doubles if t.requires_grad]
    expected = torch.autograd.grad(tensors, floats, weights)

    def beside(got: Any, reference: Any) -> None:
        for y, z in zip(pytree.tree_leaves(got), pytree.tree_leaves(reference), strict=True):
            assert_close(y.detach().cpu().to(z.dtype), z.detach(), equal_nan=True, **close)

    with kernels(device) as ran:
        given = pytree.tree_unflatten(leaves, spec)
        with torch.no_grad():
            beside(windowed(op, given, width, axis, reverse, backend="cuda"), want)
        assert "RESULTS" in ran
        for _ in range(2):
            got = windowed(op, given, width, axis, reverse, backend="cuda")
            beside(got, want)
            ys = [y for y in pytree.tree_leaves(got) if y.is_floating_point()]
            found = torch.autograd.grad(
                ys, [t for t in leaves if t.requires_grad],
                [w.to(device, y.dtype) for w, y in zip(weights, ys, strict=True)],
            )  # fmt: skip
            beside(found, expected)
        # The gradient of a sum is windows of another one; that of `level` reads inputs where it
        # lowers.
        is_sum = op is ops.sum or (op is ops.logaddexp and dtype.itemsize > 2)
        assert ("GATHER" in ran) == (not is_sum and op is not level)
