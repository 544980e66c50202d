"""A raw callable at given dtypes: it gets slices of xs, and is generated where every operation on
them is pointwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ..errors import ScanValueError, UnsupportedOperation
from ..program.dtypes import STORAGE_ONLY
from ..program.operator import Leaf, Operator, promoted
from ..pytrees import TreeSpec, flatten, leaf_paths, template, unflatten
from .fx_trace import Signature, Trace, trace
from .missing_dtypes import require_implemented
from .pointwise import refuse_random
from .signatures import require_call
from .traced_monoid import (
    TracedMonoid,
    aligned,
    as_scalars,
    cast_program,
    check_results,
    not_pointwise,
    program,
)

MATRIX_PRODUCTS = ("addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv")
MOVEMENT = ("alias", "clone", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view")
# Said of the result of a plain function, which has the structure of xs.
ONE = "but xs is one tensor: return one tensor, or pass xs in that structure, too"


def why_on_slices(operations: list[str], spec: TreeSpec, ranks: Sequence[int]) -> str:
    """Why a raw callable with these operations runs eagerly, and what would be generated.

    spec: the structure of xs. ranks: the number of dimensions of each of its leaves.
    """
    telling = [name for name in operations if name not in MOVEMENT] or operations
    named = next((name for name in telling if name in MATRIX_PRODUCTS), telling[0])
    remedy = "monoid(fn, element_ndim=n), n being the number of dimensions of one element"
    if named in MATRIX_PRODUCTS:
        remedy = of_matrices(spec, ranks)
    return (
        f"to compile it, write it for one element: {remedy}. {named!r} in it is not pointwise, and "
        "a plain function gets slices of xs, many elements at once"
    )


def why_not_broadcast(spec: TreeSpec, shapes: Sequence[tuple[int, ...]], axis: int) -> str:
    """Why a raw callable on leaves of several shapes runs eagerly, and what would be generated."""
    sizes = [prod(s) for s in shapes]
    small = sizes.index(min(sizes))
    large = max((k for k, s in enumerate(shapes) if s != shapes[small]), key=sizes.__getitem__)
    paths = leaf_paths(spec, "xs")

    def shown(k: int) -> str:
        kept = ["…" if d == axis else str(n) for d, n in enumerate(shapes[k])]
        return f"{paths[k]} of shape [{', '.join(kept)}]"

    return (
        f"its leaves have different shapes, {shown(small)} beside {shown(large)}. To compile it, "
        "expand the smaller one (x.expand_as(y) copies nothing), or make it a monoid, whose leaves "
        "broadcast"
    )


def of_matrices(spec: TreeSpec, ranks: Sequence[int]) -> str:
    """The monoids that a raw callable with matrix products may be meant for."""
    if len(ranks) == 1:
        return "monoid(fn, element_ndim=2), or ops.matmul, which is right @ left"
    least = min(ranks)
    if set(ranks) == {least, least + 1}:
        ndims = unflatten([1 + n - least for n in ranks], spec)
        said = f"monoid(fn, element_ndim={ndims})"
        if isinstance(ndims, tuple) and ndims == (2, 1):
            said += ", or ops.matrix_affine, which is (A2 @ A1, A2 @ b1 + b2)"
        return said
    return (
        "monoid(fn, element_ndim=2) where all leaves are matrices, and (2, 1) for a matrix and a "
        "vector; ops.matmul and ops.matrix_affine are such monoids"
    )


def trace_slices(
    fn: Callable[..., Any],
    spec: TreeSpec,
    leaves: tuple[Leaf, ...],
    shapes: Sequence[tuple[int, ...]],
    name: str,
    axis: int,
    any_size: bool = False,
) -> TracedMonoid:
    """A raw callable, traced at its real ranks; generated only when every operation is pointwise.

    `leaves` are scalar elements, `shapes` the shapes of the slices that the callable is given, of
    any number of steps along `axis`.
    any_size: those are examples; raises UnsupportedOperation where they matter.
    """
    call, state = flatten((template(spec), template(spec)))[1], promoted(leaves)

    def arguments(wide: bool, more: int = 0) -> list[Signature]:
        sizes = [(*s[:axis], s[axis] + more, *s[axis + 1 :]) for s in shapes]
        return [
            Signature(torch.float32 if wide and leaf.dtype in STORAGE_ONLY else leaf.dtype, shape)
            for leaf, shape in zip((*state, *state), (*sizes, *sizes), strict=True)
        ]

    def traced(wide: bool, more: int = 0) -> Trace:
        return trace(fn, call, arguments(wide, more), name, any_size)

    require_call(fn, 2, f"operator {name!r}", "op(left, right)")

    declared = traced(wide=False)
    slices = [Leaf(r.dtype, s) for r, s in zip(state, shapes, strict=True)]
    try:
        check_results(declared, spec, slices, name, fn, one=ONE)
    except ScanValueError:
        longer = traced(wide=False, more=1)
        raise changed_slices(declared, longer, spec, slices, name, axis) from None
    operator, why_not = None, ""
    try:
        wide = traced(wide=True)
        for node in wide.graph.graph.nodes:
            refuse_random(node)
        others = list(not_pointwise(wide, tuple(shapes[0])))
        if len(set(shapes)) > 1 and not set(others).intersection(MATRIX_PRODUCTS):
            raise UnsupportedOperation(why_not_broadcast(spec, shapes, axis))
        if others:
            raise UnsupportedOperation(why_on_slices(others, spec, [len(s) for s in shapes]))
        require_implemented(fn, call, arguments(wide=True), name)
        scalar = as_scalars(wide, tuple(shapes[0]))
        combine = program(scalar, (*state, *state), state, aligned(wide, spec, name))
        operator = Operator(
            name, leaves, state, leaves, cast_program(leaves, state), combine,
            cast_program(state, leaves, leaves), None,
        )  # fmt: skip
    except UnsupportedOperation as error:
        why_not = str(error)
    found = operator, why_not
    return TracedMonoid(spec, spec, spec, leaves, state, leaves, None, lambda: found, True)


def changed_slices(
    few: Trace, more: Trace, spec: TreeSpec, slices: Sequence[Leaf], name: str, axis: int
) -> ScanValueError:
    """The error for a raw callable that changes the shape of its slices. It was traced for `few`
    steps and for one more: sizes that grew are numbers of steps."""
    order, paths = aligned(few, spec, name), leaf_paths(spec, "left")
    k, path, leaf = next(
        found
        for found in zip(order, paths, slices, strict=True)
        if few.results[found[0]].shape != found[2].shape
    )
    given = steps_named(
        leaf.shape, (*leaf.shape[:axis], leaf.shape[axis] + 1, *leaf.shape[axis + 1 :])
    )
    result = steps_named(few.results[k].shape, more.results[k].shape)
    return ScanValueError(
        f"operator {name!r} is given slices of xs with n steps along axis {axis} and changes their "
        f"shape: {path} is {given}, the result {result}; left, right and the result have one shape"
    )


def steps_named(few: Sequence[int], more: Sequence[int]) -> str:
    """The shape with n, 2n, … in place of the sizes that grow by 1, 2, … with one step more."""
    if len(few) != len(more):
        return str(list(few))
    growth = [b - a for a, b in zip(few, more, strict=True)]
    counts = ("n" if g == 1 else f"{g}n" for g in growth)
    parts = (c if g else str(a) for a, g, c in zip(few, growth, counts, strict=True))
    return f"[{', '.join(parts)}]"
