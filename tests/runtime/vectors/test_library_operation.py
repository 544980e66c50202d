"""The library operation on vectors: kernels and torch operations, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from library_operation import SCAN, STRIDES, Recorder, check_fake_results, check_registration
from torch import Tensor
from vector_cases import CASES, as_tuple, assert_close, cotangents, expanded, leaves_of, loop

from assocscan import BackendError, FallbackWarning, associative_scan
from assocscan.caching.bounded import BoundedCache
from assocscan.engines.base import fallback_warning
from assocscan.engines.cpu.vectors import prepare
from assocscan.program import deserialization
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import executable_cache as executables

Tensors = list[Tensor]


def scan(name: str, leaves: Tensors, init: Tensors | None = None, **options: Any) -> Tensors:
    """Outputs and finals."""
    op = CASES[name].op
    start = None if init is None else tuple(init)
    ys, final = associative_scan(op, expanded(leaves), 1, init=start, return_final=True, **options)
    return [*as_tuple(ys), *final]


def tracked(tensors: Tensors) -> Tensors:
    return [t.detach().clone().requires_grad_() for t in tensors]


def assert_right(
    name: str, leaves: Tensors, init: Tensors, results: Tensors, grads: Any, **options: Any
) -> None:
    """Results, and gradients for `cotangents(results)`, against the loop in float64."""
    exact = [t.detach().double().requires_grad_() for t in (*leaves, *init)]
    count = len(leaves)
    outputs, finals = loop(
        CASES[name].op, expanded(exact[:count]), init=tuple(exact[count:]) or None, **options
    )
    steps = max(x.shape[1] for x in leaves)
    wanted = [*outputs, *finals]
    for k, (y, r) in enumerate(zip(results, wanted, strict=True)):
        assert_close(y.detach(), r.detach(), steps, f"result {k}")
    given = [g.double() for g in cotangents(results)]
    right = torch.autograd.grad(wanted, exact, given, allow_unused=True)
    for k, (g, r) in enumerate(zip(grads, right, strict=True)):
        if r is None or g is None:
            assert (r is None or not r.any()) and (g is None or not g.any()), f"gradient {k}"
        else:
            terms = max(1, results[0].numel() // max(g.numel(), 1))
            assert_close(g, r, steps * terms, f"gradient {k}")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("name", ["gated", "plain", "softmax", "moments", "attention"])
def test_the_operation_runs_the_kernels_of_vectors(name: str, init: bool) -> None:
    """Forward and backward under a dispatch mode are two operations, on vectors."""
    n = 6
    leaves = tracked(leaves_of(CASES[name], 2, 67, 21, n))
    sizes = {"softmax": (1, n)}.get(name, (n, n))
    start = [torch.rand(2, 21, k).requires_grad_() for k in sizes] if init else []
    with Recorder() as seen:
        results = scan(name, leaves, start or None, backend="cpu")
        grads = torch.autograd.grad(
            results, [*leaves, *start], cotangents(results), allow_unused=True
        )
    kinds = [type(op) for op in seen.operators()]
    assert kinds == [VectorOperator, VectorAdjoint]
    assert_right(name, leaves, start, results, grads)


@pytest.mark.parametrize("bounds", [(0, 40), (0, 0, 5, 5, 39, 40)])
def test_packed_sequences(bounds: tuple[int, ...]) -> None:
    """As the same scan of plain tensors, which `test_vectors` compares with the loop."""
    leaves = tracked(leaves_of(CASES["gated"], 2, 40, 20, 4))
    count = len(bounds) - 1
    init = tracked([torch.rand(count, 2, 20, 4) for _ in range(2)])
    found = []
    for mode in (Recorder(), None):
        with mode or torch.enable_grad():
            results = scan("gated", leaves, init, offsets=torch.tensor(bounds))
            grads = torch.autograd.grad(results, [*leaves, *init], cotangents(results))
        found.append([*results, *grads])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck reads it
@pytest.mark.parametrize("case", ["gated", "gated, packed, with init", "moments", "scalar decay"])
def test_opcheck(case: str) -> None:
    """Schema, fake tensors, Autograd key, AOT: of the scan, and of its backward pass."""
    name = case.split(",")[0]
    leaves = tracked(leaves_of(CASES[name], 2, 9, 5, 3))
    options: dict[str, Any] = {}
    if "packed" in case:
        options["offsets"] = torch.tensor([0, 4, 4, 9])
        options["init"] = tracked([torch.rand(3, 2, 5, 3) for _ in range(2)])
    with Recorder() as seen:
        results = scan(name, leaves, **options)
        torch.stack([r.sum() for r in results]).sum().backward()
    check_registration(seen.calls)


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # from_tensor reads it
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("strides", STRIDES)
def test_fake_results_are_like_the_real_ones(strides: str, threads: int) -> None:
    """Shapes, strides and dtypes of outputs, saved carries and gradients, however many threads."""
    leaves = [STRIDES[strides](x) for x in leaves_of(CASES["gated"], 3, 200, 18, 5)]
    leaves = [x.requires_grad_() for x in leaves]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with Recorder() as seen:
            results = scan("gated", leaves)
            torch.autograd.grad(results, leaves, cotangents(results))
    finally:
        torch.set_num_threads(before)
    check_fake_results(seen.calls)


def cpp_fails(monkeypatch: pytest.MonkeyPatch, passes: tuple[type, ...]) -> None:
    """As if the compiler refused the kernels of these operators."""
    real = prepare.check_cost
    names = {VectorOperator: "gated_test", VectorAdjoint: "gated_test (backward)"}
    refused = {names[kind] for kind in passes}

    def check(name: str, operations: int) -> None:
        real(name, 1 << 30 if name in refused else operations)

    monkeypatch.setattr(prepare, "check_cost", check)
    monkeypatch.setattr(executables, "_PREPARED", BoundedCache())
    monkeypatch.setattr(fallback_warning, "_WARNED", BoundedCache())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "passes", [(VectorOperator,), (VectorAdjoint,), (VectorOperator, VectorAdjoint)], ids=str
)
def test_torch_operations_run_what_cannot_be_compiled(
    passes: tuple[type, ...], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only one of the two passes can be: carries that were not saved are not read."""
    leaves = tracked(leaves_of(CASES["gated"], 2, 70, 5, 3))
    init = tracked([torch.rand(*((3,) if packed else ()), 2, 5, 3) for _ in range(2)])
    options = {"offsets": torch.tensor([0, 30, 30, 70])} if packed else {}
    plain = scan("gated", leaves, init, **options)
    wanted = torch.autograd.grad(plain, [*leaves, *init], cotangents(plain))
    cpp_fails(monkeypatch, passes)
    with Recorder() as seen, pytest.warns(FallbackWarning, match="torch operations"):
        results = scan("gated", leaves, init, **options)
        grads = torch.autograd.grad(results, [*leaves, *init], cotangents(results))
    assert [type(op) for op in seen.operators()] == [VectorOperator, VectorAdjoint]
    if not packed:
        assert_right("gated", leaves, init, results, grads)
    for a, b in zip((*results, *grads), (*plain, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
        assert a.stride() == b.stride()


def test_a_named_backend_raises_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = tracked(leaves_of(CASES["gated"], 1, 5, 3, 2))
    cpp_fails(monkeypatch, (VectorOperator,))
    with Recorder(), pytest.raises(BackendError, match="operations"):
        scan("gated", leaves, backend="cpu")


def test_carries_anywhere_in_memory() -> None:
    """A graph may pass carries on with other strides, or at any address."""

    def moved(given: list[Any]) -> list[Any]:
        op = deserialization.read(*given[:2])
        if isinstance(op, VectorAdjoint):
            carries = given[2][op.carries]
            place = torch.zeros(carries.numel() + 1, dtype=torch.uint8)[1:].view(carries.shape)
            other = place.copy_(carries) if carries.shape[0] % 2 else carries.mT.contiguous().mT
            given[2] = [*given[2][: op.carries], other, *given[2][op.carries + 1 :]]
        return given

    for steps in (70, 140):
        leaves = tracked(leaves_of(CASES["gated"], 2, steps, 20, 3))
        found = []
        for change in (moved, lambda given: given):
            with Recorder(change):
                results = scan("gated", leaves)
                found.append(torch.autograd.grad(results, leaves, cotangents(results)))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def test_the_gradient_of_a_repeated_leaf_is_summed_in_the_kernel() -> None:
    """Under a dispatch mode and in traced graphs, as in plain calls."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves = tracked(leaves_of(CASES["selective"], 2, 30, 6, 4))

    def grads(*x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(scan("selective", list(x))[0].sum(), x)

    with Recorder() as seen:
        plain = grads(*leaves)
    graph = make_fx(grads)(*leaves)
    for a, b in zip(graph(*leaves), plain, strict=True):
        torch.testing.assert_close(a, b)
    operators = seen.operators()
    nodes = [n for n in graph.graph.nodes if n.target is SCAN]
    operators += [deserialization.read(*n.args[:2]) for n in nodes]
    adjoints = [op for op in operators if isinstance(op, VectorAdjoint)]
    assert len(adjoints) == 2
    for op in adjoints:
        assert op.repeated == ((), (), (1,), (), ())
