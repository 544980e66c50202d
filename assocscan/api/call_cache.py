"""The call cache: calls like an earlier one run its executable at once.

At small sizes the host is the limit. A call with the same monoid and flags, on tensors of the same
shapes, strides, dtypes and devices, without offsets, needs no checks: its executable is found by
these and run, or its autograd function entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engines.base import forced_choices as overrides
from ..engines.base.executable import Executable, Misaligned
from ..engines.base.spec import ScanSpec
from ..errors import BackendError
from ..monoids.monoid import Monoid
from ..pytrees import flatten, unflatten
from ..runtime import executable_cache as executables
from ..runtime.autograd import GeneratedGradient, Scan
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from ..torch_state import needs_dispatcher

Key = tuple[Any, ...]


def lookup(
    op: Any, xs: Any, axis: int, reverse: bool, inclusive: bool, init: Any, return_final: bool,
    backend: str,
) -> tuple[Key | None, Callable[[], Any] | None]:  # fmt: skip
    """The key of a call that may be cached, and how to run it if it is."""
    if not isinstance(op, Monoid) or type(axis) is not int:
        return None, None
    if overrides.generation:  # somebody forces a choice: what was prepared is not to run
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
           torch.get_num_threads(), *parts)  # fmt: skip
    known = op.calls.get(key)
    return key, None if known is None else lambda: known(tensors)


def gathered(tree: Any, leaves: list[Any]) -> Any:
    """The structure of nested tuples, whose leaves are appended. Other containers count as leaves:
    those of a dictionary may come in any order."""
    if type(tree) is tuple:
        return tuple([gathered(part, leaves) for part in tree])
    leaves.append(tree)
    return None


def remember(
    key: Key,
    call: ScanCall,
    init: Any,
    dispatch: Dispatch,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | None,
) -> None:
    """Keep a call that ran on the tensors as they are: nothing was converted or expanded."""
    given: list[Any] = []
    if init is not None:
        gathered(init, given)
    if any(a is not b for a, b in zip(call.init or (), given, strict=True)):
        return
    tensors = [*call.leaves, *given]
    assert isinstance(call.operator, Monoid)
    form = ResultForm(call)
    try:
        executable = executables.prepare(
            dispatch.backend, spec if scan is None else scan.spec, tensors
        )
    except BackendError:  # torch operations ran instead
        return
    if scan is None:
        call.operator.calls.keep(key, CachedCall(executable, dispatch, spec, form))
    else:
        scan.executable = executable
        call.operator.calls.keep(key, CachedGradient(scan, form))


class ResultForm:
    """How outputs and finals are put into the caller's structure."""

    def __init__(self, call: ScanCall) -> None:
        self.outputs, self.state = call.traced.output_spec, call.state_spec
        self.return_final = call.return_final
        self.count = len(call.traced.outputs)
        self.finals = len(call.traced.state) if call.return_final else 0
        alike = tuple(call.leaves[:1]) * self.count
        self.is_single = self.outputs == flatten(call.leaves[0])[1]
        self.is_tuple = self.outputs == flatten(alike)[1]

    def put(self, outputs: Sequence[torch.Tensor], finals: Sequence[torch.Tensor]) -> Any:
        ys: Any
        if self.is_single:
            ys = outputs[0]
        elif self.is_tuple:
            ys = tuple(outputs)
        else:
            ys = unflatten(list(outputs), self.outputs)
        return (ys, unflatten(list(finals), self.state)) if self.return_final else ys


class CachedCall:
    """A call without gradients."""

    def __init__(
        self, executable: Executable, dispatch: Dispatch, spec: ScanSpec[Any], form: ResultForm
    ) -> None:
        self.executable, self.dispatch, self.spec, self.form = executable, dispatch, spec, form

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        try:
            outputs, finals = self.executable.run(tensors)
        except Misaligned:
            outputs, finals = executables.run(self.dispatch.backend, self.spec, tensors)
        return self.form.put(outputs, finals)


class CachedGradient:
    """A call with gradients."""

    def __init__(self, scan: GeneratedGradient, form: ResultForm) -> None:
        self.scan, self.form = scan, form

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        results = Scan.apply(self.scan, *tensors)
        form = self.form
        return form.put(results[: form.count], results[len(results) - form.finals :])
