"""`explain_recurrence`: how `nonlinear_recurrence` runs a call, and what the last one took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...api.explain import paths, plan_of
from ...api.flags_and_backends import checked_backend, flag
from ...engines.base.executable import Executable
from ...engines.base.explained_plan import Plan
from ...monoids.call_errors import checked_call
from ...runtime.scan_call import ScanCall
from .newton import NewtonDispatch, Report
from .nonlinear_recurrence import check_method, kernel_of, parallel_method, solutions_of
from .step_call import bind_step, gather


@checked_call
def explain_recurrence(
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
    last: bool = False,
) -> Plan:
    """The `Plan` of `nonlinear_recurrence` with the same arguments; nothing is computed.

    >>> import torch
    >>> from assocscan import explain_recurrence
    >>> step = lambda h, x: torch.tanh(0.5 * h + x)
    >>> plan = explain_recurrence(step, torch.zeros(1, 64, 8), 0.0, backend="eager")
    >>> plan.engine, plan.solution
    ('eager', '')

    last: with method="newton", `Plan.solution` tells what the last call with such arguments took:
        the iterations, and how many windows of how many were walked, because they did not converge.
        The host waits for the GPU to read that. Empty where there was none.

    Raises what `nonlinear_recurrence` raises for arguments that do not fit, and for a named backend
    that cannot run.
    """
    given = gather(step, xs, init, params, lower, reset, axis, offsets)
    reverse, return_final = flag("reverse", reverse), flag("return_final", return_final)
    check_method(method, tolerance, max_iterations)
    backend = checked_backend(backend, deterministic)
    call = bind_step(given, axis, reverse, return_final, offsets)
    dispatch = parallel_method(call, method, backend, tolerance, max_iterations)
    walked = plan_of(call, backend)
    if dispatch is None:
        return walked
    plan, report = newton_plan(dispatch, call, walked, last)
    return replace(plan, solution=str(report)) if report is not None else plan


def newton_plan(
    dispatch: NewtonDispatch, call: ScanCall, walked: Plan, last: bool
) -> tuple[Plan, Report | None]:
    """The plan of Newton's method and, if that is wanted, what it took last. walked: the plan of
    the loop."""
    if dispatch.once:
        why = "the step is affine in h, so that one scan of its derivatives is the result"
        return replace(walked, engine="newton (one scan)", why=why, commands=()), None
    executable = kernel_of(dispatch, call)
    if executable is not None:
        plan = executable.plan.with_names(paths(call))
        plan = replace(plan, operator=walked.operator, gradient=walked.gradient)
        return plan, told_by(executable) if last else None
    why = "windows are solved by Newton's method, a scan for each iteration; the host waits for it"
    plan = replace(walked, engine="newton", why=why, commands=())
    return plan, solutions_of(call).get(dispatch.options) if last else None


def told_by(executable: Executable) -> Report | None:
    """What the last run of a kernel took; None where there was none. Waits for the GPU."""
    if executable.report is None:
        return None
    iterations, walked, windows = executable.report.sum(0).tolist()
    return Report(iterations, walked, windows) if windows else None
