"""Scans in modules: pickles, copies, checkpoints, memory, and what autograd refuses."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from table import AFFINE, Engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from assocscan import (
    Monoid,
    MonoidError,
    associative_scan,
    linear_recurrence,
    monoid,
    ops,
    product,
    segmented,
)
from assocscan.functional.recurrence import _RECURRENCE

PyTree = Any

# A module that another process imports: monoids under their own name, under a registered one only,
# and one that is made of named functions and not registered.
SOURCE = """
import torch
from assocscan import Monoid, associative_scan, monoid

@monoid(identity=(1.0, 0.0))
def decay(left, right):
    return right[0] * left[0], right[0] * left[1] + right[1]

def combine(left, right):
    return left + 2 * right

hidden = {"doubling": monoid(lambda left, right: left + 2 * right, name="doubling")}
unregistered = Monoid(combine, name="unregistered")

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.75]))
        self.ops = [decay, hidden["doubling"], unregistered]

    def forward(self, x):
        a = torch.sigmoid(self.weight * x)
        return torch.stack([
            associative_scan(self.ops[0], (a, x))[1],
            associative_scan(self.ops[1], x),
            associative_scan(self.ops[2], x),
        ])
"""


def test_another_process_imports_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save writes references: loading imports the module that defines the monoids."""
    (tmp_path / "modules_layers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    layer = importlib.import_module("modules_layers").Layer()
    x, file = torch.linspace(-1, 1, 3), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    del sys.modules["modules_layers"]  # as in a process that never saw it
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(x), layer(x))
    layers = sys.modules["modules_layers"]
    assert type(loaded) is layers.Layer is not type(layer)
    assert loaded.ops[0] is layers.decay
    assert loaded.ops[1] is layers.hidden["doubling"]
    assert loaded.ops[2].combine is layers.combine


@monoid(identity=0.0)
def modules_halving(left: Tensor, right: Tensor) -> Tensor:
    return left / 2 + right


def modules_combine(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def modules_lift(x: Tensor) -> Tensor:
    return 2 * x


PARTS = Monoid(modules_combine, identity=0.0, name="modules_parts", lift=modules_lift)


@pytest.mark.parametrize("op", [modules_halving, ops.affine, ops.matmul, ops.welford], ids=repr)
def test_pickles_are_references(op: Monoid) -> None:
    assert pickle.loads(pickle.dumps(op)) is op


def test_monoids_of_named_functions(engine: Engine) -> None:
    again = pickle.loads(pickle.dumps(PARTS))
    x = engine.put(torch.arange(5.0))
    assert torch.equal(engine.scan(again, x), engine.scan(PARTS, x))


@pytest.mark.parametrize("role", ["combine", "lift", "lower"])
def test_functions_without_a_name_cannot_be_pickled(role: str) -> None:
    def local(x: Any, y: Any = 0) -> Any:
        return x + y

    for fn, kind in ((local, "local function"), (lambda x, y=0: x + y, "lambda")):
        parts: dict[str, Any] = {"combine": modules_combine, role: fn}
        op = Monoid(parts.pop("combine"), name="modules_unnamed", **parts)
        with pytest.raises(MonoidError, match=rf"its {role} is a {kind}.*top level"):
            pickle.dumps(op)
    assert (
        pickle.loads(pickle.dumps(Monoid(torch.maximum, name="modules_torch"))).combine(
            torch.tensor(1), torch.tensor(2)
        )
        == 2
    )


def test_copies_of_modules_share_their_monoids() -> None:
    module = nn.Linear(2, 2)
    module.op = local = monoid(lambda left, right: left + right, name="modules_local")
    assert copy.deepcopy(module).op is local
    assert copy.copy(local) is local


class Rows(Dataset[Tensor]):
    """A data set that scans in the workers of its loader."""

    def __init__(self, op: Monoid) -> None:
        self.op = op

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Tensor:
        y: Tensor = associative_scan(self.op, torch.full((3,), float(row)))
        return y


def test_workers_of_a_loader() -> None:
    loader = DataLoader(Rows(ops.sum), batch_size=2, num_workers=1, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == [[k, 2 * k, 3 * k] for k in range(4)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(engine: Engine, reentrant: bool) -> None:
    def block(a: Tensor, b: Tensor) -> Tensor:
        h: Tensor = engine.scan(_RECURRENCE, (torch.sigmoid(a), b), 1)
        return h.sin()

    gradients = []
    for run in (lambda a, b: checkpoint(block, a, b, use_reentrant=reentrant), block):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(2, 9, generator=generator).requires_grad_() for _ in range(2))
        run(engine.put(a), engine.put(b)).square().sum().backward()
        gradients.append((a.grad, b.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


def saved_by(function: Callable[[], Any]) -> list[Tensor]:
    """What the graph of `function` keeps for its backward pass."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return kept


@pytest.mark.parametrize("with_init", [False, True])
def test_only_what_the_adjoint_reads_is_saved(engine: Engine, with_init: bool) -> None:
    """For a recurrence: a, h, and the state that enters; neither b nor the product of a."""
    if engine.name == "eager":
        pytest.skip("autograd's own choice")
    a, b = (engine.put(torch.rand(2, 33)).requires_grad_() for _ in range(2))
    init = engine.put(torch.rand(2)).requires_grad_()
    carry = (torch.ones_like(init), init) if with_init else None
    results: list[Tensor] = []

    def scan() -> None:
        results.append(engine.scan(_RECURRENCE, (a, b), 1, init=carry))

    kept = [t.data_ptr() for t in saved_by(scan)]
    expected = [a.data_ptr(), results[0].data_ptr(), *([init.data_ptr()] if with_init else [])]
    assert sorted(kept) == sorted(expected)


def test_a_sum_saves_nothing(engine: Engine) -> None:
    if engine.name == "eager":
        pytest.skip("autograd's own choice")
    x = engine.put(torch.rand(2, 33)).requires_grad_()
    engine.scan(ops.sum, x, 1)
    assert saved_by(lambda: engine.scan(ops.sum, x, 1)) == []


@pytest.mark.parametrize("changed", ["a", "h"])
def test_changed_tensors_are_noticed(engine: Engine, changed: str) -> None:
    """torch's own error, where and only where the backward pass reads the tensor."""
    if engine.name == "eager":
        pytest.skip("its backward pass reads copies")
    a, b = (engine.put(torch.rand(2, 9)).requires_grad_() for _ in range(2))
    held = {"a": a * 1, "b": b * 1}
    held["h"] = engine.scan(_RECURRENCE, (held["a"], held["b"]), 1)
    total = held["h"].sum()
    held["b"].mul_(2)  # is not read
    torch.autograd.grad(total, (a, b), retain_graph=True)
    held[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, (a, b))


def test_gradients_of_integers_are_refused_by_torch(engine: Engine) -> None:
    n = engine.put(torch.arange(5))
    total = engine.scan(ops.sum, n).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(total, n)


def test_second_use_of_a_freed_graph(engine: Engine) -> None:
    a, b = (engine.put(torch.rand(2, 9)).requires_grad_() for _ in range(2))
    total = engine.scan(_RECURRENCE, (a, b), 1).sum()
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_warm_calls_are_told_apart(engine: Engine) -> None:
    """By what requires a gradient, by flags, by shape: one monoid, many kinds of call."""
    op = AFFINE
    for _ in range(2):  # cold, then warm
        for shape in ((2, 5), (3, 4)):
            for wanted in ((False, False), (True, False), (False, True), (True, True)):
                xs = [engine.put(torch.rand(shape)).requires_grad_(w) for w in wanted]
                init = tuple(engine.put(torch.rand(shape[0])) for _ in range(2))
                for options in ({}, {"init": init}, {"return_final": True}):
                    results = engine.scan(op, tuple(xs), 1, **options)
                    (_, h), final = results if "return_final" in options else (results, None)
                    expected, last = loop(*(x.detach() for x in xs), options.get("init"))
                    torch.testing.assert_close(h.detach(), expected)
                    assert h.requires_grad == any(wanted)
                    if final is not None:
                        torch.testing.assert_close(final[1].detach(), last)


def test_warm_calls_of_nested_tuples(engine: Engine) -> None:
    """((a, b), f) is not (a, (b, f)), nor (a, b, f)."""
    resetting = segmented(AFFINE)
    right = product(ops.sum, ops.max)
    for _ in range(3):
        a, b = (engine.put(torch.rand(3, 5)) for _ in range(2))
        reset = engine.put(torch.rand(3, 5) > 0.5)
        init = ((a[:, 0].contiguous(), b[:, 0].contiguous()), reset[:, 0].contiguous())
        for start in (None, init):
            got = engine.scan(resetting, ((a, b), reset), 1, init=start)
            want = associative_scan(resetting, ((a, b), reset), 1, init=start, backend="eager")
            torch.testing.assert_close(got, want)
        got = engine.scan(right, a, 1)
        torch.testing.assert_close(got, (a.cumsum(1), a.cummax(1).values))
        with pytest.raises(TypeError):
            engine.scan(resetting, (a, (b, reset)), 1)
        with pytest.raises(TypeError):
            engine.scan(resetting, (a, b, reset), 1)


@pytest.mark.parametrize("wanted", [(True, True), (False, True)], ids=str)
def test_warm_gradients_are_told_apart(engine: Engine, wanted: tuple[bool, bool]) -> None:
    """By the cotangent's strides, by what is differentiated again, by what hooks give back."""

    def turned(t: Tensor) -> Tensor:
        return t if t.dim() < 2 else t.mT.contiguous().mT

    for round in range(3):  # cold, remembered, warm
        for kind in ("dense", "expanded", "turned", "twice", "hooks", "second"):
            drawn = [torch.rand(4, 5, dtype=torch.float64) for _ in range(3)]
            found = []
            for put in (engine.put, lambda t: t):
                a, b = (put(t).requires_grad_(w) for t, w in zip(drawn[:2], wanted, strict=True))
                g = put(drawn[2])
                g = {"expanded": g[:1, :1].expand(4, 5), "turned": turned(g)}.get(kind, g)
                leaves = [t for t in (a, b) if t.requires_grad]
                hooks = contextlib.nullcontext()
                if kind == "hooks":
                    hooks = torch.autograd.graph.saved_tensors_hooks(turned, turned)
                with hooks:
                    h = loop(a, b, None)[0]
                    if put is engine.put:
                        h = engine.scan(_RECURRENCE, (a, b), 1)
                if kind == "second":
                    first = torch.autograd.grad(h, leaves, g.requires_grad_(), create_graph=True)
                    found.append(torch.autograd.grad(sum(t.square().sum() for t in first), g))
                    continue
                grads = torch.autograd.grad(h, leaves, g, retain_graph=kind == "twice")
                if kind == "twice":
                    grads += torch.autograd.grad(h, leaves, 2 * g)
                found.append(grads)
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got.cpu(), want, msg=f"{kind} in round {round}")


def loop(a: Tensor, b: Tensor, init: PyTree) -> tuple[Tensor, Tensor]:
    h, states = (torch.zeros_like(b[:, 0]) if init is None else init[1]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1), h


def test_parameters_are_warm_too() -> None:
    a, b = nn.Parameter(torch.rand(2, 5)), torch.rand(2, 5)
    for _ in range(2):
        h = linear_recurrence(a, b)
        assert isinstance(h, Tensor)
        torch.testing.assert_close(h.detach(), loop(a.detach(), b, None)[0])
        assert h.requires_grad
    buffer = io.BytesIO()
    torch.save(nn.ParameterList([a]), buffer)
    assert buffer.tell() > 0
