"""On GPUs: the memory that a call takes, and the least time for a number of exponentials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

EXPONENTIALS_PER_CLOCK = 16  # of a multiprocessor's special function units, NVIDIA since Volta


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """The bytes that torch has allocated on a CUDA device at most while the call runs, beyond those
    before it: outputs and everything in between."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def exponentials_ms(count: int, device: torch.device) -> float | None:
    """The least time in which the device takes so many exponentials, at the highest clock that it
    states; None where there are none, and on devices of which the rate is not known."""
    if not count or device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(device)
    clocks_per_ms = properties.clock_rate  # stated in kHz
    return count / (EXPONENTIALS_PER_CLOCK * properties.multi_processor_count * clocks_per_ms)
