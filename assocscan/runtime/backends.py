"""The backends: which can run a call (`why_not`), and which engine prepares it (`preparer`).

On GPUs: `cuda` (CUDA C++, one pass over memory), `triton` (one kernel; each program scans its
chains from end to end) and `multipass` (Triton kernels on chunks of the axis, in up to three
passes). On the CPU: `cpu` (generated C++). On any device: `eager` (torch operations).

`auto` takes `cpu` on the CPU; on GPUs `gpu_engine_choice` chooses. Operators over matrices of size
8, 16, 32 or 64 have Triton kernels of their own (`engines/triton/matrix`), for `triton`,
`multipass` and `auto` on GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch

from ..cuda import launcher as cuda_launcher
from ..cuda import prepare as cuda_scan
from ..cuda.newton import prepare as cuda_newton
from ..engines.base.executable import Executable
from ..engines.base.layout import Finals, Outputs, result_layout, tensors_by_name
from ..engines.base.scan_spec import ScanSpec, TensorSpec
from ..engines.base.vectors import prepare as gpu_vector_tensors
from ..engines.base.vectors.results import GPU_RESULTS, ResultLayout
from ..engines.cpu import compiler
from ..engines.cpu import prepare as cpu
from ..engines.cpu.vectors import prepare as cpu_vectors
from ..engines.cpu.vectors.results import RESULTS as CPU_RESULTS
from ..engines.triton import loader as triton_loader
from ..engines.triton import multipass
from ..engines.triton import prepare as triton_scan
from ..engines.triton.matrix import prepare as matrix_scan
from ..engines.triton.vectors import prepare as triton_vectors
from ..errors import BackendError, ScanValueError
from ..program.cpp_and_triton_expressions import TRITON
from ..program.matrix_operator import MatrixOperator
from ..program.operator import Operator
from ..program.vectors.vector_adjoint import VectorAdjoint
from ..program.vectors.vector_operator import VectorOperator
from ..torch_private import hint_of, jit_tracing_state
from ..torch_state import has_own_dispatch, needs_dispatcher, wants_further_derivatives
from ..wording import shown
from . import gpu_engine_choice as gpu

if TYPE_CHECKING:
    from .scan_call import ScanCall

Prepare = Callable[[ScanSpec[Any], Sequence[TensorSpec | None]], Executable]

BACKENDS = ("auto", "triton", "cuda", "multipass", "cpu", "eager")
GPU_ENGINES = ("triton", "cuda", "multipass")
GPU_DEVICES = ("cuda", "xpu")


def refuse_backend(backend: object) -> NoReturn:
    raise ScanValueError(f"unknown backend {shown(backend)}; choose one of {', '.join(BACKENDS)}")


def availability() -> dict[str, str | None]:
    """For each engine, why it is not available on this machine; None where it is."""
    triton = why_no_triton()
    return {
        "triton": triton,
        "cuda": cuda_launcher.why_unavailable(),
        "multipass": triton,
        "cpu": compiler.why_unavailable(),
        "eager": None,
    }


def why_no_triton() -> str | None:
    """Why Triton kernels cannot run on this machine; None where they can."""
    if not triton_loader.is_installed():
        return "Triton is not installed (it comes with torch's CUDA wheels)"
    if triton_loader.is_interpreting():
        return None
    if not (torch.cuda.is_available() or torch.xpu.is_available()):
        return "no GPU was found (TRITON_INTERPRET=1 runs Triton's interpreter on CPU tensors)"
    return None


def why_not(call: ScanCall, backend: str) -> str | None:
    """Why the backend cannot run this call; None if it can. `auto` is judged by `cpu` on CPU
    tensors and by `triton` on others."""
    device = call.leaves[0].device
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "triton"
    reason = why_not_here(device, backend)
    if reason is not None:
        return reason
    if jit_tracing_state() is not None:
        return "torch.jit.trace records torch operations, of the eager engine"
    if matrix_operator(call, backend) is not None or vector_operator(call, backend) is not None:
        return None
    if call.traced.operator is None:
        return call.traced.why_not
    if call.traced.operator.sequential and backend == "multipass":
        return "it cuts the axis, and steps that are not associative must be made in order"
    if backend in ("triton", "multipass"):
        lacking = unsupported_by_triton(call.traced.operator)
        if lacking is not None:
            return f"Triton cannot express {lacking!r}"
    if backend == "cuda":
        return cuda_scan.too_large(call.traced.operator, call.final)
    return None


@functools.cache
def why_not_here(device: torch.device, backend: str) -> str | None:
    """Why the backend cannot run on tensors of this device."""
    unavailable = availability()[backend]
    if unavailable is not None:
        return unavailable
    if backend == "cpu":
        return None if device.type == "cpu" else f"xs is on {device}, it runs on CPU tensors"
    if backend == "cuda":
        if device.type != "cuda":
            return f"xs is on {device}, it runs on tensors of NVIDIA GPUs"
        return cuda_launcher.why_not_device(device)
    if triton_loader.is_interpreting():
        if device.type != "cpu":
            return f"xs is on {device}, Triton's interpreter takes CPU tensors"
    elif device.type not in GPU_DEVICES:
        return f"xs is on {device}, it runs on GPU tensors"
    return None


@functools.lru_cache(maxsize=1024)
def unsupported_by_triton(op: Operator) -> str | None:
    """The first operation of `op` that Triton cannot express."""
    return TRITON.unsupported(op.lift, op.combine, op.lower)


def matrix_operator(call: ScanCall, backend: str) -> MatrixOperator | None:
    """The operator over whole matrices if the backend has kernels for it: `triton`, `multipass`
    and, on GPUs, `auto`."""
    if backend in ("cpu", "cuda") or (backend == "auto" and call.leaves[0].device.type == "cpu"):
        return None
    return call.traced.matrices


def vector_operator(call: ScanCall, backend: str) -> VectorOperator | None:
    """The operator with a state axis if the backend has kernels for it (`vector_engine`). Its
    kernels compute first gradients; where more is wanted, scans are operations on scalars."""
    operator, device = call.traced.vectors, call.leaves[0].device
    engine = vector_engine(backend, device)
    if operator is None or engine is None or wants_further_derivatives():
        return None
    return operator if engine is CPU_VECTORS or gpu.is_worth_vectors(call) else None


def vector_engine(backend: str, device: torch.device) -> Prepare | None:
    """The `prepare` for scans over vectors of this backend on this device; None if the backend has
    no kernels over vectors."""
    if device.type == "cpu" and backend in ("cpu", "auto"):
        return CPU_VECTORS
    return GPU_VECTORS.get(backend)


def is_of_vectors(op: object) -> TypeGuard[VectorOperator | VectorAdjoint]:
    """Whether it is an operator with a state axis, or the backward pass of one."""
    return isinstance(op, (VectorOperator, VectorAdjoint))


def saving_carries(
    backend: str, spec: ScanSpec[VectorOperator], tensors: Sequence[torch.Tensor | None]
) -> ScanSpec[VectorOperator]:
    """The scan over vectors that also returns the carries that its backward pass reads."""
    specs = tuple([None if t is None else TensorSpec.of(t) for t in tensors])
    if needs_dispatcher() or has_own_dispatch(tensors):  # sizes may be symbolic
        return saving_along(carry_lane(backend, *with_hints(spec, specs)), spec)
    return known_saving_carries(backend, spec, specs)


@functools.lru_cache(maxsize=1024)
def known_saving_carries(
    backend: str, spec: ScanSpec[VectorOperator], specs: tuple[TensorSpec | None, ...]
) -> ScanSpec[VectorOperator]:
    """`saving_carries` for sizes that are plain numbers; cached."""
    return saving_along(carry_lane(backend, spec, specs), spec)


def saving_along(lane: int | None, spec: ScanSpec[VectorOperator]) -> ScanSpec[VectorOperator]:
    return replace(spec, operator=spec.operator.saving_carries(lane))


def with_hints(
    spec: ScanSpec[VectorOperator], specs: Sequence[TensorSpec | None]
) -> tuple[ScanSpec[VectorOperator], list[TensorSpec | None]]:
    """The scan and its tensors with numbers for symbolic sizes and strides."""

    def known(t: TensorSpec) -> TensorSpec:
        return replace(
            t, shape=tuple(map(hint_of, t.shape)), strides=tuple(map(hint_of, t.strides))
        )

    sequences = None if spec.sequences is None else hint_of(spec.sequences)
    spec = replace(spec, batch=tuple(map(hint_of, spec.batch)), sequences=sequences)
    return spec, [None if t is None else known(t) for t in specs]


def carry_lane(
    backend: str, spec: ScanSpec[VectorOperator], specs: Sequence[TensorSpec | None]
) -> int | None:
    """The batch dimension along which the carries that a scan over vectors saves are laid out."""
    if vector_engine(backend, spec.device) is CPU_VECTORS:
        return cpu_vectors.lane_dimension(spec, specs)
    return gpu_vector_tensors.lane_dimension(spec, specs)


def vector_results(backend: str, device: torch.device) -> ResultLayout:
    """The layout of the results of scans over vectors, saved carries and gradients included."""
    engine = vector_engine(backend, device)
    return CPU_RESULTS if engine in (CPU_VECTORS, None) else GPU_RESULTS


def results_of(
    backend: str, spec: ScanSpec[Any], tensors: Sequence[TensorSpec | None]
) -> tuple[Outputs, Finals]:
    """Sizes, strides and dtypes of what a scan writes, whichever engine of the backend runs it: of
    the outputs, then of the finals."""
    if is_of_vectors(spec.operator):
        return vector_results(backend, spec.device).results_of(spec, tensors)
    return result_layout(spec, tensors_by_name(spec, tensors))


def preparer(backend: str, spec: ScanSpec[Any]) -> Prepare:
    """The `prepare` function of the backend's engine, for a scan that `why_not` accepts."""
    if isinstance(spec.operator, MatrixOperator):
        return MATRICES[backend]
    if is_of_vectors(spec.operator):
        engine = vector_engine(backend, spec.device)
        assert engine is not None
        return engine
    if spec.newton is not None:
        return newton_preparer(backend, spec)
    if backend == "auto":
        return cpu.prepare if spec.device.type == "cpu" else gpu.prepare
    return SCALARS[backend]


def newton_preparer(backend: str, spec: ScanSpec[Any]) -> Prepare:
    """What prepares a solution by Newton's method in one kernel. Raises BackendError where there is
    none."""
    reason = why_not_here(spec.device, "cuda") if backend in ("auto", "cuda") else "not asked for"
    if reason is not None:
        raise BackendError(f"the cuda backend cannot run: {reason}")
    return cuda_newton.prepare


# Scans over vectors, and their backward passes.
CPU_VECTORS: Prepare = functools.partial(gpu.either_pass, cpu_vectors)
GPU_VECTORS: dict[str, Prepare] = {
    "auto": gpu.prepare_vectors,
    "triton": functools.partial(gpu.either_pass, triton_vectors),
    "cuda": gpu.prepare_vectors_cuda,
}
MATRICES: dict[str, Prepare] = {
    "auto": matrix_scan.prepare_auto,
    "triton": matrix_scan.prepare,
    "multipass": matrix_scan.prepare_multipass,
}
SCALARS: dict[str, Prepare] = {
    "cpu": cpu.prepare,
    "triton": triton_scan.prepare,
    "cuda": gpu.prepare_cuda,
    "multipass": multipass.prepare,
}
