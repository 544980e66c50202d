"""The scans that people know by name, each one call of `associative_scan`.

The monoids that cast are made once, here: a cast is a lift, fused into the kernel, never a pass.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..api.argument_names import flag, known_keywords, refuse_unknown
from ..api.associative_scan import associative_scan
from ..api.tensor_subclasses import handed_over, overridden, takes_parts
from ..caching.bounded import BoundedCache
from ..engines.base.persistent_tensors import make_lasting
from ..errors import AssocScanError, ScanTypeError, ScanValueError
from ..monoids.leaf_checks import check_axis, check_tensor, require_tensor
from ..monoids.monoid import Monoid
from ..program.dtypes import SCALAR_DTYPES
from ..runtime.native import runner
from ..torch_state import COMPILED, needs_dispatcher
from ..wording import shown
from .argument_errors import renamed
from .operands import Number, as_tensor, carry_dtype, expanded, recurrence_dtype


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
    *,
    dtype: torch.dtype | None = None,
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

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a dense tensor, or `dtype` not a torch.dtype that can be summed.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: 1 flop, reads and writes one number.
    """
    is_usual = dtype is None and deterministic is None and not unknown and keeps_dtype(x)
    if is_usual and not is_dynamo_compiling() and runner.call is not None:
        named = "auto" if backend is None else backend
        found = runner.call(ops.sum, x, axis, reverse, inclusive, None, False, named)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    if unknown:
        refuse_unknown(cumsum, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if type(x) is not Tensor and overridden(x):
        return handed_over(cumsum, x, axis, reverse, inclusive, dtype=dtype, **engine)  # type: ignore[no-any-return]
    return _accumulate(ops.sum, _SUM_AS, x, axis, reverse, inclusive, dtype, engine)


@known_keywords
def cumprod(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Cumulative product: y[t] = x[0] · … · x[t].

    >>> import torch, assocscan
    >>> assocscan.cumprod(torch.tensor([3.0, 1.0, 4.0]))
    tensor([ 3.,  3., 12.])

    Everything else is as in `cumsum`. The gradient divides by nothing: x may hold zeros.
    """
    is_usual = dtype is None and deterministic is None and not unknown and keeps_dtype(x)
    if is_usual and not is_dynamo_compiling() and runner.call is not None:
        named = "auto" if backend is None else backend
        found = runner.call(ops.prod, x, axis, reverse, inclusive, None, False, named)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    if unknown:
        refuse_unknown(cumprod, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if type(x) is not Tensor and overridden(x):
        return handed_over(cumprod, x, axis, reverse, inclusive, dtype=dtype, **engine)  # type: ignore[no-any-return]
    return _accumulate(ops.prod, _PROD_AS, x, axis, reverse, inclusive, dtype, engine)


@known_keywords
def cummax(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *,
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
    its start, and the one met last is then the smallest.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        ValueError: `inclusive=False`: the maximum of nothing has no index.
        TypeError: x is not a dense real tensor.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: 3 comparisons, reads one number, writes one number and one int64.
    """
    if unknown:
        refuse_unknown(cummax, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if type(x) is not Tensor and overridden(x):
        return handed_over(cummax, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    return _extremum("cummax", ops.argmax, x, axis, reverse, inclusive, engine)


@known_keywords
def cummin(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *,
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
    if unknown:
        refuse_unknown(cummin, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if type(x) is not Tensor and overridden(x):
        return handed_over(cummin, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    return _extremum("cummin", ops.argmin, x, axis, reverse, inclusive, engine)


@known_keywords
def logcumsumexp(
    x: Tensor,
    axis: int = -1,
    reverse: bool = False,
    inclusive: bool = True,
    *,
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

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a dense tensor of floats.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: about 40 flops (one exp, one log1p), reads and writes one number.
    """
    is_usual = deterministic is None and not unknown and keeps_dtype(x)
    if is_usual and not is_dynamo_compiling() and runner.call is not None:
        named = "auto" if backend is None else backend
        found = runner.call(ops.logaddexp, x, axis, reverse, inclusive, None, False, named)
        if found is not runner.MISS:
            return found  # type: ignore[no-any-return]
    if unknown:
        refuse_unknown(logcumsumexp, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if type(x) is not Tensor and overridden(x):
        return handed_over(logcumsumexp, x, axis, reverse, inclusive, **engine)  # type: ignore[no-any-return]
    require_tensor("x", x)
    if not (x.is_floating_point() or x.is_complex()):
        check_tensor("x", x)
        raise ScanTypeError(f"logcumsumexp takes floats, x is {x.dtype}; cast it, x.float()")
    return _scan(ops.logaddexp, x, axis, reverse, inclusive, engine)


@overload
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: Literal[False] = False,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor: ...
@overload
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    *,
    return_final: Literal[True],
    backend: str | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: bool = False,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@known_keywords
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: bool = False,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """First-order linear recurrence: h[t] = a[t] · h[t−1] + b[t], with h[−1] = init or 0.

    >>> import torch, assocscan
    >>> b = torch.tensor([8.0, 0.0, 0.0, 1.0])
    >>> assocscan.linear_recurrence(0.5, b, axis=0)
    tensor([8., 4., 2., 2.])

    A sequence in pieces, each taking the state that the one before left:

    >>> head, h = assocscan.linear_recurrence(0.5, b[:2], axis=0, return_final=True)
    >>> assocscan.linear_recurrence(0.5, b[2:], init=h, axis=0)
    tensor([2., 2.])

    `a` is a number, or a tensor that broadcasts to the shape of b, the axis included: for b
    [B, L, D] a decay [D], a gate [B, L, 1], or all of [B, L, D]; it is read in place, never
    expanded in memory. `init` broadcasts to the shape of b without the axis. `reverse` runs from
    the end: h[t] = a[t] · h[t+1] + b[t].

    The result has the shape of b, and the dtype to which a, b and init promote (a float32 init
    leaves 16-bit floats what they are). With `return_final` also the last state, in the shape of
    b without the axis, float32 for 16-bit floats. Differentiable in a, b and init, also through
    the last state; real or complex.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: b is not a dense tensor, a or init neither tensor nor number.
        ValueError: a does not broadcast to b, init not to the last state.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: 3 flops, reads a and b, writes h. `ops.affine` gives the cumulative product
    of a as well.
    """
    is_usual = deterministic is None and not unknown
    if is_usual and not is_dynamo_compiling() and runner.call is not None:
        carry = None if init is None else _known_carry(init)
        known: Any = runner.MISS
        if init is None or carry is not None:
            named = "auto" if backend is None else backend
            known = runner.call(
                _RECURRENCE, (a, b), axis, reverse, True, carry, return_final, named
            )
        if known is not runner.MISS:
            return (known[0], known[1][1]) if return_final else known
    if unknown:
        refuse_unknown(linear_recurrence, unknown)
    engine: Any = {"backend": backend, "deterministic": deterministic}
    if (type(b) is not Tensor or type(a) is not Tensor or init is not None) and overridden(
        a, b, init
    ):
        handed: Any = handed_over(
            linear_recurrence, a, b, init, axis, reverse, return_final, **engine
        )
        return handed  # type: ignore[no-any-return]
    if torch.compiler.is_dynamo_compiling():
        found: Any = COMPILED["recurrence"](
            {
                "a": a, "b": b, "init": init, "axis": axis, "reverse": reverse,
                "return_final": return_final, **engine,
            }
        )  # fmt: skip
        return found  # type: ignore[no-any-return]
    try:
        result = _recur(a, b, init, axis, reverse, return_final=return_final, **engine)
    except AssocScanError as error:
        raise renamed(error, {"xs[0]": "a", "xs": "b", "init": "init"}, "b") from None
    if return_final:
        return result[0], result[1][1]
    h: Tensor = result
    return h


def _recur(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None,
    axis: int,
    reverse: bool,
    **options: Any,
) -> Any:
    """h, or (h, the last state) with `return_final`, one of the options of `associative_scan`."""
    require_tensor("b", b)
    if init is None and _is_like(a, b):  # nothing to convert or to broadcast
        return associative_scan(_RECURRENCE, (a, b), axis, reverse, **options)
    check_tensor("b", b)
    dtype = recurrence_dtype(a, b, init)
    a = as_tensor(a, dtype, b.device)
    if a.shape != b.shape:
        a = expanded(a, b, "a", "b")
    carry = None
    if init is not None:
        start = as_tensor(init, dtype, b.device).to(carry_dtype(dtype))
        carry = _carry(start)
    op = _RECURRENCE if a.dtype == b.dtype == dtype else _for_dtype(_RECURRENCE_AS, dtype)
    return associative_scan(op, (a, b), axis, reverse, init=carry, **options)


def _carry(start: Tensor) -> tuple[Tensor, Tensor]:
    """The state (1, start) that enters a recurrence; the ones of ordinary tensors are kept."""
    is_ordinary = type(start) is Tensor or type(start) is torch.nn.Parameter
    if is_dynamo_compiling() or needs_dispatcher() or not is_ordinary:
        one = torch.ones((), dtype=start.dtype, device=start.device)
        return one.expand_as(start), start
    key = start.shape, start.dtype, start.device
    ones = _ONES.get(key)
    if ones is None:
        with torch.inference_mode(False):
            one = make_lasting(lambda: torch.ones((), dtype=start.dtype, device=start.device),
                               start.device)  # fmt: skip
            ones = _ONES.keep(key, one.expand(start.shape))
    return ones, start


def _known_carry(start: Tensor | Number) -> tuple[Tensor, Tensor] | None:
    """`_carry` of a tensor like one before; None for others."""
    if type(start) is not Tensor or start.is_nested:
        return None
    ones = _ONES.get((start.shape, start.dtype, start.device))
    return None if ones is None else (ones, start)


def _is_like(a: Tensor | Number, b: Tensor) -> bool:
    """Whether a and b are tensors of one shape and one dtype that torch computes in."""
    return (
        isinstance(a, Tensor)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.dtype != torch.complex32
    )


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


def _recurrence(dtype: torch.dtype | None = None) -> Monoid:
    return Monoid(
        ops.affine.combine,
        identity=ops.affine.identity,
        name="linear_recurrence" + (f" in {dtype}" if dtype else ""),
        lift=(lambda a, b: (a.to(dtype), b.to(dtype))) if dtype else None,
        lower=lambda state: state[1],
    )


_ONES: BoundedCache[Any, Tensor] = BoundedCache(1024)  # expanded; each holds one number
_SUM_AS = {dtype: _sum_or_product(ops.sum, dtype) for dtype in SCALAR_DTYPES}
_PROD_AS = {dtype: _sum_or_product(ops.prod, dtype) for dtype in SCALAR_DTYPES}
_RECURRENCE = _recurrence()
_RECURRENCE_AS = {dtype: _recurrence(dtype) for dtype in SCALAR_DTYPES}


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
    if dtype == x.dtype:
        return _scan(op, x, axis, reverse, inclusive, engine)
    return _scan(_for_dtype(casting, dtype), x, axis, reverse, inclusive, engine)


def _for_dtype(casting: dict[torch.dtype, Monoid], dtype: object) -> Monoid:
    if isinstance(dtype, torch.dtype) and dtype in casting:
        return casting[dtype]
    expected = ", ".join(str(d).removeprefix("torch.") for d in casting)
    raise ScanTypeError(f"cannot scan in dtype {shown(dtype)}; expected one of {expected}")


def _scan(
    op: Monoid, x: Tensor, axis: int, reverse: bool, inclusive: bool, engine: dict[str, Any]
) -> Tensor:
    """One leaf in, one out; a 0-dimensional x is an axis of length 1, as in torch."""
    if x.ndim == 0:
        return _scan(op, x[None], axis, reverse, inclusive, engine)[0]
    try:
        y: Tensor = associative_scan(op, x, axis, reverse, inclusive, **engine)
    except AssocScanError as error:
        raise renamed(error, {"xs": "x"}) from None
    return y


def _extremum(
    name: str,
    op: Monoid,
    x: Tensor,
    axis: int,
    reverse: bool,
    inclusive: bool,
    engine: dict[str, Any],
) -> CumulativeExtremum:
    if not flag("inclusive", inclusive):
        raise ScanValueError(f"{name} has no exclusive form: the extremum of nothing has no index")
    check_tensor("x", x)
    if x.is_complex():
        raise ScanTypeError(f"{name} takes real numbers, x is {x.dtype}, which has no order")
    if x.ndim == 0:
        values, indices = _extremum(name, op, x[None], axis, reverse, inclusive, engine)
        return CumulativeExtremum(values[0], indices[0])
    axis = check_axis(axis, x.shape, x.ndim, "x")
    try:
        results = associative_scan(op, (x, _positions(x, axis)), axis, reverse, **engine)
    except AssocScanError as error:
        raise renamed(error, {"xs": "x"}) from None
    return CumulativeExtremum(*results)


def _positions(x: Tensor, axis: int) -> Tensor:
    """0, 1, … along the axis, of size 1 along the others."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return torch.arange(x.shape[axis], device=x.device).view(shape)
