"""Which operators over vectors take the kernels over vectors on GPUs. Nothing runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from vector_cases import CASES, expanded, leaves_of

from assocscan import ops
from assocscan.api.bind_arguments import bind
from assocscan.runtime import backends, operation_arguments
from assocscan.runtime.gpu_engine_choice import is_worth_vectors


def call(op: object, xs: object, **options: object) -> object:
    return bind(op, xs, 1, False, True, None, False, None)  # type: ignore[arg-type]


def leaves(b: int, t: int, c: int, n: int) -> list[torch.Tensor]:
    sizes = {"b": b, "t": t, "c": c, "n": n}
    return [
        torch.empty([sizes[d] if d in axes else 1 for d in "btcn"], device="meta")
        for _, axes in CASES["selective"].leaves
    ]


@pytest.mark.parametrize(
    "shape, wanted",
    [
        ((8, 4096, 1536, 16), True),  # a Mamba layer
        ((1, 4096, 16, 16), True),  # few chains, of states that no other kernel holds
        ((8, 4096, 1536, 8), True),  # many chains of states that others hold, too
        ((1, 4096, 16, 8), False),  # few of them
        ((8, 4096, 1536, 2), True),  # small states that are summed in the kernel
    ],
)
def test_selective_scans(shape: tuple[int, int, int, int], wanted: bool) -> None:
    found = call(CASES["selective"].op, expanded(leaves(*shape)))
    assert is_worth_vectors(found) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [(0, 0, None, 0, 0), (None, 1, None, None, None)], ids=str)
def test_mapped_dimensions_count_as_chains(dims: tuple[int | None, ...]) -> None:
    """Two nested vmaps of 8 and 16 over 2 · 16 chains are 4096 chains; the inner one is 256."""
    one = leaves(2, 70, 16, 8)
    found = []

    def scan(*xs: torch.Tensor) -> torch.Tensor:
        found.append(is_worth_vectors(call(CASES["selective"].op, expanded(list(xs)))))  # type: ignore[arg-type]
        return xs[1]

    inner = [x.unsqueeze(d).expand(*x.shape[:d], 8, *x.shape[d:]) if d is not None else x
             for x, d in zip(one, dims, strict=True)]  # fmt: skip
    torch.vmap(scan, in_dims=dims)(*inner)
    outer = [x.expand(16, *x.shape) for x in inner]
    torch.vmap(torch.vmap(scan, in_dims=dims))(*outer)
    gradient = torch.func.grad(lambda *xs: scan(*xs).sum(), argnums=1)
    torch.vmap(torch.vmap(gradient, in_dims=dims))(*outer)
    assert found == [False, True, True]


def test_small_states_that_are_outputs_are_scanned_as_scalars() -> None:
    xs = tuple(torch.empty(8, 4096, 1536, 2, device="meta") for _ in range(2))
    assert not is_worth_vectors(call(CASES["plain"].op, xs))  # type: ignore[arg-type]


def test_few_long_chains_of_attention_are_scanned_in_a_single_pass() -> None:
    scores, values = (torch.empty(4, 8192, 16, *d, device="meta") for d in ((), (16,)))
    assert not is_worth_vectors(call(ops.online_attention, (scores, values)))  # type: ignore[arg-type]


def test_traced_calls_take_the_kernels_over_vectors() -> None:
    """On fake tensors of a GPU, as graphs are made: the operation declares carries of GPUs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        drawn = [x.to("cuda") for x in leaves_of(CASES["selective"], 2, 70, 40, 16)]
        found: Any = call(CASES["selective"].op, expanded(drawn))
        operator = backends.vector_operator(found, "auto")
        assert operator is not None
        spec, tensors = found.scan(operator)
        spec = backends.saving_carries("auto", spec, tensors)
        assert spec.operator.lane == 2
        (y, carries), _ = operation_arguments.call("auto", spec, tensors)
    assert y.shape == (2, 70, 40) and carries.dtype == torch.int32 and carries.is_cuda
