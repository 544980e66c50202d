"""`explain`: the plan of a scan, found without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..engines.base.executable import Executable
from ..engines.base.explained_plan import Plan
from ..engines.base.scan_spec import MaybeTensor, Name, TensorSpec
from ..errors import BackendError
from ..monoids.call_errors import checked_call
from ..pytrees import leaf_paths
from ..runtime import backends
from ..runtime import executable_cache as executables
from ..runtime.backward_pass import Backward
from ..runtime.generated_gradient import GeneratedGradient, along_axis
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from ..runtime.vectors.recomputed_gradient import RecomputedGradient
from .associative_scan import gradient_of, operator_of
from .bind_arguments import bind
from .eager_path import prepare_eager
from .flags_and_backends import checked_backend, flag


@checked_call
def explain(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: bool = False,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> Plan:
    """The `Plan` of `associative_scan` with the same arguments; nothing is scanned.

    >>> import torch
    >>> from assocscan import explain, ops
    >>> explain(ops.sum, torch.ones(8, 4096, 512), axis=1, backend="eager").engine
    'eager'

    Raises what `associative_scan` raises for arguments that do not fit, and for a named backend
    that cannot run.
    """
    backend = checked_backend(backend, deterministic)
    flags = flag("reverse", reverse), flag("inclusive", inclusive)
    call = bind(op, xs, axis, *flags, init, flag("return_final", return_final), offsets)
    return plan_of(call, backend)


def plan_of(call: ScanCall, backend: str) -> Plan:
    """The plan of the executable that the call runs, and of its backward pass if it has one."""
    reason = "asked for" if backend == "eager" else backends.why_not(call, backend)
    if reason is None:
        try:
            return generated_plan(call, backend)
        except BackendError as error:
            if backend != "auto":
                raise
            reason = str(error)
    if backend not in ("auto", "eager"):
        raise BackendError(f"the {backend} backend cannot run {call.operator.name!r}: {reason}")
    executable, _ = prepare_eager(call, reason)
    return executable.plan.with_names(paths(call))


def generated_plan(call: ScanCall, backend: str) -> Plan:
    """The plan of the generated engine, and of the gradient if a tensor requires one.

    Raises BackendError where the kernel of the forward scan cannot be compiled.
    """
    spec, tensors = call.scan(operator_of(call, backend))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    scan, gradient = None, ""
    if True in wanted:
        scan, gradient = gradient_of(call, Dispatch(backend), spec, tensors)
        spec = scan.spec
    executable = executables.prepare(backend, spec, tensors)
    if isinstance(scan, GeneratedGradient):
        gradient = gradient_plan(scan, executable, tensors, wanted, backend)
    elif isinstance(scan, RecomputedGradient):
        gradient = "cpu; computes the states of each chunk again from the carry that enters it"
    plan = executable.plan
    if backend in backends.GPU_ENGINES:
        plan = replace(plan, why=f"asked for; {plan.why}")
    # Equal operators share an executable, under the name of the one that came first.
    plan = replace(plan.with_names(paths(call)), operator=call.operator.name)
    return replace(plan, gradient=gradient)


def gradient_plan(
    scan: GeneratedGradient,
    forward: Executable,
    tensors: Sequence[MaybeTensor],
    wanted: Sequence[bool],
    backend: str,
) -> str:
    """The engine of a generated backward pass and the reason, on the assumption that the cotangents
    have the strides of the results.

    If the kernel of the backward pass cannot be compiled, the forward scan still runs. The backward
    pass then runs by torch operations (`auto`) or raises BackendError (a named backend); see
    `run_derivative`.

    Tensors on the meta device stand in for those of the backward pass, so nothing is computed; the
    executable is prepared for the device of the scan.
    """
    spec = scan.spec
    inputs = [None if t is None else without_memory(TensorSpec.of(t)) for t in tensors]
    found = [without_memory(forward.specs[k]) for k in (*forward.outputs, *forward.finals)]
    saved = scan.saved(inputs[: scan.count], found)
    cotangents = [None if k in scan.integers else t for k, t in enumerate(found)]
    states = dict(zip(scan.states, saved[scan.count :], strict=True))
    states |= along_axis(spec, saved[: scan.count])
    pass_ = Backward(
        spec, [*saved[: scan.count], *inputs[scan.count :]], states, scan.like,
        wanted[: scan.count], cotangents,
    )  # fmt: skip
    adjoint, given = pass_.scan()
    specs = [None if t is None else replace(TensorSpec.of(t), device=spec.device) for t in given]
    try:
        plan = backends.preparer(backend, adjoint)(adjoint, specs).plan
    except BackendError as error:
        return f"eager; {error}" if scan.dispatch.falls_back else f"raises BackendError: {error}"
    return f"{plan.engine}; {plan.why}"


def without_memory(spec: TensorSpec | None) -> torch.Tensor:
    """A tensor on the meta device with the shape, strides and dtype of the spec."""
    assert spec is not None
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")


def paths(call: ScanCall) -> dict[Name, str]:
    """The names of the tensors in a printed plan (`xs[0]`, `init`), by role and number."""
    trees = {"input": (call.input_spec, "xs"), "init": (call.state_spec, "init"),
             "output": (call.traced.output_spec, "ys")}  # fmt: skip
    return {
        (role, k): path
        for role, (spec, root) in trees.items()
        for k, path in enumerate(leaf_paths(spec, root))
    }
