"""An FX graph of core ATen operations → scalar values in a `Builder`.

Pointwise operations are in `pointwise`; reductions over element dimensions and matrix products are
unrolled into these; data movement is torch itself on the ids (`symbolic`). An operation whose
operands are all constant is simply run. `op_sum` is `aten.sum`, and so on; every such method takes
the FX node and its arguments.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import UnsupportedOperation
from ..program.program_builder import Builder
from ..program.symbolic_tensors import Sym
from .graph_walk import GraphWalk, contains_sym
from .pointwise import POINTWISE, refuse_random, result_dtype

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


class Unroll(GraphWalk):
    """The operations that combine elements of one tensor with each other."""

    # Reductions over element dimensions.

    def reduce(self, node: Node, x: Any, dims: Any, keepdim: bool, combine: Callable[..., Sym],
               empty: float | None) -> Sym:  # fmt: skip
        dtype = result_dtype(node)
        x = self.tensors.symbolic(x, dtype)
        rank = x.ids.dim()
        axes = range(rank) if dims is None or dims == [] or rank == 0 else dims
        axes = sorted({d % rank for d in ([axes] if isinstance(axes, int) else axes)})
        kept = [d for d in range(x.ids.dim()) if d not in axes]
        shape = [x.shape[d] for d in kept]
        count = math.prod(x.shape[d] for d in axes)
        flat = x.move(lambda p: p.permute((*kept, *axes)).reshape((*shape, count)))
        if count == 0 and empty is None:
            raise UnsupportedOperation("a reduction over no elements")
        if count == 0:
            total = self.tensors.symbolic(torch.full(shape, empty or 0, dtype=dtype), dtype)
        else:
            total = functools.reduce(combine, slices(flat, -1))
        if keepdim:
            final = [1 if d in axes else x.shape[d] for d in range(x.ids.dim())]
            total = total.move(lambda p: p.reshape(final))
        return total

    def folding(self, name: str, dtype: torch.dtype) -> Callable[[Sym, Sym], Sym]:
        return lambda a, b: self.apply(name, dtype, [a, b])

    def op_sum(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        add = self.folding("add", result_dtype(node))
        return self.reduce(node, x, dim, keepdim, add, 0)

    def op_mean(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        dtype = result_dtype(node)
        total = self.op_sum(node, x, dim, keepdim)
        count = x.ids.numel() // max(total.ids.numel(), 1)
        return self.apply("div", dtype, [total, self.tensors.symbolic(count, dtype)])

    def op_var(
        self, node: Node, x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Sym:
        dtype = result_dtype(node)
        if dtype.is_complex or x.dtype.is_complex:
            raise UnsupportedOperation("the variance of complex numbers cannot be generated")
        center = self.op_mean(node, x, dim, True)
        offset = self.apply("sub", dtype, [self.tensors.symbolic(x, dtype), center])
        total = self.op_sum(node, self.apply("square", dtype, [offset]), dim, keepdim)
        count = x.ids.numel() // max(total.ids.numel(), 1) - (
            1 if correction is None else correction
        )
        return self.apply("div", dtype, [total, self.tensors.symbolic(count, dtype)])

    def op_linalg_vector_norm(
        self, node: Node, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Sym:
        dtype = result_dtype(node)
        sizes = self.pointwise.apply("abs", x.dtype, dtype, [x])
        folds = {1: "add", 2: "hypot", float("inf"): "maximum", float("-inf"): "minimum"}
        if ord not in folds:
            raise UnsupportedOperation(f"the vector norm of order {ord} cannot be generated")
        return self.reduce(node, sizes, dim, keepdim, self.folding(folds[ord], dtype), 0)

    def op_prod(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("mul", result_dtype(node)), 1)

    def op_amax(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("maximum", x.dtype), None)

    def op_amin(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("minimum", x.dtype), None)

    def whole(self, node: Node, x: Any, dim: Any, name: str) -> Sym:
        if dim is not None:
            raise UnsupportedOperation(
                f"{node.target} with indices cannot be generated; use amax or amin for values alone"
            )
        return self.reduce(node, x, None, False, self.folding(name, x.dtype), None)

    def op_max(self, node: Node, x: Any, dim: Any = None, *_: Any) -> Sym:
        return self.whole(node, x, dim, "maximum")

    def op_min(self, node: Node, x: Any, dim: Any = None, *_: Any) -> Sym:
        return self.whole(node, x, dim, "minimum")

    def op_any(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        logical = self.folding("logical_or", torch.bool)
        return self.reduce(node, self.tensors.cast(x, torch.bool), dim, keepdim, logical, 0)

    def op_all(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        logical = self.folding("logical_and", torch.bool)
        return self.reduce(node, self.tensors.cast(x, torch.bool), dim, keepdim, logical, 1)

    def op_cumsum(self, node: Node, x: Any, dim: int, **_: Any) -> Sym:
        dtype = result_dtype(node)
        if x.ids.dim() == 0:
            return self.tensors.symbolic(x, dtype)
        parts = slices(self.tensors.symbolic(x, dtype), dim)
        for k in range(1, len(parts)):
            parts[k] = self.apply("add", dtype, [parts[k - 1], parts[k]])
        return of_planes(lambda *p: torch.stack(p, dim), parts, dtype)

    # Matrix products.

    def contract(self, dtype: torch.dtype, a: Any, b: Any) -> Sym:
        """Σ over the last dimension of a·b, broadcast over the others."""
        product = self.apply(
            "mul", dtype, [self.tensors.symbolic(a, dtype), self.tensors.symbolic(b, dtype)]
        )
        parts = slices(product, -1)
        if not parts:
            return self.tensors.symbolic(torch.zeros(product.shape[:-1], dtype=dtype), dtype)
        return functools.reduce(self.folding("add", dtype), parts)

    def op_mm(self, node: Node, a: Any, b: Any) -> Sym:
        dtype = result_dtype(node)
        a, b = self.tensors.symbolic(a, dtype), self.tensors.symbolic(b, dtype)
        rows = a.move(lambda p: p.unsqueeze(-2))
        columns = b.move(lambda p: p.transpose(-1, -2).unsqueeze(-3))
        return self.contract(dtype, rows, columns)

    op_bmm = op_mm

    def op_mv(self, node: Node, a: Any, b: Any) -> Sym:
        return self.contract(result_dtype(node), a, b)

    op_dot = op_mv

    def op_addmm(self, node: Node, c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Sym:
        dtype = result_dtype(node)
        product = self.op_mm(node, a, b)
        if alpha != 1:
            product = self.apply("mul", dtype, [product, self.tensors.symbolic(alpha, dtype)])
        c = self.tensors.symbolic(c, dtype)
        if beta != 1:
            c = self.apply("mul", dtype, [c, self.tensors.symbolic(beta, dtype)])
        return self.apply("add", dtype, [c, product])

    op_baddbmm = op_addmm


class Scalarizer(Unroll):
    """A tensor is a `Sym` of its own shape."""

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
        handler: Callable[..., Any] | None = getattr(self, f"op_{name}", None)
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
        return of_planes(lambda *p: target(list(p), *args[1:], **kwargs), parts, dtype)

    def scatter(self, node: Node, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        pair = [self.tensors.symbolic(a, dtype) for a in args[:2]]
        target: Any = node.target
        return of_planes(lambda *p: target(*p, *args[2:], **kwargs), pair, dtype)

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
        return of_planes(
            lambda p, f: torch.constant_pad_nd(p, list(pad), int(f)), [x, filler], x.dtype
        )

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


def of_planes(function: Callable[..., Any], operands: Sequence[Sym], dtype: torch.dtype) -> Sym:
    """A function of the real planes of the operands, and of the imaginary ones."""
    planes = zip(*(x.planes() for x in operands), strict=True)
    return Sym.of([function(*p) for p in planes], dtype)


def slices(x: Sym, dim: int) -> list[Sym]:
    """`x` cut along a dimension, which goes."""
    return [Sym.of(p, x.dtype) for p in zip(*(p.unbind(dim) for p in x.planes()), strict=True)]
