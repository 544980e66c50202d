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
from ..pytrees import align, flatten, template, unflatten
from ..trace.fx_trace import isolated
from ..trace.signatures import positional_count
from ..trace.traced_monoid import lifted
from ..wording import shown

if TYPE_CHECKING:
    from ..monoids.monoid import Monoid

TARGETS = ("triton", "cuda", "cpp")


def monoid_source(monoid: Monoid, target: str, like: Any) -> str:
    """The operator's functions in the target language."""
    if not isinstance(target, str) or target not in TARGETS:
        names = ", ".join(TARGETS)
        raise ScanValueError(f"unknown target {shown(target)}; choose one of {names}")
    traced, _, _ = monoid.of(default_example(monoid) if like is None else like)
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
    needs = ScanTypeError(
        f"{monoid.name!r} needs like=, example leaves of xs{said_example(monoid)}: what it scans "
        "is not told by its identity or its lift"
    )
    if monoid.lift is not None:
        count = positional_count(monoid.lift)
        if count is None or any(n != 0 for n in flatten(monoid.element_ndim)[0]):
            raise needs
        return lifted_example(monoid, count)
    if monoid.identity is None or callable(monoid.identity):
        raise needs
    leaves, spec = flatten(monoid.identity)
    ndims = monoid.element_ndims(spec)
    return unflatten([example_leaf(v, n, needs) for v, n in zip(leaves, ndims, strict=True)], spec)


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
    """`, such as like=(torch.eye(3), torch.zeros(3))`; empty where the number of leaves is not
    known, or all leaves are scalars."""
    count = None
    if monoid.lift is not None:
        count = positional_count(monoid.lift)
    elif callable(monoid.identity):
        count = positional_count(monoid.identity)
    elif monoid.identity is not None:
        count = len(flatten(monoid.identity)[0])
    ndim = monoid.element_ndim
    if isinstance(ndim, int):
        ndims = [ndim] * (count or 0)
    else:
        ndims = flatten(ndim)[0]
    if not any(ndims):
        return ""
    written = [
        "torch.eye(3)" if n == 2 else f"torch.zeros({', '.join(['3'] * n) or '()'})" for n in ndims
    ]
    return f", such as like={written[0] if len(written) == 1 else '(' + ', '.join(written) + ')'}"


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


def example_leaf(value: Any, ndim: int, needs: Exception) -> torch.Tensor:
    """A tensor of the dtype and the `ndim` dimensions of `value`, a leaf of the identity. Raises
    the exception `needs` if `value` is no number or tensor of so many dimensions."""
    if isinstance(value, torch.Tensor) and value.dim() == ndim:
        return torch.ones(value.shape, dtype=value.dtype)
    if ndim:
        raise needs
    if isinstance(value, bool):
        return torch.ones((), dtype=torch.bool)
    if isinstance(value, int):
        return torch.ones((), dtype=torch.int64)
    if isinstance(value, float):
        return torch.ones((), dtype=torch.float32)
    if isinstance(value, complex):
        return torch.ones((), dtype=torch.complex64)
    raise needs


HOOKS.monoid_source = monoid_source
