"""Results of an inclusive scan with the identity in front of them, as in the array API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api.flags_and_backends import flag
from ..api.tensor_subclasses import holds_jagged
from ..engines.base.shifted_leaves import sequence_of_steps
from ..errors import ScanValueError
from ..hooks import HOOKS
from ..monoids.leaf_checks import check_axis, require_tensor
from ..torch_state import in_own_dtype
from .operands import check_axis_of_number, checked_offsets


def initialised(
    scan: Callable[..., Tensor],
    identity: float,
    x: Tensor,
    axis: int,
    reverse: bool,
    inclusive: bool,
    **options: Any,
) -> Tensor:
    """The inclusive scan of x with the identity in front. The scan is called with these options."""
    check_inclusive(scan.__name__, flag("inclusive", inclusive))
    require_tensor("x", x)
    if torch.compiler.is_dynamo_compiling() and holds_jagged(x):
        options["include_initial"] = True
        arguments = x, axis, reverse, inclusive
        return HOOKS.uncompiled_jagged(scan, arguments, options)  # type: ignore[no-any-return]
    if x.ndim == 0:
        check_axis_of_number(axis)
        x, axis = x[None], 0
    axis = check_axis(axis, x.shape, x.ndim, "x")
    options["offsets"] = checked_offsets(options["offsets"], x, axis)
    y = scan(x, axis, reverse, **options)
    return with_initial(y, identity, axis, flag("reverse", reverse), options["offsets"])


def check_inclusive(name: str, inclusive: bool) -> None:
    """Raise ScanValueError for an exclusive scan: it begins with the identity anyway."""
    if not inclusive:
        raise ScanValueError(
            f"{name}(include_initial=True) is inclusive: its first result is the identity, and one "
            "for every element follows. Leave out inclusive=False, whose results are all of these "
            "but the last"
        )


@in_own_dtype
def with_initial(
    y: Tensor, initial: float, axis: int, reverse: bool, offsets: Tensor | None
) -> Tensor:
    """y with one number more for each sequence, before its first result in scan order.

    offsets: checked, as `checked_offsets` returns them. Sequence s begins at offsets[s] + s.
    """
    length = y.shape[axis]
    if offsets is None:
        first = y.new_full((*y.shape[:axis], 1, *y.shape[axis + 1 :]), initial)
        return torch.cat([y, first] if reverse else [first, y], axis)
    offsets = offsets.to(y.device)
    count = offsets.shape[0] - 1
    place = torch.arange(length, device=y.device) + sequence_of_steps(offsets, length)
    whole = y.new_full((*y.shape[:axis], length + count, *y.shape[axis + 1 :]), initial)
    return whole.index_copy(axis, place if reverse else place + 1, y)
