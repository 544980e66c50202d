"""`Monoid.source`: the generated code of one operator, to read."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from .cuda import source as cuda_source
from .engines import triton_source
from .engines.kernel import operator_source
from .errors import BackendError, ScanTypeError, ScanValueError
from .render import TRITON
from .trees import flatten, unflatten

if TYPE_CHECKING:
    from .monoid import Monoid

TARGETS = ("triton", "cuda", "cpp")


def monoid_source(monoid: Monoid, target: str, like: Any) -> str:
    """The operator's functions in the target language."""
    if target not in TARGETS:
        raise ScanValueError(f"unknown target {target!r}; choose one of {', '.join(TARGETS)}")
    specialized, _, _ = monoid.of(default_example(monoid) if like is None else like)
    if specialized.operator is None:
        raise BackendError(f"operator {monoid.name!r} cannot be generated: {specialized.why_not}")
    operator = specialized.operator
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
    """Scalar leaves after the identity's structure and Python types, or after lift's parameters.

    Raises TypeError where neither tells.
    """
    needs = ScanTypeError(f"{monoid.name!r} does not tell what its elements are; pass like=")
    if any(n != 0 for n in flatten(monoid.element_ndim)[0]):
        raise needs
    if monoid.lift is not None:
        count = positional_count(monoid.lift)
        if count is None:
            raise needs
        example = tuple(torch.ones(()) for _ in range(count))
        return example[0] if count == 1 else example
    if monoid.identity is None or callable(monoid.identity):
        raise needs
    leaves, spec = flatten(monoid.identity)
    return unflatten([example_leaf(v, needs) for v in leaves], spec)


def positional_count(fn: Any) -> int | None:
    """How many positional parameters a function requires."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in positional and p.default is p.empty for p in parameters) or None


def example_leaf(value: Any, needs: Exception) -> torch.Tensor:
    if isinstance(value, bool):
        return torch.ones((), dtype=torch.bool)
    if isinstance(value, int):
        return torch.ones((), dtype=torch.int64)
    if isinstance(value, float):
        return torch.ones((), dtype=torch.float32)
    if isinstance(value, complex):
        return torch.ones((), dtype=torch.complex64)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return torch.ones((), dtype=value.dtype)
    raise needs
