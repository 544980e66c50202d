"""The memory layout of a scan's tensors for CUDA kernels: which must be copied, strides in bytes,
alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..engines.base.layout import (
    CollapsedDim,
    Given,
    Layout,
    LeafStrides,
    carry_order,
    scalar_size,
)
from ..engines.base.scan_spec import Name, ScanSpec, TensorSpec, contiguous_strides
from ..program.operator import Operator
from .kernel import CudaKernel, CudaLeaf, LanesTile, Tile
from .parameters import stride_fields

Spec = ScanSpec[Operator]
WIDE_ROWS = (32, 64, 128, 256, 512)  # bytes of a row of channels that is copied in pieces of 16


def misfits(spec: Spec, layout: Layout) -> list[Name]:
    """The tensors that no kernel can read as they are: they must be copied."""
    lanes = lanes_of(layout, spec)
    read = ("input",) if spec.operator.sequential else ("input", "boundary")
    return [
        name
        for name, walk in layout.leaves.items()
        if walk.copy or (name[0] in read and not fits(walk, spec, lanes))
    ]


def lanes_of(layout: Layout, spec: Spec) -> CollapsedDim | None:
    """The dimension of channels, if channels are innermost in the outputs' memory; None if steps
    are."""
    inner = next((d for d in reversed(layout.order) if spec.batch[d] > 1), spec.axis)
    return None if inner == spec.axis else layout.rows[-1]


def fits(walk: LeafStrides, spec: Spec, lanes: CollapsedDim | None) -> bool:
    """Whether the elements of neighbouring channels (in rows: steps) are contiguous in memory, or
    all the same element."""
    if lanes is None:
        near = walk.strides[spec.axis] if walk.role == "input" else 0
    else:
        near = lanes.by_name[walk.role, walk.number]
    n = len(walk.component_offsets)
    if sorted(walk.component_offsets) != list(range(n)):
        return False
    is_ahead = walk.number in spec.shifted and walk.role in ("input", "boundary")
    if is_ahead and lanes is not None and near == 0:
        return False
    return near in (0, n)


def copy_of(t: TensorSpec, spec: Spec, name: Name, order: tuple[int, ...]) -> TensorSpec:
    """The `TensorSpec` of a contiguous copy in the outputs' memory order. Its address is a multiple
    of 16."""
    batch, element = spec.batch, spec.leaf(name).shape
    if name[0] in ("init", "boundary"):
        batch, order = spec.carry_batch, carry_order(spec, order)
    return TensorSpec(
        (*batch, *element), contiguous_strides(batch, order, element), t.dtype, t.device
    )


def rounding(spec: Spec, layout: Layout, lanes: CollapsedDim | None, tile: Tile) -> int:
    """`CudaKernel.round`: the steps of which every input and output has a multiple of 16 bytes; 1
    if tiles are aligned without, if there are several rows, or if a thread has fewer steps."""
    sizes = [
        len(walk.component_offsets) * scalar_size(walk.dtype)
        for walk in layout.leaves.values()
        if walk.role in ("input", "output")
    ]
    unit = max((16 // math.gcd(16, size) for size in sizes), default=1)
    is_alone = lanes is None and spec.reverse and spec.chains <= spec.sequence_count
    return unit if is_alone and spec.length % unit and unit <= tile.items else 1


def leaf_of(
    walk: LeafStrides,
    spec: Spec,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    tile: Tile,
    tensors: Given,
    rounds: bool,
) -> tuple[str, int, CudaLeaf]:
    """A leaf's name and `CudaLeaf`. Its alignment is the largest power of two up to 16 that divides
    the addresses and sizes of its cells; for carries, the size of a scalar."""
    name = (walk.role, walk.number)
    size = scalar_size(walk.dtype)
    element = len(walk.component_offsets) * size
    if walk.role not in ("input", "output"):
        return (*name, CudaLeaf(walk.dtype, walk.component_offsets, size))
    step = walk.strides[spec.axis]
    one = walk.role == "input" and (step if lanes is None else lanes.by_name[name]) == 0
    cells, wide, still = [16], False, False
    if isinstance(tile, LanesTile) and lanes is not None:
        cells += [element if one else element * tile.channels, step * size]
        cells += [] if one else [element * lanes.size]
    elif (spec.reverse or spec.chains > spec.sequence_count) and not rounds:
        # A tile begins at a distance of whole rows: those before it, or, reversed, its own.
        cells += [element * spec.length]
    beyond = ("boundary", walk.number) if walk.role == "input" else name
    rows = [row.by_name[n] * size for row in outer for n in {name, beyond} if n in row.by_name]
    rows += [tensors[n].alignment for n in {name, beyond} if n in tensors]
    if spec.operator.sequential and isinstance(tile, LanesTile) and walk.role == "input":
        still = step == 0 and walk.number not in spec.shifted
        is_power = element * tile.block_channels in WIDE_ROWS
        wide = not one and is_power and math.gcd(16, step * size, *rows) == 16
    align = math.gcd(*cells, *rows)
    return (*name, CudaLeaf(walk.dtype, walk.component_offsets, align, one, wide, still))


def strides_of(
    role: str, kernel: CudaKernel, layout: Layout, spec: Spec, lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
) -> dict[str, list[int]]:  # fmt: skip
    """The strides of a role's leaves in bytes, by the names of struct Params."""
    steps, near, far = [], [], []
    for k in kernel.numbers(role):
        walk = layout.leaves[role, k]
        size = scalar_size(walk.dtype)
        is_carry = role not in ("input", "output")
        steps.append(size * (walk.sequence if is_carry else walk.strides[spec.axis]))
        near.append(size * lanes.by_name[role, k] if lanes else 0)
        far += [size * row.by_name[role, k] for row in outer] or [0]
    return dict(zip(stride_fields(role), (steps, near, far), strict=True))
