"""Errors of the named functions in the words of their own arguments.

They are calls of `associative_scan`, whose errors name leaves of xs and of init: what the caller
passed as `rewards` is `xs[0]` there. `named_scan` makes such a call. Where it fails, its arguments
are bound again under the caller's names, so that names cost nothing where there is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..api.associative_scan import associative_scan
from ..api.bind_arguments import bind
from ..api.reduce import reduce
from ..errors import AssocScanError, ScanTypeError, ScanValueError
from ..monoids.leaf_checks import check_tensor
from ..monoids.leaf_names import LeafNames
from ..wording import kind_of

Names = Mapping[str, str] | LeafNames


def named_scan(
    names: Names,
    op: Any,
    xs: Any,
    axis: int,
    reverse: bool = False,
    inclusive: bool = True,
    **options: Any,
) -> Any:
    """`associative_scan` with errors about the caller's arguments.

    names: what the leaves were passed as, as in `LeafNames`.
    options: init, return_final; backend and deterministic as the caller gave them.
    """
    try:
        return associative_scan(op, xs, axis, reverse, inclusive, **options)
    except AssocScanError as error:
        raise in_words(error, names, op, xs, axis, **options) from None


def named_reduce(
    names: Names, op: Any, xs: Any, axis: int, reverse: bool = False, **options: Any
) -> Any:
    """`reduce` with errors about the caller's arguments; parameters as in `named_scan`."""
    try:
        return reduce(op, xs, axis, reverse, **options)
    except AssocScanError as error:
        raise in_words(error, names, op, xs, axis, **options) from None


def in_words(
    error: AssocScanError,
    names: Names,
    op: Any,
    xs: Any,
    axis: int,
    init: Any = None,
    offsets: torch.Tensor | None = None,
    **_: Any,
) -> AssocScanError:
    """The error of the same call about the caller's arguments; `error` itself where it is not about
    the leaves, as one about a flag."""
    named = names if isinstance(names, LeafNames) else LeafNames(names)
    try:
        bind(op, xs, axis, False, True, init, False, offsets, named)
    except AssocScanError as found:
        if type(found) is type(error):
            return found
    # Why an engine cannot run a call is said of all leaves.
    return type(error)(str(error).replace(": xs is on ", f": {named.of('xs')} is on "))


def check_devices(name: str, first: torch.Tensor, **others: object) -> None:
    """Raise ScanValueError where a tensor is on another device than the one called `name`."""
    for other, value in others.items():
        if isinstance(value, torch.Tensor) and value.device != first.device:
            raise ScanValueError(
                f"{other} is on {value.device}, but {name} is on {first.device}; move them to one "
                "device"
            )


def check_mask(name: str, value: object, x: torch.Tensor, of: str = "x") -> None:
    """A mask is a tensor of bool on the device of x, which errors call `of`."""
    check_tensor(name, value)
    assert isinstance(value, torch.Tensor)
    if value.dtype != torch.bool:
        raise ScanTypeError(
            f"{name} has dtype {value.dtype}, expected torch.bool; convert it with {name}.bool()"
        )
    check_devices(of, x, **{name: value})


# Arguments of Kalman filters that are square matrices.
MATRICES = ("F", "Q", "R", "covariance")


def check_floats(name: str, series: torch.Tensor, **tensors: torch.Tensor) -> None:
    """All are tensors of one floating dtype, and the series [..., T, n] has a step."""
    given: dict[str, Any] = {name: series, **tensors}
    for key, t in given.items():
        if key in MATRICES and isinstance(t, (int, float)):
            raise ScanTypeError(
                f"{key} is {kind_of(t)}, expected a tensor: {t} * torch.eye(n, dtype={name}.dtype)"
            )
        check_tensor(key, t)
    check_devices(name, series, **tensors)
    if not series.is_floating_point():
        hint = ""
        if name == "likelihood":
            hint = (
                ": likelihood[t, j] is log p(y[t] | j). Of symbols y [T] and logarithms "
                "emission [K, symbols] it is emission[:, y].T"
            )
        raise ScanTypeError(f"{name} has dtype {series.dtype}, expected a float{hint}")
    for key, t in tensors.items():
        if t.dtype != series.dtype:
            raise ScanTypeError(f"{key} has dtype {t.dtype}, expected {series.dtype} as {name}")
    if series.dim() < 2 or 0 in series.shape[-2:]:
        size = {"y": "m", "likelihood": "K"}.get(name, "n")  # as the docstrings call it
        raise ScanValueError(
            f"{name} has shape {list(series.shape)}, expected [..., T, {size}] with T ≥ 1 and "
            f"{size} ≥ 1"
        )
