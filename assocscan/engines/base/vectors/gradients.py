"""How a backward pass over vectors writes the gradient of a leaf.

Each program writes what its own lanes give. If several programs contribute to an entry, each writes
a partial sum into a larger tensor; torch then sums these extra dimensions, always in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ..scan_spec import ScanSpec, TensorSpec, contiguous_strides, dense_strides
from .kernel import VectorTile
from .ports import Ports


@dataclass(frozen=True)
class Gradient:
    """The gradient of an input leaf.

    shape, layout: of the result, and its strides; dimensions that `expand` repeats have size 1.
    partial, dtype, strides: of what the kernel writes (strides None: contiguous). leading: its
        further dimensions in front: a sequence or a segment of the axis, a block of lanes. dims:
        the dimensions to sum.
    lane: whether it has an entry for each lane.
    """

    shape: tuple[int, ...]
    layout: tuple[int, ...]
    partial: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    leading: tuple[str, ...]
    dims: tuple[int, ...]
    lane: bool


def gradient_of(
    k: int, t: TensorSpec | None, spec: ScanSpec[VectorAdjoint], ports: Ports, tile: VectorTile,
    segments: int = 1,
) -> Gradient:  # fmt: skip
    """The gradient of input leaf k. It is summed along dimensions of size 1 and those that `expand`
    repeats; other leaves with stride 0 have a gradient for each entry. segments: into which the
    axis is cut."""
    assert t is not None
    batch, rank = spec.batch, len(spec.batch)
    leaf = spec.operator.op.inputs[k]
    shape = gradient_shape(k, t, spec)
    names, shared = summed(k, t, spec, segments > 1)
    counts = {"sequence": spec.sequence_count * segments, "block": -(-ports.lanes // tile.lanes)}
    sizes = [batch[d] if d in shared else shape[d] for d in range(rank)]
    partial = (*(counts[name] for name in names), *sizes, *shape[rank:])
    dims = (*range(len(names)), *(len(names) + d for d in shared))
    adds = bool(shared) or any(counts[name] > 1 for name in names)
    dtype = leaf.accumulator if adds else leaf.dtype
    strides = None if dims else order_like(t, shape)
    layout = gradient_strides(k, t, spec)
    return Gradient(
        shape, layout, partial, dtype, strides, tuple(names), dims, "block" not in names
    )


def gradient_shape(k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint]) -> tuple[int, ...]:
    """The shape of the gradient of the input leaf k. What is summed is decided by `repeated`, not
    by strides: another leaf with stride 0 has a gradient for each entry."""
    repeated = spec.operator.repeated[spec.operator.wanted.index(k)]
    return tuple(1 if d in repeated else n for d, n in enumerate(t.shape))


def gradient_strides(k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint]) -> tuple[int, ...]:
    """The strides of the gradient of the input leaf k: in the order of the leaf, or contiguous
    where torch sums what programs contribute."""
    shape = gradient_shape(k, t, spec)
    return dense_strides(shape) if any(summed(k, t, spec)) else order_like(t, shape)


def summed(
    k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint], cut: bool = False
) -> tuple[list[str], list[int]]:
    """How the gradient of the input leaf k is summed after the kernel: over which dimensions in
    front (each "sequence", or segment of an axis that is cut, and each "block" of lanes has an
    entry), and which batch dimensions."""
    adjoint, batch = spec.operator, spec.batch
    repeated = adjoint.repeated[adjoint.wanted.index(k)]
    varies = [t.shape[d] > 1 and d not in repeated for d in range(len(batch))]
    pieces = cut or spec.sequences is not None
    leading = ["sequence"] if pieces and not varies[spec.axis] else []
    if adjoint.lane is None or not varies[adjoint.lane]:
        leading.append("block")
    others = [d for d in range(len(batch)) if d not in (spec.axis, adjoint.lane)]
    return leading, [d for d in others if batch[d] > 1 and not varies[d]]


def order_like(t: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in the order of the leaf's own dimensions in memory."""
    order = sorted(range(t.ndim), key=lambda d: -abs(t.strides[d]))
    return contiguous_strides(shape, tuple(order), ())
