"""Reductions over element dimensions and matrix products, unrolled into pointwise operations.

`op_sum` unrolls `aten.sum`, and so on; every handler takes the FX node and its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..errors import UnsupportedOperation
from ..program.symbolic_tensors import Sym, Tensors
from .pointwise import Pointwise, result_dtype


class Unroll:
    """The operations that combine elements of one tensor with each other."""

    def __init__(self, pointwise: Pointwise, tensors: Tensors) -> None:
        self.tensors = tensors
        self.apply = pointwise.apply

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
        flat = x.move(lambda p: p.permute((*kept, *axes)).reshape((*shape, -1)))
        count = flat.shape[-1]
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
        return lambda a, b: self.apply(name, dtype, dtype, [a, b])

    def op_sum(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        add = self.folding("add", result_dtype(node))
        return self.reduce(node, x, dim, keepdim, add, 0)

    def op_mean(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        dtype = result_dtype(node)
        total = self.op_sum(node, x, dim, keepdim)
        count = x.ids.numel() // max(total.ids.numel(), 1)
        return self.apply("div", dtype, dtype, [total, self.tensors.symbolic(count, dtype)])

    def op_var(
        self, node: Node, x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Sym:
        dtype = result_dtype(node)
        if dtype.is_complex or x.dtype.is_complex:
            raise UnsupportedOperation("the variance of complex numbers cannot be generated")
        center = self.op_mean(node, x, dim, True)
        offset = self.apply("sub", dtype, dtype, [self.tensors.symbolic(x, dtype), center])
        total = self.op_sum(node, self.apply("square", dtype, dtype, [offset]), dim, keepdim)
        count = x.ids.numel() // max(total.ids.numel(), 1) - (
            1 if correction is None else correction
        )
        return self.apply("div", dtype, dtype, [total, self.tensors.symbolic(count, dtype)])

    def op_linalg_vector_norm(
        self, node: Node, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Sym:
        dtype = result_dtype(node)
        sizes = self.apply("abs", x.dtype, dtype, [x])
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

    def op__softmax(self, node: Node, x: Any, dim: int, half_to_float: bool) -> Sym:
        dtype = result_dtype(node)
        _, exponentials, total = self.exponentials(node, x, dim)
        return self.apply("div", dtype, dtype, [exponentials, total])

    def op__log_softmax(self, node: Node, x: Any, dim: int, half_to_float: bool) -> Sym:
        dtype = result_dtype(node)
        offset, _, total = self.exponentials(node, x, dim)
        log = self.apply("log", dtype, dtype, [total])
        return self.apply("sub", dtype, dtype, [offset, log])

    def exponentials(self, node: Node, x: Any, dim: int) -> tuple[Sym, Sym, Sym]:
        """x − max, its exponentials, and their sum over `dim`."""
        dtype = result_dtype(node)
        x = self.tensors.symbolic(x, dtype)
        offset = self.apply("sub", dtype, dtype, [x, self.op_amax(node, x, dim, True)])
        exponentials = self.apply("exp", dtype, dtype, [offset])
        return offset, exponentials, self.op_sum(node, exponentials, dim, True)

    def op_cumsum(self, node: Node, x: Any, dim: int, **_: Any) -> Sym:
        dtype = result_dtype(node)
        if x.ids.dim() == 0:
            return self.tensors.symbolic(x, dtype)
        parts = slices(self.tensors.symbolic(x, dtype), dim)
        for k in range(1, len(parts)):
            parts[k] = self.apply("add", dtype, dtype, [parts[k - 1], parts[k]])
        planes = [torch.stack(p, dim) for p in zip(*(p.planes() for p in parts), strict=True)]
        return Sym.of(planes, dtype)

    # Matrix products.

    def contract(self, dtype: torch.dtype, a: Any, b: Any) -> Sym:
        """Σ over the last dimension of a·b, broadcast over the others."""
        product = self.apply(
            "mul", dtype, dtype, [self.tensors.symbolic(a, dtype), self.tensors.symbolic(b, dtype)]
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

    def op_vdot(self, node: Node, a: Any, b: Any) -> Sym:
        dtype = result_dtype(node)
        a = self.tensors.symbolic(a, dtype)
        if dtype.is_complex:
            a = self.apply("_conj", dtype, dtype, [a])
        return self.contract(dtype, a, b)

    def op_addmm(self, node: Node, c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Sym:
        dtype = result_dtype(node)
        product = self.op_mm(node, a, b)
        if alpha != 1:
            product = self.apply(
                "mul", dtype, dtype, [product, self.tensors.symbolic(alpha, dtype)]
            )
        c = self.tensors.symbolic(c, dtype)
        if beta != 1:
            c = self.apply("mul", dtype, dtype, [c, self.tensors.symbolic(beta, dtype)])
        return self.apply("add", dtype, dtype, [c, product])

    op_baddbmm = op_addmm


def slices(x: Sym, dim: int) -> list[Sym]:
    """`x` cut along a dimension, which goes."""
    return [Sym.of(p, x.dtype) for p in zip(*(p.unbind(dim) for p in x.planes()), strict=True)]
