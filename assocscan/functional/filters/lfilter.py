"""Digital filters with constant coefficients: `lfilter`, its gradient and its states."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable
from ...engines.base.shifted_leaves import carry_shape
from ...errors import ScanTypeError, ScanValueError
from ...monoids.leaf_checks import check_axis, check_tensor
from ...wording import is_of_numpy, kind_of
from ..argument_errors import check_devices
from ..operands import carry_dtype, checked_offsets, is_readable
from .direct_form_states import final_state, impulses
from .filter_operation import rational
from .rational_filter import Steps, along, moving_sum, working

__all__ = ["lfilter"]


@overridable
def lfilter(
    b: Tensor,
    a: Tensor,
    x: Tensor,
    axis: int = -1,
    *,
    zi: Tensor | None = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Any:
    """A digital filter: a[0]·y[t] = Σ b[k]·x[t−k] − Σ a[k]·y[t−k], k from 1 in the second sum.

    >>> import torch, assocscan
    >>> a, b = torch.tensor([1.0, -0.5]), torch.tensor([1.0, 1.0])
    >>> assocscan.lfilter(b, a, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([1.0000, 1.5000, 0.7500, 0.3750])

    As `scipy.signal.lfilter`. All tensors have one dtype, a float or complex; `zi` of
    16-bit filters may be float32:

    b, a: [n] and [m], or [..., n] and [..., m] with leading dimensions that broadcast to the shape
        of x without `axis`: one filter per channel.
    x: any shape with at least one dimension. x and y are 0 before the first step.
    zi: [..., K] with K = max(n, m) − 1, the state before the first step as scipy has it (of the
        transposed direct form II); it broadcasts to the shape of x without `axis`, with K behind.
        K is always the last dimension, whatever `axis` is; scipy keeps it at `axis`: pass
        zi.movedim(axis, -1). Where `axis` is not the last dimension and the sizes happen to fit,
        scipy's layout raises no error and gives wrong values.
    return_final: also return the state after the last step, which is the `zi` of a next chunk. It
        has K last, too: scipy's is state.movedim(-1, axis). scipy returns a state wherever `zi` is
        given; here it is asked for.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; the last
        state then has a leading S, and zi too unless it is the same for all, which is meant where
        both fit.

    Returns y in the shape and dtype of x, or (y, last state), the latter in the full shape of `zi`
    and float32 for 16-bit filters. Differentiable in all of them.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`. Where a has
    one entry nothing is scanned, and any backend will do.

    Numbers: the filter is scanned in the form of a normalized lattice, whose powers do not grow
    where the filter is stable. So its errors are about those of a loop in the same dtype. Narrow
    filters of high order lose digits in a loop too: design and filter them in float64, or as
    second-order sections. On CPUs the states of float32 filters are float64, and y has a smaller
    error than a loop's. On GPUs they are float32: a filter that rings for long far from frequency 0
    changes its amplitude by up to 5e-8 per step, and several poles on the unit circle lose more.
    Sooner or later after an infinite x, y is NaN.

    Raises:
        TypeError: an argument is not a tensor of one inexact dtype.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: b or a has no dimension or no entries; leading dimensions or `zi` do not
            broadcast; a[0] is 0, where that can be read without waiting for a GPU.

    Cost per element: for order k = m − 1, about 2k³ flops where elements are combined in a tree and
    2k² where they are taken one by one; reads x, writes y. On CPUs long series of up to 7 channels
    take 2k² + 2k and read x twice. On GPUs filters of order 5 and more (4 in float64, 3 of complex
    numbers) take about 4k² and read x twice; their first call compiles for up to half a minute. On
    CPUs the first call and its gradient compile for seconds, the longer the higher the order
    (docs/limits.md has the times); `sosfilt` of any order compiles as order 2 does. A b that is
    longer than a costs 2n flops in torch operations.

    Source: A. H. Gray, J. D. Markel, "A normalized digital filter structure", IEEE Transactions on
    Acoustics, Speech, and Signal Processing 23(3), 1975.
    """
    checked_backend(backend, deterministic)
    is_wanted = flag("return_final", return_final)
    check_arguments(b, a, x, zi)
    axis = check_axis(axis, x.shape, x.dim(), "x")
    check_coefficients(b, a, x, axis)
    steps = Steps(axis, checked_offsets(offsets, x, axis), False, backend, deterministic)
    dtype, (wide, steps) = x.dtype, working(x, steps, is_wanted or zi is not None)
    b, a, x = (t.to(wide) for t in (b, a, x))
    memory = max(b.shape[-1], a.shape[-1]) - 1
    state = None if zi is None else initial(zi, memory, x, steps)
    y = filtered(b, a, x, state, steps)
    if not is_wanted:
        return y.to(dtype)
    b, a = (pad(t, (0, memory + 1 - t.shape[-1])) / a[..., :1] for t in (b, a))
    return y.to(dtype), final_state(b, a, x, y, state, steps).to(carry_dtype(dtype))


def filtered(b: Tensor, a: Tensor, x: Tensor, state: Tensor | None, steps: Steps) -> Tensor:
    """The response to x from a state. The state enters beside Σ b[k]·x[t−k], as in a loop: the
    responses to x and to the state may each be far larger than their sum."""
    first = along(a[..., 0], x, steps.axis)
    order, has_state = a.shape[-1] - 1, state is not None and state.shape[-1] > 0
    if order > 0 and b.shape[-1] <= order + 1:
        entering = first * impulses(state, x, steps) if state is not None and has_state else None
        return rational(b, a, x, steps, entering)
    total = moving_sum(b, x, steps)
    if state is not None and has_state:
        total = total + first * impulses(state, x, steps)
    return total / first if order == 0 else rational(None, a, total, steps)


def initial(zi: Tensor, memory: int, x: Tensor, steps: Steps) -> Tensor:
    """`zi` for every sequence and channel [S…, batch…, K]."""
    shape = (*carry_shape(x, steps.axis, steps.offsets), memory)
    meaning = f"the shape of x without the axis, and behind it the {memory} numbers that the filter"
    return expanded_state(zi, shape, 1, f"{meaning} remembers", x, steps)


def expanded_state(
    zi: Tensor, shape: tuple[int, ...], least: int, meaning: str, x: Tensor, steps: Steps
) -> Tensor:
    """`zi` in the dtype of x and this shape, which errors explain by its `meaning`. It has at least
    so many dimensions, of which the last one is not broadcast."""
    try:
        if zi.dim() < least or zi.shape[-1] != shape[-1]:
            raise RuntimeError
        return zi.to(x.dtype).expand(shape)
    except RuntimeError:
        raise ScanValueError(
            f"zi has shape {list(zi.shape)}, which does not broadcast to {list(shape)}: {meaning}"
            f"{where_scipy_has_them(zi, shape, x, steps)}"
        ) from None


def where_scipy_has_them(zi: Tensor, shape: tuple[int, ...], x: Tensor, steps: Steps) -> str:
    """The end of the message for a `zi` whose numbers lie at the axis, as in scipy; else empty."""
    axis = steps.axis - x.dim()  # from the end: that of sosfilt has one dimension more in front
    if steps.offsets is not None or zi.dim() != len(shape) or zi.shape[axis] != shape[-1]:
        return ""
    moved = zi.movedim(axis, -1).shape
    if any(n not in (1, size) for n, size in zip(moved, shape, strict=True)):
        return ""
    return f", always last; scipy keeps them at the axis: pass zi.movedim({axis}, -1)"


def check_arguments(b: Tensor, a: Tensor, x: Tensor, zi: Tensor | None) -> None:
    check_tensors({"b": b, "a": a}, x, zi)
    for name, t in (("b", b), ("a", a)):
        if t.dim() == 0 or t.shape[-1] == 0:
            raise ScanValueError(
                f"{name} has shape {list(t.shape)}, expected [n] or [..., n] with n ≥ 1"
            )
    check_same_device(x, {"b": b, "a": a}, zi)


def check_tensors(coefficients: dict[str, Tensor], x: Tensor, zi: Tensor | None) -> None:
    """Raise ScanTypeError unless all are tensors of one inexact dtype; zi may have a carry's."""
    refuse_lists(coefficients, x)
    named = {**coefficients, "x": x} if zi is None else {**coefficients, "x": x, "zi": zi}
    for name, t in named.items():
        check_tensor(name, t)
        if not (t.is_floating_point() or t.is_complex()):
            raise ScanTypeError(f"{name} has dtype {t.dtype}, expected a float: {name}.float()")
    for name, t in named.items():
        expected = carry_dtype(x.dtype) if name == "zi" else x.dtype
        if t.dtype not in (x.dtype, expected):
            raise ScanTypeError(
                f"{name} has dtype {t.dtype}, but x has {x.dtype}; pass {name}.to(x.dtype), or "
                f"x in {t.dtype}"
            )


def refuse_lists(coefficients: dict[str, Any], x: Tensor) -> None:
    """Raise ScanTypeError for coefficients in lists or arrays, or single numbers, with the tensors
    to pass."""
    lists = {
        name: f"as_tensor({name}" if is_of_numpy(given)
        else f"tensor({name}" if isinstance(given, (list, tuple)) else f"tensor([{given}]"
        for name, given in coefficients.items()
        if isinstance(given, (list, tuple, int, float, complex)) or is_of_numpy(given)
    }  # fmt: skip
    if not lists or not isinstance(x, Tensor):
        return
    kinds = [kind_of(coefficients[name]) for name in lists]
    seen = " and ".join(f"{name} is {kind}" for name, kind in zip(lists, kinds, strict=True))
    device = "" if x.device.type == "cpu" else ", device=x.device"
    calls = [f"torch.{call}, dtype=x.dtype{device})" for call in lists.values()]
    expected = "a tensor" if len(lists) == 1 else "tensors"
    raise ScanTypeError(f"{seen}, expected {expected}: {', '.join(calls)}")


def check_same_device(x: Tensor, coefficients: dict[str, Tensor], zi: Tensor | None) -> None:
    check_devices("x", x, **coefficients, **({} if zi is None else {"zi": zi}))


def check_channels(name: str, t: Tensor, number: Tensor, x: Tensor, axis: int) -> None:
    """Raise ScanValueError where filters t, of which `number` is one number each, do not broadcast
    to the channels."""
    batch = (*x.shape[:axis], *x.shape[axis + 1 :])
    try:
        number.expand(batch)
    except RuntimeError:
        raise ScanValueError(
            f"{name} has shape {list(t.shape)}, whose leading dimensions do not broadcast to "
            f"{list(batch)} (the shape of x without the axis)"
        ) from None


def check_coefficients(b: Tensor, a: Tensor, x: Tensor, axis: int) -> None:
    """Raise ScanValueError where filters do not broadcast to the channels, or divide by 0."""
    for name, t in (("b", b), ("a", a)):
        check_channels(name, t, t[..., 0], x, axis)
    if is_readable(a) and bool((a[..., 0] == 0).any()):
        raise ScanValueError(
            "a[0] is 0, and the filter divides by it; leave out leading zeros of a, which delay y"
        )
