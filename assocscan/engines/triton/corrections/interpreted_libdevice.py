"""libdevice for Triton's interpreter, which has no external functions: torch's own.

The interpreter's tensors hold numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def emulate(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A torch function as a function of the interpreter's tensors."""

    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            result = function(*(torch.from_numpy(np.array(a.handle.data)) for a in args)).numpy()
        dtype = args[0].dtype
        is_tile = any(a.type.is_block() for a in args)
        kind = tl.block_type(dtype, list(result.shape)) if is_tile else dtype
        return tl.tensor(TensorHandle(result, dtype), kind)

    return call


exp, exp2, expm1 = emulate(torch.exp), emulate(torch.exp2), emulate(torch.expm1)
log, log2, log10, log1p = (emulate(f) for f in (torch.log, torch.log2, torch.log10, torch.log1p))
sin, cos, tan = emulate(torch.sin), emulate(torch.cos), emulate(torch.tan)
asin, acos, atan = emulate(torch.asin), emulate(torch.acos), emulate(torch.atan)
sinh, cosh, tanh = emulate(torch.sinh), emulate(torch.cosh), emulate(torch.tanh)
asinh, acosh, atanh = emulate(torch.asinh), emulate(torch.acosh), emulate(torch.atanh)
erf, erfc = emulate(torch.erf), emulate(torch.erfc)
atan2, hypot, pow = emulate(torch.atan2), emulate(torch.hypot), emulate(torch.pow)
copysign, rsqrt = emulate(torch.copysign), emulate(torch.rsqrt)
nearbyint, trunc = emulate(torch.round), emulate(torch.trunc)
# numpy's: torch's vector code yields NaN for fmod(1, 1e-39).
fmod = emulate(lambda a, b: torch.from_numpy(np.fmod(a.numpy(), b.numpy())))
round_bf16 = emulate(lambda x: x.bfloat16().float())
