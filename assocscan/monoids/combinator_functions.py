"""The functions that the monoids of `combinators` consist of.

Which of two classes makes a `lower` says whether it is given the inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ScanTypeError
from ..program.dtypes import STORAGE_ONLY
from ..pytrees import align, describe, flatten, template, top_level, unflatten
from ..trace.declared_identity import number_in
from ..trace.expected_structure import require_state
from ..trace.signatures import takes_inputs
from .monoid import Monoid


def name_of(fn: Callable[..., Any] | None) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def call_on(fn: Callable[..., Any], x: Any) -> Any:
    """As a lift is called on an input."""
    return fn(*x) if type(x) in (tuple, list) else fn(x)


def element(op: Monoid, x: Any) -> Any:
    return x if op.lift is None else call_on(op.lift, x)


def output(op: Monoid, state: Any, x: Any = None) -> Any:
    if op.lower is None:
        return state
    return op.lower(state, x) if takes_inputs(op.lower) else op.lower(state)


def identity(op: Monoid, shapes: Any) -> Any:
    """The identity of `op` for elements of these shapes."""
    if not callable(op.identity):
        return op.identity
    entries = None if isinstance(shapes, torch.Size) else top_level(shapes)
    return op.identity(*(entries or [shapes]))


def one_or_tuple(xs: tuple[Any, ...]) -> Any:
    """The input that a lift was called on."""
    return xs[0] if len(xs) == 1 else xs


def flagged(op: Monoid, x: Any) -> tuple[Any, torch.Tensor]:
    """An element of `op`, or its input, and the flag: what a segmented operator is given."""
    if type(x) is tuple and len(x) == 2 and is_mask(x[1]):
        return x
    seen = describe(x) if isinstance(x, (tuple, list, dict)) else "a tensor"
    if isinstance(x, (tuple, list)) and len(x) == 2:
        if is_mask(x[1]):
            seen += "; pass tuple(xs)"
        elif is_mask(x[0]):
            seen = "the mask first: pass (xs, reset), in this order"
        elif isinstance(x[1], torch.Tensor):
            seen = f"reset with dtype {x[1].dtype} (convert it: reset != 0)"
    raise ScanTypeError(
        f"segmented({op.name}) scans a pair (xs, reset) of inputs of {op.name!r} and a tensor of "
        f"dtype torch.bool, got {seen}"
    )


def is_mask(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool


def without_gradient(x: Any, where: torch.Tensor) -> Any:
    """x, to which no gradient flows where the flag is set.

    There autograd, on the eager engine, would multiply zeros by slopes that may be infinite. The
    derivatives of generated engines leave out what is not selected, and operators are traced with
    gradients off: nothing is added to their programs.
    """
    if not torch.is_grad_enabled():
        return x
    leaves, spec = flatten(x)
    stopped = [
        torch.where(where, t.detach(), t) if t.is_floating_point() or t.is_complex() else t
        for t in leaves
    ]
    return unflatten(stopped, spec)


@dataclass(frozen=True)
class OfOperator:
    """A function made from a monoid. Two are equal if their classes and their monoids are."""

    op: Monoid


@dataclass(frozen=True)
class OfOperators:
    """A function made from several monoids."""

    ops: tuple[Monoid, ...]


@dataclass(frozen=True)
class OfOperatorAndFunction:
    """A function made from a monoid and another function."""

    op: Monoid
    fn: Callable[..., Any]


class SegmentedCombine(OfOperator):
    def __call__(self, left: Any, right: Any) -> Any:
        (a, f), (b, g) = flagged(self.op, left), flagged(self.op, right)
        combined = without_gradient(a, g), without_gradient(b, g)
        try:
            together = align(b, self.op.combine(*combined), f"what {self.op.name!r} returned")
        except ScanTypeError:
            if self.op.lift is None:
                require_state(self.op, template(flatten(b)[1]), "xs[0]")
            raise
        alone, spec = flatten(b)
        chosen = [torch.where(g, x, y) for x, y in zip(alone, together, strict=True)]
        return unflatten(chosen, spec), f | g


class SegmentedIdentity(OfOperator):
    def __call__(self, shapes: Any, _: Any) -> Any:
        return identity(self.op, shapes), False


class SegmentedLift(OfOperator):
    def __call__(self, *xs: Any) -> Any:
        x, reset = flagged(self.op, one_or_tuple(xs))
        return element(self.op, x), reset


class SegmentedLower(OfOperator):
    def __call__(self, state: Any) -> Any:
        return output(self.op, state[0])


class SegmentedLowerOfInputs(OfOperator):
    def __call__(self, state: Any, x: Any) -> Any:
        return output(self.op, state[0], x[0])


class SegmentedExclusiveLower(OfOperator):
    """The lower of an exclusive scan: where a segment starts, nothing of it precedes, whatever the
    scan holds of the segment before."""

    def __call__(self, state: Any, x: Any) -> Any:
        before, spec = flatten(state[0])
        shapes = unflatten([t.shape for t in before], spec)
        values = align(template(spec), identity(self.op, shapes), f"identity of {self.op.name!r}")
        shown = [
            torch.where(x[1], identity_leaf(v, t), t) for v, t in zip(values, before, strict=True)
        ]
        return output(self.op, unflatten(shown, spec), x[0])


class WindowedLift(OfOperator):
    def __call__(self, x: Any, before: Any, starts: torch.Tensor, alone: torch.Tensor) -> Any:
        return element(self.op, x), starts


class WindowedLower(OfOperator):
    """Of the state since the last start: alone where the flag is set, else combined with what was
    before. 16-bit floats of that are float32, and the output has the dtype that it has without."""

    def __call__(self, state: Any, xs: Any) -> Any:
        x, before, _, alone = xs
        now, spec = flatten(state[0])
        combined = (
            without_gradient(unflatten(list(before), spec), alone),
            without_gradient(state[0], alone),
        )
        together = align(state[0], self.op.combine(*combined), f"what {self.op.name!r} returned")
        chosen = [torch.where(alone, t, u) for t, u in zip(now, together, strict=True)]
        made, out_spec = flatten(output(self.op, unflatten(chosen, spec), x))
        usual = flatten(output(self.op, state[0], x))[0]
        return unflatten([t.to(u.dtype) for t, u in zip(made, usual, strict=True)], out_spec)


def widened(state: Any) -> Any:
    """16-bit floats as float32."""
    leaves, spec = flatten(state)
    return unflatten([t.float() if t.dtype in STORAGE_ONLY else t for t in leaves], spec)


def identity_leaf(value: Any, like: torch.Tensor) -> Any:
    """A leaf of an identity in the dtype of a state's leaf; ±inf saturates."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device, like.dtype)
    return number_in(value, like.dtype)


class ProductCombine(OfOperators):
    def __call__(self, left: Any, right: Any) -> Any:
        return tuple(op.combine(a, b) for op, a, b in zip(self.ops, left, right, strict=True))


class ProductIdentity(OfOperators):
    def __call__(self, *shapes: Any) -> Any:
        return tuple(identity(op, s) for op, s in zip(self.ops, shapes, strict=True))


class ProductLift(OfOperators):
    def __call__(self, *xs: Any) -> Any:
        return tuple(element(op, one_or_tuple(xs)) for op in self.ops)


class ProductLower(OfOperators):
    def __call__(self, state: Any) -> Any:
        return tuple(output(op, s) for op, s in zip(self.ops, state, strict=True))


class ProductLowerOfInputs(OfOperators):
    def __call__(self, state: Any, x: Any) -> Any:
        return tuple(output(op, s, x) for op, s in zip(self.ops, state, strict=True))


class ReversedCombine(OfOperator):
    def __call__(self, left: Any, right: Any) -> Any:
        return self.op.combine(right, left)


class ComposedLift(OfOperatorAndFunction):
    """The lift of `op` after `fn`, with the signature of `fn`."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __call__(self, *xs: Any) -> Any:
        return element(self.op, self.fn(*xs))


class LiftedLowerOfInputs(OfOperatorAndFunction):
    """A lower of `op`'s own inputs, on the new ones."""

    def __call__(self, state: Any, x: Any) -> Any:
        return output(self.op, state, call_on(self.fn, x))


class ComposedLower(OfOperatorAndFunction):
    def __call__(self, state: Any) -> Any:
        return self.fn(output(self.op, state))


class ComposedLowerOfInputs(OfOperatorAndFunction):
    def __call__(self, state: Any, x: Any) -> Any:
        shown = output(self.op, state, x)
        return self.fn(shown, x) if takes_inputs(self.fn) else self.fn(shown)
