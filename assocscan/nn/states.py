"""What recurrent layers take, and the state that they leave."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..engines.base.shifted_leaves import at_last_steps
from ..errors import AssocScanError, ScanTypeError, ScanValueError
from ..functional.argument_errors import in_words, named_scan
from ..functional.operands import carry_dtype, checked_offsets
from ..functional.recurrence import linear_recurrence
from ..monoids.leaf_checks import NUMBERS
from ..monoids.leaf_names import OWN, LeafNames
from ..monoids.monoid import Monoid
from ..torch_state import same_shape
from ..wording import conversion, fitting_view, kind_of, shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Run(NamedTuple):
    """How a layer runs along L of x [B, L, features].

    reverse: from the end. group: of the ranks on whose parts the sequence lies. offsets: of packed
    sequences, checked; states then have a leading S.
    """

    reverse: bool = False
    group: ProcessGroup | None = None
    offsets: Tensor | None = None


def require_input(x: Tensor, features: int, weight: Tensor | None, positions: bool) -> None:
    """Refuse an x that is not [B, L, features], or [B, features] for one position: with another
    number of dimensions the scan would run along another axis.

    weight: of the product that x enters, where that does not convert x; see `require_dtype`.
    """
    wanted = f"[B, L, {features}]" if positions else f"[B, {features}]"
    if not isinstance(x, Tensor):
        raise ScanTypeError(
            f"x is {kind_of(x)}, the layer takes a tensor {wanted}{conversion('x', x)}"
        )
    if x.dim() != (3 if positions else 2) or x.shape[-1] != features:
        raise ScanValueError(f"x has shape {list(x.shape)}, the layer takes {wanted}")
    require_dtype(x, weight)


def require_dtype(x: Tensor, weight: Tensor | None) -> None:
    """Refuse an x that is no real float where there is no weight, and one of another dtype than
    the weight that it meets, unless autocast converts both."""
    if weight is None:
        if not x.is_floating_point():
            raise ScanTypeError(f"x is {x.dtype}, the layer takes real floats: pass x.float()")
        return
    if x.dtype == weight.dtype or type(weight) not in (Tensor, nn.Parameter):
        return
    either = f"x is {x.dtype} and the layer's parameters are {weight.dtype}: pass "
    if not x.is_floating_point():
        raise ScanTypeError(f"{either}x.to({weight.dtype})")
    is_cast = torch.float64 not in (x.dtype, weight.dtype)  # by autocast, which leaves float64
    if not is_cast or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        raise ScanTypeError(
            f"{either}x.to({weight.dtype}){', use torch.autocast' if is_cast else ''}, or convert "
            f"the layer: layer.to({x.dtype})"
        )


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight of an `nn.Linear`; None of another module put in its place, which may convert."""
    return module.weight if type(module) is nn.Linear else None


def checked_sequences(
    offsets: Tensor | None, x: Tensor, group: ProcessGroup | None = None
) -> Tensor | None:
    """The offsets of sequences packed along L of x [B, L, …], checked. What is returned is not
    checked again where it is passed on."""
    if offsets is not None and group is not None:
        raise ScanValueError(
            "offsets and group were passed: sequences that are packed lie whole on a rank; leave "
            "group out, or offsets"
        )
    if isinstance(offsets, Tensor) and tuple(offsets.shape) == (1,) and x.shape[1] > 0:
        # Said here, as kernels have no place for what belongs to no sequence.
        raise ScanValueError(
            f"offsets have shape [1], which are no sequences, but x has shape {list(x.shape)}"
        )
    return checked_offsets(offsets, x, 1)


def require_state(
    state: object,
    shape: tuple[int, ...],
    names: str,
    x: Tensor,
    offsets: Tensor | None = None,
    called: str = "state",
) -> None:
    """Refuse a state that does not broadcast to `shape`, whose dimensions are called `names`. None
    is a state that is not there yet.

    offsets: of packed sequences; the state then has a leading S. called: what errors call it.
    """
    if state is None:
        return
    shape, names = of_sequences(offsets, shape, names)
    if not isinstance(state, Tensor):
        raise ScanTypeError(
            f"{called} is {kind_of(state)}, expected a tensor {names}{conversion(called, state)}"
        )
    if same_shape(state.shape, shape):
        return
    pairs = zip(reversed(state.shape), reversed(shape), strict=False)
    if state.dim() > len(shape) or any(n not in (1, wanted) for n, wanted in pairs):
        raise ScanValueError(
            f"{called} has shape {list(state.shape)}, expected {list(shape)}: {names} of x "
            f"{list(x.shape)}; a state belongs to the layer and the batch that it came from"
            f"{fitting_view(called, state.shape, shape)}"
        )


def squeezed(called: str, given: Sequence[int], shape: Sequence[int]) -> str:
    """The end of the message for a state that has one dimension of size 1 too many, as one that
    packed sequences left, [S, 1, …]; else empty. called: what errors call it."""
    for d, n in enumerate(given):
        if n == 1 and (*given[:d], *given[d + 1 :]) == tuple(shape):
            return f"; pass {called}.squeeze({d})"
    return ""


def require_carry(
    state: object, shape: tuple[int, ...], names: str, x: Tensor, offsets: Tensor | None = None
) -> None:
    """The same for a layer that also takes a number, for all states."""
    if not isinstance(state, NUMBERS):
        require_state(state, shape, names, x, offsets)


def of_sequences(
    offsets: Tensor | None, shape: tuple[int, ...], names: str
) -> tuple[tuple[int, ...], str]:
    """The shape of a state and the names of its dimensions, with a leading S for packed
    sequences."""
    if offsets is None:
        return shape, names
    return (offsets.shape[0] - 1, *shape), f"[S, {names[1:]}"


def require_pair(state: object, names: str, origin: str = "as the layer returns it") -> None:
    """Refuse a state that is no pair of tensors, None for one that is not there."""
    wanted = f"expected a pair {names} of tensors, {origin}"
    if not isinstance(state, tuple) or len(state) != 2:
        raise ScanTypeError(f"state is {kind_of(state)}, {wanted}")
    for k, part in enumerate(state):
        if part is not None and not isinstance(part, Tensor):
            raise ScanTypeError(f"state[{k}] is {kind_of(part)}, {wanted}")


def require_sizes(**sizes: int) -> None:
    """Refuse sizes of a layer that are no positive whole numbers."""
    for name, size in sizes.items():
        try:
            if isinstance(size, (bool, Tensor)):
                raise TypeError
            number = operator.index(size)
        except TypeError:
            raise ScanTypeError(f"{name} is {shown(size)}, expected a whole number") from None
        if number < 1:
            raise ScanValueError(f"{name} is {size}, expected 1 or more")


def require_range(
    names: tuple[str, str], low: float, high: float, most: float = math.inf, above_0: bool = False
) -> None:
    """Refuse ends of a range that are no numbers, negative, above `most`, or not in order; with
    `above_0` also one that begins at 0."""
    for name, value in zip(names, (low, high), strict=True):
        require_number(name, value)
    if not 0 <= low <= high <= most or (above_0 and low == 0):
        end = "" if most == math.inf else f" ≤ {most}"
        raise ScanValueError(
            f"{names[0]} is {low} and {names[1]} {high}, expected 0 {'<' if above_0 else '≤'} "
            f"{names[0]} ≤ {names[1]}{end}"
        )


def require_number(name: str, value: object) -> None:
    """Refuse what is no real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ScanTypeError(f"{name} is {shown(value)}, expected a number")


def at_least_single(parameter: Tensor) -> Tensor:
    """In float32 where it has 16 bits: torch computes with no complex numbers of so few."""
    return parameter.to(carry_dtype(parameter.dtype))


def scan_pairs(
    op: Monoid,
    xs: tuple[Tensor, ...],
    dtype: torch.dtype,
    init: tuple[Tensor, Tensor] | None,
    run: Run,
    names: LeafNames = OWN,
) -> tuple[Tensor, Tensor]:
    """h [B, L, …] of an operator whose states are pairs (a, h), and the last state h.

    The state of a 16-bit layer is float32, in which the scan combines: `return_final` returns it.

    dtype: that of h. names: of the leaves, in errors.
    """
    reverse, group, offsets = run
    if group is not None:
        from .. import distributed

        try:
            h, (_, last) = distributed.associative_scan(
                op, xs, 1, reverse, init=init, return_final=True, group=group
            )
        except AssocScanError as error:
            raise in_words(error, names, op, xs, 1, init=init) from None
        return h, last
    if dtype.itemsize > 2:
        h = named_scan(names, op, xs, 1, reverse, init=init, offsets=offsets)
        return h, last_state(h, None if init is None else init[1], reverse, offsets)
    h, (_, last) = named_scan(
        names, op, xs, 1, reverse, init=init, return_final=True, offsets=offsets
    )
    return h, last


def recur(a: Tensor, b: Tensor, state: Tensor | None, run: Run) -> tuple[Tensor, Tensor]:
    """h [B, L, …] of a linear recurrence, and the last state."""
    reverse, group, offsets = run
    if group is not None:
        from .. import distributed

        h, last = distributed.linear_recurrence(a, b, state, 1, reverse, True, group=group)
        return h, last
    h = linear_recurrence(a, b, state, reverse=reverse, offsets=offsets)
    return h, last_state(h, state, reverse, offsets)


def copied(state: Tensor, h: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The state in the dtype of h, in memory of its own."""
    return state.to(h.dtype).expand(shape).clone(memory_format=torch.contiguous_format)


def last_state(
    h: Tensor, state: Tensor | None, reverse: bool, offsets: Tensor | None = None
) -> Tensor:
    """The last of the states h [B, L, …] that a scan met; `state`, or zeros, where L is 0. For
    packed sequences that of each, [S, B, …].

    For numbers of 32 bits and more it is what `return_final` returns, which in training would cost
    more: a final is a pair (a, h), and the products of a would be saved for its gradient. It is a
    copy, so that it does not keep all of h.
    """
    length, shape = h.shape[1], (h.shape[0], *h.shape[2:])
    if offsets is None:
        if length == 0:
            return h.new_zeros(shape) if state is None else copied(state, h, shape)
        return at_last_steps(h, 1, reverse, None).clone()
    shape = (offsets.shape[0] - 1, *shape)
    if not isinstance(state, Tensor):
        state = h.new_full(shape, 0 if state is None else state)
    if length == 0:
        return copied(state, h, shape)
    return at_last_steps(h, 1, reverse, offsets, state)
