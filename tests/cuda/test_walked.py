"""Steps that are not associative on GPUs: the CUDA walk in the emulator, and CUDA and Triton on a
real GPU, beside a loop in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulator
import pytest
import torch
import walked_cases
from cuda_emulator import Emulated, emulated
from torch import Tensor
from torch.utils._pytree import tree_leaves
from walked_cases import CASES, Case, loop

from assocscan import nonlinear_recurrence
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda.kernel import LanesTile
from assocscan.cuda.source import source
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.runtime import backends as engines

REASON = cuda_emulator.why_unavailable()
NO_GPU = not torch.cuda.is_available() or engines.availability()["cuda"] is not None
on_emulator = pytest.param(
    "emulator", marks=pytest.mark.skipif(REASON is not None, reason=str(REASON))
)
on_cuda, on_triton = (
    pytest.param(name, marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="no GPU")])
    for name in ("cuda", "triton")
)
everywhere = pytest.mark.parametrize("engine", [on_emulator, on_cuda, on_triton])


@contextlib.contextmanager
def where(engine: str, processors: int = 3) -> Iterator[dict[str, Any]]:
    """The backend and the device on which an engine is tested."""
    if engine != "emulator":
        yield {"backend": engine, "device": "cuda"}
        return
    with emulated(processors=processors):
        yield {"backend": "cuda", "device": "cpu"}
        assert {kernel.mode for kernel, _ in Emulated.launches if kernel} == {"WALKED"}


def check(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, engine: str, reverse: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Values and gradients on an engine."""
    with where(engine) as at:
        walked_cases.check(case, shape, dtype, at, reverse, change)


@pytest.mark.slow(3)
@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(engine: str, name: str, reverse: bool) -> None:
    check(CASES[name], (7, 70, 64), torch.float32, engine, reverse)


@pytest.mark.slow
@pytest.mark.thinned(9)
@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [32, 33, 41, 64, 95])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_edges_of_tiles(engine: str, length: int, channels: int, dtype: torch.dtype) -> None:
    if engine == "triton" and (length not in (1, 17, 130) or channels not in (32, 41)):
        pytest.skip("the edges of the CUDA engine's tiles")
    check(CASES["gated"], (7, length, channels), dtype, engine, reverse=length % 2 == 0)


def spread(given: dict[str, Any]) -> None:
    """Every leaf of xs in its own way: padded rows, another order of dimensions, no channels of
    its own."""
    z, r, n = given["xs"]
    padded = torch.cat([z, z], -1)[..., : z.shape[-1]]
    turned = r.transpose(0, 1).contiguous().transpose(0, 1)
    given["xs"] = (padded, turned, n[..., :1])


@pytest.mark.slow(2)
@everywhere
@pytest.mark.parametrize("reverse", [False, True])
def test_strides(engine: str, reverse: bool) -> None:
    check(CASES["gated"], (7, 40, 64), torch.float32, engine, reverse, spread)


@pytest.mark.slow
@pytest.mark.thinned(2)
@everywhere
def test_more_chains_than_blocks(engine: str) -> None:
    """A block takes its chains one after the other."""
    check(CASES["fires"], (40, 5, 64), torch.float32, engine)
    check(CASES["gated"], (40, 37, 64), torch.float32, engine)


TILES = {"short": (1, 1, 3), "long": (1, 32, 3), "two channels": (2, 8, 4)}


@pytest.mark.slow
@pytest.mark.thinned(3)
@pytest.mark.parametrize("engine", [on_emulator, on_cuda])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_tiles(engine: str, name: str, dtype: torch.dtype) -> None:
    """Tiles of one step, tiles of many, and lanes with several channels, which need not exist."""
    channels, items, stages = TILES[name]
    tile = LanesTile(32, 32 * channels, channels, items, stages)
    with tuning.forced(Choice(tile, "WALKED")):
        check(CASES["gated"], (3, 130, 64), dtype, engine)
        check(CASES["two numbers"], (3, 67, 71), dtype, engine, reverse=True)


@pytest.mark.slow(2)
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tanh_of_the_hardware_is_for_bfloat16(dtype: torch.dtype) -> None:
    """Its error is as large as that of rounding to float16."""
    case = CASES["gated"]
    given = case.draw((1, 3, 32), dtype, "cpu")
    leaves = [t.requires_grad_() for t in tree_leaves(given)]
    with where("emulator") as at:
        y = nonlinear_recurrence(case.step, **given, backend=at["backend"])
        torch.autograd.grad(y.sum(), leaves)
        texts = [source(kernel) for kernel, _ in Emulated.launches if kernel]
    coarse = dtype == torch.bfloat16
    assert ["#define COARSE" in text for text in texts] == [coarse, coarse]
    assert ("tanh_exp2" in texts[0]) is not coarse


@everywhere
@pytest.mark.parametrize("gate", [9.25, -9.25, 0.0])
def test_slow_gates(engine: str, gate: float) -> None:
    """Of bfloat16, 1 − σ is as exact as σ: a state that moves by 1e-4 of the way does not move by
    2e-4. The last state is float32, and shows it."""

    def leaky(h: Tensor, x: Any) -> Tensor:
        keep = torch.sigmoid(x[0] + 0.125 * h)
        return keep * h + (1 - keep) * x[1]

    case = Case(leaky, 2, 0)
    with where(engine) as at:
        shape = (3, 500, 64)
        xs = (torch.full(shape, gate), torch.ones(shape))
        given = {
            "xs": tuple(x.to(at["device"], torch.bfloat16) for x in xs),
            "init": torch.zeros(3, 64, device=at["device"]), "params": (),
        }  # fmt: skip
        _, last = nonlinear_recurrence(leaky, **given, return_final=True, backend=at["backend"])
        want = loop(case, given)[1][0]
    torch.testing.assert_close(last.double().cpu(), want.cpu(), rtol=2e-3, atol=0)


OFFSETS = {
    "one": [0, 70],
    "edges": [0, 0, 15, 31, 47, 64, 64, 69, 70, 70],
    "short": [0, 1, 2, 4, 7, 11, 16, 22, 22, 22, 70],
    "empty": [0, 0, 0, 70, 70],
}


@pytest.mark.thinned(5)
@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed(engine: str, name: str, reverse: bool, dtype: torch.dtype) -> None:
    """For every sequence the values, the last state and the gradients of a loop over it alone."""
    if engine == "triton" and name != "edges":
        pytest.skip("a Triton kernel walks each sequence as any other")
    case, bounds = CASES["gated"], OFFSETS[name]
    with where(engine) as at:
        given = case.draw((2, 70, 33), dtype, at["device"])
        count = len(bounds) - 1
        given["init"] = torch.randn(count, 2, 33, device=at["device"])
        leaves = [t.requires_grad_() for t in tree_leaves(given)]
        offsets = torch.tensor(bounds, device=at["device"])
        weights = torch.linspace(-1, 1, 2 * 70 * 33, device=at["device"]).view(2, 70, 33)

        def total(y: Tensor, last: Tensor) -> Tensor:
            return (y * weights).sum() + (last.double() * weights[:, :1].transpose(0, 1)).sum()

        for _ in range(2):
            y, last = nonlinear_recurrence(
                case.step, **given, reverse=reverse, return_final=True, offsets=offsets,
                backend=at["backend"],
            )  # fmt: skip
            found = torch.autograd.grad(total(y, last), leaves)
            [want_y], [want_last] = loop(
                case, given, reverse=reverse, offsets=offsets, own_init=True
            )
            want = torch.autograd.grad(total(want_y, want_last), leaves)
            tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
            pairs = [(y, want_y), (last, want_last), *zip(found, want, strict=True)]
            for got, expected in pairs:
                scale = expected.abs().max().item() + 1
                torch.testing.assert_close(
                    got.double(), expected.double(), rtol=0, atol=tolerance * scale
                )


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="no GPU")
def test_one_result_from_run_to_run() -> None:
    """Of a large shape: bitwise equal, by both engines each, on the GPU."""
    case = CASES["gated"]
    given = case.draw((8, 2048, 1536), torch.float32, "cuda")
    first = {}
    for backend in ("cuda", "triton"):
        for _ in range(20):
            y = nonlinear_recurrence(case.step, **given, backend=backend)
            assert torch.equal(y, first.setdefault(backend, y))
    want, _ = loop(case, given)
    for y in first.values():  # within the precision of float32 times the number of steps
        torch.testing.assert_close(y.double(), want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="no GPU")
def test_graphs() -> None:
    """Captured in a CUDA graph, and replayed on other values."""
    case = CASES["gated"]
    given = case.draw((4, 256, 64), torch.float32, "cuda")
    for _ in range(3):
        y = nonlinear_recurrence(case.step, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nonlinear_recurrence(case.step, **given)
    given["xs"][0].normal_()
    graph.replay()
    assert torch.equal(y, nonlinear_recurrence(case.step, **given))
