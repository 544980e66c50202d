"""`Workspace`, the GPU memory with the slots through which blocks exchange aggregates and prefixes;
and `Alarm`, a word that the watchdog of a kernel sets.

A workspace belongs to one stream: launches on a stream run one after another, so two launches never
use it at the same time. It is set to zero when it is allocated, not between launches
(`status_and_watchdog.cuh`). During the capture of a CUDA graph every call gets a new workspace, and
setting it to zero is captured too.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from ..caching.fork_safe_locks import ForkSafeLock
from ..engines.base.packed_offsets import RULES, raise_broken
from ..engines.base.persistent_tensors import make_lasting
from ..errors import BackendError
from . import launcher

HEADER_BYTES = 256
_LOCK = ForkSafeLock()


@dataclass
class Workspace:
    memory: torch.Tensor

    @property
    def header(self) -> int:
        return self.memory.data_ptr()

    @property
    def slots(self) -> int:
        return self.memory.data_ptr() + HEADER_BYTES

    @property
    def slot_bytes(self) -> int:
        """The bytes of all slots; kernels with an epoch clear them before it repeats."""
        return self.memory.numel() - HEADER_BYTES


_SPACES: dict[tuple[torch.device, int, int], Workspace] = {}


def get(device: torch.device, slot_class: int, slot_bytes: int) -> Workspace:
    """The workspace of the current stream with slots of this class (`LoadedKernel.slot_class`)."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return create(device, slot_bytes)
        stream = launcher.stream_of(device.index or 0)
    key = (device, stream, slot_class)
    known = _SPACES.get(key)
    if known is None or known.memory.numel() < HEADER_BYTES + slot_bytes:
        known = make_lasting(lambda: create(device, slot_bytes + slot_bytes // 4), device)
        with _LOCK:
            _SPACES[key] = known
    return known


def create(device: torch.device, slot_bytes: int) -> Workspace:
    try:
        size = HEADER_BYTES + -(-slot_bytes // 256) * 256
        return Workspace(torch.zeros(size, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        raise BackendError(
            f"the cuda backend found no memory for the {slot_bytes} bytes of its workspace; "
            'backend="triton" needs less'
        ) from error


class Alarm:
    """Words of pinned host memory that kernels can write. The first says that there is something:
    1, a watchdog ended a launch; 2, offsets broke a rule. The next three are one for each of the
    rules of `packed_offsets.RULES`."""

    def __init__(self, pinned: bool) -> None:
        self.memory = torch.zeros(16, dtype=torch.int32, pin_memory=pinned)
        self.words = (ctypes.c_int32 * (1 + len(RULES))).from_address(self.memory.data_ptr())


@functools.cache
def alarm_of(device: torch.device) -> Alarm:
    return Alarm(device.type == "cuda")


def alarm(device: torch.device) -> int:
    """The address of the device's alarm."""
    return alarm_of(device).memory.data_ptr()


def check_alarm(device: torch.device) -> None:
    """Raise BackendError if the watchdog ended an earlier launch, and ValueError if the offsets of
    an earlier launch were wrong. Results of that launch are wrong, those of later ones right."""
    words = alarm_of(device).words
    if words[0]:
        broken = words[1:]
        words[:] = [0] * len(words)
        raise_broken(broken, device)
        raise BackendError(
            "an earlier scan of the cuda backend waited over 15 s for another block of its own and "
            "gave up: its results are wrong. Another program may hold the GPU; "
            'backend="multipass" never waits'
        )
