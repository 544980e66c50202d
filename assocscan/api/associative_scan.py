"""`associative_scan`: the public function, and the path of a call: a generated engine, the torch
operation, or the eager engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import torch

from ..autodiff.verify import require_derivable
from ..engines.base.fallback_warning import warn_once
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..errors import BackendError, UnsupportedOperation
from ..hooks import HOOKS
from ..monoids.call_errors import NOT_PASSED, known_keywords, refuse_call
from ..monoids.captured_values import present
from ..monoids.monoid import Function, Monoid, by_name
from ..program.matrix_operator import refuse_matrices
from ..program.transforms import reduction_only
from ..program.vectors.vector_operator import VectorOperator
from ..pytrees import TreeSpec, unflatten
from ..runtime import backends
from ..runtime import executable_cache as executables
from ..runtime import operation_arguments as operation
from ..runtime.generated_gradient import GeneratedGradient, differentiable, saving_operator
from ..runtime.native import runner
from ..runtime.operation_arguments import Dispatch
from ..runtime.prepared.prepared_call import CacheEntry, entry_of
from ..runtime.scan_call import ScanCall
from ..runtime.vectors.recomputed_gradient import RecomputedGradient
from ..torch_state import (
    has_own_dispatch,
    is_differentiable,
    may_be_differentiated,
    needs_dispatcher,
)
from ..trace import tracer_import as tracer
from ..trace.traced_monoid import SIZE_0
from . import custom_adjoint
from .bind_arguments import bind
from .caches.call_cache import cache_call, converted_results
from .custom_adjoint import CustomAdjoint
from .eager_gradient import EagerGradient
from .eager_path import prepare_eager
from .flags_and_backends import flag, require_choice
from .recomputed_gradient import RecomputedGradientOfCall
from .tensor_subclasses import axis_meant, checked, handed_over, holds_dtensors, overridden

if TYPE_CHECKING:
    from ..monoids.monoid import PlainMonoid

T = TypeVar("T")


# Raw callables, and monoids without lift and lower, give results of the structure of xs.
@overload
def associative_scan(
    op: PlainMonoid,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[False] = False,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> T: ...
@overload
def associative_scan(
    op: PlainMonoid,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[True],
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> tuple[T, T]: ...
@overload
def associative_scan(
    op: Monoid | str,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[False] = False,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> Any: ...
@overload
def associative_scan(
    op: Monoid | str,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[True],
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> tuple[Any, Any]: ...
@overload
def associative_scan(
    op: Function,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[False] = False,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> T: ...
@overload
def associative_scan(
    op: Function,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: Literal[True],
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> tuple[T, T]: ...
@overload
def associative_scan(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: bool,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> Any: ...
@known_keywords
def associative_scan(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *surplus: NoReturn,
    init: Any = None,
    return_final: bool = False,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Any:
    """All prefixes of `xs` along `axis` under the associative operator `op`.

        y[t] = x[0] ∘ x[1] ∘ … ∘ x[t]

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.sum, torch.tensor([1, 2, 3, 4]))
    tensor([ 1,  3,  6, 10])
    >>> associative_scan(ops.sum, torch.tensor([1, 2, 3, 4]), reverse=True, inclusive=False)
    tensor([9, 7, 4, 0])

    Elements of several leaves, an initial carry, and the carry that leaves the scan:

    >>> a, b = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
    >>> (_, h), (_, last) = associative_scan(
    ...     ops.affine, (a, b), init=(1.0, 4.0), return_final=True)
    >>> h, last
    (tensor([3.0000, 2.5000]), tensor(2.5000))

    op: a `Monoid`, the name of a registered one, or a callable f(left, right) on pytrees of slices.
        A plain callable combines many pairs at once: left and right are slices of xs, with all
        dimensions of their leaves and any number of steps along `axis`. A Monoid is written for one
        pair of elements; make one of a function that is not right for slices, too.
    xs: a pytree of dense tensors with the same size along `axis`. Leaves of a Monoid have the same
        number of batch dimensions and broadcast on all of them but `axis`; leaves of a plain
        callable may have different numbers of dimensions. Or jagged nested tensors
        (`torch.nested`, `layout=torch.jagged`) of the same lengths: each component is scanned on
        its own, `axis` is the ragged dimension, counted with the batch, and ys are jagged too.
    axis: counted over the batch dimensions (all but the operator's element dimensions).
    reverse: scan from the end; `op` then receives (later, earlier).
    inclusive: False: output t combines the elements before t; the first is `init` or the identity.
    init: the carry that enters, a state without the axis: tensors or numbers that broadcast to the
        batch without the axis, [B, D] for [B, L, D]; differentiable. It adds no output: ys are as
        long as xs.
    return_final: also return the carry that leaves, a state as `init` is, before any `lower`;
        16-bit states come as float32.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis, each
        scanned on its own. The final then has a leading S, [S, B, D]. init broadcasts to that:
        [B, D] is one for all.
    backend: "auto" (None is the same), "triton", "cuda", "multipass", "cpu" or "eager". A named
        backend runs the scan and its gradient, or raises. Two exceptions: if no gradient can be
        generated, the operator's own adjoint computes it, or else the eager engine, with a warning;
        and with "cuda", Triton runs derivatives whose elements are too large for the CUDA kernels,
        and scans that carry nothing from step to step.
        `explain` names the engine of the gradient.
    deterministic: True: bitwise equal from run to run; None follows
        `torch.are_deterministic_algorithms_enabled()`. All present engines are deterministic (on
        the CPU for a given number of threads), so the flag changes nothing yet.

    Returns ys, or (ys, final): the structure and dtypes of xs, or those that the monoid's lift and
    lower give. The leaves of a monoid broadcast in their batch dimensions, and all its results have
    the batch shape that comes of it. Results of a plain function have the shapes that it returns.
    Floats of 16 bits are combined in float32 and rounded once. Leaves of different float dtypes are
    combined in the widest one.

    A kernel is compiled at the first call that needs it, which takes seconds, and stored on disk
    for later processes. Other dtypes, another layout (the last axis or an inner one) and each
    combination of `inclusive`, `init`, `return_final`, `offsets` and `reverse` may need a kernel of
    their own.

    Raises TypeError and ValueError for arguments that do not fit (the message names the leaf),
    AxisError, TraceError for an operator that is not a pure function of its two elements, and
    BackendError where a named backend cannot run.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.
    """
    if unknown or surplus or xs is NOT_PASSED:
        refuse = functools.partial(refuse_call, op=op, xs=xs)
        checked(op, xs, axis_meant(unknown, axis), refuse, associative_scan, surplus, unknown)
    if torch.compiler.is_dynamo_compiling():
        return HOOKS.compiled_scan(
            op,
            {
                "xs": xs, "axis": axis, "reverse": reverse, "inclusive": inclusive, "init": init,
                "return_final": return_final, "offsets": offsets, "backend": backend,
                "deterministic": deterministic,
            },
            "associative_scan",
        )  # fmt: skip
    if backend is None:
        backend = "auto"
    op = by_name(op)
    if isinstance(op, Monoid) and not op.sees_nothing:
        op = present(op)
    if deterministic is None:
        found = runner.call(op, xs, axis, reverse, inclusive, init, return_final, backend, offsets)
        if found is not runner.MISS:
            return found
    if not isinstance(backend, str) or backend not in backends.BACKENDS:
        checked(op, xs, axis, backends.refuse_backend, backend)
    # `flag` converts 0, 1 and numpy's bools. It is not called for bools: three calls cost 0.1 µs.
    if reverse is not True and reverse is not False:
        reverse = checked(op, xs, axis, flag, "reverse", reverse)  # type: ignore[unreachable]
    if inclusive is not True and inclusive is not False:
        inclusive = checked(op, xs, axis, flag, "inclusive", inclusive)  # type: ignore[unreachable]
    if return_final is not True and return_final is not False:
        return_final = checked(op, xs, axis, flag, "return_final", return_final)  # type: ignore[unreachable]
    if deterministic is not None:
        checked(op, xs, axis, require_choice, deterministic)
    entry = None
    if isinstance(op, Monoid):
        entry = entry_of(
            op.calls, xs, axis, reverse, inclusive, init, return_final, backend, offsets
        )
        found = runner.MISS if entry is None else entry.run()
        if found is not runner.MISS:
            return found
    if entry is None and overridden(xs, init, offsets):
        return handed_over(
            associative_scan, op, xs, axis, reverse, inclusive, init=init,
            return_final=return_final, offsets=offsets, backend=backend,
            deterministic=deterministic,
        )  # fmt: skip
    if entry is None and holds_dtensors(xs):
        return HOOKS.of_dtensors(
            associative_scan, op, xs, axis, reverse=reverse, inclusive=inclusive, init=init,
            return_final=return_final, offsets=offsets, backend=backend,
        )  # fmt: skip
    call = bind(op, xs, axis, reverse, inclusive, init, return_final, offsets)
    outputs, finals, output_spec = run_call(call, backend, entry)
    ys = unflatten(outputs, output_spec)
    return (ys, unflatten(finals, call.final_spec)) if return_final else ys


Results = tuple[list[torch.Tensor], list[torch.Tensor], TreeSpec]


def run_call(call: ScanCall, backend: str, entry: CacheEntry | None = None) -> Results:
    """Outputs, finals and the structure of the outputs.

    entry: of this call in the cache; None if it may not be cached.
    """
    found = None if backend == "eager" else _generated(call, backend, entry)
    if found is not None:
        return found
    executable, tensors = prepare_eager(call, "")
    outputs, finals = executable.run(tensors)
    return outputs, finals, call.state_spec if call.final_only else call.traced.output_spec


def _generated(call: ScanCall, backend: str, entry: CacheEntry | None) -> Results | None:
    """The results of a generated engine. If no generated engine can run the call and the backend is
    "auto": None, after a warning (given once); the caller then uses the eager engine."""
    reason = backends.why_not(call, backend)
    if reason is None:
        try:
            results = _run(call, backend, entry)
            return (*results, call.traced.output_spec)
        except BackendError as error:
            if backend != "auto":
                raise
            reason = str(error)
    if call.leaves[0].is_meta:
        if backend == "auto":
            return None  # without a warning: on this device every engine gives shapes alone
        reason = why_not_meta(backend)
    if backend != "auto":
        raise BackendError(f"the {backend} backend cannot run {call.operator.name!r}: {reason}")
    if reason == SIZE_0:
        return None  # without a warning: it is no fault of the operator
    # A reason that concerns this machine gives one warning; others give one for each operator.
    machine_reasons = (*backends.availability().values(), tracer.why_unavailable())
    operator = None if reason in machine_reasons else call.operator
    warn_once(
        operator,
        f"{'scans run' if operator is None else 'runs'} on the eager engine, which is slower: "
        f'{reason} (backend="eager" asks for it, without this warning)',
    )
    return None


def why_not_meta(backend: str) -> str:
    """Why a generated engine cannot run on tensors without data."""
    kind = "CPU" if backend == "cpu" else "GPU"
    return (
        f"xs is on meta, it runs on {kind} tensors; tensors on the meta device have no data, and "
        'backend="eager" or "auto" gives results of the right shapes and dtypes'
    )


def _run(
    call: ScanCall, backend: str, entry: CacheEntry | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and finals of a call that `why_not` accepts, in one of two ways:

    - as the operation `torch.ops.assocscan.scan`, under a transform, a tracer or a dispatch mode,
      or with tensor subclasses;
    - by the executable; if a tensor requires a gradient, inside an autograd function. Its backward
      pass is generated, or else the operator's own adjoint, or else the eager gradient. Where a
      derivative cannot be generated, this way is also taken under a tracer or a dispatch mode.

    Raises BackendError where no kernel can be made, and where torch.func may ask for a derivative
    that cannot be generated.
    """
    spec, tensors = call.scan(operator_of(call, backend))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    if needs_dispatcher() or has_own_dispatch(tensors):
        transformed = may_be_differentiated()
        try:
            require_derivatives(call, spec, tensors, wanted, transformed)
            return operation.call(backend, spec, tensors)
        except UnsupportedOperation as error:
            if transformed:
                raise BackendError(
                    f"torch.func may ask for the derivative of {call.operator.name!r}, which "
                    f"cannot be generated ({error})"
                ) from error
    if True not in wanted:
        run = executables.run if call.handed is None else call.handed.run
        scan, results = None, run(backend, spec, tensors)
    else:
        scan, why = gradient_of(call, Dispatch(backend), spec, tensors)
        if isinstance(scan, EagerGradient):
            warn_once(call.operator, why)
        elif entry is not None and not isinstance(scan, CustomAdjoint):
            found = converted_results(entry, call, backend, spec, scan)
            if found is not None:
                return found
        results = scan.apply(tensors)
    if entry is not None and not isinstance(scan, (CustomAdjoint, EagerGradient)):
        cache_call(entry, call, backend, spec, scan)
    return results


def gradient_of(
    call: ScanCall, dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[GeneratedGradient | RecomputedGradientOfCall | CustomAdjoint | EagerGradient, str]:
    """The way to the gradient of a call; and the reason, where it is not the adjoint's scan."""
    if isinstance(spec.operator, VectorOperator):
        try:
            return RecomputedGradientOfCall(call, dispatch, spec, tensors), ""
        except UnsupportedOperation as error:
            why = f"its gradient cannot be generated ({error}) and is computed by the eager engine"
            return EagerGradient(call, dispatch, spec, tensors), why
    try:
        refuse_matrices(spec.operator)
        require_derivable(call.operator, call.traced)
        return differentiable(dispatch, spec, tensors), ""
    except UnsupportedOperation as error:
        if custom_adjoint.applies(call):
            return CustomAdjoint(
                call, dispatch, spec, associative_scan
            ), "the operator's own adjoint"
        why = f"its gradient cannot be generated ({error}) and is computed by the eager engine"
        return EagerGradient(call, dispatch, spec, tensors), why


def operator_of(call: ScanCall, backend: str) -> Any:
    """The operator in the form that the backend's engine runs: over scalars or over whole matrices,
    and without outputs for a reduction."""
    operator = (
        backends.matrix_operator(call, backend)
        or backends.vector_operator(call, backend)
        or call.traced.operator
    )
    assert operator is not None
    return reduction_only(operator) if call.final_only else operator


def require_derivatives(
    call: ScanCall,
    spec: ScanSpec[Any],
    tensors: Sequence[MaybeTensor],
    wanted: Sequence[bool],
    transformed: bool,
) -> None:
    """Raise UnsupportedOperation if a derivative cannot be generated: for the tensors whose
    gradient is wanted, or, under torch.func and in forward mode, for all differentiable ones.

    It is checked before the operation is called: inside of it the same error would come too late to
    choose another way.
    """
    tangents = [False] * len(tensors)
    if transformed:
        wanted = tangents = [t is not None and is_differentiable(t) for t in tensors]
    if True not in wanted:
        return
    if isinstance(spec.operator, VectorOperator):
        RecomputedGradient(Dispatch("auto", always=True), spec, tensors).require_derivative(wanted)
    else:
        refuse_matrices(spec.operator)
        saving_operator(spec, wanted, tangents)
        require_derivable(call.operator, call.traced)
