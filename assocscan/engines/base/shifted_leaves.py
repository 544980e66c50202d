"""Tensors shifted by one step along the axis, and masks of the first step of each sequence.

Kernels read a `shifted` leaf one step ahead and know the edge by themselves. Here the same is done
by torch operations, for scans that autograd differentiates or that torch operations run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...program.transforms import with_edge_input
from ...torch_state import in_own_dtype, is_symbolic
from .scan_spec import MaybeTensor, ScanSpec


@in_own_dtype
def previous_state(
    y: torch.Tensor,
    edge: torch.Tensor | None,
    axis: int,
    reverse: bool,
    offsets: torch.Tensor | None,
) -> torch.Tensor:
    """y[t - 1] at every step t in scan order. The first step of each sequence gets `edge`, or zero.

    `edge` may have size 1 in place of a batch size, as under vmap. For y[t + 1], pass the opposite
    of the scan's `reverse`.
    """
    length = y.shape[axis]
    if length == 0:
        return y
    edge = y.new_zeros(()) if edge is None else edge.to(y.dtype)
    edge = edge.expand(tuple(carry_shape(y, axis, offsets)))
    if offsets is None:
        first = edge.unsqueeze(axis)
        if is_symbolic(length):  # torch asks whether a size of length - 1 is 1: a guard
            whole = torch.cat([y, first] if reverse else [first, y], axis)
            return whole.narrow(axis, 1 if reverse else 0, length)
        kept = y.narrow(axis, 1 if reverse else 0, length - 1)
        return torch.cat([kept, first] if reverse else [first, kept], axis)
    offsets = offsets.to(y.device)
    shifted = y.roll(-1 if reverse else 1, axis)
    beyond = edge.index_select(0, sequence_of_steps(offsets, length)).movedim(0, axis)
    first = start_mask(offsets, length, reverse)
    return torch.where(first.view(length, *[1] * (y.dim() - axis - 1)), beyond, shifted)


def carry_shape(y: torch.Tensor, axis: int, offsets: torch.Tensor | None) -> list[int]:
    """The shape of y without the axis; for packed sequences [S, ...]."""
    rest = [*y.shape[:axis], *y.shape[axis + 1 :]]
    return rest if offsets is None else [offsets.shape[0] - 1, *rest]


def at_last_steps(
    t: torch.Tensor,
    axis: int,
    reverse: bool,
    offsets: torch.Tensor | None,
    otherwise: torch.Tensor | None = None,
) -> torch.Tensor:
    """t at the last step of each sequence in scan order, in the shape `carry_shape`. The axis has a
    step at least. For the first steps, pass the opposite of the scan's `reverse`.

    otherwise: what stands for an empty sequence; if None, t at some step does.
    """
    if offsets is None:
        return t.select(axis, 0 if reverse else -1)
    bounds = offsets.to(t.device)
    place = (bounds[:-1] if reverse else bounds[1:] - 1).clamp(0, t.shape[axis] - 1)
    found = t.index_select(axis, place).movedim(axis, 0)
    if otherwise is None:
        return found
    is_empty = (bounds.diff() <= 0).view(-1, *[1] * (t.dim() - 1))
    return torch.where(is_empty, otherwise, found)


def sequence_of_steps(offsets: torch.Tensor, length: int) -> torch.Tensor:
    """The number of the sequence of each of `length` packed steps."""
    position = torch.arange(length, device=offsets.device)
    # The last sequence with an offset <= position: the one that contains it, not an empty one.
    # Wrong offsets, of which a GPU tells later, reach no other memory.
    sequence = torch.searchsorted(offsets, position, right=True) - 1
    return sequence.clamp(0, max(offsets.shape[0] - 2, 0))


def start_mask(offsets: torch.Tensor, length: int, reverse: bool) -> torch.Tensor:
    """A mask of shape [length]: True at the first step, in scan order, of every sequence."""
    bounds = offsets.clamp(0, length)
    mask = torch.zeros(length + 1, dtype=torch.bool, device=offsets.device)
    mask = mask.index_fill(0, bounds[1:] if reverse else bounds[:-1], True)
    return mask[1:] if reverse else mask[:-1]


def edge_mask(
    batch: tuple[int, ...], axis: int, reverse: bool, offsets: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """A mask whose shape broadcasts to `batch`: True at the first step, in the order of `reverse`,
    of every sequence. For the last steps, pass the opposite of the scan's `reverse`."""
    length = batch[axis]
    if offsets is not None:
        mask = start_mask(offsets, length, reverse).to(device)
    else:
        position = torch.arange(length, device=device)
        mask = position == (length - 1 if reverse else 0)
    return mask.view(*(length if d == axis else 1 for d in range(len(batch))))


def explicit(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[ScanSpec[Any], list[MaybeTensor]]:
    """An equal scan that needs nothing special of its engine at the edge.

    A leaf that is read one step ahead becomes a shifted copy. `edge` (True at the last step of a
    sequence) becomes one more input leaf. The new scan can be differentiated; the old one cannot.
    """
    op = spec.operator
    if not spec.shifted and (op.edge is None or op.edge_input is not None or spec.final):
        return spec, list(tensors)
    batch, axis = spec.batch, spec.axis
    given = dict(zip(spec.names, tensors, strict=True))
    # Reading one step ahead is `previous_state` in the opposite direction.
    offsets, opposite = given.get(("offsets", 0)), not spec.reverse
    for k in spec.shifted:
        t = given["input", k]
        assert t is not None
        given["input", k] = previous_state(t, given.get(("boundary", k)), axis, opposite, offsets)
    if op.edge is not None and op.edge_input is None and not spec.final:
        given["input", len(op.inputs)] = edge_mask(batch, axis, opposite, offsets, spec.device)
        op = with_edge_input(op)
    spec = replace(spec, operator=op, shifted=(), boundary=())
    return spec, [given[name] for name in spec.names]
