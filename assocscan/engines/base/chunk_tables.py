"""The axis cut into chunks: for the multi-pass engine, for reductions and for matrices."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .executable import CommandList, Slot
from .persistent_tensors import make_lasting
from .spec import ScanSpec, TensorSpec


def count_chunks(spec: ScanSpec[Any], chunk_length: int) -> int:
    """How many chunks there are; at most, for packed sequences."""
    if spec.sequences is None:
        return -(-spec.length // chunk_length)
    return spec.length // chunk_length + spec.sequences


@functools.lru_cache(maxsize=128)
def even_chunks(
    length: int, chunk_length: int, reverse: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks' offsets on an axis of one sequence, and a mark at the chunk it starts with."""
    bounds = [*range(0, length, chunk_length), length]
    first = torch.zeros(len(bounds) - 1, dtype=torch.uint8)
    first[-1 if reverse else 0] = 1
    return make_lasting(lambda: (torch.tensor(bounds).to(device), first.to(device)), device)


def numbered(
    offsets: torch.Tensor, length: int, chunk_length: int, count: int, least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The offsets of the sequences on the chunks [S + 1]; per chunk [count] its sequence, and the
    step of that sequence with which it starts. Every sequence has `least` chunks or more; chunks
    may be left over at the end. Nothing waits for the device."""
    sizes = offsets.clamp(0, length).diff().clamp(min=0)
    ends = ((sizes + chunk_length - 1) // chunk_length).clamp(min=least).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    number = torch.arange(count, device=offsets.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=len(sizes) - 1)
    return starts, sequence, (number - starts[sequence]) * chunk_length


def add_chunk_tables(commands: CommandList, chunk_length: int) -> list[Slot]:
    """For packed sequences: their offsets; the sequence and the first step of each chunk; and the
    offsets of the sequences on the chunks. An empty sequence has one chunk."""
    spec = commands.spec
    if spec.sequences is None:
        return []
    [offsets] = commands.offsets()
    length, count, device = spec.length, count_chunks(spec, chunk_length), spec.device

    def tables(offsets: torch.Tensor) -> list[torch.Tensor]:
        starts, sequence, step = numbered(offsets, length, chunk_length, count, 1)
        return [sequence, step, starts]

    table = TensorSpec.dense((count,), torch.int64, device)
    bounds = TensorSpec.dense((spec.sequences + 1,), torch.int64, device)
    name = f"tables of chunks of {chunk_length}"
    return [offsets, *commands.eager(name, tables, [offsets], [table, table, bounds])]


def cut_axis(commands: CommandList, chunk_length: int) -> tuple[Slot, Slot | None, Slot]:
    """The chunks' offsets on the axis; the sequences' offsets on the chunks, if there are any; and
    which chunks a sequence starts with."""
    spec = commands.spec
    length, reverse, device = spec.length, spec.reverse, spec.device
    if spec.sequences is None:
        chunks, first = even_chunks(length, chunk_length, reverse, device)
        return commands.constant(chunks), None, commands.constant(first)
    count = count_chunks(spec, chunk_length)

    def cut(offsets: torch.Tensor) -> list[torch.Tensor]:
        bounds = offsets.long().clamp(0, length)
        starts, sequence, step = numbered(bounds, length, chunk_length, count, 0)
        begin = torch.minimum(bounds[sequence] + step, bounds[sequence + 1])
        ends = starts[sequence + 1] - 1 if reverse else starts[sequence]
        number = torch.arange(count, device=bounds.device)
        return [torch.cat([begin, bounds[-1:]]), starts, (number == ends).to(torch.uint8)]

    specs = [
        TensorSpec.dense((count + 1,), torch.int64, device),
        TensorSpec.dense((spec.sequences + 1,), torch.int64, device),
        TensorSpec.dense((count,), torch.uint8, device),
    ]
    made = commands.eager(f"offsets of chunks of {chunk_length}", cut, commands.offsets(), specs)
    return made[0], made[1], made[2]
