"""How a backward pass over vectors writes the gradient of a leaf.

Each program writes what its own lanes give. Where several programs contribute to one entry, each
has an entry of its own in a larger tensor, whose further dimensions are summed afterwards: always
in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ..scan_spec import ScanSpec, TensorSpec
from .kernel import VectorTile
from .ports import Ports


@dataclass(frozen=True)
class Gradient:
    """The gradient of an input leaf.

    shape: of the result; dimensions that `expand` repeats have size 1.
    partial, dtype, strides: of what the kernel writes (strides None: contiguous). leading: its
        further dimensions in front: a sequence or a segment of the axis, a block of lanes. dims:
        the dimensions to sum.
    lane: whether it has an entry for each lane.
    """

    shape: tuple[int, ...]
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
    adjoint, batch, rank = spec.operator, spec.batch, len(spec.batch)
    leaf = adjoint.op.inputs[k]
    repeated = adjoint.repeated[adjoint.wanted.index(k)]
    varies = [t.shape[d] > 1 and d not in repeated for d in range(rank)]
    shape = tuple(1 if d in repeated else n for d, n in enumerate(t.shape))
    lane = ports.lane is not None and varies[ports.lane]
    leading = []
    if (ports.packed or segments > 1) and not varies[spec.axis]:
        leading.append(("sequence", spec.sequence_count * segments))
    if not lane:
        leading.append(("block", -(-ports.lanes // tile.lanes)))
    shared = [d for d in ports.outer if batch[d] > 1 and not varies[d]]
    sizes = [batch[d] if d in shared else shape[d] for d in range(rank)]
    partial = (*(n for _, n in leading), *sizes, *shape[rank:])
    dims = (*range(len(leading)), *(len(leading) + d for d in shared))
    adds = bool(shared) or any(n > 1 for _, n in leading)
    if not adds:
        dtype = leaf.dtype
        strides = order_like(t, shape) if not leading else None
    else:
        dtype, strides = leaf.accumulator, None
    names = tuple(name for name, _ in leading)
    return Gradient(shape, partial, dtype, strides, names, dims, lane)


def order_like(t: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in the order of the leaf's own dimensions in memory."""
    order = sorted(range(t.ndim), key=lambda d: -abs(t.strides[d]))
    strides, step = [0] * t.ndim, 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)
