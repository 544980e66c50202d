"""The correctness oracle, and what tests of scans share.

`reference_scan` is one sequential loop over the axis. It uses no engine of the package, so that an
error there cannot hide here: of a monoid it takes only the user's functions and `identity_like`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from .hooks import HOOKS
from .pytrees import spread
from .torch_private import pytree

PyTree: TypeAlias = Any
Element: TypeAlias = list[Tensor]  # the leaves of one element

__all__ = [
    "ErrorGrowth",
    "assert_scan_close",
    "bicyclic",
    "error_growth",
    "reference_scan",
    "tolerance",
]


@runtime_checkable
class _MonoidLike(Protocol):
    combine: Callable[[PyTree, PyTree], PyTree]
    lift: Callable[..., PyTree] | None
    lower: Callable[..., PyTree] | None
    element_ndim: PyTree

    def identity_like(self, xs: PyTree) -> PyTree: ...


class _Flags(NamedTuple):
    reverse: bool
    inclusive: bool
    final: bool


def reference_scan(
    op: _MonoidLike | Callable[[PyTree, PyTree], PyTree],
    xs: PyTree,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: PyTree = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
) -> PyTree:
    """Scan by one sequential loop: y[t] = init ∘ x[0] ∘ … ∘ x[t], y[t] = y[t−1] ∘ x[t].

    >>> import torch
    >>> from assocscan.testing import reference_scan
    >>> reference_scan(lambda left, right: left + right, torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 3., 6.], dtype=torch.float64)

    Parameters and results are those of `associative_scan`. Floats are computed and returned in
    float64 and complex numbers in complex128, `lift` and `lower` included; integers and bool keep
    their dtype. Differentiable by autograd, any number of times.

    The functions of a monoid are called on values of exactly one element's shape, under
    `torch.vmap` over the rows; a raw callable is called on slices of size 1 along the axis. In an
    exclusive scan without `init` the second output is x[0] itself, not identity ∘ x[0].

    Raises:
        IndexError: `axis` is out of range.
        ValueError: an output needs an identity and the operator is a raw callable; an operator
            or `init` has another structure or shape than the state.

    Costs L calls of the operator, each at torch's dispatch time: for tests only.
    """
    flags = _Flags(reverse, inclusive, return_final)
    if not inclusive:  # segmented operators start their segments with the identity
        op = getattr(op, "exclusive_form", op)
    scan = _scan_monoid if isinstance(op, _MonoidLike) else _scan_slices
    ys, final = scan(cast(Any, op), pytree.tree_map(_wide, xs), axis, flags, init, offsets)
    return (ys, final) if return_final else ys


def _wide(value: Any) -> Tensor:
    """A tensor in the oracle's dtype; Python numbers become int64, float64 or complex128."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype={float: torch.float64}.get(type(value)))
    if value.is_complex():
        return cast(Tensor, value.to(torch.complex128))
    return cast(Tensor, value.to(torch.float64) if value.is_floating_point() else value)


def _scan_sequence(
    combine: Callable[[Element, Element], Element],
    elements: Sequence[Element],
    start: Element | None,
    identity: Callable[[], Element],
    flags: _Flags,
) -> tuple[list[Element], Element | None]:
    """The loop itself. Returns one state per element, in the order of the axis, and the final."""
    carry, outputs = start, []
    for element in reversed(elements) if flags.reverse else elements:
        before = carry
        carry = element if carry is None else combine(carry, element)
        outputs.append(carry if flags.inclusive else before or identity())
    if carry is None and flags.final:
        carry = identity()
    return outputs[::-1] if flags.reverse else outputs, carry


def _bounds(offsets: Tensor | None, length: int) -> list[tuple[int, int]]:
    return [(0, length)] if offsets is None else list(pairwise(offsets.tolist()))


def _resolve_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise IndexError(f"axis {axis} is out of range for {ndim} batch dimensions")
    return axis % ndim


def _scan_slices(
    op: Callable[[PyTree, PyTree], PyTree],
    xs: PyTree,
    axis: int,
    flags: _Flags,
    init: PyTree,
    offsets: Tensor | None,
) -> tuple[PyTree, PyTree]:
    """A raw callable: nothing is broadcast, slices keep the axis with size 1."""
    leaves, spec = pytree.tree_flatten(xs)
    axis = _resolve_axis(axis, leaves[0].ndim)
    bounds = _bounds(offsets, leaves[0].shape[axis])
    outer = [leaf.shape[:axis] + leaf.shape[axis + 1 :] for leaf in leaves]
    combine = _on_leaves(op, spec)

    def no_identity() -> Element:
        raise ValueError("a raw callable has no identity: give init")

    outputs: list[Element] = []
    finals: list[Element | None] = []
    for number, (first, stop) in enumerate(bounds):
        elements = [[leaf.narrow(axis, t, 1) for leaf in leaves] for t in range(first, stop)]
        start = None
        if init is not None:
            carry = _broadcast_init(init, spec, len(bounds), outer)
            start = [leaf[number].unsqueeze(axis) for leaf in carry]
        states, final = _scan_sequence(combine, elements, start, no_identity, flags)
        outputs += states
        finals.append(final)
    ys = [torch.cat(column, axis) for column in zip(*outputs, strict=True)]
    ys = ys or [leaf.clone() for leaf in leaves]
    if not flags.final:
        return pytree.tree_unflatten(ys, spec), None
    columns = zip(*cast(list[Element], finals), strict=True)
    last = [torch.stack([f.squeeze(axis) for f in column]) for column in columns]
    last = last or [leaf.new_empty((0, *shape)) for leaf, shape in zip(leaves, outer, strict=True)]
    if offsets is None:
        last = [leaf[0] for leaf in last]
    return pytree.tree_unflatten(ys, spec), pytree.tree_unflatten(last, spec)


def _on_leaves(
    function: Callable[[PyTree, PyTree], PyTree], spec: pytree.TreeSpec
) -> Callable[[Element, Element], Element]:
    """`function` of two pytrees as a function of two lists of leaves; dicts match by key."""

    def combine(left: Element, right: Element) -> Element:
        combined = function(pytree.tree_unflatten(left, spec), pytree.tree_unflatten(right, spec))
        return [_wide(leaf) for leaf in spec.flatten_up_to(combined)]

    return combine


def _broadcast_init(
    init: PyTree, spec: pytree.TreeSpec, sequences: int, shapes: Sequence[tuple[int, ...]]
) -> Element:
    """Leaves of `init` as [S, *shape], for each leaf's shape without the axis."""
    leaves = [_wide(leaf) for leaf in spec.flatten_up_to(init)]
    return [leaf.expand(sequences, *shape) for leaf, shape in zip(leaves, shapes, strict=True)]


class _Batch(NamedTuple):
    """The batch dimensions of a monoid's leaves, seen as rows of one length."""

    outer: tuple[int, ...]  # the batch shape without the axis
    axis: int
    length: int

    @property
    def rows(self) -> int:
        return math.prod(self.outer)

    def to_rows(self, leaf: Tensor, element: tuple[int, ...]) -> Tensor:
        batch = (*self.outer[: self.axis], self.length, *self.outer[self.axis :])
        leaf = leaf.expand(*batch, *element).movedim(self.axis, len(self.outer))
        return _nonempty(leaf.reshape(self.rows, self.length, *element))  # [R, L, *element]

    def from_rows(self, column: Tensor) -> Tensor:
        column = column[: self.rows, : self.length]
        return column.reshape(*self.outer, *column.shape[1:]).movedim(len(self.outer), self.axis)

    def init_to_rows(self, leaf: Tensor, element: tuple[int, ...]) -> Tensor:
        rows = leaf.reshape(leaf.shape[0], self.rows, *element).movedim(0, 1)
        return _nonempty(rows)  # [R, S, *element]

    def final_from_rows(self, column: Tensor, sequences: int) -> Tensor:
        column = column[: self.rows, :sequences].movedim(0, 1)
        return column.reshape(sequences, *self.outer, *column.shape[2:])


def _scan_monoid(
    op: _MonoidLike,
    xs: PyTree,
    axis: int,
    flags: _Flags,
    init: PyTree,
    offsets: Tensor | None,
) -> tuple[PyTree, PyTree]:
    """A monoid: the loop runs on single elements, under vmap over the rows."""
    leaves, spec = pytree.tree_flatten(xs)
    shapes = _element_shapes(op, xs)
    batch = _batch(leaves, shapes, axis)
    bounds = _bounds(offsets, batch.length)
    columns = [batch.to_rows(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    lift = _lift(op, xs, spec)
    first, state_spec = pytree.tree_flatten(lift([column[0, 0] for column in columns]))
    starts: Element = []
    if init is not None:
        full = [(*batch.outer, *leaf.shape) for leaf in first]
        carry = _broadcast_init(init, state_spec, len(bounds), full)
        starts = [batch.init_to_rows(c, leaf.shape) for c, leaf in zip(carry, first, strict=True)]

    def identity() -> Element:
        single = (1,) * (len(batch.outer) + 1)
        ones = [leaf.new_ones(single + shape) for leaf, shape in zip(leaves, shapes, strict=True)]
        values = state_spec.flatten_up_to(op.identity_like(pytree.tree_unflatten(ones, spec)))
        return [_wide(v).reshape(leaf.shape) for v, leaf in zip(values, first, strict=True)]

    combine = _on_leaves(op.combine, state_spec)
    lower = _lower(op, state_spec, spec)

    def scan_row(columns: Element, starts: Element) -> tuple[PyTree, Element]:
        raw = list(zip(*(column.unbind() for column in columns), strict=True))
        elements = [pytree.tree_leaves(lift(x)) for x in raw]
        # Without any element, the one that _nonempty appended shows dtypes and shapes.
        states = [] if batch.length else elements
        finals = []
        for number, (begin, stop) in enumerate(bounds):
            start = [leaf[number] for leaf in starts] or None
            scanned = _scan_sequence(combine, elements[begin:stop], start, identity, flags)
            states = states + scanned[0]
            finals.append(scanned[1])
        ys = _stack([lower(state, x) for state, x in zip(states, raw, strict=True)])
        if not flags.final:
            return ys, []
        last = cast(list[Element], finals) or elements
        return ys, [torch.stack(column) for column in zip(*last, strict=True)]

    ys, last = torch.vmap(scan_row)(columns, starts)
    ys = pytree.tree_map(batch.from_rows, ys)
    if not flags.final:
        return ys, None
    last = [batch.final_from_rows(leaf, len(bounds)) for leaf in last]
    if offsets is None:
        last = [leaf[0] for leaf in last]
    return ys, pytree.tree_unflatten(last, state_spec)


def _batch(leaves: Element, elements: list[torch.Size], axis: int) -> _Batch:
    pairs = zip(leaves, elements, strict=True)
    batches = [leaf.shape[: leaf.ndim - len(element)] for leaf, element in pairs]
    shape = torch.broadcast_shapes(*batches)
    axis = _resolve_axis(axis, len(shape))
    return _Batch(shape[:axis] + shape[axis + 1 :], axis, shape[axis])


def _element_shapes(op: _MonoidLike, xs: PyTree) -> list[torch.Size]:
    ndims = spread(xs, op.element_ndim, "element_ndim")
    pairs = zip(pytree.tree_leaves(xs), ndims, strict=True)
    return [leaf.shape[leaf.ndim - n :] for leaf, n in pairs]


def _lift(
    op: _MonoidLike, xs: PyTree, spec: pytree.TreeSpec
) -> Callable[[Sequence[Tensor]], PyTree]:
    def lift(raw: Sequence[Tensor]) -> PyTree:
        x = pytree.tree_unflatten(raw, spec)
        if op.lift is not None:
            x = op.lift(*x) if type(xs) in (tuple, list) else op.lift(x)
        return pytree.tree_map(_wide, x)

    return lift


def _lower(
    op: _MonoidLike, state_spec: pytree.TreeSpec, spec: pytree.TreeSpec
) -> Callable[[Element, Sequence[Tensor]], PyTree]:
    takes_xs = op.lower is not None and _required_positional(op.lower) >= 2

    def lower(state: Element, raw: Sequence[Tensor]) -> PyTree:
        element = pytree.tree_unflatten(state, state_spec)
        if op.lower is None:
            return element
        lowered = (
            op.lower(element, pytree.tree_unflatten(raw, spec)) if takes_xs else op.lower(element)
        )
        return pytree.tree_map(_wide, lowered)

    return lower


def _required_positional(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins such as operator.itemgetter
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _nonempty(rows: Tensor) -> Tensor:
    """[R, L, …] with ones appended where R or L is zero: vmap and stack need one entry."""
    for dim in (1, 0):
        if rows.shape[dim] == 0:
            shape = (*rows.shape[:dim], 1, *rows.shape[dim + 1 :])
            rows = torch.cat([rows, rows.new_ones(shape)], dim)
    return rows


def _stack(trees: list[PyTree]) -> PyTree:
    flat, specs = zip(*map(pytree.tree_flatten, trees), strict=True)
    return pytree.tree_unflatten(
        [torch.stack(column) for column in zip(*flat, strict=True)], specs[0]
    )


def bicyclic(left: PyTree, right: PyTree) -> PyTree:
    """The bicyclic monoid: (m, n) ∘ (r, s) = (m + r − min(n, r), s + n − min(n, r)).

    Exact on integers, not commutative, no inverses; identity (0, 0). Elements are pairs of
    numbers that are not negative: m closing brackets, then n opening ones, with every matching
    pair removed (Clifford and Preston, The Algebraic Theory of Semigroups, 1961, §1.12).

    >>> import torch
    >>> from assocscan.testing import bicyclic
    >>> bicyclic((torch.tensor(0), torch.tensor(2)), (torch.tensor(1), torch.tensor(0)))
    (tensor(0), tensor(1))
    """
    m, n = left
    r, s = right
    matched = torch.minimum(n, r)
    return m + r - matched, s + n - matched


def tolerance(dtype: torch.dtype, length: int) -> tuple[float, float]:
    """(relative, absolute) error of a scan of `length` steps, the latter per unit of magnitude.

    Zero for integers and bool. Each step rounds by ε of the dtype computed in (float32 for 16-bit
    floats) relative to the largest value met, and independent roundings grow as √length; a 16-bit
    result is rounded once more, by ε/2 of its own dtype.

    >>> import torch
    >>> from assocscan.testing import tolerance
    >>> tolerance(torch.int64, 100)
    (0.0, 0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    narrow = dtype in (torch.float16, torch.bfloat16)
    steps = torch.finfo(torch.float32 if narrow else dtype).eps * (8 + 2 * math.sqrt(length))
    return (torch.finfo(dtype).eps / 2 if narrow else 0.0) + steps, steps


class ErrorGrowth(NamedTuple):
    """Errors of the outputs after `steps` / 2 steps and up to `steps`, from `error_growth`.

    >>> from assocscan.testing import ErrorGrowth
    >>> found = ErrorGrowth(steps=1024, scan=2e-3, loop=1e-6)
    >>> found.scan > 10 * found.loop                # a scan of this operator loses digits
    True
    """

    steps: int
    scan: float
    loop: float


def error_growth(
    op: Any,
    like: PyTree = None,
    length: int = 1024,
    *,
    samples: PyTree = None,
    backend: str = "auto",
    seed: int = 0,
) -> list[ErrorGrowth]:
    """How the errors of a long scan grow with the number of steps, beside those of a loop.

    A scan and a sequential loop of the same random inputs, in their dtype, are compared with the
    loop in float64. Where the scan's errors are far above the loop's, its intermediate results are
    larger than its outputs.

    >>> import torch
    >>> from assocscan import ops
    >>> from assocscan.testing import error_growth
    >>> growth = error_growth(ops.sum, torch.zeros(()), 64)
    >>> [found.steps for found in growth]
    [1, 2, 4, 8, 16, 32, 64]
    >>> all(found.scan < 1e-6 for found in growth)
    True

    Powers of this matrix, a filter's, grow to 2500 before they decay. A loop does not form them:

    >>> from assocscan import with_lower
    >>> first = [3.79525, -5.40599, 3.42522, -0.81451]
    >>> A = torch.cat([torch.tensor([first]), torch.eye(4)[:3]])
    >>> samples = A.expand(100, 4, 4), torch.randn(100, 4)
    >>> h = with_lower(ops.matrix_affine, lambda state: state[1])      # without the products
    >>> last = error_growth(h, samples=samples, length=64, backend="eager")[-1]
    >>> last.scan > 100 * last.loop
    True

    op: a Monoid.
    like: inputs of one element, whose dtypes and shapes count: floats are drawn from a normal
        distribution, integers from 0 to 9.
    length: how many steps; of other numbers the power of two below them.
    samples: inputs with one leading dimension, [n, ...] in each leaf: every step is one of them,
        at random. With them `like` is not needed.
    backend: as in `associative_scan`. Engines differ: "cpu" lets a carry walk along matrices, GPUs
        and "eager" form their products.
    seed: of the draws.

    Returns a list with an entry for each power of two: `scan` and `loop` are the greatest errors
    of an output in the steps from the power before on, each relative to the greatest value there;
    infinite where an output is NaN or infinite and should not be. Of integers they are 0 or
    infinite. The list ends before the loop in float64 overflows.

    Raises:
        TypeError: op is no Monoid; a leaf is not a tensor.
        ValueError: length is no int of 1 or more; samples have other lengths, or none.

    Costs some 3 calls of the operator or of a scan for each step: for tests only.
    """
    found: list[ErrorGrowth] = HOOKS.error_growth(op, like, length, samples, backend, seed)
    return found


def assert_scan_close(actual: PyTree, expected: PyTree, length: int, scale: float = 1.0) -> None:
    """Assert that `actual` is the oracle's `expected` up to the rounding of `length` steps.

    Structure (dicts by key) and shapes must be equal; integers and bool equal in dtype and value;
    NaN equals NaN. The absolute tolerance is relative to `scale`, the size of the inputs, or to
    the largest finite value expected; a value below the normal range may be rounded to zero.

    Raises:
        AssertionError: they differ; the message names the leaf.
        ValueError: they differ in structure.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> from assocscan.testing import assert_scan_close, reference_scan
    >>> x = torch.tensor([0.1, 0.2, 0.3])
    >>> assert_scan_close(associative_scan(ops.sum, x), reference_scan(ops.sum, x), length=3)
    """
    paths, spec = pytree.tree_flatten_with_path(expected)
    for (path, want), got in zip(paths, spec.flatten_up_to(actual), strict=True):
        _assert_leaf_close(f"leaf {pytree.keystr(path) or 'ys'}", got, want, length, scale)


def _assert_leaf_close(name: str, got: Tensor, want: Tensor, length: int, scale: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    kind = _wide(got.new_empty(0)).dtype
    assert kind == want.dtype, f"{name}: dtype {got.dtype}, the oracle has {want.dtype}"
    rtol, atol = tolerance(got.dtype, length)
    if atol:
        sizes = torch.where(torch.isfinite(want), want.abs(), 0.0).flatten()
        atol *= max(scale, float(sizes.max()) if len(sizes) else 0.0)
        atol += torch.finfo(got.dtype).tiny
    torch.testing.assert_close(
        got.to(want.device, want.dtype),
        want,
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )
