"""Warm calls: what is known of a call is looked up by its tensors' shapes, strides and dtypes.

At small sizes the host is the limit. A call like an earlier one (same monoid and flags, tensors
alike, no offsets) needs no checks: its job is run, or its autograd function entered, at once. One
that ran as one kernel on a GPU without gradients needs no layout either: its outputs are allocated
and the kernel is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .arguments import ScanCall
from .autograd import apply_scan, prepared_job
from .cuda import scan as cuda_scan
from .cuda import tuning
from .engines import gpu, tiles, triton_scan
from .job import Job, Tensors
from .layout import gather_tensors
from .modes import in_other_mode
from .monoid import Monoid
from .trees import flatten, unflatten

MAX_WARM = 512

Key = tuple[Any, ...]


def lookup(
    op: Any, xs: Any, axis: int, reverse: bool, inclusive: bool, init: Any, return_final: bool,
    backend: str,
) -> tuple[Key | None, Callable[[], Any] | None]:  # fmt: skip
    """The key of a call that may be warm, and how to run it if it is."""
    if not isinstance(op, Monoid) or type(axis) is not int:
        return None, None
    if tiles.forced_tile() is not None or tuning.forced_choice() is not None:
        return None, None
    tensors: tuple[Any, ...]
    tensors = xs if type(xs) is tuple else (xs,)
    structure = (type(xs) is tuple, len(tensors), type(init) is tuple)
    if init is not None:
        tensors = (*tensors, *init) if type(init) is tuple else (*tensors, init)
    grad = torch.is_grad_enabled()
    parts: list[Any] = []
    for t in tensors:
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            return None, None
        if t.layout is not torch.strided or t.is_nested or t.is_conj() or t.is_neg():
            return None, None
        parts += (t.dtype, t.shape, t.stride(), t.device, grad and t.requires_grad)
    if in_other_mode():
        return None, None
    key = (structure, axis, reverse, inclusive, return_final, backend, torch.get_default_dtype(),
           *parts)  # fmt: skip
    known = op.warm.get(key)
    return key, None if known is None else lambda: known(tensors)


def remember(key: Key, call: ScanCall, job: Job, init: Any) -> None:
    """Keep a call that ran on the tensors as they are: nothing was converted or expanded."""
    given = () if init is None else init if type(init) is tuple else (init,)
    if any(a is not b for a, b in zip(call.init or (), given, strict=True)):
        return
    tensors = [*call.leaves, *given]
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    assert isinstance(call.operator, Monoid)
    warm = call.operator.warm
    if len(warm) >= MAX_WARM:
        warm.clear()
    if True in wanted:
        warm[key] = WarmJob(prepared_job(job, wanted), call, True)
        return
    launch = None if given else one_kernel(call, job)
    warm[key] = WarmJob(job, call, False) if launch is None else WarmCall(launch, call, job)


def one_kernel(call: ScanCall, job: Job) -> triton_scan.Prepared | cuda_scan.Prepared | None:
    """The launch of a call that is one kernel on a GPU, on the tensors as they are."""
    if job.engine not in (triton_scan.scan, cuda_scan.scan, gpu.scan):
        return None
    problem = call.problem()
    engine = gpu.ENGINES[gpu.choose(problem)[0]] if job.engine is gpu.scan else job.engine
    prepared: triton_scan.Prepared | cuda_scan.Prepared
    if engine is triton_scan.scan:
        prepared = triton_scan.prepare(problem, gather_tensors(problem))
    elif engine is cuda_scan.scan and cuda_scan.why_not(problem) is None:
        prepared = cuda_scan.prepared_for(problem)
    else:
        return None
    if prepared.copies or math.prod(problem.carry_batch) == 0:
        return None
    return prepared


class WarmJob:
    """A job whose arguments were checked; with `grad` through its autograd function."""

    def __init__(self, job: Job, call: ScanCall, grad: bool) -> None:
        assert call.spec is not None
        self.job, self.grad = job, grad
        self.count = len(call.spec.outputs)
        self.output_spec, self.state_spec = call.spec.output_spec, call.state_spec

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        job = self.job
        outputs: Tensors
        if self.grad:
            results = list(apply_scan(job, tensors))
            outputs, finals = results[: self.count], results[len(results) - len(job.final) :]
        else:
            outputs, finals = job.engine(job.problem(tensors))
        ys = unflatten(outputs, self.output_spec)
        return (ys, unflatten(finals, self.state_spec)) if job.final else ys


class WarmCall:
    """A launch whose arguments, but for the tensors, are known."""

    def __init__(
        self, prepared: triton_scan.Prepared | cuda_scan.Prepared, call: ScanCall, job: Job
    ) -> None:
        assert call.spec is not None
        self.prepared, self.device = prepared, call.leaves[0].device
        names: list[tuple[str, int]] = (
            prepared.pointers[0]
            if isinstance(prepared, cuda_scan.Prepared)
            else list(prepared.pointers)
        )
        self.inputs = [k for role, k in names if role == "input"]
        self.single = call.spec.output_spec == flatten(call.leaves[0])[1]
        self.flat = call.spec.output_spec == flatten(tuple(call.leaves[:1]) * self.count)[1]
        self.output_spec, self.state_spec = call.spec.output_spec, call.state_spec
        self.return_final = call.return_final
        self.otherwise = WarmJob(job, call, False)

    @property
    def count(self) -> int:
        return len(self.prepared.outputs)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        device, prepared = self.device, self.prepared
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype in prepared.outputs
        ]
        given = [tensors[k] for k in self.inputs]
        given += outputs
        if self.return_final:
            finals = [
                torch.empty(size, dtype=dtype, device=device) for size, dtype in prepared.finals
            ]
            given += finals
        if isinstance(prepared, cuda_scan.Prepared):
            if not cuda_scan.launch_warm(prepared, given, device):
                return self.otherwise(tensors)
        else:
            triton_scan.launch_given(prepared, given)
        ys: Any
        if self.single:
            ys = outputs[0]
        else:
            ys = tuple(outputs) if self.flat else unflatten(outputs, self.output_spec)
        return (ys, unflatten(finals, self.state_spec)) if self.return_final else ys
