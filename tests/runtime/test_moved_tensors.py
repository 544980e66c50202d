"""Calls like an earlier one, with one tensor at an address of another alignment: inputs, init and
cotangents, forward and backward, first and repeated.

Kernels of GPUs load as many bytes at a time as the alignment allows. A wider load ends the process
on a GPU; the emulator of the CUDA engine reports it (`cuda_emulator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import (
    associative_scan,
    cumsum,
    linear_recurrence,
    ops,
    reduce,
    selective_scan,
)

CPU = pytest.param(VectorEngine("cpu", "cpu"), id="cpu-cpu")


class Call(NamedTuple):
    """A call: its results for tensors of these shapes, in which L stands for the length."""

    run: Callable[..., tuple[Tensor, ...]]
    shapes: tuple[tuple[Any, ...], ...]


def with_matrices(backend: str, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    y, last = associative_scan(ops.matmul, x, init=h, return_final=True, backend=backend)
    return y, last


def recurrence(axis: int, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    def run(backend: str, a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        length = a.shape[axis]
        offsets = torch.tensor([0, 5, length], device=a.device) if packed else None
        found: tuple[Tensor, ...] = linear_recurrence(
            a, b, init=h, axis=axis, offsets=offsets, return_final=True, backend=backend
        )
        return found

    return run


def selective(backend: str, *tensors: Tensor, packed: bool = False) -> tuple[Tensor, ...]:
    u, delta, A, B, C, h = tensors
    offsets = torch.tensor([0, 5, u.shape[1]], device=u.device) if packed else None
    found: tuple[Tensor, ...] = selective_scan(
        u, delta, A, B, C, init=h, return_final=True, offsets=offsets, backend=backend
    )
    return found


def packed_vectors(backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return selective(backend, *tensors, packed=True)


CALLS = {
    "cumsum": Call(lambda backend, x: (cumsum(x, 1, backend=backend),), ((3, "L"),)),
    "rows": Call(recurrence(1, packed=False), ((2, "L"), (2, "L"), (2,))),
    "lanes": Call(recurrence(1, packed=False), ((2, "L", 16), (2, "L", 16), (2, 16))),
    "packed": Call(recurrence(0, packed=True), (("L", 16), ("L", 16), (2, 16))),
    "reduce": Call(
        lambda backend, a, b, p, h: reduce(ops.affine, (a, b), init=(p, h), backend=backend),
        (("L", 16), ("L", 16), (16,), (16,)),
    ),
    "vectors": Call(
        selective,
        ((2, "L", 8), (2, "L", 8), (8, 4), (2, "L", 4), (2, "L", 4), (2, 8, 4)),
    ),
    "packed vectors": Call(
        packed_vectors,
        ((1, "L", 8), (1, "L", 8), (8, 4), (1, "L", 4), (1, "L", 4), (2, 1, 8, 4)),
    ),
    "matrices": Call(with_matrices, (("L", 4, 4), (4, 4))),
}  # fmt: skip
RESULTS = dict.fromkeys(CALLS, 2) | {"cumsum": 1}


def every_tensor() -> Iterator[Any]:
    """Of every call; the cotangents after the tensors."""
    for name, call in CALLS.items():
        for k in range(len(call.shapes) + RESULTS[name]):
            role = f"tensor {k}" if k < len(call.shapes) else f"cotangent {k - len(call.shapes)}"
            yield pytest.param(name, k, id=f"{name}-{role}")


def cases() -> Iterator[Any]:
    """With every engine. Emulated and interpreted kernels are slow: two of their cases are run by
    default, the first of which once ended in an error. Interpreted kernels load one element at a
    time, whatever the alignment: their vectors, the slowest, are left to GPUs."""
    for engine in [CPU, *VECTOR_ENGINES]:
        is_slow = engine.id in ("cuda-cpu", "triton-cpu")
        for one in every_tensor():
            usual = not is_slow or one.id in ("lanes-tensor 2", "lanes-cotangent 0")
            marks = [*engine.marks, *([] if usual else [pytest.mark.exhaustive])]
            if engine.id == "triton-cpu" and "vectors" in one.id:
                marks.append(pytest.mark.by_hand)
            yield pytest.param(*engine.values, *one.values, marks=marks, id=f"{engine.id}-{one.id}")


CASES = list(cases())
EVERY = (1, 0, 0, 0, 0, 1, 2, 3, 3, 3, 0)
FEW = (0, 0, 0, 1, 1)  # for slow kernels


def moved(t: Tensor, elements: int) -> Tensor:
    """The values at an address so many elements beyond one that is a multiple of 16."""
    place = torch.empty(t.numel() + elements, dtype=t.dtype, device=t.device)[elements:]
    return place.view(t.shape).copy_(t.detach()).requires_grad_(t.requires_grad)


def outcome(call: Call, backend: str, given: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    """The results and the gradients of the tensors."""
    results = call.run(backend, *given)
    return [*results, *torch.autograd.grad(results, given, seeds)]


def check(name: str, backend: str, device: str, place: int, dtype: torch.dtype) -> None:
    call = CALLS[name]
    length = 16 * (2 + place)  # of this case alone: none of its calls was made before
    generator = torch.Generator().manual_seed(place)

    def drawn(shape: tuple[Any, ...]) -> Tensor:
        sizes = [length if n == "L" else n for n in shape]
        return (torch.rand(sizes, generator=generator) - 0.5).to(device, dtype)

    given = [drawn(shape).requires_grad_() for shape in call.shapes]
    results = call.run("eager", *given)
    seeds = [drawn(tuple(y.shape)).to(y.dtype) for y in results]
    expected = outcome(call, "eager", given, seeds)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1

    def compare(elements: int) -> None:
        tensors = [*given, *seeds]
        tensors[place] = moved(tensors[place], elements)
        found = outcome(call, backend, tensors[: len(given)], tensors[len(given) :])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    is_slow = device == "cpu" and backend != "cpu"
    for elements in FEW if is_slow else EVERY:
        compare(elements)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("engine, name, place", CASES)
def test_moved_by_elements(engine: VectorEngine, name: str, place: int) -> None:
    with engine.running():
        check(name, engine.backend, engine.device, place, torch.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine, name, place", CASES)
def test_16_bits_moved_by_elements(engine: VectorEngine, name: str, place: int) -> None:
    with engine.running():
        check(name, engine.backend, engine.device, place, torch.bfloat16)
