"""CUDA kernels over vectors: values and gradients against a loop in float64, in the emulator and,
where there is one, on the GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import cuda_emulator
import pytest
import torch
from cuda_emulator import emulated
from vector_cases import CASES, case, check, leaves_of

from assocscan.cuda import launcher
from assocscan.cuda.vectors import prepare
from assocscan.cuda.vectors.tile import choose_tile
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.vectors import prepare as tensors_of
from assocscan.engines.base.vectors.kernel import CHUNK
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.native import runner

# More than a chunk, and less; steps left over after whole groups, and none; states that are padded;
# more lanes than a block, and less; lanes that fill 16 bytes, and others.
SHAPES = [(1, 1, 1, 2), (2, 37, 5, 3), (1, 66, 40, 16), (1, 33, 9, 5), (1, 64, 8, 32)]
# Cases that these kernels cannot express, or not their gradients: values of single states come from
# a sum or a maximum over all of them. Triton runs those.
REFUSED = {"softmax", "moments", "max-plus"}
ON_GPU = launcher.why_unavailable() is None
needs_emulator = pytest.mark.skipif(
    cuda_emulator.why_unavailable() is not None, reason=str(cuda_emulator.why_unavailable())
)
DEVICES = [
    pytest.param("cpu", marks=needs_emulator),
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU")]),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device, with the kernels over vectors taken for all operators."""
    monkeypatch.setattr(gpu_engine_choice, "is_worth_vectors", lambda *given: True)
    if request.param == "cpu":
        monkeypatch.setattr(prepare, "shared_memory", lambda device: 227 << 10)
        for module in (prepare, tensors_of):
            monkeypatch.setattr(module, "processors", lambda device: 1)
    for name in ("call", "module"):
        monkeypatch.setattr(runner, name, None)
    monkeypatch.setattr(runner, "_started", [os.getpid()])
    executables._PREPARED.clear()
    with emulated() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param
    executables._PREPARED.clear()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The executables that the CUDA engine prepared."""
    found: list[Executable] = []
    launched = prepare.launched

    def noting(*arguments: Any) -> Executable:
        found.append(launched(*arguments))
        return found[-1]

    monkeypatch.setattr(prepare, "launched", noting)
    return found


def leaves_on(device: str, name: str, shape: tuple[int, ...], dtype: Any = torch.float32) -> Any:
    return [x.to(device) for x in leaves_of(CASES[name], *shape, dtype)]  # type: ignore[call-arg]


def test_the_shapes_cross_the_edges_of_tiles() -> None:
    steps = {t - 1 for _, t, _, _ in SHAPES}
    group = choose_tile(16, True, 1000, 1).group
    assert any(t > CHUNK for t in steps) and any(t < CHUNK for t in steps)
    assert {t % group == 0 for t in steps} == {True, False}
    lanes = choose_tile(16, False, 1000, 1).lanes
    assert any(c > lanes for *_, c, _ in SHAPES) and any(c < lanes for *_, c, _ in SHAPES)
    assert any(n != choose_tile(n, False, 1000, 1).states for *_, n in SHAPES)


@pytest.mark.thinned(19)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(
    name: str, shape: tuple[int, int, int, int], device: str, prepared: list[Executable]
) -> None:
    check(CASES[name], leaves_on(device, name, shape), backend="cuda")
    if name not in REFUSED and name != "plain":
        assert {type(e.spec.operator) for e in prepared} == {VectorOperator, VectorAdjoint}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["selective", "gated", "max-plus"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_flags(name: str, reverse: bool, inclusive: bool, device: str) -> None:
    leaves = leaves_on(device, name, (2, 43, 4, 5))
    options: Any = {"reverse": reverse, "inclusive": inclusive, "backend": "cuda"}
    check(CASES[name], leaves, **options)
    sizes = [1 if name == "max-plus" and k == 0 else 5 for k in range(2)]
    init = tuple(torch.rand(2, 4, n, device=device) for n in sizes)
    check(CASES[name], leaves, **options, init=init)


WITH_REDUCTION = {
    # A part of the state without states, which is an output.
    "returned decay": case(
        "returned_decay_test", lambda a, b: (a, b), lambda s: (s[1].sum(-1), s[0].squeeze(-1)),
        "decay:btc", "any:btcn",
    ),
    # An element that is equal for all states, in a state that is not.
    "equal states": case(
        "equal_states_test", lambda a, d, u, k: (a, d * u * torch.ones_like(a)),
        lambda s, xs: (s[1] * xs[3] * xs[2]).sum(-1), "decay:cn", "any:btc", "any:btc", "any:btn",
    ),
    # Single states that are given a sum over all of them: for Triton.
    "shared sum": case(
        "shared_sum_test", lambda a, b: (a, b),
        lambda s: s[1].sum(-1, keepdim=True).expand(s[1].shape), "decay:btc", "any:btcn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_REDUCTION)
@pytest.mark.parametrize("inclusive", [True, False])
def test_sums_and_single_states(
    name: str, inclusive: bool, device: str, prepared: list[Executable]
) -> None:
    given = WITH_REDUCTION[name]
    leaves = [x.to(device) for x in leaves_of(given, 2, 35, 4, 6)]
    check(given, leaves, inclusive=inclusive, backend="cuda")
    if name == "returned decay":
        assert {type(e.spec.operator) for e in prepared} == {VectorOperator, VectorAdjoint}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "states, dtype", [(16, torch.float64), (64, torch.bfloat16), (128, torch.bfloat16)]
)
def test_rows_of_lanes_are_copied_by_their_own_size(
    states: int, dtype: torch.dtype, device: str, prepared: list[Executable]
) -> None:
    """Blocks of few lanes begin in the middle of 16 bytes."""
    leaves = leaves_on(device, "selective", (1, 34, 16, states), dtype)
    check(CASES["selective"], leaves, backend="cuda")
    assert {type(e.spec.operator) for e in prepared} == {VectorOperator, VectorAdjoint}
