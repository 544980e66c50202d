"""The right result of a scan, in float64, soon enough to be computed before each case.

The package's oracle takes one step of Python for each position. Here the axis is cut into √L chunks
that the oracle scans side by side, then it scans the chunks' totals, and then the chunks again with
the carry that enters each: about 3 √L steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten
from assocscan.testing import reference_scan


def reference(op: Monoid, xs: Any, axis: int) -> Any:
    """The inclusive scan of `op`, in float64, complex128 or the integers' own dtypes.

    axis: counted from the front. Differentiable by autograd.
    """
    leaves, spec = flatten(xs)
    length = max(t.shape[axis] for t in leaves)
    steps = math.isqrt(max(length - 1, 0)) + 1
    count = length // steps
    if count < 2:
        return reference_scan(op, xs, axis)

    def part(first: int, stop: int, cut: bool) -> Any:
        """The positions from `first` to `stop`, as [..., chunks, steps, ...] if `cut`."""
        found = [t.narrow(axis, first, stop - first) for t in leaves]
        return unflatten([t.unflatten(axis, (-1, steps)) if cut else t for t in found], spec)

    whole = part(0, count * steps, True)
    states = Monoid(op.combine, identity=op.identity, element_ndim=op.element_ndim, lift=op.lift,
                    name=op.name)  # fmt: skip
    totals = reference_scan(states, whole, axis + 1, return_final=True)[1]
    carries = scanned_totals(op, totals, axis, batch_dims(op, leaves, spec))
    ys = [
        reference_scan(op, part(0, steps, False), axis),
        joined(
            reference_scan(op, part(steps, count * steps, True), axis + 1,
                           init=narrowed(carries, axis, 0, count - 1)), axis,
        ),
    ]  # fmt: skip
    if count * steps < length:
        last = selected(carries, axis, count - 1)
        ys.append(reference_scan(op, part(count * steps, length, False), axis, init=last))
    columns = zip(*(flatten(y)[0] for y in ys), strict=True)
    return unflatten([torch.cat(column, axis) for column in columns], flatten(ys[0])[1])


def batch_dims(op: Monoid, leaves: list[Tensor], spec: Any) -> int:
    """How many batch dimensions the inputs have, the axis among them."""
    return max(t.dim() - n for t, n in zip(leaves, op.element_ndims(spec), strict=True))


def scanned_totals(op: Monoid, totals: Any, axis: int, batch: int) -> Any:
    """The scan of states: without lift and lower, each leaf with the dimensions it has."""
    leaves, spec = flatten(totals)
    ndims = unflatten([t.dim() - batch for t in leaves], spec)
    bare = Monoid(op.combine, name=op.name, element_ndim=ndims)
    return reference_scan(bare, totals, axis)


def joined(tree: Any, axis: int) -> Any:
    """Chunks and steps as one axis."""
    leaves, spec = flatten(tree)
    return unflatten([t.flatten(axis, axis + 1) for t in leaves], spec)


def narrowed(tree: Any, axis: int, first: int, count: int) -> Any:
    leaves, spec = flatten(tree)
    return unflatten([t.narrow(axis, first, count) for t in leaves], spec)


def selected(tree: Any, axis: int, index: int) -> Any:
    leaves, spec = flatten(tree)
    return unflatten([t.select(axis, index) for t in leaves], spec)
