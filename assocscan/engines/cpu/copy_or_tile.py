"""The choice of the CPU kernel's form and loop order for leaves with different memory orders.

A kernel takes several scans side by side as the lanes of vector instructions; a job is the set of
lanes that one thread scans at a time (see the top of scan.h). The staged form takes rows as lanes.
The direct form takes the innermost dimensions of one memory order as lanes, and reads or writes
each leaf in one of three ways:

- in place, if the distance between neighbouring lanes is one small number;
- through a tile of STEPS steps of the job's lanes, for any strides. Every cache line is fetched
  once if it holds only steps and lanes of the same job;
- from a copy in the loop order, if a cache line holds elements of many jobs: with a tile, each of
  them would fetch it again.

`choose` tries as loop order that of the outputs and that of every input that does not broadcast;
and as lanes the innermost dimension, the two innermost, and so on, where that gives at least
MIN_LANES lanes. It takes the cheapest. The unit is the byte: the price of a leaf that is read in
place with neighbouring lanes and steps is its bytes; the constants below add to that. Prices depend
on sizes and strides only, so that equal calls are run in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.layout import CollapsedDim, Layout, LeafStrides, leaf_bytes, rows_in, scalar_size
from ..base.scan_spec import Name, ScanSpec
from .kernel import DIRECT_LANES

Spec = ScanSpec[Any]

# With fewer lanes than this, the direct form is not considered.
MIN_LANES = 8
# The largest distance between neighbouring lanes, in scalars, that the direct form reads in place.
MAX_LANE_STRIDE = 16
# The bytes of a cache line.
LINE = 64

# Extra prices per byte of a leaf; the byte itself has the price 1. Measured with leaves of 33 MB of
# float32 on one core: four leaves in the same order take 14 to 20 ms, so a leaf that is read in
# place takes 4 to 5 ms, which is the price 1.
TILE = 1.5  # the direct form reads it through a tile: 5 to 8 ms more
GATHER = 0.02  # in place, per byte of distance between lanes: 3 ms more for 32 bytes, 7 ms for 64
COPY = 3.0  # a copy into another order: 13 to 17 ms
STAGE = 1.0  # the staged form transposes it: 4 to 5 ms more
# The price per byte of fetching a cache line again: STREAM if neighbouring lines are fetched one
# after another, FETCH if not.
STREAM = 0.4
FETCH = 1.0
# Extra bytes at every step of a leaf that is read in place, if its next step does not follow in
# memory: 256 rows of 16 lanes (64 bytes per step) take 37 ms, 4096 adjacent lanes 20 ms.
JUMP = 70


@dataclass(frozen=True)
class Route:
    """One way to run a scan.

    price: the estimated cost, in bytes.
    order: the loop order of all batch dimensions, outermost first; copies of leaves are laid out in
        this order.
    lanes: the batch dimensions that are lanes of the direct form; empty: the staged form.
    tiled: the leaves that go through a tile.
    copied: the leaves that are copied.
    """

    price: float
    order: tuple[int, ...]
    lanes: frozenset[int]
    tiled: frozenset[Name] = frozenset()
    copied: frozenset[Name] = frozenset()

    def rows(self, spec: Spec, layout: Layout) -> tuple[list[CollapsedDim], list[CollapsedDim]]:
        """The joined row dimensions and the joined lane dimensions, in the loop order."""
        rows = rows_in(spec, self.order, list(layout.leaves.values()))
        outer = [row for row in rows if self.lanes.isdisjoint(row.dims)]
        return outer, rows[len(outer) :]


def choose(spec: Spec, layout: Layout, copy: float = COPY) -> Route:
    """The cheapest route; of equal ones, the first. The outputs' order is tried first.

    copy: the price of copying a byte; infinity: copy only the leaves that must be copied
        (`LeafStrides.copy`).
    """
    found = []
    for order in orders(spec, layout):
        rows = rows_in(spec, order, list(layout.leaves.values()))
        for count in range(1, len(rows) + 1):
            if math.prod(row.size for row in rows[-count:]) >= MIN_LANES:
                found.append(direct(spec, layout, rows[:-count], rows[-count:], copy))
    first = found[0] if found else None
    if first is None or first.tiled or first.copied:
        found.append(staged(spec, layout, copy))
    return with_all_outputs(min(found, key=lambda route: route.price), layout)


def orders(spec: Spec, layout: Layout) -> list[tuple[int, ...]]:
    """The memory orders of the outputs and of the inputs that have the full batch shape."""
    batch, found = spec.batch, [layout.order]
    for walk in layout.leaves.values():
        sizes = zip(batch, walk.strides, strict=True)
        if walk.role == "input" and all(s > 0 for n, s in sizes if n > 1):
            found.append(order_of(walk, batch))
    return list(dict.fromkeys(found))


def order_of(walk: LeafStrides, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The order of the batch dimensions in the leaf's memory, outermost first."""
    return tuple(sorted(range(len(batch)), key=lambda d: (batch[d] > 1, -walk.strides[d])))


def direct(
    spec: Spec,
    layout: Layout,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
    copy: float,
) -> Route:
    """The direct form with these row and lane dimensions, each leaf in the cheapest way."""
    count = math.prod(row.size for row in lanes)
    price, tiled, copied = 0.0, set(), set()
    for name, walk in layout.leaves.items():
        stride = lane_stride(walk, lanes)
        if walk.copy:
            copied.add(name)
        elif stride is None:
            tiled.add(name)
        if name[0] not in ("input", "output"):
            continue  # carries are read and written once
        moved = leaf_bytes(walk, spec.batch)
        expanded = expanded_bytes(walk, spec)
        refetches = line_fetches(walk, spec, outer, lanes) - 1
        cost = moved * (1 + refetches * (FETCH if stride is None else STREAM))
        if stride is None:
            cost += TILE * expanded
        elif stride > len(walk.component_offsets):
            cost += GATHER * stride * scalar_size(walk.dtype) * expanded
        elif stride and walk.strides[spec.axis] > count * stride:
            cost += JUMP / (count * stride * scalar_size(walk.dtype)) * moved
        with_copy = (1 + copy) * moved + (
            TILE * expanded if is_partly_broadcast(walk, lanes) else 0
        )
        if cost > with_copy:
            copied.add(name)
            cost = with_copy
        price += cost
    inner = [d for row in lanes for d in row.dims]
    order = complete(spec, [*(d for row in outer for d in row.dims), spec.axis, *inner])
    return Route(price, order, frozenset(inner), frozenset(tiled - copied), frozenset(copied))


def staged(spec: Spec, layout: Layout, copy: float) -> Route:
    """The staged form, with rows as lanes: cheap if the steps of a row are close in memory."""
    price, copied = 0.0, set()
    for name, walk in layout.leaves.items():
        if walk.copy:
            copied.add(name)
        if name[0] not in ("input", "output"):
            continue
        moved = leaf_bytes(walk, spec.batch)
        is_near = walk.strides[spec.axis] * scalar_size(walk.dtype) <= LINE
        refetches = line_fetches(walk, spec, layout.rows, []) - 1
        cost = moved * (1 + refetches * (STREAM if is_near else FETCH))
        if cost > (1 + copy) * moved:
            copied.add(name)
            cost = (1 + copy) * moved
        price += cost + STAGE * expanded_bytes(walk, spec)
    rows = [d for row in layout.rows for d in row.dims]
    order = complete(spec, [*rows, spec.axis])
    return Route(price, order, frozenset(), copied=frozenset(copied))


def expanded_bytes(walk: LeafStrides, spec: Spec) -> int:
    """The bytes that a leaf would have if it were expanded to the full batch shape."""
    return len(walk.component_offsets) * scalar_size(walk.dtype) * math.prod(spec.batch)


def complete(spec: Spec, order: list[int]) -> tuple[int, ...]:
    """`order` with all missing batch dimensions (they have size 1) in front."""
    return (*(d for d in range(len(spec.batch)) if d not in order), *order)


def with_all_outputs(route: Route, layout: Layout) -> Route:
    """The route with all outputs copied if one is: all outputs have the same memory order."""
    outputs = frozenset(name for name in layout.leaves if name[0] == "output")
    if route.copied.isdisjoint(outputs):
        return route
    return replace(route, tiled=route.tiled - outputs, copied=route.copied | outputs)


def lane_stride(walk: LeafStrides, lanes: Sequence[CollapsedDim]) -> int | None:
    """The distance between neighbouring lanes in scalars; None if it varies, is negative or is
    above MAX_LANE_STRIDE."""
    name = walk.role, walk.number
    stride = lanes[-1].by_name[name]
    even = all(
        far.by_name[name] == near.by_name[name] * near.size
        for far, near in itertools.pairwise(lanes)
    )
    return stride if even and 0 <= stride <= MAX_LANE_STRIDE else None


def is_partly_broadcast(walk: LeafStrides, lanes: Sequence[CollapsedDim]) -> bool:
    """Whether a leaf broadcasts in some lane dimensions and not in others. A copy of such a leaf
    still has strides of 0 (see `copies`), so the kernel reads the copy through a tile."""
    strides = [row.by_name[walk.role, walk.number] for row in lanes]
    return 0 in strides and any(strides)


def line_fetches(
    walk: LeafStrides,
    spec: Spec,
    outer: Sequence[CollapsedDim],
    lanes: Sequence[CollapsedDim],
) -> float:
    """How often each cache line is fetched: the number of elements in it, divided by how many of
    them one job uses. A job uses all steps, soon after each other, and up to DIRECT_LANES lanes."""
    name, left = (walk.role, walk.number), DIRECT_LANES
    reach = [(spec.length, walk.strides[spec.axis])]
    for row in reversed(lanes):
        reach.append((min(row.size, max(left, 1)), row.by_name[name]))
        left //= row.size
    everything = [(row.size, row.by_name[name]) for row in (*outer, *lanes)]
    return in_line(walk, [reach[0], *everything]) / in_line(walk, reach)


def in_line(walk: LeafStrides, dims: Sequence[tuple[int, int]]) -> int:
    """How many elements of these dimensions (size, stride) lie in one cache line."""
    size, found = scalar_size(walk.dtype), 1
    for n, stride in dims:
        if stride:
            found *= max(min(n, LINE // (stride * size)), 1)
    return min(found, max(LINE // (len(walk.component_offsets) * size), 1))


def differences(route: Route, spec: Spec, layout: Layout) -> list[str]:
    """For `explain`: which leaves are copied or go through a tile, one sentence per reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, walk in layout.leaves.items():
        output, why = name[0] == "output", why_not_in_place(walk, route, spec.batch)
        if name in route.copied:
            if not walk.copy:
                why += ", and a job would use little of each cache line"
            way = ("copies", "last" if output else "first", why)
        elif name in route.tiled and name[0] in ("input", "output"):
            way = ("writes" if output else "reads", "through a tile", why)
        else:
            continue
        found.setdefault(way, []).append(f"{name[0]} {name[1]}")
    sentences = []
    for (verb, how, why), leaves in found.items():
        its, it_is = ("its", "it is") if len(leaves) == 1 else ("their", "they are")
        why = why.format(its=its, it_is=it_is)
        sentences.append(f"{verb} {', '.join(leaves)} {how}: {why}")
    return sentences


def why_not_in_place(walk: LeafStrides, route: Route, batch: tuple[int, ...]) -> str:
    """The reason, as a format string: the caller fills {its} and {it_is} in, singular or plural."""
    if walk.copy:
        return "{its} elements are spread over memory"
    same = [str(d) for d, n in enumerate(batch) if n > 1 and walk.strides[d] == 0]
    if same:
        return f"{{it_is}} broadcast over dimension {', '.join(same)}"
    own = order_of(walk, batch)
    if own != route.order:
        return f"{{its}} order differs, {own} against {route.order}"
    return "{its} lanes are far apart"
