"""Operators made from operators.

What these functions return are ordinary monoids: traced, generated, differentiated and run as any
other. They are not registered; the same arguments give the same monoid, so that nothing is traced
twice.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..errors import MonoidError, ScanTypeError, ScanValueError
from ..hooks import HOOKS
from ..program.operator_names import composed
from ..trace.signatures import takes_inputs
from ..wording import shown
from .call_errors import checked_call
from .combinator_functions import (
    ComposedLift,
    ComposedLower,
    ComposedLowerOfInputs,
    LiftedLowerOfInputs,
    ProductCombine,
    ProductIdentity,
    ProductLift,
    ProductLower,
    ProductLowerOfInputs,
    ReversedCombine,
    SegmentedCombine,
    SegmentedExclusiveLower,
    SegmentedIdentity,
    SegmentedLift,
    SegmentedLower,
    SegmentedLowerOfInputs,
    WindowedLift,
    WindowedLower,
    name_of,
    widened,
)
from .monoid import Monoid, resolve

__all__ = ["product", "reversed_order", "segmented", "with_lift", "with_lower"]


@checked_call
def segmented(op: Monoid | str) -> Monoid:
    """`op` on pairs (xs, reset): where reset[t] is true, the scan starts anew with x[t].

    reset has as many dimensions as xs, and broadcasts to it: a mask of [B, L] for x [B, L, D] is
    passed as mask[..., None].

        y[t] = x[s] ∘ … ∘ x[t],  s the last step ≤ t with reset[s], or 0

    >>> import torch
    >>> from assocscan import associative_scan, ops, segmented
    >>> x = torch.tensor([1, 2, 3, 4, 5])
    >>> reset = torch.tensor([False, False, True, False, False])
    >>> associative_scan(segmented(ops.sum), (x, reset))
    tensor([ 1,  3,  3,  7, 12])

    The element is (element of `op`, flag): (a, f) ∘ (b, g) = (b if g else a ∘ b, f or g); its
    identity is (identity of `op`, False). Outputs are those of `op`; `init` and the final carry
    are such pairs. With `reverse` a segment starts at its last step: what reset[t] marks is where
    the scan, coming from the end, starts anew. In an exclusive scan the first output of a segment
    is the identity; that of the first one is `init`, if given, unless reset[0]. For sequences of
    known lengths `offsets` costs less.

    Raises TypeError where `op` is no monoid, and ValueError for a name that is not registered. An
    exclusive scan raises ValueError where `op` has no identity.

    Cost per element: that of `op`, one selection for each of its components, and the flag.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section 1.5.
    """
    return _segmented((op,))


@checked_call
def product(*ops: Monoid | str) -> Monoid:
    """Several operators on the same input, in one pass over it.

        y[t] = (y₁[t], y₂[t], …),  yₖ the scan of the k-th operator

    >>> import torch
    >>> from assocscan import associative_scan, ops, product
    >>> x = torch.tensor([3.0, 1.0, 4.0])
    >>> associative_scan(product(ops.min, ops.max, ops.mean), x)
    (tensor([3., 1., 1.]), tensor([3., 3., 4.]), tensor([3.0000, 2.0000, 2.6667]))

    The element is the tuple of their elements, so that the identity is that of the direct product
    of monoids; there is none where one of them has none. Operators of different inputs take them
    apart by a lift: `product(with_lift(ops.sum, lambda x, y: x), with_lift(ops.max,
    lambda x, y: y))` scans (x, y).

    Cost per element: the operators' costs in flops; the input is read once.

    Raises MonoidError for no operators, and where their element_ndim differ.
    """
    if not ops:
        raise MonoidError("product needs at least one operator")
    return _product(ops)


@checked_call
def reversed_order(op: Monoid | str) -> Monoid:
    """The opposite monoid: a ∘' b = b ∘ a.

        y[t] = x[t] ∘ … ∘ x[0]

    >>> import torch
    >>> from assocscan import associative_scan, ops, reversed_order
    >>> A = torch.tensor([[[1, 1], [0, 1]], [[1, 0], [1, 1]]])
    >>> associative_scan(reversed_order(ops.matmul), A)[-1]         # A[0] @ A[1]
    tensor([[2, 1],
            [1, 1]])

    Not the same as `reverse=True`, which runs the scan from the end. Identity, lift and lower are
    those of `op`; a hand-written adjoint does not hold for it and is dropped.

    Raises TypeError where `op` is no monoid, and ValueError for a name that is not registered.
    """
    return _reversed_order((op,))


@checked_call
def with_lift(op: Monoid | str, fn: Callable[..., Any], element_ndim: Any = None) -> Monoid:
    """`op` on inputs that `fn` turns into its own, inside the kernel.

        y[t] = scan of op over fn(x[t])

    >>> import torch
    >>> from assocscan import associative_scan, ops, with_lift
    >>> associative_scan(with_lift(ops.sum, torch.square), torch.tensor([1.0, 2.0, 3.0]))
    tensor([ 1.,  5., 14.])

    `fn` is called as a lift is: fn(*xs) for a tuple or list, fn(xs) otherwise; what it returns is
    an input of `op`, which `op`'s own lift takes from there. `element_ndim` speaks of the new
    inputs; by default it is that of `op`.

    Raises TypeError where `op` is no monoid or `fn` cannot be called, and ValueError for a name
    that is not registered.
    """
    if not callable(fn):
        raise ScanTypeError(f"with_lift needs a function, got {shown(fn)}")
    return _with_lift((op,), fn, element_ndim)


@checked_call
def with_lower(op: Monoid | str, fn: Callable[..., Any] | None) -> Monoid:
    """`op` with outputs that `fn` makes of its own, inside the kernel.

        y[t] = fn(output of op at t), or fn(output of op at t, x[t])

    >>> import torch
    >>> from assocscan import associative_scan, ops, with_lower
    >>> deviation = with_lower(ops.welford, lambda y: y[1].sqrt())
    >>> associative_scan(deviation, torch.tensor([2.0, 4.0, 6.0]))
    tensor([0.0000, 1.0000, 1.6330])

    Whether `fn` is also given the inputs depends on how many positional parameters it requires, as
    for a lower. None takes away what lower there is: the outputs are then the states.

    Raises TypeError where `op` is no monoid or `fn` cannot be called, and ValueError for a name
    that is not registered.
    """
    if fn is not None and not callable(fn):
        raise ScanTypeError(f"with_lower needs a function or None, got {shown(fn)}")
    return _with_lower((op,), fn)


def as_monoid(op: Monoid | str) -> Monoid:
    """The operator itself, or the registered one of this name."""
    return require_monoid(resolve(op) if isinstance(op, str) else op)


def require_monoid(op: Any) -> Monoid:
    if not isinstance(op, Monoid):
        raise ScanTypeError(
            f"operators are made from monoids, got {shown(op)}; decorate the function with @monoid"
        )
    return op


def is_itself(value: Any) -> bool:
    """Whether all that equals `value` is the same: what equals itself alone, as functions do,
    methods, and element dimensions. Other callables may be equal and differ, as dataclasses that
    hold 1 and 1.0."""
    if isinstance(value, tuple):
        return all(is_itself(part) for part in value)
    compare: Any = type(value).__eq__
    return type(value) in ITSELF or compare is object.__eq__


ITSELF = frozenset((types.MethodType, types.BuiltinFunctionType, int, str, type(None)))


def is_its_code(value: Any) -> bool:
    """Whether a value is a function of which nothing but its code and its globals counts."""
    return type(value) is types.FunctionType and not (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
    )


def first_of_its_code(value: Any) -> Any:
    """The first function of the same code, where nothing else counts: a lambda in a loop is made
    anew each time, and need not be traced anew."""
    if not is_its_code(value):
        return value
    key = value.__code__, value.__name__, id(value.__globals__)
    first = FUNCTIONS.get(key)
    if first is not None and is_its_code(first) and first.__code__ == value.__code__:
        return first
    return FUNCTIONS.insert(key, value)


FUNCTIONS: BoundedCache[Hashable, types.FunctionType] = BoundedCache(256)


def combinator(make: Callable[..., Monoid]) -> Callable[..., Monoid]:
    """`make(*ops, *rest)` as a function of (ops, *rest): the same monoid for the same arguments,
    which is pickled as this call."""

    @functools.lru_cache(maxsize=256)
    def known(ops: tuple[Monoid, ...], *rest: Any) -> Monoid:
        op = make(*ops, *rest)
        op.recipe = made, ops, *rest
        return op

    name = make.__name__

    @functools.wraps(make)
    def made(ops: Sequence[Monoid | str], *rest: Any) -> Monoid:
        if torch.compiler.is_dynamo_compiling():
            result: Monoid = HOOKS.compiled_combinator(name, ops, rest)
            return result
        monoids = tuple([as_monoid(op) for op in ops])
        rest = tuple([first_of_its_code(value) for value in rest])
        if not all(is_itself(value) for value in rest):
            return known.__wrapped__(monoids, *rest)
        return known(monoids, *rest)

    return made


@combinator
def _segmented(op: Monoid) -> Monoid:
    return Monoid(
        SegmentedCombine(op),
        identity=None if op.identity is None else SegmentedIdentity(op),
        name=composed(f"segmented({op.name})"),
        element_ndim=0 if op.element_ndim == 0 else (op.element_ndim, 0),
        lift=None if op.lift is None else SegmentedLift(op),
        lower=SegmentedLowerOfInputs(op) if op.lower_takes_inputs else SegmentedLower(op),
    )


@combinator
def _segmented_exclusive(op: Monoid) -> Monoid:
    """`segmented(op)` for exclusive scans."""
    if op.identity is None:
        raise ScanValueError(
            f"in an exclusive scan of segmented({op.name}) each segment starts with the identity, "
            f"and {op.name!r} declares none"
        )
    plain = _segmented((op,))
    return Monoid(
        plain.combine, identity=plain.identity, name=plain.name, element_ndim=plain.element_ndim,
        lift=plain.lift, lower=SegmentedExclusiveLower(op),
    )  # fmt: skip


def exclusive_form(op: Monoid) -> Monoid:
    """What an exclusive scan of `op` runs: of a segmented operator, and of what is made of one, an
    operator whose output at the start of a segment is the identity."""
    if op.recipe is None:
        return op
    make, ops, *rest = op.recipe
    if make is _reversed_order:  # its resets are no starts
        return op
    forms = tuple(exclusive_form(part) for part in ops)
    if make is _segmented:
        return _segmented_exclusive(forms)
    unchanged = all(form is part for form, part in zip(forms, ops, strict=True))
    return op if unchanged else make(forms, *rest)


@combinator
def _product(*ops: Monoid) -> Monoid:
    ndims = [op.element_ndim for op in ops]
    for op, ndim in zip(ops, ndims, strict=True):
        if ndim != ndims[0]:
            raise MonoidError(
                f"the operators of a product take the same input, but {ops[0].name!r} has "
                f"element_ndim {ndims[0]} and {op.name!r} has {ndim}"
            )
    has_identity = all(op.identity is not None for op in ops)
    lowers = any(op.lower is not None for op in ops)
    take_inputs = any(op.lower_takes_inputs for op in ops)
    lower = ProductLowerOfInputs(ops) if take_inputs else ProductLower(ops)
    return Monoid(
        ProductCombine(ops),
        identity=ProductIdentity(ops) if has_identity else None,
        name=composed(f"product({', '.join(op.name for op in ops)})"),
        element_ndim=ndims[0],
        lift=ProductLift(ops),
        lower=lower if lowers else None,
    )


@combinator
def _reversed_order(op: Monoid) -> Monoid:
    return Monoid(
        ReversedCombine(op),
        identity=op.identity,
        name=composed(f"reversed_order({op.name})"),
        element_ndim=op.element_ndim,
        lift=op.lift,
        lower=op.lower,
    )


@combinator
def _windowed(op: Monoid, before: tuple[int, ...]) -> Monoid:
    """The second scan of `functional.series.windowed`, of (xs, before, starts, alone): `before`
    has the leaves of a state, with these element dimensions; flags have none."""
    return Monoid(
        SegmentedCombine(op),
        name=composed(f"windowed({op.name})"),
        element_ndim=(op.element_ndim, before, 0, 0),
        lift=WindowedLift(op),
        lower=WindowedLower(op),
    )


@combinator
def _to_window_ends(op: Monoid) -> Monoid:
    """The first scan of `functional.series.windowed`, from the other end: of (xs, ends) to states,
    in which 16-bit floats are float32."""
    states = _with_lower((_reversed_order((_with_lower((op,), None),)),), widened)
    parts = _segmented((states,))
    return Monoid(
        parts.combine, name=composed(f"windowed({op.name})"), element_ndim=parts.element_ndim,
        lift=parts.lift, lower=parts.lower,
    )  # fmt: skip


@combinator
def _with_lift(op: Monoid, fn: Callable[..., Any], element_ndim: Any) -> Monoid:
    return Monoid(
        op.combine,
        identity=op.identity,
        name=composed(f"with_lift({op.name}, {name_of(fn)})"),
        element_ndim=op.element_ndim if element_ndim is None else element_ndim,
        lift=ComposedLift(op, fn),
        lower=LiftedLowerOfInputs(op, fn) if op.lower_takes_inputs else op.lower,
        adjoint=op.adjoint,
    )


@combinator
def _with_lower(op: Monoid, fn: Callable[..., Any] | None) -> Monoid:
    lower: Callable[..., Any] | None = None
    if fn is not None:
        with_inputs = takes_inputs(fn) or op.lower_takes_inputs
        lower = ComposedLowerOfInputs(op, fn) if with_inputs else ComposedLower(op, fn)
    return Monoid(
        op.combine,
        identity=op.identity,
        name=composed(f"with_lower({op.name}, {name_of(fn)})"),
        element_ndim=op.element_ndim,
        lift=op.lift,
        lower=lower,
        adjoint=op.adjoint,
    )


HOOKS.exclusive_form = exclusive_form
