"""The facts in which ranks must agree about a scan or a reduction (`agreement`)."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import UnsupportedOperation
from ..monoids.captured_values import IMPLIED, MOST_VALUES, Seen, present
from ..monoids.leaf_names import OWN, LeafNames
from ..monoids.monoid import Monoid
from ..program.serialization import write
from ..runtime.scan_call import ScanCall
from ..torch_private import saved_tensors_hooks
from ..torch_state import needs_dispatcher
from ..wording import shown
from .agreement import Facts


def description(
    call: ScanCall, function: str, options: Mapping[str, Any], names: LeafNames = OWN
) -> tuple[Facts, int]:
    """The facts in which ranks must agree about a call, and the length of this rank's part.

    options: arguments of the public function beside op, xs and init. names: of the leaves.
    """
    paths = names.paths(call.input_spec)
    facts = {"the function": function, f"the structure of {names.of('xs')}": ", ".join(paths)}
    facts |= {name: shown(value) for name, value in options.items()}
    grad = torch.is_grad_enabled()
    facts |= surroundings((*call.leaves, *(call.init or ())))
    for path, t in zip(paths, call.leaves, strict=True):
        shape = [*t.shape[: call.axis], "any", *t.shape[call.axis + 1 :]]
        facts[f"the dtype of {path}"] = str(t.dtype).removeprefix("torch.")
        facts[f"the shape of {path}"] = f"[{', '.join(map(str, shape))}]"
        facts[f"the device of {path}"] = t.device.type
        facts[f"whether {path} requires a gradient"] = str(grad and t.requires_grad)
    facts["the batch shape without the axis"] = str([*call.carry_batch(0)])
    facts["whether init is given"] = str(call.init is not None)
    inits = names.paths(call.state_spec, "init")
    for path, init in zip(inits, call.init or (), strict=False):
        facts[f"whether {path} requires a gradient"] = str(grad and init.requires_grad)
    # Last: its programs depend on dtypes and structure.
    name, code, values = identity_of(call)
    facts["the operator"] = f"{name!r} ({code})"
    facts["what the operator reads besides its arguments"] = values
    return facts, call.length


def surroundings(tensors: Iterable[torch.Tensor]) -> Facts:
    """What surrounds a call on these tensors, and decides which collectives run, and when."""
    grad = torch.is_grad_enabled()
    facts = {"whether gradients are enabled": str(grad)}
    facts["whether operations are recorded"] = str(needs_dispatcher())  # by a dispatch mode
    if any(grad and t.requires_grad for t in tensors):
        hooked = saved_tensors_hooks(True) is not None  # as by checkpointing, which runs it again
        facts["whether saved tensors have hooks"] = str(hooked)
    return facts


def identity_of(call: ScanCall) -> tuple[str, str, str]:
    """The operator's name, a hash of its code and one of the values that its code sees.

    Its programs hold both; where it has none, its functions do.
    """
    op = call.operator
    if call.traced.operator is not None:
        try:
            return op.name, write(call.traced.operator)[0].rpartition(":")[2][:12], ""
        except UnsupportedOperation:
            pass
    seen = OnAnyRank()
    if isinstance(op, Monoid):
        seen.of_monoid(op)
    else:
        seen.callable(op.combine, 0)
    return op.name, short_hash(seen.codes), short_hash(seen.key)


def short_hash(parts: Iterable[Any]) -> str:
    return hashlib.sha256(repr([*parts]).encode(errors="replace")).hexdigest()[:12]


class OnAnyRank(Seen):
    """What functions see, by a key that is the same in another process.

    What is known by its identity there is known by its class here. Of objects only those attributes
    count that code names: others, such as a rank's number or its device, may differ.

    codes: of the functions, in the order in which they are met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.codes: list[Any] = []

    def of_monoid(self, op: Monoid) -> Seen:
        for part in (op.identity, op.element_ndim, *(op.recipe or ())[2:]):
            if not callable(part):
                self.value(part, (), 0)
        return super().of_monoid(op)

    def monoid(self, op: Monoid) -> None:
        self.key.append(op.name)
        self.of_monoid(present(op))

    def named(self, value: Any) -> None:
        if isinstance(value, types.CodeType):
            self.codes.append(code_in_words(value))
        elif isinstance(value, torch.Tensor):
            self.key.append((tuple(value.shape), value.dtype, value.device.type))
            if value.device.type == "cpu" and value.numel() <= MOST_VALUES:
                self.key.append(repr(value.tolist()))
        else:
            kind = value if isinstance(value, type) else type(value)
            self.key.append(f"{kind.__module__}.{kind.__qualname__}")

    def callable(self, fn: Any, depth: int) -> None:
        self.key.append(getattr(fn, "__qualname__", type(fn).__qualname__))
        super().callable(fn, depth)

    def value(self, value: Any, names: Iterable[str], depth: int) -> None:
        if isinstance(value, torch.device):
            self.key.append(value.type)
        else:
            self.key.append(getattr(value, "__qualname__", ""))  # of functions, built-in ones too
            super().value(value, names, depth)

    def names_in(self, owner: Any, names: Iterable[str]) -> tuple[str, ...]:
        return (*names, *IMPLIED)


def code_in_words(code: types.CodeType) -> Any:
    """What a function's code does, without where it stands."""
    constants = [
        code_in_words(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_freevars, constants
