"""Prepared scans: what `explain` prints is what runs, and calls like earlier ones skip the rest."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from table import GPU, Engine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import associative_scan, explain, ops, reduce
from assocscan.api import associative_scan as api
from assocscan.api import reduce as reduce_module
from assocscan.engines.base.commands import Allocate, RunEager
from assocscan.engines.base.executable import CommandList, Executable
from assocscan.engines.base.explained_plan import Plan
from assocscan.engines.base.scan_spec import ScanSpec, TensorSpec
from assocscan.monoids.monoid import Monoid, monoids
from assocscan.runtime import generated_gradient
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner


@pytest.fixture(autouse=True)
def no_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These tests watch the runner in Python; test_native_runner.py has the one in C++."""
    monkeypatch.setenv(runner.VARIABLE, "python")
    monkeypatch.setattr(runner, "call", runner.never)
    monkeypatch.setattr(runner, "module", None)
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()
    yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """The executables that are run."""
    found: list[Executable] = []
    original = Executable.run

    def watched(self: Executable, tensors: Any) -> Any:
        found.append(self)
        return original(self, tensors)

    monkeypatch.setattr(Executable, "run", watched)
    return found


def affine(engine: Engine, *shape: int, grad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (engine.put(torch.rand(shape, generator=generator)) for _ in range(2))
    return a.requires_grad_(grad), b.requires_grad_(grad)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("options", [{}, {"reverse": True, "return_final": True}], ids=str)
@pytest.mark.parametrize("shape,axis", [((3, 200, 5), 1), ((2, 3, 150), 2)])
def test_explain_shows_the_commands_that_run(
    engine: Engine, shape: tuple[int, ...], axis: int, options: dict[str, Any],
    run: list[Executable],
) -> None:  # fmt: skip
    xs = affine(engine, *shape)
    plan = explain(ops.affine, xs, axis, backend=engine.name, **options)
    assert not run
    for _ in range(2):  # prepared anew, then from the call cache
        engine.scan(ops.affine, xs, axis, **options)
    names = {("input", k): f"xs[{k}]" for k in range(2)}
    names |= {("output", k): f"ys[{k}]" for k in range(2)}
    assert len(run) == 2
    for executable in run:
        assert executable.plan.with_names(names).commands == plan.commands


def test_chunks_are_in_the_list() -> None:
    """The multi-pass engine's three passes, of which the second is a scan of its own."""
    pytest.importorskip("triton")
    engine = Engine("multipass", GPU)
    length = 150 if engine.interpreted else 1 << 16
    plan = explain(ops.affine, affine(engine, 1, length), 1, backend="multipass")
    launched = [line for line in plan.commands if line.startswith("launch")]
    assert "(totals)" in launched[0] and "(rescan)" in launched[-1] and len(launched) >= 3


@pytest.mark.thinned(4)
@pytest.mark.parametrize("final", [False, True], ids=["", "init and final"])
def test_calls_like_an_earlier_one_skip_the_rest(
    engine: Engine, final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No binding and no layout, forward; no derivation of the backward pass."""
    if engine.name == "eager":
        pytest.skip("runs the user's functions at every call")
    options: dict[str, Any] = {}
    if final:
        options = {"init": affine(engine, 2, 4), "return_final": True}

    def both(seed: int) -> list[Tensor]:
        a, b = affine(engine, 2, 30, 4, grad=True)
        found = engine.scan(ops.affine, (a, b), 1, **options)
        loss = sum((t * (seed + k)).sum() for k, t in enumerate(tree_leaves(found)))
        return [t.detach() for t in tree_leaves(found)] + list(torch.autograd.grad(loss, (a, b)))

    expected = both(1), both(2)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a call like an earlier one was prepared again")

    monkeypatch.setattr(api, "bind", fail)
    monkeypatch.setattr(generated_gradient, "Backward", fail)
    for seed, earlier in zip((1, 2), expected, strict=True):
        for again, t in zip(both(seed), earlier, strict=True):
            assert torch.equal(again, t)


def test_calls_by_name_skip_the_rest_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of an operator and the operator are the same call."""
    if engine.name == "eager":
        pytest.skip("runs the user's functions at every call")
    x = engine.put(torch.rand(3, 40))
    expected = [engine.scan(ops.sum, x, 1), reduce(ops.sum, x, 1, backend=engine.name)]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a call like an earlier one was bound again")

    monkeypatch.setattr(api, "bind", fail)
    monkeypatch.setattr(reduce_module, "bind", fail)
    found = [engine.scan("sum", x, 1), reduce("sum", x, 1, backend=engine.name)]
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def test_a_tensor_that_came_twice_may_be_two_tensors_later(engine: Engine) -> None:
    """A cached backward pass reads each tensor by its place among the saved ones and cotangents."""
    generator = torch.Generator().manual_seed(0)
    x, z, g, h = (engine.put(torch.rand(2, 9, generator=generator)) for _ in range(4))
    x.requires_grad_(), z.requires_grad_()
    lifted = Monoid(
        torch.add, identity=0.0, lift=lambda a, b: a * a * b.sin(), name="executables_lifted"
    )
    for xs, cotangents in (((x, x), (g, g)), ((x, z), (g, h)), ((x, z), (h, h))):
        for op in (ops.affine, lifted):
            found = []
            for backend in (engine.name, "eager"):
                ys = associative_scan(op, xs, 1, backend=backend)
                given = cotangents if isinstance(ys, tuple) else cotangents[0]
                found.append(torch.autograd.grad(ys, xs, given))
            for got, want in zip(*found, strict=True):
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_other_tensors_are_prepared_anew(engine: Engine) -> None:
    """Shapes, strides, dtypes, flags and the wish for a gradient."""
    x = engine.put(torch.arange(24.0).reshape(4, 6))
    for t in (x, x.T, x[:, ::2], x.double(), x.to(torch.int32), x[:1], x.clone().requires_grad_()):
        for axis in (0, 1):
            for reverse in (False, True):
                y = engine.scan(ops.sum, t, axis, reverse=reverse)
                turned = t.flip(axis).cumsum(axis).flip(axis) if reverse else t.cumsum(axis)
                torch.testing.assert_close(y, turned.to(y.dtype))
                assert y.requires_grad == t.requires_grad


def test_the_call_cache_is_bounded() -> None:
    op = Monoid(lambda a, b: a + b, identity=0, name="bounded_calls")
    most = op.calls.most
    for n in range(1, most + 10):
        associative_scan(op, torch.ones(n % 7 + 1, n), backend="cpu")
    assert 0 < len(op.calls) <= most


def test_gradient_of_the_plan(engine: Engine) -> None:
    """`explain` names the engine of the backward pass where there is one."""
    xs = affine(engine, 2, 300, 3)
    assert explain(ops.affine, xs, 1, backend=engine.name).gradient == ""
    xs = affine(engine, 2, 300, 3, grad=True)
    plan = explain(ops.affine, xs, 1, backend=engine.name)
    if engine.name != "eager":
        assert plan.gradient and "gradient" in str(plan)
        with torch.no_grad():
            assert explain(ops.affine, xs, 1, backend=engine.name).gradient == ""


def test_reductions_are_executables_too(engine: Engine, run: list[Executable]) -> None:
    a, b = affine(engine, 2, 300, 3)
    reduce(ops.affine, (a, b), 1, backend=engine.name)
    assert len(run) == 1 and not run[0].outputs and len(run[0].finals) == 2


def test_lists_are_put_into_lists() -> None:
    """Slots are numbered anew; constants go along."""
    device = torch.device("cpu")
    [leaf] = ops.sum.of(torch.ones(3))[0].operator.inputs  # type: ignore[union-attr]
    operator = ops.sum.of(torch.ones(3))[0].operator
    spec = ScanSpec(operator, (3,), 0, device)
    given = TensorSpec.of(torch.ones(3, dtype=leaf.dtype))

    def plan() -> Plan:
        return Plan("test", (1, 3, 1), "test", "", "", 0, "")

    inner = CommandList(spec, [given])
    one = inner.constant(torch.tensor([10.0, 20.0, 30.0]))
    [result] = inner.eager("add", lambda x, y: [x + y], [0, one], [given])
    small = inner.build([result], [], plan)
    outer = CommandList(spec, [given])
    first = outer.allocate((3,), torch.float32)
    [doubled] = outer.eager("double", lambda x, _: [2 * x], [0, first], [given])
    [added], _ = outer.inline(small, [doubled])
    again, _ = outer.inline(small, [added])
    whole = outer.build(again, [], plan)
    [y], _ = whole.run([torch.tensor([1.0, 2.0, 3.0])])
    assert y.tolist() == [22, 44, 66]
    assert [type(c) for c in whole.commands] == [Allocate, RunEager, RunEager, RunEager]
    assert whole.shown()[-1].startswith("output 0 = run add")


def test_nothing_of_a_call_is_kept_alive() -> None:
    """Neither the call cache nor an executable holds the tensors of a call."""
    x = torch.rand(5, 7, requires_grad=True)
    y = associative_scan(ops.prod, x, 1, backend="cpu")
    y.sum().backward()
    alive = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_gradients_that_are_not_generated_are_named() -> None:
    """`explain` takes the way to the gradient that the call takes."""
    A = torch.randn(3, 16, 16).requires_grad_()
    if availability()["triton"] is None:
        plan = explain(ops.matmul, A.to(GPU), backend="triton")
        assert "own adjoint" in plan.gradient

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 1 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * g

    op = Monoid(lambda a, b: Doubled.apply(a) + b, name="executables_doubled")
    plan = explain(op, torch.ones(4, requires_grad=True), backend="cpu")
    assert plan.engine.startswith("cpu") and "by the eager engine" in plan.gradient
