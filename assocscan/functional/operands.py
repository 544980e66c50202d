"""The operands of a linear recurrence: numbers and tensors of several dtypes and shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ScanValueError
from ..monoids.leaf_checks import NUMBERS, check_tensor

Number = int | float | complex


def recurrence_dtype(a: Tensor | Number, b: Tensor, init: Tensor | Number | None) -> torch.dtype:
    """The dtype of a · init + b; a float32 init does not widen 16-bit floats."""
    check_operand(a, "a")
    dtype = promoted(a, b)
    if init is None:
        return dtype
    check_operand(init, "init")
    joined = promoted(init, torch.empty((0,), dtype=dtype))
    return dtype if joined == carry_dtype(dtype) else joined


def promoted(a: Tensor | Number, b: Tensor) -> torch.dtype:
    """As torch promotes, but complex64 for complex32, which torch hardly supports."""
    dtype = torch.result_type(a, b)
    return torch.complex64 if dtype == torch.complex32 else dtype


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check_operand(value: object, name: str) -> None:
    if not isinstance(value, NUMBERS):
        check_tensor(name, value, " or a number")


def as_tensor(value: Tensor | Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def expand(a: Tensor, shape: torch.Size) -> Tensor:
    try:
        return a.expand(shape)
    except RuntimeError:
        raise ScanValueError(
            f"a of shape {list(a.shape)} does not broadcast to b of shape {list(shape)}"
        ) from None
