"""A filter of several orders as walks along many chunks of the axis at once, for GPUs.

A scan of maps z ↦ M z + g multiplies matrices at every step, n³ products where a loop takes n², and
its kernels compile for minutes from order 5 on. But M is the same at every step, so that it is
enough to pass on states. The axis is cut into K chunks of C steps:

    1. every chunk is walked from the state 0, which gives the state e[k] that it ends with;
    2. the state before a chunk, z[k] = Mᶜ z[k−1] + e[k−1], is walked from chunk to chunk, or found
       in log₂ K rounds where channels are few (`passed_on`);
    3. every chunk is walked once more, from z[k], which gives y.

Where a packed sequence starts the state is 0 again, and the state that such a chunk ends with does
not depend on the one that it began with. Where there are many channels the axis is not cut, and
walked once.

Mᶜ − I is found from D = M − I by squaring, (I + D)² = I + (2 D + D²), in float64. For stable
filters no power of the lattice's M is larger than 1 (`lattice_states`). Powers of unstable ones may
overflow: a state of 0 stays 0 all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.base.shifted_leaves import start_mask
from ...torch_state import is_symbolic
from ..nonlinear.nonlinear_recurrence import nonlinear_recurrence
from ..nonlinear.step_operator import MAX_NUMBERS

# There are at most MOST_CHUNKS, and chunks × channels is at most MANY_CHAINS, which fill a GPU. On
# an H100 half and twice as many of either are slower or equal (docs/performance/filters.md).
MANY_CHAINS = 1 << 14
MOST_CHUNKS, LEAST_CHUNK = 4096, 64
MOST_NUMBERS = 18  # of the state and y: complex filters of order 8
FEW_CHANNELS = 32
OF_ANY_LENGTH = 512  # the steps of a chunk where the length of the axis is not known

Numbers = tuple[Any, ...]
Step = Callable[[Numbers, Numbers, Numbers], Numbers]


def walked(
    states: Sequence[Tensor], x: Tensor, axis: int, reverse: bool, offsets: Tensor | None,
    backend: str | None, is_compiled: bool = False,
) -> Tensor:  # fmt: skip
    """The response to x of the states D [batch…, n, n], g and c [batch…, n] and b[0] [batch…],
    whose batch broadcasts to the dimensions of x without the axis. is_compiled: `chunk_length`."""
    length = x.shape[axis]
    channels = math.prod([*x.shape[:axis], *x.shape[axis + 1 :]])
    chunk = chunk_length(length, channels, is_compiled)
    series = [x.movedim(axis, 0)]
    if offsets is not None:
        starts = start_mask(offsets, length, reverse).to(x.device)
        series.append(starts.view(-1, *[1] * (x.dim() - 1)))
    xs = [cut(t, chunk, reverse) for t in series]
    D, g, c, first = states
    z: Numbers = (0.0,) * D.shape[-1]
    if chunk is not None:
        before = [all_but_last(t, reverse) for t in xs]
        z = states_before_chunks(D, g, before, chunk, reverse, backend)
        xs = [all_but_first(t, reverse) for t in xs]
    coefficients = (*numbers(D.flatten(-2)), *numbers(g), *numbers(c), first)
    step = respond if offsets is None else respond_from_starts
    y: Tensor = walk(step, xs, (*z, 0.0), coefficients, reverse, backend, lower=last_number)
    if chunk is None:
        if axis == 0:
            return y
        # A copy in any case: torch's forward mode takes no view for a result.
        return y.movedim(0, axis).clone(memory_format=torch.contiguous_format)
    y = y.movedim((1, 0), (axis, axis + 1)).flatten(axis, axis + 1)
    if y.shape[axis] == length:
        return y
    y = y.narrow(axis, y.shape[axis] - length if reverse else 0, length)
    return y.clone(memory_format=torch.contiguous_format)


def most_walked(dtype: torch.dtype) -> int:
    """The highest order that is walked. Within torch.compile the state and y are the state of a
    user's step."""
    most = MAX_NUMBERS if torch.compiler.is_compiling() else MOST_NUMBERS
    return most // (2 if dtype.is_complex else 1) - 1


def chunk_length(length: int, channels: int, is_compiled: bool = False) -> int | None:
    """The steps of a chunk, a power of two; None: the axis is not cut.

    is_compiled: whether torch.compile makes a graph, which is made anew for lengths that it does
        not fit. An exported graph is for any length, shorter ones than a chunk included.
    """
    if is_symbolic(length) or is_symbolic(channels):
        return OF_ANY_LENGTH if is_compiled else None
    chunks = min(MANY_CHAINS // max(channels, 1), MOST_CHUNKS)
    if chunks < 2 or length <= LEAST_CHUNK:
        return None
    return max(1 << (-(-length // chunks) - 1).bit_length(), LEAST_CHUNK)


def numbers(t: Tensor) -> Numbers:
    return tuple(t.unbind(-1))


def cut(t: Tensor, chunk: int | None, reverse: bool) -> Tensor:
    """[L, batch…] as [chunk, 1 + chunks, batch…], with an empty chunk before the first one in scan
    order and zeros behind the last step. If `chunk` is None, t made contiguous."""
    if chunk is None:
        return t.contiguous()
    rest = -t.shape[0] % chunk
    ends = (rest, chunk) if reverse else (chunk, rest)
    padded = pad(t, [0, 0] * (t.dim() - 1) + [*ends])
    chunks: Tensor = padded.unflatten(0, (-1, chunk))
    return chunks.transpose(0, 1).contiguous()


def all_but_first(t: Tensor, reverse: bool) -> Tensor:
    """Without the first chunk in scan order."""
    return t[:, :-1] if reverse else t[:, 1:]


def all_but_last(t: Tensor, reverse: bool) -> Tensor:
    return all_but_first(t, not reverse)


def states_before_chunks(
    D: Tensor, g: Tensor, xs: Sequence[Tensor], chunk: int, reverse: bool, backend: str | None
) -> Numbers:
    """The state before each chunk, n numbers [chunks, batch…]. xs: all chunks but the last, behind
    an empty one."""
    zeros = (0.0,) * D.shape[-1]
    step: Step = move if len(xs) == 1 else move_from_starts
    _, ends = walk(
        step, xs, zeros, (*numbers(D.flatten(-2)), *numbers(g)), reverse, backend, first_number,
        return_final=True,
    )  # fmt: skip
    starts = [t.any(0) for t in xs[1:]]
    power_of_D = power(D, chunk)
    if not is_symbolic(xs[0].shape[1]) and ends[0][0].numel() < FEW_CHANNELS:
        return passed_on(power_of_D, torch.stack(ends, -1), starts, reverse)
    step = pass_on if not starts else pass_on_from_starts
    weights = numbers(power_of_D.to(ends[0].dtype).flatten(-2))
    return tuple(walk(step, [*ends, *starts], zeros, weights, reverse, backend))


def power(D: Tensor, exponent: int) -> Tensor:
    """(I + D)^exponent − I for a power of two, in float64; infinite where it overflows."""
    wide = widened(D)
    for _ in range(exponent.bit_length() - 1):
        wide = 2.0 * wide + wide @ wide
    return torch.where(wide.isnan(), math.inf, wide)


def widened(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def passed_on(D: Tensor, ends: Tensor, starts: Sequence[Tensor], reverse: bool) -> Numbers:
    """z[k] = (I + D) z[k−1] + e[k], n numbers [chunks, batch…], of ends e [chunks, batch…, n]. z is
    e alone where a chunk has a start.

    In rounds: before the round of s, z[k] holds the effects of the last s ends; it adds (I + D)^s
    z[k − s]. Few kernels, where a walk would take a step for each chunk.
    """
    z = widened(ends.flip(0) if reverse else ends)
    has_start = [t.flip(0) if reverse else t for t in starts]
    chunks, s = z.shape[0], 1
    while s < chunks:
        before = shifted(z, s)
        if has_start:
            before = torch.where(has_start[0].unsqueeze(-1), 0.0, before)
            has_start = [has_start[0] | shifted(has_start[0], s)]
        column = before.unsqueeze(-2)  # times each row of D
        z = z + (before + torch.where(column == 0, 0.0, D * column).sum(-1))
        D, s = power(D, 2), 2 * s
    return numbers((z.flip(0) if reverse else z).to(ends.dtype))


def shifted(t: Tensor, by: int) -> Tensor:
    """t[k − by] at k, and zeros before the first one."""
    return pad(t.narrow(0, 0, t.shape[0] - by), [0, 0] * (t.dim() - 1) + [by, 0])


def walk(
    step: Step, xs: Sequence[Any], init: Numbers, params: Any, reverse: bool, backend: str | None,
    lower: Any = None, return_final: bool = False,
) -> Any:  # fmt: skip
    """h[t] = step(h[t−1], x[t]) along the first dimension."""
    return nonlinear_recurrence(
        step, tuple(xs), init, 0, params=params, lower=lower, reverse=reverse,
        return_final=return_final, backend=backend,
    )  # fmt: skip


# The steps, on one element. params: the rows of D one behind the other, g, c and b[0], or the first
# of these.


def move(z: Numbers, xs: Numbers, params: Numbers) -> Numbers:
    n = len(z)
    return moved(z, params, [weight * xs[0] for weight in params[n * n : n * n + n]])


def moved(z: Numbers, D: Numbers, entering: Sequence[Any]) -> Numbers:
    """z + (D z + what enters): for narrow filters the bracket is small beside z."""
    n = len(z)
    rows = [D[i * n : (i + 1) * n] for i in range(n)]
    return tuple(
        here + (sum_of_products(row, z) + new)
        for here, row, new in zip(z, rows, entering, strict=True)
    )


def sum_of_products(a: Numbers, b: Numbers) -> Any:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total


def respond(state: Numbers, xs: Numbers, params: Numbers) -> Numbers:
    """The state, and y as one more number."""
    z = state[:-1]
    *c, first = params[-len(state) :]
    return (*move(z, xs, params), sum_of_products(tuple(c), z) + first * xs[0])


def pass_on(z: Numbers, ends: Numbers, D: Numbers) -> Numbers:
    """D may be infinite, where a state of 0 stays 0."""
    factors = z * len(z)  # of the rows of D, one behind the other
    D = tuple(torch.where(here == 0, 0.0, d) for here, d in zip(factors, D, strict=True))
    return moved(z, D, ends)


# The state before a step with which a sequence starts is 0. The last of xs marks these steps.


def zero_at_starts(z: Numbers, start: Tensor) -> Numbers:
    return tuple(torch.where(start, 0.0, here) for here in z)


def move_from_starts(z: Numbers, xs: Numbers, params: Numbers) -> Numbers:
    return move(zero_at_starts(z, xs[-1]), xs, params)


def respond_from_starts(state: Numbers, xs: Numbers, params: Numbers) -> Numbers:
    return respond(zero_at_starts(state, xs[-1]), xs, params)


def pass_on_from_starts(z: Numbers, xs: Numbers, D: Numbers) -> Numbers:
    return pass_on(zero_at_starts(z, xs[-1]), xs[:-1], D)


FROM_STARTS = move_from_starts, respond_from_starts, pass_on_from_starts
for own_step in (move, respond, pass_on, *FROM_STARTS):
    vars(own_step)["most_numbers"] = MOST_NUMBERS


def first_number(z: Numbers) -> Any:
    return z[0]


def last_number(z: Numbers) -> Any:
    return z[-1]
