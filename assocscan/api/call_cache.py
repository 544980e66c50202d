"""Warm calls: what is known of a call is looked up by its tensors' shapes, strides and dtypes.

At small sizes the host is the limit. A call like an earlier one (same monoid and flags, tensors
alike, no offsets) needs no checks: its job is run, or its autograd function entered, at once. One
that ran as one kernel on a GPU needs no layout either: its outputs are allocated and the kernel is
launched; so are those of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engines.base.job import Job, Tensors
from ..monoids.monoid import Monoid
from ..pytrees import flatten, unflatten
from ..runtime.autograd import apply_scan, prepared_job
from ..runtime.call import ScanCall
from ..runtime.launch import Launch, is_forced
from ..runtime.launched import LaunchedScan, Launches
from ..torch_state import needs_dispatcher

MAX_WARM = 512

Key = tuple[Any, ...]


def lookup(
    op: Any, xs: Any, axis: int, reverse: bool, inclusive: bool, init: Any, return_final: bool,
    backend: str,
) -> tuple[Key | None, Callable[[], Any] | None]:  # fmt: skip
    """The key of a call that may be warm, and how to run it if it is."""
    if not isinstance(op, Monoid) or type(axis) is not int:
        return None, None
    if is_forced():
        return None, None
    found: list[Any] = []
    structure = gathered(xs, found), init is not None and (gathered(init, found),)
    tensors = tuple(found)
    grad = torch.is_grad_enabled()
    parts: list[Any] = []
    for t in tensors:
        if type(t) is not torch.Tensor and type(t) is not torch.nn.Parameter:
            return None, None
        if t.layout is not torch.strided or t.is_nested or t.is_conj() or t.is_neg():
            return None, None
        parts += (t.dtype, t.shape, t.stride(), t.device, grad and t.requires_grad)
    if needs_dispatcher():
        return None, None
    key = (structure, axis, reverse, inclusive, return_final, backend, torch.get_default_dtype(),
           *parts)  # fmt: skip
    known = op.warm.get(key)
    return key, None if known is None else lambda: known(tensors)


def gathered(tree: Any, leaves: list[Any]) -> Any:
    """The structure of nested tuples, whose leaves are appended. Other containers count as leaves:
    those of a dictionary may come in any order."""
    if type(tree) is tuple:
        return tuple([gathered(part, leaves) for part in tree])
    leaves.append(tree)
    return None


def remember(key: Key, call: ScanCall, job: Job, init: Any) -> None:
    """Keep a call that ran on the tensors as they are: nothing was converted or expanded."""
    given: list[Any] = []
    if init is not None:
        gathered(init, given)
    if any(a is not b for a, b in zip(call.init or (), given, strict=True)):
        return
    tensors = [*call.leaves, *given]
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    assert isinstance(call.operator, Monoid)
    warm = call.operator.warm
    if len(warm) >= MAX_WARM:
        warm.clear()
    is_tracked = True in wanted
    if is_tracked:
        job = prepared_job(job, wanted)
    launch = None if given else Launch.of(job.problem(tensors), job.engine)
    if launch is None or (is_tracked and job.final):
        warm[key] = WarmJob(job, call, is_tracked)
    elif is_tracked:
        warm[key] = WarmGradient(Launches(job, launch, tensors, wanted), call)
    else:
        warm[key] = WarmCall(launch, call, job)


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


class WarmGradient:
    """A call with gradients of which the launches are known."""

    def __init__(self, known: Launches, call: ScanCall) -> None:
        assert call.spec is not None
        self.known, self.count = known, len(call.spec.outputs)
        self.output_spec = call.spec.output_spec

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        return unflatten(LaunchedScan.apply(self.known, *tensors)[: self.count], self.output_spec)


class WarmCall:
    """A launch whose arguments, but for the tensors, are known."""

    def __init__(self, launch: Launch, call: ScanCall, job: Job) -> None:
        assert call.spec is not None
        self.launch, self.device = launch, call.leaves[0].device
        alike = tuple(call.leaves[:1]) * len(launch.prepared.outputs)
        self.single = call.spec.output_spec == flatten(call.leaves[0])[1]
        self.flat = call.spec.output_spec == flatten(alike)[1]
        self.output_spec, self.state_spec = call.spec.output_spec, call.state_spec
        self.return_final = call.return_final
        self.otherwise = WarmJob(job, call, False)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        found = self.launch.run(tensors, self.device)
        if found is None:
            return self.otherwise(tensors)
        outputs, finals = found
        ys: Any
        if self.single:
            ys = outputs[0]
        else:
            ys = tuple(outputs) if self.flat else unflatten(outputs, self.output_spec)
        return (ys, unflatten(finals, self.state_spec)) if self.return_final else ys
