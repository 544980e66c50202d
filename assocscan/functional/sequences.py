"""Gaps, runs and selections of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..api.tensor_subclasses import overridable
from ..engines.base.shifted_leaves import edge_mask, previous_state
from ..errors import ScanTypeError, ScanValueError
from ..monoids.combinators import segmented, with_lift, with_lower
from ..monoids.leaf_checks import check_axis, check_tensor
from ..monoids.monoid import Monoid
from ..torch_state import is_less, is_symbolic
from ..wording import shown
from .argument_errors import check_mask, named_scan
from .cumulative import cumsum
from .operands import as_dtype, expanded, placeable

__all__ = ["compact", "forward_fill", "run_length_encode", "run_lengths"]


@overridable
def forward_fill(
    x: Tensor,
    valid: Tensor | None = None,
    axis: int = -1,
    reverse: bool = False,
    *,
    limit: int | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Every gap filled with the last valid value before it.

        y[t] = x[s], s the last step ≤ t with valid[s]; x[t] where there is none

    >>> import torch, assocscan
    >>> nan = float("nan")
    >>> assocscan.forward_fill(torch.tensor([nan, 1.0, nan, nan, 2.0, nan]))
    tensor([nan, 1., 1., 1., 2., 2.])

    `valid` (bool) broadcasts to x; by default what is not NaN is valid. With `reverse` gaps are
    filled from the end: with the next valid value. Any dtype; differentiable in x.

    `limit` is how many steps after a valid one are filled at most, as in pandas; a longer gap keeps
    what x has in the rest of it.

    >>> assocscan.forward_fill(torch.tensor([1.0, nan, nan, nan, 2.0, nan]), limit=2)
    tensor([1., 1., 1., nan, 2., 2.])

    `offsets`, int64 or int32 [S + 1], are the boundaries of S sequences packed along the axis;
    they, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a tensor, valid not one of bool, or limit not an int.
        ValueError: valid does not broadcast to x, or limit is less than 1.

    Cost per element: 1 selection (2, and 1 addition, with a limit), reads x (and valid), writes y.
    """
    check_tensor("x", x)
    xs: Any = x
    if valid is not None:
        refuse_limit(valid)
        check_mask("valid", valid, x)
        xs = x, expanded(valid, x, "valid")
    op = FILL_NAN if valid is None else FILL
    if limit is not None:
        most = torch.full((), checked_limit(limit), dtype=torch.int64, device=x.device)
        op = FILL_NAN_UP_TO if valid is None else FILL_UP_TO
        xs = (*(xs if isinstance(xs, tuple) else (xs,)), most.expand(x.shape))
    filled: Tensor = named_scan(
        {"xs": "x"} if valid is None else {"xs": "x", "xs[1]": "valid"},
        op,
        xs,
        axis,
        reverse,
        offsets=offsets,
        backend=backend,
        deterministic=deterministic,
    )
    return filled


@overridable
def run_lengths(
    x: Tensor,
    axis: int = -1,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """How many steps the current value has lasted: 1, 2, … within every run of equal values.

    >>> import torch, assocscan
    >>> assocscan.run_lengths(torch.tensor([5, 5, 5, 2, 5, 5]))
    tensor([1, 2, 3, 1, 1, 2])

    Any dtype; NaN is a run of its own at every step. The result is int64, in the shape of x.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises TypeError where x is not a tensor, `AxisError` where `axis` is out of range.

    Cost per element: 2 operations, reads a bool and writes an int64, after one comparison of x with
    itself.
    """
    check_tensor("x", x)
    axis = check_axis(axis, x.shape, x.dim(), "x")
    one = torch.ones((), dtype=torch.int64, device=x.device).expand(x.shape)
    xs = one, run_starts(x, axis)
    lengths: Tensor = named_scan(
        {"xs": "x"}, segmented(ops.sum), xs, axis, backend=backend, deterministic=deterministic
    )
    return lengths


@overridable
def run_length_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """The value and the length of every run of equal values of a sequence x [L].

    >>> import torch, assocscan
    >>> assocscan.run_length_encode(torch.tensor([5, 5, 5, 2, 5, 5]))
    (tensor([5, 2, 5]), tensor([3, 1, 2]))

    Returns (values [R], lengths [R]); their number depends on the data, so that a GPU is waited
    for.

    Raises TypeError where x is not a tensor, ValueError where it has not one dimension.
    """
    check_tensor("x", x)
    if x.dim() != 1:
        raise ScanValueError(f"x has shape {list(x.shape)}, expected one dimension")
    if x.is_meta:
        raise ScanValueError("x is on the meta device: how many runs it has is not known")
    starts = run_starts(x, 0).nonzero()[:, 0]
    return x[starts], torch.diff(starts, append=starts.new_full((1,), x.shape[0]))


@overridable
def compact(
    x: Tensor,
    keep: Tensor,
    axis: int = -1,
    *,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """What is kept of x, moved to the front of the axis in its order; zeros behind.

    >>> import torch, assocscan
    >>> x, keep = torch.tensor([5, 6, 7, 8]), torch.tensor([False, True, False, True])
    >>> packed, count = assocscan.compact(x, keep)
    >>> packed, int(count)
    (tensor([6, 8, 0, 0]), 2)

    `keep` (bool) broadcasts to x. Returns (packed, count): packed in the shape of x, count [...]
    int64 without the axis. No shape depends on the data: a GPU is not waited for. Differentiable in
    x.

    The position of an element is the exclusive sum of `keep` before it. `backend` and
    `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: x is not a tensor, or keep not one of bool.
        ValueError: keep does not broadcast to x.

    Cost per element: 1 addition, reads keep and writes an int64, then one scatter of x.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section 1.1.
    """
    check_tensor("x", x)
    check_mask("keep", keep, x)
    axis = check_axis(axis, x.shape, x.dim(), "x")
    keep = expanded(keep, x, "keep")
    length = x.shape[axis]
    place = cumsum(keep, axis, inclusive=False, backend=backend, deterministic=deterministic)
    count = keep.sum(axis)
    target = torch.where(keep, place, length)  # one place more, for what is not kept
    shape = list(x.shape)
    shape[axis] = length + 1
    packed = placeable(x.new_zeros(shape)).scatter(axis, target, placeable(x))
    return as_dtype(packed, x.dtype).narrow(axis, 0, length), count


def run_starts(x: Tensor, axis: int) -> Tensor:
    """True where a value differs from the one before it, and at the first step."""
    length = x.shape[axis]
    if is_symbolic(length):
        first = edge_mask(tuple(x.shape), axis, False, None, x.device)
        return first | (x != previous_state(x, None, axis, False, None))
    first = torch.ones_like(x.narrow(axis, 0, min(length, 1)), dtype=torch.bool)
    if length == 0:
        return first
    changes = x.narrow(axis, 1, length - 1) != x.narrow(axis, 0, length - 1)
    return torch.cat([first, changes], axis)


LONGEST = 2**63 - 1  # a limit that int64 holds; no axis is longer


def checked_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, (int, torch.SymInt)):
        raise ScanTypeError(f"limit is {shown(limit)}, expected an int or None")
    if is_less(limit, 1):  # type: ignore[arg-type]
        raise ScanValueError(f"limit is {limit}, expected at least 1; None fills whole gaps")
    return limit if is_symbolic(limit) else min(limit, LONGEST)  # type: ignore[return-value]


def refuse_limit(valid: object) -> None:
    """Raise ScanTypeError for a number in the place of `valid`: pandas has the limit there."""
    if isinstance(valid, int) and not isinstance(valid, bool):
        raise ScanTypeError(
            f"valid is {valid}, expected a tensor of bool or None; for a limit pass "
            f"limit={max(valid, 1)}, for an axis axis={valid}"
        )


def filled(state: tuple[Tensor, Tensor], xs: tuple[Tensor, Tensor]) -> Tensor:
    return torch.where(state[1], state[0], xs[0])


def filled_nan(state: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    return torch.where(state[1], state[0], x)


Aged = tuple[Tensor, Tensor, Tensor]


def last_valid_and_age(left: Aged, right: Aged) -> Aged:
    """`ops.last_valid` with the number of steps since then; of no use where there is none."""
    value, valid = ops.last_valid((left[0], left[1]), (right[0], right[1]))
    return value, valid, torch.where(right[1], right[2], left[2] + right[2])


def aged(x: Tensor, valid: Tensor, limit: Tensor) -> Aged:
    return torch.where(valid, x, 0).to(x.dtype), valid, torch.where(valid, 0, 1).to(limit.dtype)


def filled_up_to(state: Aged, xs: tuple[Tensor, ...]) -> Tensor:
    return torch.where(state[1] & (state[2] <= xs[-1]), state[0], xs[0])


def up_to(name: str, lift: Any) -> Monoid:
    identity = (0.0, False, 0)
    return Monoid(last_valid_and_age, identity=identity, name=name, lift=lift, lower=filled_up_to)


FILL = with_lower(ops.last_valid, filled)
FILL_NAN = with_lower(with_lift(ops.last_valid, lambda x: (x, x == x)), filled_nan)
FILL_UP_TO = up_to("forward_fill_up_to", aged)
FILL_NAN_UP_TO = up_to("forward_fill_nan_up_to", lambda x, limit: aged(x, x == x, limit))
