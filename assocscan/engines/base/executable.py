"""`Executable`: a prepared scan as a list of commands on numbered tensors.

`prepare` of an engine works out everything that depends on a scan's `ScanSpec` and its tensors'
`TensorSpec`s: kernels, grids, results to allocate, parameters but for addresses. What is left is
data: it can be printed (`explain` does), kept, run on any tensors that lie the same, and put into
other lists (the passes of a multi-pass scan).

Tensors go by slots: first those of the scan, in the order of `ScanSpec.names`, then constants and
what the commands make.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ...errors import BackendError
from . import huge_pages as cpu_memory
from .layout import Layout
from .plan import Plan
from .spec import MaybeTensor, Name, ScanSpec, Strides, TensorSpec, check_memory

Slot = int
Tensors = list[torch.Tensor]
TensorTable = list[Any]  # the tensor of each slot; None for a leaf that is not read
# A command as a function that a run calls; everything fixed is computed when it is bound.
BoundCommand = Callable[[TensorTable], None]
NO_MEMORY = 1  # returned by a C++ kernel that cannot allocate its buffers (`scan.h`)


class Misaligned(Exception):
    """The tensors' addresses do not suit a kernel that was prepared for other ones."""


@dataclass(frozen=True)
class Allocate:
    """A fresh tensor."""

    slot: Slot
    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    device: torch.device

    def bind(self) -> BoundCommand:
        slot, nbytes = self.slot, math.prod(self.shape) * self.dtype.itemsize
        if self.device.type == "cpu" and nbytes >= cpu_memory.MIN_BYTES:
            make = functools.partial(cpu_memory.empty_strided, self.shape, self.strides, self.dtype)
        else:
            make = functools.partial(
                torch.empty_strided, self.shape, self.strides, dtype=self.dtype, device=self.device
            )

        def run(table: TensorTable) -> None:
            table[slot] = make()

        return run

    def renumbered(self, at: Sequence[Slot]) -> Allocate:
        return replace(self, slot=at[self.slot])

    def shown(self, names: Sequence[str]) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{names[self.slot]} = allocate {kind} {list(self.shape)} strides {self.strides}"


@dataclass(frozen=True)
class Copy:
    """A tensor, broadcast to a shape, copied into fresh memory with other strides; by torch, or by
    an engine's own function."""

    source: Slot
    slot: Slot
    shape: tuple[int, ...]
    strides: Strides
    by: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, compare=False)

    def bind(self) -> BoundCommand:
        return self.run

    def run(self, table: TensorTable) -> None:
        source: torch.Tensor = table[self.source]
        if self.by is not None:
            table[self.slot] = self.by(source)
            return
        fresh = torch.empty_strided(
            self.shape, self.strides, dtype=source.dtype, device=source.device
        )
        table[self.slot] = fresh.copy_(source.expand(self.shape))

    def renumbered(self, at: Sequence[Slot]) -> Copy:
        return replace(self, source=at[self.source], slot=at[self.slot])

    def shown(self, names: Sequence[str]) -> str:
        return f"{names[self.slot]} = copy {names[self.source]} to strides {self.strides}"


class GpuKernel(Protocol):
    """A kernel that an engine has compiled, with the parameters that are not addresses."""

    def launch(self, given: Sequence[torch.Tensor]) -> None:
        """Run it on the current stream. Raises Misaligned before anything runs."""

    def shown(self) -> str:
        """Language, operator, form, grid and block."""


@dataclass(frozen=True)
class Launch:
    """A kernel on a GPU, on the tensors of these slots in the order of its pointers."""

    kernel: GpuKernel
    slots: tuple[Slot, ...]

    def bind(self) -> BoundCommand:
        launch, slots = self.kernel.launch, self.slots

        def run(table: TensorTable) -> None:
            launch([table[k] for k in slots])

        return run

    def renumbered(self, at: Sequence[Slot]) -> Launch:
        return replace(self, slots=tuple(at[k] for k in self.slots))

    def shown(self, names: Sequence[str]) -> str:
        return f"launch {self.kernel.shown()} ({', '.join(names[k] for k in self.slots)})"


@dataclass(frozen=True)
class CallHost:
    """A C function of one array of 64-bit integers: `template` with the addresses of the slots
    filled in at their positions."""

    name: str
    function: Callable[..., int] = field(compare=False)
    template: tuple[int, ...]
    addresses: tuple[tuple[int, Slot], ...]

    def bind(self) -> BoundCommand:
        array, template, addresses = (
            ctypes.c_int64 * len(self.template), self.template, self.addresses
        )  # fmt: skip
        function = self.function

        def run(table: TensorTable) -> None:
            arguments = array(*template)
            for position, slot in addresses:
                t: torch.Tensor = table[slot]
                address = t.data_ptr()
                if address == 0:
                    check_memory([0], [t])
                arguments[position] = address
            if function(arguments) == NO_MEMORY:
                raise BackendError(
                    f"the system has no memory left for what the threads of a scan with "
                    f"{self.name!r} write on their way"
                )

        return run

    def renumbered(self, at: Sequence[Slot]) -> CallHost:
        return replace(self, addresses=tuple((p, at[k]) for p, k in self.addresses))

    def shown(self, names: Sequence[str]) -> str:
        given = ", ".join(names[k] for _, k in self.addresses)
        return f"call C++ {self.name!r} ({given})"


@dataclass(frozen=True)
class RunEager:
    """A Python function of tensors that returns tensors."""

    name: str
    function: Callable[..., Sequence[torch.Tensor]] = field(compare=False)
    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]

    def bind(self) -> BoundCommand:
        return self.run

    def run(self, table: TensorTable) -> None:
        found = self.function(*[table[k] for k in self.arguments])
        for slot, t in zip(self.results, found, strict=True):
            table[slot] = t

    def renumbered(self, at: Sequence[Slot]) -> RunEager:
        return replace(
            self,
            arguments=tuple(at[k] for k in self.arguments),
            results=tuple(at[k] for k in self.results),
        )

    def shown(self, names: Sequence[str]) -> str:
        results = ", ".join(names[k] for k in self.results)
        given = ", ".join(names[k] for k in self.arguments)
        return f"{results + ' = ' if results else ''}run {self.name} ({given})"


Command = Allocate | Copy | Launch | CallHost | RunEager


class Executable:
    """A prepared scan: its commands, and the slots of its outputs and finals."""

    def __init__(
        self,
        spec: ScanSpec[Any],
        specs: Sequence[TensorSpec | None],
        constants: dict[Slot, torch.Tensor],
        commands: Sequence[Command],
        outputs: Sequence[Slot],
        finals: Sequence[Slot],
        describe: Callable[[], Plan],
    ) -> None:
        self.spec, self.specs, self.commands = spec, tuple(specs), tuple(commands)
        self.constants, self._describe = constants, describe
        self._reasons: list[str] = []
        self.outputs, self.finals = tuple(outputs), tuple(finals)
        self._bound = [command.bind() for command in commands]
        count = len(spec.names)
        self._rest: TensorTable = [constants.get(k) for k in range(count, len(specs))]

    def run(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals of tensors that lie as those it was prepared for. Raises Misaligned
        where they begin elsewhere and a kernel minds."""
        table: TensorTable = [*tensors, *self._rest]
        for run in self._bound:
            run(table)
        return [table[k] for k in self.outputs], [table[k] for k in self.finals]

    def because(self, reason: str) -> Executable:
        """The same, with the reason for which this engine was taken in its plan."""
        self._reasons.insert(0, reason)
        return self

    @property
    def plan(self) -> Plan:
        """What is run and why, with the commands."""
        plan = self._describe()
        return replace(plan, why="; ".join([*self._reasons, plan.why]), commands=self.shown())

    def shown(self) -> tuple[str, ...]:
        """The commands, one line each; tensors by role and number."""
        names = [f"{role} {k}" for role, k in self.spec.names]
        names += [f"t{k}" for k in range(len(names), len(self.specs))]
        for role, slots in (("output", self.outputs), ("final", self.finals)):
            for k, slot in zip(
                range(len(slots)) if role == "output" else self.spec.final, slots, strict=False
            ):
                if slot >= len(self.spec.names):
                    names[slot] = f"{role} {k}"
        return tuple(command.shown(names) for command in self.commands)


class CommandList:
    """An `Executable` in the making."""

    def __init__(self, spec: ScanSpec[Any], tensors: Sequence[TensorSpec | None]) -> None:
        self.spec = spec
        self.specs: list[TensorSpec | None] = list(tensors)
        self.commands: list[Command] = []
        self.constants: dict[Slot, torch.Tensor] = {}
        self.slots: dict[Name, Slot] = {name: k for k, name in enumerate(spec.names)}

    def new_slot(self, spec: TensorSpec) -> Slot:
        self.specs.append(spec)
        return len(self.specs) - 1

    def spec_of(self, slot: Slot) -> TensorSpec:
        found = self.specs[slot]
        assert found is not None
        return found

    def constant(self, t: torch.Tensor) -> Slot:
        """A tensor that every run reads."""
        slot = self.new_slot(TensorSpec.of(t))
        self.constants[slot] = t
        return slot

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Strides | None = None
    ) -> Slot:
        """A fresh tensor on the scan's device, contiguous unless strides are given."""
        shape = tuple(shape)
        spec = TensorSpec.dense(shape, dtype, self.spec.device)
        if strides is not None:
            spec = replace(spec, strides=strides)
        slot = self.new_slot(spec)
        self.commands.append(Allocate(slot, shape, spec.strides, dtype, self.spec.device))
        return slot

    def copy(
        self,
        source: Slot,
        spec: TensorSpec,
        by: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Slot:
        """A copy that lies as `spec` says."""
        slot = self.new_slot(spec)
        self.commands.append(Copy(source, slot, spec.shape, spec.strides, by))
        return slot

    def eager(
        self, name: str, function: Callable[..., Sequence[torch.Tensor]],
        arguments: Sequence[Slot], results: Sequence[TensorSpec] = (),
    ) -> list[Slot]:  # fmt: skip
        slots = [self.new_slot(spec) for spec in results]
        self.commands.append(RunEager(name, function, tuple(arguments), tuple(slots)))
        return slots

    def allocate_results(self, layout: Layout) -> tuple[list[Slot], list[Slot]]:
        """The outputs and finals, entered in `slots`."""
        outputs = [self.allocate(size, dtype, strides) for size, strides, dtype in layout.outputs]
        finals = [self.allocate(size, dtype) for size, dtype in layout.finals]
        self.slots.update({("output", k): slot for k, slot in enumerate(outputs)})
        self.slots.update(
            {("final", k): slot for k, slot in zip(self.spec.final, finals, strict=True)}
        )
        return outputs, finals

    def offsets(self) -> list[Slot]:
        """The offsets of packed sequences on the scan's device; nothing where there are none."""
        if self.spec.sequences is None:
            return []
        slot, device = self.slots["offsets", 0], self.spec.device
        given = self.spec_of(slot)
        if given.device == device:
            return [slot]
        moved = TensorSpec.dense(given.shape, given.dtype, device)
        return self.eager(f"to {device}", lambda t: [t.to(device)], [slot], [moved])

    def launch(self, kernel: GpuKernel, slots: Sequence[Slot]) -> None:
        self.commands.append(Launch(kernel, tuple(slots)))

    def call_host(
        self, name: str, function: Callable[..., int], template: Sequence[int],
        addresses: Sequence[tuple[int, Slot]],
    ) -> None:  # fmt: skip
        self.commands.append(CallHost(name, function, tuple(template), tuple(addresses)))

    def inline(
        self, other: Executable, given: Sequence[Slot | None]
    ) -> tuple[list[Slot], list[Slot]]:
        """Another scan's commands on these slots: the slots of its outputs and finals."""
        at = [-1 if k is None else k for k in given]
        for k, spec in enumerate(other.specs[len(at) :], len(at)):
            assert spec is not None
            slot = self.new_slot(spec)
            at.append(slot)
            if k in other.constants:
                self.constants[slot] = other.constants[k]
        self.commands += [command.renumbered(at) for command in other.commands]
        return [at[k] for k in other.outputs], [at[k] for k in other.finals]

    def build(
        self, outputs: Sequence[Slot], finals: Sequence[Slot], describe: Callable[[], Plan]
    ) -> Executable:
        """`describe` gives the plan, but for its commands."""
        return Executable(
            self.spec, self.specs, self.constants, self.commands, outputs, finals, describe
        )
