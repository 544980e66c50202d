"""The multi-pass engine: no program waits for another, so it needs no forward progress.

    totals   every chunk of the axis is combined to its total
    prefixes the totals are scanned, by this engine again where they are many
    rescan   every chunk is scanned from the prefix before it

Each input is read twice and each output written once; a reduction, which has no outputs, needs no
third pass and reads each input once (`reduce`). The chunks depend on the shape alone, so
results are bitwise equal from run to run. Source: G. E. Blelloch, "Prefix sums and their
applications", CMU-CS-90-190, 1990, section 1.3.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ...caching.bounded import BoundedCache
from ...program.ir import Builder
from ...program.names import composed
from ...program.operator import Leaf, Operator, spans
from ..base.chunks import cut_axis
from ..base.layout import Layout, gather_tensors, lay_out
from ..base.problem import ScanProblem
from . import scan as triton_scan
from .tiles import choose_chunk

DTYPES = {
    "b1": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip

_PREPARED: BoundedCache[Any, tuple[triton_scan.Prepared, triton_scan.Prepared]] = BoundedCache()


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem in three passes; in one where chunks would not be many fewer than steps, as
    with one chunk or with very short sequences."""
    length = chunk_length(problem)
    few = 2 * count_chunks(problem, length) <= problem.length
    nothing = math.prod(problem.carry_batch) == 0 or not problem.operator.total(problem.final)
    if problem.length <= length or not few or nothing:
        return triton_scan.scan(problem)
    if not problem.operator.outputs and not problem.ahead:
        return reduce(problem, length)
    tensors = gather_tensors(problem)
    totals, rescan = prepared_passes(problem, tensors, length)
    for name in totals.copies:
        tensors[name] = tensors[name].contiguous()
    tables = chunk_tables(problem, length)
    outputs, finals = triton_scan.allocate(rescan, problem, tensors)

    op = problem.operator
    components = op.total(problem.final)
    kinds = op.combine.output_dtypes
    for c in components:
        tensors["after", c] = torch.empty(
            totals.carries, dtype=DTYPES[kinds[c]], device=problem.device
        )
    triton_scan.launch(totals, tensors, tables[:3])
    prefixes, _ = scan(
        ScanProblem(
            carry_operator(op, tuple(components)), [tensors["after", c] for c in components],
            totals.carries, 1, offsets=tables[3] if tables else None,
        )
    )  # fmt: skip
    for c, t in zip(components, prefixes, strict=True):
        tensors["before", c] = t
    triton_scan.launch(rescan, tensors, tables[:3])
    return outputs, finals


def reduce(problem: ScanProblem, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The finals alone: those of every chunk, a packed sequence of its own, then of these."""
    op, given = problem.operator, problem.init
    leaves = whole_leaves(op, problem.final)
    chunks, starts, _ = cut_axis(problem, length)
    totals = replace(
        problem, exclusive=False, init=None, from_identity=False, final=leaves, offsets=chunks
    )
    _, carries = triton_scan.scan(totals)
    together = ScanProblem(
        leaf_carry_operator(op, leaves), list(carries), totals.carry_batch, 0, problem.reverse,
        init=None if given is None else [given[k] for k in leaves],
        from_identity=problem.from_identity, offsets=starts,
        final=tuple(leaves.index(k) for k in problem.final),
    )  # fmt: skip
    return scan(together)


def whole_leaves(op: Operator, final: tuple[int, ...]) -> tuple[int, ...]:
    """The state leaves that a total for these final ones consists of."""
    parts = spans(op.state)
    while True:
        needed = set(op.total(final))
        leaves = tuple(k for k, span in enumerate(parts) if needed & set(span))
        if set(leaves) == set(final):
            return leaves
        final = leaves


def chunk_length(problem: ScanProblem) -> int:
    """How many steps a chunk has."""
    chains = math.prod(problem.carry_batch)
    processors = triton_scan.processors(problem.device)
    return choose_chunk(problem.length, chains, processors, problem.device.type == "cpu")


def count_chunks(problem: ScanProblem, length: int) -> int:
    """How many chunks there are; at most, for packed sequences."""
    if problem.offsets is None:
        return -(-problem.length // length)
    return problem.length // length + len(problem.offsets) - 1


def prepared_passes(
    problem: ScanProblem, tensors: triton_scan.Tensors, length: int
) -> tuple[triton_scan.Prepared, triton_scan.Prepared]:
    """The first and the last pass; kept for these shapes, strides and flags."""
    key = (length, *triton_scan.launch_key(problem, tensors))
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, prepare(problem, lay_out(problem, tensors), length))
    return known


def prepare(
    problem: ScanProblem, layout: Layout, length: int
) -> tuple[triton_scan.Prepared, triton_scan.Prepared]:
    chunks = count_chunks(problem, length)
    return (
        triton_scan.build(problem, layout, "totals", chunks, length),
        triton_scan.build(problem, layout, "rescan", chunks, length),
    )


def chunk_tables(problem: ScanProblem, length: int) -> list[torch.Tensor]:
    """For packed sequences: their offsets; the sequence and the first step of each chunk; and the
    offsets of the chunks. An empty sequence has one chunk; chunks may be left over at the end."""
    if problem.offsets is None:
        return []
    offsets = problem.offsets.to(problem.device)
    sequences = len(offsets) - 1
    sizes = offsets.clamp(0, problem.length).diff().clamp(min=0)
    ends = ((sizes + length - 1) // length).clamp(min=1).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    number = torch.arange(count_chunks(problem, length), device=problem.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=sequences - 1)
    return [offsets, sequence, (number - starts[sequence]) * length, starts]


@functools.lru_cache(maxsize=512)
def leaf_carry_operator(op: Operator, leaves: tuple[int, ...]) -> Operator:
    """`op` without outputs on states of these leaves, in the dtypes of carries."""
    parts = spans(op.state)
    components = tuple(c for k in leaves for c in parts[k])
    scalar = carry_operator(op, components)
    state = tuple(Leaf(op.state[k].accumulator, op.state[k].shape) for k in leaves)
    identity = None if op.identity is None else tuple(op.identity[c] for c in components)
    return Operator(
        scalar.name, state, state, (), scalar.lift, scalar.combine, scalar.lower.select(()),
        identity,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def carry_operator(op: Operator, components: tuple[int, ...]) -> Operator:
    """`op` on elements that are totals already: one scalar leaf per component."""
    kinds = [op.combine.output_dtypes[c] for c in components]
    n = len(components)
    place = {c: k for k, c in enumerate(components)}
    both = Builder([*kinds, *kinds])
    arguments = [place.get(c, 0) for c in range(op.width)]
    arguments += [n + place.get(c, 0) for c in range(op.width)]
    one, shown = Builder(kinds), Builder([*kinds, *kinds, "b1"])
    leaves = tuple(Leaf(DTYPES[kind]) for kind in kinds)
    return Operator(
        composed(f"{op.name} (carries)"), leaves, leaves, leaves, one.build(list(range(n))),
        both.build(both.inline(op.combine.select(list(components)), arguments)),
        shown.build(list(range(n))), None,
    )  # fmt: skip
