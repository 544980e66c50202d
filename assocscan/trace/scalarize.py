"""An FX graph of core ATen operations → scalar values in a `Builder`.

Pointwise operations are in `pointwise`, reductions and matrix products in `unroll`; data movement
is torch itself on the ids (`symbolic`). An operation whose operands are all constant is simply run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import UnsupportedOperation
from ..program.program_builder import Builder
from ..program.symbolic_tensors import Sym, Tensors
from .pointwise import POINTWISE, Pointwise, operation_name, refuse_random, result_dtype
from .unroll_reductions import Unroll

MAX_INSTRUCTIONS = 6000

MOVEMENT = frozenset(
    "view _unsafe_view reshape permute transpose t select slice unsqueeze squeeze expand expand_as "
    "diagonal flip roll repeat alias clone as_strided unbind split split_with_sizes narrow "
    "contiguous lift_fresh_copy index_select movedim unfold".split()
)
# What is added to the error for an operation that the user may not have written.
ADDED = {"linalg_inv_ex": " (filters have kernels for inverses of at most 4 × 4)"}
JOINS = frozenset({"cat", "stack"})
SCATTERS = frozenset({"select_scatter", "slice_scatter", "diagonal_scatter"})


def scalarize(graph: Graph, builder: Builder, inputs: Sequence[Sym], constants: object) -> Any:
    """Run `graph` with `inputs` for its placeholders; what its output node returns."""
    before, builder.most = builder.most, MAX_INSTRUCTIONS
    try:
        return Scalarizer(builder, constants).run(graph, inputs)
    finally:
        builder.most = before


class GraphWalk:
    """One walk over one graph; `call` says what an operation does."""

    def __init__(self, builder: Builder, constants: object) -> None:
        self.tensors = Tensors(builder)
        self.pointwise = Pointwise(builder, self.tensors)
        self.constants = constants

    def run(self, graph: Graph, inputs: Sequence[Sym]) -> Any:
        env: dict[Node, Any] = {}
        remaining = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(remaining)
            elif node.op == "get_attr":
                env[node] = getattr(self.constants, str(node.target))
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
            else:
                args: Any = torch.fx.node.map_arg(node.args, lambda n: env[n])
                kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: env[n])
                env[node] = self.call(node, operation_name(node), args, kwargs)
        raise AssertionError("an FX graph ends with an output node")

    def call(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def run_concretely(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        """The result of an operation on constants."""
        refuse_random(node)
        target: Any = node.target
        result = target(*args, **kwargs)
        return torch.zeros_like(result) if name.startswith(("empty", "new_empty")) else result

    def op_complex(self, node: Node, real: Any, imag: Any) -> Sym:
        part = torch.empty(0, dtype=result_dtype(node)).real.dtype
        planes = [self.tensors.symbolic(v, part).ids for v in (real, imag)]
        return Sym.of(torch.broadcast_tensors(*planes), result_dtype(node))

    def op_polar(self, node: Node, radius: Any, angle: Any) -> Sym:
        part = torch.empty(0, dtype=result_dtype(node)).real.dtype
        r, phi = self.tensors.symbolic(radius, part), self.tensors.symbolic(angle, part)
        apply = self.pointwise.apply
        planes = [
            apply("mul", part, part, [r, apply(f, part, part, [phi])]).ids for f in ("cos", "sin")
        ]
        return Sym.of(planes, result_dtype(node))


class Scalarizer(GraphWalk):
    """A tensor is a `Sym` of its own shape."""

    def __init__(self, builder: Builder, constants: object) -> None:
        super().__init__(builder, constants)
        self.unroll = Unroll(self.pointwise, self.tensors)

    def call(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        refuse_random(node)
        if node.target is operator.getitem:
            return args[0][args[1]]
        if not contains_sym((args, kwargs)):
            return self.run_concretely(node, name, args, kwargs)
        if name in MOVEMENT:
            return self.movement(node, args, kwargs)
        if name in JOINS:
            return self.join(node, args, kwargs)
        if name in SCATTERS:
            return self.scatter(node, args, kwargs)
        for owner in (self, self.unroll):
            handler: Callable[..., Any] | None = getattr(owner, f"op_{name}", None)
            if handler is not None:
                return handler(node, *args, **kwargs)
        if name in POINTWISE:
            return self.pointwise.call(node, name, args, kwargs)
        raise UnsupportedOperation(f"{node.target} cannot be generated{ADDED.get(name, '')}")

    def movement(self, node: Node, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        if any(isinstance(a, torch.dtype) for a in rest):
            raise UnsupportedOperation(f"{node.target} reads a number's bits as another dtype")
        target: Any = node.target
        moved = [target(plane, *rest, **kwargs) for plane in x.planes()]
        if isinstance(moved[0], torch.Tensor):
            return Sym.of(moved, x.dtype)
        return [Sym.of(parts, x.dtype) for parts in zip(*moved, strict=True)]

    def join(self, node: Node, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        parts = [self.tensors.symbolic(p, dtype) for p in args[0]]
        target: Any = node.target
        planes = [
            target(list(p), *args[1:], **kwargs)
            for p in zip(*(p.planes() for p in parts), strict=True)
        ]
        return Sym.of(planes, dtype)

    def scatter(self, node: Node, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        base, source = (self.tensors.symbolic(a, dtype) for a in args[:2])
        target: Any = node.target
        planes = [
            target(b, s, *args[2:], **kwargs)
            for b, s in zip(base.planes(), source.planes(), strict=True)
        ]
        return Sym.of(planes, dtype)

    # Complex views.

    def op_view_as_real(self, node: Node, x: Sym) -> Sym:
        return Sym(torch.stack(x.planes(), -1), result_dtype(node))

    def op_view_as_complex(self, node: Node, x: Sym) -> Sym:
        return Sym(x.ids[..., 0], result_dtype(node), x.ids[..., 1])

    # Writes, padding and masks.

    def op_copy(self, node: Node, target: Any, source: Any, non_blocking: bool = False) -> Sym:
        shape = tuple(target.shape)
        return self.tensors.symbolic(source, result_dtype(node)).move(lambda p: p.expand(shape))

    def op_constant_pad_nd(self, node: Node, x: Sym, pad: Sequence[int], value: Any = 0) -> Sym:
        filler = self.tensors.symbolic(value, x.dtype)
        planes = [
            torch.constant_pad_nd(p, list(pad), int(f))
            for p, f in zip(x.planes(), filler.planes(), strict=True)
        ]
        return Sym.of(planes, x.dtype)

    def op_index(self, node: Node, x: Sym, indices: Sequence[Any]) -> Sym:
        if contains_sym(indices):
            raise UnsupportedOperation("indexing with values of the element cannot be generated")
        where = tuple(slice(None) if i is None else i for i in indices)
        return x.move(lambda p: p[where])

    def op_gather(self, node: Node, x: Sym, dim: int, index: Any, **_: Any) -> Sym:
        if isinstance(index, Sym):
            raise UnsupportedOperation("gather with values of the element cannot be generated")
        return x.move(lambda p: torch.gather(p, dim, index))

    def op_full_like(self, node: Node, x: Sym, value: Any, **_: Any) -> torch.Tensor:
        return torch.full(tuple(x.shape), value, dtype=result_dtype(node))

    def op_zeros_like(self, node: Node, x: Sym, **_: Any) -> torch.Tensor:
        return torch.zeros(tuple(x.shape), dtype=result_dtype(node))

    op_empty_like = op_zeros_like

    def op_fill(self, node: Node, x: Sym, value: Any) -> Sym:
        return self.op_copy(node, x, value)


def contains_sym(value: Any) -> bool:
    """Whether a nest of arguments holds a symbolic tensor."""
    if isinstance(value, (tuple, list)):
        return any(contains_sym(v) for v in value)
    if isinstance(value, dict):
        return any(contains_sym(v) for v in value.values())
    return isinstance(value, Sym)
