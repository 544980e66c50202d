"""Saved carries between a forward scan and its backward pass, which are two library operations.

They are bytes that only the kernels read, with a chunk more at the end than the kernels use. Where
torch operations run the forward scan, because its kernel could not be compiled, that chunk is
filled with `WITHOUT`, and torch operations run the backward pass too; else it is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engines.base.fallback_warning import warn_once
from ...engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec
from ...engines.cpu.vectors.results import carries_shape, results_of
from ...engines.eager.vector_interpreter import (
    PullBack,
    backward,
    by_autograd,
    by_transform,
    scan,
)
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator
from ...torch_private import autograd_reached

WITHOUT, CHECKED = 0xFF, 64  # a byte, and how many of them are read
ALIGNMENT = 64  # of the kernels' structs


def without_carries(spec: ScanSpec[Any]) -> torch.Tensor:
    return torch.full(carries_shape(spec), WITHOUT, dtype=torch.uint8, device=spec.device)


def lacks_carries(spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> bool:
    """Whether it is a backward pass whose forward scan saved no carries."""
    if not isinstance(spec.operator, VectorAdjoint):
        return False
    carries = tensors[spec.operator.carries]
    assert carries is not None
    return carries.numel() > 0 and bool((carries[-1].flatten()[:CHECKED] == WITHOUT).all())


def mark_saved(spec: ScanSpec[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Mark the carries among the outputs of a kernel as saved."""
    if isinstance(spec.operator, VectorOperator) and spec.operator.saves_carries:
        outputs[-1][-1].zero_()


def with_aligned_carries(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> Sequence[MaybeTensor]:
    """The tensors with saved carries as kernels read them: contiguous, at an aligned address."""
    if not isinstance(spec.operator, VectorAdjoint):
        return tensors
    at = spec.operator.carries
    carries = tensors[at]
    assert carries is not None
    if carries.is_contiguous() and carries.data_ptr() % ALIGNMENT == 0:
        return tensors
    return [*tensors[:at], carries.clone(memory_format=torch.contiguous_format), *tensors[at + 1 :]]


def by_operations(
    spec: ScanSpec[Any],
    tensors: Sequence[MaybeTensor],
    pull_back: PullBack = by_transform,
) -> list[torch.Tensor]:
    """The results of a scan over vectors, or of its backward pass, by torch operations."""
    op = spec.operator
    if isinstance(op, VectorAdjoint):
        gradients, ends = backward(spec, tensors, pull_back)
        return [*gradients, *ends]
    outputs, finals = scan(spec, tensors)
    if op.saves_carries:
        outputs.append(without_carries(spec))
    return [*outputs, *finals]


def vectors_by_operations(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor], reason: str
) -> list[torch.Tensor]:
    """`by_operations` where no kernel can run, with one warning that gives the reason.

    They get the strides that the operation declares, since compiled graphs rely on these.
    """
    op = spec.operator.op if isinstance(spec.operator, VectorAdjoint) else spec.operator
    warn_once(op, f"{reason}; it is run by torch operations, which is slower")
    with torch.no_grad(), autograd_reached():
        found = by_operations(spec, tensors, by_autograd)
    outputs, _ = results_of(spec, [None if t is None else TensorSpec.of(t) for t in tensors])
    for k, (shape, strides, dtype) in enumerate(outputs):
        declared = torch.empty_strided(shape, strides, dtype=dtype, device=spec.device)
        found[k] = declared.copy_(found[k])
    return found
