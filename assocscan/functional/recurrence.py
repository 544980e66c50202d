"""`linear_recurrence`: h[t] = a[t] · h[t−1] + b[t], one call of `associative_scan`."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..api.flags_and_backends import flag
from ..api.tensor_subclasses import handed_over, overridden
from ..caching.bounded import BoundedCache
from ..engines.base.persistent_tensors import make_lasting
from ..errors import ScanTypeError
from ..hooks import HOOKS
from ..monoids.call_errors import NOT_PASSED, known_keywords, refuse_call
from ..monoids.combinators import segmented
from ..monoids.leaf_checks import check_axis, check_tensor, require_tensor
from ..monoids.leaf_names import LeafNames
from ..monoids.monoid import Monoid
from ..program.dtypes import SCALAR_DTYPES
from ..runtime.native import runner
from ..torch_state import needs_dispatcher, same_shape
from .argument_errors import named_reduce, named_scan
from .operands import (
    Number,
    as_tensor,
    carry_dtype,
    expanded,
    for_dtype,
    multiplier,
    recurrence_dtype,
)
from .packing.resets import aligned_reset, refuse_offsets

ReturnFinal = bool | Literal["only"]
ONLY = ', or "only" for the last state alone'


@overload
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: Literal[False] = False,
    *,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
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
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
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
    *,
    return_final: Literal["only"],
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
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
    return_final: ReturnFinal = False,
    *,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
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
    return_final: ReturnFinal = False,
    *surplus: NoReturn,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
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

    The last state alone; nothing else is written:

    >>> assocscan.linear_recurrence(0.5, b, axis=0, return_final="only")
    tensor(2.)

    a: a number, or a tensor that broadcasts to the shape of b, the axis included: for b [B, L, D] a
        decay [D], a gate [B, L, 1], or all of [B, L, D]. Shapes are aligned from the last
        dimension, as torch broadcasts: for b [L, L] an a of [L] is one number per channel, not per
        step. It is read in place, never expanded in memory. a[t] leads from h[t−1] to h[t];
        without init the first one is not read, so that it may be NaN or infinite. A
        number, or a tensor without dimensions, is not rounded to 16 bits beside a b of 16 bits.
    b: a tensor of any shape with the axis, as [B, L, D], and of any dtype.
    init: a number, or a tensor that broadcasts to the shape of b without the axis, as [B, D].
    reverse: run from the end: h[t] = a[t] · h[t+1] + b[t].
    return_final: True: also return the last state; "only": it alone.
    reset: bool, True at the steps with which the recurrence starts afresh: there h[t] = b[t],
        whatever a[t] and the state before are, be they NaN. For b [B, L, D] it is [B, L], [L, 1]
        for the same steps in all rows, or another shape that broadcasts to b, as [L, B, 1] to b
        [L, B, D] where the axis is 0. init enters the first step unless that is marked. With
        `reverse` the last step of an episode is marked. Not together with offsets.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis. For b
        [B, L, D] the last states are [S, B, D]; init is [S, B, D], or [B, D] for all sequences
        alike (never [S, D], even if S equals B). For b [L, D] the last states are [S, D], and init
        is [S, D] or [D].

    An exclusive scan gives the state before each step, h[t−1]:
    `associative_scan(ops.affine, (a, b), axis, inclusive=False, init=(1.0, init))[1]`.

    >>> reset = torch.tensor([False, False, True, False])
    >>> assocscan.linear_recurrence(0.5, b, axis=0, reset=reset)
    tensor([8., 4., 0., 1.])

    The result has the shape of b, and the dtype to which a, b and init promote (a float32 init
    beside 16-bit a and b does not make the result float32). The last state has the shape of b
    without the axis, and is float32 for 16-bit floats. Differentiable in a, b and init, also
    through the last state; real or complex. For the gradient of a the forward pass of "only" writes
    the states after all.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: b is not a dense tensor, a or init neither tensor nor number, `return_final`
            neither a bool nor "only".
        ValueError: a or reset do not broadcast to b, init not to the last state; reset beside
            offsets.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: 3 flops, reads a and b, writes h unless "only". `ops.affine` gives the product
    of a as well.
    """
    if unknown or surplus or b is NOT_PASSED or a is NOT_PASSED:
        refuse_call(linear_recurrence, surplus, unknown, a=a, b=b)
    is_last = return_final is not False and isinstance(return_final, str) and return_final == "only"
    if reset is None and deterministic is None and not is_dynamo_compiling():
        carry = None if init is None else _known_carry(init)
        known: Any = runner.MISS
        if init is None or carry is not None:
            named = "auto" if backend is None else backend
            if is_last:
                calls = _states_of(b)
                known = runner.call(calls, (a, b), axis, reverse, True, carry, True, named, offsets)
            else:
                known = runner.call(
                    _RECURRENCE, (a, b), axis, reverse, True, carry, return_final, named, offsets
                )
        if known is not runner.MISS:
            if is_last:
                return known[1]  # type: ignore[no-any-return]
            return (known[0], known[1][1]) if return_final else known
    engine: Any = {
        "reset": reset, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    plain = type(b) is Tensor and type(a) is Tensor and init is None and reset is None
    if not plain and overridden(a, b, init, reset):
        handed: Any = handed_over(
            linear_recurrence, a, b, init, axis, reverse, return_final, **engine
        )
        return handed  # type: ignore[no-any-return]
    if torch.compiler.is_dynamo_compiling():
        found: Any = HOOKS.compiled_recurrence(
            {
                "a": a, "b": b, "init": init, "axis": axis, "reverse": reverse,
                "return_final": return_final, **engine,
            },
            "linear_recurrence",
        )  # fmt: skip
        return found  # type: ignore[no-any-return]
    result = _recur(a, b, init, axis, reverse, return_final, **engine)
    if not is_last and return_final:
        return result[0], result[1][1]
    h: Tensor = result
    return h


def _recur(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None,
    axis: int,
    reverse: bool,
    return_final: ReturnFinal,
    reset: Tensor | None,
    **options: Any,
) -> Any:
    """h, or (h, the state that leaves the scan) with `return_final`, or the last h with "only".

    reset: a mask of steps at which h[t] = b[t], whatever a and h are there. options: of
        `associative_scan`.
    """
    require_b(a, b)
    names, mask = NAMES, None
    if reset is not None:
        refuse_offsets(options["offsets"])
        check_tensor("b", b)
        axis = check_axis(axis, b.shape, b.dim(), "b")
        names, mask = RESET_NAMES, aligned_reset(reset, b, axis, "b")
    is_last = isinstance(return_final, str) and return_final == "only"
    is_wanted = is_last or flag("return_final", return_final, ONLY)
    if mask is None and init is None and not is_last and _is_like(a, b):
        # Nothing to convert or to broadcast.
        return named_scan(
            NAMES, _RECURRENCE, (a, b), axis, reverse, return_final=is_wanted, **options
        )
    made: Any = last_operands(a, b, init) if is_last else operands(a, b, init)
    op, xs, carry = made
    if mask is not None:
        op, xs, carry = segmented(op), (xs, mask), None if carry is None else (carry, False)
    if is_last:
        return named_reduce(names, op, xs, axis, reverse, init=carry, **options)[1]
    found = named_scan(names, op, xs, axis, reverse, init=carry, return_final=is_wanted, **options)
    return (found[0], found[1][0]) if is_wanted and mask is not None else found


def require_b(a: object, b: object) -> None:
    """Raise ScanTypeError where b is no tensor. Of the two, only a may be a number."""
    if isinstance(a, Tensor) and isinstance(b, (int, float, complex)):
        raise ScanTypeError(
            f"b is the {type(b).__name__} {b}, expected a tensor; were a and b swapped? "
            f"linear_recurrence({b}, x) is h[t] = {b} · h[t−1] + x[t]; what is added at each step "
            f"may be torch.full_like(a, {b})"
        )
    require_tensor("b", b)


def operands(
    a: Tensor | Number, b: Tensor, init: Tensor | Number | None
) -> tuple[Monoid, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """The operator, xs and init of the scan that a linear recurrence is."""
    a, carry, dtype = _operands(a, b, init)
    as_they_are = b.dtype == dtype and a.dtype in (dtype, carry_dtype(dtype))
    op = _RECURRENCE if as_they_are else for_dtype(_RECURRENCE_AS, dtype)
    return op, (a, b), carry


def last_operands(
    a: Tensor | Number, b: Tensor, init: Tensor | Number | None
) -> tuple[Monoid, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """`operands` of the reduction to the last state, in the dtype of carries: lifted to it, 16-bit
    floats are not rounded again."""
    a, carry, dtype = _operands(a, b, init)
    wide = carry_dtype(dtype)
    op = _STATES if a.dtype == b.dtype == wide else for_dtype(_STATES_AS, wide)
    return op, (a, b), carry


def _states_of(b: Any) -> Any:
    """The call cache of reductions to the last state, for b of a usual dtype."""
    dtype = b.dtype if isinstance(b, Tensor) else None
    is_half = dtype in (torch.float16, torch.bfloat16)
    return (_STATES_AS[torch.float32] if is_half else _STATES).reductions


def _operands(
    a: Tensor | Number, b: Tensor, init: Tensor | Number | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, torch.dtype]:
    """a in the shape of b, the state that enters, and the dtype of the recurrence."""
    require_b(a, b)
    check_tensor("b", b)
    dtype = recurrence_dtype(a, b, init)
    a = multiplier(a, dtype, b.device, "a")
    if not same_shape(a.shape, b.shape):
        a = expanded(a, b, "a", "b")
    if init is None:
        return a, None, dtype
    return a, carry_from(as_tensor(init, dtype, b.device, "init").to(carry_dtype(dtype))), dtype


def carry_from(start: Tensor) -> tuple[Tensor, Tensor]:
    """The state (1, start) that enters a recurrence; the ones of ordinary tensors are cached."""
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
            ones = _ONES.insert(key, one.expand(start.shape))
    return ones, start


def _known_carry(start: Tensor | Number) -> tuple[Tensor, Tensor] | None:
    """`carry_from` of a tensor like one before; None for others."""
    if type(start) is not Tensor or start.is_nested:
        return None
    ones = _ONES.get((start.shape, start.dtype, start.device))
    return None if ones is None else (ones, start)


def _is_like(a: Tensor | Number, b: Tensor) -> bool:
    """Whether a and b are tensors of one shape and one dtype that torch computes in."""
    return (
        isinstance(a, Tensor)
        and a.dtype == b.dtype
        and same_shape(a.shape, b.shape)
        and a.dtype != torch.complex32
    )


def _recurrence(dtype: torch.dtype | None = None, lowered: bool = True) -> Monoid:
    return Monoid(
        ops.affine.combine,
        identity=ops.affine.identity,
        name="linear_recurrence" + (f" in {dtype}" if dtype else ""),
        lift=(lambda a, b: (a.to(dtype), b.to(dtype))) if dtype else None,
        lower=(lambda state: state[1]) if lowered else None,
    )


# What the leaves of the scan are called in errors.
NAMES = LeafNames({"xs[0]": "a", "xs": "b", "init": "init"}, axis_of="b")
RESET_NAMES = LeafNames({"xs[0][0]": "a", "xs[1]": "reset", "xs": "b", "init": "init"}, axis_of="b")
_ONES: BoundedCache[Any, Tensor] = BoundedCache(1024)  # expanded; each holds one number
_RECURRENCE = _recurrence()
_RECURRENCE_AS = {dtype: _recurrence(dtype) for dtype in SCALAR_DTYPES}
# Reductions to the whole state (a, h): calls of operators without a lower are repeated in C++.
_STATES = _recurrence(lowered=False)
_STATES_AS = {dtype: _recurrence(dtype, lowered=False) for dtype in SCALAR_DTYPES}
