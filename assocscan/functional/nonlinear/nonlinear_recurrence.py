"""`nonlinear_recurrence`: h[t] = step(h[t−1], x[t]) for any step, walked along the axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api.argument_names import checked_backend, flag
from ...api.associative_scan import run_call
from ...api.tensor_subclasses import overridable
from ...errors import ScanValueError
from ...pytrees import unflatten
from ...runtime.native import runner
from ...runtime.prepared.prepared_call import place_of
from ...wording import shown
from .step_call import bind_step, gather

METHODS = ("auto", "loop", "newton")


@overridable
def nonlinear_recurrence(
    step: Callable[..., Any],
    xs: Any,
    init: Any,
    axis: int = 1,
    *,
    params: Any = (),
    lower: Callable[..., Any] | None = None,
    reverse: bool = False,
    return_final: bool = False,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    method: str = "auto",
    tolerance: float | None = None,
    max_iterations: int | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Any:
    given = gather(step, xs, init, params, lower, reset)
    reverse, return_final = flag("reverse", reverse), flag("return_final", return_final)
    backend = checked_backend(backend, deterministic)
    if method not in METHODS:
        raise ScanValueError(f"method is {shown(method)}, expected one of {', '.join(METHODS)}")
    op, scanned, carried = given.operator, given.inputs, given.carried
    place = place_of(
        op.calls, scanned, axis, reverse, True, carried, return_final, backend, offsets
    )
    if place is not None:
        found = runner.call(
            op.calls, scanned, axis, reverse, True, carried, return_final, backend, offsets
        )
        if found is runner.MISS:
            found = place.again()
        if found is not runner.MISS:
            return found
    call = bind_step(given, axis, reverse, return_final, offsets)
    outputs, finals, output_spec = run_call(call, backend, place)
    ys = unflatten(outputs, output_spec)
    return (ys, unflatten(finals, call.final_spec)) if return_final else ys
