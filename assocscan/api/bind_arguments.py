"""The arguments of a call, checked and normalised: `bind` makes a `ScanCall` of them.

Every error message names the leaf that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.packed_offsets import check_offsets
from ..engines.base.scan_spec import plain
from ..errors import (
    BackendError,
    ScanTypeError,
    ScanValueError,
    TraceError,
    UnsupportedOperation,
    UntraceableError,
)
from ..monoids.captured_values import present
from ..monoids.leaf_checks import (
    broadcast_batches,
    check_axis,
    check_leaves,
    check_tensor,
    in_front,
)
from ..monoids.leaf_names import OWN, LeafNames
from ..monoids.monoid import BUILT_IN, Monoid, monoids, resolve
from ..monoids.raw_callables import SliceFunction, slice_function
from ..program.operator import Leaf
from ..pytrees import TreeSpec, align, flatten, template
from ..runtime.scan_call import ScanCall
from ..torch_state import is_symbolic, same_shape
from ..trace.expected_structure import require_carry, require_function
from ..trace.fx_trace import isolated
from ..trace.trace_slices import trace_slices
from ..trace.traced_monoid import TracedMonoid, untraced
from ..wording import fitting_view, kind_of, shown
from .empty_sequences import has_known_empty_sequence, no_final, start_to_pass


def bind(
    op: Any,
    xs: Any,
    axis: int,
    reverse: bool,
    inclusive: bool,
    init: Any,
    return_final: bool,
    offsets: torch.Tensor | None,
    names: LeafNames = OWN,
    final_only: bool = False,
) -> ScanCall:
    """Check and normalise the arguments of `associative_scan`.

    names: what errors call the leaves of xs and init.
    final_only: whether it is a call of `reduce`.
    """
    operator = resolve_operator(op, xs)
    leaves, spec = flatten(xs)
    check_leaves(leaves, spec, names)
    if isinstance(operator, Monoid) and not inclusive:
        operator = operator.exclusive_form
    axis, ndims = batch_axis(operator, axis, leaves, spec, names)
    check_lengths(leaves, axis, spec, names)
    leaves = [plain(t) for t in leaves]
    offsets = check_offsets(offsets, leaves[0].shape[axis], leaves[0].device)
    # Code is made for elements of one size: symbolic sizes of a graph become numbers.
    elements = tuple(
        Leaf(t.dtype, tuple(map(int, t.shape[t.dim() - n :])))
        for t, n in zip(leaves, ndims, strict=True)
    )
    batch = tuple(leaves[0].shape)
    if isinstance(operator, Monoid):
        batch = batch_shape(leaves, ndims, spec, names)
        traced = operator.trace_for(spec, elements)
        if traced.along and axis < len(batch) - 1:
            raise TraceError(undeclared_vectors(traced.along, leaves[0], names.paths(spec)[0]))
        if traced.by_component is not None:
            batch = (*batch, *elements[0].shape)
            traced, ndims = traced.by_component, [0] * len(leaves)
    else:
        # A placeholder: the trace of a raw callable costs more than the checks, so it comes after.
        traced = untraced(spec, elements, "")
    call = ScanCall(operator, traced, spec, leaves, ndims, batch, axis, reverse, inclusive, None,
                    return_final, offsets, final_only)  # fmt: skip
    if init is None:
        require_identity(call)
    if isinstance(operator, SliceFunction):
        call.traced = trace_for_call(operator, spec, leaves, axis)
    if init is not None:
        call.init = bind_init(call, init, names)
    return call


def resolve_operator(op: Any, xs: Any) -> Monoid | SliceFunction:
    """The operator that `op` stands for. `xs` only improves the error message for swapped
    arguments."""
    if isinstance(op, str):
        op = resolve(op)
    if isinstance(op, Monoid):
        return present(op)
    if not callable(op) and (isinstance(xs, str) or callable(xs)):
        raise ScanTypeError(
            f"op is {kind_of(op)} and xs {shown(xs)}: the operator comes first, then xs"
        )
    if op is ...:
        raise ScanTypeError("op was not passed: a Monoid, the name of one or a function")
    require_function(op, "op must be a Monoid, the name of one or a function of two elements")
    return slice_function(op)


def batch_axis(
    operator: Monoid | SliceFunction,
    axis: int,
    leaves: list[torch.Tensor],
    spec: TreeSpec,
    names: LeafNames = OWN,
) -> tuple[int, list[int]]:
    """The axis as a non-negative index, and of each leaf how many dimensions belong to one
    element."""
    if isinstance(operator, Monoid):
        ndims = operator.element_ndims(spec, names.of("xs"))
        return monoid_axis(axis, leaves, ndims, spec, operator.name, names), ndims
    return slice_axis(axis, leaves, spec, names), [0] * len(leaves)


def monoid_axis(
    axis: int,
    leaves: list[torch.Tensor],
    ndims: Sequence[int],
    spec: TreeSpec,
    name: str,
    names: LeafNames = OWN,
) -> int:
    """The axis as a non-negative index.

    Raises ScanValueError where leaves have different numbers of batch dimensions.
    """
    batch_ndims = [t.dim() - n for t, n in zip(leaves, ndims, strict=True)]
    for k, n in enumerate(batch_ndims):
        if n < 0:
            raise ScanValueError(
                f"{names.paths(spec)[k]} has shape {list(leaves[k].shape)}, but its elements "
                f"have {ndims[k]} dimension{'s' * (ndims[k] != 1)} (element_ndim of {name!r}), and "
                f"the axis comes before these: expected {ndims[k] + 1} dimensions or more"
            )
    if any(n != batch_ndims[0] for n in batch_ndims):
        paths = names.paths(spec)
        odd, others = odd_one(batch_ndims)
        seen = ", ".join(
            f"{p}: shape {list(t.shape)} with {e} element dimensions"
            for p, t, e in zip(paths, leaves, ndims, strict=True)
        )
        fewer = paths[odd] if batch_ndims[odd] < batch_ndims[others] else "the others"
        raise ScanValueError(
            f"{paths[odd]} has another number of batch dimensions than {paths[others]} ({seen}); "
            f"unsqueeze {fewer} so that the batch dimensions line up"
            f"{f', or correct element_ndim of {name!r}' if any(ndims) else undeclared(name)}"
        )
    return normalized(axis, batch_ndims[0], spec, leaves, 0, names)


def odd_one(values: Sequence[int]) -> tuple[int, int]:
    """The first leaf whose value (not all are equal) is not that of most leaves, and the first that
    has the value of most; where two values are as frequent, the least is the odd one."""
    common = max(values, key=lambda value: (values.count(value), value))
    return next(k for k, value in enumerate(values) if value != common), values.index(common)


def undeclared(name: str) -> str:
    """The end of the message for a monoid of the user's that declares no element dimensions."""
    known = monoids().get(name)
    if "(" in name or (known is not None and known.origin[0].startswith(BUILT_IN)):
        return ""  # made by a combinator, or built in
    return (
        f", or declare the dimensions that belong to one element of {name!r}: element_ndim=(2, 1) "
        "for a matrix and a vector"
    )


def undeclared_vectors(along: str, leaf: torch.Tensor, path: str) -> str:
    """The message for a monoid that takes numbers for vectors, which xs may hold: its first leaf
    has a dimension behind the axis."""
    return (
        f"{along}, but elements are numbers, as element_ndim is 0; where the last dimension of "
        f"{path}, of shape {list(leaf.shape)}, belongs to one element, "
        "declare element_ndim=1; where elements are numbers, leave that operation out"
    )


def slice_axis(
    axis: int, leaves: list[torch.Tensor], spec: TreeSpec, names: LeafNames = OWN
) -> int:
    """The axis of a raw callable as a non-negative index; a negative one counts from the last
    dimension of the first leaf."""
    resolved = normalized(axis, leaves[0].dim(), spec, leaves, 0, names)
    for k, t in enumerate(leaves):
        normalized(resolved, t.dim(), spec, leaves, k, names)
    return resolved


def normalized(
    axis: Any, ndim: int, spec: TreeSpec, leaves: list[torch.Tensor], k: int, names: LeafNames
) -> int:
    """`axis` as a non-negative index into the `ndim` batch dimensions of leaf k.

    Raises AxisError where it is out of range.
    """
    if type(axis) is int and -ndim <= axis < ndim:
        return axis % ndim
    return check_axis(axis, leaves[k].shape, ndim, names.axis_of or names.paths(spec)[k])


def check_lengths(leaves: list[torch.Tensor], axis: int, spec: TreeSpec, names: LeafNames) -> None:
    length = leaves[0].shape[axis]
    if any(t.shape[axis] != length for t in leaves):
        odd, others = odd_one([int(t.shape[axis]) for t in leaves])
        t, usual, paths = leaves[odd], leaves[others], names.paths(spec)
        raise ScanValueError(
            f"{paths[others]} has length {usual.shape[axis]} along axis {axis} "
            f"(shape {list(usual.shape)}) but {paths[odd]} has {t.shape[axis]} "
            f"(shape {list(t.shape)}); all leaves must have the same length"
            f"{expansion(t, usual.shape[axis], axis, paths[odd])}"
        )


def expansion(t: torch.Tensor, length: int, axis: int, path: str) -> str:
    """The end of the message for a leaf of size 1 along the axis: `expand` repeats it without
    a copy. Empty for other sizes."""
    if t.shape[axis] != 1:
        return ""
    sizes = [length if d == axis else -1 for d in range(t.dim())]
    return f": {path}.expand({', '.join(map(str, sizes))}) repeats it, at no cost"


def batch_shape(
    leaves: list[torch.Tensor], ndims: Sequence[int], spec: TreeSpec, names: LeafNames
) -> tuple[int, ...]:
    """The batch shape that the leaves broadcast to."""
    shapes = [t.shape[: t.dim() - n] for t, n in zip(leaves, ndims, strict=True)]
    if all(s == shapes[0] for s in shapes):
        return tuple(shapes[0])
    batch = broadcast(shapes)
    if batch is not None:
        return batch
    return broadcast_batches(names.paths(spec), leaves, ndims)


def broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...] | None:
    """What these shapes, of as many dimensions each, broadcast to; None where they do not, and
    where sizes are symbolic. As `torch.broadcast_shapes`, but faster: it took 40 of the 640 µs of
    a distributed call."""
    batch = []
    for sizes in zip(*shapes, strict=True):
        several = set()
        for n in sizes:
            if type(n) is not int:
                return None
            if n != 1:
                several.add(n)
        if len(several) > 1:
            return None
        batch.append(several.pop() if several else 1)
    return tuple(batch)


def trace_for_call(
    operator: SliceFunction, spec: TreeSpec, leaves: list[torch.Tensor], axis: int
) -> TracedMonoid:
    """A raw callable, traced on slices of the shapes of this call.

    Only along the scanned axis the size is a fixed 2 in place of the real length: engines call the
    operator on slices of any number of steps, so one trace serves all lengths.
    """
    shapes = [(*t.shape[:axis], 2, *t.shape[axis + 1 :]) for t in leaves]
    if any(is_symbolic(n) for shape in shapes for n in shape):
        found = trace_symbolic_sizes(operator, spec, leaves, shapes, axis)
        if found is not None:
            return found
        shapes = [tuple(int(n) for n in shape) for shape in shapes]
    key = (spec, tuple(shapes), tuple(t.dtype for t in leaves), torch.get_default_dtype())
    known = operator.traced.get(key)
    if known is not None:
        return known
    scalars = tuple(Leaf(t.dtype) for t in leaves)
    try:
        with isolated():
            traced = trace_slices(operator.combine, spec, scalars, shapes, operator.name, axis)
    except UntraceableError as error:
        traced = untraced(spec, scalars, str(error))
    except BackendError as error:  # make_fx is not usable now; not kept, so a later call retries
        return untraced(spec, scalars, str(error))
    return operator.traced.insert(key, traced)


def trace_symbolic_sizes(
    operator: SliceFunction,
    spec: TreeSpec,
    leaves: list[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    axis: int,
) -> TracedMonoid | None:
    """A raw callable for symbolic sizes, traced with an example number for each symbol.

    None where code can be generated for given sizes only, or make_fx cannot be used: the caller
    then converts the symbols to numbers, which makes the graph valid for these sizes only.
    """
    # Each tensor of an exported program has symbols of its own; equal ones become one by a guard,
    # as in a sum of the tensors.
    if all(same_shape(shape, shapes[0]) for shape in shapes):
        shapes = [shapes[0]] * len(shapes)
    names = dict.fromkeys(str(n) for shape in shapes for n in shape if is_symbolic(n))
    example = {name: 101 + 2 * k for k, name in enumerate(names)}
    examples = [tuple(example[str(n)] if is_symbolic(n) else n for n in shape) for shape in shapes]
    scalars = tuple(Leaf(t.dtype) for t in leaves)
    key = ("symbolic", spec, tuple(examples), scalars, torch.get_default_dtype())
    found = operator.traced.get(key)
    if found is not None:
        return found
    call = operator.combine, spec, scalars, examples, operator.name, axis
    try:
        with isolated():
            traced = trace_slices(*call, any_size=True)
            if traced.operator is None and trace_slices(*call).operator is not None:
                return None
    except (UnsupportedOperation, TraceError, ScanTypeError, ScanValueError, BackendError):
        return None
    return operator.traced.insert(key, traced)


def bind_init(call: ScanCall, init: Any, names: LeafNames = OWN) -> list[torch.Tensor]:
    """The leaves of `init`, expanded to the carry's shape, in the state's accumulator dtype."""
    whole = names.of("init")
    require_carry(call.operator, template(call.state_spec), init, whole)
    values = align(template(call.state_spec), init, whole)
    paths = names.paths(call.state_spec, "init")
    bound = []
    for k, (path, value, leaf) in enumerate(zip(paths, values, call.traced.state, strict=True)):
        full = (*call.carry_batch(k), *leaf.shape)
        bound.append(bind_carry(path, value, leaf, full, call, names.of("xs")))
    return bound


def bind_carry(
    path: str, value: Any, leaf: Leaf, full: tuple[int, ...], call: ScanCall, xs: str
) -> torch.Tensor:
    """One leaf of init as a carry; errors call it `path`, and the inputs `xs`."""
    device = call.leaves[0].device
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # a symbolic number of a graph
        symbol: Any = value
        value = torch.full((), symbol, dtype=leaf.accumulator, device=device)
    if isinstance(value, (bool, int, float, complex)):
        value = bind_number(path, value, leaf, device)
    check_tensor(path, value)
    if value.device != device:
        raise ScanValueError(f"{path} is on {value.device}, but {xs} is on {device}")
    if torch.promote_types(value.dtype, leaf.accumulator) != leaf.accumulator:
        raise ScanTypeError(
            f"{path} has dtype {value.dtype}, but the state has {leaf.dtype}; convert it"
        )
    carry = plain(value).to(leaf.accumulator)
    if same_shape(carry.shape, full):
        return carry
    try:
        return carry.expand(full)
    except RuntimeError:
        raise ScanValueError(
            f"{path} has shape {list(carry.shape)}, which does not broadcast to {list(full)}, "
            f"{carry_in_words(call, leaf, xs)}{fitting_view(path, carry.shape, full)}"
        ) from None


def carry_in_words(call: ScanCall, leaf: Leaf, xs: str) -> str:
    """What the shape of a leaf of init is made of."""
    batch = "batch shape" if leaf.shape or xs == "xs" else "shape"
    said = f"the {batch} of {xs} without axis {call.axis}"
    if leaf.shape:
        said += f", and {list(leaf.shape)} for an element"
    return said if call.offsets is None else said + in_front(call.offsets.shape[0] - 1)


def bind_number(
    path: str, value: bool | int | float | complex, leaf: Leaf, device: torch.device
) -> torch.Tensor:
    """A Python number as a carry. Raises ScanTypeError where the state's dtype cannot hold it."""
    try:
        exact = torch.tensor(value, dtype=leaf.accumulator, device=device)
    except (TypeError, RuntimeError, OverflowError):
        raise ScanTypeError(f"{path} is {value!r}, which {leaf.dtype} cannot hold") from None
    integral = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    if integral and exact.item() != value:
        raise ScanTypeError(f"{path} is {value!r}, which {leaf.dtype} cannot hold")
    return exact


def require_identity(call: ScanCall) -> None:
    """Raise ScanValueError where a call without init needs an identity and the operator has none:
    an exclusive scan, and the final carry of an empty sequence."""
    if call.traced.identity is not None:
        return
    if not call.inclusive:
        start = start_to_pass(call)
        declared = ", or declare one: monoid(identity=…)" if start == "init=" else ""
        raise ScanValueError(
            f"an exclusive scan needs an identity or init, and {call.operator.name!r} declares no "
            f"identity; pass {start}{declared}"
        )
    if call.return_final and has_known_empty_sequence(call):
        raise no_final(call)
