"""torch.func, forward mode and second derivatives of scans over vectors, against a loop's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves
from vector_cases import CASES, expanded, leaves_of, loop

from assocscan import associative_scan
from assocscan.program import deserialization
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator

Function = Callable[..., tuple[Tensor, ...]]
OP = CASES["gated"].op
BOUNDS = (0, 3, 3, 7)
COUNT = 10  # leaves, with two of init
EVERY = tuple(range(COUNT))


def inputs(packed: bool) -> list[Tensor]:
    leaves = leaves_of(CASES["gated"], 1, 7, 3, 3, torch.float64)
    shape = (*((len(BOUNDS) - 1,) if packed else ()), 1, 3, 3)
    generator = torch.Generator().manual_seed(2)
    return [*leaves, *(torch.rand(shape, generator=generator, dtype=torch.float64)
                       for _ in range(2))]  # fmt: skip


def functions(packed: bool) -> tuple[Function, Function]:
    """The scan and the loop, of leaves and init: y, and the final carry."""
    offsets = torch.tensor(BOUNDS) if packed else None

    def scan(*x: Tensor) -> tuple[Tensor, ...]:
        y, final = associative_scan(
            OP, expanded(list(x[:-2])), 1, init=x[-2:], return_final=True, offsets=offsets
        )
        return (y, *final)

    def reference(*x: Tensor) -> tuple[Tensor, ...]:
        xs, init = expanded(list(x[:-2])), x[-2:]
        if not packed:
            (y,), last = loop(OP, xs, init=init)
            return (y, *last)
        ys, finals = [], []
        for k, (begin, end) in enumerate(pairwise(BOUNDS)):
            last = tuple(c[k] for c in init)
            if begin < end:
                (y,), last = loop(OP, tuple(t[:, begin:end] for t in xs), init=last)
                ys.append(y)
            finals.append(last)
        return (torch.cat(ys, 1), *(torch.stack(f) for f in zip(*finals, strict=True)))

    return scan, reference


def total(f: Function) -> Callable[..., Tensor]:
    """A scalar whose cotangents are neither equal nor all different from zero."""
    return lambda *x: torch.stack([y.relu().square().sum() for y in f(*x)]).sum()


def doubled(x: list[Tensor], *places: int) -> list[Tensor]:
    return [torch.stack([t, 2 * t]) if k in places else t for k, t in enumerate(x)]


def mapped(*places: int) -> tuple[int | None, ...]:
    return tuple(0 if k in places else None for k in EVERY)


def squares(gs: Any) -> Tensor:
    return torch.stack([g.square().sum() for g in gs]).sum()


def dual(f: Function, x: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        ys = f(*[forward_ad.make_dual(t, torch.cos(t)) for t in x])
        return [forward_ad.unpack_dual(y).tangent for y in ys]


def outer(f: Function, x: list[Tensor], inner: Callable[..., Any]) -> Any:
    """The derivative by autograd of what `inner` gives for leaves that require gradients."""
    x = [t.clone().requires_grad_() for t in x]
    return torch.autograd.grad(squares(tree_leaves(inner(f, x))), x, materialize_grads=True)


def mapped_backward(f: Function, x: list[Tensor]) -> Any:
    x = [t.clone().requires_grad_() for t in x]
    y = f(*x)[0]
    pull = vmap(lambda g: torch.autograd.grad(y, x[:-2], g, retain_graph=True))
    return pull(torch.stack([torch.cos(y.detach()), torch.sin(y.detach())]))


TRANSFORMS: dict[str, Callable[[Function, list[Tensor]], Any]] = {
    "grad": lambda f, x: grad(total(f), EVERY)(*x),
    "jacrev": lambda f, x: jacrev(f, (0, 2, 8))(*x),
    "vmap": lambda f, x: vmap(f)(*doubled(x, *EVERY)),
    "vmap of some": lambda f, x: vmap(f, mapped(0, 3, 9))(*doubled(x, 0, 3, 9)),
    "vmap over the last": lambda f, x: vmap(f, (-1, *mapped()[1:]))(
        torch.stack([x[0], 2 * x[0]], -1), *x[1:]
    ),
    "vmap of grad": lambda f, x: vmap(grad(total(f), EVERY))(*doubled(x, *EVERY)),
    "vmap of grad of some": lambda f, x: vmap(grad(total(f), EVERY), mapped(0, 3, 8))(
        *doubled(x, 0, 3, 8)
    ),
    "grad of vmap": lambda f, x: grad(total(vmap(f, mapped(0, 3, 9))), EVERY)(*doubled(x, 0, 3, 9)),
    "two vmaps": lambda f, x: vmap(vmap(grad(total(f), (0, 2, 9)), mapped(0)), mapped(2))(
        *doubled(x, 0, 2)
    ),
    "vmap of jacrev": lambda f, x: vmap(jacrev(f, (0, 2)), mapped(0))(*doubled(x, 0)),
    "mapped cotangents": mapped_backward,
    "jvp": lambda f, x: jvp(f, tuple(x), tuple(torch.cos(t) for t in x)),
    "forward mode": dual,
    "hessian": lambda f, x: hessian(total(f), (0, 2, 9))(*x),
    "grad of grad": lambda f, x: grad(lambda *t: squares(grad(total(f), EVERY)(*t)), EVERY)(*x),
    "autograd": lambda f, x: outer(
        f, x, lambda f, x: torch.autograd.grad(total(f)(*x), x, create_graph=True)
    ),
    "autograd of grad": lambda f, x: outer(f, x, lambda f, x: grad(total(f), (0, 2, 9))(*x)),
    "autograd of vmap": lambda f, x: outer(
        f, x, lambda f, x: vmap(f, mapped(0, 9))(*doubled(x, 0, 9))
    ),
    "autograd of vmap of grad": lambda f, x: outer(
        f, x, lambda f, x: vmap(grad(total(f), (0, 2)), mapped(0))(*doubled(x, 0))
    ),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, packed: bool) -> None:
    scan, reference = functions(packed)
    got, want = (tree_leaves(TRANSFORMS[name](f, inputs(packed))) for f in (scan, reference))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap of grad of some", "grad of vmap"])
def test_first_derivatives_run_the_kernels_of_vectors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assocscan.runtime import executable_cache as executables

    seen: list[type] = []
    run = executables.run

    def recording(backend: str, spec: Any, tensors: Any) -> Any:
        seen.append(type(spec.operator))
        return run(backend, spec, tensors)

    monkeypatch.setattr(executables, "run", recording)
    TRANSFORMS[name](functions(False)[0], inputs(False))
    backward = [VectorAdjoint] if "grad" in name else []
    assert seen == [VectorOperator, *backward]


def test_traced_second_derivatives() -> None:
    """A graph of a gradient's gradient holds no scan over vectors whose derivative is missing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    scan, reference = functions(False)

    def second(f: Function) -> Callable[..., Any]:
        return lambda *x: outer(
            f, list(x), lambda f, x: torch.autograd.grad(total(f)(*x), x, create_graph=True)
        )

    x = inputs(False)
    graph = make_fx(second(scan))(*x)
    nodes = [n for n in graph.graph.nodes if n.target is torch.ops.assocscan.scan.default]
    kinds = {type(deserialization.read(*n.args[:2])) for n in nodes}
    assert kinds == {VectorOperator, VectorAdjoint}
    for a, b in zip(graph(*x), second(reference)(*x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
