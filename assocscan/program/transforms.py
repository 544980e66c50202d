"""Operators made of others: with more or fewer outputs, with the edge as an input, and products
that keep what a loop keeps."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TypeVar

import torch

from .dtypes import FLOATS
from .matrix_operator import MatrixOperator
from .operator import Leaf, Operator, spans, without_outputs
from .program_builder import Builder, decode
from .vectors.vector_operator import VectorOperator

AnyOperator = TypeVar("AnyOperator", Operator, MatrixOperator)


@functools.lru_cache(maxsize=512)
def with_outputs(op: AnyOperator, saved: tuple[int, ...]) -> AnyOperator:
    """`op` that also gives these state leaves as outputs (before t in an exclusive scan)."""
    if not saved:
        return op
    if isinstance(op, MatrixOperator):
        return op.showing((*op.shown, *saved))
    builder = Builder(op.lower.inputs)
    outputs = builder.inline(op.lower, range(len(op.lower.inputs)))
    parts = spans(op.state)
    outputs.extend(c for k in saved for c in parts[k])
    return replace(
        op,
        outputs=(*op.outputs, *(op.state[k] for k in saved)),
        lower=builder.build(outputs),
    )


@functools.lru_cache(maxsize=512)
def reduction_only(
    op: Operator | MatrixOperator | VectorOperator,
) -> Operator | MatrixOperator | VectorOperator:
    """`op` without outputs, for a scan of which only the final carry is wanted."""
    if isinstance(op, VectorOperator):
        return op.without_outputs()
    return op.showing(()) if isinstance(op, MatrixOperator) else without_outputs(op)


@functools.lru_cache(maxsize=512)
def with_edge_input(op: Operator) -> Operator:
    """`op`, a derived operator, with `edge` as its last input leaf, for a scan without finals. The
    leaf is where lower's own `edge` was, so that `op.edge` stays as it is.

    In such a scan, which is exclusive, nothing reads the element at the edge. Its lift there is the
    identity, so that no value of it (0 · inf, for one) reaches a derivative either.
    """
    assert op.identity is not None
    lift = Builder((*op.lift.inputs, "b1"))
    raw = range(len(op.lift.inputs))
    fixed = [
        lift.const(decode(v), kind)
        for v, kind in zip(op.identity, op.lift.output_dtypes, strict=True)
    ]
    element = lift.inline(op.lift, raw)
    lower = Builder((*op.lower.inputs, "b1"))
    return replace(
        op,
        inputs=(*op.inputs, Leaf(torch.bool)),
        lift=lift.build(
            [lift.emit("where", len(raw), a, b) for a, b in zip(fixed, element, strict=True)]
        ),
        lower=lower.build(lower.inline(op.lower, range(len(op.lower.inputs)))),
    )


@functools.lru_cache(maxsize=512)
def state_outputs(op: Operator) -> dict[int, int]:
    """Which outputs are a state leaf as it is: state leaf → output."""
    found: dict[int, int] = {}
    values, start = op.lower.outputs, 0
    for k, leaf in enumerate(op.outputs):
        shown = list(values[start : start + leaf.components])
        start += leaf.components
        for j, (state, span) in enumerate(zip(op.state, spans(op.state), strict=True)):
            if state == leaf and shown == list(span):
                found.setdefault(j, k)
    return found


def is_product(op: Operator) -> bool:
    """Whether an element is one float, and combining multiplies."""
    steps = op.combine.instructions
    return (
        op.width == 1
        and len(steps) == 1
        and (steps[0].op, steps[0].args) == ("mul", (0, 1))
        and steps[0].dtype in FLOATS
    )
