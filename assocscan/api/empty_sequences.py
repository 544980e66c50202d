"""Sequences without a step, of an operator without an identity: which they are, what to pass."""

from __future__ import annotations

import torch

from ..errors import ScanValueError
from ..runtime.scan_call import ScanCall
from ..torch_state import needs_dispatcher
from ..wording import no_final_of_empty

# The operators of the package without an identity, and the sign of the infinity that any element
# but NaN wins against, at a tie too.
LEAST = {("assocscan.ops.extrema", "argmax"): "-", ("assocscan.ops.extrema", "argmin"): ""}


def has_known_empty_sequence(call: ScanCall) -> bool:
    """Whether a sequence is empty, as far as this can be known without waiting for a GPU."""
    if call.offsets is None:
        return call.length == 0
    if call.length == 0:
        return call.offsets.shape[0] > 1
    return can_read(call.offsets) and bool((call.offsets.diff() == 0).any())


def can_read(offsets: torch.Tensor) -> bool:
    """Reading offsets on a GPU would synchronise, so they are not read: kernels then leave the
    final carry of an empty sequence undefined. Under a tracer or a transform, the operation
    `torch.ops.assocscan.scan` checks the offsets when it runs. The eager engine always does."""
    return offsets.device.type == "cpu" and not needs_dispatcher()


def no_final(call: ScanCall) -> ScanValueError:
    """The error for an empty sequence whose final carry, or result of a reduction, is undefined."""
    what = "result" if call.final_only else "final carry"
    which = "" if call.offsets is None else which_are_empty(call.offsets)
    return ScanValueError(no_final_of_empty(call.operator.name, what, which, start_to_pass(call)))


def which_are_empty(offsets: torch.Tensor) -> str:
    """`sequence 1 is empty (offsets[1] = offsets[2] = 3)`, and how many more; nothing where they
    cannot be read."""
    if not can_read(offsets):
        return ""
    empty = (offsets.diff() == 0).nonzero()[:, 0].tolist()
    if not empty:
        return ""
    k, others = empty[0], len(empty) - 1
    said = f"sequence {k} is empty (offsets[{k}] = offsets[{k + 1}] = {int(offsets[k])})"
    if not others:
        return said
    return f"{said}, as {'are' if others > 1 else 'is'} {others} more of {offsets.shape[0] - 1}"


def start_to_pass(call: ScanCall) -> str:
    """The argument that is missing, `init=(-torch.inf, -1)` for argmax; `init=` where only the user
    knows it."""
    op = call.operator
    sign = LEAST.get(getattr(op, "origin", ("", "")))
    if sign is None or len(call.traced.state) != 2:
        return "init="
    dtype = call.traced.state[0].dtype
    if dtype.is_floating_point:
        return f"init=({sign}torch.inf, -1)"
    if dtype == torch.bool:
        return f"init=({sign == ''}, -1)"
    return f"init=(torch.iinfo({dtype}).{'min' if sign else 'max'}, -1)"
