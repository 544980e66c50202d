"""Steps that are not associative on GPUs: the CUDA walk in the emulator, and CUDA and Triton on a
real GPU, beside a loop in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cuda_emulator
import pytest
import torch
from cuda_emulator import Emulated, emulated
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import nonlinear_recurrence
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
Step = Callable[..., Any]


def gated(h: Tensor, x: Any, weights: Any) -> Tensor:
    (z, r, n), (uz, ur, un) = x, weights
    z, r = torch.sigmoid(z + uz * h), torch.sigmoid(r + ur * h)
    return (1 - z) * torch.tanh(n + r * (un * h)) + z * h


def two_numbers(state: Any, x: Any, weights: Any) -> Any:
    """A cell and what it shows of itself."""
    (h, c), (i, f, o), (u, v) = state, x, weights
    c = torch.sigmoid(f + u * h) * c + torch.sigmoid(i) * torch.tanh(v * h)
    return torch.sigmoid(o) * torch.tanh(c), c


def fires(v: Tensor, current: Tensor) -> Tensor:
    v = 0.9 * v + current
    return torch.where(v > 1, 0.0, v)


class Case(NamedTuple):
    """A step, how many leaves xs and params have, and how many h has."""

    step: Step
    inputs: int
    params: int
    states: int = 1

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(sum(shape))

        def leaf(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).to(device, dtype)

        xs = tuple(leaf(*shape) for _ in range(self.inputs))
        h = tuple(leaf(shape[0], *shape[2:]).float() for _ in range(self.states))
        params = tuple(leaf(*shape[2:]) for _ in range(self.params))
        return {
            "xs": xs if self.inputs > 1 else xs[0],
            "init": h if self.states > 1 else h[0],
            "params": params,
        }


CASES = {
    "gated": Case(gated, 3, 3),
    "two numbers": Case(two_numbers, 3, 2, 2),
    "fires": Case(fires, 1, 0),
}


@contextlib.contextmanager
def where(engine: str, processors: int = 3) -> Iterator[dict[str, Any]]:
    """The backend and the device on which an engine is tested."""
    if engine != "emulator":
        yield {"backend": engine, "device": "cuda"}
        return
    with emulated(processors=processors):
        yield {"backend": "cuda", "device": "cpu"}
        assert {kernel.mode for kernel, _ in Emulated.launches if kernel} == {"WALKED"}


def loop(case: Case, given: dict[str, Any], reverse: bool) -> tuple[Any, Any]:
    """The states, and the last one, in float64."""
    given = tree_map(lambda t: t.double(), given)
    xs, h, found = tree_leaves(given["xs"]), given["init"], []
    length = xs[0].shape[1]
    for t in reversed(range(length)) if reverse else range(length):
        x = tuple(t_.select(1, t) for t_ in xs)
        x = x if case.inputs > 1 else x[0]
        h = case.step(h, x, given["params"]) if case.params else case.step(h, x)
        found.append(tree_leaves(h))
    if reverse:
        found.reverse()
    return [torch.stack(parts, 1) for parts in zip(*found, strict=True)], tree_leaves(h)


def sums_of(
    case: Case, given: dict[str, Any], reverse: bool, options: dict[str, Any] | None
) -> tuple[list[Tensor], Tensor]:
    """The states and the last ones, and a sum of them with weights: of the loop, or of a call with
    these options."""
    if options is None:
        states, last = loop(case, given, reverse)
    else:
        found = nonlinear_recurrence(
            case.step, **given, reverse=reverse, return_final=True, **options
        )
        states, last = map(tree_leaves, found)
    results = [*states, *last]
    weights = [torch.linspace(-1, 2, max(t.numel(), 1), device=t.device).double() for t in results]
    terms = [
        (t.double() * w[: t.numel()].view(t.shape)).sum()
        for t, w in zip(results, weights, strict=True)
    ]
    return results, torch.stack(terms).sum()


def check(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, engine: str, reverse: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Values and gradients, twice; the second call is a kept one. change: of the arguments."""
    with where(engine) as at:
        given = case.draw(shape, dtype, at["device"])
        leaves = [t.requires_grad_() for t in tree_leaves(given)]
        if change is not None:
            change(given)
        right, total = sums_of(case, given, reverse, None)
        want = torch.autograd.grad(total, leaves)
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
        for _ in range(2):
            got, total = sums_of(case, given, reverse, {"backend": at["backend"]})
            assert all(t.dtype == dtype for t in got[: case.states])
            assert all(t.dtype == torch.float32 for t in got[case.states :])
            pairs = [*zip(got, right, strict=True)]
            pairs += zip(torch.autograd.grad(total, leaves), want, strict=True)
            for found, expected in pairs:
                scale = expected.abs().max().item() + 1 if expected.numel() else 1
                torch.testing.assert_close(
                    found.double(), expected.double(), rtol=0, atol=tolerance * scale
                )


@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(engine: str, name: str, reverse: bool) -> None:
    check(CASES[name], (7, 70, 64), torch.float32, engine, reverse)


@pytest.mark.thinned(4)
@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [32, 33, 41, 64, 95])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_edges_of_tiles(engine: str, length: int, channels: int, dtype: torch.dtype) -> None:
    check(CASES["gated"], (7, length, channels), dtype, engine, reverse=length % 2 == 0)


def spread(given: dict[str, Any]) -> None:
    """Every leaf of xs in its own way: padded rows, another order of dimensions, no channels of
    its own."""
    z, r, n = given["xs"]
    padded = torch.cat([z, z], -1)[..., : z.shape[-1]]
    turned = r.transpose(0, 1).contiguous().transpose(0, 1)
    given["xs"] = (padded, turned, n[..., :1])


@everywhere
@pytest.mark.parametrize("reverse", [False, True])
def test_strides(engine: str, reverse: bool) -> None:
    check(CASES["gated"], (7, 40, 64), torch.float32, engine, reverse, spread)


@pytest.mark.thinned(2)
@everywhere
def test_more_chains_than_blocks(engine: str) -> None:
    """A block takes its chains one after the other."""
    check(CASES["fires"], (40, 5, 64), torch.float32, engine)
    check(CASES["gated"], (40, 37, 64), torch.float32, engine)


OFFSETS = {
    "one": [0, 70],
    "edges": [0, 0, 15, 31, 47, 64, 64, 69, 70, 70],
    "short": [0, 1, 2, 4, 7, 11, 16, 22, 22, 22, 70],
    "empty": [0, 0, 0, 70, 70],
}


@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed(engine: str, name: str, reverse: bool, dtype: torch.dtype) -> None:
    """Values, last states and gradients of packed sequences are those of each alone."""
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
            parts = [
                loop(case, {"xs": tuple(t[:, begin:end] for t in given["xs"]),
                            "init": given["init"][k], "params": given["params"]}, reverse)
                for k, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
                if end > begin
            ]  # fmt: skip
            want_y = torch.cat([states[0] for states, _ in parts], 1)
            lasts = iter([ends[0] for _, ends in parts])
            want_last = torch.stack([
                next(lasts) if end > begin else given["init"][k].double()
                for k, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False))
            ])  # fmt: skip
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
    want, _ = loop(case, given, False)
    for y in first.values():
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
