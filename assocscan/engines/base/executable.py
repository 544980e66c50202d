"""`Executable`: a prepared scan as a list of commands on numbered tensors.

An engine's `prepare` computes everything that depends only on the `ScanSpec` and the `TensorSpec`s:
kernels, grids, results to allocate, all kernel parameters except addresses. The result is a list of
commands. It can be printed (`explain` does), cached, run on any tensors with equal `TensorSpec`s,
and copied into another list (a multi-pass scan contains the commands of its passes).

A slot is the number of a tensor. The first slots are the tensors of the scan, in the order of
`ScanSpec.names`; then follow constants and the tensors that commands make.
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
from .explained_plan import Plan
from .layout import Layout
from .scan_spec import MaybeTensor, Name, ScanSpec, Strides, TensorSpec, check_memory

Slot = int
Tensors = list[torch.Tensor]
TensorTable = list[Any]  # the tensor of each slot; None for a leaf that is not read
# A command as a function that a run calls; everything fixed is computed when it is bound.
BoundCommand = Callable[[TensorTable], None]
# A command as the C++ runner takes it (`runtime/native/runner.cpp`): its kind, then its fields.
# None: only Python can run it.
Description = tuple[Any, ...] | None
# Calls of C++ kernels on more bytes let other Python threads run meanwhile.
LONG_BYTES = 1 << 16
NO_MEMORY = 1  # returned by a C++ kernel that cannot allocate its buffers (`scan.h`)


class Misaligned(Exception):
    """A kernel was prepared for other alignments than the tensors have. Nothing was launched: the
    caller prepares the scan again for these tensors."""


@dataclass(frozen=True)
class Allocate:
    """Allocate a tensor."""

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

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        huge = self.device.type == "cpu" and nbytes >= cpu_memory.MIN_BYTES
        return ("allocate", self.slot, self.shape, self.strides, self.dtype,
                device_number(self.device), cpu_memory.HUGE_PAGE if huge else 0)  # fmt: skip

    def renumbered(self, at: Sequence[Slot]) -> Allocate:
        return replace(self, slot=at[self.slot])

    def shown(self, names: Sequence[str]) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{names[self.slot]} = allocate {kind} {list(self.shape)} strides {self.strides}"


@dataclass(frozen=True)
class Copy:
    """Copy a tensor, broadcast to `shape`, into a new tensor with these strides: by torch, or by a
    function of the engine (`by`)."""

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

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        by = self.by
        if by is None:
            return "copy", self.source, self.slot, self.shape, self.strides
        return "python", lambda t: [by(t)], (self.source,), (self.slot,)

    def renumbered(self, at: Sequence[Slot]) -> Copy:
        return replace(self, source=at[self.source], slot=at[self.slot])

    def shown(self, names: Sequence[str]) -> str:
        return f"{names[self.slot]} = copy {names[self.source]} to strides {self.strides}"


class GpuKernel(Protocol):
    """A compiled kernel with all parameters except addresses."""

    def launch(self, given: Sequence[torch.Tensor]) -> None:
        """Launch it on the current stream. Raises Misaligned, before the launch, if the tensors'
        addresses are not aligned as the kernel expects."""

    def shown(self) -> str:
        """One line for `explain`: language, operator, form, grid and block."""

    def described(self, slots: tuple[Slot, ...]) -> Description:
        """The launch for the C++ runner."""

    @property
    def version(self) -> int:
        """A number that changes when `described` changes."""


@dataclass(frozen=True)
class Launch:
    """Launch a GPU kernel on the tensors of these slots, in the order of its pointers."""

    kernel: GpuKernel
    slots: tuple[Slot, ...]

    def bind(self) -> BoundCommand:
        launch, slots = self.kernel.launch, self.slots

        def run(table: TensorTable) -> None:
            launch([table[k] for k in slots])

        return run

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        first = specs[self.slots[0]]
        if first is None or first.device.type != "cuda":
            return None  # emulated and interpreted kernels
        return self.kernel.described(self.slots)

    def renumbered(self, at: Sequence[Slot]) -> Launch:
        return replace(self, slots=tuple(at[k] for k in self.slots))

    def shown(self, names: Sequence[str]) -> str:
        return f"launch {self.kernel.shown()} ({', '.join(names[k] for k in self.slots)})"


@dataclass(frozen=True)
class CallHost:
    """Call a C function whose argument is one array of 64-bit integers.

    The array is a copy of `template`; each (position, slot) of `addresses` is replaced by the
    address of the slot's tensor.
    """

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
                    f"no memory left: the temporary buffers of a scan with {self.name!r} cannot be "
                    "allocated"
                )

        return run

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        address = ctypes.cast(self.function, ctypes.c_void_p).value  # type: ignore[arg-type]
        used = [specs[slot] for _, slot in self.addresses]
        is_long = sum(s.nbytes for s in used if s is not None) >= LONG_BYTES
        return "call", address, self.template, self.addresses, int(is_long)

    def renumbered(self, at: Sequence[Slot]) -> CallHost:
        return replace(self, addresses=tuple((p, at[k]) for p, k in self.addresses))

    def shown(self, names: Sequence[str]) -> str:
        given = ", ".join(names[k] for _, k in self.addresses)
        return f"call C++ {self.name!r} ({given})"


@dataclass(frozen=True)
class RunEager:
    """Call a Python function of tensors that returns tensors."""

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

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        return "python", self.function, self.arguments, self.results

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


def device_number(device: torch.device) -> int:
    """The number of a GPU; −1 for the CPU."""
    return -1 if device.type == "cpu" else int(device.index or 0)


class Executable:
    """A prepared scan: its commands, and the slots of its outputs and finals.

    specs: the `TensorSpec` of each slot; None for a leaf that is not read.
    constants: tensors that every run reads, by slot.
    describe: makes the plan (without `commands`); called only when the plan is asked for.
    """

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
        self.program: tuple[Any, Any] | None = None  # of the C++ runner, with `version`
        self.outputs, self.finals = tuple(outputs), tuple(finals)
        self._bound = [command.bind() for command in commands]
        count = len(spec.names)
        self._rest: TensorTable = [constants.get(k) for k in range(count, len(specs))]

    def run(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals of tensors with the `TensorSpec`s that it was prepared for. Raises
        Misaligned if a kernel expects another alignment of their addresses."""
        table: TensorTable = [*tensors, *self._rest]
        for run in self._bound:
            run(table)
        return [table[k] for k in self.outputs], [table[k] for k in self.finals]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when the descriptions of commands change: a kernel was compiled for tensors with
        other alignments."""
        return tuple([c.kernel.version for c in self.commands if isinstance(c, Launch)])

    def described(self) -> list[Description]:
        """The commands for the C++ runner."""
        return [command.described(self.specs) for command in self.commands]

    def because(self, reason: str) -> Executable:
        """Put the reason for the choice of this engine in front of the plan's reasons; changes and
        returns this executable."""
        self._reasons.insert(0, reason)
        return self

    @property
    def plan(self) -> Plan:
        """The plan for `explain`, with the commands."""
        plan = self._describe()
        return replace(plan, why="; ".join([*self._reasons, plan.why]), commands=self.shown())

    def shown(self) -> tuple[str, ...]:
        """One line per command; tensors are named by role and number, or t<slot>."""
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
    """A builder of an `Executable`: the methods append commands and return slots.

    slots: the slots of leaves by role and number; engines replace the slot of a leaf by that of its
        copy.
    """

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
        """The slot of a tensor that is kept with the executable and read by every run."""
        slot = self.new_slot(TensorSpec.of(t))
        self.constants[slot] = t
        return slot

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Strides | None = None
    ) -> Slot:
        """Allocate a tensor on the scan's device, contiguous unless strides are given."""
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
        """Copy a tensor to the shape and strides of `spec`."""
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
        """Allocate the outputs and finals, and enter them in `slots`."""
        outputs = [self.allocate(size, dtype, strides) for size, strides, dtype in layout.outputs]
        finals = [self.allocate(size, dtype) for size, dtype in layout.finals]
        self.slots.update({("output", k): slot for k, slot in enumerate(outputs)})
        self.slots.update(
            {("final", k): slot for k, slot in zip(self.spec.final, finals, strict=True)}
        )
        return outputs, finals

    def offsets(self) -> list[Slot]:
        """One slot: the offsets of packed sequences, on the scan's device. An empty list where the
        axis is one sequence."""
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
        """Append another scan's commands, with these slots as its tensors; returns the slots of its
        outputs and finals."""
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
        """The executable; `describe` makes its plan, without `commands`."""
        return Executable(
            self.spec, self.specs, self.constants, self.commands, outputs, finals, describe
        )
