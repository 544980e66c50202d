"""Tables of chunks: the axis is cut into chunks of one length, the last one of a sequence shorter.

Used by the multi-pass engine, by reductions and by scans of matrices.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .commands import Slot
from .executable import CommandList
from .persistent_tensors import make_lasting
from .scan_spec import ScanSpec, TensorSpec


def count_chunks(spec: ScanSpec[Any], chunk_length: int) -> int:
    """The number of chunks; for packed sequences an upper bound, which needs no offsets' values."""
    if spec.sequences is None:
        return -(-spec.length // chunk_length)
    return spec.length // chunk_length + spec.sequences


@functools.lru_cache(maxsize=128)
def even_chunks(
    length: int, chunk_length: int, reverse: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """For an axis that is one sequence: the offsets of the chunks, and a uint8 per chunk, 1 at the
    first chunk in scan order."""
    bounds = [*range(0, length, chunk_length), length]
    first = torch.zeros(len(bounds) - 1, dtype=torch.uint8)
    first[-1 if reverse else 0] = 1
    return make_lasting(lambda: (torch.tensor(bounds).to(device), first.to(device)), device)


def chunk_tables(
    offsets: torch.Tensor, length: int, chunk_length: int, count: int, least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The chunks of S packed sequences, without a synchronisation with the device:

    first_chunk [S + 1]: the number of each sequence's first chunk; last, the number of all chunks.
    sequence [count]: the sequence of each chunk.
    step [count]: the step of its sequence at which each chunk starts.

    A sequence has at least `least` chunks (0 or 1: whether an empty one has a chunk). `count` may
    be larger than the number of chunks; the entries after the last chunk are not used.
    """
    sizes = offsets.clamp(0, length).diff().clamp(min=0)
    ends = ((sizes + chunk_length - 1) // chunk_length).clamp(min=least).cumsum(0)
    first_chunk = torch.cat([ends.new_zeros(1), ends])
    chunk = torch.arange(count, device=offsets.device)
    sequence = torch.searchsorted(ends, chunk, right=True).clamp(max=len(sizes) - 1)
    return first_chunk, sequence, (chunk - first_chunk[sequence]) * chunk_length


def add_chunk_tables(commands: CommandList, chunk_length: int) -> list[Slot]:
    """Slots of the offsets of packed sequences and of `sequence`, `step` and `first_chunk` (see
    `chunk_tables`); nothing for one sequence. An empty sequence has one chunk."""
    spec = commands.spec
    if spec.sequences is None:
        return []
    [offsets] = commands.offsets()
    length, count, device = spec.length, count_chunks(spec, chunk_length), spec.device

    def tables(offsets: torch.Tensor) -> list[torch.Tensor]:
        first_chunk, sequence, step = chunk_tables(offsets, length, chunk_length, count, 1)
        return [sequence, step, first_chunk]

    table = TensorSpec.dense((count,), torch.int64, device)
    bounds = TensorSpec.dense((spec.sequences + 1,), torch.int64, device)
    name = f"tables of chunks of {chunk_length}"
    return [offsets, *commands.eager(name, tables, [offsets], [table, table, bounds])]


def cut_axis(commands: CommandList, chunk_length: int) -> tuple[Slot, Slot | None, Slot]:
    """Slots of three tensors that make every chunk a packed sequence of a first pass, and every
    sequence a packed sequence of chunks in a second pass:

    the offsets of the chunks on the axis [count + 1];
    the offsets of the sequences on the axis of chunks [S + 1], None for one sequence;
    a uint8 per chunk [count], 1 at the first chunk of a sequence in scan order.
    """
    spec = commands.spec
    length, reverse, device = spec.length, spec.reverse, spec.device
    if spec.sequences is None:
        chunks, first = even_chunks(length, chunk_length, reverse, device)
        return commands.constant(chunks), None, commands.constant(first)
    count = count_chunks(spec, chunk_length)

    def cut(offsets: torch.Tensor) -> list[torch.Tensor]:
        bounds = offsets.long().clamp(0, length)
        first_chunk, sequence, step = chunk_tables(bounds, length, chunk_length, count, 0)
        begin = torch.minimum(bounds[sequence] + step, bounds[sequence + 1])
        start = first_chunk[sequence + 1] - 1 if reverse else first_chunk[sequence]
        chunk = torch.arange(count, device=bounds.device)
        return [torch.cat([begin, bounds[-1:]]), first_chunk, (chunk == start).to(torch.uint8)]

    specs = [
        TensorSpec.dense((count + 1,), torch.int64, device),
        TensorSpec.dense((spec.sequences + 1,), torch.int64, device),
        TensorSpec.dense((count,), torch.uint8, device),
    ]
    made = commands.eager(f"offsets of chunks of {chunk_length}", cut, commands.offsets(), specs)
    return made[0], made[1], made[2]
