"""The engines, what each can run, and which one `auto` takes.

Today: `cpu` (generated C++) and `eager` (torch operations). The GPU engines `triton`, `cuda` and
`multipass` are named in the interface and say that they are not there yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from ..errors import BackendError
from . import compiler, cpu

if TYPE_CHECKING:
    from ..arguments import ScanCall
    from ..autograd import Engine

BACKENDS = ("auto", "triton", "cuda", "multipass", "cpu", "eager")
GPU_ENGINES = ("triton", "cuda", "multipass")


def availability() -> dict[str, str | None]:
    """Each engine's reason for not being available here; None where it is."""
    missing = "this version of assocscan does not have this engine yet"
    return {
        **dict.fromkeys(GPU_ENGINES, missing),
        "cpu": compiler.why_unavailable(),
        "eager": None,
    }


def why_not(call: ScanCall, backend: str) -> str | None:
    """Why the backend (for `auto`: any generated engine) cannot run this call; None if it can."""
    device = call.leaves[0].device.type
    if backend in GPU_ENGINES:
        return availability()[backend]
    if inside_transform(call):
        return "torch.func transforms and forward-mode differentiation run on the eager engine"
    if device != "cpu":
        if backend == "cpu":
            return f"xs is on {call.leaves[0].device}, it runs on CPU tensors"
        return f"there is no generated engine for {device} tensors yet"
    unavailable = compiler.why_unavailable()
    if unavailable is not None:
        return unavailable
    if call.spec is None or call.spec.operator is None:
        return call.why_eager
    return None


def inside_transform(call: ScanCall) -> bool:
    """Whether some tensor belongs to vmap, grad, jvp, … of torch.func, or carries a tangent."""
    tensors = [*call.leaves, *(call.init or ())]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        return True
    level = getattr(forward_ad, "_current_level", -1)
    return level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def engine(call: ScanCall, backend: str) -> Engine:
    """The engine's function for a call that `why_not` lets through."""
    if call.leaves[0].device.type != "cpu":
        raise BackendError(f"no engine for {call.leaves[0].device}")
    return cpu.scan
