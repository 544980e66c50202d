"""Saved carries between a forward scan and its backward pass, which are two library operations.

Where torch operations run the forward scan, because its kernel could not be compiled, a kernel may
still run the backward pass. On GPUs torch operations save what the kernel would, since nothing may
be read there, in a CUDA graph not even by the host. On the CPU carries are bytes that only the
kernels know, with a chunk more at the end than they use: without carries that chunk is filled with
`WITHOUT`, and torch operations run the backward pass too; else it is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engines.base.fallback_warning import warn_once
from ...engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec
from ...engines.base.vectors.results import GPU_RESULTS
from ...engines.eager.owned_results import in_layout, owned
from ...engines.eager.vector_carries import saved_carries
from ...engines.eager.vector_interpreter import (
    PullBack,
    backward,
    by_autograd,
    by_transform,
    results_of,
    scan,
    walk,
)
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator
from ...torch_private import autograd_reached
from .. import backends

WITHOUT, CHECKED = 0xFF, 64  # a byte, and how many of them are read
BYTES = torch.uint8  # of carries on the CPU; carries on GPUs are larger integers
ALIGNMENT = 64  # of the kernels' structs


def without_carries(backend: str, spec: ScanSpec[Any]) -> torch.Tensor:
    """Carries that no kernel may read. On GPUs they are NaN, should one read them."""
    shape, dtype = backends.vector_results(backend, spec.device).carries(spec)
    return torch.full(shape, WITHOUT if dtype == BYTES else -1, dtype=dtype, device=spec.device)


def lacks_carries(spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> bool:
    """Whether it is a backward pass whose forward scan saved no carries."""
    if not isinstance(spec.operator, VectorAdjoint):
        return False
    carries = tensors[spec.operator.carries]
    assert carries is not None
    if carries.dtype != BYTES or not carries.numel():
        return False
    return bool((carries[-1].flatten()[:CHECKED] == WITHOUT).all())


def mark_saved(spec: ScanSpec[Any], outputs: Sequence[torch.Tensor]) -> None:
    """Mark the carries among the outputs of a kernel as saved."""
    if isinstance(spec.operator, VectorOperator) and spec.operator.saves_carries:
        carries = outputs[-1]
        if carries.dtype == BYTES:
            carries[-1].zero_()


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
    backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> list[torch.Tensor]:
    """The results of a scan over vectors, or of its backward pass, by torch operations that can be
    differentiated: in that case nothing reads the carries."""
    op = spec.operator
    if isinstance(op, VectorAdjoint):
        return pulled_back(spec, tensors, by_transform)
    outputs, finals = scan(spec, tensors)
    if op.saves_carries:
        outputs.append(without_carries(backend, spec))
    return [*outputs, *finals]


def pulled_back(
    spec: ScanSpec[VectorAdjoint], tensors: Sequence[MaybeTensor], pull_back: PullBack
) -> list[torch.Tensor]:
    gradients, ends = backward(spec, tensors, pull_back)
    return [*gradients, *ends]


def vectors_by_operations(
    backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor], reason: str
) -> list[torch.Tensor]:
    """The results by torch operations where no kernel can run, with one warning that gives the
    reason.

    They get the strides that the operation declares, since compiled graphs rely on these.
    """
    op = spec.operator.op if isinstance(spec.operator, VectorAdjoint) else spec.operator
    warn_once(op, f"{reason}; it is run by torch operations, which is slower")
    layout = backends.vector_results(backend, spec.device)
    with torch.no_grad(), autograd_reached():
        if isinstance(spec.operator, VectorAdjoint):
            found = pulled_back(spec, tensors, by_autograd)
        else:
            states = walk(spec, tensors)
            outputs, finals = results_of(spec, states)
            if op.saves_carries:
                saves = layout is GPU_RESULTS
                outputs.append(
                    saved_carries(spec, states) if saves else without_carries(backend, spec)
                )
            found = [*outputs, *finals]
    specs = [None if t is None else TensorSpec.of(t) for t in tensors]
    return in_layout(owned(found, tensors), *layout.results_of(spec, specs))
