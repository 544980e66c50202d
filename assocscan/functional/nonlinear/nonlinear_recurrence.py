"""`nonlinear_recurrence`: h[t] = step(h[t−1], x[t]) for a step that need not be associative."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...api.associative_scan import operator_of, run_call
from ...api.caches.call_cache import cache_call
from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable
from ...autodiff.newton_operator import derive_newton
from ...autodiff.verify import is_derivable
from ...caching.bounded import BoundedCache
from ...engines.base.device_properties import processors
from ...engines.base.executable import Executable
from ...errors import ScanTypeError, ScanValueError
from ...hooks import HOOKS
from ...pytrees import unflatten
from ...runtime import backends
from ...runtime.generated_gradient import differentiable
from ...runtime.native import runner
from ...runtime.prepared.prepared_call import CacheEntry, entry_of
from ...runtime.scan_call import ScanCall
from ...torch_state import is_tracked, needs_dispatcher
from ...wording import shown
from .newton import MAX_ITERATIONS, NewtonDispatch, Report, is_solvable
from .step_call import bind_step, gather
from .step_operator import StepOperator

METHODS = ("auto", "loop", "newton")
USUAL = ("auto", None, None)  # the method, the tolerance and the iterations of most calls
# Where "auto" takes Newton's method: docs/nonlinear.md.
LONG, CHAINS_PER_PROCESSOR = 1024, 4


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
    """h[t] = step(h[t−1], x[t]), with h[−1] = init, for a step that need not be associative.

    >>> import torch
    >>> from assocscan import nonlinear_recurrence
    >>> def leaky(v, current):                      # a neuron that fires at 1 and starts again
    ...     v = 0.5 * v + current
    ...     return torch.where(v > 1, 0.0, v)
    >>> nonlinear_recurrence(leaky, torch.tensor([0.5, 0.5, 0.5, 0.75, 0.5]), 0.0, axis=0)
    tensor([0.5000, 0.7500, 0.8750, 0.0000, 0.5000])

    A GRU whose recurrent weights are one number per channel, for inputs [B, L, D]:

    >>> def gru(h, x, params):
    ...     (z, r, n), (uz, ur, un) = x, params
    ...     z, r = torch.sigmoid(z + uz * h), torch.sigmoid(r + ur * h)
    ...     return (1 - z) * torch.tanh(n + r * (un * h)) + z * h
    >>> gates = tuple(torch.randn(2, 100, 8) for _ in range(3))
    >>> weights = tuple(torch.randn(8) for _ in range(3))
    >>> h, last = nonlinear_recurrence(gru, gates, 0.0, params=weights, return_final=True)
    >>> h.shape, last.shape
    (torch.Size([2, 100, 8]), torch.Size([2, 8]))

    step: called as step(h, x), or as step(h, x, params) where `params` is not empty, on one
        element: tensors without dimensions, in the structures of init, xs and params. Written with
        torch functions, and torch.where in place of `if`, it returns the new h in the structure of
        init, and h alone: what a step of `jax.lax.scan` returns beside it, as y in (h, y), is made
        by `lower`. It is traced once and becomes one kernel; so does its derivative. What it
        captures must be numbers: tensors are passed in params.
    xs: a pytree of dense tensors with as many dimensions each, of the same size along `axis`; the
        other dimensions, which are the batch, broadcast. Neither init nor params widen the batch: a
        step without inputs takes zeros of the whole shape, [L, B, D] for an init [B, D] and axis 0.
    init: a pytree of tensors or numbers that broadcast to the shape of the batch without the axis,
        [B, D] for [B, L, D]: each of its B × D elements is a chain of states of its own. A state of
        several numbers is a tuple of such tensors, at most 8; a complex one counts twice. A float
        such as 0.0 takes the dtype of the floats in xs. An int such as 0 counts as int64: beside
        int32 xs, h is int64.
    params: a pytree of tensors or numbers that broadcast in the same way and are the same at every
        step; their gradients are summed over the steps. They take part in the promotion of dtypes:
        float32 params beside bfloat16 xs make h float32.
    lower: a fused map after each step: lower(h) or lower(h, x), without params, gives what is
        written at t.
    reverse: exactly flip(f(flip(xs))).
    return_final: also return the last h.
    reset: a bool mask of the steps that start afresh: there h[t] = step(init, x[t]). It has the
        sizes of xs up to the axis, [B, L] for [B, L, D], or else a shape that broadcasts to that of
        xs: [L, 1], or [L, B, 1] for xs [L, B, D] and axis 0. Not together with offsets.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis. The last h
        has a leading S. init has one, or is the same for all sequences, which is meant where both
        fit.
    method: "loop" walks along the axis, one chain beside the other; with few channels on an NVIDIA
        GPU along several parts of it at once, with the same result. "newton" solves windows of the
        axis by Newton's method, and walks along a window where that does not converge; of a step
        that is affine in h, one iteration gives the result. It pays on GPUs for few channels and
        long axes: one CUDA kernel where a state is up to 4 float32 numbers and nothing is packed,
        else a launch for each iteration, for which the host waits. "auto" takes that kernel for
        long axes of few channels, until the states meet up to roundings, and elsewhere the loop.
        `explain_recurrence` tells what ran.
    tolerance: on |h[t] − step(h[t−1], x[t])| / (1 + |h[t]|); of "newton" by default the square root
        of the precision of the coarsest dtype of h. The CUDA kernel stops after three iterations
        within it, or when states meet up to roundings; other engines take one more iteration after
        the first within it.
    max_iterations: of "newton" in a window, by default 24.

    Returns h at every step, or what lower makes of it, or (that, the last h). The dtype is the one
    that step (or lower) returns for arguments of the dtypes given; 16-bit floats are computed in
    float32 and rounded once, and their last h is float32, which as the init of
    the next part does not widen h. An axis of length 0 gives empty states, and init as the last h.

    Differentiable in xs, init and params, also twice; of h only the states are saved. Gradients
    equal a loop's; where states are NaN or infinite, a gradient that is infinite in a loop may be
    NaN here, and the other way round.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TraceError: step or lower are no pure functions of one element, capture a tensor, or mix
            channels.
        TypeError: a leaf is neither tensor nor number; step returns another structure than init's,
            or a state of other dtypes at every step.
        ValueError: lengths or batch shapes do not fit; more than 8 numbers of state; reset beside
            offsets; an unknown method.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: one step; reads xs, writes h. The gradient reads xs, h and its cotangents and
    writes the gradients.

    Sources: G. E. Blelloch and the scan of JAX (`jax.lax.scan`) for the interface; Y. H. Lim et
    al., "Parallelizing non-linear sequential models over the sequence length", ICLR 2024, for
    Newton's method.
    """
    if torch.compiler.is_dynamo_compiling():
        check_method(method, tolerance, max_iterations)
        return HOOKS.compiled_nonlinear_recurrence(
            step,
            {
                "xs": xs, "init": init, "axis": axis, "params": params, "lower": lower,
                "reverse": reverse, "return_final": return_final, "reset": reset,
                "offsets": offsets, "method": method, "tolerance": tolerance,
                "max_iterations": max_iterations, "backend": backend,
                "deterministic": deterministic,
            },
        )  # fmt: skip
    given = gather(step, xs, init, params, lower, reset, axis, offsets)
    reverse, return_final = flag("reverse", reverse), flag("return_final", return_final)
    check_method(method, tolerance, max_iterations)
    backend = checked_backend(backend, deterministic)
    op, scanned, carried = given.operator, given.inputs, given.carried
    options = method, tolerance, max_iterations
    calls = op.calls if options == USUAL else op.calls_by(options)
    key = calls, scanned, axis, reverse, True, carried, return_final, backend, offsets
    found = runner.call(*key)
    if found is not runner.MISS:
        return found
    entry = entry_of(*key)
    found = runner.MISS if entry is None else entry.run()
    if found is not runner.MISS:
        return found
    call = bind_step(given, axis, reverse, return_final, offsets)
    dispatch = parallel_method(call, method, backend, tolerance, max_iterations)
    if dispatch is None:
        outputs, finals, _ = run_call(call, backend, entry)
    else:
        outputs, finals = solve(dispatch, call, entry)
    ys = unflatten(outputs, call.traced.output_spec)
    return (ys, unflatten(finals, call.final_spec)) if return_final else ys


def solve(
    dispatch: NewtonDispatch, call: ScanCall, entry: CacheEntry | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and finals by Newton's method. The call is cached where one kernel solves it."""
    if dispatch.report is None:
        report = solutions_of(call).insert(dispatch.options, Report())
        dispatch = replace(dispatch, report=report)
    spec, tensors = call.scan(operator_of(call, dispatch.backend))
    scan = differentiable(dispatch, spec, tensors) if is_tracked(tensors) else None
    results = dispatch.run(spec, tensors) if scan is None else scan.apply(tensors)
    if entry is not None and not dispatch.once:
        if scan is not None:
            scan.spec = dispatch.in_windows(scan.spec)
        cache_call(entry, call, dispatch.backend, dispatch.in_windows(spec), scan)
    return results


def solutions_of(call: ScanCall) -> BoundedCache[Any, Report]:
    """What the last solutions of such a call took, by the options of the method."""
    assert isinstance(call.operator, StepOperator)
    return call.operator.solutions


def parallel_method(
    call: ScanCall, method: str, backend: str, tolerance: float | None, max_iterations: int | None
) -> NewtonDispatch | None:
    """How the call is solved in parallel; None where it is walked.

    "auto" solves it where one kernel can and that was measured to pay, until residuals are as small
    as roundings. On CPUs it walks: of one chain of 65536 steps, affine in h, that takes 2.2 ms on
    one core and a scan 1.9, of 8 chains 5.5 and 11; Newton's method takes longer."""
    if method == "loop" or backend == "eager" or needs_dispatcher():
        return None
    by_choice = method == "auto"
    if by_choice and not is_long(call, backend):
        return None
    op = call.traced.operator
    if op is None or backends.why_not(call, backend) is not None or not is_solvable(op):
        return None
    tracked = is_tracked((*call.leaves, *(call.init or ())))
    if tracked and not is_derivable(call.operator, call.traced):  # `run_call` warns
        return None
    most = MAX_ITERATIONS if max_iterations is None else max_iterations
    newton = derive_newton(op)
    scans_back = newton.is_diagonal and call.leaves[0].device.type != "cpu"  # the host waits
    dispatch = NewtonDispatch(
        backend, scans_back=scans_back and not by_choice,
        tolerance=0.0 if by_choice and tolerance is None else tolerance, max_iterations=most,
        once=newton.is_affine,
    )  # fmt: skip
    if by_choice and (newton.is_affine or newton.jumps or kernel_of(dispatch, call) is None):
        return None
    return dispatch


def is_long(call: ScanCall, backend: str) -> bool:
    """Whether "auto" may solve the call: at least LONG steps of few chains, not on the CPU."""
    device = call.leaves[0].device
    on_cpu = device.type == "cpu" and backend != "cuda"
    if on_cpu or call.length < LONG or call.offsets is not None:
        return False
    return math.prod(call.batch) // call.length <= CHAINS_PER_PROCESSOR * processors(device)


def kernel_of(dispatch: NewtonDispatch, call: ScanCall) -> Executable | None:
    """The kernel that solves such calls; None where there is none."""
    spec, tensors = call.scan(operator_of(call, dispatch.backend))
    if is_tracked(tensors):
        spec = differentiable(dispatch, spec, tensors).spec
    return dispatch.kernel(spec, tensors)


def check_method(method: Any, tolerance: Any, max_iterations: Any) -> None:
    if not isinstance(method, str) or method not in METHODS:
        raise ScanValueError(f"method is {shown(method)}, expected one of {', '.join(METHODS)}")
    if tolerance is not None:
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
            raise ScanTypeError(f"tolerance is {shown(tolerance)}, expected a number")
        if not 0 < tolerance < math.inf:
            raise ScanValueError(f"tolerance is {tolerance}, expected a positive number")
    if max_iterations is not None:
        if isinstance(max_iterations, bool) or not isinstance(max_iterations, int):
            raise ScanTypeError(f"max_iterations is {shown(max_iterations)}, expected an int")
        if max_iterations < 1:
            raise ScanValueError(f"max_iterations is {max_iterations}, expected at least 1")
