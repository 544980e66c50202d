"""torch.compile and torch.export: one graph, one operation in it, no graph per length.

Against the oracle's loop in float64, forward and backward.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from table import AFFINE, affine, elements, values
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

import assocscan
from assocscan import (
    associative_scan,
    cumsum,
    linear_recurrence,
    monoid,
    ops,
    product,
    reversed_order,
    segmented,
    with_lift,
    with_lower,
)
from assocscan.caching.bounded import BoundedCache
from assocscan.program import deserialization
from assocscan.testing import reference_scan

PyTree = Any
SCAN = torch.ops.assocscan.scan.default
REAL = values(torch.float64)
PAIR = elements((REAL, ()), (REAL, ()))
GATED = monoid(
    affine,
    identity=(1.0, 0.0),
    name="compile_gated",
    lift=lambda x, gate: (torch.sigmoid(gate), x * gate),
    lower=lambda state, xs: {"y": state[1] * torch.tanh(xs[1]), "z": [state[0]]},
)


class Graphs:
    """A backend that counts the graphs and keeps the operations of their forward passes."""

    def __init__(self) -> None:
        self.count = 0
        self.scans: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(lowered: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self.scans.append(sum(node.target is SCAN for node in lowered.graph.nodes))
            boxed: Callable[..., Any] = make_boxed_func(lowered)
            return boxed

        self.count += 1
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=keep, bw_compiler=keep)(
            graph, inputs
        )
        return compiled


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def draw(*shape: int, seed: int = 0) -> Tensor:
    drawn = REAL(torch.Generator().manual_seed(seed + sum(shape)), shape)
    return drawn.contiguous().requires_grad_()


def with_gradients(function: Callable[..., PyTree], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of the result, then the gradients of a weighted sum of them."""
    leaves = tree_leaves(function(*inputs))
    weights = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in leaves]
    total = torch.stack([(t * w).sum() for t, w in zip(leaves, weights, strict=True)]).sum()
    wanted = [t for t in inputs if t.requires_grad]
    return [*(t.detach() for t in leaves), *torch.autograd.grad(total, wanted)]


def check(
    compiled: Callable[..., PyTree], expected: Callable[..., PyTree], inputs: Sequence[Tensor]
) -> None:
    got, want = (with_gradients(f, inputs) for f in (compiled, expected))
    torch.testing.assert_close(got, want)


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    """A model with other operations around the scan."""
    return torch.tanh(linear_recurrence(torch.sigmoid(a), b * 2)) + a


def recurrence_loop(a: Tensor, b: Tensor) -> Tensor:
    h = [b[:, 0] * 2]
    for t in range(1, b.shape[1]):
        h.append(torch.sigmoid(a[:, t]) * h[-1] + b[:, t] * 2)
    return torch.tanh(torch.stack(h, 1)) + a


def test_a_recurrence_inside_a_model(graphs: Graphs) -> None:
    compiled = torch.compile(recurrence, fullgraph=True, backend=graphs)
    check(compiled, recurrence_loop, (draw(3, 7), draw(3, 7, seed=1)))
    assert graphs.count == 1
    assert graphs.scans == [1, 1]  # forward, backward


@pytest.mark.parametrize("dynamic", [None, True])
def test_no_graph_per_length(graphs: Graphs, dynamic: bool | None) -> None:
    compiled = torch.compile(recurrence, fullgraph=True, backend=graphs, dynamic=dynamic)
    for length in (5, 8, 13, 31, 64):
        check(compiled, recurrence_loop, (draw(3, length), draw(3, length, seed=1)))
    assert graphs.count == (1 if dynamic else 2)


@pytest.mark.parametrize("operator", ["sum", lambda a, b: a + b], ids=["name", "function"])
@pytest.mark.slow(2)
def test_an_axis_that_is_an_argument(graphs: Graphs, operator: Any) -> None:
    """Dynamo takes a number that changes for a size; an axis stays a constant."""

    def function(x: Tensor, axis: int) -> Any:
        return associative_scan(operator, x, axis), assocscan.reduce(operator, x, axis)

    compiled, x = torch.compile(function, fullgraph=True, backend=graphs), draw(2, 3, 4)
    for axis in (0, 1, 2, -1, 0, 1):
        torch.testing.assert_close(compiled(x, axis), function(x, axis))
    assert graphs.count == 4


def test_every_dimension_dynamic(graphs: Graphs) -> None:
    def raw(a: Tensor, b: Tensor) -> PyTree:
        return associative_scan(affine, (a, b), 1, reverse=True)

    def loop(a: Tensor, b: Tensor) -> PyTree:
        return reference_scan(affine, (a, b), 1, True)

    compiled = torch.compile(raw, fullgraph=True, backend=graphs, dynamic=True)
    for shape in ((2, 5, 3), (3, 7, 4), (5, 4, 2)):
        check(compiled, loop, (draw(*shape), draw(*shape, seed=1)))
    assert graphs.count == 1


def summed_by_rows(left: Tensor, right: Tensor) -> Tensor:
    return left + right * left.shape[0]


def test_raw_callables_that_look_at_sizes(graphs: Graphs) -> None:
    """They have a graph for every size that they look at."""

    def scan(x: Tensor) -> Tensor:
        y: Tensor = associative_scan(summed_by_rows, x, 1)
        return y

    compiled = torch.compile(scan, fullgraph=True, backend=graphs, dynamic=True)
    for rows, length in ((2, 3), (4, 3), (4, 5)):
        x = draw(rows, length).detach()
        torch.testing.assert_close(compiled(x), reference_scan(summed_by_rows, x, 1))


def test_lift_lower_and_structures(graphs: Graphs) -> None:
    options = {"reverse": True, "inclusive": False, "return_final": True}

    def run(scan: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda x, gate: scan(GATED, (x, gate), 1, **options)

    compiled = torch.compile(run(associative_scan), fullgraph=True, backend=graphs)
    check(compiled, run(reference_scan), (draw(2, 6), draw(2, 6, seed=1)))


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def named(left: PyTree, right: PyTree) -> PyTree:
    a, b = affine((left["s"].a, left["s"].b), (right["s"].a, right["s"].b))
    return {"s": Pair(a, b), "n": [left["n"][0] + right["n"][0]]}


def test_monoids_on_named_tuples(graphs: Graphs) -> None:
    """As elements and as init, in one graph; what comes back has the caller's classes."""
    op = assocscan.monoid(named, name="test_compile_named")
    a, b, n = torch.rand(2, 9), torch.randn(2, 9), torch.arange(18).view(2, 9)
    start = {"s": Pair(torch.ones(2), torch.zeros(2)), "n": [torch.zeros(2, dtype=torch.int64)]}

    def scan(a: Tensor, b: Tensor, n: Tensor) -> PyTree:
        xs = {"s": Pair(a, b), "n": [n]}
        return associative_scan(op, xs, 1, init=start, return_final=True)

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    for _ in range(2):
        got, want = compiled(a, b, n), scan(a, b, n)
        assert tree_structure(got) == tree_structure(want)
        torch.testing.assert_close(tree_leaves(got), tree_leaves(want))


@pytest.mark.slow
def test_structures_that_lower_makes(graphs: Graphs) -> None:
    """Dicts, lists and tuples; a named tuple needs a graph break."""

    def scan(lower: Any) -> Callable[[Tensor], PyTree]:
        op = with_lower(ops.sum, lower)
        return lambda x: associative_scan(op, x, return_final=True)

    x = draw(5).detach()
    plain = scan(lambda s: {"a": [s, (s + 1,)], "b": s * 2})
    got, want = torch.compile(plain, fullgraph=True, backend=graphs)(x), plain(x)
    assert tree_structure(got) == tree_structure(want)
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want))
    named = scan(lambda s: Pair(s, s * 2))
    got, want = torch.compile(named, backend=graphs)(x), named(x)
    assert isinstance(got[0], Pair)
    torch.testing.assert_close(got, want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="named tuple"):
        torch.compile(named, fullgraph=True, backend=graphs)(x)


@pytest.mark.parametrize("final", [False, True])
def test_structures_come_back(graphs: Graphs, final: bool) -> None:
    """Dicts, lists and named tuples, also nested."""

    def scan(a: Tensor, b: Tensor) -> PyTree:
        tree = {"s": Pair(a, b), "n": [a * 2]}
        return associative_scan(named, tree, 1, return_final=final)

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    a, b = draw(2, 5), draw(2, 5, seed=1)
    got, want = compiled(a, b), scan(a, b)
    assert tree_structure(got) == tree_structure(want)
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want))


def test_init_and_final(graphs: Graphs) -> None:
    def run(scan: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda a, b, i, j: scan(AFFINE, (a, b), 1, init=(i, j), return_final=True)

    compiled = torch.compile(run(associative_scan), fullgraph=True, backend=graphs)
    check(compiled, run(reference_scan), (draw(2, 6), draw(2, 6, seed=1), draw(2), draw(2, seed=1)))


def test_offsets(graphs: Graphs) -> None:
    """Their number and values may change: neither is part of the graph."""

    def run(scan: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda a, b, o: scan(AFFINE, (a, b), 1, offsets=o, return_final=True)

    compiled = torch.compile(run(associative_scan), fullgraph=True, backend=graphs, dynamic=True)
    for bounds in ([0, 2, 6], [0, 0, 4, 6], [0, 1, 2, 2, 9]):
        inputs = draw(2, bounds[-1]), draw(2, bounds[-1], seed=1), torch.tensor(bounds)
        check(compiled, run(reference_scan), inputs)
    assert graphs.count == 1
    with pytest.raises(assocscan.ScanValueError, match="offsets must not decrease"):
        compiled(draw(2, 6), draw(2, 6), torch.tensor([0, 4, 2, 6]))


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda left, right: left + factor * right


FACTOR = 2.0


def globally_scaled(left: Tensor, right: Tensor) -> Tensor:
    return left + FACTOR * right


@pytest.mark.slow
def test_what_a_callable_captured_is_guarded(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number in a closure or a global: another one is another graph, not a wrong result."""

    def scan(x: Tensor, op: Any) -> Tensor:
        y: Tensor = associative_scan(op, x)
        return y

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    x = torch.ones(3)
    for factor in (2, 3, 5, 2, 1.5):
        assert compiled(x, scaled(factor)).tolist() == [1, 1 + factor, 1 + 2 * factor]
    torch._dynamo.reset()  # as many graphs as torch allows for one function
    for factor in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert compiled(x, globally_scaled).tolist() == [1, 1 + factor, 1 + 2 * factor]
    assert compiled(x, ops.sum).tolist() == [1, 2, 3]
    assert compiled(x, ops.prod).tolist() == [1, 1, 1]


def test_what_a_monoid_sees_is_guarded(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, by a lift and in a segmented operator; two graphs for two values."""
    added = 2.0
    op = assocscan.Monoid(lambda left, right: left + right + added, name="guarded")
    lifted = with_lift(ops.sum, lambda x: x * added)
    named = assocscan.Monoid(globally_scaled, name="guarded_global")
    flags = torch.tensor([False, False, False])

    def scan(x: Tensor) -> list[Tensor]:
        return [
            associative_scan(op, x), associative_scan(lifted, x), associative_scan(named, x),
            associative_scan(assocscan.segmented(op), (x, flags)),
        ]  # fmt: skip

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    for value in (2.0, 2.0, 3.0, 2.0):
        added = value
        monkeypatch.setitem(globals(), "FACTOR", value)
        sums = [1, 2 + value, 3 + 2 * value]
        want = [sums, [value, 2 * value, 3 * value], [1, 1 + value, 1 + 2 * value], sums]
        assert [y.tolist() for y in compiled(torch.ones(3))] == want


class Decaying(nn.Module):
    """Raw callables that a module's forward pass makes, or has."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = 0.5
        self.kept = lambda left, right: left + 2 * right
        self.weight = nn.Parameter(torch.tensor(0.5))

    def combine(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.maximum(left * self.decay, right)

    def forward(self, x: Tensor, kind: str, factor: float) -> Tensor:
        decay = self.decay
        operators: dict[str, Any] = {
            "attribute": lambda left, right: torch.maximum(left * self.decay, right),
            "local": lambda left, right: torch.maximum(left * decay, right),
            "argument": lambda left, right: torch.maximum(left * factor, right),
            "method": self.combine,
            "kept": self.kept,
            "partial": functools.partial(torch.add, alpha=factor),
            "parameter": lambda left, right: left * self.weight + right,
            "computed": lambda left, right: left * x.sum().item() + right,
        }
        y: Tensor = associative_scan(operators[kind], x * 2)
        return y


KINDS = ("attribute", "local", "argument", "method", "kept", "partial")


@pytest.mark.thinned(12)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_modules(graphs: Graphs, kind: str, fullgraph: bool) -> None:
    """What they capture may change from call to call; gradients too."""
    model = Decaying()
    compiled = torch.compile(model, fullgraph=fullgraph, backend=graphs)
    for decay, factor in ((0.5, 2.0), (0.25, 2.0), (0.25, 3.0), (0.25, 0.5)):
        model.decay = decay
        x = draw(6)
        got = with_gradients(lambda x, f=factor: compiled(x, kind, f), (x,))
        want = with_gradients(lambda x, f=factor: model(x, kind, f), (x,))
        torch.testing.assert_close(got, want)
    assert set(graphs.scans) == {1}  # one operation forward, one backward: not the eager engine's


def total_and_peak(left: PyTree, right: PyTree) -> PyTree:
    total = left["total"] + right["total"]
    return {"total": total, "peak": torch.maximum(left["peak"], right["peak"])}


@pytest.mark.parametrize("scan", [associative_scan, assocscan.reduce])
@pytest.mark.parametrize("init_names", ["total peak", "peak total"])
@pytest.mark.parametrize("names", ["total peak", "peak total"])
def test_dicts_of_raw_callables_go_by_their_keys(
    graphs: Graphs, names: str, init_names: str, scan: Callable[..., Any]
) -> None:
    def function(x: Tensor, init: Tensor) -> Any:
        parts = {"total": x, "peak": 2 * x}
        starts = {"total": init + 100, "peak": init - 100}
        xs = {name: parts[name] for name in names.split()}
        carry = {name: starts[name] for name in init_names.split()}
        return scan(total_and_peak, xs, 1, init=carry)

    got = torch.compile(function, fullgraph=True, backend=graphs)(x := draw(2, 5), h := draw(2))
    want = function(x, h)
    assert list(got) == list(want)
    torch.testing.assert_close(got, want)


def test_an_init_of_another_structure_is_refused(graphs: Graphs) -> None:
    def function(x: Tensor) -> Any:
        pair: Callable[..., Any] = lambda left, right: (left[0] + right[0], left[1] * right[1])  # noqa: E731
        return associative_scan(pair, (x, x), 1, init=[x[:, 0], x[:, 1]])

    with pytest.raises(TypeError, match="init is a list of 2"):
        torch.compile(function, backend=graphs)(draw(2, 5).detach())


def test_transforms_inside_a_function_break_the_graph() -> None:
    def combine(left: Tensor, right: Tensor) -> Tensor:
        return torch.vmap(torch.add)(left, right)  # type: ignore[no-any-return]

    def function(x: Tensor) -> Any:
        return associative_scan(combine, x, 1)

    torch._dynamo.reset()
    x = draw(2, 5, 3).detach()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), x.cumsum(1))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"or torch\.vmap"):
        torch.compile(function, backend="eager", fullgraph=True)(x)


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
@pytest.mark.parametrize("kind", ["parameter", "computed"])
def test_operators_that_capture_tensors(graphs: Graphs, kind: str) -> None:
    """A graph break, and with fullgraph=True an error that says what to do."""
    model, x = Decaying(), draw(6)
    compiled = torch.compile(model, backend=graphs)
    torch.testing.assert_close(compiled(x, kind, 1.0), model(x, kind, 1.0))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(torch._dynamo.exc.Unsupported, match="pass what it captures as a leaf"),
    ):
        compiled(x, kind, 1.0)


def test_local_callables_names_and_redefinitions(graphs: Graphs) -> None:
    def scan(x: Tensor) -> list[Tensor]:
        return [
            associative_scan(lambda left, right: left + right, x),
            associative_scan("cumulative_of_this_test", x),
        ]

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    x = torch.tensor([1.0, 2.0, 3.0])

    def define(factor: float) -> None:
        def cumulative(left: Tensor, right: Tensor) -> Tensor:
            return left + factor * right

        monoid(cumulative, name="cumulative_of_this_test")

    for factor in (1, 2):
        define(factor)
        plain, named = compiled(x)
        assert plain.tolist() == [1, 3, 6]
        assert named.tolist() == [1, 1 + 2 * factor, 1 + 5 * factor]


def test_functions_of_the_package(graphs: Graphs) -> None:
    def several(x: Tensor, k: float) -> list[Tensor]:
        return [
            cumsum(x, reverse=True),
            assocscan.cummax(x).values,
            linear_recurrence(k, x, init=k),
        ]

    compiled = torch.compile(several, fullgraph=True, backend=graphs)
    for k in (0.5, 0.25):
        x = draw(2, 5)
        check(lambda x, k=k: compiled(x, k), lambda x, k=k: several(x, k), (x,))


def test_reduce(graphs: Graphs) -> None:
    def last(a: Tensor, b: Tensor) -> Tensor:
        h: Tensor = assocscan.reduce("affine", (a, b), 1, reverse=True)[1]
        return h

    def loop(a: Tensor, b: Tensor) -> Tensor:
        h = torch.zeros_like(b[:, 0])
        for t in reversed(range(b.shape[1])):
            h = a[:, t] * h + b[:, t]
        return h

    compiled = torch.compile(last, fullgraph=True, backend=graphs)
    for length in (5, 9):
        check(compiled, loop, (draw(2, length), draw(2, length, seed=1)))


def scaling(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


@pytest.mark.slow
def test_operators_made_inside(graphs: Graphs) -> None:
    """By every combinator; another operator or captured number is another graph."""

    def scan(x: Tensor, reset: Tensor, op: Any, fn: Any) -> list[Tensor]:
        lifted = with_lift(op, fn)
        return [
            associative_scan(segmented(product("max", lifted)), (x, reset), 1)[1],
            associative_scan(reversed_order(ops.affine), (x, x), 1, reverse=True)[1],
            assocscan.reduce(with_lower(ops.mean, None), x, 1)[0],
            associative_scan(with_lower(lifted, lambda y: y.sin()), x, 1),
        ]

    compiled = torch.compile(scan, fullgraph=True, backend=graphs)
    reset = torch.tensor([False, True, False, False, True, False]).expand(2, 6)
    for op, factor in ((ops.sum, 2.0), (ops.sum, 3.0), (ops.prod, 3.0), (ops.sum, 2.0)):
        rest = reset, op, scaling(factor)
        check(lambda x, r=rest: compiled(x, *r), lambda x, r=rest: scan(x, *r), (draw(2, 6),))
    assert len(graphs.scans) == 2 * 3  # forward and backward


def test_what_operators_made_inside_see_is_guarded(graphs: Graphs) -> None:
    """By them and their parts; the same operator is guarded where it comes from outside, too."""
    scale = 2.0

    def scaled_sum(left: Tensor, right: Tensor) -> Tensor:
        return (left * scale + right * scale) / scale + (scale - scale)

    def doubled(x: Tensor) -> Tensor:
        return x * scale

    outer = assocscan.Monoid(scaled_sum, name="scaled_sum_of_scale")
    outside = with_lift(outer, doubled)

    def inside(x: Tensor) -> Tensor:
        y: Tensor = associative_scan(with_lift(outer, doubled), x, 1)
        return y

    def from_outside(x: Tensor) -> Tensor:
        y: Tensor = associative_scan(outside, x, 1)
        return y

    x = draw(2, 6)
    for function in (inside, from_outside):
        compiled = torch.compile(function, fullgraph=True, backend=graphs)
        for value in (2.0, 4.0, 2.0):
            scale = value
            check(compiled, lambda x, value=value: (x * value).cumsum(1), (x,))


class Convolution(nn.Module):
    """An operator that no generator knows: the eager engine's operations are in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = associative_scan(CIRCULAR, x)
        return y


def convolve(left: Tensor, right: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(left) * torch.fft.rfft(right), left.shape[-1])


CIRCULAR = monoid(convolve, element_ndim=1, name="compile_convolve")


@pytest.mark.filterwarnings("ignore:operator 'compile_convolve'")
def test_operators_that_are_not_generated(graphs: Graphs) -> None:
    model = Convolution()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    check(compiled, lambda x: reference_scan(CIRCULAR, x), (draw(5, 4),))
    assert sum(graphs.scans) == 0


def test_hand_written_adjoints(graphs: Graphs) -> None:
    """Matrices whose derivative is too large to generate: forward and backward are operations."""
    pytest.importorskip("triton")
    compiled = torch.compile(
        lambda A: associative_scan(ops.matmul, A, backend="triton"), fullgraph=True, backend=graphs
    )
    check(compiled, lambda A: reference_scan(ops.matmul, A), (draw(4, 5, 5),))
    assert graphs.scans == [1, 1]


def test_transforms_inside_a_compiled_function(graphs: Graphs) -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return linear_recurrence(a, b, axis=0).square().sum()

    def loop(a: Tensor, b: Tensor) -> Tensor:
        return recurrence_sum(a, b)

    def transformed(loss: Callable[..., Tensor], a: Tensor, b: Tensor) -> list[Tensor]:
        gradient = torch.func.grad(loss)
        return [
            torch.func.vmap(gradient)(a, b),
            torch.func.jvp(gradient, (a[0], b[0]), (b[0], a[0]))[1],
        ]

    compiled = torch.compile(transformed, fullgraph=True, backend=graphs)
    a, b = draw(2, 5).detach(), draw(2, 5, seed=1).detach()
    torch.testing.assert_close(compiled(loss, a, b), transformed(loop, a, b))


def recurrence_sum(a: Tensor, b: Tensor) -> Tensor:
    h = [b[0]]
    for t in range(1, b.shape[0]):
        h.append(a[t] * h[-1] + b[t])
    return torch.stack(h).square().sum()


class Layer(nn.Module):
    """A linear layer, a recurrence with the user's own monoid, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(3, 2)
        self.op = AFFINE

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).chunk(2, -1)
        y: Tensor = self.outer(associative_scan(self.op, (torch.sigmoid(a), b), 1)[1])
        return y


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def gradients(model: Callable[..., Any], layer: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().sum()
    return [loss, *torch.autograd.grad(loss, list(layer.parameters()))]


@pytest.mark.slow
def test_inductor(graphs: Graphs) -> None:
    """The default backend, and the layout of what it passes on."""
    model = layer()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (5, 9):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load
@pytest.mark.parametrize("strict", [False, True])
def test_export(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    """Any length; saved, loaded where no operator is known, and trained."""
    model, file = layer(), io.BytesIO()
    length = torch.export.Dim("length", min=2, max=1000)
    example = torch.randn(2, 6, 4)
    program = torch.export.export(
        model, (example,), dynamic_shapes={"x": {1: length}}, strict=strict
    )
    assert sum(node.target is SCAN for node in program.graph.nodes) == 1
    torch.export.save(program, file)
    file.seek(0)
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    loaded = torch.export.load(file).module()
    for steps in (2, 17):
        x = torch.randn(2, steps, 4)
        torch.testing.assert_close(loaded(x), model(x))
        got = gradients(loaded, loaded, x)
        torch.testing.assert_close(got, gradients(model, model, x))
    assert program.run_decompositions().module()(example).shape == (2, 6, 2)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return cumsum(x, 1, reverse=True) * 2


@pytest.mark.exhaustive
def test_aot_inductor(tmp_path: Path) -> None:
    """A compiled package, whose program calls the operation without Python's graph."""
    model, x = Doubled(), torch.randn(2, 5)
    program = torch.export.export(model, (x,))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "doubled.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(compiled(x), model(x))


class FilterUnderAutocast(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        one = torch.eye(2)
        model = 0.9 * one, one[:1], one, one[:1, :1], one[0], one
        with torch.autocast("cpu", torch.bfloat16):
            return assocscan.kalman_filter(y, *model, backend="eager").mean


@pytest.mark.slow
def test_products_are_not_rounded_under_autocast() -> None:
    y = draw(6, 1).detach().float()
    want = FilterUnderAutocast()(y)
    assert torch.equal(
        torch.compile(FilterUnderAutocast(), fullgraph=True, backend="eager")(y), want
    )
    for strict in (True, False):
        exported = torch.export.export(FilterUnderAutocast(), (y,), strict=strict).module()
        torch.testing.assert_close(exported(y), want)
