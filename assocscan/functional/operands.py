"""Operands of the named functions: their dtypes, and tensors that broadcast to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..engines.base.packed_offsets import check_offsets
from ..errors import AxisError, ScanTypeError, ScanValueError
from ..monoids.leaf_checks import NUMBERS, check_axis, check_tensor
from ..monoids.monoid import Monoid
from ..torch_state import has_own_dispatch, needs_dispatcher
from ..wording import fitting_view, shown

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
    """As torch promotes, but complex64 for complex numbers of two 16-bit floats, which torch
    hardly supports (complex32, and that of bfloat16 where torch has it)."""
    dtype = torch.result_type(a, b)
    return torch.complex64 if dtype.is_complex and dtype.itemsize == 4 else dtype


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this dtype are combined."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Where CPUs compute in twice the digits of a tensor.
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def runs_on_gpus(x: Tensor, backend: str | None) -> bool:
    return backend in ("cuda", "triton") or (backend in (None, "auto") and x.is_cuda)


def wide_on_cpus(x: Tensor, backend: str | None) -> torch.dtype:
    """Float64 or complex128 where a CPU computes, else the dtype of a carry of x."""
    dtype = carry_dtype(x.dtype)
    return dtype if runs_on_gpus(x, backend) else WIDER.get(dtype, dtype)


def check_operand(value: object, name: str) -> None:
    if not isinstance(value, NUMBERS):
        check_tensor(name, value, " or a number")


def as_tensor(
    value: Tensor | Number, dtype: torch.dtype, device: torch.device, name: str
) -> Tensor:
    """A number as a tensor without dimensions. Raises ScanTypeError where the dtype cannot hold
    it; `name`: of the argument."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.full((), value, dtype=dtype, device=device)
    except RuntimeError:
        raise ScanTypeError(f"{name} is {value!r}, which {dtype} cannot hold") from None


def multiplier(
    value: Tensor | Number, dtype: torch.dtype, device: torch.device, name: str
) -> Tensor:
    """A tensor of what multiplies a state of this dtype at each step. Numbers and tensors without
    dimensions do not widen 16-bit floats, and are not rounded to them: 0.999 would be 1."""
    if not isinstance(value, Tensor):
        return as_tensor(value, carry_dtype(dtype), device, name)
    return value.to(carry_dtype(dtype)) if value.dim() == 0 else value


# Integers as large as the dtypes whose elements torch does not write to given places.
PLACED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def placeable(x: Tensor) -> Tensor:
    """x, or its bits as integers where torch cannot write elements of its dtype to given places."""
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
             torch.complex128, torch.bool)  # fmt: skip
    return x if x.dtype in plain else as_dtype(x, PLACED_AS[x.element_size()])


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of x as numbers of a dtype of the same size."""
    return x if x.dtype == dtype else x.view(dtype)


def check_axis_of_number(axis: int) -> None:
    """Raise AxisError for an axis that a 0-dimensional x does not have: it counts as one step."""
    try:
        check_axis(axis, (1,), 1, "x")
    except AxisError:
        raise AxisError(
            f"axis {axis} is out of range for x of shape [], which counts as one step; pass axis=0"
        ) from None


def checked_offsets(offsets: Tensor | None, x: Tensor, axis: int) -> Tensor | None:
    """The user's offsets of x, checked, as `previous_state`, `edge_mask` and scans of x take them.

    In a compiled function the scan itself checks them when it runs. An exported number of
    sequences is at least 2: results have a leading S, and torch takes a size of 1 for a constant
    (docs/limits.md).
    """
    if offsets is not None and torch.compiler.is_dynamo_compiling():
        return offsets.to(torch.int64)
    return check_offsets(offsets, x.shape[axis], x.device)


def is_readable(*tensors: Tensor) -> bool:
    """Whether their values can be looked at without waiting for a device."""
    return are_memory(*tensors) and all(t.device.type == "cpu" for t in tensors)


def are_memory(*tensors: Tensor) -> bool:
    """Whether they have values, and no one records or maps what is done to them."""
    return not (torch.compiler.is_compiling() or needs_dispatcher() or has_own_dispatch(tensors))


def expanded(t: Tensor, x: Tensor, name: str, of: str | Callable[[], str] = "x") -> Tensor:
    """`t` in the shape of `x`, which errors call `of`: a function where the words contain a size,
    which a compiled function would be specialized to by making them."""
    try:
        return t.expand(x.shape)
    except RuntimeError:
        of = of if isinstance(of, str) else of()
        raise ScanValueError(
            f"{name} has shape {list(t.shape)}, which does not broadcast to that of {of}, "
            f"{list(x.shape)}{fitting_view(name, t.shape, x.shape)}"
        ) from None


def expanded_elements(
    t: Tensor,
    batch: tuple[int, ...],
    element: tuple[int, ...],
    name: str,
    sizes: Mapping[str, str],
    in_time: bool = False,
) -> Tensor:
    """With all batch dimensions, of stride 0 where t has none; its element has its own shape.

    sizes: for errors, what the sizes of an element are called, and which argument has them:
        {"m": "y", "n": "F"} for an element [m, n].
    in_time: the last dimension of the batch is T.
    """
    try:
        if tuple(t.shape[t.dim() - len(element) :]) != element:
            raise RuntimeError
        return t.expand((*batch, *element))
    except RuntimeError:
        raise ScanValueError(
            f"{name} has shape {list(t.shape)}, expected "
            f"{expected_elements(batch, element, sizes, in_time, name)}"
            f"{of_each_series(t, batch, element, name) if in_time else ''}"
        ) from None


def of_each_series(t: Tensor, batch: tuple[int, ...], element: tuple[int, ...], name: str) -> str:
    """The end of the message for elements of each series, which lack the dimension of time."""
    if len(batch) < 2 or tuple(t.shape) != (*batch[:-1], *element):
        return ""
    return f"; for one of each series pass {name}.unsqueeze({-len(element) - 1})"


def expected_elements(
    batch: tuple[int, ...], element: tuple[int, ...], sizes: Mapping[str, str], in_time: bool,
    name: str,
) -> str:  # fmt: skip
    """`[2, 2] ([n, n] with n = 2 from F), or [9, 2, 2] ([T, n, n], one for each step)`, of the
    argument called `name`."""
    letters = [*sizes] * (len(element) if len(sizes) == 1 else 1)
    named = ", ".join(letters)
    known = " and ".join(
        f"{letter} = {size} from {sizes[letter]}"
        for letter, size in dict(zip(letters, element, strict=True)).items()
        if sizes[letter] not in ("", name)
    )
    said = f"{list(element)} ([{named}]{f' with {known}' * bool(known)})"
    if in_time:
        said += f", or {[batch[-1], *element]} ([T, {named}], one for each step)"
    if len(batch) > in_time:
        said += f"; leading dimensions broadcast to {list(batch)}"
    return said


def for_dtype(casting: dict[torch.dtype, Monoid], dtype: object) -> Monoid:
    """The monoid that casts its inputs to this dtype. Raises ScanTypeError where there is none."""
    if isinstance(dtype, torch.dtype) and dtype in casting:
        return casting[dtype]
    expected = ", ".join(str(d).removeprefix("torch.") for d in casting)
    raise ScanTypeError(f"cannot scan in dtype {shown(dtype)}; expected one of {expected}")
