"""How the CPU's kernel goes through a scan whose leaves lie in different orders.

The staged walk takes rows as lanes. The direct walk takes the innermost dimensions of one order as
lanes, and there are three ways in which it gets at a leaf:

- in place, where the lanes lie at one small distance;
- through a tile of some steps of a job's lanes, whatever their order. Every cache line is fetched
  once if the leaf's neighbours in memory are steps or lanes of the job;
- from a copy in the order of the walk, where the neighbours are rows of other jobs: a tile would
  fetch every line once for each of them.

`choose` prices every order that a leaf has, and every number of dimensions as lanes, and takes the
cheapest. Prices are bytes: a leaf that is read in place costs what it moves. Sizes and strides
decide alone, so that like calls go alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.layout import CollapsedDim, Layout, LeafStrides, leaf_bytes, rows_in, scalar_size
from ..base.spec import Name, ScanSpec
from .kernel import DIRECT_LANES

Spec = ScanSpec[Any]

# Fewer lanes than this are scanned as rows.
MIN_LANES = 8
# The widest distance of two lanes, in scalars, that is read in place by the direct walk.
MAX_LANE_STRIDE = 16
# Bytes that memory is read in.
LINE = 64

# Prices per byte, beside the byte itself. Four leaves of 33 MB of float32 that lie alike take 14 to
# 20 ms on one core (docs/performance/cpu-layouts.md), so that one leaf is 4 to 5 ms.
TILE = 1.5  # a leaf that goes through a tile: 5 to 8 ms more
GATHER = 0.02  # in place, per byte between its lanes: 3 ms more for 32 bytes, 7 ms for 64
COPY = 3.0  # a copy into another order: 13 to 17 ms
STAGE = 1.0  # a leaf whose steps lie together, where rows are lanes: 4 to 5 ms more
# A cache line that is fetched once more, in a stream of neighbouring lines, and in no such order.
STREAM = 0.4
FETCH = 1.0
# Bytes more per step of a leaf whose steps lie apart: 4096 lanes walked as 256 × 16 take 37 ms
# instead of 20, so that 64 bytes cost what 134 do.
JUMP = 70


@dataclass(frozen=True)
class Route:
    """A way through a spec.

    order: of all batch dimensions, outermost first, that copies have in memory.
    lanes: the batch dimensions that are lanes of the direct walk; none in the staged walk.
    tiled, copied: the leaves that go through a tile, and those that are copied.
    """

    price: float
    order: tuple[int, ...]
    lanes: frozenset[int]
    tiled: frozenset[Name] = frozenset()
    copied: frozenset[Name] = frozenset()

    def rows(self, spec: Spec, layout: Layout) -> tuple[list[CollapsedDim], list[CollapsedDim]]:
        """The rows outside of the lanes, and the lanes, in the order of the walk."""
        rows = rows_in(spec, self.order, list(layout.leaves.values()))
        outer = [row for row in rows if self.lanes.isdisjoint(row.dims)]
        return outer, rows[len(outer) :]


def choose(spec: Spec, layout: Layout, copy: float = COPY) -> Route:
    """The cheapest route; of equals the first, and the outputs' order comes first.

    copy: what a byte costs to copy; infinity where nothing is to be copied.
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
    """The orders of batch dimensions that leaves lie in, the outputs' first."""
    batch, found = spec.batch, [layout.order]
    for walk in layout.leaves.values():
        sizes = zip(batch, walk.strides, strict=True)
        if walk.role == "input" and all(s > 0 for n, s in sizes if n > 1):
            found.append(order_of(walk, batch))
    return list(dict.fromkeys(found))


def order_of(walk: LeafStrides, batch: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(batch)), key=lambda d: (batch[d] > 1, -walk.strides[d])))


def direct(
    spec: Spec,
    layout: Layout,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
    copy: float,
) -> Route:
    """The direct walk over these rows: each leaf in the cheapest way."""
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
        swept = len(walk.component_offsets) * scalar_size(walk.dtype) * math.prod(spec.batch)
        again = waste(walk, spec, outer, lanes) - 1
        cost = moved * (1 + again * (FETCH if stride is None else STREAM))
        if stride is None:
            cost += TILE * swept
        elif stride > len(walk.component_offsets):
            cost += GATHER * stride * scalar_size(walk.dtype) * swept
        elif stride and walk.strides[spec.axis] > count * stride:
            cost += JUMP / (count * stride * scalar_size(walk.dtype)) * moved
        instead = (1 + copy) * moved + (TILE * swept if is_uneven(walk, lanes) else 0)
        if cost > instead:
            copied.add(name)
            cost = instead
        price += cost
    inner = [d for row in lanes for d in row.dims]
    order = complete(spec, [*(d for row in outer for d in row.dims), spec.axis, *inner])
    return Route(price, order, frozenset(inner), frozenset(tiled - copied), frozenset(copied))


def staged(spec: Spec, layout: Layout, copy: float) -> Route:
    """Rows as lanes: cheap where steps lie together."""
    price, copied = 0.0, set()
    for name, walk in layout.leaves.items():
        if walk.copy:
            copied.add(name)
        if name[0] not in ("input", "output"):
            continue
        moved = leaf_bytes(walk, spec.batch)
        is_near = walk.strides[spec.axis] * scalar_size(walk.dtype) <= LINE
        again = waste(walk, spec, layout.rows, []) - 1
        cost = moved * (1 + again * (STREAM if is_near else FETCH))
        if cost > (1 + copy) * moved:
            copied.add(name)
            cost = (1 + copy) * moved
        swept = len(walk.component_offsets) * scalar_size(walk.dtype) * math.prod(spec.batch)
        price += cost + STAGE * swept
    rows = [d for row in layout.rows for d in row.dims]
    order = complete(spec, [*rows, spec.axis])
    return Route(price, order, frozenset(), copied=frozenset(copied))


def complete(spec: Spec, order: list[int]) -> tuple[int, ...]:
    """The order with the batch dimensions of size 1, which come first."""
    return (*(d for d in range(len(spec.batch)) if d not in order), *order)


def with_all_outputs(route: Route, layout: Layout) -> Route:
    """Outputs lie in one order: if one of them is copied, all are."""
    outputs = frozenset(name for name in layout.leaves if name[0] == "output")
    if route.copied.isdisjoint(outputs):
        return route
    return replace(route, tiled=route.tiled - outputs, copied=route.copied | outputs)


def lane_stride(walk: LeafStrides, lanes: Sequence[CollapsedDim]) -> int | None:
    """The distance of a leaf's lanes in scalars; None where they lie at no single small one."""
    name = walk.role, walk.number
    stride = lanes[-1].by_name[name]
    even = all(
        far.by_name[name] == near.by_name[name] * near.size
        for far, near in itertools.pairwise(lanes)
    )
    return stride if even and 0 <= stride <= MAX_LANE_STRIDE else None


def is_uneven(walk: LeafStrides, lanes: Sequence[CollapsedDim]) -> bool:
    """Whether some of the lanes are all the same element and others are not: so it is in copies."""
    strides = [row.by_name[walk.role, walk.number] for row in lanes]
    return 0 in strides and any(strides)


def waste(
    walk: LeafStrides,
    spec: Spec,
    outer: Sequence[CollapsedDim],
    lanes: Sequence[CollapsedDim],
) -> float:
    """How often a cache line is fetched: the elements in it, by those that one job comes to.

    The steps of a job come soon after each other, so that all of them count, and of the lanes as
    many as a job has.
    """
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
    """What is not read or written in place, and why: a sentence per reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, walk in layout.leaves.items():
        output, why = name[0] == "output", difference(walk, route, spec.batch)
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


def difference(walk: LeafStrides, route: Route, batch: tuple[int, ...]) -> str:
    """How a leaf lies, as opposed to the walk."""
    if walk.copy:
        return "{its} elements are spread over memory"
    same = [str(d) for d, n in enumerate(batch) if n > 1 and walk.strides[d] == 0]
    if same:
        return f"{{it_is}} broadcast over dimension {', '.join(same)}"
    own = order_of(walk, batch)
    if own != route.order:
        return f"{{its}} order differs, {own} against {route.order}"
    return "{its} lanes are far apart"
