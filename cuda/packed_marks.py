"""Packed sequences in CUDA kernels: the axis is scanned as one row, and marks say where sequences
start and end."""

from __future__ import annotations

import math

import torch

from ..engines.base.scan_spec import ScanSpec
from ..program.element_components import from_components
from ..program.operator import Operator, spans
from ..program.program_builder import decode
from .kernel import CudaLeaf

Spec = ScanSpec[Operator]


def marks_of(spec: Spec, offsets: torch.Tensor) -> list[torch.Tensor]:
    """One int32 per position of the axis, made without a synchronisation with the device: bit 0 is
    set at the first step of a sequence in scan order, bit 1 at its last step; at both, the bits
    above hold the sequence's number. 0 elsewhere."""
    length, device = spec.length, spec.device
    bounds = offsets.long().clamp(0, length)
    begins, ends = bounds[:-1], bounds[1:]
    number = 4 * torch.arange(len(begins), dtype=torch.int32, device=device)
    nowhere = torch.full_like(begins, length)
    first = torch.where(ends > begins, begins, nowhere)
    last = torch.where(ends > begins, ends - 1, nowhere)
    if spec.reverse:
        first, last = last, first
    starts = torch.zeros(length + 1, dtype=torch.int32, device=device)
    stops = torch.zeros_like(starts)
    starts.scatter_(0, first, number + 1)
    stops.scatter_(0, last, number + 2)
    return [starts.bitwise_or_(stops)]


def marks_leaf(length: int, lanes: bool) -> CudaLeaf:
    return CudaLeaf(torch.int32, (0,), 4 if lanes else math.gcd(16, 4 * length), lanes)


def fill_finals(spec: Spec, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Write the final carry of an empty sequence to all finals: init where it is given, else the
    identity. `tensors`: the finals, then the init tensors of those leaves that have one."""
    op, count = spec.operator, len(spec.final)
    given = iter(tensors[count:])
    for k, t in zip(spec.final, tensors, strict=False):
        if k in (spec.init or ()):
            t.copy_(next(given).expand(t.shape))
        elif op.identity is not None:
            values: list[torch.Tensor | None] = [
                torch.full((), decode(op.identity[c]), device=t.device) for c in spans(op.state)[k]
            ]
            t.copy_(from_components(values, op.state[k], (), t).expand(t.shape))
    return []
