"""`reset=` of the named functions: a mask of the steps with which a scan starts afresh."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ScanValueError
from ...torch_state import same_shape
from ...wording import fitting_view
from ..argument_errors import check_mask


def aligned_reset(reset: Tensor, x: Tensor, axis: int, of: str = "x") -> Tensor:
    """The mask in the shape of x, of stride 0 where it does not depend on a dimension. Raises where
    it does not fit x, which errors call `of`.

    A mask with the dimensions of x up to the axis, [B, L] of x [B, L, D] and axis 1, is that of all
    that comes behind; any other one broadcasts to x as in torch.

    axis: checked, not negative.
    """
    check_mask("reset", reset, x, of)
    shape = tuple(x.shape)
    leading, behind = shape[: axis + 1], len(shape) - axis - 1
    mask = reset
    # The last dimension is compared first: a mask [L, 1] differs there from [B, L], so that a graph
    # for any sizes does not ask whether B equals L.
    if same_shape(reset.shape[::-1], leading[::-1]):
        mask = reset.reshape(*leading, *[1] * behind)
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ScanValueError(
            f"reset has shape {list(reset.shape)}, expected {list(leading)}, the sizes of {of} up "
            f"to axis {axis}, or one that broadcasts to {list(shape)}"
            f"{fitting_view('reset', reset.shape, shape, axis)}"
        ) from None


def refuse_offsets(offsets: Any) -> None:
    """Raise ScanValueError for offsets beside a reset."""
    if offsets is not None:
        raise ScanValueError(
            "reset and offsets were passed, but only one of them can say where sequences begin; "
            "mark the first step of every sequence in reset too (in reverse the last one), and "
            "leave offsets out"
        )
