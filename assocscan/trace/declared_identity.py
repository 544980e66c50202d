"""The identity that a monoid declares, in the dtypes and shapes of its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import AssocScanError, MonoidError, ScanTypeError, ScanValueError
from ..program.operator import Leaf
from ..program.program_builder import Key, encode
from ..pytrees import TreeSpec, align, template, top_level, tree_map
from ..wording import user_line
from .signatures import signature_of


def resolve_identity(
    monoid: Any, spec: TreeSpec, state: tuple[Leaf, ...]
) -> tuple[torch.Tensor, ...] | None:
    """The identity as one tensor of the element shape per state leaf; ±inf saturates."""
    identity = monoid.identity
    if identity is None:
        return None
    if callable(identity):
        identity = call_identity(monoid, identity, spec, state)
    where = f"the identity of {monoid.name!r}"
    leaves = align(template(spec), identity, where)
    return tuple(cast_identity(v, leaf, where) for v, leaf in zip(leaves, state, strict=True))


def call_identity(
    monoid: Any, identity: Callable[..., Any], spec: TreeSpec, state: tuple[Leaf, ...]
) -> Any:
    """What the function makes of the element's shapes, one argument per top-level entry."""
    shapes = [torch.Size(leaf.shape) for leaf in state]
    numbered = template(spec)
    entries = top_level(numbered) or [numbered]
    signature = signature_of(identity)
    given = ", ".join(str(list(shape)) for shape in shapes)
    if signature is not None:
        try:
            signature.bind(*entries)
        except TypeError as error:
            raise ScanTypeError(
                f"the identity of {monoid.name!r} takes {signature}, but is called with the "
                f"element's shapes, one argument per top-level entry of the state ({given}): "
                f"{error}"
            ) from None
    try:
        return identity(*(tree_map(shapes.__getitem__, entry) for entry in entries))
    except AssocScanError:
        raise
    except Exception as error:
        raise MonoidError(
            f"the identity of {monoid.name!r} failed on the element's shapes ({given})"
            f"{user_line(error)}: {type(error).__name__}: {error}"
        ) from error


def cast_identity(value: Any, leaf: Leaf, where: str) -> torch.Tensor:
    if not isinstance(value, (bool, int, float, complex, torch.Tensor)):
        raise ScanTypeError(f"{where} has a leaf of type {type(value).__name__}")
    dtype = leaf.accumulator
    tensor = value if isinstance(value, torch.Tensor) else cast_scalar(value, dtype, where)
    try:
        return tensor.detach().to("cpu", dtype).expand(leaf.shape).clone()
    except RuntimeError:
        raise ScanValueError(
            f"{where} has a leaf of shape {list(tensor.shape)}, "
            f"which does not broadcast to the element shape {list(leaf.shape)}"
        ) from None


def cast_scalar(value: bool | float | complex, dtype: torch.dtype, where: str) -> torch.Tensor:
    """The value in `dtype`; −1 is all ones where that has no sign."""
    if isinstance(value, float) and math.isinf(value):
        value = saturated(value, dtype)
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    try:
        if is_integer and isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            value = int(value)  # of 0.0 torch makes no uint64
        return torch.tensor(value, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        name = str(dtype).removeprefix("torch.")
        raise ScanValueError(f"{where} is {value!r}, which {name} cannot hold") from None


def number_in(value: float | complex, dtype: torch.dtype) -> bool | int | float | complex:
    """A number of an identity as one that beside a tensor of `dtype` is of that dtype."""
    if isinstance(value, float) and math.isinf(value):
        value = saturated(value, dtype)
    if isinstance(value, complex) or dtype.is_floating_point or dtype.is_complex:
        return value
    return bool(value) if dtype == torch.bool else int(value)


def saturated(infinity: float, dtype: torch.dtype) -> float:
    """±inf as the greatest or least value of `dtype`."""
    if dtype.is_floating_point or dtype.is_complex:
        return infinity
    if dtype == torch.bool:
        return infinity > 0
    return torch.iinfo(dtype).max if infinity > 0 else torch.iinfo(dtype).min


def identity_literals(
    identity: tuple[torch.Tensor, ...] | None, state: tuple[Leaf, ...]
) -> tuple[Key, ...] | None:
    """The identity's scalars in component order."""
    if identity is None:
        return None
    literals: list[Key] = []
    for value, leaf in zip(identity, state, strict=True):
        flat = torch.view_as_real(value) if value.is_complex() else value
        literals.extend(encode(v, leaf.scalar) for v in flat.reshape(-1).tolist())
    return tuple(literals)


def is_uniform(value: torch.Tensor, leaf: Leaf) -> bool:
    """Whether all components of a leaf of the identity are the same."""
    literals = identity_literals((value,), (leaf,)) or ()
    parts = 2 if leaf.dtype.is_complex else 1
    return all(set(literals[k::parts]) == {literals[k]} for k in range(parts))
