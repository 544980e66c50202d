"""Traced operators on matrices as a `MatrixOperator`, for kernels of whole matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...program.matrix_operator import ACCUMULATORS, SIZES, MatrixOperator, MatrixProgram, Step
from ...program.operator import Leaf
from ..fx_trace import Trace
from ..pointwise import operation_name


def matrix_operator(
    name: str,
    state: tuple[Leaf, ...],
    identity: tuple[torch.Tensor, ...] | None,
    combine: Trace,
    order: Sequence[int],
    lower: Trace | None,
) -> MatrixOperator | None:
    """The operator of these traces (16-bit floats taken as float32), or None.

    `order`: which result of `combine` each state leaf is.
    """
    shapes = [leaf.shape for leaf in state]
    if not any(len(s) == 2 for s in shapes):  # vectors alone are unrolled
        return None
    if not all(len(s) in (1, 2) and all(n in SIZES for n in s) for s in shapes):
        return None
    dtypes = {leaf.accumulator for leaf in state}
    if len(dtypes) > 1 or not dtypes <= set(ACCUMULATORS):
        return None
    shown = tuple(range(len(state))) if lower is None else projection(lower)
    if shown is None or not shown:
        return None
    program = _Reader(dtypes.pop()).program(combine, order)
    if program is None:
        return None
    entries = None
    if identity is not None:
        entries = tuple(tuple(t.reshape(-1).tolist()) for t in identity)
    outputs = tuple(state[k] for k in shown)
    return MatrixOperator(name, state, outputs, program, shown, entries)


def projection(lower: Trace) -> tuple[int, ...] | None:
    """Which argument each result of `lower` is; None where one is computed."""
    nodes = list(lower.graph.graph.nodes)
    arguments = {n: k for k, n in enumerate(n for n in nodes if n.op == "placeholder")}
    found = [arguments.get(n) if isinstance(n, Node) else None for n in nodes[-1].args[0]]
    return None if None in found else tuple(k for k in found if k is not None)


class _Unknown(Exception):
    """An operation that no tile kernel is written for."""


class _Reader:
    """Reads a graph of core ATen operations on matrices and vectors of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[Step] = []
        self.numbers: dict[Node, int] = {}

    def program(self, traced: Trace, order: Sequence[int]) -> MatrixProgram | None:
        outputs: list[int] = []
        try:
            for node in traced.graph.graph.nodes:
                if node.op == "placeholder":
                    self.numbers[node] = len(self.shapes)
                    self.shapes.append(tuple(node.meta["val"].shape))
                elif node.op == "call_function":
                    self.numbers[node] = self.call(node)
                elif node.op == "output":
                    outputs = [self.numbers[n] for n in node.args[0]]
                else:
                    return None
        except _Unknown:
            return None
        count = len(self.shapes) - len(self.steps)
        return MatrixProgram(
            tuple(self.shapes[:count]), tuple(self.steps), tuple(outputs[k] for k in order)
        )

    def emit(
        self, op: str, arguments: Sequence[int], shape: Sequence[int], number: float = 0.0,
        axis: int = 0,
    ) -> int:  # fmt: skip
        self.steps.append(Step(op, tuple(arguments), tuple(shape), number, axis))
        self.shapes.append(tuple(shape))
        return len(self.shapes) - 1

    def call(self, node: Node) -> int:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype != self.dtype:
            raise _Unknown
        if value.dim() not in (1, 2) or not all(n == 1 or n in SIZES for n in value.shape):
            raise _Unknown
        name = operation_name(node)
        read = getattr(self, f"op_{name}", None)
        if read is None or (node.kwargs and name != "clone"):
            raise _Unknown
        return int(read(tuple(value.shape), *node.args, **node.kwargs))

    def number(self, argument: Any) -> int:
        if not isinstance(argument, Node):
            raise _Unknown
        return self.numbers[argument]

    def op_mm(self, shape: tuple[int, ...], a: Any, b: Any) -> int:
        return self.emit("dot", [self.number(a), self.number(b)], shape)

    def op_addmm(self, shape: tuple[int, ...], c: Any, a: Any, b: Any) -> int:
        return self.emit("add", [self.number(c), self.op_mm(shape, a, b)], shape)

    def op_mv(self, shape: tuple[int, ...], a: Any, x: Any) -> int:
        matrix = self.number(a)
        products = self.emit("mul", [matrix, self.number(x)], self.shapes[matrix])
        return self.emit("sum", [products], shape, axis=1)

    def op_addmv(self, shape: tuple[int, ...], y: Any, a: Any, x: Any) -> int:
        return self.emit("add", [self.number(y), self.op_mv(shape, a, x)], shape)

    def op_add(self, shape: tuple[int, ...], a: Any, b: Any) -> int:
        return self.elementwise("add", "shift", shape, a, b)

    def op_mul(self, shape: tuple[int, ...], a: Any, b: Any) -> int:
        return self.elementwise("mul", "scale", shape, a, b)

    def op_sub(self, shape: tuple[int, ...], a: Any, b: Any) -> int:
        if isinstance(a, Node) and isinstance(b, Node):
            return self.emit("sub", [self.number(a), self.number(b)], shape)
        if isinstance(a, Node):
            return self.op_add(shape, a, -b)
        return self.emit("shift", [self.op_neg(shape, b)], shape, number=float(a))

    def op_neg(self, shape: tuple[int, ...], x: Any) -> int:
        return self.emit("neg", [self.number(x)], shape)

    def elementwise(self, op: str, by_number: str, shape: tuple[int, ...], a: Any, b: Any) -> int:
        if isinstance(a, (int, float)):
            a, b = b, a
        if isinstance(b, (int, float)):
            return self.emit(by_number, [self.number(a)], shape, number=float(b))
        return self.emit(op, [self.number(a), self.number(b)], shape)

    def op_permute(self, shape: tuple[int, ...], x: Any, dims: Sequence[int]) -> int:
        if [d % len(shape) for d in dims] == list(range(len(shape))):
            return self.number(x)
        return self.emit("trans", [self.number(x)], shape)

    def op_sum(self, shape: tuple[int, ...], x: Any, dims: Any = (), keepdim: bool = False) -> int:
        number = self.number(x)
        if len(dims) != 1 or len(self.shapes[number]) != 2 or keepdim:
            raise _Unknown
        return self.emit("sum", [number], shape, axis=dims[0] % 2)

    def op_unsqueeze(self, shape: tuple[int, ...], x: Any, dim: int) -> int:
        return self.emit("expand", [self.number(x)], shape, axis=dim % 2)

    def op_view(self, shape: tuple[int, ...], x: Any, _: Any) -> int:
        number = self.number(x)
        if self.shapes[number] == shape:
            return number
        if len(self.shapes[number]) == 1 and 1 in shape:
            return self.emit("expand", [number], shape, axis=shape.index(1))
        raise _Unknown

    def op_clone(self, shape: tuple[int, ...], x: Any, **_: Any) -> int:
        return self.number(x)
