"""How the tensors of a problem lie, as kernels see it: dense cells, strides in bytes, alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..engines.base.layout import CollapsedDim, Layout, LeafStrides, Strides, scalar_size
from ..engines.base.problem import ScanProblem, contiguous_strides
from .kernel import CudaKernel, CudaLeaf, LanesTile, Tile
from .parameters import stride_fields

Tensors = dict[tuple[str, int], torch.Tensor]


def misfits(problem: ScanProblem, layout: Layout) -> list[tuple[str, int]]:
    """The tensors that lie as no kernel reads them."""
    lanes = lanes_of(layout, problem)
    return [
        name for name, walk in layout.walks.items()
        if walk.copy or (name[0] in ("input", "edge") and not fits(walk, problem, lanes))
    ]  # fmt: skip


def lanes_of(layout: Layout, problem: ScanProblem) -> CollapsedDim | None:
    """The row of channels that lie side by side in the outputs' order; None where steps do."""
    inner = next((d for d in reversed(layout.order) if problem.batch[d] > 1), problem.axis)
    return None if inner == problem.axis else layout.rows[-1]


def fits(walk: LeafStrides, problem: ScanProblem, lanes: CollapsedDim | None) -> bool:
    """Whether elements side by side are dense in memory, or all the same one."""
    if lanes is None:
        near = walk.strides[problem.axis] if walk.role == "input" else 0
    else:
        near = lanes.by_name[walk.role, walk.number]
    n = len(walk.offsets)
    if sorted(walk.offsets) != list(range(n)):
        return False
    is_ahead = walk.number in problem.ahead and walk.role in ("input", "edge")
    if is_ahead and lanes is not None and near == 0:
        return False
    return near in (0, n)


def dense_strides(
    t: torch.Tensor, problem: ScanProblem, name: tuple[str, int], order: tuple[int, ...]
) -> tuple[tuple[int, ...], Strides]:
    """Size and strides of a copy that lies as the outputs do."""
    batch = problem.batch
    if name[0] in ("init", "edge"):
        axis = problem.axis
        order = tuple(d - (d > axis) for d in order if d != axis)
        batch = problem.carry_batch
    element = tuple(t.shape[t.dim() - len(element_shape(problem, name)) :])
    return (*batch, *element), contiguous_strides(batch, order, element)


def element_shape(problem: ScanProblem, name: tuple[str, int]) -> tuple[int, ...]:
    leaves = problem.operator.state if name[0] == "init" else problem.operator.inputs
    return leaves[name[1]].shape


def leaf_of(
    walk: LeafStrides,
    problem: ScanProblem,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    tile: Tile,
    tensors: Tensors,
) -> tuple[str, int, CudaLeaf]:
    """How a leaf lies, and the largest power of two up to 16 that divides its cells' addresses and
    sizes (of carries, that is a scalar's)."""
    name = (walk.role, walk.number)
    size = scalar_size(walk.dtype)
    element = len(walk.offsets) * size
    if walk.role not in ("input", "output"):
        return (*name, CudaLeaf(walk.dtype, walk.offsets, size))
    step = walk.strides[problem.axis]
    one = walk.role == "input" and (step if lanes is None else lanes.by_name[name]) == 0
    parts = [16]
    if isinstance(tile, LanesTile) and lanes is not None:
        parts += [element if one else element * tile.channels, step * size]
        parts += [] if one else [element * lanes.size]
    else:
        parts += [element * problem.length]
    edge = ("edge", walk.number) if walk.role == "input" else name
    parts += [row.by_name[n] * size for row in outer for n in {name, edge} if n in row.by_name]
    parts += [tensors[n].data_ptr() for n in {name, edge} if n in tensors]
    return (*name, CudaLeaf(walk.dtype, walk.offsets, math.gcd(*parts), one))


def strides_of(
    role: str, kernel: CudaKernel, layout: Layout, problem: ScanProblem, lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
) -> dict[str, list[int]]:  # fmt: skip
    """The strides of a role's leaves in bytes, by the names of struct Params."""
    steps, near, far = [], [], []
    for k in kernel.numbers(role):
        walk = layout.walks[role, k]
        size = scalar_size(walk.dtype)
        is_carry = role not in ("input", "output")
        steps.append(size * (walk.sequence if is_carry else walk.strides[problem.axis]))
        near.append(size * lanes.by_name[role, k] if lanes else 0)
        far += [size * row.by_name[role, k] for row in outer] or [0]
    if role == "input" and kernel.packed:
        steps, near, far = [*steps, 4], [*near, 0], [*far, *[0] * max(len(outer), 1)]
    return dict(zip(stride_fields(role), (steps, near, far), strict=True))
