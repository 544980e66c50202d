"""Digital filters as cascades of second-order sections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable
from ...engines.base.shifted_leaves import carry_shape
from ...errors import ScanValueError
from ...monoids.leaf_checks import check_axis
from ..operands import carry_dtype, checked_offsets, is_readable
from .direct_form_states import final_state
from .lfilter import (
    check_channels,
    check_same_device,
    check_tensors,
    expanded_state,
    filtered,
)
from .rational_filter import Steps, working

__all__ = ["sosfilt"]


@overridable
def sosfilt(
    sos: Tensor,
    x: Tensor,
    axis: int = -1,
    *,
    zi: Tensor | None = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Any:
    """A digital filter in second-order sections: each filters what the one before it gives.

        a₀·y[t] = b₀·x[t] + b₁·x[t−1] + b₂·x[t−2] − a₁·y[t−1] − a₂·y[t−2], of every section

    >>> import torch, assocscan
    >>> sos = torch.tensor([[1.0, 0.0, 0.0, 1.0, -0.5, 0.0], [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
    >>> assocscan.sosfilt(sos, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([1.0000, 1.5000, 0.7500, 0.3750])

    As `scipy.signal.sosfilt`. Narrow filters of high order keep digits in this form that they lose
    as one pair of polynomials. All tensors have one dtype, a float or complex; `zi` of 16-bit
    filters may be float32:

    sos: [sections, 6], each section b₀, b₁, b₂, a₀, a₁, a₂; or [..., sections, 6] with leading
        dimensions that broadcast to the shape of x without `axis`: one filter per channel. a₀ need
        not be 1.
    x: any shape with at least one dimension. x and y are 0 before the first step.
    zi: [sections, ..., 2], the states before the first step as scipy has them for the last axis (of
        the transposed direct form II); it broadcasts to the shape of x without `axis`, with the
        sections before it and 2 behind. The 2 are always the last dimension, whatever `axis` is;
        scipy keeps them at the axis: pass zi.movedim(axis, -1) for a negative axis, else
        zi.movedim(axis + 1, -1). Where the sizes happen to fit, scipy's layout raises no error and
        gives wrong values.
    return_final: also return the states after the last step, the `zi` of a next chunk; 2 is last
        there, too.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; the last
        states then have a leading S, and zi too unless it is the same for all, which is meant where
        both fit.

    Returns y in the shape and dtype of x, or (y, last states), the latter in the full shape of `zi`
    and float32 for 16-bit filters. Differentiable in all of them. 16-bit filters are computed in
    float32 and rounded once, behind the last section.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Numbers: each section is `lfilter`, whose errors are about those of a loop in the same dtype.
    Sooner or later after an infinite x, y is NaN.

    Raises:
        TypeError: an argument is not a tensor of one inexact dtype.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: sos has not six numbers per section, or no section; leading dimensions or `zi`
            do not broadcast; an a₀ is 0, where that can be read without waiting for a GPU.

    Cost per element and section: that of an `lfilter` of second order, which reads and writes one
    number.
    """
    checked_backend(backend, deterministic)
    is_wanted = flag("return_final", return_final)
    check_tensors({"sos": sos}, x, zi)
    check_same_device(x, {"sos": sos}, zi)
    axis = check_axis(axis, x.shape, x.dim(), "x")
    check_sections(sos, x, axis)
    steps = Steps(axis, checked_offsets(offsets, x, axis), False, backend, deterministic)
    dtype, (wide, steps) = x.dtype, working(x, steps, is_wanted or zi is not None)
    sos, y = sos.to(wide), x.to(wide)
    before = None if zi is None else states_of_sections(zi, sos.shape[-2], y, steps)
    after = []
    for k, section in enumerate(sos.unbind(-2)):
        b, a = section[..., :3], section[..., 3:]
        state = None if before is None else before[k]
        entering, y = y, filtered(b, a, y, state, steps)
        if is_wanted:
            b, a = b / a[..., :1], a / a[..., :1]
            after.append(final_state(b, a, entering, y, state, steps))
    y = y.to(dtype)
    if not is_wanted:
        return y
    return y, torch.stack(after, 0 if offsets is None else 1).to(carry_dtype(dtype))


def states_of_sections(zi: Tensor, sections: int, x: Tensor, steps: Steps) -> list[Tensor]:
    """`zi` for every section, each [S…, batch…, 2]."""
    batch = carry_shape(x, steps.axis, steps.offsets)
    at = 0 if steps.offsets is None else 1
    shape = (*batch[:at], sections, *batch[at:], 2)
    meaning = f"the {sections} sections, the shape of x without the axis, and the 2 numbers that a"
    return list(expanded_state(zi, shape, 2, f"{meaning} section remembers", x, steps).unbind(at))


def check_sections(sos: Tensor, x: Tensor, axis: int) -> None:
    """Raise ScanValueError where sections are none, do not broadcast, or divide by 0."""
    if sos.dim() < 2 or sos.shape[-1] != 6 or sos.shape[-2] == 0:
        raise ScanValueError(
            f"sos has shape {list(sos.shape)}, expected [sections, 6] or [..., sections, 6] with "
            "at least one section"
        )
    check_channels("sos", sos, sos[..., 0, 0], x, axis)
    if is_readable(sos) and not bool((sos[..., 3] != 0).all()):
        k = int((sos[..., 3] == 0).nonzero()[0, -1])
        raise ScanValueError(
            f"a₀ of section {k}, sos[..., {k}, 3], is 0, and the section divides by it"
        )
