"""`Layout`: the strides of all tensors of a scan, over as few batch dimensions as possible.

Every tensor becomes a `LeafStrides`: its strides, in scalars, over the batch dimensions (0 where it
broadcasts). Neighbouring batch dimensions that are one regular dimension in every tensor are joined
(`merge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...program.operator import Leaf
from .scan_spec import (
    Name,
    ScanSpec,
    Strides,
    TensorSpec,
    contiguous_strides,
    dense_strides,
    memory_order,
)

Spec = ScanSpec[Any]
Given = dict[Name, TensorSpec]
Outputs = list[tuple[tuple[int, ...], Strides, torch.dtype]]
Finals = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass
class LeafStrides:
    """Where the scalars of a leaf are in memory. All distances are in scalars; a complex number is
    two.

    role, number: its name, as in `ScanSpec.names`; outputs and finals have the roles "output" and
        "final".
    strides: along each batch dimension; 0 where the leaf broadcasts; for carries 0 along the axis.
    sequence: of a carry, from one packed sequence to the next.
    component_offsets: from the first component of an element to each of its components.
    copy: whether the leaf must be copied first; the strides are then those of the copy.
    """

    role: str
    number: int
    dtype: torch.dtype
    strides: list[int]
    sequence: int
    component_offsets: tuple[int, ...]
    copy: bool = False


@dataclass
class Layout:
    """The strides of all tensors of a scan.

    outputs, finals: the results to allocate.
    leaves: every tensor that is read or written, by role and number.
    rows: the batch dimensions other than the axis, joined where possible, in `order`.
    order: the order of all batch dimensions in the outputs' memory, outermost first.
    """

    outputs: Outputs
    finals: Finals
    leaves: dict[Name, LeafStrides]
    rows: list[CollapsedDim]
    order: tuple[int, ...]

    def bytes_moved(self, batch: tuple[int, ...]) -> int:
        return sum(leaf_bytes(w, batch) for w in self.leaves.values())


def lay_out(spec: Spec, tensors: Given, order: tuple[int, ...] | None = None) -> Layout:
    """The layout of a scan. `order` is the order of batch dimensions in the outputs' memory; None:
    the order of the inputs (`results_order`)."""
    if order is None:
        order = results_order(spec, tensors)
    outputs, finals = results_in(spec, order)
    leaves = [*input_strides(spec, tensors), *result_strides(spec, outputs, finals)]
    return Layout(
        outputs,
        finals,
        {(w.role, w.number): w for w in leaves},
        rows_in(spec, order, leaves),
        order,
    )


def rows_in(spec: Spec, order: Sequence[int], leaves: Sequence[LeafStrides]) -> list[CollapsedDim]:
    """The batch dimensions except the axis, in this order, joined where every leaf allows it."""
    batch = spec.batch
    return merge([d for d in order if d != spec.axis and batch[d] > 1], batch, leaves)


def results_order(spec: Spec, tensors: Given) -> tuple[int, ...]:
    """The order of batch dimensions, outermost first, that the outputs have in memory."""
    signatures = [(t.shape, t.strides) for (role, _), t in tensors.items() if role == "input"]
    return memory_order(spec.batch, signatures)


def result_layout(spec: Spec, tensors: Given) -> tuple[Outputs, Finals]:
    """Sizes, strides and dtypes of the outputs; sizes and dtypes of the finals."""
    return results_in(spec, results_order(spec, tensors))


def results_in(spec: Spec, order: tuple[int, ...]) -> tuple[Outputs, Finals]:
    """`result_layout`, for outputs whose batch dimensions have this order in memory."""
    op, batch = spec.operator, spec.batch
    outputs = [
        ((*batch, *leaf.shape), contiguous_strides(batch, order, leaf.shape), leaf.dtype)
        for leaf in op.outputs
    ]
    finals = [
        ((*spec.carry_batch, *op.state[k].shape), op.state[k].accumulator) for k in spec.final
    ]
    return outputs, finals


def tensors_by_name(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Given:
    """The tensors that are read, by role and number, without offsets and totals of segments;
    carries are expanded to `carry_batch`."""
    found: Given = {}
    for name, t in zip(spec.names, tensors, strict=True):
        role, _ = name
        if t is None or role in ("offsets", "totals"):
            continue
        if role != "input":
            t = t.expand((*spec.carry_batch, *spec.leaf(name).shape))
        found[name] = t
    return found


def input_strides(spec: Spec, tensors: Given) -> list[LeafStrides]:
    """The strides of all tensors that are read.

    A leaf is marked for a copy if the components of an element are spread over 4 times the memory
    that they fill, or more.
    """
    leaves = []
    for (role, number), t in tensors.items():
        leaf = spec.leaf((role, number))
        stride = t.strides
        offsets = component_offsets(leaf, stride[t.ndim - len(leaf.shape) :])
        copy = max(offsets, default=0) >= 4 * max(leaf.components, 1)
        if copy:
            stride = dense_strides(t.shape)
            offsets = component_offsets(leaf, stride[t.ndim - len(leaf.shape) :])
        scale = 2 if leaf.dtype.is_complex else 1
        strides = [scale * s if n > 1 else 0 for s, n in zip(stride, t.shape, strict=True)]
        leaves.append(place(spec, role, number, t.dtype, strides, offsets, copy))
    return leaves


def result_strides(
    spec: Spec,
    outputs: Outputs,
    finals: Finals,
) -> list[LeafStrides]:
    """The strides of all tensors that are written."""
    op = spec.operator
    results = [
        *(("output", k, op.outputs[k], t) for k, t in enumerate(outputs)),
        *(("final", k, op.state[k], (size, dense_strides(size), dtype))
          for k, (size, dtype) in zip(spec.final, finals, strict=True)),
    ]  # fmt: skip
    leaves = []
    for role, k, leaf, (size, stride, dtype) in results:
        scale = 2 if dtype.is_complex else 1
        offsets = component_offsets(leaf, stride[len(size) - len(leaf.shape) :])
        leaves.append(place(spec, role, k, dtype, [scale * s for s in stride], offsets))
    return leaves


def place(
    spec: Spec, role: str, number: int, dtype: torch.dtype, strides: list[int],
    offsets: tuple[int, ...], copy: bool = False,
) -> LeafStrides:  # fmt: skip
    """A `LeafStrides` from the strides of a tensor's own dimensions: carries get a stride of 0 for
    the axis, and their leading dimension of packed sequences becomes `sequence`."""
    sequence = 0
    if role in ("init", "final", "boundary"):
        if spec.sequences is not None:
            sequence, strides = strides[0], strides[1:]
        strides = [*strides[: spec.axis], 0, *strides[spec.axis :]]
    return LeafStrides(role, number, dtype, strides[: len(spec.batch)], sequence, offsets, copy)


def carry_order(spec: Spec, order: Sequence[int]) -> tuple[int, ...]:
    """The order of the dimensions of `carry_batch` in memory, from the order of `batch`: the packed
    sequences outermost, the others as in `order`."""
    rest = tuple(d - (d > spec.axis) for d in order if d != spec.axis)
    return rest if spec.sequences is None else (0, *(d + 1 for d in rest))


def component_offsets(leaf: Leaf, strides: Sequence[int]) -> tuple[int, ...]:
    """The distance of each component of an element from the first one, in scalars."""
    scale = 2 if leaf.dtype.is_complex else 1
    offsets = [0]
    for size, stride in zip(leaf.shape, strides, strict=True):
        offsets = [o + scale * stride * k for o in offsets for k in range(size)]
    return tuple(o + k for o in offsets for k in range(scale))


def merge(
    dims: list[int], batch: tuple[int, ...], leaves: Sequence[LeafStrides]
) -> list[CollapsedDim]:
    """The batch dimensions `dims`, outermost first. Two neighbours are joined if in every leaf the
    outer stride is the inner stride times the inner size."""
    rows: list[CollapsedDim] = []
    for d in dims:
        strides = [w.strides[d] for w in leaves]
        if rows and all(
            outer == inner * batch[d]
            for outer, inner in zip(rows[-1].strides, strides, strict=True)
        ):
            rows[-1] = CollapsedDim(rows[-1].size * batch[d], strides, (*rows[-1].dims, d))
        else:
            rows.append(CollapsedDim(batch[d], strides, (d,)))
    for row in rows:
        row.by_name = {(w.role, w.number): s for w, s in zip(leaves, row.strides, strict=True)}
    return rows


class CollapsedDim:
    """One or more batch dimensions as one.

    size: the product of their sizes.
    strides: the stride of each leaf; `by_name` has the same by role and number.
    dims: the batch dimensions that were joined.
    """

    def __init__(self, size: int, strides: list[int], dims: tuple[int, ...]) -> None:
        self.size, self.strides, self.dims = size, strides, dims
        self.by_name: dict[Name, int] = {}


def scalar_size(dtype: torch.dtype) -> int:
    """The bytes of one scalar; a complex number is two scalars."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def leaf_bytes(walk: LeafStrides, batch: tuple[int, ...]) -> int:
    """The bytes of a leaf that a scan moves; dimensions in which it broadcasts count once."""
    distinct = math.prod(n for n, s in zip(batch, walk.strides, strict=True) if s != 0)
    return distinct * len(walk.component_offsets) * scalar_size(walk.dtype)
