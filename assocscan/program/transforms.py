"""Tensor-level views of states: components of elements, shifts by one step, extended operators."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import cast

import torch

from ..engines.base.problem import ScanProblem
from .ir import Builder, decode
from .matrices import MatrixOperator
from .operator import Leaf, Operator, spans, without_outputs


def component_views(t: torch.Tensor, leaf: Leaf) -> list[torch.Tensor]:
    """One tensor of the batch shape per component of the leaf."""
    if leaf.dtype.is_complex:
        t = torch.view_as_real(t.resolve_conj())
    rank = len(leaf.shape) + (1 if leaf.dtype.is_complex else 0)
    if rank == 0:
        return [t]
    return list(t.flatten(t.dim() - rank).unbind(-1))


def from_components(
    parts: list[torch.Tensor | None], leaf: Leaf, batch: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """The leaf with these components; None is zero."""
    zero = like.new_zeros(batch, dtype=torch.empty(0, dtype=leaf.dtype).real.dtype)
    flat = torch.stack([zero if p is None else p.to(zero.dtype) for p in parts], -1)
    if leaf.dtype.is_complex:
        return torch.view_as_complex(flat.reshape(*batch, *leaf.shape, 2).contiguous())
    return flat.reshape((*batch, *leaf.shape))


def previous_state(
    y: torch.Tensor,
    edge: torch.Tensor | None,
    axis: int,
    reverse: bool,
    offsets: torch.Tensor | None,
) -> torch.Tensor:
    """y one step earlier in scan order; at the start of each sequence `edge`, or zero."""
    length = y.shape[axis]
    if length == 0:
        return y
    if edge is None:
        edge = y.new_zeros(()).expand(tuple(carry_shape(y, axis, offsets)))
    edge = edge.to(y.dtype)
    if offsets is None:
        first = edge.unsqueeze(axis)
        kept = y.narrow(axis, 1 if reverse else 0, length - 1)
        return torch.cat([kept, first] if reverse else [first, kept], axis)
    offsets = offsets.to(y.device)
    shifted = y.roll(-1 if reverse else 1, axis)
    number = torch.arange(length, device=y.device)
    sequence = torch.searchsorted(offsets, number, right=True) - 1  # the last that starts by then
    beyond = edge.index_select(0, sequence).movedim(0, axis)
    first = start_mask(offsets, length, reverse)
    return torch.where(first.view(length, *[1] * (y.dim() - axis - 1)), beyond, shifted)


def carry_shape(y: torch.Tensor, axis: int, offsets: torch.Tensor | None) -> list[int]:
    rest = [*y.shape[:axis], *y.shape[axis + 1 :]]
    return rest if offsets is None else [offsets.shape[0] - 1, *rest]


def start_mask(offsets: torch.Tensor, length: int, reverse: bool) -> torch.Tensor:
    """True at the first step, in scan order, of every sequence [L]."""
    bounds = offsets.clamp(0, length)
    mask = torch.zeros(length + 1, dtype=torch.bool, device=offsets.device)
    mask = mask.index_fill(0, bounds[1:] if reverse else bounds[:-1], True)
    return mask[1:] if reverse else mask[:-1]


def edge_mask(
    batch: tuple[int, ...], axis: int, reverse: bool, offsets: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """True at the first step, in scan order, of every sequence; shape broadcasts to `batch`."""
    length = batch[axis]
    if offsets is not None:
        mask = start_mask(offsets, length, reverse).to(device)
    else:
        number = torch.arange(length, device=device)
        mask = number == (length - 1 if reverse else 0)
    return mask.view(*(length if d == axis else 1 for d in range(len(batch))))


@functools.lru_cache(maxsize=512)
def with_outputs(op: Operator, saved: tuple[int, ...]) -> Operator:
    """`op` that also gives these state leaves as outputs (before t in an exclusive scan)."""
    if not saved:
        return op
    matrices: object = op
    if isinstance(matrices, MatrixOperator):
        return cast(Operator, matrices.showing((*matrices.shown, *saved)))
    builder = Builder(op.lower.inputs)
    outputs = builder.inline(op.lower, range(len(op.lower.inputs)))
    parts = spans(op.state)
    outputs.extend(c for k in saved for c in parts[k])
    return replace(
        op,
        outputs=(*op.outputs, *(op.state[k] for k in saved)),
        lower=builder.build(outputs),
    )


def silenced(op: Operator) -> Operator:
    """`op` without outputs, for a scan of which only the final carry is wanted."""
    matrices: object = op
    if isinstance(matrices, MatrixOperator):
        return cast(Operator, matrices.showing(()))
    return without_outputs(op)


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


def explicit(problem: ScanProblem) -> ScanProblem:
    """The same problem with what engines do at edges as plain inputs: leaves that are read ahead
    shifted by a step, and `edge` a leaf. Such a problem has a derivative; it costs copies."""
    op = problem.operator
    takes_edge = op.edge is not None and op.edge_input is None and not problem.final
    if not problem.ahead and not takes_edge:
        return problem
    batch, axis, offsets = problem.batch, problem.axis, problem.offsets
    back = not problem.reverse
    inputs = list(problem.inputs)
    for k, beyond in problem.ahead.items():
        t = inputs[k]
        assert t is not None
        inputs[k] = previous_state(t, beyond, axis, back, offsets)
    if takes_edge:
        op = with_edge_input(op)
        inputs.append(edge_mask(batch, axis, back, offsets, problem.device))
    return replace(problem, operator=op, inputs=inputs, ahead={})
