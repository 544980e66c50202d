"""Errors of the named functions in the words of their own arguments.

They are calls of `associative_scan`, whose errors name leaves of xs and of init: what the caller
passed as `rewards` is `xs[0]` there. `named_scan` makes such a call. Translating an error costs
nothing where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ..api.associative_scan import associative_scan
from ..api.reduce import reduce
from ..errors import AssocScanError, AxisError, ScanTypeError, ScanValueError
from ..monoids.leaf_checks import check_tensor
from ..monoids.monoid import Monoid

Error = TypeVar("Error", bound=AssocScanError)

_PATH = re.compile(r"\b(xs|init)((?:\[\d+\])*)(?![\w=])")


def named_scan(
    names: Mapping[str, str],
    op: Monoid,
    xs: Any,
    axis: int,
    reverse: bool = False,
    inclusive: bool = True,
    **options: Any,
) -> Any:
    """`associative_scan` with errors about the caller's arguments.

    names: as in `renamed`.
    options: init, return_final; backend and deterministic as the caller gave them.
    """
    try:
        return associative_scan(op, xs, axis, reverse, inclusive, **options)
    except AssocScanError as error:
        raise renamed(error, names) from None


def named_reduce(
    names: Mapping[str, str], op: Monoid, xs: Any, axis: int, reverse: bool = False, **options: Any
) -> Any:
    """`reduce` with errors about the caller's arguments; parameters as in `named_scan`."""
    try:
        return reduce(op, xs, axis, reverse, **options)
    except AssocScanError as error:
        raise renamed(error, names) from None


def renamed(error: Error, names: Mapping[str, str], axis_of: str = "") -> Error:
    """The same error about the caller's arguments.

    names: what a leaf (`xs[1]`) or a whole (`xs`, `init`) was passed as.
    axis_of: the argument whose axis is meant where one is out of range.
    """

    def name(found: re.Match[str]) -> str:
        if axis_of and isinstance(error, AxisError):
            return axis_of
        return names.get(found[0]) or names.get(found[1]) or found[0]

    return type(error)(_PATH.sub(name, str(error)))


def check_devices(name: str, first: torch.Tensor, **others: object) -> None:
    """Raise ScanValueError where a tensor is on another device than the one called `name`."""
    for other, value in others.items():
        if isinstance(value, torch.Tensor) and value.device != first.device:
            raise ScanValueError(
                f"{other} is on {value.device}, but {name} is on {first.device}; move them to one "
                "device"
            )


def check_floats(name: str, series: torch.Tensor, **tensors: torch.Tensor) -> None:
    """All are tensors of one floating dtype, and the series [..., T, k] has a step."""
    for key, t in {name: series, **tensors}.items():
        check_tensor(key, t)
    check_devices(name, series, **tensors)
    if not series.is_floating_point():
        raise ScanTypeError(f"{name} has dtype {series.dtype}, expected a float")
    for key, t in tensors.items():
        if t.dtype != series.dtype:
            raise ScanTypeError(f"{key} has dtype {t.dtype}, expected {series.dtype} as {name}")
    if series.dim() < 2 or 0 in series.shape[-2:]:
        raise ScanValueError(
            f"{name} has shape {list(series.shape)}, expected [..., T, k] with T ≥ 1 and k ≥ 1"
        )
