"""The scan of a filter B(z) / A(z), without derivatives (`filter_operation` has them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.base.shifted_leaves import previous_state
from ...monoids.monoid import Monoid
from ...torch_state import is_symbolic
from ..argument_errors import named_reduce, named_scan
from ..operands import carry_dtype, is_readable, runs_on_gpus, wide_on_cpus
from .chunks_as_lanes import is_worth_cutting, scanned
from .lattice_states import (
    EXACT_STATES,
    MOST_AT_ONCE_ON_GPUS,
    MOST_EXACT,
    STATES,
    States,
    exact_states_by_order,
)
from .walked_chunks import most_walked, walked

# The order from which GPUs walk: lower ones take less time as a scan of matrices.
LEAST_WALKED = {torch.float32: 5, torch.float64: 4, torch.complex64: 3, torch.complex128: 3}
FILTERED = {"xs": "x"}  # what the leaves of the scans were passed as


# The most steps that are taken one by one, by torch operations: their number is quadratic.
MOST_FIRST_STEPS = 12


class Steps(NamedTuple):
    """The axis and the sequences of a filter, and what its caller asks of the engine."""

    axis: int
    offsets: Tensor | None
    reverse: bool = False
    backend: str | None = None
    deterministic: bool | None = None
    is_exact: bool = True  # whether float64 filters have states computed in twice the precision
    is_compiled: bool = False  # whether torch.compile makes a graph of it, not torch.export

    @property
    def backwards(self) -> Steps:
        return self._replace(reverse=not self.reverse)


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
    if steps.offsets is not None:
        found, late = [], x
        for k in range(delays.stop):
            late = (
                late if k == 0 else previous_state(late, None, axis, steps.reverse, steps.offsets)
            )
            if k in delays:
                found.append(late)
        return found
    if not (steps.reverse or steps.is_compiled or is_symbolic(length)):
        kept = [x.narrow(axis, 0, max(length - k, 0)) for k in delays]
        zeros = [torch.zeros_like(x.narrow(axis, 0, min(k, length))) for k in delays]
        return [torch.cat(pair, axis) for pair in zip(zeros, kept, strict=True)]
    behind = [0, 0] * (x.dim() - 1 - axis)
    if steps.reverse:
        return [pad(x, [*behind, 0, k]).narrow(axis, k, length) for k in delays]
    return [pad(x, [*behind, k, 0]).narrow(axis, 0, length) for k in delays]


def along(coefficient: Tensor, x: Tensor, axis: int, element: int = 0) -> Tensor:
    """A coefficient whose leading dimensions are those of x without the axis, as one that
    broadcasts to x; `element`: how many dimensions of its own stand behind."""
    missing = x.dim() - 1 - (coefficient.dim() - element)
    aligned = coefficient[(None,) * missing]
    return aligned.unsqueeze(axis)


def response_to_both(
    b: Tensor | None, a: Tensor, x: Tensor, entering: Tensor | None, steps: Steps
) -> Tensor:
    """The response y of B(z) / A(z) to x, and of 1 / A(z) to what else is entering.

    a [..., n + 1] with n ≥ 1, b [..., at most n + 1], or None for B = 1. Their dimensions before
    the last one are broadcast to the dimensions of x other than the axis. `entering` has the shape
    of x. All are float32, float64 or complex.

    The two are added before the scan: each response may be far larger than their sum.
    """
    if b is None or entering is None:
        return response(b, a, x, steps)
    return response(None, a, moving_sum(b, x, steps) + entering, steps)


def response(b: Tensor | None, a: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """The response of B(z) / A(z) to x alone."""
    b, a = trimmed(torch.ones_like(a[..., :1]) if b is None else b, a)
    axis = steps.axis
    if not any(is_symbolic(size) for size in x.shape) and x.numel() == 0:
        return torch.empty_like(x)
    order = a.shape[-1] - 1
    length = x.shape[axis]
    if steps.offsets is None and not is_symbolic(length) and length <= min(order, MOST_FIRST_STEPS):
        return first_steps(b, a, x, steps)
    found = states_of(along(b, x, axis, 1), along(a, x, axis, 1), steps)
    if is_walked(order, x, steps):
        states = [t.squeeze(axis) for t in found[1:]]
        return walked(
            states, x, axis, steps.reverse, steps.offsets, steps.backend, steps.is_compiled
        )
    if is_cut(order, x, found, steps):
        y = in_chunks(found, x, steps)
        if y is not None:
            return y
    if order == 1:
        op, leaves = FIRST_ORDER, [
            t if t.dim() == x.dim() else t.flatten(x.dim()).squeeze(-1) for t in found
        ]  # fmt: skip
    else:
        op, leaves = HIGHER_ORDER, list(found[1:])
    return scan_of(op, leaves, x, axis, steps)


def first_steps(b: Tensor, a: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """The response as a loop computes it, for no more steps than the filter has poles: what a
    narrow filter gives so early is far smaller than the lattice's states."""
    axis, reverse = steps.axis, steps.reverse
    b, a = (t / a[..., :1] for t in (b, a))
    entering = moving_sum(b, x, steps).split(1, axis)
    found: list[Tensor] = []
    for t, y in enumerate(reversed(entering) if reverse else entering):
        for k in range(1, t + 1):
            y = y - along(a[..., k], x, axis) * found[t - k]
        found.append(y)
    return torch.cat(found[::-1] if reverse else found, axis)


def scan_of(
    op: Monoid, leaves: Sequence[Tensor], x: Tensor, axis: int, steps: Steps, init: Any = None
) -> Tensor:
    """The scan of x. leaves: of the operator, before x; the dimensions of x come first in each, of
    that size or 1, and the dimensions of its elements behind."""
    expanded = [t.expand(*x.shape, *t.shape[x.dim() :]) for t in leaves]
    y: Tensor = named_scan(
        FILTERED, op, (*expanded, x), axis, steps.reverse, False, init=init, offsets=steps.offsets,
        backend=steps.backend, deterministic=steps.deterministic,
    )  # fmt: skip
    return y


def is_cut(order: int, x: Tensor, states: States, steps: Steps) -> bool:
    """Whether few channels are scanned in chunks, by a kernel for CPUs."""
    if order == 1 or steps.offsets is not None or steps.backend not in (None, "auto", "cpu"):
        return False
    if not is_readable(x, *states):
        return False
    length = x.shape[steps.axis]
    return is_worth_cutting(order, length, x.numel() // length)


def in_chunks(states: States, x: Tensor, steps: Steps) -> Tensor | None:
    """`response` of a filter of higher order; None where a power of its matrix overflows."""
    _, D, g, c, first = (t.movedim(steps.axis, x.dim() - 1) for t in states)

    def reduce(weights: Tensor, chunks: Tensor) -> Tensor:
        leaves = weights.unsqueeze(-3).expand(*chunks.shape, weights.shape[-1]), chunks
        ends: Tensor = named_reduce(FILTERED, WEIGHTED_SUM, leaves, x.dim(), backend=steps.backend)
        return ends

    def scan(chunks: Tensor, before: Tensor) -> Tensor:
        leaves = [t.unsqueeze(x.dim()) for t in (D, g, c, first)]
        init = before.new_zeros(()).expand(*before.shape, before.shape[-1]), before
        return scan_of(HIGHER_ORDER, leaves, chunks, x.dim(), steps, init)

    last, rows = x.dim() - 1, x.movedim(steps.axis, -1)
    y = scanned(D.squeeze(last), g.squeeze(last), rows, steps.reverse, reduce, scan)
    if y is None or steps.axis == last:
        return y
    return y.movedim(-1, steps.axis).clone(memory_format=torch.contiguous_format)


def states_of(b: Tensor, a: Tensor, steps: Steps) -> States:
    """The states of b and a, which have the dimensions of x and one more, of the coefficients.

    On CPUs filters of float32 have states of float64. A rounded D acts in every step in the same
    way, so that the amplitude changes by up to 5e-8 per step; a loop's roundings differ from step
    to step.
    """
    order, most_exact = a.shape[-1] - 1, MOST_EXACT.get(a.dtype, 0)
    b, a = (t.to(wide_on_cpus(a, steps.backend)) for t in (b, a))
    # An element of all states is too large for the CUDA engine.
    backend = None if steps.backend == "cuda" else steps.backend

    def run(op: Monoid, leaves: tuple[Tensor, ...]) -> States:
        found: States = named_scan(FILTERED, op, leaves, steps.axis, backend=backend)
        return found

    if order > most_exact or not steps.is_exact:
        return run(STATES, (b, a))
    if runs_on_gpus(a, steps.backend) and order > MOST_AT_ONCE_ON_GPUS[a.dtype]:
        return exact_states_by_order(pad(b, (0, order + 1 - b.shape[-1])), a, run)
    return run(EXACT_STATES, (b, a))


def working(x: Tensor, steps: Steps, has_states: bool) -> tuple[torch.dtype, Steps]:
    """What x is converted to: float32 where it has 16 bits; on CPUs float64 or complex128 where a
    state is given or wanted. The last state of a narrow filter is a difference of numbers much
    larger than itself, and keeps no digit of a rounded y; the first one enters as such a sum."""
    own = carry_dtype(x.dtype)
    dtype = wide_on_cpus(x, steps.backend) if has_states else own
    return dtype, steps._replace(is_exact=dtype == own)


def is_walked(order: int, x: Tensor, steps: Steps) -> bool:
    """Whether states are passed on from chunk to chunk, in place of a scan of matrices."""
    is_right = LEAST_WALKED[x.dtype] <= order <= most_walked(x.dtype)
    return is_right and runs_on_gpus(x, steps.backend)


def trimmed(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """b and a without the last entries that are 0 in all filters, where their values can be read. A
    filter of first order keeps more digits than one of second order with a pole at 0."""
    while a.shape[-1] > 2 and is_readable(b, a):
        longest = a.shape[-1]
        if bool(a[..., -1].any()) or (b.shape[-1] == longest and bool(b[..., -1].any())):
            break
        b, a = b[..., : longest - 1], a[..., :-1]
    return b, a


Map = tuple[Tensor, Tensor]
SignedMap = tuple[Tensor, Tensor, Tensor]


def _enter_first(
    sign: Tensor, D: Tensor, g: Tensor, c: Tensor, first: Tensor, x: Tensor
) -> SignedMap:
    return sign, D, g * x


def _follow_first(left: SignedMap, right: SignedMap) -> SignedMap:
    """The map z ↦ σ (z + D z) + g after another one.

    σ z + g first: where σ is −1 and x stays the same it is 0, and what is left is small. Rounded
    otherwise, each pair of steps would add the same error.
    """
    sign1, D1, z1 = left
    sign2, D2, z2 = right
    return sign2 * sign1, D1 + (D2 + D2 * D1), (sign2 * z1 + z2) + sign2 * (D2 * z1)


def _leave_first(state: SignedMap, xs: tuple[Tensor, ...]) -> Tensor:
    """In the dtype of x, which is narrower than that of the states on CPUs."""
    return (xs[4] * xs[5] + xs[3] * state[2]).to(xs[5].dtype)


def _enter(D: Tensor, g: Tensor, c: Tensor, first: Tensor, x: Tensor) -> Map:
    return D, g * x


def _follow(left: Map, right: Map) -> Map:
    """The map z ↦ z + D z + g after another one."""
    D1, z1 = left
    D2, z2 = right
    return D1 + (D2 + D2 @ D1), (z1 + D2 @ z1) + z2


def _leave(state: Map, xs: tuple[Tensor, ...]) -> Tensor:
    return (xs[3] * xs[4] + (xs[2] * state[1]).sum()).to(xs[4].dtype)


def _weigh(weights: Tensor, x: Tensor) -> Tensor:
    return weights * x


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left + right


WEIGHTED_SUM = Monoid(_add, identity=0.0, name="weighted_sum", element_ndim=(1, 0), lift=_weigh)
# Exclusive scans: y[t] is made of the state before t and of x[t].
FIRST_ORDER = Monoid(
    _follow_first, identity=(1.0, 0.0, 0.0), name="filter_of_first_order", lift=_enter_first,
    lower=_leave_first,
)  # fmt: skip
HIGHER_ORDER = Monoid(
    _follow, identity=(0.0, 0.0), name="filter", element_ndim=(2, 1, 1, 0, 0), lift=_enter,
    lower=_leave,
)  # fmt: skip
