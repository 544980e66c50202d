"""Windows on a GPU: which kernels of `windows.cuh` run, over which tensors.

An element has the layout [outer, steps, inner, components]. Windows of more steps than a tile need
windows of the totals of tiles, which are states, each number a tensor [outer, tiles − 1, inner].
Those are found the same way, over as many steps as there are tiles.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...engines.base.windows import Form, adjoint_of_sums, is_windowable, pulled, states_of
from ...errors import BackendError
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Operator
from .. import launcher
from .source import WindowKernel, source

THREADS = 128
# Fewer neighbouring channels are read through shared memory.
WARP = 32
# The largest operators: bytes of a state and of an element, and operations of all three programs.
# A thread has one tile of states and two of inputs in registers.
MOST_BYTES, MOST_OPERATIONS = 32, 256
# The bytes of a tile's states, forward and with a gradient, which has two tiles more of everything.
TILE_BYTES, GRADIENT_TILE_BYTES = 128, 64


@functools.lru_cache(maxsize=256)
def has_kernel(op: Operator) -> bool:
    """Whether windows of the operator have kernels."""
    operations = sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))
    return (
        is_windowable(op)
        and element_bytes(op) <= MOST_BYTES
        and operations <= MOST_OPERATIONS
        and not any(t.dtype.is_complex for t in (*op.inputs, *op.state, *op.outputs))
    )


@functools.lru_cache(maxsize=256)
def has_gradient(op: Operator) -> bool:
    """Whether their gradient has: every float of a state then has a cotangent."""
    found = pulled(op)
    kinds = op.combine.output_dtypes
    carried = tuple(c for c, kind in enumerate(kinds) if EXACT_DTYPES[kind].is_floating_point)
    return found is not None and found.carried == carried


def element_bytes(op: Operator) -> int:
    """The bytes of a state, or of an element where that is larger."""
    state = sum(EXACT_DTYPES[kind].itemsize for kind in op.combine.output_dtypes)
    inputs = sum(EXACT_DTYPES[kind].itemsize for kind in op.lift.inputs)
    return max(state, inputs)


@dataclass(frozen=True)
class Cut:
    """How windows of a form are made: tiles, and M of `middle` tiles and `ends` steps."""

    form: Form
    tile: int
    middle: int
    ends: int

    @property
    def tiles(self) -> int:
        return -(-self.form.steps // self.tile)

    @property
    def has_m(self) -> bool:
        return self.middle > 0 or self.ends > 0

    @property
    def of_totals(self) -> Form:
        """The windows of totals."""
        form = self.form
        return Form((form.outer, self.tiles - 1, form.inner), 1, self.middle, False)


def cut(op: Operator, form: Form, gradient: bool) -> Cut:
    size = element_bytes(op)
    most = max(1, (GRADIENT_TILE_BYTES if gradient else TILE_BYTES) // size)
    tile = min(most, form.width - 1)
    if form.inner < WARP and tile % 2 == 0:
        tile -= 1  # of an odd number, lanes read shared memory without conflicts
    rest = form.width - 1 - tile
    if -(-form.steps // tile) == 1:
        rest = 0
    return Cut(form, tile, rest // tile, rest % tile)


def launch(cut: Cut, op: Operator, kind: str, tensors: Sequence[Tensor]) -> None:
    """One kernel, over tensors in the order of `lists_of`."""
    form = cut.form
    lanes = 0
    if form.inner >= WARP:
        lanes = min(THREADS, 1 << (form.inner.bit_length() - 1))
    kernel = WindowKernel(op, kind, cut.tile, lanes, cut.middle > 0, cut.ends > 0)
    count = cut.tiles - 1 if kind == "TOTALS" else cut.tiles
    per_block = THREADS // lanes if lanes else THREADS // WARP * (WARP // form.inner)
    groups = -(-form.inner // lanes) if lanes else 1
    runs = -(-count // per_block)
    grid = form.outer * groups * runs
    if grid >= 2**31:
        raise BackendError(f"windows of {op.name!r} need {grid} blocks, more than a grid has")
    device = tensors[0].device
    function = launcher.load(source(kernel), None, device)
    packed = struct.pack(
        f"{len(tensors)}Q10q", *(t.data_ptr() for t in tensors), form.steps, form.inner,
        form.width - 1, cut.middle, cut.ends, cut.tiles, count, groups, runs, int(form.reverse),
    )  # fmt: skip
    with launcher.on(device):
        function.launch(grid, packed, tensors, False)


@dataclass
class Made:
    """The states between: those of a level's totals, its windows of them, and what made these."""

    cut: Cut
    whole: list[Tensor]
    middle: list[Tensor]
    ends: list[Tensor]
    further: Made | None


def numbers(op: Operator, chosen: Sequence[int], form: Form, device: torch.device) -> list[Tensor]:
    """A tensor for each of these scalars of a state."""
    kinds = op.combine.output_dtypes
    return [torch.empty(form.batch, dtype=EXACT_DTYPES[kinds[c]], device=device) for c in chosen]


def forward(
    op: Operator, inputs: Sequence[Tensor], outputs: Sequence[Tensor], form: Form, gradient: bool
) -> Made:
    """Fill the outputs. gradient: whether the states between will be used for one."""
    found, device = cut(op, form, gradient), inputs[0].device
    made = Made(found, [], [], [], None)
    if found.has_m:
        every = range(op.width)
        totals = found.of_totals
        if found.middle:
            made.whole = numbers(op, every, totals, device)
        if found.ends:
            made.ends = numbers(op, every, totals, device)
        launch(found, op, "TOTALS", [*inputs, *made.whole, *made.ends])
        made.middle = made.whole
        if found.middle > 1:
            made.middle = numbers(op, every, totals, device)
            made.further = forward(states_of(op), made.whole, made.middle, totals, gradient)
    launch(found, op, "RESULTS", [*inputs, *made.middle, *made.ends, *outputs])
    return made


def backward(
    op: Operator, inputs: Sequence[Tensor], cotangents: Sequence[Tensor],
    gradients: Sequence[Tensor], made: Made,
) -> None:  # fmt: skip
    """Fill the gradients of the inputs that are floats. cotangents: of outputs that are floats."""
    found, form, device = made.cut, made.cut.form, inputs[0].device
    grads = pulled(op)
    assert grads is not None
    kinds = op.lift.inputs
    heads, tails = (
        [torch.empty(form.batch, dtype=EXACT_DTYPES[kinds[c]], device=device) for c in grads.wanted]
        for _ in range(2)
    )
    totals = found.of_totals
    of_middle = numbers(op, grads.carried, totals, device) if found.middle else []
    of_ends = numbers(op, grads.carried, totals, device) if found.ends else []
    parts = [*heads, *tails, *of_middle, *of_ends]
    launch(found, op, "PULL", [*inputs, *made.middle, *made.ends, *cotangents, *parts])
    of_whole = of_middle
    if made.further is not None:
        of_whole = numbers(op, grads.carried, totals, device)
        backward(states_of(op), made.whole, of_middle, of_whole, made.further)
    launch(found, op, "GATHER", [*inputs, *heads, *tails, *of_whole, *of_ends, *gradients])


def windows(
    op: Operator, leaves: Sequence[Tensor], form: Form, gradient: bool
) -> tuple[list[Tensor], Made]:
    """The outputs, contiguous, and the states between. leaves: of the shape of the batch and the
    element, contiguous. gradient: whether `gradients` will be wanted."""
    device = leaves[0].device
    outputs = [torch.empty(form.batch + t.shape, dtype=t.dtype, device=device) for t in op.outputs]
    return outputs, forward(op, leaves, outputs, form, gradient and not adjoint_of_sums(op))


def gradients(
    op: Operator, leaves: Sequence[Tensor], cotangents: Sequence[Tensor], made: Made
) -> list[Tensor]:
    """Gradients of the inputs that are floats. cotangents: of the outputs that are floats."""
    adjoint = adjoint_of_sums(op)
    if adjoint is not None:
        form = replace(made.cut.form, reverse=not made.cut.form.reverse)
        return windows(adjoint, cotangents, form, False)[0]
    found = [
        torch.empty_like(t) for t, leaf in zip(leaves, op.inputs, strict=True)
        if leaf.dtype.is_floating_point
    ]  # fmt: skip
    backward(op, leaves, cotangents, found, made)
    return found
