"""Pointwise ATen operations on tensors of symbolic scalars.

The tables name them all. Each maps to one scalar operation or to a small formula (`scalar_math`),
computed in the dtype to which torch promotes the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..errors import UnsupportedOperation
from ..program.dtypes import ROUNDING, scalar_dtype
from ..program.program_builder import Builder
from ..program.scalar_math import COMPLEX, FORMULAS, ScalarMath
from ..program.symbolic_tensors import Sym, Tensors, each

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
    | {"full_like", "where", "_to_copy", "detach", "alias", "clone", "lift_fresh_copy"}
    | {"real", "imag"}
)  # fmt: skip


def operation_name(node: Node) -> str:
    """`add` for `aten.add.Tensor`."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(node.target, "__name__", "?"))


def refuse_random(node: Node) -> None:
    """Raise UnsupportedOperation for an operation that draws random numbers."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise UnsupportedOperation(
            f"it is random, as {operation_name(node)!r} in it draws numbers, others at every call; "
            "draw them before the scan and pass them as a leaf of xs"
        )


class Pointwise:
    """Pointwise operations inside one builder."""

    def __init__(self, builder: Builder, tensors: Tensors) -> None:
        self.builder = builder
        self.tensors = tensors
        self.math = ScalarMath(builder)

    def call(self, node: Node, name: str, args: Any, kwargs: Any) -> Sym:
        """One node of a graph: its operands promoted, its result in the dtype torch gives it."""
        dtype = result_dtype(node)
        if name in ("real", "imag"):
            return Sym(args[0].planes()[name == "imag"], dtype)
        if name == "_to_copy":
            return self.tensors.cast(args[0], kwargs.get("dtype") or args[0].dtype)
        if name == "detach":
            x: Sym = args[0]
            return x.move(lambda p: each(p.shape, lambda v: self.emit("detach", v), p))
        if name == "where":
            condition = self.tensors.symbolic(args[0], torch.bool)
            branches = [self.tensors.symbolic(a, dtype) for a in args[1:]]
            return self.where(condition, *branches)
        compute = compute_dtype(node, name, dtype)
        alpha = kwargs.get("alpha", 1)
        if name in ("clamp_min", "clamp_max"):
            args = (args[0], representable(name[-3:], args[1], compute))
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
            bounds = [representable(k, v, compute) for k, v in present.items()]
            operands = [operands[0]] + [self.tensors.symbolic(v, compute) for v in bounds]
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
        return Sym.of(planes, a.dtype)

    def apply(
        self,
        name: str,
        compute: torch.dtype,
        dtype: torch.dtype,
        operands: list[Sym],
        **options: Any,
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


def representable(side: str, bound: Any, dtype: torch.dtype) -> Any:
    """A numeric bound of a clamp to integers, moved into the range of `dtype`, which changes no
    result. (torch before 2.15 lets it wrap: -2 becomes 254 in uint8.)"""
    if isinstance(bound, (torch.Tensor, Sym, Node)) or dtype.is_floating_point:
        return bound
    if dtype == torch.bool:
        return bound
    info = torch.iinfo(dtype)
    if bound > info.max if side == "min" else bound < info.min:
        raise UnsupportedOperation(f"clamp with {side}={bound}, which {dtype} cannot hold")
    return min(max(bound, info.min), info.max)


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
