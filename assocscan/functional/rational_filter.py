"""The scan of a filter B(z) / A(z), and its derivatives, which are filters again.

With a[0] = 1 and λ the response of 1 / conj(A) to the cotangent of y, run backwards in time,

    x̄ = conj(B) / conj(A) of ȳ, backwards,   b̄[k] = Σ λ[t] conj(x[t−k]),   ā[k] = −Σ λ[t] conj(y[t−k])

so nothing is differentiated through the change of states (`filter_states`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..engines.base.shifted_leaves import previous_state
from ..monoids.monoid import Monoid
from .argument_errors import named_scan
from .filter_states import EXACT_STATES, MOST_EXACT, STATES

FILTERED = {"xs": "x"}  # what the leaves of the scans were passed as


class Steps(NamedTuple):
    """Along what a filter runs, and what the caller asks of the engine."""

    axis: int
    offsets: Tensor | None
    reverse: bool = False
    backend: str | None = None
    deterministic: bool | None = None

    @property
    def backwards(self) -> Steps:
        return self._replace(reverse=not self.reverse)


def rational(b: Tensor | None, a: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """The response y of B(z) / A(z) to x.

    a [..., n]: the coefficients a[1], …, a[n], n ≥ 1; a[0] is 1. b [..., n + 1], or None for B = 1.
    Their leading dimensions broadcast to those of x without the axis. float32, float64 or complex.
    """
    y: Tensor = Rational.apply(b, a, x, *steps)
    return y


class Rational(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(b: Tensor | None, a: Tensor, x: Tensor, *steps: Any) -> Tensor:
        return response(b, a, x, Steps(*steps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        b, a, x, axis, offsets, *rest = inputs
        ctx.save_for_backward(b, a, x, output, offsets)
        ctx.save_for_forward(b, a, x, output, offsets)
        ctx.axis, ctx.rest = axis, rest

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        b, a, x, y, offsets = ctx.saved_tensors
        steps = Steps(ctx.axis, offsets, *ctx.rest)
        wants_b, wants_a, wants_x = ctx.needs_input_grad[:3]
        of_b = of_a = of_x = adjoint = None
        if wants_b or wants_a or (b is None and wants_x):
            adjoint = rational(None, a.conj(), cotangent, steps.backwards)
        if wants_x:
            of_x = adjoint if b is None else rational(
                b.conj(), a.conj(), cotangent, steps.backwards
            )  # fmt: skip
        if wants_b:
            assert b is not None and adjoint is not None
            of_b = correlations(adjoint, x, range(b.shape[-1]), b, steps)
        if wants_a:
            assert adjoint is not None
            of_a = -correlations(adjoint, y, range(1, a.shape[-1] + 1), a, steps)
        return of_b, of_a, of_x, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        b, a, x, y, offsets = ctx.saved_tensors
        steps = Steps(ctx.axis, offsets, *ctx.rest)
        of_b, of_a, of_x = tangents[:3]
        result = torch.zeros_like(y)
        if of_x is not None:
            result = result + rational(b, a, of_x, steps)
        entering = None
        if of_b is not None:
            entering = moving_sum(of_b, x, steps)
        if of_a is not None:
            past = moving_sum(pad(of_a, (1, 0)), y, steps)
            entering = -past if entering is None else entering - past
        return result if entering is None else result + rational(None, a, entering, steps)


def correlations(
    adjoint: Tensor, series: Tensor, delays: range, like: Tensor, steps: Steps
) -> Tensor:
    """Σ adjoint[t]·conj(series[t − k]) for each delay k, summed to the shape of the coefficients."""
    shape = (*(1 for _ in range(adjoint.dim() - like.dim())), *like.shape[:-1])
    sums = [
        (adjoint * late.conj()).sum(steps.axis).sum_to_size(shape)
        for late in delayed(series, delays, steps)
    ]
    return torch.stack(sums, -1).reshape(like.shape)


def moving_sum(b: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """Σ b[k]·x[t−k], within each sequence: a filter without a denominator."""
    axis, total = steps.axis, None
    for k, late in enumerate(delayed(x, range(b.shape[-1]), steps)):
        term = along(b[..., k], x, axis) * late
        total = term if total is None else total + term
    assert total is not None
    return total


def delayed(x: Tensor, delays: range, steps: Steps) -> list[Tensor]:
    """x[t − k] for each delay k, in scan order; 0 before the first step of a sequence."""
    axis, length = steps.axis, x.shape[steps.axis]
    if steps.offsets is None and not steps.reverse:
        return [
            x if k == 0 else torch.zeros_like(x) if k >= length
            else torch.cat([torch.zeros_like(x.narrow(axis, 0, k)), x.narrow(axis, 0, length - k)], axis)
            for k in delays
        ]  # fmt: skip
    found, late = [], x
    for k in range(delays.stop):
        late = late if k == 0 else previous_state(late, None, axis, steps.reverse, steps.offsets)
        if k in delays:
            found.append(late)
    return found


def along(coefficient: Tensor, x: Tensor, axis: int, element: int = 0) -> Tensor:
    """A coefficient whose leading dimensions are those of x without the axis, as one that
    broadcasts to x; `element`: how many dimensions of its own stand behind."""
    missing = x.dim() - 1 - (coefficient.dim() - element)
    aligned = coefficient[(None,) * missing]
    return aligned.unsqueeze(axis)


def response(b: Tensor | None, a: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """`rational` without derivatives."""
    n = a.shape[-1]
    if b is None:
        b = pad(torch.ones_like(a[..., :1]), (0, n))
    first = along(b[..., 0], x, steps.axis).expand(x.shape)
    options: Any = {
        "offsets": steps.offsets, "backend": steps.backend, "deterministic": steps.deterministic,
    }  # fmt: skip
    if n == 1:
        pole = -a[..., 0]
        weight = b[..., 1] + pole * b[..., 0]
        leaves = (along(t, x, steps.axis).expand(x.shape) for t in (pole, weight))
        found = named_scan(
            FILTERED, FIRST_ORDER, (*leaves, first, x), steps.axis, steps.reverse, False, **options
        )
    else:
        matrices = (
            along(t, x, steps.axis, k).expand(*x.shape, *t.shape[t.dim() - k :])
            for t, k in zip(converted(b, a), (2, 1, 1), strict=True)
        )
        found = named_scan(
            FILTERED, HIGHER_ORDER, (*matrices, first, x), steps.axis, steps.reverse, False,
            **options,
        )  # fmt: skip
    y: Tensor = found
    return y


def converted(b: Tensor, a: Tensor) -> list[Tensor]:
    """M [..., n, n], g [..., n] and c [..., n] in the dtype of a, by one kernel for all filters."""
    is_exact = a.dtype == torch.float64 and a.shape[-1] <= MOST_EXACT
    wide = torch.complex128 if a.is_complex() else torch.float64
    whole = pad(a, (1, 0), value=1.0)
    batch = torch.broadcast_shapes(b.shape[:-1], a.shape[:-1])
    b, whole = (t.to(wide).expand(*batch, t.shape[-1]).unsqueeze(-2) for t in (b, whole))
    found = named_scan({}, EXACT_STATES if is_exact else STATES, (b, whole), -1)
    return [t.squeeze(len(batch)).to(a.dtype) for t in found]


def _enter_first(p: Tensor, weight: Tensor, first: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return p, weight * x


def _leave_first(state: tuple[Tensor, Tensor], xs: tuple[Tensor, ...]) -> Tensor:
    return xs[2] * xs[3] + state[1]


def _enter(M: Tensor, g: Tensor, c: Tensor, first: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return M, g * x


def _leave(state: tuple[Tensor, Tensor], xs: tuple[Tensor, ...]) -> Tensor:
    return xs[3] * xs[4] + (xs[2] * state[1]).sum()


def filter_operator(
    name: str, op: Monoid, element_ndim: Any, lift: Callable[..., Any], lower: Callable[..., Any]
) -> Monoid:
    return Monoid(
        op.combine, identity=op.identity, name=name, element_ndim=element_ndim, lift=lift,
        lower=lower,
    )  # fmt: skip


# Exclusive scans: y[t] is made of the state before t and of x[t].
FIRST_ORDER = filter_operator(
    "filter_of_first_order", ops.affine, 0, _enter_first, _leave_first
)
HIGHER_ORDER = filter_operator("filter", ops.matrix_affine, (2, 1, 1, 0, 0), _enter, _leave)
