"""The facts in which ranks must agree about a scan or a reduction (`agreement`)."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedOperation
from ..monoids.leaf_names import OWN, LeafNames
from ..program.serialization import write
from ..runtime.scan_call import ScanCall
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
    facts["whether gradients are enabled"] = str(grad)
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
    facts["the operator"] = identity_of(call)  # last: its programs depend on dtypes and structure
    return facts, call.length


def identity_of(call: ScanCall) -> str:
    """The operator's name and a hash of its programs; of its code where it has no program."""
    name = call.operator.name
    if call.traced.operator is not None:
        try:
            return f"{name!r} ({write(call.traced.operator)[0].rpartition(':')[2][:12]})"
        except UnsupportedOperation:
            pass
    code = getattr(inspect.unwrap(call.operator.combine), "__code__", None)
    if code is None:
        return repr(name)
    text = repr((code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")]))
    return f"{name!r} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
