"""Layout: any tensors and an axis as rows, steps and lanes with strides.

Every tensor of a `ScanProblem` becomes a `LeafStrides`: its strides, in scalars, over the batch
dimensions (0 where it broadcasts). Batch dimensions that every walk can join are joined (`merge`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...program.operator import Leaf
from .problem import ScanProblem, contiguous_strides, memory_order, plain

Strides = tuple[int, ...]
Outputs = list[tuple[tuple[int, ...], Strides, torch.dtype]]
Finals = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass
class LeafStrides:
    """One leaf's strides in scalars over all batch dimensions, and over its sequences."""

    role: str
    number: int
    dtype: torch.dtype
    strides: list[int]
    sequence: int
    offsets: tuple[int, ...]
    copy: bool = False


@dataclass
class Layout:
    """A problem's tensors laid out: results to allocate, walks by role and number, joined rows.

    `rows` are the batch dimensions other than the axis, outermost first, in the outputs' order,
    which `order` gives for all batch dimensions.
    """

    outputs: Outputs
    finals: Finals
    walks: dict[tuple[str, int], LeafStrides]
    rows: list[CollapsedDim]
    order: tuple[int, ...]

    def bytes_moved(self, batch: tuple[int, ...]) -> int:
        return sum(walk_bytes(w, batch) for w in self.walks.values())


def lay_out(
    problem: ScanProblem,
    tensors: dict[tuple[str, int], torch.Tensor],
    order: tuple[int, ...] | None = None,
) -> Layout:
    """The problem laid out; `order` is the outputs', where it is not to follow the inputs'."""
    if order is None:
        order = results_order(problem, tensors)
    outputs, finals = results_in(problem, order)
    walks = [*walk_tensors(problem, tensors), *walk_results(problem, outputs, finals)]
    return Layout(
        outputs, finals, {(w.role, w.number): w for w in walks}, rows_in(problem, order, walks),
        order,
    )  # fmt: skip


def rows_in(
    problem: ScanProblem, order: Sequence[int], walks: Sequence[LeafStrides]
) -> list[CollapsedDim]:
    """The batch dimensions other than the axis in this order, joined where every walk allows it."""
    batch = problem.batch
    return merge([d for d in order if d != problem.axis and batch[d] > 1], batch, walks)


def results_order(
    problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]
) -> tuple[int, ...]:
    """The order of batch dimensions, outermost first, that the outputs have in memory."""
    signatures = [
        (tuple(t.shape), t.stride()) for (role, _), t in tensors.items() if role == "input"
    ]
    return memory_order(problem.batch, signatures)


def result_layout(
    problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]
) -> tuple[Outputs, Finals]:
    """Sizes, strides and dtypes of the outputs; sizes and dtypes of the finals."""
    return results_in(problem, results_order(problem, tensors))


def results_in(problem: ScanProblem, order: tuple[int, ...]) -> tuple[Outputs, Finals]:
    """The same for outputs whose batch dimensions lie in this order."""
    op, batch = problem.operator, problem.batch
    outputs = [
        ((*batch, *leaf.shape), contiguous_strides(batch, order, leaf.shape), leaf.dtype)
        for leaf in op.outputs
    ]
    finals = [
        ((*problem.carry_batch, *op.state[k].shape), op.state[k].accumulator) for k in problem.final
    ]
    return outputs, finals


def gather_tensors(problem: ScanProblem) -> dict[tuple[str, int], torch.Tensor]:
    """Everything that the kernel reads, by role and number; carries in their full shape."""
    tensors = {("input", k): plain(t) for k, t in enumerate(problem.inputs) if t is not None}
    shape = problem.carry_batch
    for k, t in enumerate(problem.init or ()):
        if t is not None:
            tensors["init", k] = expand_carry(plain(t), shape, problem.operator.state[k])
    for k, t in problem.ahead.items():
        if t is not None:
            tensors["edge", k] = expand_carry(plain(t), shape, problem.operator.inputs[k])
    return tensors


def expand_carry(t: torch.Tensor, shape: tuple[int, ...], leaf: Leaf) -> torch.Tensor:
    """A carry leaf broadcast to the full carry shape, keeping broadcast strides."""
    full = (*shape, *leaf.shape)
    return t if t.shape == full else t.expand(full)


def initial_leaves(problem: ScanProblem) -> tuple[int, ...] | None:
    """The state leaves read at the start; () starts from the identity alone, None without."""
    if problem.init is None:
        return () if problem.from_identity else None
    return tuple(k for k, t in enumerate(problem.init) if t is not None)


def walk_tensors(
    problem: ScanProblem, tensors: dict[tuple[str, int], torch.Tensor]
) -> list[LeafStrides]:
    """Strides of everything that is read. Odd element layouts are marked for a copy."""
    walks = []
    for (role, number), t in tensors.items():
        leaf = problem.operator.state[number] if role == "init" else (
            problem.operator.inputs[number]
        )  # fmt: skip
        stride = t.stride()
        offsets = component_offsets(leaf, stride[t.dim() - len(leaf.shape) :])
        copy = max(offsets, default=0) >= 4 * max(leaf.components, 1)
        if copy:
            stride = t.contiguous().stride()
            offsets = component_offsets(leaf, stride[t.dim() - len(leaf.shape) :])
        scale = 2 if leaf.dtype.is_complex else 1
        strides = [scale * s if n > 1 else 0 for s, n in zip(stride, t.shape, strict=True)]
        walks.append(place(problem, role, number, t.dtype, strides, offsets, copy))
    return walks


def walk_results(
    problem: ScanProblem,
    outputs: Outputs,
    finals: Finals,
) -> list[LeafStrides]:
    """Strides of everything that is written."""
    op = problem.operator
    walks = []
    for k, (_, stride, dtype) in enumerate(outputs):
        leaf = op.outputs[k]
        scale = 2 if dtype.is_complex else 1
        offsets = component_offsets(leaf, stride[len(problem.batch) :])
        scaled = [scale * s for s in stride]
        walks.append(place(problem, "output", k, dtype, scaled, offsets))
    for k, (size, dtype) in zip(problem.final, finals, strict=True):
        leaf = op.state[k]
        stride = contiguous_strides(size, tuple(range(len(size))), ())
        scale = 2 if dtype.is_complex else 1
        offsets = component_offsets(leaf, stride[len(size) - len(leaf.shape) :])
        scaled = [scale * s for s in stride]
        walks.append(place(problem, "final", k, dtype, scaled, offsets))
    return walks


def place(
    problem: ScanProblem, role: str, number: int, dtype: torch.dtype, strides: list[int],
    offsets: tuple[int, ...], copy: bool = False,
) -> LeafStrides:  # fmt: skip
    """A leaf's strides over the full batch; carries have no stride along the axis."""
    sequence = 0
    if role in ("init", "final", "edge"):
        if problem.offsets is not None:
            sequence, strides = strides[0], strides[1:]
        strides = [*strides[: problem.axis], 0, *strides[problem.axis :]]
    return LeafStrides(role, number, dtype, strides[: len(problem.batch)], sequence, offsets, copy)


def component_offsets(leaf: Leaf, strides: Sequence[int]) -> tuple[int, ...]:
    """The distance of each component from the first, in scalars."""
    scale = 2 if leaf.dtype.is_complex else 1
    offsets = [0]
    for size, stride in zip(leaf.shape, strides, strict=True):
        offsets = [o + scale * stride * k for o in offsets for k in range(size)]
    return tuple(o + k for o in offsets for k in range(scale))


def merge(
    dims: list[int], batch: tuple[int, ...], walks: Sequence[LeafStrides]
) -> list[CollapsedDim]:
    """Batch dimensions, outermost first, joined wherever every leaf allows it."""
    rows: list[CollapsedDim] = []
    for d in dims:
        strides = [w.strides[d] for w in walks]
        if rows and all(
            outer == inner * batch[d]
            for outer, inner in zip(rows[-1].strides, strides, strict=True)
        ):
            rows[-1] = CollapsedDim(rows[-1].size * batch[d], strides, (*rows[-1].dims, d))
        else:
            rows.append(CollapsedDim(batch[d], strides, (d,)))
    for row in rows:
        row.by_name = {(w.role, w.number): s for w, s in zip(walks, row.strides, strict=True)}
    return rows


class CollapsedDim:
    """One joined batch dimension: its size, every leaf's stride, the dimensions that it joins."""

    def __init__(self, size: int, strides: list[int], dims: tuple[int, ...]) -> None:
        self.size, self.strides, self.dims = size, strides, dims
        self.by_name: dict[tuple[str, int], int] = {}


def scalar_size(dtype: torch.dtype) -> int:
    """Bytes of one scalar: half of a complex number's."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def walk_bytes(walk: LeafStrides, batch: tuple[int, ...]) -> int:
    """The bytes of a leaf that a scan moves, broadcast dimensions counted once."""
    distinct = math.prod(n for n, s in zip(batch, walk.strides, strict=True) if s != 0)
    return distinct * len(walk.offsets) * scalar_size(walk.dtype)
