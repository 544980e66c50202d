"""Chunks of the axis as packed sequences: what a reduction and the matrix engine cut it into."""

from __future__ import annotations

import functools

import torch

from .lasting import make_lasting
from .problem import ScanProblem


def offsets_of(problem: ScanProblem) -> torch.Tensor:
    assert problem.offsets is not None
    return problem.offsets.to(problem.device)


@functools.lru_cache(maxsize=128)
def even_chunks(
    length: int, chunk_length: int, reverse: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks' offsets on an axis of one sequence, and a mark at the chunk it starts with."""
    bounds = [*range(0, length, chunk_length), length]
    first = torch.zeros(len(bounds) - 1, dtype=torch.uint8)
    first[-1 if reverse else 0] = 1
    return make_lasting(lambda: (torch.tensor(bounds).to(device), first.to(device)), device)


def cut_axis(
    problem: ScanProblem, chunk_length: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The chunks' offsets on the axis; the sequences' offsets on the chunks, if there are any; and
    which chunks a sequence starts with. On the device, without waiting for it."""
    device, length = problem.device, problem.length
    if problem.offsets is None:
        chunks, first = even_chunks(length, chunk_length, problem.reverse, device)
        return chunks, None, first
    offsets = offsets_of(problem).long().clamp(0, length)
    sequences = len(offsets) - 1
    count = length // chunk_length + sequences
    ends = (-(-offsets.diff() // chunk_length)).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    number = torch.arange(count, device=device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=sequences - 1)
    begin = offsets[sequence] + (number - starts[sequence]) * chunk_length
    begin = torch.minimum(begin, offsets[sequence + 1])
    first = number == (ends[sequence] - 1 if problem.reverse else starts[sequence])
    return torch.cat([begin, offsets[-1:]]), starts, first.to(torch.uint8)
