"""What a leaf may be: a dense strided tensor, on the device of the others."""

from __future__ import annotations

from typing import Any

import torch

from .errors import ScanTypeError, ScanValueError
from .trees import TreeSpec, leaf_paths


def check_leaves(leaves: list[Any], spec: TreeSpec) -> None:
    """Raise where a leaf of xs is not a dense tensor, or the leaves are on several devices."""
    if not leaves:
        raise ScanValueError("xs is an empty pytree; give at least one tensor")
    for k, t in enumerate(leaves):
        plain = type(t) is torch.Tensor or type(t) is torch.nn.Parameter
        if plain and t.layout is torch.strided and not t.is_nested:
            continue
        check_tensor(leaf_paths(spec, "xs")[k], t)
    device = leaves[0].device
    for k, t in enumerate(leaves[1:], 1):
        if t.device != device:
            first, other = (leaf_paths(spec, "xs")[j] for j in (0, k))
            raise ScanValueError(
                f"{first} is on {device} but {other} is on {t.device}; move them to one device"
            )


def check_tensor(path: str, t: Any, otherwise: str = "") -> None:
    """Raise ScanTypeError where `t` is no dense tensor; `otherwise`: what else it may be."""
    if not isinstance(t, torch.Tensor):
        raise ScanTypeError(f"{path} is {type(t).__name__}, expected a tensor{otherwise}")
    if t.is_nested:
        raise ScanTypeError(
            f"{path} is a nested tensor; pack the sequences along the axis and pass offsets="
        )
    if t.layout is not torch.strided:
        raise ScanTypeError(
            f"{path} has the layout {t.layout}; a scan takes dense strided tensors "
            "(convert it with .to_dense())"
        )
