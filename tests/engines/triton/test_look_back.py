"""Look-back in Triton: one pass over lanes, whose programs wait for the tiles before theirs.

On a GPU, and elsewhere in Triton's interpreter, which runs programs in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from table import GPU
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import associative_scan, explain, linear_recurrence, ops
from assocscan.engines.base import forced_choices
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.engines.triton import multipass
from assocscan.engines.triton.kernel import LOOKBACK_GROUP
from assocscan.runtime import backends, gpu_engine_choice

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu

HERE = GPU == "cpu"
# Several groups of tiles, and a part of one; of the interpreter's tiles of 8 steps.
LONG = 8 * (LOOKBACK_GROUP + 3) + 5 if HERE else 256 * (3 * LOOKBACK_GROUP + 3) + 77
LENGTHS = (LONG,) if HERE else (300, 8 * 256, LONG)


@pytest.fixture(autouse=True)
def looked_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the scans that looked back; `multipass` does, wherever it can."""
    found: list[int] = []

    def prepare(spec: Any, tensors: Sequence[TensorSpec | None]) -> Any:
        if not multipass.can_look_back(spec, tensors):
            return multipass.prepare(spec, tensors)
        found.append(spec.length)
        return multipass.prepare_lookback(spec, tensors)

    monkeypatch.setitem(backends.SCALARS, "multipass", prepare)
    with forced_choices.Override[int]().forced(1):  # nothing that was prepared otherwise is taken
        yield found


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 1.8 - 0.9


def numbers(*shape: int) -> Tensor:
    return (drawn(*shape) * 1000).long()


def elements(op: Any, shape: tuple[int, ...]) -> Any:
    if op is ops.affine:
        return drawn(*shape), drawn(*shape, seed=1)
    if op is ops.argmax:
        return drawn(*shape), numbers(*shape)
    if op is ops.any:
        return drawn(*shape) > 0.85
    return numbers(*shape) if op in (ops.xor, ops.max) else drawn(*shape) / 16


OPERATORS = [ops.affine, ops.sum, ops.max, ops.argmax, ops.any, ops.xor, ops.welford]
SMALL = (ops.affine, ops.any) if HERE else tuple(OPERATORS)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", SMALL, ids=lambda op: op.name)
@pytest.mark.slow(4)
def test_values(op: Any, reverse: bool, looked_back: list[int]) -> None:
    for length in LENGTHS:
        for shape in ((1, length, 20),) if HERE else ((2, length, 20), (1, length, 32)):
            xs = elements(op, shape)
            here = tree_map(lambda x: x.to(GPU), xs)
            for inclusive in (
                (True, False) if op.identity is not None and op.lower is None else (True,)
            ):
                options: dict[str, Any] = {"reverse": reverse, "inclusive": inclusive}
                options["return_final"] = True
                found = [
                    tree_leaves(associative_scan(op, here, 1, backend="multipass", **options))
                    for _ in range(2)
                ]
                wanted = tree_leaves(associative_scan(op, xs, 1, backend="cpu", **options))
                for y, again, z in zip(*found, wanted, strict=True):
                    torch.testing.assert_close(y.cpu(), z, rtol=2e-5, atol=2e-4)
                    assert torch.equal(y, again)
    assert looked_back


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES[:2] if HERE else DTYPES)
@pytest.mark.slow(2)
def test_gradients(dtype: torch.dtype, looked_back: list[int]) -> None:
    """Of a recurrence with init and final: the backward scan looks back, too, one step further."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    leaves = [drawn(1, LONG, 20, seed=k).to(dtype) for k in range(2)] + [drawn(1, 20).to(dtype)]

    def gradients(device: str, kind: torch.dtype, backend: str, reverse: bool) -> list[Tensor]:
        a, b, h = (x.to(device, kind).requires_grad_() for x in leaves)
        results = linear_recurrence(
            a, b, h, axis=1, reverse=reverse, return_final=True, backend=backend
        )
        cotangents = [torch.ones_like(y) for y in results]
        gradients = torch.autograd.grad(results, (a, b, h), cotangents)
        return [y.detach() for y in (*results, *gradients)]

    tolerance = {torch.bfloat16: 3e-2, torch.float64: 1e-12}.get(dtype, 3e-5)
    for reverse in (True,) if HERE else (False, True):
        found = gradients(GPU, dtype, "multipass", reverse)
        for y, z in zip(found, gradients("cpu", wide, "cpu", reverse), strict=True):
            scale = float(z.abs().max())
            torch.testing.assert_close(y.cpu().to(wide), z, rtol=tolerance, atol=tolerance * scale)
    assert len(looked_back) >= 2


@pytest.mark.skipif(HERE, reason="needs a CUDA device")
def test_the_same_bits_from_run_to_run() -> None:
    """Whichever program comes first: many programs, on two streams at once."""
    a, b = (drawn(1, 1 << 17, 64, seed=k).cuda() for k in range(2))
    first = linear_recurrence(a, b, axis=1, backend="multipass")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(200):
        with torch.cuda.stream(other):
            aside = linear_recurrence(a, b, axis=1, backend="multipass")
        assert torch.equal(linear_recurrence(a, b, axis=1, backend="multipass"), first)
        other.synchronize()
        assert torch.equal(aside, first)


def test_what_does_not_look_back(looked_back: list[int]) -> None:
    """Packed sequences, rows, reductions and short axes: in passes, as before."""
    x = drawn(2, LONG, 20).to(GPU)
    offsets = torch.tensor([0, 7, LONG])
    wanted = associative_scan(ops.sum, x.cpu(), 1, offsets=offsets)
    found = associative_scan(ops.sum, x, 1, offsets=offsets, backend="multipass")
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=2e-3)
    rows = associative_scan(ops.sum, x[..., 0].contiguous(), 1, backend="multipass")
    torch.testing.assert_close(rows.cpu(), x[..., 0].cpu().cumsum(1), rtol=1e-5, atol=2e-3)
    assert not looked_back


def test_where_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA's GPUs without CuPy, for elements of two scalars at most."""
    if HERE:
        assert not gpu_engine_choice.goes_on(torch.device("cpu"))
        return
    assert gpu_engine_choice.goes_on(torch.device("cuda"))
    for name in ("no_cuda", "cuda_reason"):
        monkeypatch.setattr(gpu_engine_choice, name, lambda *_: "hidden")
    x = drawn(1, 1 << 16, 64).cuda()
    z = torch.complex(x, x)
    assert explain(ops.affine, (x, x), 1).engine == "triton (look-back)"
    assert explain(ops.sum, x, 1, reverse=True).engine == "triton (look-back)"
    assert explain(ops.affine, (z, z), 1).engine.startswith("multipass")
    assert explain(ops.sum, x[..., :4].contiguous(), 1).engine.startswith("multipass")
