"""Tensors of symbolic scalars: what `scalarize` computes with.

A `Sym` holds, for each of its elements, the id of a value in a `Builder`, as an int64 tensor.
Data movement (view, permute, cat, …) is then the same torch operation applied to the ids. A complex
tensor is a pair of id tensors, real and imaginary part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import UnsupportedOperation
from .dtypes import ROUNDING, scalar_dtype
from .program_builder import Builder

Ids = torch.Tensor


@dataclass
class Sym:
    """A tensor of scalar values; `im` holds the imaginary parts of a complex one."""

    ids: Ids
    dtype: torch.dtype
    im: Ids | None = None

    @classmethod
    def of(cls, planes: Sequence[Ids], dtype: torch.dtype) -> Sym:
        """From the id tensors that `planes` returns."""
        return cls(planes[0], dtype, planes[1] if len(planes) > 1 else None)

    @property
    def shape(self) -> torch.Size:
        return self.ids.shape

    def planes(self) -> list[Ids]:
        """The id tensors: one, or two for a complex tensor."""
        return [self.ids] if self.im is None else [self.ids, self.im]

    def move(self, fn: Callable[[Ids], Ids]) -> Sym:
        """The same data movement on every plane."""
        return Sym.of([fn(p) for p in self.planes()], self.dtype)


def each(shape: Sequence[int], fn: Callable[..., int], *ids: Ids) -> Ids:
    """Apply a scalar function elementwise, broadcasting to `shape`."""
    flat = [i.expand(tuple(shape)).reshape(-1).tolist() for i in ids]
    return torch.tensor([fn(*v) for v in zip(*flat, strict=True)], dtype=torch.int64).view(
        tuple(shape)
    )


class Tensors:
    """Conversions between Python numbers, concrete tensors and `Sym`, all inside one builder."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def constant(self, value: torch.Tensor) -> Sym:
        """A concrete tensor as constants."""
        kind = scalar_dtype(value.dtype)
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj()).unbind(-1)
            return Sym(self.constant(parts[0]).ids, value.dtype, self.constant(parts[1]).ids)
        numbers = value.detach().reshape(-1).tolist()
        ids = [self.builder.const(v, kind) for v in numbers]
        return Sym(torch.tensor(ids, dtype=torch.int64).view(value.shape), value.dtype)

    def symbolic(self, value: object, dtype: torch.dtype) -> Sym:
        """Anything an operation may take, cast to `dtype`."""
        if isinstance(value, (bool, int, float, complex)):
            value = torch.tensor(value, dtype=dtype)
        if isinstance(value, torch.Tensor):
            return self.constant(value.to(dtype))
        if isinstance(value, Sym):
            return self.cast(value, dtype)
        raise UnsupportedOperation(f"an operand of type {type(value).__name__}")

    def cast(self, x: Sym, dtype: torch.dtype) -> Sym:
        """Convert as `Tensor.to` does; a cast to a 16-bit float rounds, kept in float32."""
        if x.dtype == dtype:
            return x
        kind = scalar_dtype(dtype)

        def convert(value: int) -> int:
            value = self.builder.cast(value, kind)
            return self.builder.emit(ROUNDING[dtype], value) if dtype in ROUNDING else value

        if dtype == torch.bool and x.im is not None:
            nonzero = [each(x.shape, lambda v: self.builder.cast(v, "b1"), p) for p in x.planes()]
            return Sym(each(x.shape, lambda a, b: self.builder.emit("or", a, b), *nonzero), dtype)
        real = each(x.shape, convert, x.ids)
        if not dtype.is_complex:
            return Sym(real, dtype)
        zero = torch.full(x.shape, self.builder.const(0.0, kind), dtype=torch.int64)
        return Sym(real, dtype, zero if x.im is None else each(x.shape, convert, x.im))
