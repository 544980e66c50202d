"""The commands of an `Executable`: allocate, copy, launch a kernel, call a function.

A slot is the number of a tensor (`executable.py`). A command can be bound for the runner in Python,
described for the runner in C++ (`runtime/native`), renumbered into another list, and shown.
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
from ...torch_private import schema_of
from . import huge_pages as cpu_memory
from .packed_offsets import check_values
from .scan_spec import Strides, TensorSpec, check_memory

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
        """Launch it on the current stream."""

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


@dataclass(frozen=True)
class CheckOffsets:
    """Check the values of the offsets of packed sequences: at once on the CPU; on a GPU the next
    check raises the error."""

    slot: Slot
    length: int

    def bind(self) -> BoundCommand:
        return self.run

    def run(self, table: TensorTable) -> None:
        check_values(table[self.slot], self.length)

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        given = specs[self.slot]
        if given is not None and given.device.type == "cpu":
            return "offsets", self.slot, self.length
        return "python", self.in_python, (self.slot,), ()

    def in_python(self, offsets: torch.Tensor) -> Sequence[torch.Tensor]:
        check_values(offsets, self.length)
        return ()

    def renumbered(self, at: Sequence[Slot]) -> CheckOffsets:
        return replace(self, slot=at[self.slot])

    def shown(self, names: Sequence[str]) -> str:
        return f"check {names[self.slot]} (0 … {self.length})"


@dataclass(frozen=True)
class SlotArgument:
    """A tensor among the arguments of a function of torch."""

    slot: Slot


@dataclass(frozen=True)
class CallTorch:
    """Call a function of `torch.ops.aten` that returns tensors.

    arguments: in the order of its schema, keyword-only ones too; later ones take their defaults.
        SlotArgument for tensors, all else is a constant.
    """

    function: Any
    arguments: tuple[Any, ...]
    results: tuple[Slot, ...]

    def bind(self) -> BoundCommand:
        function, results = self.function, self.results
        schema = schema_of(function).arguments[: len(self.arguments)]
        by_position = sum(not a.kwarg_only for a in schema)
        names = [a.name for a in schema[by_position:]]
        arguments = self.arguments

        def run(table: TensorTable) -> None:
            values = [table[a.slot] if isinstance(a, SlotArgument) else a for a in arguments]
            named = dict(zip(names, values[by_position:], strict=True))
            found = function(*values[:by_position], **named)
            if len(results) == 1:
                table[results[0]] = found
                return
            for slot, t in zip(results, found, strict=True):
                table[slot] = t

        return run

    def described(self, specs: Sequence[TensorSpec | None]) -> Description:
        name, _, overload = self.function.name().partition(".")
        given = [(a.slot, None) if isinstance(a, SlotArgument) else (-1, a) for a in self.arguments]
        return "torch", name, overload, tuple(given), self.results

    def renumbered(self, at: Sequence[Slot]) -> CallTorch:
        given = [
            SlotArgument(at[a.slot]) if isinstance(a, SlotArgument) else a for a in self.arguments
        ]
        return replace(self, arguments=tuple(given), results=tuple(at[k] for k in self.results))

    def shown(self, names: Sequence[str]) -> str:
        given = [names[a.slot] if isinstance(a, SlotArgument) else str(a) for a in self.arguments]
        results = ", ".join(names[k] for k in self.results)
        return f"{results} = {self.function.name()}({', '.join(given)})"


Command = Allocate | Copy | Launch | CallHost | RunEager | CheckOffsets | CallTorch


def device_number(device: torch.device) -> int:
    """The number of a GPU; −1 for the CPU."""
    return -1 if device.type == "cpu" else int(device.index or 0)
