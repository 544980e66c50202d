"""The dtypes of tensors and of scalars, in one table, and what each is called in each language."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..errors import UnsupportedOperation


class Dtype(NamedTuple):
    """A dtype of tensors.

    scalar: the dtype of a program's values in which its numbers are computed.
    cpp, triton: the type of one number, or of one part of a complex one, in memory.
    rounding: the operation that rounds a scalar to it; None where that is exact.
    """

    dtype: torch.dtype
    scalar: str
    cpp: str
    triton: str
    rounding: str | None = None


TABLE = (
    Dtype(torch.bool,       "b1",  "uint8_t", "tl.int1"),
    Dtype(torch.uint8,      "u8",  "uint8_t", "tl.uint8"),
    Dtype(torch.int8,       "i8",  "int8_t",  "tl.int8"),
    Dtype(torch.int16,      "i16", "int16_t", "tl.int16"),
    Dtype(torch.int32,      "i32", "int32_t", "tl.int32"),
    Dtype(torch.int64,      "i64", "int64_t", "tl.int64"),
    Dtype(torch.float16,    "f32", "f16",     "tl.float16",  "round_f16"),
    Dtype(torch.bfloat16,   "f32", "bf16",    "tl.bfloat16", "round_bf16"),
    Dtype(torch.float32,    "f32", "float",   "tl.float32"),
    Dtype(torch.float64,    "f64", "double",  "tl.float64"),
    Dtype(torch.complex64,  "f32", "float",   "tl.float32"),
    Dtype(torch.complex128, "f64", "double",  "tl.float64"),
)  # fmt: skip

# ---- By the dtype of a tensor ----

SCALAR_DTYPES = {row.dtype: row.scalar for row in TABLE}
CPP_MEMORY = {row.dtype: row.cpp for row in TABLE}
TRITON_MEMORY = {row.dtype: row.triton for row in TABLE}
ROUNDING = {row.dtype: row.rounding for row in TABLE if row.rounding is not None}
STORAGE_ONLY = tuple(ROUNDING)  # computed in float32

# ---- By the dtype of a scalar ----

_SCALARS = [row for row in TABLE if row.rounding is None and not row.dtype.is_complex]
EXACT_DTYPES = {row.scalar: row.dtype for row in _SCALARS}
CPP_TYPES = {row.scalar: row.cpp for row in _SCALARS} | {"b1": "bool"}  # a byte in memory
TRITON_TYPES = {row.scalar: row.triton for row in _SCALARS}
FLOATS = tuple(kind for kind, dtype in EXACT_DTYPES.items() if dtype.is_floating_point)
INT_BITS = {
    kind: 8 * dtype.itemsize for kind, dtype in EXACT_DTYPES.items() if kind not in (*FLOATS, "b1")
}


def scalar_dtype(dtype: torch.dtype) -> str:
    """The dtype in which values of a torch dtype are computed."""
    try:
        return SCALAR_DTYPES[dtype]
    except KeyError:
        raise UnsupportedOperation(f"dtype {dtype} cannot be generated") from None


def promoted_float(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The dtype that torch promotes the real floats among these to; None where there are none."""
    floats = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floats) if floats else None
