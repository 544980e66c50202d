"""The scan as one operation of torch: `torch.ops.assocscan.scan`.

Scans under compilers, tracers, transforms and dispatch modes call this operation; plain calls run
their executables directly. Its arguments describe a `ScanSpec` and its tensors
(`operation_arguments`). A backward scan is this operation too, with the adjoint as its operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.layout import Finals, Outputs
from ..engines.base.packed_offsets import checked_values
from ..engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec
from ..engines.base.shifted_leaves import explicit
from ..engines.eager import program_interpreter as interpreted
from ..engines.eager.owned_results import in_layout
from ..errors import BackendError, ScanValueError
from ..program import deserialization, serialization
from ..program.matrix_operator import refuse_matrices
from ..program.vectors.vector_operator import VectorOperator
from ..torch_private import KEYS_BELOW_AUTOGRAD, BelowAutograd
from ..torch_state import is_tracked
from ..wording import no_final_of_empty
from . import executable_cache as executables
from .backends import is_of_vectors, results_of
from .generated_gradient import run
from .operation_arguments import Dispatch, scan_of
from .operation_checks import check_backend, check_memory_of, why_not_engine
from .vectors import library_derivatives
from .vectors.batch_dimension import in_front, split_carries, vector_inputs
from .vectors.saved_carries import (
    lacks_carries,
    mark_saved,
    vectors_by_operations,
    with_aligned_carries,
)

Tensors = list[torch.Tensor]

OFFSETS = 5  # the index of `offsets` among the operation's arguments

_LIBRARY = torch.library.Library("assocscan", "DEF")
_LIBRARY.define(
    "scan(str key, str program, Tensor[] inputs, Tensor[] init, Tensor[] edges, Tensor? offsets, "
    "SymInt[] batch, int axis, bool reverse, bool exclusive, bool from_identity, int[] read, "
    "int[] given, int[] final, int[] ahead, int[] edged, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def with_lists(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with () for None, which AOTInductor passes for an empty list. Only the offsets
    may be None."""
    return tuple([() if a is None and k != OFFSETS else a for k, a in enumerate(arguments)])


def compute(*arguments: Any) -> Tensors:
    """The operation on tensors with memory, on every device: checks, then the backend's engine."""
    arguments = with_lists(arguments)
    backend: str = arguments[-1]
    check_backend(backend)
    spec, tensors = scan_of(*arguments)
    check_memory_of(spec, tensors)
    reason = why_not_engine(spec, backend)
    name, falls_back = spec.operator.name, backend == "auto"
    if reason is not None and not falls_back:
        raise BackendError(f"the {backend} backend cannot run {name!r}: {reason}")
    if spec.sequences is not None and tensors[-1] is not None:
        tensors[-1] = checked_values(tensors[-1], spec.length, spec.device)
        check_finals(spec, tensors[-1])
    if reason is None and lacks_carries(spec, tensors):
        reason = "torch operations ran the forward scan"
    if reason is None:
        try:
            outputs, finals = executables.run(backend, spec, with_aligned_carries(spec, tensors))
            mark_saved(spec, outputs)
            return [*outputs, *finals]
        except BackendError as error:
            if not falls_back:
                raise
            reason = str(error)
    if is_of_vectors(spec.operator):
        return vectors_by_operations(backend, spec, tensors, reason)
    outputs, finals = interpreted.scan_instead(spec, tensors, reason)
    return in_layout([*outputs, *finals], *declared_results(backend, spec, tensors))


def check_finals(spec: ScanSpec[Any], offsets: torch.Tensor) -> None:
    """Raise ScanValueError for an empty sequence whose final carry is undefined.

    Offsets on a GPU are not read, because that would wait for the GPU.
    """
    if not spec.final or spec.init is not None or spec.operator.identity is not None:
        return
    if offsets.device.type == "cpu" and bool((offsets.diff() == 0).any()):
        raise ScanValueError(no_final_of_empty(spec.operator.name))


def checked_when_run(offsets: torch.Tensor, length: int) -> torch.Tensor:
    """An int64 copy of offsets, checked when it is made: where a graph is built, whenever it
    runs."""
    found: torch.Tensor = torch.ops.assocscan.checked_offsets(offsets, length)
    return found


def declared_results(
    backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[Outputs, Finals]:
    """Sizes, strides and dtypes of the results, whether a kernel writes them or not."""
    return results_of(backend, spec, [None if t is None else TensorSpec.of(t) for t in tensors])


def fake(*arguments: Any) -> Tensors:
    """The results on fake tensors: shapes, strides and dtypes, by the layout alone."""
    spec, tensors = scan_of(*arguments)
    outputs, finals = declared_results(arguments[-1], spec, tensors)
    device = spec.device
    return [
        *(torch.empty_strided(n, s, dtype=d, device=device) for n, s, d in outputs),
        *(torch.empty(n, dtype=d, device=device) for n, d in finals),
    ]


def differentiable(keyset: Any, *arguments: Any) -> Tensors:
    """The operation at the Autograd key.

    Without derivatives it goes on to the next key. With them it runs the autograd functions of
    `autograd`, whose scans are this operation too.
    """
    arguments = with_lists(arguments)
    inputs, init, edges = arguments[2:5]
    if not is_tracked([*inputs, *init, *edges]):
        with BelowAutograd():
            below = keyset & KEYS_BELOW_AUTOGRAD
            results: Tensors = torch.ops.assocscan.scan.default.redispatch(below, *arguments)
        return results
    spec, tensors = scan_of(*arguments)
    if is_of_vectors(spec.operator):
        return library_derivatives.run(Dispatch(arguments[-1], always=True), spec, tensors)
    refuse_matrices(spec.operator)
    outputs, finals = run(Dispatch(arguments[-1], always=True), *explicit(spec, tensors))
    return [*outputs, *finals]


def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensors, list[int]]:
    """The vmap rule: the mapped dimension becomes the first batch dimension, as a view."""
    key, program, inputs, init, edges, offsets, batch, axis, *flags = arguments
    op = deserialization.read(key, program)
    if in_dims[OFFSETS] is not None:
        raise NotImplementedError(
            "torch.vmap over offsets: sequences are packed along the axis, so pack the offsets of "
            "the batch into one list of offsets"
        )
    # Where the mapped dimension goes in carries: after the packed sequences, if there are any.
    place = 0 if offsets is None else 1
    count = info.batch_size
    if is_of_vectors(op):
        key, program = serialization.write(op.with_batch_dimension())
        moved = vector_inputs(op, inputs, in_dims[2], place, count)
    else:
        moved = in_front(inputs, in_dims[2], 0)
    results = torch.ops.assocscan.scan(
        key, program, moved, in_front(init, in_dims[3], place),
        in_front(edges, in_dims[4], place), offsets, [count, *batch], axis + 1, *flags,
    )  # fmt: skip
    outputs = len(op.outputs)
    dims = [0] * outputs + [place] * (len(results) - outputs)
    results = list(results)
    if isinstance(op, VectorOperator) and op.saves_carries:
        results[outputs], dims[outputs] = split_carries(results[outputs], count), 1
    return results, dims


_LIBRARY.define("checked_offsets(Tensor offsets, SymInt length) -> Tensor")
_LIBRARY.impl(
    "checked_offsets",
    lambda offsets, length: checked_values(offsets, length, offsets.device),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "assocscan::checked_offsets",
    lambda offsets, length: torch.empty_like(offsets, dtype=torch.int64),
    lib=_LIBRARY,
)
_LIBRARY.impl("scan", compute, "CompositeExplicitAutograd")
_LIBRARY.impl("scan", differentiable, "Autograd", with_keyset=True)
# 16-bit inputs stay 16-bit, float32 inputs stay float32: states are combined in float32 anyway.
for _key in ("AutocastCPU", "AutocastCUDA"):
    _LIBRARY.impl("scan", torch.library.fallthrough_kernel, _key)
torch.library.register_fake("assocscan::scan", fake, lib=_LIBRARY)
torch.library.register_vmap("assocscan::scan", batched, lib=_LIBRARY)
