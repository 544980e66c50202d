"""What a leaf may be: a dense strided tensor, on the device of the others."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import AxisError, ScanTypeError, ScanValueError
from ..pytrees import TreeSpec
from ..wording import conversion, kind_of, shown
from .leaf_names import OWN, LeafNames

NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat)


def check_leaves(leaves: list[Any], spec: TreeSpec, names: LeafNames = OWN) -> None:
    """Raise where a leaf of xs is not a dense tensor, or the leaves are on several devices."""
    if not leaves:
        raise ScanValueError(f"{names.of('xs')} is an empty pytree; give at least one tensor")
    for k, t in enumerate(leaves):
        plain = type(t) is torch.Tensor or type(t) is torch.nn.Parameter
        if plain and t.layout is torch.strided and not (t.is_nested or t.is_quantized):
            continue
        path = names.paths(spec)[k]
        if isinstance(t, NUMBERS):
            refuse_number(path, t, leaves, names.paths(spec))
        check_tensor(path, t)
    device = leaves[0].device
    for k, t in enumerate(leaves[1:], 1):
        if t.device != device:
            first, other = (names.paths(spec)[j] for j in (0, k))
            raise ScanValueError(
                f"{first} is on {device} but {other} is on {t.device}; move them to one device"
            )


def broadcast_batches(
    paths: Sequence[str], leaves: Sequence[torch.Tensor], ndims: Sequence[int]
) -> tuple[int, ...]:
    """The batch shape that the leaves, called `paths`, broadcast to; raises ScanValueError where
    they do not."""
    shapes = [t.shape[: t.dim() - n] for t, n in zip(leaves, ndims, strict=True)]
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        seen = ", ".join(f"{path}: {list(s)}" for path, s in zip(paths, shapes, strict=True))
        raise ScanValueError(f"the batch shapes of the leaves do not broadcast ({seen})") from None


def refuse_number(path: str, value: Any, leaves: list[Any], paths: list[str]) -> NoReturn:
    """Raise ScanTypeError for a number in the place of a leaf, with the tensor that stands for it
    beside another leaf."""
    pairs = zip(paths, leaves, strict=True)
    other = next((p for p, t in pairs if isinstance(t, torch.Tensor)), None)
    remedy = conversion(path, value)
    if other is None and len(leaves) > 1 and path.endswith("[0]"):
        remedy = f": torch.tensor({path.removesuffix('[0]')})"
    if other is not None:
        remedy = f": torch.full_like({other}, {value})"
    if other is not None and len(leaves) == 2 and leaves[0] is value:
        remedy += "; assocscan.linear_recurrence(a, b) takes a number as a"
    raise ScanTypeError(f"{path} is the {type(value).__name__} {value}, expected a tensor{remedy}")


def check_tensor(path: str, t: Any, otherwise: str = "") -> None:
    """Raise ScanTypeError where `t` is no dense tensor; `otherwise`: what else it may be."""
    if not isinstance(t, torch.Tensor):
        raise ScanTypeError(
            f"{path} is {kind_of(t)}, expected a tensor{otherwise}"
            f"{conversion(path, t) or of_pandas(path, t)}"
        )
    if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
        refuse_class(path, t)
    if t.is_nested:
        raise ScanTypeError(
            f"{path} is a nested tensor; pack the sequences along the axis and pass offsets=, or "
            "pad them: torch.nested.to_padded_tensor"
        )
    if t.layout is not torch.strided:
        raise ScanTypeError(
            f"{path} has the layout {t.layout}; a scan takes dense strided tensors "
            "(convert it with .to_dense())"
        )
    if t.is_quantized:
        raise ScanTypeError(f"{path} is quantized ({t.dtype}); convert it with .dequantize()")


def of_pandas(path: str, value: object) -> str:
    """How a tensor is made of a Series or a DataFrame; empty for all else."""
    is_of_pandas = type(value).__module__.partition(".")[0] == "pandas"
    if is_of_pandas and hasattr(value, "to_numpy"):
        return f": torch.as_tensor({path}.to_numpy())"
    return ""


OTHER_CLASSES = {
    "DTensor": "x.to_local() is the part of this rank",
    "MaskedTensor": "x.to_tensor(value) puts a value in the place of what is masked",
}


def refuse_class(path: str, t: torch.Tensor) -> None:
    """Raise ScanTypeError for classes of torch that stand for more than the tensor that they look
    like, and of which a scan is not defined."""
    for base in type(t).__mro__:
        if base.__name__ in OTHER_CLASSES and base.__module__.startswith("torch."):
            remedy = OTHER_CLASSES[base.__name__].replace("x", path, 1)
            raise ScanTypeError(f"{path} is a {base.__name__}, expected a dense tensor: {remedy}")


def require_tensor(name: str, value: object) -> None:
    """The part of `check_tensor` that a scan of `value` does not check again."""
    if not isinstance(value, torch.Tensor):
        check_tensor(name, value)


def check_axis(axis: Any, shape: Sequence[int], ndim: int, name: str) -> int:
    """The axis as a non-negative index into the first `ndim` of these dimensions."""
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        hint = f"; by position axis comes before reverse: pass reverse={axis} by name"
        hint = hint if isinstance(axis, bool) else ""
        raise ScanTypeError(f"axis must be an int, got {shown(axis)}{hint}")
    if isinstance(axis, torch.Tensor) and (axis.numel() != 1 or axis.is_floating_point()):
        raise ScanTypeError(
            f"axis must be an int, got a tensor of shape {list(axis.shape)}; several leaves are "
            "passed as one tuple, xs=(x, y)"
        )
    try:
        axis = operator.index(axis)
    except TypeError:  # an array of several numbers
        raise ScanTypeError(f"axis must be an int, got {shown(axis)}") from None
    if -ndim <= axis < ndim:
        return int(axis) % ndim
    hint = f"; it may be {-ndim} to {ndim - 1}"
    if ndim < 2:
        hint = "; pass axis=0" if ndim else ", and so none to scan along"
    inner = len(shape) - ndim
    if inner > 0:
        plural = (
            f"{inner} dimensions belong to one element and are"
            if inner > 1
            else ("dimension belongs to one element and is")
        )
        hint += f" (the last {plural} not counted"
        hint += f": pass axis={axis + inner})" if -ndim <= axis + inner < 0 and ndim > 1 else ")"
    raise AxisError(
        f"axis {axis} is out of range for {name} of shape {list(shape)}, which has {ndim} "
        f"{'batch ' * (inner > 0)}dimension{'s' * (ndim != 1)}{hint}"
    )


def in_front(sequences: int) -> str:
    """What an error adds about the leading dimension of carries of packed sequences."""
    return f", with {sequences} in front for the sequences"
