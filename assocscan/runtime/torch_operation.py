"""The scan as one operation of torch: `torch.ops.assocscan.scan`.

Compilers, tracers, transforms and dispatch modes see this operation; plain calls run their
executables directly. It stands for a whole `ScanSpec` and its tensors (`operation`). A backward
scan is this operation too, with the adjoint's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.layout import result_layout, tensors_by_name
from ..engines.base.packed_offsets import checked_values
from ..engines.base.shifted_leaves import explicit
from ..engines.base.spec import ScanSpec, TensorSpec
from ..engines.eager import program_interpreter as interpreted
from ..errors import BackendError, ScanValueError
from ..program.matrix_operator import refuse_matrices
from ..torch_private import KEYS_BELOW_AUTOGRAD, BelowAutograd
from ..torch_state import is_tracked
from . import executable_cache as executables
from .autograd import run
from .operation_arguments import Dispatch, scan_of
from .operation_checks import check_backend, check_memory_of, why_not_engine

Tensors = list[torch.Tensor]
Dim = int | None

OFFSETS = 5  # its place among the operation's arguments

_LIBRARY = torch.library.Library("assocscan", "DEF")
_LIBRARY.define(
    "scan(str key, str program, Tensor[] inputs, Tensor[] init, Tensor[] edges, Tensor? offsets, "
    "SymInt[] batch, int axis, bool reverse, bool exclusive, bool from_identity, int[] read, "
    "int[] given, int[] final, int[] ahead, int[] edged, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def with_lists(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Programs of AOTInductor pass None for an empty list. Only the offsets may be None."""
    return tuple([() if a is None and k != OFFSETS else a for k, a in enumerate(arguments)])


def compute(*arguments: Any) -> Tensors:
    """The kernel of every device: the engine that `backend` names."""
    arguments = with_lists(arguments)
    backend: str = arguments[-1]
    check_backend(backend)
    spec, tensors = scan_of(*arguments[:-1])
    check_memory_of(spec, tensors)
    reason = why_not_engine(spec, backend)
    name, falls_back = spec.operator.name, backend == "auto"
    if reason is not None and not falls_back:
        raise BackendError(f"the {backend} backend cannot run {name!r}: {reason}")
    if spec.sequences is not None and tensors[-1] is not None:
        tensors[-1] = checked_values(tensors[-1], spec.length, spec.device)
        check_finals(spec, tensors[-1])
    try:
        if reason is not None:
            raise BackendError(reason)
        outputs, finals = executables.run(backend, spec, tensors)
    except BackendError as error:
        if not falls_back:
            raise
        outputs, finals = interpreted.scan_instead(spec, tensors, str(error))
    return [*outputs, *finals]


def check_finals(spec: ScanSpec[Any], offsets: torch.Tensor) -> None:
    """The final of an empty sequence is init or the identity; looked at where nothing waits."""
    if not spec.final or spec.init is not None or spec.operator.identity is not None:
        return
    if offsets.device.type == "cpu" and bool((offsets.diff() == 0).any()):
        raise ScanValueError(
            f"the final carry of an empty sequence is init or the identity, and "
            f"{spec.operator.name!r} declares no identity; pass init="
        )


def fake(*arguments: Any) -> Tensors:
    """Shapes, strides and dtypes of the results."""
    spec, tensors = scan_of(*arguments[:-1])
    specs = [None if t is None else TensorSpec.of(t) for t in tensors]
    outputs, finals = result_layout(spec, tensors_by_name(spec, specs))
    device = spec.device
    return [
        *(torch.empty_strided(n, s, dtype=d, device=device) for n, s, d in outputs),
        *(torch.empty(n, dtype=d, device=device) for n, d in finals),
    ]


def differentiable(keyset: Any, *arguments: Any) -> Tensors:
    """The Autograd key: another scan where a derivative is wanted (`autograd.Scan`)."""
    arguments = with_lists(arguments)
    inputs, init, edges = arguments[2:5]
    if not is_tracked([*inputs, *init, *edges]):
        with BelowAutograd():
            below = keyset & KEYS_BELOW_AUTOGRAD
            results: Tensors = torch.ops.assocscan.scan.default.redispatch(below, *arguments)
        return results
    spec, tensors = scan_of(*arguments[:-1])
    refuse_matrices(spec.operator)
    outputs, finals = run(Dispatch(arguments[-1], always=True), *explicit(spec, tensors))
    return [*outputs, *finals]


def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensors, list[int]]:
    """torch.vmap: one more batch dimension, in front of the others; nothing is copied."""
    key, program, inputs, init, edges, offsets, batch, axis, *flags = arguments
    if in_dims[OFFSETS] is not None:
        raise NotImplementedError(
            "torch.vmap over offsets: sequences are packed along the axis, so pack the offsets of "
            "the batch into one list of offsets"
        )
    place = 0 if offsets is None else 1  # of a carry: the sequences come first
    results = torch.ops.assocscan.scan(
        key, program, in_front(inputs, in_dims[2], 0), in_front(init, in_dims[3], place),
        in_front(edges, in_dims[4], place), offsets, [info.batch_size, *batch], axis + 1, *flags,
    )  # fmt: skip
    finals = len(flags[5])
    return list(results), [0] * (len(results) - finals) + [place] * finals


def in_front(tensors: Tensors, dims: Sequence[Dim] | None, place: int) -> Tensors:
    """The mapped dimension at `place`; of size 1 in tensors that have none."""
    return [
        t.unsqueeze(place) if d is None else t.movedim(d, place)
        for t, d in zip(tensors, dims or [None] * len(tensors), strict=True)
    ]


_LIBRARY.impl("scan", compute, "CompositeExplicitAutograd")
_LIBRARY.impl("scan", differentiable, "Autograd", with_keyset=True)
# 16-bit inputs stay 16-bit, float32 inputs stay float32: states are combined in float32 anyway.
for _key in ("AutocastCPU", "AutocastCUDA"):
    _LIBRARY.impl("scan", torch.library.fallthrough_kernel, _key)
torch.library.register_fake("assocscan::scan", fake, lib=_LIBRARY)
torch.library.register_vmap("assocscan::scan", batched, lib=_LIBRARY)
