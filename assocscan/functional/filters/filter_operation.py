"""A filter B(z) / A(z) as one operation of torch, and its derivatives, which are filters again.

With λ the response of 1 / conj(A) to the cotangent of y, and x̄ that of conj(B) / conj(A), both run
backwards in time,

    b̄[k] = Σ λ[t] conj(x[t−k]),    ā[k] = −Σ λ[t] conj(y[t−k])

so nothing is differentiated through the change of states (`lattice_states`). In forward mode
ẏ is the response of B / A to ẋ, and of 1 / A to Σ ḃ[k] x[t−k] − Σ ȧ[k] y[t−k].

Plain calls enter the autograd function `Rational`. Under torch.func and under compilers a filter is
the operation `torch.ops.assocscan.filter`. Then each level of the transforms differentiates or maps
it by the rules here, and the levels outside see filters again, not what one is computed by: Dynamo
neither nests autograd functions nor differentiates one twice, and torch.func switches the outer
levels off inside of one.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import outer_derivatives
from ...runtime.batched_gradients import takes_batches, vmapped
from ...torch_private import (
    KEYS_BELOW_AUTOGRAD,
    BelowAutograd,
    SingleLevelFunction,
    single_level_functions,
)
from ...torch_state import in_functorch, in_functorch_or_forward_mode, is_tracked
from .rational_filter import Steps, delayed, moving_sum, response_to_both


def rational(
    b: Tensor | None, a: Tensor, x: Tensor, steps: Steps, entering: Tensor | None = None
) -> Tensor:
    """`response_to_both`, with derivatives of every order."""
    if torch.compiler.is_dynamo_compiling():
        steps = steps._replace(is_compiled=not torch.compiler.is_exporting())
    if torch.compiler.is_compiling() or in_functorch():
        return operation(b, a, x, entering, steps)
    return at_autograd(b, a, x, entering, steps)


def operation(
    b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, steps: Steps
) -> Tensor:
    y: Tensor = torch.ops.assocscan.filter(b, a, x, entering, *steps)
    return y


def at_autograd(
    b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, steps: Steps
) -> Tensor:
    """The response, connected to the autograd graph of the innermost level: a transform of
    torch.func or forward mode, or none."""
    tensors = b, a, x, entering
    if in_functorch_or_forward_mode():
        with single_level_functions():
            y: Tensor = TransformedRational.apply(*tensors, *steps)
    elif is_tracked(tensors):
        y = Rational.apply(*tensors, *steps)
    else:  # torch takes 100 µs to enter an autograd function
        y = response_to_both(*tensors, steps)
    return y


class Rational(torch.autograd.Function):
    """The autograd function of plain calls: `apply(b, a, x, entering, *steps)` gives y."""

    @staticmethod
    def forward(
        b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, *steps: Any
    ) -> Tensor:
        return response_to_both(b, a, x, entering, Steps(*steps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        b, a, x, _, axis, offsets, *rest = inputs
        ctx.save_for_backward(b, a, x, output, offsets)
        ctx.axis, ctx.rest = axis, rest
        ctx.scan = Rational

    batched = staticmethod(vmapped)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        b, a, x, y, offsets = ctx.saved_tensors
        steps = Steps(ctx.axis, offsets, *ctx.rest)
        wants_b, wants_a, wants_x, wants_entering = ctx.needs_input_grad[:4]
        of_b = of_a = of_x = adjoint = None
        if wants_b or wants_a or wants_entering or (b is None and wants_x):
            adjoint = rational(None, a.conj(), cotangent, steps.backwards)
        if wants_x:
            of_x = adjoint
            if b is not None:
                of_x = rational(b.conj(), a.conj(), cotangent, steps.backwards)
        if wants_b:
            assert b is not None and adjoint is not None
            of_b = correlations(adjoint, x, range(b.shape[-1]), b, steps)
        if wants_a:
            assert adjoint is not None
            of_a = -correlations(adjoint, y, range(a.shape[-1]), a, steps)
        of_entering = adjoint if wants_entering else None
        return of_b, of_a, of_x, of_entering, *[None] * len(steps)


class TransformedRational(SingleLevelFunction):
    """`Rational` for one level of torch.func and for forward mode."""

    @staticmethod
    def forward(
        b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, *steps: Any
    ) -> Tensor:
        if not in_functorch():
            return response_to_both(b, a, x, entering, Steps(*steps))
        with outer_derivatives():
            return operation(b, a, x, entering, Steps(*steps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Rational.setup_context(ctx, inputs, output)
        b, a, x, _, _, offsets, *_ = inputs
        ctx.save_for_forward(b, a, x, output, offsets)

    backward = Rational.backward

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        b, a, x, y, offsets = ctx.saved_tensors
        steps = Steps(ctx.axis, offsets, *ctx.rest)
        with outer_derivatives() if in_functorch() else contextlib.nullcontext():
            return tangent(b, a, x, y, steps, *tangents[:4])


def tangent(
    b: Tensor | None, a: Tensor, x: Tensor, y: Tensor, steps: Steps, of_b: Tensor | None,
    of_a: Tensor | None, of_x: Tensor | None, of_entering: Tensor | None,
) -> Tensor:  # fmt: skip
    """The tangent of y. of_b, of_a, of_x, of_entering: the tangents of the arguments; None where
    one is zero."""
    result = torch.zeros_like(y)
    if of_x is not None:
        result = result + rational(b, a, of_x, steps)
    entering = of_entering
    if of_b is not None:
        of_sum = moving_sum(of_b, x, steps)
        entering = of_sum if entering is None else entering + of_sum
    if of_a is not None:
        past = moving_sum(of_a, y, steps)
        entering = -past if entering is None else entering - past
    return result if entering is None else result + rational(None, a, entering, steps)


def correlations(
    adjoint: Tensor, series: Tensor, delays: range, like: Tensor, steps: Steps
) -> Tensor:
    """Σ adjoint[t]·conj(series[t − k]) for each delay k, in the shape of the coefficients."""
    shape = (*(1 for _ in range(adjoint.dim() - like.dim())), *like.shape[:-1])
    sums = [
        (adjoint * late.conj()).sum(steps.axis).sum_to_size(shape)
        for late in delayed(series, delays, steps)
    ]
    return torch.stack(sums, -1).reshape(like.shape)


# ---- The operation ----

_LIBRARY = torch.library.Library("assocscan", "FRAGMENT")
_LIBRARY.define(
    "filter(Tensor? b, Tensor a, Tensor x, Tensor? entering, int axis, Tensor? offsets, "
    "bool reverse, str? backend, bool? deterministic, bool is_exact, bool is_compiled) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def compute(b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, *steps: Any) -> Tensor:
    """The operation below autograd, as in inference mode."""
    with torch.no_grad():
        return response_to_both(b, a, x, entering, Steps(*steps)).contiguous()


def fake(b: Tensor | None, a: Tensor, x: Tensor, *others: Any) -> Tensor:
    """The result on fake tensors: the shape alone."""
    return x.new_empty(x.shape)


def differentiable(
    keyset: Any, b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, *steps: Any
) -> Tensor:
    """The operation at the Autograd key: of a level of torch.func, or outside of them, where a
    compiler sees the scans that the filter is computed by."""
    tensors = b, a, x, entering
    if in_functorch() and not is_tracked(tensors):
        with BelowAutograd():
            below = keyset & KEYS_BELOW_AUTOGRAD
            y: Tensor = torch.ops.assocscan.filter.default.redispatch(below, *tensors, *steps)
        return y
    return at_autograd(*tensors, Steps(*steps))


def batched(
    info: Any, in_dims: tuple[Any, ...], b: Tensor | None, a: Tensor, x: Tensor,
    entering: Tensor | None, axis: int, offsets: Tensor | None, *rest: Any,
) -> tuple[Tensor, int]:  # fmt: skip
    """The vmap rule: the mapped dimension becomes the first one, as a view."""
    if in_dims[5] is not None:
        raise NotImplementedError(
            "torch.vmap over offsets: sequences are packed along the axis, so pack the offsets of "
            "the batch into one list of offsets"
        )
    dims = x.dim() - (in_dims[2] is not None)
    b = None if b is None else of_channels(b, in_dims[0], dims)
    a = of_channels(a, in_dims[1], dims)
    x = whole(x, in_dims[2], info.batch_size)
    entering = None if entering is None else whole(entering, in_dims[3], info.batch_size)
    steps = Steps(axis + 1, offsets, *rest)
    return operation(b, a, x, entering, steps), 0


def of_channels(t: Tensor, mapped: int | None, dims: int) -> Tensor:
    """Coefficients whose mapped dimension stands where x has it, of `dims` dimensions without."""
    if mapped is None:
        return t
    t = t.movedim(mapped, 0)
    return t[(slice(None), *[None] * (dims + 1 - t.dim()))]


def whole(t: Tensor, mapped: int | None, size: int) -> Tensor:
    """A series with the mapped dimension in front."""
    return t.expand(size, *t.shape) if mapped is None else t.movedim(mapped, 0)


_LIBRARY.impl("filter", compute, "CompositeExplicitAutograd")
_LIBRARY.impl("filter", differentiable, "Autograd", with_keyset=True)
torch.library.register_fake("assocscan::filter", fake, lib=_LIBRARY)
torch.library.register_vmap("assocscan::filter", batched, lib=_LIBRARY)
