"""Tensors of neighbouring steps: shifted by one, masks of first and last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...program.transforms import with_edge_input
from .spec import MaybeTensor, ScanSpec


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


def explicit(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[ScanSpec[Any], list[MaybeTensor]]:
    """The same scan with what engines do at edges as plain inputs: leaves that are read one step
    ahead are shifted by a step, and `edge` is a leaf. Such a scan has a derivative; it costs
    copies."""
    op = spec.operator
    if not spec.shifted and (op.edge is None or op.edge_input is not None or spec.final):
        return spec, list(tensors)
    batch, axis = spec.batch, spec.axis
    given = dict(zip(spec.names, tensors, strict=True))
    offsets, back = given.get(("offsets", 0)), not spec.reverse
    for k in spec.shifted:
        t = given["input", k]
        assert t is not None
        given["input", k] = previous_state(t, given.get(("boundary", k)), axis, back, offsets)
    if op.edge is not None and op.edge_input is None and not spec.final:
        given["input", len(op.inputs)] = edge_mask(batch, axis, back, offsets, spec.device)
        op = with_edge_input(op)
    spec = replace(spec, operator=op, shifted=(), boundary=())
    return spec, [given[name] for name in spec.names]
