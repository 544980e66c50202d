"""What the caller wrote → `ScanCall`, checked and normalised. Every message names the leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.packed_offsets import check_offsets
from ..engines.base.spec import plain
from ..errors import (
    BackendError,
    ScanTypeError,
    ScanValueError,
    TraceError,
    UnsupportedOperation,
    UntraceableError,
)
from ..monoids.monoid import Monoid, resolve
from ..monoids.slice_function import SliceFunction, slice_function
from ..monoids.tensor_checks import check_axis, check_leaves, check_tensor
from ..program.operator import Leaf
from ..pytrees import TreeSpec, align, flatten, leaf_paths, template
from ..runtime.scan_call import ScanCall
from ..torch_state import needs_dispatcher
from ..trace.expected_structure import require_carry, require_function
from ..trace.fx_trace import isolated
from ..trace.trace_slices import trace_slices
from ..trace.traced_monoid import TracedMonoid, untraced
from ..wording import kind_of, shown


def bind(
    op: Any,
    xs: Any,
    axis: int,
    reverse: bool,
    inclusive: bool,
    init: Any,
    return_final: bool,
    offsets: torch.Tensor | None,
) -> ScanCall:
    """Check and normalise the arguments of `associative_scan`."""
    operator = resolve_operator(op, xs)
    leaves, spec = flatten(xs)
    check_leaves(leaves, spec)
    if isinstance(operator, Monoid):
        ndims = operator.element_ndims(spec)
        axis = monoid_axis(axis, leaves, ndims, spec, operator.name)
    else:
        ndims = [0] * len(leaves)
        axis = raw_axis(axis, leaves, spec)
    check_lengths(leaves, axis, spec)
    leaves = [plain(t) for t in leaves]
    offsets = check_offsets(offsets, leaves[0].shape[axis], leaves[0].device)
    kinds = tuple(
        Leaf(t.dtype, tuple(t.shape[t.dim() - n :])) for t, n in zip(leaves, ndims, strict=True)
    )
    batch = tuple(leaves[0].shape)
    if isinstance(operator, Monoid):
        batch = batch_shape(leaves, ndims, axis, spec)
        traced = operator.trace_for(spec, kinds)
        if traced.by_component is not None:
            batch = (*batch, *kinds[0].shape)
            traced, ndims = traced.by_component, [0] * len(leaves)
    else:
        traced = untraced(spec, kinds, "")
    call = ScanCall(operator, traced, spec, leaves, ndims, batch, axis, reverse, inclusive, None,
                    return_final, offsets)  # fmt: skip
    if init is None:
        check_edges(call)
    if isinstance(operator, SliceFunction):
        call.traced = trace_for_call(operator, spec, leaves, axis)
    if init is not None:
        call.init = bind_init(call, init)
    return call


def resolve_operator(op: Any, xs: Any) -> Monoid | SliceFunction:
    """The operator of a call on `xs`, which is looked at for an error message alone."""
    if isinstance(op, Monoid):
        return op
    if isinstance(op, str):
        return resolve(op)
    if not callable(op) and (isinstance(xs, str) or callable(xs)):
        raise ScanTypeError(
            f"op is {kind_of(op)} and xs {shown(xs)}: the operator comes first, then xs"
        )
    require_function(op, "op must be a Monoid, the name of one or a function of two elements")
    return slice_function(op)


def monoid_axis(
    axis: int, leaves: list[torch.Tensor], ndims: Sequence[int], spec: TreeSpec, name: str
) -> int:
    """The axis as an index into batch dimensions, which are the same in number for all leaves."""
    batch_ndims = [t.dim() - n for t, n in zip(leaves, ndims, strict=True)]
    for k, n in enumerate(batch_ndims):
        if n < 0:
            raise ScanValueError(
                f"{leaf_paths(spec, 'xs')[k]} has shape {list(leaves[k].shape)}, but its elements "
                f"have {ndims[k]} dimension{'s' * (ndims[k] != 1)} (element_ndim of {name!r}), and "
                f"the axis comes before these: expected {ndims[k] + 1} dimensions or more"
            )
        if n != batch_ndims[0]:
            paths = leaf_paths(spec, "xs")
            seen = ", ".join(
                f"{p}: shape {list(t.shape)} with {e} element dimensions"
                for p, t, e in zip(paths, leaves, ndims, strict=True)
            )
            raise ScanValueError(
                f"{paths[k]} has another number of batch dimensions than {paths[0]} ({seen}); "
                "unsqueeze it so that the batch dimensions line up"
                f"{f', or correct element_ndim of {name!r}' if any(ndims) else ''}"
            )
    return in_range(axis, batch_ndims[0], spec, leaves, 0)


def raw_axis(axis: int, leaves: list[torch.Tensor], spec: TreeSpec) -> int:
    """A negative axis counts from the last dimension of the first leaf."""
    resolved = in_range(axis, leaves[0].dim(), spec, leaves, 0)
    for k, t in enumerate(leaves):
        in_range(resolved, t.dim(), spec, leaves, k)
    return resolved


def in_range(axis: Any, ndim: int, spec: TreeSpec, leaves: list[torch.Tensor], k: int) -> int:
    """The axis of leaf k, which has `ndim` batch dimensions, as a non-negative index."""
    if type(axis) is int and -ndim <= axis < ndim:
        return axis % ndim
    return check_axis(axis, leaves[k].shape, ndim, leaf_paths(spec, "xs")[k])


def check_lengths(leaves: list[torch.Tensor], axis: int, spec: TreeSpec) -> None:
    for k, t in enumerate(leaves):
        if t.shape[axis] != leaves[0].shape[axis]:
            first, other = (leaf_paths(spec, "xs")[j] for j in (0, k))
            raise ScanValueError(
                f"{first} has length {leaves[0].shape[axis]} along axis {axis} "
                f"(shape {list(leaves[0].shape)}) but {other} has {t.shape[axis]} "
                f"(shape {list(t.shape)}); all leaves must have the same length"
                f"{expansion(t, leaves[0].shape[axis], axis, other)}"
            )


def expansion(t: torch.Tensor, length: int, axis: int, path: str) -> str:
    """How to repeat a leaf of size 1 along the axis, which costs no memory."""
    if t.shape[axis] != 1:
        return ""
    sizes = [length if d == axis else -1 for d in range(t.dim())]
    return f": {path}.expand({', '.join(map(str, sizes))}) repeats it, at no cost"


def batch_shape(
    leaves: list[torch.Tensor], ndims: Sequence[int], axis: int, spec: TreeSpec
) -> tuple[int, ...]:
    shapes = [t.shape[: t.dim() - n] for t, n in zip(leaves, ndims, strict=True)]
    if all(s == shapes[0] for s in shapes):
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        seen = ", ".join(
            f"{p}: {list(s)}" for p, s in zip(leaf_paths(spec, "xs"), shapes, strict=True)
        )
        raise ScanValueError(f"the batch shapes of the leaves do not broadcast ({seen})") from None


def trace_for_call(
    operator: SliceFunction, spec: TreeSpec, leaves: list[torch.Tensor], axis: int
) -> TracedMonoid:
    """A raw callable traced at its real ranks.

    The scanned axis is traced with size 2: it has any size when the callable runs.
    """
    shapes = [(*t.shape[:axis], 2, *t.shape[axis + 1 :]) for t in leaves]
    if any(is_open(n) for shape in shapes for n in shape):
        found = trace_open_sizes(operator, spec, leaves, shapes, axis)
        if found is not None:
            return found
        shapes = [tuple(int(n) for n in shape) for shape in shapes]
    key = (spec, tuple(shapes), tuple(t.dtype for t in leaves), torch.get_default_dtype())
    known = operator.traced.get(key)
    if known is not None:
        return known
    kinds = tuple(Leaf(t.dtype) for t in leaves)
    try:
        with isolated():
            traced = trace_slices(operator.combine, spec, kinds, shapes, operator.name, axis)
    except UntraceableError as error:
        traced = untraced(spec, kinds, str(error))
    except BackendError as error:  # torch cannot trace; it may be able to later
        return untraced(spec, kinds, str(error))
    return operator.traced.keep(key, traced)


def is_open(size: object) -> bool:
    """Whether a graph that is built leaves this size open."""
    return isinstance(size, torch.SymInt)


def trace_open_sizes(
    operator: SliceFunction,
    spec: TreeSpec,
    leaves: list[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    axis: int,
) -> TracedMonoid | None:
    """A raw callable for sizes that a graph leaves open, traced with examples in their place; None
    where it looks at them, so that the graph has to fix them."""
    names = dict.fromkeys(str(n) for shape in shapes for n in shape if is_open(n))
    example = {name: 101 + 2 * k for k, name in enumerate(names)}
    examples = [tuple(example[str(n)] if is_open(n) else n for n in shape) for shape in shapes]
    kinds = tuple(Leaf(t.dtype) for t in leaves)
    key = ("open", spec, tuple(examples), kinds, torch.get_default_dtype())
    found = operator.traced.get(key)
    if found is None:
        try:
            with isolated():
                found = trace_slices(
                    operator.combine, spec, kinds, examples, operator.name, axis, any_size=True
                )
        except (UnsupportedOperation, TraceError, ScanTypeError, ScanValueError) as error:
            found = untraced(spec, kinds, str(error))
        except BackendError:
            return None
        operator.traced.keep(key, found)
    return None if found.operator is None else found


def bind_init(call: ScanCall, init: Any) -> list[torch.Tensor]:
    """The leaves of `init`, expanded to the carry's shape, in the state's accumulator dtype."""
    require_carry(call.operator, template(call.state_spec), init)
    values = align(template(call.state_spec), init, "init")
    paths = leaf_paths(call.state_spec, "init")
    bound = []
    for k, (path, value, leaf) in enumerate(zip(paths, values, call.traced.state, strict=True)):
        full = (*call.carry_batch(k), *leaf.shape)
        bound.append(bind_carry(path, value, leaf, full, call.leaves[0].device))
    return bound


def bind_carry(
    path: str, value: Any, leaf: Leaf, full: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # a number that a graph leaves open
        open_number: Any = value
        value = torch.full((), open_number, dtype=leaf.accumulator, device=device)
    if isinstance(value, (bool, int, float, complex)):
        value = bind_number(path, value, leaf, device)
    check_tensor(path, value)
    if value.device != device:
        raise ScanValueError(f"{path} is on {value.device}, but xs is on {device}")
    if torch.promote_types(value.dtype, leaf.accumulator) != leaf.accumulator:
        raise ScanTypeError(
            f"{path} has dtype {value.dtype}, but the state has {leaf.dtype}; convert it"
        )
    carry = plain(value).to(leaf.accumulator)
    if tuple(carry.shape) == full:
        return carry
    try:
        return carry.expand(full)
    except RuntimeError:
        raise ScanValueError(
            f"{path} has shape {list(carry.shape)}, which does not broadcast to {list(full)} "
            "(the batch shape without the scan axis, and the element's shape)"
        ) from None


def bind_number(
    path: str, value: bool | int | float | complex, leaf: Leaf, device: torch.device
) -> torch.Tensor:
    """A Python number as a carry, where the state's dtype can hold it."""
    try:
        exact = torch.tensor(value, dtype=leaf.accumulator, device=device)
    except (TypeError, RuntimeError, OverflowError):
        raise ScanTypeError(f"{path} is {value!r}, which {leaf.dtype} cannot hold") from None
    integral = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    if integral and exact.item() != value:
        raise ScanTypeError(f"{path} is {value!r}, which {leaf.dtype} cannot hold")
    return exact


def check_edges(call: ScanCall) -> None:
    """Without init, an exclusive scan needs an identity, and so does the final of nothing."""
    has_identity = call.traced.identity is not None
    if not call.inclusive and not has_identity:
        raise ScanValueError(
            f"an exclusive scan needs an identity or init, and {call.operator.name!r} declares no "
            "identity; pass init="
        )
    if call.return_final and not has_identity and has_empty_sequence(call):
        raise ScanValueError(
            f"the final carry of an empty sequence is init or the identity, and "
            f"{call.operator.name!r} declares no identity; pass init="
        )


def has_empty_sequence(call: ScanCall) -> bool:
    if call.offsets is None:
        return call.length == 0
    # On a GPU this would synchronise: there, the final of an empty sequence is then undefined.
    # Where a graph is built, the operation looks when it runs.
    if call.offsets.device.type != "cpu" or needs_dispatcher():
        return False
    return bool((call.offsets.diff() == 0).any())
