"""torch.compile of scans over vectors: one graph, kernels of vectors, right for every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from selective_loops import draw, selective_loop
from torch import Tensor
from vector_cases import CASES, as_tuple, assert_close, cotangents, expanded, leaves_of, loop

from assocscan import associative_scan, selective_scan
from assocscan.program import deserialization
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator

SCAN = torch.ops.assocscan.scan.default


class Graphs:
    """A backend that counts the graphs, and keeps the kinds of the operators in them."""

    def __init__(self) -> None:
        self.count = 0
        self.kinds: list[type] = []
        self.summed: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(module: torch.fx.GraphModule, _: Any) -> Any:
            for node in module.graph.nodes:
                if node.target is SCAN:
                    op = deserialization.read(*node.args[:2])
                    self.kinds.append(type(op))
                    if isinstance(op, VectorAdjoint):
                        self.summed.append(op.repeated)
            return make_boxed_func(module.forward)

        self.count += 1
        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"init": False, "optional": ()},
    "init": {"init": True, "optional": ("D", "z", "delta_bias")},
    "packed": {"init": True, "sequences": 3, "groups": 2},
}


@pytest.mark.slow
@pytest.mark.thinned(12)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("states", [1, 2, 16, 64])
def test_selective_scan(states: int, options: str, dynamic: bool) -> None:
    """One graph; values and all gradients. With N = 1 it is a scan of scalars."""
    graphs = Graphs()

    def call(names: tuple[str, ...], *tensors: Tensor, bounds: Any = None) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        return selective_scan(
            **given, delta_softplus=True, return_final=options != "plain", offsets=bounds
        )

    compiled = torch.compile(call, fullgraph=True, backend=graphs, dynamic=dynamic)
    lengths = (9, 24, 70) if dynamic else (40,)
    for steps in lengths:
        drawn = draw(2, steps, 6, states, **OPTIONS[options])
        bounds = [0, steps // 3, steps // 3, steps] if options == "packed" else None
        offsets = None if bounds is None else torch.tensor(bounds)
        inputs = {name: t.float().requires_grad_() for name, t in drawn.items()}
        exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
        found = as_tuple(compiled(tuple(inputs), *inputs.values(), bounds=offsets))
        want = selective_loop(**exact, delta_softplus=True, offsets=bounds)[: len(found)]
        g = cotangents(found)
        got = torch.autograd.grad(found, list(inputs.values()), g)
        right = torch.autograd.grad(
            want, list(exact.values()), [t.double() for t in g], materialize_grads=True
        )
        for y, r in zip(found, want, strict=True):
            assert_close(y.detach(), r.detach(), steps * states)
        for name, a, b in zip(inputs, got, right, strict=True):
            assert_close(a, b, steps * states * max(1, found[0].numel() // a.numel()), name)
    assert graphs.count == 1
    if states > 1:
        assert graphs.kinds == [VectorOperator, VectorAdjoint]
        assert (1,) in graphs.summed[0]  # the gradient of A, which `expand` repeats along time


@pytest.mark.exhaustive
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["gated", "max-plus", "moments", "softmax", "no identity"])
def test_operators_of_users(name: str, reverse: bool) -> None:
    """Forward, backward, and a length that makes sizes dynamic: two graphs at most."""
    graphs, case = Graphs(), CASES[name]
    timed = next(k for k, (_, axes) in enumerate(case.leaves) if "t" in axes)

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        xs = tuple([x.expand(-1, leaves[timed].shape[1], -1, -1) for x in leaves])
        ys, final = associative_scan(case.op, xs, 1, reverse, return_final=True)
        return (*as_tuple(ys), *final)

    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for steps in (21, 33, 70):
        leaves = [x.requires_grad_() for x in leaves_of(case, 2, steps, 5, 7)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        found = compiled(*leaves)
        ys, last = loop(case.op, expanded(exact), reverse)
        want = (*ys, *last)
        g = cotangents(found)
        got = torch.autograd.grad(found, leaves, g)
        right = torch.autograd.grad(want, exact, [t.double() for t in g])
        for y, r in zip(found, want, strict=True):
            assert_close(y.detach(), r.detach(), steps)
        for a, b in zip(got, right, strict=True):
            assert_close(a, b, steps * max(1, found[0].numel() // a.numel()))
    assert graphs.count <= 2
    assert graphs.kinds == [VectorOperator, VectorAdjoint] * graphs.count


@pytest.mark.slow
def test_the_default_backend() -> None:
    """Inductor, whose buffers have strides of its own: sizes at which lanes are cut into blocks."""
    drawn = {name: t.float() for name, t in draw(2, 70, 24, 16, groups=2).items()}
    call = torch.compile(
        lambda *t: selective_scan(*(x * 1 for x in t[:-1]), True, init=t[-1], return_final=True),
        fullgraph=True,
    )
    found = []
    for f in (call, lambda *t: selective_scan(*t[:-1], True, init=t[-1], return_final=True)):
        leaves = [t.mT.contiguous().mT.requires_grad_() if t.dim() == 3 else t.requires_grad_()
                  for t in (x.clone() for x in drawn.values())]  # fmt: skip
        results = f(*leaves)
        found.append([*results, *torch.autograd.grad(results, leaves, cotangents(results))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


def test_forward_mode_inside_a_compiled_function() -> None:
    """Dynamo does not show its level: torch operations compute the tangents."""
    case = CASES["gated"]
    leaves = leaves_of(case, 1, 7, 3, 3, torch.float64)
    tangents = tuple(torch.cos(x) for x in leaves)

    def scan(*x: Tensor) -> Tensor:
        y: Tensor = associative_scan(case.op, expanded(list(x)), 1)
        return y

    def reference(*x: Tensor) -> Tensor:
        return loop(case.op, expanded(list(x)))[0][0]

    call = torch.compile(lambda *x: torch.func.jvp(scan, x, tangents), backend="aot_eager")
    want = torch.func.jvp(reference, tuple(leaves), tangents)
    torch.testing.assert_close(call(*leaves), want)
