"""Loads and launches compiled kernels with CuPy; which GPUs can run them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..caching.load_once import Once
from ..errors import BackendError
from ..torch_private import raw_stream
from .compiler import ROUNDED_ALIKE, cubin
from .kernel import CudaKernel

OLDEST = (8, 0)
BULK_COPIES = (9, 0)
MEMORY_CLOCK, MEMORY_WIDTH, COOPERATIVE_LAUNCH = 36, 37, 95  # cudaDeviceAttr: kHz, bits, whether
_LOADED: dict[tuple[str, int], Function] = {}
_ONCE = Once(_LOADED)


@dataclass
class Function:
    """A kernel that is loaded on one device."""

    driver: Any
    index: int
    module: Any
    function: Any
    threads: int
    shared_bytes: int
    blocks_per_processor: int

    def launch(
        self, grid: int, parameters: bytes, given: Sequence[torch.Tensor], waits: bool
    ) -> None:
        """Launch on torch's current stream. waits: blocks wait for each other, or tell each other
        something; the launch is cooperative."""
        memory = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = ctypes.c_void_p(ctypes.addressof(memory))
        shape = (self.function.ptr, grid, 1, 1, self.threads, 1, 1, self.shared_bytes,
                 stream_of(self.index))  # fmt: skip
        try:
            if waits:
                self.driver.launchCooperativeKernel(*shape, ctypes.addressof(pointers))
            else:
                self.driver.launchKernel(*shape, ctypes.addressof(pointers), 0)
        except self.driver.CUDADriverError as error:
            raise BackendError(f"the launch of a generated CUDA kernel failed: {error}") from error


@functools.cache
def why_unavailable() -> str | None:
    """The reason why no CUDA kernel can run on this machine; None if one can."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no NVIDIA GPU was found"
    major = torch.version.cuda.split(".")[0]
    wanted = f"pip install 'cupy-cuda{major}x>=14'"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {wanted}"
    try:
        import cupy
        from cupy.cuda import nvrtc

        if int(cupy.__version__.split(".")[0]) < 14:
            return f"CuPy {cupy.__version__} is older than 14; {wanted}"
        nvrtc.getVersion()
    except Exception as error:
        words = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {words[0] if words else ''}"
        return f"CuPy or NVRTC cannot be loaded ({said}); {wanted} nvidia-cuda-nvrtc"
    runtime = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if str(runtime) != major:
        return f"CuPy is built for CUDA {runtime}, torch for CUDA {major}; {wanted}"
    return None


@functools.cache
def why_not_device(device: torch.device) -> str | None:
    """The reason why this GPU cannot run the kernels; None if it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, the kernels need 8.0"
        )
    if not attribute(COOPERATIVE_LAUNCH, device):
        return (
            f"{torch.cuda.get_device_name(device)} has no cooperative launches: blocks that wait "
            'for one another might not all run; backend="multipass" needs none'
        )
    return None


def attribute(number: int, device: torch.device) -> int:
    """An attribute of the GPU (cudaDeviceAttr); 0 if the driver does not report it."""
    from cupy.cuda import runtime

    try:
        index = device.index if device.index is not None else torch.cuda.current_device()
        return int(runtime.deviceGetAttribute(number, index))
    except runtime.CUDARuntimeError:
        return 0


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether the GPU has the copies that the kernels of rows use."""
    return torch.cuda.get_device_capability(device) >= BULK_COPIES


@functools.cache
def memory_bandwidth(device: torch.device) -> float:
    """The peak bandwidth of the memory's pins in bytes per second; that of an H100 if the driver
    does not report it."""
    clock, width = attribute(MEMORY_CLOCK, device), attribute(MEMORY_WIDTH, device)
    return 2e3 * clock * width / 8 or 3.35e12


def stream_of(index: int) -> int:
    """torch's current stream on a device; quicker than torch.cuda.current_stream."""
    return int(raw_stream(index))


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which this device is the current one."""
    if device.index is None or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def load(source: str, kernel: CudaKernel | None, device: torch.device) -> Function:
    """The loaded kernel; compiled unless a cache has it. Raises BackendError with NVRTC's
    messages."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    known = _LOADED.get((source, index))
    if known is not None:
        return known
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            "the cuda backend cannot load a kernel while a CUDA graph is captured; run the same "
            "scan once before the capture"
        )
    walks = kernel is not None and kernel.mode == "WALKED"
    return _ONCE.get((source, index), lambda: _load(source, index, walks))


def _load(source: str, index: int, walks: bool) -> Function:
    import cupy
    from cupy.cuda import driver, runtime

    options = ROUNDED_ALIKE if walks else ()
    code = cubin(source, torch.cuda.get_device_capability(index), options)
    try:
        with torch.cuda.device(index):
            return prepared(cupy, code, index, walks)
    except (driver.CUDADriverError, runtime.CUDARuntimeError) as error:
        raise BackendError(f"a generated CUDA kernel cannot be loaded: {error}") from error


def prepared(cupy: Any, code: bytes, index: int, shares: bool) -> Function:
    """The kernel `scan` of this machine code on the current device. shares: whether its speed needs
    several blocks on a multiprocessor, which the driver may leave too little shared memory for."""
    module = cupy.cuda.function.Module()
    module.load(code)
    function = module.get_function("scan")
    found = (ctypes.c_int32 * 2)()
    pointer = module.get_global_var("launch_numbers")
    cupy.cuda.runtime.memcpy(ctypes.addressof(found), int(pointer), 8, 2)
    threads, shared = found
    driver = cupy.cuda.driver
    driver.funcSetAttribute(function.ptr, 8, shared)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    if shares:
        driver.funcSetAttribute(function.ptr, 9, 100)  # PREFERRED_SHARED_MEMORY_CARVEOUT, percent
    blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, shared)
    if blocks < 1:
        raise BackendError(f"a kernel with {shared} bytes of shared memory does not fit the GPU")
    return Function(driver, index, module, function, threads, shared, blocks)
