"""Traced functions of vectors as programs with a state axis (`program/vectors/state_axis`).

In the graph of such a function every tensor has one dimension of size N, or none, and all others
have size 1. A tensor is then one value (two if it is complex), which may vary along the states.
Pointwise operations are those on scalars; views do not change a value; a reduction over the
dimension of size N becomes an operation of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...errors import UnsupportedOperation
from ...program.dtypes import STORAGE_ONLY
from ...program.operator import Leaf
from ...program.program_builder import Program
from ...program.symbolic_tensors import Sym, Tensors
from ...program.vectors.state_axis import StateBuilder
from ...program.vectors.vector_operator import part_dtypes, parts
from ..fx_trace import Trace
from ..graph_walk import GraphWalk, contains_sym
from ..pointwise import POINTWISE, operation_name, result_dtype
from ..scalarize import MAX_INSTRUCTIONS

# These return the elements of their input, in the same order.
SAME_ORDER = frozenset(
    "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand expand_as alias clone "
    "contiguous lift_fresh_copy movedim".split()
)
# These select, repeat or reorder elements: the same values where the input has one element.
SELECTIONS = frozenset("select slice narrow repeat diagonal flip roll".split())


def size_of_states(leaves: Sequence[Leaf]) -> int | None:
    """N, where every leaf has the shape (N,), (1,) or (), and N > 1; else None."""
    shapes = {leaf.shape for leaf in leaves} - {(), (1,)}
    found = next(iter(shapes), ())
    return found[0] if len(shapes) == 1 and len(found) == 1 and found[0] > 1 else None


def state_program(
    traced: Trace,
    arguments: Sequence[Leaf],
    results: Sequence[Leaf],
    size: int,
    order: Sequence[int] | None = None,
    extra: Sequence[Leaf] = (),
) -> Program:
    """The program of a traced function of vectors of `size` states; the parts of `extra` are unused
    inputs after those of the arguments.

    Raises UnsupportedOperation where an operation has no form with a state axis.
    """
    everything = (*arguments, *extra)
    varies = [leaf.shape == (size,) for leaf in everything for _ in range(parts(leaf))]
    builder = StateBuilder(part_dtypes(everything), varies, size)
    builder.most = MAX_INSTRUCTIONS
    symbols, start = [], 0
    for leaf in arguments:
        dtype = torch.float32 if leaf.dtype in STORAGE_ONLY else leaf.dtype
        symbols.append(scalar_sym(range(start, start + parts(leaf)), dtype))
        start += parts(leaf)
    walk = States(builder, size, traced.graph)
    values = list(walk.run(traced.graph.graph, symbols))
    tensors = Tensors(builder)
    outputs: list[int] = []
    for k, leaf in zip(order or range(len(results)), results, strict=True):
        wide = torch.float32 if leaf.dtype in STORAGE_ONLY else leaf.dtype
        if isinstance(values[k], torch.Tensor):
            values[k] = walk.constant(values[k])
        found = [int(plane) for plane in tensors.symbolic(values[k], wide).planes()]
        if leaf.shape != (size,) and any(builder.varies(v) for v in found):
            raise UnsupportedOperation("a result varies along the states, but has no such axis")
        outputs.extend(found)
    return builder.build(outputs)


def scalar_sym(ids: Sequence[int], dtype: torch.dtype) -> Sym:
    return Sym.of([torch.tensor(k) for k in ids], dtype)


class RealParts(list[torch.Tensor]):
    """The real and the imaginary part of a complex tensor, as `view_as_real` gives them."""


class States(GraphWalk):
    """A tensor is a `Sym` without dimensions."""

    def __init__(self, builder: StateBuilder, size: int, constants: object) -> None:
        super().__init__(builder, constants)
        self.builder, self.size = builder, size

    def call(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        if not contains_sym((args, kwargs)) and not (args and isinstance(args[0], RealParts)):
            return self.run_concretely(node, name, args, kwargs)
        if name == "view_as_real":
            return RealParts(args[0].planes())
        if isinstance(args[0], RealParts):
            return self.one_part(node, *args)
        sizes = self.sizes(node)
        args = torch.fx.node.map_aggregate(
            args, lambda a: self.constant(a) if isinstance(a, torch.Tensor) else a
        )
        if name in SAME_ORDER or (name in SELECTIONS and math.prod(self.sizes(node.args[0])) == 1):
            source: Any = node.args[0]
            if result_dtype(node) != source.meta["val"].dtype:
                raise UnsupportedOperation(f"{node.target} reads a number's bits as another dtype")
            return args[0]
        handler = getattr(self, f"op_{name}", None)
        if handler is not None:
            return handler(node, *args, **kwargs)
        if name in POINTWISE:
            if sizes != broadcast([self.sizes(a) for a in node.args if isinstance(a, Node)]):
                raise UnsupportedOperation(f"{node.target} has no form with a state axis")
            return self.pointwise.call(node, name, args, kwargs)
        raise UnsupportedOperation(f"{node.target} has no form with a state axis")

    def one_part(self, node: Node, parts: RealParts, *where: Any) -> Sym:
        """`x.real` and `x.imag`, which select from the last dimension of `view_as_real`."""
        source: Any = node.args[0]
        rank = source.meta["val"].dim()
        if operation_name(node) != "select" or where[0] % rank != rank - 1:
            raise UnsupportedOperation(
                f"{node.target} of view_as_real has no form with a state axis"
            )
        return Sym(parts[where[1]], result_dtype(node))

    def sizes(self, node: Any) -> tuple[int, ...]:
        """The sizes of a tensor of the graph. Raises UnsupportedOperation where it has more than
        one dimension of other sizes than 1, or one of another size than N."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise UnsupportedOperation(f"{node.target} has no form with a state axis")
        sizes = tuple(value.shape)
        if math.prod(sizes) not in (1, self.size) or set(sizes) - {1, self.size}:
            raise UnsupportedOperation(f"a tensor of shape {list(sizes)} inside the operator")
        return sizes

    def constant(self, value: torch.Tensor) -> torch.Tensor:
        """A constant that is the same for all states, as a tensor without dimensions."""
        if set(value.shape) - {1, self.size} or value.numel() not in (1, self.size):
            raise UnsupportedOperation(f"a constant of shape {list(value.shape)}")
        flat = value.reshape(-1)
        same = flat == flat[0]
        if flat.is_floating_point():
            same &= flat.signbit() == flat[0].signbit()  # of zeros
        if not bool(same.all()):
            raise UnsupportedOperation("a constant that differs between the states")
        return flat[0]

    # Reductions. `reduces_states`: whether the dimension of size N is among those reduced.

    def reduces_states(self, node: Node, dims: Any) -> bool:
        sizes = self.sizes(node.args[0])
        if self.size not in sizes:
            return False
        if dims is None or dims == []:
            return True
        rank = len(sizes)
        return sizes.index(self.size) in {
            d % rank for d in ([dims] if isinstance(dims, int) else dims)
        }

    def reduced(self, node: Node, op: str, x: Any, dims: Any) -> Sym:
        dtype = result_dtype(node)
        x = self.tensors.symbolic(x, dtype)
        if not self.reduces_states(node, dims):
            return Sym.of(x.planes(), dtype)
        if dtype == torch.bool:
            raise UnsupportedOperation("a reduction of bools has no form with a state axis")
        return Sym.of([torch.tensor(self.builder.emit(op, int(p))) for p in x.planes()], x.dtype)

    def op_sum(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        return self.reduced(node, "sum_states", x, dim)

    def op_mean(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        total = self.op_sum(node, x, dim)
        if not self.reduces_states(node, dim):
            return total
        dtype = result_dtype(node)
        return self.apply("div", dtype, [total, self.tensors.symbolic(self.size, dtype)])

    def op_amax(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduced(node, "max_states", x, dim)

    def op_amin(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduced(node, "min_states", x, dim)

    def op_max(self, node: Node, x: Any, *dim: Any) -> Sym:
        if dim:
            raise UnsupportedOperation("max with indices has no form with a state axis")
        return self.reduced(node, "max_states", x, None)

    def op_min(self, node: Node, x: Any, *dim: Any) -> Sym:
        if dim:
            raise UnsupportedOperation("min with indices has no form with a state axis")
        return self.reduced(node, "min_states", x, None)

    # Products of matrices of which one dimension, or none, has the size N.

    def op_mm(self, node: Node, a: Any, b: Any) -> Sym:
        dtype = result_dtype(node)
        product = self.apply(
            "mul", dtype, [self.tensors.symbolic(a, dtype), self.tensors.symbolic(b, dtype)]
        )
        first: Any = node.args[0]
        if self.sizes(first)[-1] != self.size:
            return product
        return self.summed(product)

    def summed(self, x: Sym) -> Sym:
        return Sym.of(
            [torch.tensor(self.builder.sum_over_states(int(p))) for p in x.planes()], x.dtype
        )

    op_bmm = op_mm
    op_mv = op_mm
    op_dot = op_mm

    # Values of the program, not tensors: a tensor would need its dimensions, for a sum over them.

    def op_full_like(self, node: Node, x: Sym, value: Any, **_: Any) -> Sym:
        return self.tensors.symbolic(value, result_dtype(node))

    def op_zeros_like(self, node: Node, x: Sym, **_: Any) -> Sym:
        return self.tensors.symbolic(0, result_dtype(node))

    op_empty_like = op_zeros_like


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes)) if shapes else ()
