"""Memory in which blocks tell each other aggregates, and the alarm that the watchdog rings.

A workspace belongs to one stream, so that two launches never use it at a time; launches on a
stream follow one another. It is cleared when it is made, never between launches
(`status_and_watchdog.cuh`). While a CUDA graph is captured, a call gets a workspace of its own,
whose clearing is captured too: the graph's replays are ordered by the graph.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from ..caching.fork_safe_locks import ForkSafeLock
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
        """What all slots take: the kernel clears them before the epoch repeats."""
        return self.memory.numel() - HEADER_BYTES


_SPACES: dict[tuple[torch.device, int, int], Workspace] = {}


def get(device: torch.device, slot_class: int, slot_bytes: int) -> Workspace:
    """A workspace for the current stream. Slots of 8 and of 16 bytes have different ones."""
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
            'backend="multipass" needs less'
        ) from error


class Alarm:
    """One word of the host's memory that kernels can write."""

    def __init__(self, pinned: bool) -> None:
        self.memory = torch.zeros(16, dtype=torch.int32, pin_memory=pinned)
        self.word = ctypes.c_int32.from_address(self.memory.data_ptr())


@functools.cache
def alarm_of(device: torch.device) -> Alarm:
    return Alarm(device.type == "cuda")


def alarm(device: torch.device) -> int:
    """The address of the device's alarm."""
    return alarm_of(device).memory.data_ptr()


def check_alarm(device: torch.device) -> None:
    """Raise if an earlier launch gave up waiting. Its results are wrong; later ones are not."""
    word = alarm_of(device).word
    if word.value:
        word.value = 0
        raise BackendError(
            "an earlier scan of the cuda backend waited over 15 s for another block of its own and "
            "gave up: its results are wrong. Another program may hold the GPU; "
            'backend="multipass" never waits'
        )
