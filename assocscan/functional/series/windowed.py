"""Scans of moving windows, for operators that need not have an inverse: `windowed`.

The axis is cut into blocks of `width` steps, and packed sequences each on its own. A window that
ends in a block begins in it or in the block before. So it is

    y[t] = S[t − width + 1] ∘ P[t]

where P[t] combines the steps of t's block up to t, and S[s] the steps of s's block from s on; or
P[t] alone, where t is the last step of its block or the block is the first of its sequence (the
window is then exactly the steps of P). P and S are scans that start anew at blocks (`segmented`). S
runs first, from the other end; then one scan makes P and combines it with S, moved on by width − 1
steps, inside its kernel. No window reads what another one has of NaN or infinite values, and the
number of combinations does not grow with the width. On the CPU all of that is one kernel
(`windows_in_one_pass`) where tensors are plain memory of the CPU.

Source: M. van Herk, "A fast algorithm for local minimum and maximum filters on rectangular and
octagonal kernels", Pattern Recognition Letters 13(7), 1992; J. Gil, M. Werman, "Computing 2-D min,
median, and max filters", IEEE Transactions on Pattern Analysis and Machine Intelligence 15(5),
1993.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.associative_scan import associative_scan
from ...api.bind_arguments import bind, monoid_axis, slice_axis
from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable
from ...caching.bounded import Calls
from ...engines.base.huge_pages import MIN_BYTES, empty_strided
from ...engines.base.shifted_leaves import sequence_of_steps
from ...errors import AssocScanError, ScanValueError
from ...monoids.captured_values import present
from ...monoids.combinators import _to_window_ends, _windowed, segmented
from ...monoids.leaf_names import OWN
from ...monoids.monoid import _REGISTRY, Monoid, resolve
from ...monoids.raw_callables import MAX_RAW, SliceFunction, slice_function
from ...program.dtypes import STORAGE_ONLY
from ...program.operator import Leaf
from ...pytrees import spread, tree_map
from ...runtime.native import runner
from ...runtime.prepared.prepared_call import entry_of
from ...runtime.scan_call import ScanCall
from ...torch_private import pytree
from ...torch_state import is_less, is_symbolic, is_tracked, same_shape
from ...wording import shown
from ..operands import are_memory, checked_offsets
from ..sequences import LONGEST
from .windows_in_one_pass import in_one_pass

__all__ = ["windowed"]


@overridable
def windowed(
    op: Any,
    xs: Any,
    width: int,
    axis: int = 0,
    reverse: bool = False,
    *,
    offsets: Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> Any:
    """All windows of `width` steps of `xs` along `axis`, combined in order by `op`.

        y[t] = x[t − width + 1] ∘ … ∘ x[t],   from the start of the sequence where that is later

    >>> import torch
    >>> from assocscan import ops, windowed
    >>> windowed(ops.max, torch.tensor([3, 1, 4, 1, 5, 9, 2]), 3)
    tensor([3, 3, 4, 4, 5, 9, 9])
    >>> windowed(ops.sum, torch.tensor([1, 2, 3, 4]), 2, reverse=True)
    tensor([3, 5, 7, 4])

    The first windows of a sequence are shorter. `op` needs neither an inverse nor an identity, and
    need not be commutative: maxima, moving log-sum-exp, products of matrices.

    op, xs, axis, backend, deterministic: as in `associative_scan`, with lift and lower.
    width: an int, at least 1. Where it is larger than the axis, the result is that of a scan.
    reverse: windows begin at t; exactly flip(windowed(flip(xs))), so that `op` receives (later,
        earlier).
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; no window
        crosses them.

    Returns what an inclusive `associative_scan` returns: the structure and dtypes of xs, or those
    that lift and lower give. Differentiable in xs, of higher order too. A NaN or an infinite value
    is in the windows that contain it, and in no other.

    Sums have the dtype of xs: `ops.sum` of bool is True where any step is, and that of int8 wraps
    above 127. Count the steps of a mask with `ops.count`, and convert other integers: xs.long().

    Raises what `associative_scan` raises, and ValueError for a width that is not an int of at least
    1. A plain function that captures a tensor runs eagerly.

    Cost per element: that of about two scans and one more combination, for any width. On the CPU
    one kernel does it all; only where x is small beside the width (fewer than 8 to 16 blocks of
    `width` steps in all rows and channels) are the states of one scan written, moved and read.

    Source: M. van Herk, "A fast algorithm for local minimum and maximum filters on rectangular and
    octagonal kernels", Pattern Recognition Letters 13(7), 1992.
    """
    if isinstance(op, Monoid) and deterministic is None and not torch.compiler.is_compiling():
        if not op.sees_nothing:
            op = present(op)
        found = repeated(op, xs, width, axis, reverse, backend, offsets)
        if found is not runner.MISS:
            return found
    given_axis, given_offsets = axis, offsets
    reverse = flag("reverse", reverse)
    width = checked_width(width)
    engine: dict[str, Any] = {
        "backend": checked_backend(backend, deterministic), "deterministic": deterministic
    }  # fmt: skip
    call = None
    if not torch.compiler.is_dynamo_compiling():
        call = bind(op, xs, axis, reverse, True, None, False, None)
        op = of_numbers(call, op)
    if isinstance(op, str):  # without the registry's lock, which Dynamo cannot read
        op = _REGISTRY[op] if op in _REGISTRY else resolve(op)
    leaves, spec = pytree.tree_flatten(xs)  # which Dynamo can read
    if isinstance(op, Monoid):
        ndims = spread(xs, op.element_ndim, f"element_ndim of {op.name!r}")
        axis = monoid_axis(axis, leaves, ndims, spec, op.name, OWN)
        dims = leaves[0].dim() - ndims[0]
    else:
        axis = slice_axis(axis, leaves, spec)
        dims = leaves[0].dim() if len({t.dim() for t in leaves}) == 1 else axis + 1
    offsets = checked_offsets(offsets, leaves[0], axis)
    length = leaves[0].shape[axis]
    if not is_symbolic(length) and width >= length:
        return associative_scan(op, xs, axis, reverse, offsets=offsets, **engine)
    windows = of_elements if isinstance(op, Monoid) else of_slices

    shape = [length if d == axis else 1 for d in range(dims)]

    def composed(given: Any, offsets: Tensor | None) -> Any:
        device = pytree.tree_leaves(given)[0].device
        blocks = Blocks(*(t.view(shape) for t in cut(length, width, reverse, offsets, device)))
        return windows(op, given, width, axis, reverse, dims, blocks, engine)

    def of_leaves(given: Sequence[Tensor], offsets: Tensor | None) -> list[Tensor]:
        ys: list[Tensor] = pytree.tree_leaves(
            composed(pytree.tree_unflatten(list(given), spec), offsets)
        )
        return ys

    if call is not None:
        entry, kept = None, call.operator if isinstance(call.operator, Monoid) else op
        if isinstance(kept, Monoid):
            named = engine["backend"] or "auto"
            entry = entry_of(
                calls_of(kept, width), xs, given_axis, reverse, True, None, False, named,
                given_offsets,
            )  # fmt: skip
            found = runner.MISS if entry is None else entry.run()
            if found is not runner.MISS:
                return found
        found = in_one_pass(call, width, offsets, engine["backend"], entry, of_leaves)
        if found is not None:
            return found
    return composed(xs, offsets)


def repeated(
    op: Monoid, xs: Any, width: Any, axis: Any, reverse: Any, backend: Any, offsets: Any
) -> Any:
    """The windows of a call that the C++ runner has; else `runner.MISS`."""
    calls = op.windows.get(width) if type(width) is int else None
    if calls is None:
        return runner.MISS
    named = "auto" if backend is None else backend
    return runner.call(calls, xs, axis, reverse, True, None, False, named, offsets)


def calls_of(op: Monoid, width: int) -> Calls:
    """The prepared calls of windows of this width."""
    found: Calls | None = op.windows.get(width)
    return op.windows.insert(width, Calls()) if found is None else found


def of_numbers(call: ScanCall, op: Any) -> Any:
    """A plain function as a monoid, where kernels are made for it and its leaves have one shape:
    the final combination is then part of a kernel, too. For a monoid: its version with the current
    captured values. Functions for which no kernel can be made, or whose leaves differ in shape, are
    returned as they are."""
    function, leaves = call.operator, call.leaves
    if not isinstance(function, SliceFunction):
        return function
    if call.traced.operator is None:
        return op
    if not all(same_shape(t.shape, leaves[0].shape) for t in leaves):
        return op
    found = as_monoid(function)
    try:
        found.trace_for(call.input_spec, tuple(Leaf(t.dtype) for t in leaves))
    except AssocScanError:  # it needs the dimensions of slices
        return op
    return found


@functools.lru_cache(maxsize=MAX_RAW)
def as_monoid(function: SliceFunction) -> Monoid:
    return Monoid(function.combine, name=function.name.strip("<>"))


def checked_width(width: Any) -> int:
    number: Any
    if is_symbolic(width) and isinstance(width, (int, torch.SymInt)):
        number = None if isinstance(width, bool) else width
    else:
        try:
            number = None if isinstance(width, (bool, Tensor)) else operator.index(width)
        except TypeError:
            number = None
    if number is None or is_less(number, 1):
        raise ScanValueError(f"width is {shown(width)}, expected an int of at least 1")
    return number if is_symbolic(number) else min(number, LONGEST)  # type: ignore[no-any-return]


class Blocks(NamedTuple):
    """Flags of each step, in scan order: whether it is the first of a block, the last one, and
    whether its window begins in its own block."""

    starts: Tensor
    ends: Tensor
    alone: Tensor


def cut(
    length: int, width: int, reverse: bool, offsets: Tensor | None, device: torch.device
) -> Blocks:
    step = torch.arange(length, device=device)
    if offsets is None:
        place = length - 1 - step if reverse else step
    else:
        offsets = offsets.to(device)
        sequence = sequence_of_steps(offsets, length)
        place = offsets[sequence + 1] - 1 - step if reverse else step - offsets[sequence]
    inside = place % width
    starts = inside == 0
    return Blocks(
        starts, starts.roll(1 if reverse else -1), (place < width) | (inside == width - 1)
    )


def of_elements(
    op: Monoid, xs: Any, width: int, axis: int, reverse: bool, dims: int, blocks: Blocks,
    engine: dict[str, Any],
) -> Any:  # fmt: skip
    """The windows of a monoid."""
    if width == 1:
        return associative_scan(segmented(op), (xs, blocks.starts), axis, reverse, **engine)
    states = _to_window_ends((op,))
    by = 1 - width if reverse else width - 1
    later = pytree.tree_leaves(
        associative_scan(states, (xs, blocks.ends), axis, not reverse, **engine)
    )
    before = []
    while later:  # memory is used again, which spares page faults
        before.append(moved(later.pop(0), by, axis))
    ndims = tuple([t.dim() - dims for t in before])
    given = (xs, tuple(before), blocks.starts, blocks.alone)
    return associative_scan(_windowed((op,), ndims), given, axis, reverse, **engine)


def moved(t: Tensor, by: int, axis: int) -> Tensor:
    """t[s − by] at s; what leaves at one end enters at the other, and is not used here.

    As `torch.roll`, which is slow for large tensors: its kernel on GPUs divides for every element,
    and a large tensor of the CPU gets memory of huge pages here (on the 2-core build machine 2 to 5
    ms in place of 16 for 25 MB in new memory).
    """
    if not are_memory(t) or t.device.type not in ("cpu", "cuda") or t.nbytes < MIN_BYTES:
        return t.roll(by, axis)
    if is_tracked((t,)):
        result: Tensor = Moved.apply(t, by, axis)
        return result
    length = t.shape[axis]
    by %= length
    result = torch.empty_like(t) if t.is_cuda else new_memory(t)
    result.narrow(axis, by, length - by).copy_(t.narrow(axis, 0, length - by))
    result.narrow(axis, 0, by).copy_(t.narrow(axis, length - by, by))
    return result


def new_memory(t: Tensor) -> Tensor:
    """Memory of huge pages in the layout of a tensor of the CPU."""
    strides = tuple(torch.empty_like(t, device="meta").stride())
    return empty_strided(tuple(t.shape), strides, t.dtype)


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, by: int, axis: int) -> Tensor:
        ctx.by, ctx.axis = by, axis
        return moved(t.detach(), by, axis)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return moved(cotangent, -ctx.by, ctx.axis), None, None


def of_slices(
    op: Any, xs: Any, width: int, axis: int, reverse: bool, dims: int, blocks: Blocks,
    engine: dict[str, Any],
) -> Any:  # fmt: skip
    """The windows of a plain function, which gets slices of any number of steps. Kernels are made
    for leaves of one shape, so that flags get that of the leaves, where they have one."""
    leaves = pytree.tree_leaves(xs)
    if all(same_shape(t.shape, leaves[0].shape) for t in leaves):
        blocks = Blocks(*(t.expand(leaves[0].shape) for t in blocks))
    kinds = tree_map(lambda t: t.dtype, xs)
    xs = tree_map(lambda t: t.float() if t.dtype in STORAGE_ONLY else t, xs)
    given = (xs, blocks.starts)
    first, second = wrapped(op)
    states, _ = associative_scan(first, given, axis, reverse, **engine)
    if width > 1:
        given = (xs, blocks.ends)
        later, _ = associative_scan(second, given, axis, not reverse, **engine)
        by = 1 - width if reverse else width - 1
        before = tree_map(lambda t: moved(t, by, axis), later)
        states = unless(blocks.alone, states, op, before, states)
    return tree_map(lambda t, kind: t.to(kind), states, kinds)


def wrapped(op: Any) -> tuple[Any, Any]:
    """`restarting` in the order of the axis and in the other one: the same functions for functions
    that are equal to a scan, so that they are traced once."""
    if torch.compiler.is_dynamo_compiling():
        return restarting(op, False), restarting(op, True)
    return known(slice_function(op))


@functools.lru_cache(maxsize=MAX_RAW)
def known(op: SliceFunction) -> tuple[Any, Any]:
    pair = restarting(op.combine, False), restarting(op.combine, True)
    for fn in pair:
        fn.__name__ = op.name  # for messages
    return pair


def restarting(fn: Callable[[Any, Any], Any], is_reversed: bool) -> Callable[[Any, Any], Any]:
    """`segmented` for a plain function; of `reversed_order` where that is wanted."""

    def combine(left: Any, right: Any) -> Any:
        (a, early), (b, late) = left, right
        pair = (b, a) if is_reversed else (a, b)
        return unless(late, b, fn, *pair), early | late

    return combine


def unless(
    flag: Tensor, otherwise: Any, fn: Callable[[Any, Any], Any], left: Any, right: Any
) -> Any:
    """fn(left, right), or `otherwise` where the flag is set. There left and right get no gradient:
    autograd would multiply zeros by slopes that may be infinite."""
    if torch.is_grad_enabled():
        left, right = (
            tree_map(lambda t: torch.where(shaped(flag, t), t.detach(), t), x)
            for x in (left, right)
        )
    return tree_map(lambda t, u: torch.where(shaped(flag, t), t, u), otherwise, fn(left, right))


def shaped(flag: Tensor, t: Tensor) -> Tensor:
    """A flag whose dimensions are the first of t."""
    return flag[(..., *(None,) * (t.dim() - flag.dim()))]
