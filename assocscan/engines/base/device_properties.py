"""Properties of a device that the choice of kernels depends on."""

from __future__ import annotations

import functools

import torch

# The values of an H100, for devices that do not report them (Triton's interpreter runs on the CPU).
PROCESSORS, SHARED_MEMORY = 132, 227 << 10


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return PROCESSORS


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The most shared memory that one block can use, in bytes."""
    if device.type != "cuda":
        return SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10) or 48 << 10)
