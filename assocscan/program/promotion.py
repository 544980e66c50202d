"""The dtypes that floats of several dtypes are combined in."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from .operator import Leaf


def promoted(leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    """The leaves of a state: floats of several dtypes are combined in the widest of them.

    16-bit floats stay, since they are combined in float32 anyway.
    """
    widest = promoted_float(leaf.dtype for leaf in leaves)
    return tuple(
        Leaf(widest, leaf.shape)
        if widest is not None
        and leaf.dtype.is_floating_point
        and leaf.accumulator != Leaf(widest).accumulator
        else leaf
        for leaf in leaves
    )


def promoted_float(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The dtype that torch promotes the real floats among these to; None where there are none."""
    floats = [dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floats) if floats else None
