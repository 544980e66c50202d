"""Offsets of packed sequences: checked at once on the CPU, and without a synchronisation on GPUs.

On a GPU, kernels clamp every offset to the axis, so that wrong ones touch no foreign memory; what
was wrong is written to pinned host memory when the GPU gets there, and raised at the next call.
"""

from __future__ import annotations

from typing import Any

import torch

from ...caching.fork_safe_locks import ForkSafeLock
from ...errors import ScanTypeError, ScanValueError
from ...torch_state import has_own_dispatch, needs_dispatcher
from .persistent_tensors import make_lasting

RULES = (
    "offsets[0] must be 0",
    "offsets[-1] must be the length of the axis",
    "offsets must not decrease",
)
_LOCK = ForkSafeLock()
_FLAGS: dict[torch.device, _Flags] = {}


def check_offsets(offsets: Any, length: int, device: torch.device) -> torch.Tensor | None:
    """Packed-sequence boundaries as a contiguous int64 tensor of our own; on the CPU unless both
    they and the data, which is on `device`, are on a GPU. Where values cannot be looked at (a graph
    is built, say), the operation of `library` checks them when it runs."""
    if offsets is None:
        return None
    if not isinstance(offsets, torch.Tensor):
        raise ScanTypeError(f"offsets must be a tensor, got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ScanTypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ScanValueError(
            f"offsets must have shape [S + 1] for S sequences, got {list(offsets.shape)}"
        )
    if offsets.layout is not torch.strided:
        raise ScanTypeError(f"offsets must be a dense tensor, got the layout {offsets.layout}")
    if needs_dispatcher() or has_own_dispatch([offsets]):
        return offsets.detach().to(torch.int64, copy=True)
    if offsets.is_meta:
        raise ScanValueError("offsets are on the meta device, where they have no values")
    return checked_values(offsets, length, device)


def checked_values(offsets: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    """Own offsets whose values are checked, at once or by the GPU."""
    if offsets.device.type == "cuda" and device.type == "cuda":
        own = offsets.detach().to(device, torch.int64, copy=True).contiguous()
        raise_earlier(device)
        watch(own, length)
        return own
    return validated(offsets.detach().to("cpu", torch.int64, copy=True).contiguous(), length)


def validated(values: torch.Tensor, length: int) -> torch.Tensor:
    """The offsets, on the CPU; ValueError where they break a rule."""
    if int(values[0]) != 0:
        raise ScanValueError(f"offsets[0] is {int(values[0])}, it must be 0")
    if int(values[-1]) != length:
        raise ScanValueError(f"offsets[-1] is {int(values[-1])}, but the axis has length {length}")
    falls = (values.diff() < 0).nonzero()
    if len(falls):
        k = int(falls[0])
        raise ScanValueError(
            f"offsets must not decrease: offsets[{k}] = {int(values[k])}, "
            f"offsets[{k + 1}] = {int(values[k + 1])}"
        )
    return values


def watch(offsets: torch.Tensor, length: int) -> None:
    """Let the GPU note in pinned memory which rules these offsets break (a bit for each)."""
    if offsets.device not in _FLAGS:
        with _LOCK:
            flags = make_lasting(lambda: _Flags(offsets.device), offsets.device)
            _FLAGS.setdefault(offsets.device, flags)
    flags = _FLAGS[offsets.device]
    broken = torch.stack([offsets[0] != 0, offsets[-1] != length, (offsets.diff() < 0).any()])
    flags.seen.logical_or_(broken)
    flags.told.copy_(flags.seen, non_blocking=True)


def raise_earlier(device: torch.device) -> None:
    """Raise what earlier calls on this device did wrong, once."""
    flags = _FLAGS.get(device)
    if flags is None or not flags.told.any():
        return
    broken = "; ".join(rule for rule, bad in zip(RULES, flags.told.tolist(), strict=True) if bad)
    flags.seen.zero_()
    flags.told.zero_()
    raise ScanValueError(f"the offsets of an earlier call on {device} were wrong: {broken}")


class _Flags:
    """One device's broken rules: as the GPU has seen them, and as the host is told."""

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros(len(RULES), dtype=torch.bool, device=device)
        self.told = torch.zeros(len(RULES), dtype=torch.bool, pin_memory=True)
