"""`Monoid.source`: the text of the code that is generated for one operator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..cuda import source as cuda_source
from ..engines.cpu.kernel import operator_source
from ..engines.triton import source as triton_source
from ..errors import AssocScanError, BackendError, ScanTypeError, ScanValueError
from ..hooks import HOOKS
from ..program.cpp_and_triton_expressions import TRITON
from ..program.operator import Leaf
from ..pytrees import align, flatten, leaf_paths, spread, template, unflatten
from ..trace.fx_trace import isolated
from ..trace.signatures import positional_count
from ..trace.traced_monoid import lifted
from ..wording import shown

if TYPE_CHECKING:
    from ..monoids.monoid import Monoid

TARGETS = ("triton", "cuda", "cpp")
# Of the leaves that numbers of an identity stand for; a bool is an int too.
DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}


def monoid_source(monoid: Monoid, target: str, like: Any) -> str:
    """The operator's functions in the target language."""
    if not isinstance(target, str) or target not in TARGETS:
        names = ", ".join(TARGETS)
        raise ScanValueError(f"unknown target {shown(target)}; choose one of {names}")
    traced, _, _ = monoid.of(default_example(monoid) if like is None else like, "like")
    traced = traced.by_component or traced
    if traced.operator is None:
        raise BackendError(f"operator {monoid.name!r} cannot be generated: {traced.why_not}")
    operator = traced.operator
    everything = list(range(operator.width))
    if target == "cpp":
        return operator_source(operator, everything, everything) + "\n"
    if target == "cuda":
        return cuda_source.operator_source(operator, everything) + "\n"
    lacking = TRITON.unsupported(operator.lift, operator.combine, operator.lower)
    if lacking is not None:
        raise BackendError(f"operator {monoid.name!r}: Triton cannot express {lacking!r}")
    return triton_source.module(operator, everything, everything)


def default_example(monoid: Monoid) -> Any:
    """An example of xs: the structure of the identity, the dtypes of its Python types, and the
    shapes of its tensors. With a `lift`, a number for each of its parameters: of float32, or of
    int64 where the lift then makes numbers of the identity's types, and of float32 does not.

    Raises TypeError where neither determines the leaves.
    """
    if monoid.lift is not None:
        count = positional_count(monoid.lift)
        if count is None:
            raise needs_example(monoid, "its lift takes any number of arguments")
        if any(n != 0 for n in flatten(monoid.element_ndim)[0]):
            raise needs_example(monoid, "the sizes of what its lift takes are not known")
        return lifted_example(monoid, count)
    if monoid.identity is None:
        raise needs_example(monoid, "it has no identity, which would show them")
    if callable(monoid.identity):
        raise needs_example(monoid, "its identity is a function of their shapes")
    leaves, spec = flatten(monoid.identity)
    ndims, paths = monoid.element_ndims(spec), leaf_paths(spec, "")
    try:
        examples = [example_leaf(*leaf) for leaf in zip(leaves, ndims, paths, strict=True)]
    except ScanTypeError as error:
        raise needs_example(monoid, str(error)) from None
    return unflatten(examples, spec)


def needs_example(monoid: Monoid, why: str) -> ScanTypeError:
    """The error for a monoid whose declaration does not determine the leaves of xs."""
    return ScanTypeError(
        f"{monoid.name!r} needs like=, example leaves of xs{said_example(monoid)}: {why}"
    )


def lifted_example(monoid: Monoid, count: int) -> Any:
    """An example of what the lift, of `count` parameters, takes."""

    def example(dtypes: Sequence[torch.dtype]) -> Any:
        numbers = tuple(torch.ones((), dtype=dtype) for dtype in dtypes)
        return numbers[0] if count == 1 else numbers

    floats = example([torch.float32] * count)
    if callable(monoid.identity) or monoid.identity is None:
        require_lift(monoid, floats)
        return floats
    choices = list(itertools.product((torch.float32, torch.int64), repeat=count))
    for dtypes in choices if count <= 3 else (choices[0], choices[-1]):
        try:
            traced = monoid.of(example(dtypes))[0]
            numbers = align(template(traced.state_spec), monoid.identity, "the identity")
        except AssocScanError:
            continue
        if all(is_of(value, leaf.dtype) for value, leaf in zip(numbers, traced.state, strict=True)):
            return example(dtypes)
    require_lift(monoid, floats)
    return floats


def is_of(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number of an identity is of the kind of a dtype: bool, integer, float, complex."""
    kind = torch.tensor(value).dtype
    return (kind == torch.bool, kind.is_floating_point, kind.is_complex) == (
        dtype == torch.bool, dtype.is_floating_point, dtype.is_complex
    )  # fmt: skip


def said_example(monoid: Monoid) -> str:
    """`, such as like=(torch.eye(3), torch.zeros(3))`; empty where the structure of xs is not
    known, or all leaves are scalars."""
    tree = structure_of_inputs(monoid)
    if tree is None:
        return ""
    values, spec = flatten(tree)
    ndims = spread(template(spec), monoid.element_ndim, "element_ndim")
    if not any(ndims):
        return ""
    shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else () for v in values]
    side = next((s[-1] for s in shapes if s), 3)
    written = []
    for shape, n in zip(shapes, ndims, strict=True):
        sizes = shape if len(shape) == n else (side,) * n
        is_square = n == 2 and sizes[0] == sizes[1]
        made = f"eye({sizes[0]})" if is_square else f"zeros({', '.join(map(str, sizes)) or '()'})"
        written.append(f"torch.{made}")
    return f", such as like={as_written(unflatten(written, spec))}"


def structure_of_inputs(monoid: Monoid) -> Any:
    """A tree in the structure of xs, as far as the declaration shows it; its leaves are those of
    the identity where they are known. Else None."""
    ndim, identity = monoid.element_ndim, monoid.identity
    if monoid.lift is None and identity is not None and not callable(identity):
        return identity
    if not isinstance(ndim, int):
        return ndim
    of = identity if monoid.lift is None else monoid.lift
    count = positional_count(of) if callable(of) else None
    return None if not count else ndim if count == 1 else (ndim,) * count


def as_written(tree: Any) -> str:
    """A tree of texts as code: the containers around the texts."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {as_written(part)}" for key, part in tree.items()) + "}"
    parts = [as_written(part) for part in tree]
    if hasattr(tree, "_fields"):
        return f"{type(tree).__name__}({', '.join(parts)})"
    if isinstance(tree, list):
        return f"[{', '.join(parts)}]"
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def require_lift(monoid: Monoid, example: Any) -> None:
    """Raise TypeError where the lift fails on the example, whose leaves are only a guess."""
    leaves, spec = flatten(example)
    try:
        with isolated():
            lifted(monoid, spec, [Leaf(t.dtype) for t in leaves])
    except AssocScanError as error:
        raise ScanTypeError(
            f"{monoid.name!r} needs like=, example leaves of xs: its lift does not take float32 "
            f"numbers ({error})"
        ) from error


def example_leaf(value: Any, ndim: int, path: str) -> torch.Tensor:
    """A tensor of the dtype and the `ndim` dimensions of `value`, the leaf of the identity at
    `path`. Raises ScanTypeError if `value` is no number or tensor of so many dimensions."""
    if isinstance(value, torch.Tensor) and value.dim() == ndim:
        return torch.ones(value.shape, dtype=value.dtype)
    leaf = f"its identity{path} is"
    if isinstance(value, torch.Tensor):
        raise ScanTypeError(
            f"{leaf} a tensor of shape {list(value.shape)}, but element_ndim is {ndim} there"
        )
    if ndim:
        missing = {1: "the length of the vector", 2: "the sizes of the matrix"}.get(
            ndim, "the sizes of the tensor"
        )
        raise ScanTypeError(f"{leaf} {shown(value)}, which does not tell {missing}")
    for kind, dtype in DTYPES.items():
        if isinstance(value, kind):
            return torch.ones((), dtype=dtype)
    raise ScanTypeError(f"{leaf} {shown(value)}, expected a number or a tensor")


HOOKS.monoid_source = monoid_source
