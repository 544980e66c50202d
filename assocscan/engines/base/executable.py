"""`Executable`: a prepared scan, or a function that scans, as a list of commands on tensors.

An engine's `prepare` computes everything that depends only on the `ScanSpec` and the `TensorSpec`s:
kernels, grids, results to allocate, all kernel parameters except addresses. The result is a list of
commands. It can be printed (`explain` does), cached, run on any tensors with equal `TensorSpec`s,
and copied into another list (a multi-pass scan contains the commands of its passes).

A slot is the number of a tensor. The first slots are the tensors of the scan, in the order of
`ScanSpec.names`; then follow constants and the tensors that commands make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .commands import (
    Allocate,
    CallHost,
    CallTorch,
    CheckOffsets,
    Command,
    Copy,
    Description,
    GpuKernel,
    Launch,
    RunEager,
    Slot,
    SlotArgument,
    Tensors,
    TensorTable,
)
from .explained_plan import Plan
from .layout import Finals, Layout, Outputs
from .scan_spec import MaybeTensor, Name, Strides, TensorSpec


class ExecutableSpec(Protocol):
    """What an executable is prepared for: a `ScanSpec` or a `FunctionSpec`."""

    @property
    def names(self) -> tuple[Name, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def final(self) -> tuple[int, ...]: ...
    @property
    def sequences(self) -> int | None: ...


@dataclass(frozen=True)
class FunctionSpec:
    """In the place of the `ScanSpec` where a list of commands is not one scan alone."""

    names: tuple[Name, ...]
    device: torch.device
    final: tuple[int, ...] = ()
    sequences: int | None = None


class Executable:
    """A prepared scan: its commands, and the slots of its outputs and finals.

    specs: the `TensorSpec` of each slot; None for a leaf that is not read.
    constants: tensors that every run reads, by slot.
    describe: makes the plan (without `commands`); called only when the plan is asked for.
    """

    def __init__(
        self,
        spec: ExecutableSpec,
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
        self.has_run = False
        # Whether a kernel checks the offsets of packed sequences; if they broke a rule, the next
        # launch raises. Others rely on `packed_offsets.check_offsets`.
        self.checks_offsets = False
        # What kernels tell of the last run, if they tell something (`cuda/newton`).
        self.report: torch.Tensor | None = None
        self.outputs, self.finals = tuple(outputs), tuple(finals)
        self._bound = [command.bind() for command in commands]
        count = len(spec.names)
        self._rest: TensorTable = [constants.get(k) for k in range(count, len(specs))]

    def run(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals of tensors with the `TensorSpec`s that it was prepared for."""
        table: TensorTable = [*tensors, *self._rest]
        for run in self._bound:
            run(table)
        return [table[k] for k in self.outputs], [table[k] for k in self.finals]

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when the descriptions of commands change: a kernel was compiled."""
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

    def __init__(self, spec: ExecutableSpec, tensors: Sequence[TensorSpec | None]) -> None:
        self.spec: Any = spec  # engines know that theirs is a ScanSpec
        self.specs: list[TensorSpec | None] = list(tensors)
        self.commands: list[Command] = []
        self.constants: dict[Slot, torch.Tensor] = {}
        self.slots: dict[Name, Slot] = {name: k for k, name in enumerate(spec.names)}
        if ("offsets", 0) in self.slots:  # a hook on saved tensors may give back strided ones
            self.slots["offsets", 0] = self.dense(self.slots["offsets", 0])

    def new_slot(self, spec: TensorSpec | None) -> Slot:
        """None: of a leaf that is not read."""
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

    def dense(self, slot: Slot) -> Slot:
        """The tensor, or a copy whose elements are contiguous."""
        given = self.spec_of(slot)
        if given.is_dense:
            return slot
        return self.copy(slot, TensorSpec.dense(given.shape, given.dtype, given.device))

    def eager(
        self, name: str, function: Callable[..., Sequence[torch.Tensor]],
        arguments: Sequence[Slot], results: Sequence[TensorSpec] = (),
    ) -> list[Slot]:  # fmt: skip
        slots = [self.new_slot(spec) for spec in results]
        self.commands.append(RunEager(name, function, tuple(arguments), tuple(slots)))
        return slots

    def torch(self, function: Any, arguments: Sequence[Any], result: TensorSpec) -> Slot:
        """Call a function of `torch.ops.aten`; arguments as in `CallTorch`."""
        slot = self.new_slot(result)
        self.commands.append(CallTorch(function, tuple(arguments), (slot,)))
        return slot

    def allocate_results(self, layout: Layout) -> tuple[list[Slot], list[Slot]]:
        """Allocate the outputs and finals, and enter them in `slots`."""
        return self.allocate_all(layout.outputs, layout.finals)

    def allocate_all(self, outputs: Outputs, finals: Finals) -> tuple[list[Slot], list[Slot]]:
        """`allocate_results`, of these sizes, strides and dtypes."""
        made = [self.allocate(size, dtype, strides) for size, strides, dtype in outputs]
        last = [self.allocate(size, dtype) for size, dtype in finals]
        self.slots.update({("output", k): slot for k, slot in enumerate(made)})
        self.slots.update({("final", k): s for k, s in zip(self.spec.final, last, strict=True)})
        return made, last

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

    def check_offsets(self, slot: Slot, length: int) -> None:
        self.commands.append(CheckOffsets(slot, length))

    def launch(self, kernel: GpuKernel, slots: Sequence[Slot]) -> None:
        self.commands.append(Launch(kernel, tuple(slots)))

    def call_host(
        self, name: str, function: Callable[..., int], template: Sequence[int],
        addresses: Sequence[tuple[int, Slot]],
    ) -> None:  # fmt: skip
        self.commands.append(CallHost(name, function, tuple(template), tuple(addresses)))

    def inline(
        self,
        other: Executable,
        given: Sequence[Slot | None],
        places: Mapping[Slot, Slot] | None = None,
    ) -> tuple[list[Slot], list[Slot]]:
        """Append another scan's commands, with these slots as its tensors; returns the slots of its
        outputs and finals. places: from slots that it would allocate to those that it writes to
        instead."""
        places = places or {}
        at = [self.new_slot(None) if k is None else k for k in given]
        for k, spec in enumerate(other.specs[len(at) :], len(at)):
            slot = places[k] if k in places else self.new_slot(spec)
            at.append(slot)
            if k in other.constants:
                self.constants[slot] = other.constants[k]
        self.commands += [
            command.renumbered(at)
            for command in other.commands
            if not (isinstance(command, Allocate) and command.slot in places)
        ]
        return [at[k] for k in other.outputs], [at[k] for k in other.finals]

    def build(
        self, outputs: Sequence[Slot], finals: Sequence[Slot], describe: Callable[[], Plan]
    ) -> Executable:
        """The executable; `describe` makes its plan, without `commands`."""
        return Executable(
            self.spec, self.specs, self.constants, self.commands, outputs, finals, describe
        )


def converted(commands: CommandList, slot: Slot, dtype: torch.dtype) -> Slot:
    """A tensor in another dtype."""
    given = commands.spec_of(slot)
    if given.dtype == dtype:
        return slot
    return commands.torch(
        torch.ops.aten.to.dtype, (SlotArgument(slot), dtype), replace(given, dtype=dtype)
    )
