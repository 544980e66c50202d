"""The carries that a forward scan over vectors saves on GPUs, from states that torch operations
computed. They lie as the kernels save them (`engines/base/vectors/results.gpu_carries`), so that a
kernel can run the backward pass of a scan whose forward kernel could not be made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...program.vectors.vector_operator import VectorOperator
from ..base.scan_spec import ScanSpec
from ..base.vectors.kernel import CHUNK, padded_states
from ..base.vectors.results import gpu_carries, saved_parts
from .vector_interpreter import Walk

Spec = ScanSpec[VectorOperator]


@dataclass(frozen=True)
class Chunk:
    """A chunk that has steps. slot: the place of its carry among those that are saved. place: the
    position on the axis of the state that enters the chunk; None: the carry of its sequence enters
    it."""

    slot: int
    sequence: int
    place: int | None


def saved_carries(spec: Spec, found: Walk) -> torch.Tensor:
    op, parts = saved_parts(spec)
    shape, dtype = gpu_carries(spec)
    slots, rows, lanes, numbers = shape
    result = torch.zeros((slots, rows, lanes * numbers), dtype=dtype, device=spec.device)
    chunks = chunks_of(spec, found.bounds)
    places = torch.tensor([c.slot for c in chunks], dtype=torch.int64, device=spec.device)
    at = 0
    for part in parts:
        width = padded_states(op.size) if op.state_varies[part] else 1
        region = result[..., at * lanes : (at + width) * lanes].unflatten(-1, (lanes, width))
        at += width
        if chunks:
            bits = as_bits(entering(spec, found, part, chunks), dtype)
            region[places, :, : bits.shape[2], : bits.shape[3]] = bits
    return result.view(shape)


def chunks_of(spec: Spec, bounds: list[int]) -> list[Chunk]:
    """The chunks of all sequences. The first step of a scan that starts without a carry is before
    the first chunk."""
    found = []
    start = int(spec.begins_alone)
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        base = 0 if spec.sequences is None else begin // CHUNK + sequence
        for number, first in enumerate(range(start, end - begin, CHUNK)):
            step = first if spec.exclusive else first - 1  # whose state is the carry
            place = end - 1 - step if spec.reverse else begin + step
            found.append(Chunk(base + number, sequence, place if step >= 0 else None))
    return found


def entering(spec: Spec, found: Walk, part: int, chunks: list[Chunk]) -> torch.Tensor:
    """A part of the carries before these chunks: [chunks, rows, lanes, states]."""
    places = torch.tensor([c.place or 0 for c in chunks], device=spec.device)
    carries = found.states[part].index_select(spec.axis, places).movedim(spec.axis, 0)
    for k, chunk in enumerate(chunks):
        if chunk.place is None:
            first = found.first[part]
            carries[k] = first if spec.sequences is None else first[chunk.sequence]
    lane = spec.operator.lane
    if lane is None:
        carries = carries.unsqueeze(-2)
    else:
        carries = carries.movedim(lane + (lane < spec.axis), -2)
    count, lanes, states = len(chunks), carries.shape[-2], carries.shape[-1]
    return carries.reshape(count, math.prod(carries.shape[1:-2]), lanes, states)


def as_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of each value as an integer."""
    if values.is_floating_point():
        same_size = torch.int64 if values.element_size() == 8 else torch.int32
        values = values.contiguous().view(same_size)
    return values.to(dtype)
