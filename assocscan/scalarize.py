"""An FX graph of core ATen operations → scalar values in a `Builder`.

The table below names every ATen operation that can be generated. Pointwise operations map to one
scalar operation or to a small formula; data movement is torch itself on the ids (`symbolic`);
reductions and matrix products unroll. An operation whose operands are all constant is simply run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .errors import UnsupportedOperation
from .program import Builder
from .scalar_math import COMPLEX, FORMULAS, ScalarMath
from .symbolic import ROUNDING, Sym, Tensors, each, scalar_dtype

MAX_INSTRUCTIONS = 6000

MOVEMENT = frozenset(
    "view _unsafe_view reshape permute transpose t select slice unsqueeze squeeze expand expand_as "
    "diagonal flip roll repeat alias clone as_strided unbind split split_with_sizes narrow "
    "contiguous lift_fresh_copy index_select movedim unfold".split()
)
JOINS = frozenset({"cat", "stack"})
SCATTERS = frozenset({"select_scatter", "slice_scatter", "diagonal_scatter"})
COMPARE = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not"}
PREDICATE = frozenset({"isnan", "isinf", "signbit"})
DIRECT = {
    "add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "abs": "abs",
    "minimum": "min", "maximum": "max", "fmin": "fmin", "fmax": "fmax",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2",
    "log10": "log10", "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan",
    "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "sigmoid": "sigmoid", "erf": "erf", "erfc": "erfc", "atan2": "atan2",
    "hypot": "hypot", "copysign": "copysign", "floor": "floor", "ceil": "ceil",
    "round": "round", "trunc": "trunc", "remainder": "remainder", "fmod": "fmod",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl",
    "__rshift__": "shr", "gcd": "gcd",
}  # fmt: skip
POINTWISE = (
    frozenset(DIRECT) | COMPARE.keys() | LOGICAL.keys() | PREDICATE | FORMULAS.keys()
    | COMPLEX.keys()
    | {"full_like", "where", "_to_copy", "detach", "alias", "clone", "lift_fresh_copy", "real", "imag"}
)  # fmt: skip


def operation_name(node: Node) -> str:
    """`add` for `aten.add.Tensor`."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(node.target, "__name__", "?"))


def scalarize(graph: Graph, builder: Builder, inputs: Sequence[Sym], constants: object) -> Any:
    """Walk `graph` with `inputs` for its placeholders; what its output node returns."""
    return Scalarizer(builder, constants).run(graph, inputs)


class Scalarizer:
    """One walk over one graph."""

    def __init__(self, builder: Builder, constants: object) -> None:
        self.builder = builder
        self.tensors = Tensors(builder)
        self.math = ScalarMath(builder)
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
                env[node] = self.call(node, env)
            if len(self.builder.instructions) > MAX_INSTRUCTIONS:
                raise UnsupportedOperation(
                    f"the element unrolls to more than {MAX_INSTRUCTIONS} scalar operations"
                )
        raise AssertionError("an FX graph ends with an output node")

    def call(self, node: Node, env: dict[Node, Any]) -> Any:
        args = torch.fx.node.map_arg(node.args, lambda n: env[n])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: env[n])
        name = operation_name(node)
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
            return self.pointwise(node, name, args, kwargs)
        raise UnsupportedOperation(f"{node.target} cannot be generated")

    def run_concretely(self, node: Node, name: str, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
            raise UnsupportedOperation(f"{target} is random")
        result = target(*args, **kwargs)
        return torch.zeros_like(result) if name.startswith(("empty", "new_empty")) else result

    def movement(self, node: Node, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        target: Any = node.target
        moved = [target(plane, *rest, **kwargs) for plane in x.planes()]
        if isinstance(moved[0], torch.Tensor):
            return Sym(moved[0], x.dtype, moved[1] if len(moved) > 1 else None)
        return [
            Sym(parts[0], x.dtype, parts[1] if len(parts) > 1 else None)
            for parts in zip(*moved, strict=True)
        ]

    def join(self, node: Node, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        parts = [self.tensors.symbolic(p, dtype) for p in args[0]]
        target: Any = node.target
        planes = [
            target(list(p), *args[1:], **kwargs)
            for p in zip(*(p.planes() for p in parts), strict=True)
        ]
        return Sym(planes[0], dtype, planes[1] if len(planes) > 1 else None)

    def scatter(self, node: Node, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        base, source = (self.tensors.symbolic(a, dtype) for a in args[:2])
        target: Any = node.target
        planes = [
            target(b, s, *args[2:], **kwargs)
            for b, s in zip(base.planes(), source.planes(), strict=True)
        ]
        return Sym(planes[0], dtype, planes[1] if len(planes) > 1 else None)

    def pointwise(self, node: Node, name: str, args: Any, kwargs: Any) -> Sym:
        dtype = result_dtype(node)
        if name in ("real", "imag"):
            return Sym(args[0].planes()[name == "imag"], dtype)
        if name == "_to_copy":
            return self.tensors.cast(args[0], kwargs.get("dtype") or args[0].dtype)
        if name == "detach":
            return args[0].move(lambda p: each(p.shape, lambda v: self.emit("detach", v), p))
        if name == "where":
            condition = self.tensors.symbolic(args[0], torch.bool)
            branches = [self.tensors.symbolic(a, dtype) for a in args[1:]]
            return self.where(condition, *branches)
        compute = compute_dtype(node, name, dtype)
        alpha = kwargs.get("alpha", 1)
        operands = [
            self.tensors.symbolic(a, compute)
            for a in args
            if isinstance(a, (Sym, torch.Tensor, bool, int, float, complex))
        ]
        if alpha != 1:
            scale = self.tensors.symbolic(alpha, compute)
            operands[1] = self.apply("mul", compute, compute, [operands[1], scale])
        options = {k: v for k, v in kwargs.items() if k in ("rounding_mode", "min", "max")}
        if name == "clamp":
            options = {"min": None, "max": None} | options
            options |= dict(zip(("min", "max"), args[1:], strict=False))
            present = {k: v for k, v in options.items() if v is not None}
            operands = [operands[0]] + [self.tensors.symbolic(v, compute) for v in present.values()]
            options = {"bounds": tuple(present)}
        if name == "round" and (args[1:] or kwargs.get("decimals")):
            raise UnsupportedOperation("round with decimals cannot be generated")
        return self.apply(name, compute, dtype, operands, **options)

    def where(self, condition: Sym, a: Sym, b: Sym) -> Sym:
        shape = torch.broadcast_shapes(condition.shape, a.shape, b.shape)
        planes = [
            each(shape, lambda c, x, y: self.emit("where", c, x, y), condition.ids, p, q)
            for p, q in zip(a.planes(), b.planes(), strict=True)
        ]
        return Sym(planes[0], a.dtype, planes[1] if len(planes) > 1 else None)

    def apply(
        self, name: str, compute: torch.dtype, dtype: torch.dtype, operands: list[Sym], **options: Any
    ) -> Sym:
        """One pointwise operation on operands that all have the dtype `compute`."""
        shape = torch.broadcast_shapes(*(o.shape for o in operands))
        if compute.is_complex:
            return self.apply_complex(name, dtype, operands, shape)

        def scalar(*values: int) -> int:
            if name in COMPARE:
                return self.emit(COMPARE[name], *values)
            if name in LOGICAL:
                return self.emit(LOGICAL[name], *values)
            if name in PREDICATE:
                return self.emit(name, *values)
            if name in FORMULAS:
                result = FORMULAS[name](self.math, *values, **options)
            elif name in DIRECT:
                result = self.math.arithmetic(DIRECT[name], *values)
            else:
                raise UnsupportedOperation(f"{name} of real numbers cannot be generated")
            return self.emit(ROUNDING[dtype], result) if dtype in ROUNDING else result

        return Sym(each(shape, scalar, *(o.ids for o in operands)), dtype)

    def apply_complex(
        self, name: str, dtype: torch.dtype, operands: list[Sym], shape: Sequence[int]
    ) -> Sym:
        if name not in COMPLEX:
            raise UnsupportedOperation(f"{name} of complex numbers cannot be generated")
        planes = [p.expand(tuple(shape)).reshape(-1).tolist() for o in operands for p in o.planes()]
        results = [
            COMPLEX[name](self.math, *zip(v[::2], v[1::2], strict=True))
            for v in zip(*planes, strict=True)
        ]
        if not dtype.is_complex:
            return Sym(torch.tensor(results, dtype=torch.int64).view(tuple(shape)), dtype)
        parts = torch.tensor(results, dtype=torch.int64).view(*shape, 2)
        return Sym(parts[..., 0], dtype, parts[..., 1])

    def emit(self, op: str, *values: int) -> int:
        return self.builder.emit(op, *values)

    # Complex views.

    def op_view_as_real(self, node: Node, x: Sym) -> Sym:
        return Sym(torch.stack(x.planes(), -1), result_dtype(node))

    def op_view_as_complex(self, node: Node, x: Sym) -> Sym:
        return Sym(x.ids[..., 0], result_dtype(node), x.ids[..., 1])

    def op_complex(self, node: Node, real: Any, imag: Any) -> Sym:
        part = torch.empty(0, dtype=result_dtype(node)).real.dtype
        a, b = self.tensors.symbolic(real, part), self.tensors.symbolic(imag, part)
        ids = torch.broadcast_tensors(a.ids, b.ids)
        return Sym(ids[0], result_dtype(node), ids[1])

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
        return Sym(planes[0], x.dtype, planes[1] if len(planes) > 1 else None)

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

    # Reductions over element dimensions.

    def reduce(self, node: Node, x: Any, dims: Any, keepdim: bool, combine: Callable[..., Sym],
               empty: float | None) -> Sym:  # fmt: skip
        dtype = result_dtype(node)
        x = self.tensors.symbolic(x, dtype)
        axes = range(x.ids.dim()) if dims is None or dims == [] else dims
        axes = sorted({d % max(x.ids.dim(), 1) for d in ([axes] if isinstance(axes, int) else axes)})
        kept = [d for d in range(x.ids.dim()) if d not in axes]
        shape = [x.shape[d] for d in kept]
        flat = x.move(lambda p: p.permute(*kept, *axes).reshape(*shape, -1))
        count = flat.shape[-1]
        if count == 0 and empty is None:
            raise UnsupportedOperation("a reduction over no elements")
        if count == 0:
            total = self.tensors.symbolic(torch.full(shape, empty or 0, dtype=dtype), dtype)
        else:
            items = [flat.move(lambda p, k=k: p[..., k]) for k in range(count)]  # type: ignore[misc]
            total = items[0]
            for item in items[1:]:
                total = combine(total, item)
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

    def op_prod(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("mul", result_dtype(node)), 1)

    def op_amax(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("maximum", x.dtype), None)

    def op_amin(self, node: Node, x: Any, dim: Any = None, keepdim: bool = False) -> Sym:
        return self.reduce(node, x, dim, keepdim, self.folding("minimum", x.dtype), None)

    def whole(self, node: Node, x: Any, dim: Any, name: str) -> Sym:
        if dim is not None:
            raise UnsupportedOperation(f"{node.target} with indices cannot be generated")
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
        parts = [p for p in self.slices(self.tensors.symbolic(x, dtype), dim)]
        for k in range(1, len(parts)):
            parts[k] = self.apply("add", dtype, dtype, [parts[k - 1], parts[k]])
        planes = [torch.stack(p, dim) for p in zip(*(p.planes() for p in parts), strict=True)]
        return Sym(planes[0], dtype, planes[1] if len(planes) > 1 else None)

    def slices(self, x: Sym, dim: int) -> list[Sym]:
        return [x.move(lambda p, k=k: p.select(dim, k)) for k in range(x.shape[dim])]  # type: ignore[misc]

    # Matrix products.

    def contract(self, dtype: torch.dtype, a: Any, b: Any) -> Sym:
        """Σ over the last dimension of a·b, broadcast over the others."""
        product = self.apply(
            "mul", dtype, dtype, [self.tensors.symbolic(a, dtype), self.tensors.symbolic(b, dtype)]
        )
        parts = self.slices(product, -1)
        if not parts:
            return self.tensors.symbolic(torch.zeros(product.shape[:-1], dtype=dtype), dtype)
        total = parts[0]
        for part in parts[1:]:
            total = self.apply("add", dtype, dtype, [total, part])
        return total

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
            product = self.apply("mul", dtype, dtype, [product, self.tensors.symbolic(alpha, dtype)])
        c = self.tensors.symbolic(c, dtype)
        if beta != 1:
            c = self.apply("mul", dtype, dtype, [c, self.tensors.symbolic(beta, dtype)])
        return self.apply("add", dtype, dtype, [c, product])

    op_baddbmm = op_addmm


def contains_sym(value: Any) -> bool:
    """Whether a nest of arguments holds a symbolic tensor."""
    if isinstance(value, (tuple, list)):
        return any(contains_sym(v) for v in value)
    if isinstance(value, dict):
        return any(contains_sym(v) for v in value.values())
    return isinstance(value, Sym)


def result_dtype(node: Node) -> torch.dtype:
    """The dtype that torch gives the node's result."""
    value = node.meta["val"]
    dtype: torch.dtype = value.dtype
    scalar_dtype(dtype)
    return dtype


def compute_dtype(node: Node, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype to which torch promotes the operands of a pointwise operation."""
    if name in LOGICAL:
        return torch.bool
    values = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
    operands = [v for v in values if isinstance(v, (torch.Tensor, bool, int, float, complex))]
    if name in COMPARE:
        return torch.result_type(operands[0], operands[1])
    first = operands[0]
    from_complex = isinstance(first, torch.Tensor) and first.is_complex() and not dtype.is_complex
    if isinstance(first, torch.Tensor) and (name in PREDICATE or from_complex):
        return first.dtype
    return dtype
