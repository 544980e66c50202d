"""Warm calls: what is known of a call is looked up by its tensors' shapes, strides and dtypes.

At small sizes the host is the limit. A call like an earlier one (same monoid and flags, tensors
alike, no init, no offsets, no gradient wanted) that ran as one Triton kernel needs no checks and no
layout: its outputs are allocated and the kernel is launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .arguments import ScanCall
from .engines import gpu, tiles, triton_scan
from .layout import gather_tensors
from .modes import in_other_mode
from .monoid import Monoid
from .trees import flatten, unflatten

MAX_WARM = 512

Key = tuple[Any, ...]


def lookup(
    op: Any, xs: Any, axis: int, reverse: bool, inclusive: bool, return_final: bool, backend: str
) -> tuple[Key | None, Callable[[], Any] | None]:
    """The key of a call that may be warm, and how to run it if it is."""
    if not isinstance(op, Monoid) or type(axis) is not int or tiles.forced_tile() is not None:
        return None, None
    tensors: tuple[Any, ...]
    if type(xs) is torch.Tensor:
        tensors, single = (xs,), True
    elif type(xs) is tuple:
        tensors, single = xs, False
    else:
        return None, None
    grad = torch.is_grad_enabled()
    parts: list[Any] = []
    for t in tensors:
        if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_nested:
            return None, None
        if (grad and t.requires_grad) or t.is_conj() or t.is_neg():
            return None, None
        parts += (t.dtype, t.shape, t.stride(), t.device)
    if in_other_mode():
        return None, None
    key = (single, axis, reverse, inclusive, return_final, backend, torch.get_default_dtype(),
           *parts)  # fmt: skip
    known = op.warm.get(key)
    return key, None if known is None else lambda: known(tensors)


def remember(key: Key, call: ScanCall, engine: Any) -> None:
    """Keep the call if it ran as one Triton kernel on the tensors as they are."""
    if engine is not triton_scan.scan and engine is not gpu.scan:
        return
    problem = call.problem()
    if engine is gpu.scan and gpu.is_cut(problem):
        return
    prepared = triton_scan.prepare(problem, gather_tensors(problem))
    if prepared.copies or math.prod(problem.carry_batch) == 0:
        return
    assert isinstance(call.operator, Monoid) and call.spec is not None
    operator = call.operator
    if len(operator.warm) >= MAX_WARM:
        operator.warm.clear()
    operator.warm[key] = WarmCall(prepared, call)


class WarmCall:
    """A launch whose arguments, but for the tensors, are known."""

    def __init__(self, prepared: triton_scan.Prepared, call: ScanCall) -> None:
        assert call.spec is not None
        self.prepared, self.device = prepared, call.leaves[0].device
        self.inputs = [k for role, k in prepared.pointers if role == "input"]
        self.single = call.spec.output_spec == flatten(call.leaves[0])[1]
        self.flat = call.spec.output_spec == flatten(tuple(call.leaves[:1]) * self.count)[1]
        self.output_spec, self.state_spec = call.spec.output_spec, call.state_spec
        self.return_final = call.return_final

    @property
    def count(self) -> int:
        return len(self.prepared.outputs)

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        device = self.device
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype in self.prepared.outputs
        ]
        given = [tensors[k] for k in self.inputs]
        given += outputs
        if self.return_final:
            finals = [
                torch.empty(size, dtype=dtype, device=device)
                for size, dtype in self.prepared.finals
            ]
            given += finals
        triton_scan.launch_given(self.prepared, given)
        ys: Any
        if self.single:
            ys = outputs[0]
        else:
            ys = tuple(outputs) if self.flat else unflatten(outputs, self.output_spec)
        return (ys, unflatten(finals, self.state_spec)) if self.return_final else ys
