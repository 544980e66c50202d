"""Checks of the offsets of packed sequences: immediate on the CPU, delayed on a GPU.

To read values from a GPU would synchronise with it. So kernels clamp every offset to the axis, and
a wrong one cannot cause an access out of bounds. The GPU writes to pinned host memory which rules
are broken, and the next call with offsets raises the error. Kernels of the CUDA engine check the
offsets themselves and write there (`cuda/workspace.py`).

    check_offsets    of the user's argument: type and shape, then values where they can be read;
                     what it returned is not checked again
    checked_values   a private copy, after `check_values`
    check_values     of the values: `validated` on the CPU, `watch` on a GPU
    validated        of values on the CPU, immediately
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...caching.fork_safe_locks import ForkSafeLock
from ...errors import ScanTypeError, ScanValueError
from ...torch_state import has_own_dispatch, in_functorch_or_forward_mode, needs_dispatcher
from .persistent_tensors import make_lasting

RULES = (
    "offsets[0] must be 0",
    "offsets[-1] must be the length of the axis",
    "offsets must not decrease",
)
# The attribute of a private copy that says what it was checked for. A function that reads offsets
# itself passes the copy on to its scans: on a GPU a check takes eight small kernels.
MARK = "checked_for"
_LOCK = ForkSafeLock()
_FLAGS: dict[torch.device, _Flags] = {}


def check_offsets(offsets: Any, length: int, device: torch.device) -> torch.Tensor | None:
    """A private int64 copy of the user's offsets, after checks of type, shape and values.

    It is on the CPU, unless both the offsets and the data (on `device`) are on a GPU. Where values
    cannot be read now (a graph is built, say), `torch_operation` checks them when it runs.
    """
    if offsets is None or getattr(offsets, MARK, None) == (length, device):
        return offsets  # type: ignore[no-any-return]
    if not isinstance(offsets, torch.Tensor):
        made = "torch.tensor" if isinstance(offsets, (list, tuple)) else "torch.as_tensor"
        raise ScanTypeError(
            f"offsets must be a tensor, got {type(offsets).__name__}: {made}(offsets)"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ScanTypeError(
            f"offsets must be int32 or int64, got {offsets.dtype}; convert them: offsets.long()"
        )
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
    own = checked_values(offsets, length, device)
    setattr(own, MARK, (length, device))
    return own


def checked_values(offsets: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    """A private copy of the offsets. Wrong values raise ValueError now if the copy is on the CPU,
    at the next call if it is on a GPU."""
    if offsets.device.type == "cuda" and device.type == "cuda":
        own = offsets.detach().to(device, torch.int64, copy=True).contiguous()
    else:  # by NumPy, in this thread: torch's wait for each other, on a busy machine for 10 ms
        numbers = offsets.detach().cpu().numpy()
        own = torch.from_numpy(numbers.astype(np.int64, order="C", copy=True))
    check_values(own, length)
    return own


def check_values(offsets: torch.Tensor, length: int) -> None:
    """Raise ValueError if these int64 offsets break a rule: now on the CPU, at the next check or
    launch on a GPU."""
    if offsets.device.type == "cuda":
        raise_earlier(offsets.device)
        watch(offsets, length)
    else:
        validated(offsets, length)


def validated(values: torch.Tensor, length: int) -> torch.Tensor:
    """`values`, int64 on the CPU. Raises ValueError if they break a rule."""
    if int(values[0]) != 0:
        are_lengths = bool((values >= 0).all()) and int(values.sum()) == length
        remedy = "; of lengths make offsets by assocscan.offsets_of(lengths)"
        raise ScanValueError(
            f"offsets[0] is {int(values[0])}, it must be 0{remedy if are_lengths else ''}"
        )
    if int(values[-1]) != length:
        raise ScanValueError(
            f"offsets[-1] is {int(values[-1])}, but the axis has length {length}, along which "
            "the sequences lie one after another (`axis=` says which axis that is)"
        )
    # In torch.func's transforms `numpy` sees a tensor without memory.
    is_plain = torch.compiler.is_compiling() or not in_functorch_or_forward_mode()
    numbers = values.numpy() if is_plain else np.array(values.tolist())
    falls = numbers[1:] < numbers[:-1]
    if falls.any():
        k = int(falls.argmax())
        raise ScanValueError(
            f"offsets must not decrease: offsets[{k}] = {int(values[k])}, "
            f"offsets[{k + 1}] = {int(values[k + 1])}"
        )
    return values


def watch(offsets: torch.Tensor, length: int) -> None:
    """Let the GPU write to pinned memory which rules these offsets break, one flag per rule."""
    if offsets.device not in _FLAGS:
        with _LOCK:
            flags = make_lasting(lambda: _Flags(offsets.device), offsets.device)
            _FLAGS.setdefault(offsets.device, flags)
    flags = _FLAGS[offsets.device]
    broken = torch.stack([offsets[0] != 0, offsets[-1] != length, (offsets.diff() < 0).any()])
    flags.seen.logical_or_(broken)
    flags.reported.copy_(flags.seen, non_blocking=True)


def raise_earlier(device: torch.device) -> None:
    """Raise ValueError if the offsets of an earlier call on this device were wrong, once."""
    flags = _FLAGS.get(device)
    if flags is None or not flags.reported.any():
        return
    broken = flags.reported.tolist()
    flags.seen.zero_()
    flags.reported.zero_()
    raise_broken(broken, device)


def raise_broken(broken: Sequence[int], device: torch.device) -> None:
    """Raise ValueError if an earlier call broke one of RULES. `broken`: one flag per rule."""
    if any(broken):
        rules = "; ".join(rule for rule, bad in zip(RULES, broken, strict=True) if bad)
        raise ScanValueError(f"the offsets of an earlier call on {device} were wrong: {rules}")


class _Flags:
    """One flag per rule for a device: `seen` is in its memory, `reported` is the copy in pinned
    memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.seen = torch.zeros(len(RULES), dtype=torch.bool, device=device)
        self.reported = torch.zeros(len(RULES), dtype=torch.bool, pin_memory=True)
