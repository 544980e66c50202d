"""The library operation on the engines of GPUs: the kernels over vectors run in compiled graphs and
under transforms, and what is declared of their results is what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from library_operation import SCAN, STRIDES, Recorder, check_fake_results, check_registration
from torch import Tensor
from torch.func import grad, vmap
from vector_cases import CASES, as_tuple, assert_close, cotangents, expanded, leaves_of, loop
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import ScanValueError, associative_scan, selective_scan
from assocscan.api.bind_arguments import bind
from assocscan.engines.base import fallback_warning
from assocscan.engines.base.executable import Executable
from assocscan.program import deserialization
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.operation_arguments import scan_of
from assocscan.runtime.vectors.saved_carries import vectors_by_operations

Tensors = list[Tensor]
BOTH = [VectorOperator, VectorAdjoint]


@pytest.fixture(params=VECTOR_ENGINES)
def engine(request: pytest.FixtureRequest) -> VectorEngine:
    found: VectorEngine = request.param
    return found


@pytest.fixture
def seen(engine: VectorEngine) -> Iterator[list[Executable]]:
    torch._dynamo.reset()
    with engine.running() as found:
        yield found
    torch._dynamo.reset()


def kinds(seen: list[Executable]) -> list[type]:
    return [type(e.spec.operator) for e in seen]  # type: ignore[attr-defined]


def leaves_on(engine: VectorEngine, name: str, *shape: int) -> Tensors:
    leaves = leaves_of(CASES[name], *shape)  # type: ignore[call-arg]
    return [x.to(engine.device).requires_grad_() for x in leaves]


def init_on(engine: VectorEngine, *shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.rand(shape, generator=generator).to(engine.device) for _ in range(2)]
    return tuple(t.requires_grad_() for t in drawn)


def scan(engine: VectorEngine, name: str, leaves: Tensors, **options: Any) -> Tensors:
    """Outputs and finals."""
    ys, final = associative_scan(
        CASES[name].op, expanded(leaves), 1, return_final=True, backend=engine.backend, **options
    )
    return [*as_tuple(ys), *final]


PACKED = torch.tensor([0, 33, 33, 37, 44])


def packed(engine: VectorEngine) -> dict[str, Any]:
    return {"offsets": PACKED.to(engine.device), "init": init_on(engine, 4, 2, 5, 3)}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck reads it
@pytest.mark.parametrize("case", ["gated", "attention", "gated, packed"])
def test_opcheck(case: str, engine: VectorEngine, seen: list[Executable]) -> None:
    """Schema, fake tensors, Autograd key, AOT: of the scan, and of its backward pass."""
    name = case.split(",")[0]
    leaves = leaves_on(engine, name, 2, 44, 5, 3)
    with Recorder() as recorder:
        results = scan(engine, name, leaves, **(packed(engine) if "packed" in case else {}))
        torch.autograd.grad(results, leaves, cotangents(results))
    assert [type(op) for op in recorder.operators()] == BOTH == kinds(seen)
    check_registration(recorder.calls)


@pytest.mark.thinned(20)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from_tensor reads it
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("strides", STRIDES)
def test_fake_results_are_like_the_real_ones(
    strides: str, packs: bool, engine: VectorEngine, seen: list[Executable]
) -> None:
    """Shapes, strides and dtypes of outputs, saved carries and gradients; several blocks of lanes,
    a batch that is summed, and one that is not there."""
    for batch, lanes in ((2, 40), (1, 5)):
        leaves = leaves_on(engine, "gated", batch, 10, lanes, 5)
        leaves = [STRIDES[strides](x.detach()).requires_grad_() for x in leaves]
        options: dict[str, Any] = {}
        if packs:
            options["offsets"] = torch.tensor([0, 6, 10], device=engine.device)
            options["init"] = init_on(engine, 2, batch, lanes, 5)
        with Recorder() as recorder:
            results = scan(engine, "gated", leaves, **options)
            torch.autograd.grad(results, leaves, cotangents(results))
        check_fake_results(recorder.calls)


@pytest.mark.slow
@pytest.mark.thinned(14)
@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.parametrize("options", ["", "reverse", "exclusive", "packed", "packed, reverse"])
@pytest.mark.parametrize("name", ["attention", "gated", "scalar decay"])
def test_a_kernel_goes_on_after_torch_operations(
    name: str, options: str, engine: VectorEngine, seen: list[Executable],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where the forward kernel cannot be made, torch operations save the carries that it would."""
    given: dict[str, Any] = {"reverse": "reverse" in options, "inclusive": options != "exclusive"}
    leaves = leaves_on(engine, name, 2, 44, 5, 3)
    if "packed" in options:
        given |= packed(engine)
        if name == "scalar decay":
            given["init"] = (given["init"][0][..., :1], given["init"][1])
    with Recorder() as recorder:
        results = scan(engine, name, leaves, **given)
        torch.autograd.grad(results, leaves, cotangents(results))
    (forward, saved), (backward, gradients) = recorder.calls
    monkeypatch.setattr(fallback_warning, "_WARNED", type(fallback_warning._WARNED)())
    spec, tensors = scan_of(*forward)
    found = vectors_by_operations(engine.backend, spec, tensors, "a test does without a kernel")
    for a, b in zip(found, saved, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    spec, tensors = scan_of(*backward)
    at, carries = spec.operator.carries, found[len(spec.operator.op.outputs)]
    given_again = list(backward)
    given_again[2] = [*backward[2][:at], carries, *backward[2][at + 1 :]]
    before = len(seen)
    again = SCAN(*given_again)
    assert kinds(seen[before:]) == [VectorAdjoint]
    for a, b in zip(again, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    by_operations = vectors_by_operations(engine.backend, spec, tensors, "a test does without")
    for a, b in zip(by_operations, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
        assert (a.stride(), a.dtype) == (b.stride(), b.dtype)


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[1:],
        lambda t: t[:, :, :1],
        lambda t: t[..., :1],
        lambda t: t.long(),
        lambda t: t.view(torch.uint8),
    ],
    ids=["chunks", "lanes", "states", "dtype", "bytes"],
)
def test_carries_that_do_not_fit_are_refused(
    change: Callable[[Tensor], Tensor], engine: VectorEngine, seen: list[Executable]
) -> None:
    """Kernels would read outside of them."""
    leaves = leaves_on(engine, "gated", 2, 9, 5, 3)
    with Recorder() as recorder:
        results = scan(engine, "gated", leaves)
        torch.autograd.grad(results, leaves, cotangents(results))
    given = recorder.calls[1][0]
    at = recorder.operators()[1].carries
    given[2] = [*given[2][:at], change(given[2][at]), *given[2][at + 1 :]]
    with pytest.raises(ScanValueError, match="saved carries"):
        SCAN(*given)


def compiled(function: Callable[..., Any], dynamic: bool) -> tuple[Callable[..., Any], Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic), counter


@pytest.mark.slow
@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", ["attention", "gated", "two decays"])
def test_compiled_scans(name: str, engine: VectorEngine, seen: list[Executable]) -> None:
    """Less than a chunk and several are one graph; values and gradients of the loop."""
    timed = next(k for k, (_, axes) in enumerate(CASES[name].leaves) if "t" in axes)

    def call(*leaves: Tensor) -> Tensors:
        xs = tuple([x.expand(-1, leaves[timed].shape[1], -1, -1) for x in leaves])
        ys, final = associative_scan(
            CASES[name].op, xs, 1, return_final=True, backend=engine.backend
        )
        return [*as_tuple(ys), *final]

    run, counter = compiled(call, True)
    for batch, steps, lanes in ((2, 7, 5), (3, 40, 35), (2, 33, 6)):
        seen.clear()
        leaves = leaves_on(engine, name, batch, steps, lanes, 3)
        found = run(*leaves)
        g = cotangents(found)
        got = torch.autograd.grad(found, leaves, g)
        assert kinds(seen) == BOTH
        exact = [x.detach().double().requires_grad_() for x in leaves]
        ys, last = loop(CASES[name].op, expanded(exact))
        want = (*ys, *last)
        right = torch.autograd.grad(want, exact, [t.double() for t in g])
        for y, r in zip(found, want, strict=True):
            assert_close(y.detach(), r.detach(), steps)
        for a, b in zip(got, right, strict=True):
            assert_close(a, b, steps * max(1, found[0].numel() // a.numel()))
    assert counter.frame_count == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_selective_scan(
    dynamic: bool, engine: VectorEngine, seen: list[Executable]
) -> None:
    """All options, packed, with groups: the results of plain calls."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(engine.device).requires_grad_()

    tensors = [draw(2, 44, 6), draw(2, 44, 6), draw(6, 4), draw(2, 44, 2, 4), draw(2, 44, 2, 4),
               draw(6), draw(2, 44, 6), draw(6), draw(4, 2, 6, 4)]  # fmt: skip
    offsets = PACKED.to(engine.device)

    def call(*x: Tensor) -> Tensors:
        u, delta, A, *rest, init = x
        return list(selective_scan(
            u, delta, -A.exp(), *rest, delta_softplus=True, init=init, offsets=offsets,
            return_final=True, backend=engine.backend,
        ))  # fmt: skip

    run, counter = compiled(call, dynamic)
    found = []
    for function in (run, call):
        seen.clear()
        results = function(*tensors)
        found.append([*results, *torch.autograd.grad(results, tensors, cotangents(results))])
        assert function is call or kinds(seen) == BOTH
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))
    assert counter.frame_count == 1


def test_no_guard_on_the_number_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen at the size of the first call serves every other: its graph is not made
    again."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    for channels, worth in ((4096, True), (5, False)):
        leaves = leaves_of(CASES["selective"], 1, 7, channels, 8)
        fake = [
            mode.from_tensor(x, source=ConstantSource(f"x{channels}_{k}"))
            for k, x in enumerate(leaves)
        ]
        xs: Any = tuple(x.expand(-1, 7, -1, -1) for x in fake)
        with mode:
            call = bind(CASES["selective"].op, xs, 1, False, True, None, False, None)
            before = len(shapes.guards)
            assert gpu_engine_choice.is_worth_vectors(call) == worth
        assert len(shapes.guards) == before


def total(f: Callable[..., Tensors]) -> Callable[..., Tensor]:
    return lambda *x: torch.stack([y.relu().square().sum() for y in f(*x)]).sum()


def doubled(x: Tensors, *places: int) -> Tensors:
    return [torch.stack([t, 2 * t]) if k in places else t for k, t in enumerate(x)]


def dims(*places: int) -> tuple[int | None, ...]:
    return tuple(0 if k in places else None for k in range(8))


EVERY = tuple(range(8))
Transform = Callable[[Callable[..., Tensors], Tensors], Any]
TRANSFORMS: dict[str, tuple[Transform, list[type]]] = {
    "grad": (lambda f, x: grad(total(f), EVERY)(*x), BOTH),
    "vmap": (lambda f, x: vmap(f)(*doubled(x, *EVERY)), [VectorOperator]),
    "vmap of grad of some": (
        lambda f, x: vmap(grad(total(f), EVERY), dims(0, 3))(*doubled(x, 0, 3)), BOTH,
    ),
    "grad of vmap": (
        lambda f, x: grad(total(vmap(f, dims(0, 3))), EVERY)(*doubled(x, 0, 3)), BOTH,
    ),
    "two vmaps": (
        lambda f, x: vmap(vmap(grad(total(f), (0, 2)), dims(0)), dims(2))(*doubled(x, 0, 2)), BOTH,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.thinned(20)
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, packs: bool, engine: VectorEngine, seen: list[Executable]) -> None:
    """As those of the loop on every sequence by itself."""
    transform, wanted = TRANSFORMS[name]
    leaves = [x.detach() for x in leaves_on(engine, "gated", 2, 40, 5, 3)]
    bounds = (0, 33, 33, 40) if packs else (0, 40)

    def run(*x: Tensor) -> Tensors:
        offsets = torch.tensor(bounds, device=engine.device) if packs else None
        return [associative_scan(
            CASES["gated"].op, expanded(list(x)), 1, backend=engine.backend, offsets=offsets
        )]  # fmt: skip

    def reference(*x: Tensor) -> Tensors:
        parts = []
        for begin, end in pairwise(bounds):
            part = tuple(t[:, begin:end] for t in expanded(list(x)))
            parts += [loop(CASES["gated"].op, part)[0][0]] if begin < end else []
        return [torch.cat(parts, 1)]

    got = transform(run, leaves)
    assert kinds(seen) == wanted
    want = transform(reference, [x.double() for x in leaves])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()), check_dtype=False
        )


@pytest.mark.exhaustive
def test_second_derivatives(engine: VectorEngine, seen: list[Executable]) -> None:
    """Of a traced gradient: torch operations compute what no kernel does."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = leaves_on(engine, "gated", 1, 9, 3, 3)

    def second(f: Callable[..., Tensors]) -> Callable[..., Any]:
        def of(*x: Tensor) -> Any:
            first = torch.autograd.grad(total(f)(*x), x, create_graph=True)
            loss = torch.stack([g.square().sum() for g in first]).sum()
            return torch.autograd.grad(loss, x, materialize_grads=True)

        return of

    graph = make_fx(second(lambda *x: scan(engine, "gated", list(x))))(*leaves)
    nodes = [n for n in graph.graph.nodes if n.target is SCAN]
    assert {type(deserialization.read(*n.args[:2])) for n in nodes} == set(BOTH)
    exact = [x.detach().double().requires_grad_() for x in leaves]

    def reference(*x: Tensor) -> Tensors:
        ys, last = loop(CASES["gated"].op, expanded(list(x)))
        return [*ys, *last]

    for a, b in zip(graph(*leaves), second(reference)(*exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
