"""Packed sequences: where each starts and ends, for kernels that see one row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..engines.base.problem import ScanProblem
from ..program.components import from_components
from ..program.ir import decode
from ..program.operator import spans
from .kernel import CudaLeaf


def marks_of(problem: ScanProblem) -> torch.Tensor:
    """Per position of the axis: 1 where a sequence starts in the scan's order, 2 where it ends, and
    four times its number at both; 0 elsewhere. Nothing waits for the device."""
    assert problem.offsets is not None
    length, device = problem.length, problem.device
    bounds = problem.offsets.to(device).long().clamp(0, length)
    begins, ends = bounds[:-1], bounds[1:]
    number = 4 * torch.arange(len(begins), dtype=torch.int32, device=device)
    nowhere = torch.full_like(begins, length)
    first = torch.where(ends > begins, begins, nowhere)
    last = torch.where(ends > begins, ends - 1, nowhere)
    if problem.reverse:
        first, last = last, first
    starts = torch.zeros(length + 1, dtype=torch.int32, device=device)
    stops = torch.zeros_like(starts)
    starts.scatter_(0, first, number + 1)
    stops.scatter_(0, last, number + 2)
    return starts.bitwise_or_(stops)


def marks_leaf(length: int, lanes: bool) -> CudaLeaf:
    return CudaLeaf(torch.int32, (0,), 4 if lanes else math.gcd(16, 4 * length), lanes)


def fill_finals(problem: ScanProblem, finals: Sequence[torch.Tensor]) -> None:
    """What empty sequences have: the init, or the identity."""
    op = problem.operator
    for k, t in zip(problem.final, finals, strict=True):
        init = None if problem.init is None else problem.init[k]
        if init is not None:
            t.copy_(init.expand(t.shape))
        elif op.identity is not None:
            values: list[torch.Tensor | None] = [
                torch.full((), decode(op.identity[c]), device=t.device) for c in spans(op.state)[k]
            ]
            t.copy_(from_components(values, op.state[k], (), t).expand(t.shape))
