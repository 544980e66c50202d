"""Windows on a GPU: which kernels of `windows.cuh` run, over which tensors.

An element has the layout [outer, steps, inner, components]. Windows of several tiles need windows
of the totals of tiles, which are states, each number a tensor [outer, tiles − 1, inner]. Those are
found the same way, over as many steps as there are tiles.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...engines.base.commands import Description, Slot
from ...engines.base.cpp_and_cuda.windows import (
    Form,
    is_windowable,
    pulled,
    states_of,
)
from ...engines.base.executable import CommandList
from ...engines.base.scan_spec import check_memory
from ...errors import BackendError
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Operator
from .. import launcher
from .source import WindowKernel, source

THREADS = 128
# Of a block that reads rows as they lie.
MOST_LANES = 128
# The most tiles of a thread of a gradient's kernels, which reads the neighbours of the first and of
# the last one too; and how many blocks there should be.
WALK, ENOUGH_BLOCKS = 16, 1024
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
    """The bytes of a state, or of the inputs that states are made of where those are larger."""
    kinds = op.lift.inputs
    state = sum(EXACT_DTYPES[kind].itemsize for kind in op.combine.output_dtypes)
    inputs = sum(EXACT_DTYPES[kinds[c]].itemsize for c in op.lift.used_inputs)
    return max(state, inputs)


@dataclass(frozen=True)
class Cut:
    """How the axis of a form is cut: `period` tiles in every `shift` steps, of `base` or one more.

    The windows that end in a tile begin in the tile `period` before it.
    """

    form: Form
    period: int

    @property
    def shift(self) -> int:
        """From a window's last step back to its first; windows longer than the axis are cut."""
        return max(1, min(self.form.width, self.form.steps) - 1)

    @property
    def base(self) -> int:
        return self.shift // self.period

    @property
    def larger(self) -> int:
        """How many tiles of a period have one step more."""
        return self.shift % self.period

    @property
    def tile(self) -> int:
        return self.base + (self.larger > 0)

    @functools.cached_property
    def tiles(self) -> int:
        periods, rest = divmod(self.form.steps, self.shift)
        ends = itertools.accumulate(self.base + (k < self.larger) for k in range(self.period))
        more = sum(1 for end in ends if end < rest) + 1 if rest else 0
        return periods * self.period + more

    @property
    def has_m(self) -> bool:
        return self.period > 1 and self.tiles > 1

    @property
    def of_totals(self) -> Form:
        """The windows of totals that are the M of each tile."""
        form = self.form
        return Form((form.outer, self.tiles - 1, form.inner), 1, self.period - 1, False)


@functools.lru_cache(maxsize=4096)
def cut(op: Operator, form: Form, gradient: bool) -> Cut:
    most = max(1, (GRADIENT_TILE_BYTES if gradient else TILE_BYTES) // element_bytes(op))
    least = -(-Cut(form, 1).shift // most)
    if form.inner < WARP:  # tiles of an odd number: lanes read shared memory without conflicts
        for period in range(least, least + 1 + least // 8):
            if Cut(form, period).base % 2:
                return Cut(form, period)
    return Cut(form, least)


@dataclass(eq=False)
class WindowLaunch:
    """A loaded kernel with all parameters except addresses; a `GpuKernel`.

    kind: which part of `windows.cuh` it is. tail: the parameters after the addresses.
    """

    name: str
    kind: str
    function: launcher.Function
    grid: int
    tail: bytes

    version = 0  # the description never changes

    def shown(self) -> str:
        return f"CUDA windows of {self.name!r} ({self.kind.lower()}), {self.grid} blocks"

    def launch(self, given: Sequence[Tensor]) -> None:
        addresses = [t.data_ptr() for t in given]
        if 0 in addresses:
            check_memory(addresses, given)
        packed = struct.pack(f"{len(given)}Q", *addresses) + self.tail
        with launcher.on(given[0].device):
            self.function.launch(self.grid, packed, given, False)

    def described(self, slots: tuple[Slot, ...]) -> Description:
        function, structure = self.function, bytes(8 * len(slots)) + self.tail
        # No block waits for another, so that there is no workspace; and nothing raises an alarm.
        return ("cuda", function.function.ptr, function.index, self.grid, function.threads,
                function.shared_bytes, structure, slots, 0, 0, 0, 0, None)  # fmt: skip


def launch(commands: CommandList, cut: Cut, op: Operator, kind: str, slots: Sequence[Slot]) -> None:
    """Append the launch of one kernel, over tensors in the order of `lists_of`."""
    form = cut.form
    lanes = 0
    if form.inner >= WARP:
        lanes = min(MOST_LANES, 1 << (form.inner.bit_length() - 1))
    kernel = WindowKernel(op, kind, cut.tile, cut.larger == 0, lanes, cut.has_m)
    count = cut.tiles - 1 if kind == "TOTALS" else cut.tiles
    periods = -(-cut.tiles // cut.period)
    per_block = THREADS // lanes if lanes else THREADS // WARP * (WARP // form.inner)
    groups = -(-form.inner // lanes) if lanes else 1
    walk = 1
    if lanes and kind in ("PULL", "GATHER"):
        most = form.outer * groups * periods * cut.period // (per_block * ENOUGH_BLOCKS)
        walk = max(1, min(WALK, periods, most))
    walks = -(-periods // walk)
    places = walks * cut.period if lanes else count
    runs = -(-places // per_block)
    grid = form.outer * groups * runs
    if max(grid, places + THREADS) >= 2**31:
        raise BackendError(f"windows of {op.name!r} need {grid} blocks, more than a grid has")
    function = launcher.load(source(kernel), None, commands.spec.device)
    tail = struct.pack(
        "3q10i", form.steps, form.inner, cut.shift, cut.period, cut.base, cut.larger, cut.tiles,
        count, walk, walks, groups, runs, int(form.reverse),
    )  # fmt: skip
    tail += bytes(-len(tail) % 8)
    commands.launch(WindowLaunch(op.name, kind, function, grid, tail), slots)


@dataclass
class Made:
    """The slots of the states between tiles.

    totals: of each tile but the last; middle: their windows M, one for each tile but the first (the
    totals themselves, if each window is one total); further: the `Made` of the recursive call that
    computed these.
    """

    cut: Cut
    totals: list[Slot]
    middle: list[Slot]
    further: Made | None

    @property
    def slots(self) -> list[Slot]:
        """Of all states, each once."""
        found = [*self.totals, *(self.further.slots if self.further is not None else [])]
        return [*found, *(k for k in self.middle if k not in found)]

    def at(self, places: Mapping[Slot, Slot]) -> Made:
        """The same states in another list."""
        return Made(
            self.cut, [places[k] for k in self.totals], [places[k] for k in self.middle],
            None if self.further is None else self.further.at(places),
        )  # fmt: skip


def numbers(commands: CommandList, op: Operator, chosen: Sequence[int], form: Form) -> list[Slot]:
    """A tensor for each of these scalars of a state."""
    kinds = op.combine.output_dtypes
    return [commands.allocate(form.batch, EXACT_DTYPES[kinds[c]]) for c in chosen]


def forward(
    commands: CommandList, op: Operator, inputs: Sequence[Slot], outputs: Sequence[Slot],
    form: Form, gradient: bool,
) -> Made:  # fmt: skip
    """Fill the outputs, contiguous as the inputs are. gradient: whether `backward` will be wanted,
    of the states between."""
    found = cut(op, form, gradient)
    made = Made(found, [], [], None)
    if found.has_m:
        totals = found.of_totals
        made.totals = made.middle = numbers(commands, op, range(op.width), totals)
        launch(commands, found, op, "TOTALS", [*inputs, *made.totals])
        if min(totals.width, totals.steps) > 1:
            made.middle = numbers(commands, op, range(op.width), totals)
            made.further = forward(
                commands, states_of(op), made.totals, made.middle, totals, gradient
            )
    launch(commands, found, op, "RESULTS", [*inputs, *made.middle, *outputs])
    return made


def backward(
    commands: CommandList, op: Operator, inputs: Sequence[Slot], cotangents: Sequence[Slot],
    gradients: Sequence[Slot], made: Made,
) -> None:  # fmt: skip
    """Fill the gradients of the inputs that are floats. cotangents: of outputs that are floats."""
    found = made.cut
    of_totals: list[Slot] = []
    if found.has_m:
        grads, totals = pulled(op), found.of_totals
        assert grads is not None
        of_middle = of_totals = numbers(commands, op, grads.carried, totals)
        launch(commands, found, op, "PULL", [*inputs, *made.middle, *cotangents, *of_middle])
        if made.further is not None:
            of_totals = numbers(commands, op, grads.carried, totals)
            backward(commands, states_of(op), made.totals, of_middle, of_totals, made.further)
    launch(
        commands, found, op, "GATHER", [*inputs, *made.middle, *cotangents, *of_totals, *gradients]
    )
