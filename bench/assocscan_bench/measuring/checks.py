"""Whether a contender's result is right, before it is timed.

Floats are compared with a float64 reference by the largest difference over the largest value. The
bound leaves room for other orders of summation and for peers that sum in the dtype of their inputs:
it is there to find results that are wrong; `bench precision` compares errors. Integers must be
equal. Long scans of many lanes are compared on lanes spread over all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten
from assocscan.testing import tolerance

from ..settings import FORWARD
from .reference import reference

MOST_LANES = 8  # along each dimension
HEADROOM = 16


class Verdict(NamedTuple):
    """How far a result is from the right one, and how far it may be."""

    error: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.bound


Check = Callable[[Any], Verdict]


def against(expected: Callable[[], Any], dtype: torch.dtype, length: int) -> Check:
    """Compares whole results with what `expected` returns, computed when the first one comes."""
    known = functools.cache(lambda: [t.detach() for t in flatten(expected())[0]])
    bound = HEADROOM * tolerance(dtype, length)[0]
    return lambda result: Verdict(largest_error(flatten(result)[0], known()), bound)


def scan_check(
    op: Monoid,
    xs: Any,
    axis: int,
    which: str = FORWARD,
    cotangents: Any = None,
    view: Callable[..., Tensor] | None = None,
) -> Check:
    """Checks the scan of `op`, or the gradients of all float leaves of xs for these cotangents.

    view: outputs are compared as what it makes of their leaves.
    """
    leaves, spec = flatten(xs)
    dims = [t.dim() - n for t, n in zip(leaves, op.element_ndims(spec), strict=True)]
    batch = torch.broadcast_shapes(*(t.shape[:n] for t, n in zip(leaves, dims, strict=True)))
    lanes = Lanes(tuple(batch), axis)

    def expected() -> Any:
        few = [lanes.of(t).detach() for t in leaves]
        if which == FORWARD:
            ys = flatten(reference(op, unflatten(few, spec), axis))[0]
            return ys if view is None else [view(*ys)]
        wide = [t.to(torch.promote_types(t.dtype, torch.float64)) if _is_float(t) else t
                for t in few]  # fmt: skip
        few = [t.requires_grad_(_is_float(t)) for t in wide]
        ys = flatten(reference(op, unflatten(few, spec), axis))[0]
        given = [lanes.of(g) for g in flatten(cotangents)[0]]
        pairs = [(y, g.to(y.dtype)) for y, g in zip(ys, given, strict=True) if y.requires_grad]
        wanted = [t for t in few if t.requires_grad]
        return torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs],
                                   materialize_grads=True)  # fmt: skip

    floats = [t.dtype for t in leaves if _is_float(t)]
    widest = max(floats, key=lambda d: torch.finfo(d).eps) if floats else torch.int64
    compare = against(expected, widest, batch[axis])

    def check(result: Any) -> Verdict:
        if which == FORWARD:
            found = [lanes.of(t) for t in flatten(result)[0]]
            return compare(found if view is None else [view(*found)])
        inputs = [t for t in leaves if _is_float(t)]  # one that has no part in it has no gradient
        pairs = zip(result, inputs, strict=True)
        return compare([lanes.of(torch.zeros_like(t) if g is None else g) for g, t in pairs])

    return check


def final_check(op: Monoid, xs: Any, axis: int) -> Check:
    """Checks the last output of the scan of `op`, in the shape of the batch without the axis."""
    leaves, spec = flatten(xs)
    batch = tuple(leaves[0].shape)
    lanes, rest = Lanes(batch, axis), Lanes(batch[:axis] + batch[axis + 1 :], len(batch))

    def expected() -> Any:
        ys = flatten(reference(op, unflatten([lanes.of(t) for t in leaves], spec), axis))[0]
        return [y.select(axis, -1) for y in ys]

    compare = against(expected, leaves[0].dtype, batch[axis])
    return lambda result: compare([rest.of(t) for t in flatten(result)[0]])


class Lanes:
    """Positions spread over every dimension of a batch but the axis, first and last included."""

    def __init__(self, batch: tuple[int, ...], axis: int) -> None:
        self.index = [
            None if dim == axis or size <= MOST_LANES
            else torch.linspace(0, size - 1, MOST_LANES).round().long()
            for dim, size in enumerate(batch)
        ]  # fmt: skip

    def of(self, t: Tensor) -> Tensor:
        """The part of a tensor at these lanes."""
        for dim, index in enumerate(self.index):
            if index is not None and t.shape[dim] > 1:
                t = t.index_select(dim, index.to(t.device))
        return t


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Over all tensors: the largest difference over the largest finite value of its tensor;
    infinite for other numbers of tensors, other shapes, other integers, and for NaN or infinities
    at other places."""
    if len(got) != len(want):
        return float("inf")
    return max((error_of(a, b) for a, b in zip(got, want, strict=True)), default=0.0)


def error_of(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    if not _is_float(want):
        return 0.0 if torch.equal(got.to(want.device, want.dtype), want) else float("inf")
    got = got.detach().to(want.device, want.dtype)
    finite = torch.isfinite(want)
    if not torch.equal(torch.isfinite(got), finite):
        return float("inf")
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return float("inf")
    difference, values = (got - want)[finite].abs(), want[finite].abs()
    if not values.numel():
        return 0.0
    return float(difference.max() / values.max().clamp_min(torch.finfo(values.dtype).tiny))


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
