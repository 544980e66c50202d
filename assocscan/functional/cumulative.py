"""The scans that people know by name, each one call of `associative_scan`.

The monoids that cast are made once, here: a cast is a lift, fused into the kernel, never a pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..api.flags_and_backends import flag
from ..api.tensor_subclasses import handed_over, holds_jagged, overridden, takes_parts
from ..errors import ScanTypeError, ScanValueError
from ..hooks import HOOKS
from ..monoids.call_errors import NOT_PASSED, known_keywords, refuse_call
from ..monoids.combinators import segmented
from ..monoids.leaf_checks import check_axis, check_tensor, require_tensor
from ..monoids.monoid import Monoid
from ..program.dtypes import SCALAR_DTYPES
from ..runtime.native import runner
from ..torch_state import loadable
from .argument_errors import named_scan
from .initial_values import initialised
from .operands import check_axis_of_number, for_dtype
from .packing.resets import aligned_reset, refuse_offsets


@loadable
@takes_parts
class CumulativeExtremum(NamedTuple):
    """What `cummax` and `cummin` return."""

    values: Tensor
    indices: Tensor


@known_keywords
def cumsum(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    dtype: torch.dtype | None = None,
    compensated: bool = False,
    include_initial: bool = False,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Cumulative sum: y[t] = x[0] + … + x[t].

    >>> import torch, assocscan
    >>> assocscan.cumsum(torch.tensor([3, 1, 4]))
    tensor([3, 4, 8])
    >>> assocscan.cumsum(torch.tensor([3, 1, 4]), reverse=True, inclusive=False)
    tensor([5, 4, 0])

    `reverse` sums from the end of the axis, `inclusive=False` leaves x[t] itself out. The result
    has the shape of x. Its dtype is `dtype`, to which x is cast before the sum; by default that
    of x, or int64 where x is bool or integer. 16-bit floats are summed in float32.

    `compensated=True` sums the roundings beside the sum (`ops.compensated_sum`): long sums are then
    as exact as one rounding of the result. Integers are exact anyway. The gradient is the same
    reversed sum with and without it.

    >>> x = torch.tensor([1.0, 1e8, 1.0, -1e8])
    >>> assocscan.cumsum(x)[-1], assocscan.cumsum(x, compensated=True)[-1]
    (tensor(0.), tensor(2.))

    Numbers: float32 is summed in float32, while torch.cumsum on the CPU sums it in float64. Of four
    series of 10⁶ random numbers between 0 and 1, sums up to 5·10⁵, the largest error was about 3 on
    the CPU, and 0.016 with `compensated=True` and in torch.

    `include_initial=True` puts the sum of nothing in front, as in the array API: n + 1 results for
    n elements, and differences of neighbours are x. With `reverse` this extra result is the last
    one. With `offsets` every sequence has one more, an empty one too: sequence s of the
    result begins at offsets[s] + s.

    >>> assocscan.cumsum(torch.tensor([3, 1, 4]), include_initial=True)
    tensor([0, 3, 4, 8])

    `reset` (bool) marks steps with which the sum starts afresh: nothing that comes before such a
    step in scan order reaches it or what follows, in values and gradients, be it NaN. It has the
    dimensions of x up to the axis ([L] for x [L, D] and axis 0, [B, L] for x [B, L, D] and axis 1),
    or else it broadcasts to x. With `reverse` a sum starts at the marked step too, and runs towards
    the front; with `inclusive=False` the result at such a step is the identity, and
    `include_initial` puts the identity in front of the axis only.

    >>> reset = torch.tensor([False, False, True, False])
    >>> assocscan.cumsum(torch.tensor([3, 1, 4, 1]), reset=reset)
    tensor([3, 4, 4, 5])

    `offsets`, int64 or int32 [S + 1], are the boundaries of S sequences packed along the axis;
    they, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a dense tensor, or `dtype` not a torch.dtype that can be summed.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: `include_initial` of an exclusive scan; `reset` does not fit x, or is passed
            beside `offsets`.

    Cost per element: 1 flop (8 if compensated), reads and writes one number; `include_initial`
    copies the result, `reset` is read and costs a selection.
    """
    if unknown or surplus or x is NOT_PASSED:
        refuse_call(cumsum, surplus, unknown, x=x)
    is_usual = dtype is None and reset is None and deterministic is None
    is_usual = is_usual and compensated is False and include_initial is False and keeps_dtype(x)
    if is_usual and not is_dynamo_compiling():
        named = "auto" if backend is None else backend
        found = runner.call(ops.sum, x, axis, reverse, inclusive, None, False, named, offsets)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if (type(x) is not Tensor or reset is not None) and overridden(x, reset):
        engine |= {
            "dtype": dtype, "compensated": compensated, "include_initial": include_initial
        }  # fmt: skip
        return handed_over(cumsum, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    if flag("include_initial", include_initial):
        engine |= {"dtype": dtype, "compensated": compensated}
        return initialised(cumsum, 0, x, axis, reverse, inclusive, **engine)
    if flag("compensated", compensated):
        return _accumulate(
            ops.compensated_sum, _COMPENSATED_AS, x, axis, reverse, inclusive, dtype, engine
        )
    return _accumulate(ops.sum, _SUM_AS, x, axis, reverse, inclusive, dtype, engine)


@known_keywords
def cumprod(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    dtype: torch.dtype | None = None,
    include_initial: bool = False,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Cumulative product: y[t] = x[0] · … · x[t].

    >>> import torch, assocscan
    >>> assocscan.cumprod(torch.tensor([3.0, 1.0, 4.0]))
    tensor([ 3.,  3., 12.])

    Everything else is as in `cumsum` (without `compensated`); `include_initial` puts a 1 in front.
    The gradient divides by nothing: x may hold zeros. On GPUs a 0 before factors whose product
    overflows gives NaN, elsewhere 0.

    Numbers: float32 is multiplied in float32, while torch.cumprod on the CPU multiplies it in
    float64. Over 10⁶ factors near 1 the relative error was 4e-4 on the CPU, and 6e-8 in torch;
    `dtype=torch.float64` is as exact.
    """
    if unknown or surplus or x is NOT_PASSED:
        refuse_call(cumprod, surplus, unknown, x=x)
    is_usual = dtype is None and reset is None and deterministic is None
    is_usual = is_usual and include_initial is False
    if is_usual and keeps_dtype(x) and not is_dynamo_compiling():
        named = "auto" if backend is None else backend
        found = runner.call(ops.prod, x, axis, reverse, inclusive, None, False, named, offsets)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if (type(x) is not Tensor or reset is not None) and overridden(x, reset):
        engine |= {"dtype": dtype, "include_initial": include_initial}
        return handed_over(cumprod, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    if flag("include_initial", include_initial):
        return initialised(cumprod, 1, x, axis, reverse, inclusive, dtype=dtype, **engine)
    return _accumulate(ops.prod, _PROD_AS, x, axis, reverse, inclusive, dtype, engine)


@known_keywords
def cummax(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> CumulativeExtremum:
    """Cumulative maximum y[t] = max(x[0], …, x[t]) and where it was met.

    >>> import torch, assocscan
    >>> values, indices = assocscan.cummax(torch.tensor([2.0, 7.0, 7.0, 1.0]))
    >>> values
    tensor([2., 7., 7., 7.])
    >>> indices
    tensor([0, 1, 2, 2])

    Returns (values, indices) in the shape of x, values in its dtype, indices int64 positions on
    the axis. At ties the index is the one met last and NaN is greater than all else, as in
    torch.cummax. `reverse` scans from the end of the axis; the positions are still counted from
    its start, and the one met last is then the smallest. `reset` (as in `cumsum`) marks steps with
    which the maximum starts afresh. With `offsets` or `reset`, too, positions count from the start
    of the axis, not of the sequence; subtract offsets[s].

    `offsets`, int64 or int32 [S + 1], are the boundaries of S sequences packed along the axis;
    they, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        ValueError: `inclusive=False`: the maximum of nothing has no index; `reset` does not fit x,
            or is passed beside `offsets`.
        TypeError: x is not a dense real tensor.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: 3 comparisons, reads one number, writes one number and one int64.
    """
    if unknown or surplus or x is NOT_PASSED:
        refuse_call(cummax, surplus, unknown, x=x)
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if (type(x) is not Tensor or reset is not None) and overridden(x, reset):
        return handed_over(cummax, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    return _extremum("cummax", ops.argmax, x, axis, reverse, inclusive, engine)


@known_keywords
def cummin(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> CumulativeExtremum:
    """Cumulative minimum y[t] = min(x[0], …, x[t]) and where it was met.

    >>> import torch, assocscan
    >>> assocscan.cummin(torch.tensor([2.0, 7.0, 7.0, 1.0]), reverse=True).values
    tensor([1., 1., 1., 1.])

    Everything else is as in `cummax`; NaN is less than all else.
    """
    if unknown or surplus or x is NOT_PASSED:
        refuse_call(cummin, surplus, unknown, x=x)
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if (type(x) is not Tensor or reset is not None) and overridden(x, reset):
        return handed_over(cummin, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    return _extremum("cummin", ops.argmin, x, axis, reverse, inclusive, engine)


@known_keywords
def logcumsumexp(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Cumulative sum of numbers given by their logarithms: y[t] = log(exp(x[0]) + … + exp(x[t])).

    >>> import torch, assocscan
    >>> assocscan.logcumsumexp(torch.tensor([0.0, 0.0, 0.0])).exp()
    tensor([1., 2., 3.])

    No intermediate overflows, and x = −inf, a probability of zero, has a finite gradient. The
    result has the shape and dtype of x, a float, real or complex; exclusive scans start at −inf.
    `reset` marks steps with which the sum starts afresh, as in `cumsum`.

    `offsets`, int64 or int32 [S + 1], are the boundaries of S sequences packed along the axis;
    they, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a dense tensor of floats.
        ValueError: `reset` does not fit x, or is passed beside `offsets`.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: about 40 flops (one exp, one log1p), reads and writes one number.
    """
    if unknown or surplus or x is NOT_PASSED:
        refuse_call(logcumsumexp, surplus, unknown, x=x)
    is_usual = reset is None and deterministic is None and keeps_dtype(x)
    if is_usual and not is_dynamo_compiling():
        named = "auto" if backend is None else backend
        found = runner.call(ops.logaddexp, x, axis, reverse, inclusive, None, False, named, offsets)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if (type(x) is not Tensor or reset is not None) and overridden(x, reset):
        return handed_over(logcumsumexp, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    require_tensor("x", x)
    if not (x.is_floating_point() or x.is_complex()):
        check_tensor("x", x)
        raise ScanTypeError(f"logcumsumexp takes floats, x is {x.dtype}; cast it, x.float()")
    return _scan(ops.logaddexp, x, axis, reverse, inclusive, engine)


def keeps_dtype(x: Tensor) -> bool:
    """Whether x is a tensor of floats: the scan keeps its dtype, and the C++ runner may know it.

    The functions ask the runner themselves: Dynamo would read a helper on its own where it has
    given up on the function, and cannot read the runner.
    """
    return type(x) is Tensor and x.dtype.is_floating_point


def _sum_or_product(op: Monoid, dtype: torch.dtype) -> Monoid:
    return Monoid(
        op.combine,
        identity=op.identity,
        name=f"{op.name} in {dtype}",
        lift=lambda x: x.to(dtype),
    )


def _compensated(dtype: torch.dtype) -> Monoid:
    return Monoid(
        ops.compensated_sum.combine,
        identity=ops.compensated_sum.identity,
        name=f"{ops.compensated_sum.name} in {dtype}",
        lift=lambda x: (x.to(dtype), torch.zeros_like(x, dtype=dtype)),
        lower=ops.compensated_sum.lower,
    )


_SUM_AS = {dtype: _sum_or_product(ops.sum, dtype) for dtype in SCALAR_DTYPES}
# Sums of integers have no roundings.
_COMPENSATED_AS = {
    dtype: _compensated(dtype) if dtype.is_floating_point or dtype.is_complex else _SUM_AS[dtype]
    for dtype in SCALAR_DTYPES
}
# Integers with which torch can do hardly anything but convert them; the signed ones of their size.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_PROD_AS = {dtype: _sum_or_product(ops.prod, dtype) for dtype in SCALAR_DTYPES}


def _accumulate(
    op: Monoid,
    casting: dict[torch.dtype, Monoid],
    x: Tensor,
    axis: int,
    reverse: bool,
    inclusive: bool,
    dtype: torch.dtype | None,
    engine: dict[str, Any],
) -> Tensor:
    require_tensor("x", x)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    if x.dtype in SIGNED and dtype in casting:
        x = x.to(dtype)
    if dtype is x.dtype and (op is not ops.compensated_sum or keeps_dtype(x) or x.is_complex()):
        return _scan(op, x, axis, reverse, inclusive, engine)
    return _scan(for_dtype(casting, dtype), x, axis, reverse, inclusive, engine)


def _scan(
    op: Monoid, x: Tensor, axis: int, reverse: bool, inclusive: bool, engine: dict[str, Any]
) -> Tensor:
    """One leaf in, one out; a 0-dimensional x is an axis of length 1, as in torch."""
    if x.ndim == 0:
        check_axis_of_number(axis)
        return _scan(op, x[None], axis, reverse, inclusive, engine)[0]
    named, op, xs, axis, engine = with_reset({"xs": "x"}, op, x, x, axis, engine)
    y: Tensor = named_scan(named, op, xs, axis, reverse, inclusive, **engine)
    return y


def with_reset(
    names: dict[str, str], op: Monoid, xs: Any, x: Tensor, axis: int, engine: dict[str, Any]
) -> tuple[dict[str, str], Monoid, Any, int, dict[str, Any]]:
    """The names, operator, inputs, axis and options of a scan of `xs` that starts afresh where the
    option `reset` says so; without the option, as they are."""
    reset = engine["reset"]
    engine = {name: value for name, value in engine.items() if name != "reset"}
    if reset is None:
        return names, op, xs, axis, engine
    refuse_offsets(engine["offsets"])
    check_tensor("x", x)
    axis = check_axis(axis, x.shape, x.ndim, "x")
    return (
        names | {"xs[1]": "reset"},
        segmented(op),
        (xs, aligned_reset(reset, x, axis)),
        axis,
        engine,
    )


def _extremum(
    name: str,
    op: Monoid,
    x: Tensor,
    axis: int,
    reverse: bool,
    inclusive: bool,
    engine: dict[str, Any],
) -> CumulativeExtremum:
    if is_dynamo_compiling() and holds_jagged(x):
        function = cummax if op is ops.argmax else cummin
        arguments = x, axis, reverse, inclusive
        return HOOKS.uncompiled_jagged(function, arguments, engine)  # type: ignore[no-any-return]
    if not flag("inclusive", inclusive):
        raise ScanValueError(f"{name} has no exclusive form: the extremum of nothing has no index")
    check_tensor("x", x)
    if x.is_complex():
        raise ScanTypeError(f"{name} takes real numbers, x is {x.dtype}, which has no order")
    if x.ndim == 0:
        check_axis_of_number(axis)
        values, indices = _extremum(name, op, x[None], axis, reverse, inclusive, engine)
        return CumulativeExtremum(values[0], indices[0])
    axis = check_axis(axis, x.shape, x.ndim, "x")
    signed = SIGNED.get(x.dtype)
    if signed is not None:  # with the first bit changed, signed numbers are in the same order
        least = torch.iinfo(signed).min
        values, indices = _extremum(
            name, op, x.view(signed) ^ least, axis, reverse, inclusive, engine
        )
        return CumulativeExtremum((values ^ least).view(x.dtype), indices)
    xs: Any = x, _positions(x, axis)
    named, op, xs, axis, engine = with_reset({"xs": "x"}, op, xs, x, axis, engine)
    results = named_scan(named, op, xs, axis, reverse, **engine)
    return CumulativeExtremum(*results)


def _positions(x: Tensor, axis: int) -> Tensor:
    """0, 1, … along the axis, of size 1 along the others."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return torch.arange(x.shape[axis], device=x.device).view(shape)
