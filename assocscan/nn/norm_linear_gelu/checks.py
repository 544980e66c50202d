"""What `torch.ops.assocscan.linear_gelu` checks of its arguments: kernels read and write as sizes
and strides of x and weight say, and the operation may be called with anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...engines.triton import loader as triton_loader
from ...errors import BackendError, ScanTypeError, ScanValueError
from ...runtime.operation_checks import require_memory

OPERATION = "torch.ops.assocscan.linear_gelu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Operands(NamedTuple):
    """The tensors of y = GELU(LayerNorm(x) Wᵀ + b).

    x [..., in]; gamma and beta [in], of LayerNorm; weight W [out, in]; bias b [out]. What is None
    is left out.
    """

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    weight: Tensor
    bias: Tensor | None


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """For x [M, K], weight [N, K] and bias [N]."""
    check_shapes(x, weight, bias)
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if t.layout is not torch.strided:
            raise ScanTypeError(
                f"{OPERATION}: {name} has the layout {t.layout}, expected a dense one"
            )
        if t.dtype not in DTYPES:
            raise ScanTypeError(
                f"{OPERATION}: {name} is {t.dtype}, expected one of {', '.join(map(str, DTYPES))}"
            )
        if t.device != x.device:
            raise ScanValueError(f"{OPERATION}: {name} is on {t.device}, x on {x.device}")
        require_memory(OPERATION, name, 0, t)
    if x.dtype != weight.dtype:
        raise ScanTypeError(f"{OPERATION}: x is {x.dtype}, weight {weight.dtype}, expected one")
    if not triton_loader.is_installed():
        raise BackendError(f"{OPERATION} cannot run: Triton is not installed")
    if not x.is_cuda and not triton_loader.is_interpreting():
        raise BackendError(f"{OPERATION} cannot run: x is on {x.device}, it runs on CUDA tensors")


def check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    shapes = [None if t is None else list(t.shape) for t in (x, weight, bias)]
    fits = x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1]
    if not fits or (bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0])):
        raise ScanValueError(
            f"{OPERATION}: x has shape {shapes[0]}, weight {shapes[1]} and bias {shapes[2]}, "
            "expected [M, K], [N, K] and [N]"
        )
