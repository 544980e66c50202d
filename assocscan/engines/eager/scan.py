"""The eager engine: a scan by torch operations, for any callable on any device, in O(log n) calls.

Blelloch's recursion: combine pairs of neighbours, scan the pairs, compute the elements in between.
Steps that are not associative are made one after the other.

`init` is combined with the first element before the scan, as in a loop. The first output of an
exclusive scan (`first`) is not combined with anything here. autograd differentiates the operations
and skips tensors that require no gradient. That matters for a carry that is infinite and requires
none: its derivative would contain 0 · inf, which is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..base.explained_plan import Plan
from ..base.scan_spec import ScanSpec

Leaves = list[torch.Tensor]
Combine = Callable[[Leaves, Leaves], Leaves]


def scan(
    combine: Combine,
    leaves: Leaves,
    axis: int,
    reverse: bool,
    init: Leaves | None,
    first: Leaves | None,
    sequential: bool = False,
) -> tuple[Leaves, Leaves]:
    """All prefixes, and the final carry, of an axis of length 1 or more.

    init: the carry before the first element, None without.
    first: the first output of an exclusive scan; None for an inclusive scan.
    sequential: `combine` is not associative; there is an init then.

    Both have size 1 at `axis`.
    """
    if reverse:
        leaves = [t.flip(axis) for t in leaves]
    if sequential:
        assert init is not None
        prefixes = walk(combine, init, leaves, axis)
    else:
        if init is not None:
            leaves = start_from(combine, init, leaves, axis, False)
        prefixes = prefix_scan(combine, leaves, axis)
    before, last = split(prefixes, axis, leaves[0].shape[axis] - 1)
    if first is not None:
        prefixes = [torch.cat(pair, axis) for pair in zip(first, before, strict=True)]
    if reverse:
        prefixes = [t.flip(axis) for t in prefixes]
    return prefixes, [t.squeeze(axis) for t in last]


def scan_sequences(
    combine: Combine,
    spec: ScanSpec[Any],
    leaves: Leaves,
    carries: Leaves,
    offsets: torch.Tensor | None,
) -> tuple[Leaves, Leaves, list[int]]:
    """The states that `lower` reads, the last carries, and the bounds of the packed sequences, or
    of the axis where there are no offsets.

    carries: those that enter, read where the spec has an init or is exclusive, and by a loop of
    steps that are not associative: a derivative's begins with the identity where it has no init.
    """
    axis, sequential = spec.axis, getattr(spec.operator, "sequential", False)

    def one(leaves: Leaves, carry: Leaves) -> tuple[Leaves, Leaves]:
        if leaves[0].shape[axis] == 0:
            return leaves, carry
        lead = [c.unsqueeze(axis) for c in carry]
        init = lead if spec.init is not None or sequential else None
        first = lead if spec.exclusive else None
        return scan(combine, leaves, axis, spec.reverse, init, first, sequential)

    if offsets is None:
        return *one(leaves, carries), [0, spec.length]
    bounds = offsets.cpu().clamp(0, spec.length).tolist()
    found = [
        one([t.narrow(axis, begin, max(end - begin, 0)) for t in leaves], [c[k] for c in carries])
        for k, (begin, end) in enumerate(pairwise(bounds))
    ]
    states = [torch.cat(p, axis) for p in zip(*(s for s, _ in found), strict=True)] or leaves
    last = [torch.stack(p) for p in zip(*(f for _, f in found), strict=True)] or carries
    return states, last, bounds


def scan_marked(
    combine: Combine,
    leaves: Leaves,
    axis: int,
    reverse: bool,
    offsets: torch.Tensor,
    carries: Leaves | None,
    from_carry: bool,
    exclusive: bool,
    sequential: bool = False,
) -> tuple[Leaves, Leaves]:
    """As `scan` of each packed sequence, without reading `offsets`, which have no values where a
    graph is built: one scan, in which elements are marked that begin a sequence. An aggregate of
    elements has the mark of any of them, and what comes before a mark is dropped.

    carries: those that enter, with a leading dimension of sequences, or None. from_carry: whether
    they are combined with the first elements. offsets: int64, on the device of the leaves.
    """
    length = leaves[0].shape[axis]
    bounds = offsets.clamp(0, length)
    begins, ends = bounds[:-1], bounds[1:]
    heads, sequence = heads_of(bounds, length, reverse)
    entering = None if carries is None else [c.movedim(0, axis) for c in carries]
    if from_carry and not sequential:
        assert entering is not None
        firsts = (ends - 1 if reverse else begins).clamp(0, length - 1)
        first = [t.index_select(axis, firsts) for t in leaves]
        pair = (
            without_slopes(begins == ends, entering, axis),
            without_slopes(begins == ends, first, axis),
        )
        begun = [t.index_select(axis, sequence) for t in combine(*pair)]
        leaves = where(heads, begun, leaves, axis)
    if entering is not None:
        entering = [c.index_select(axis, sequence) for c in entering]
    marked = [*leaves, in_place(heads, axis)]
    if sequential:
        assert entering is not None
        marked += entering
    marked = [t.flip(axis) for t in marked] if reverse else marked
    if sequential:
        init = [c.narrow(axis, 0, 1) for c in marked[len(leaves) + 1 :]]
        prefixes = walk(partial(step_marked, combine, axis, len(leaves)), init, marked, axis)
    else:
        prefixes = prefix_scan(partial(combine_marked, combine, axis), marked, axis)[:-1]
    prefixes = [t.flip(axis) for t in prefixes] if reverse else prefixes
    states = prefixes
    if exclusive:
        assert entering is not None
        before = [t.roll(-1 if reverse else 1, axis) for t in prefixes]
        states = where(heads, entering, before, axis)
    lasts = (begins if reverse else ends - 1).clamp(0, length - 1)
    finals = [t.index_select(axis, lasts).movedim(axis, 0) for t in prefixes]
    return states, finals if carries is None else where(begins == ends, carries, finals, 0)


def heads_of(bounds: torch.Tensor, length: int, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks of the steps with which packed sequences begin, in scan order, and the sequence of each
    step. Not by `start_mask`, which torch.jit.trace does not take."""
    begins, ends = bounds[:-1], bounds[1:]
    steps = torch.arange(length, device=bounds.device)
    # Of sequences with equal begins only the last one is not empty, and it is what searchsorted
    # finds.
    sequence = torch.searchsorted(begins, steps, right=True) - 1
    return steps == (ends - 1 if reverse else begins).index_select(0, sequence), sequence


def in_place(marks: torch.Tensor, axis: int, rank: int = 0) -> torch.Tensor:
    """Marks of steps along `axis` of a tensor of this rank, or of the least one."""
    return marks.reshape([1] * axis + [-1] + [1] * max(0, rank - axis - 1))


def where(marks: torch.Tensor, marked: Leaves, others: Leaves, axis: int) -> Leaves:
    """Each leaf: that of `marked` at steps with a mark, that of `others` at the rest."""
    return [
        torch.where(in_place(marks.flatten(), axis, a.dim()), a, b)
        for a, b in zip(marked, others, strict=True)
    ]


def without_slopes(marks: torch.Tensor, leaves: Leaves, axis: int) -> Leaves:
    """Leaves that pass no gradient back at steps with a mark, where what is computed of them is
    dropped: its derivative may be infinite, and times 0 be NaN."""
    return where(marks, [t.detach() for t in leaves], leaves, axis)


def combine_marked(combine: Combine, axis: int, left: Leaves, right: Leaves) -> Leaves:
    """Elements with their marks at the end. Where the right one has a mark it is combined with
    itself, as a valid left operand, and the result is dropped."""
    *a, marked_a = left
    *b, marked_b = right
    dropped = [t.detach() for t in b]
    pair = where(marked_b, dropped, a, axis), where(marked_b, dropped, b, axis)
    combined = combine(*pair)
    return [*where(marked_b, b, combined, axis), marked_a | marked_b]


def step_marked(combine: Combine, axis: int, count: int, carry: Leaves, step: Leaves) -> Leaves:
    """A step of a loop. step: `count` leaves, the mark, and the carry that the sequence begins
    with, from which the step starts where it has a mark."""
    leaves, mark, begin = step[:count], step[count], step[count + 1 :]
    return combine(where(mark, begin, carry, axis), leaves)


def walk(combine: Combine, carry: Leaves, leaves: Leaves, axis: int) -> Leaves:
    """The carries of a loop in the direction of the axis, from the one before the first element."""
    found = []
    for t in range(leaves[0].shape[axis]):
        carry = combine(carry, [leaf.narrow(axis, t, 1) for leaf in leaves])
        found.append(carry)
    return [torch.cat(parts, axis) for parts in zip(*found, strict=True)]


def start_from(combine: Combine, init: Leaves, leaves: Leaves, axis: int, reverse: bool) -> Leaves:
    """The leaves with their first element, in scan order, replaced by combine(init, element)."""
    if reverse:
        rest, first = split(leaves, axis, leaves[0].shape[axis] - 1)
        ends = rest, combine(init, first)
    else:
        first, rest = split(leaves, axis, 1)
        ends = combine(init, first), rest
    return [torch.cat(pair, axis) for pair in zip(*ends, strict=True)]


def split(leaves: Leaves, axis: int, count: int) -> tuple[Leaves, Leaves]:
    """The first `count` elements and the others."""
    rest = leaves[0].shape[axis] - count
    return (
        [t.narrow(axis, 0, count) for t in leaves],
        [t.narrow(axis, count, rest) for t in leaves],
    )


def prefix_scan(combine: Combine, leaves: Leaves, axis: int) -> Leaves:
    """The inclusive scan in the direction of the axis."""
    length = leaves[0].shape[axis]
    if length < 2:
        return leaves
    pairs = length // 2
    reduced = combine(every_other(leaves, axis, 0, pairs), every_other(leaves, axis, 1, pairs))
    odd = prefix_scan(combine, reduced, axis)  # the prefixes at 1, 3, 5, …
    rest = (length - 1) // 2
    later = every_other(leaves, axis, 2, rest)  # the elements at 2, 4, 6, …
    even = combine([t.narrow(axis, 0, rest) for t in odd], later) if rest else later
    first = [t.narrow(axis, 0, 1) for t in leaves]
    even = [torch.cat([f, e], axis) for f, e in zip(first, even, strict=True)]
    return [interleave(e, o, axis) for e, o in zip(even, odd, strict=True)]


def reduce(
    combine: Combine, leaves: Leaves, axis: int, reverse: bool, init: Leaves | None
) -> Leaves:
    """All elements combined in scan order: pairs of neighbours, then pairs of the results, and so
    on."""
    length = leaves[0].shape[axis]
    if init is not None:
        leaves = start_from(combine, init, leaves, axis, reverse)
    while length > 1:
        pairs, start = length // 2, length % 2  # of an odd length, element 0 is kept for later
        first, second = (every_other(leaves, axis, start + k, pairs) for k in (0, 1))
        combined = combine(second, first) if reverse else combine(first, second)
        if start:
            rest = [t.narrow(axis, 0, 1) for t in leaves]
            combined = [torch.cat(p, axis) for p in zip(rest, combined, strict=True)]
        leaves, length = combined, pairs + start
    return [t.squeeze(axis) for t in leaves]


def every_other(leaves: Sequence[torch.Tensor], axis: int, start: int, count: int) -> Leaves:
    """`count` elements from `start` on, in steps of two."""
    stop = start + 2 * count
    return [t[(slice(None),) * axis + (slice(start, stop, 2),)] for t in leaves]


def interleave(even: torch.Tensor, odd: torch.Tensor, axis: int) -> torch.Tensor:
    """even[0], odd[0], even[1], … where `even` may have one more."""
    pairs = odd.shape[axis]
    joined = torch.stack([even.narrow(axis, 0, pairs), odd], axis + 1).flatten(axis, axis + 1)
    if even.shape[axis] > pairs:
        joined = torch.cat([joined, even.narrow(axis, pairs, 1)], axis)
    return joined


def eager_plan(
    spec: ScanSpec[Any], name: str, reason: str, shapes: Sequence[tuple[int, ...]] = ()
) -> Plan:
    """The plan of a scan by torch operations. shapes: of the leaves of a plain function, which need
    not be equal."""
    op, batch = spec.operator, spec.batch
    sizes = [
        leaf.components * leaf.dtype.itemsize // (1 + leaf.dtype.is_complex)
        for leaf in (*op.inputs, *op.outputs)
    ]
    counts = [math.prod(batch)] * len(sizes)
    if len(set(shapes)) > 1 and len(op.outputs) in (0, len(shapes)):
        counts = [math.prod(shape) for shape in shapes] * (2 if op.outputs else 1)
        batch = max(shapes, key=math.prod)
    moved = sum(size * count for size, count in zip(sizes, counts, strict=True))
    return Plan(
        name, (math.prod(batch[: spec.axis]), spec.length, math.prod(batch[spec.axis + 1 :])),
        "eager", "whole tensors",
        f"{spec.length} steps of torch operations" if getattr(op, "sequential", False)
        else f"{2 * max(spec.length - 1, 1).bit_length()} levels of torch operations",
        moved, reason,
    )  # fmt: skip
