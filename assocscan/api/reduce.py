"""`reduce`: all elements combined in order, without writing the prefixes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch

from ..engines.base.shifted_leaves import at_last_steps
from ..engines.eager.owned_results import owned
from ..errors import ScanValueError
from ..hooks import HOOKS
from ..monoids.call_errors import NOT_PASSED, known_keywords, refuse_call
from ..monoids.captured_values import present
from ..monoids.monoid import Function, Monoid, by_name
from ..pytrees import unflatten
from ..runtime.native import runner
from ..runtime.prepared.prepared_call import entry_of
from ..runtime.scan_call import ScanCall
from .associative_scan import run_call
from .bind_arguments import bind
from .eager_path import lowered, widen
from .empty_sequences import has_known_empty_sequence
from .flags_and_backends import checked_backend, flag
from .tensor_subclasses import axis_meant, checked, handed_over, holds_dtensors, overridden

if TYPE_CHECKING:
    from ..monoids.monoid import PlainMonoid

T = TypeVar("T")


@overload
def reduce(
    op: PlainMonoid,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    *,
    init: Any = None,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> T: ...
@overload
def reduce(
    op: Monoid | str,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    *,
    init: Any = None,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> Any: ...
@overload
def reduce(
    op: Function,
    xs: T,
    axis: int = 0,
    reverse: bool = False,
    *,
    init: Any = None,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
) -> T: ...
@known_keywords
def reduce(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    *surplus: NoReturn,
    init: Any = None,
    offsets: torch.Tensor | None = None,
    backend: str | None = "auto",
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Any:
    """All of `xs` along `axis` combined in order: the last output of `associative_scan`.

        y = x[0] ∘ x[1] ∘ … ∘ x[L−1]

    >>> import torch
    >>> from assocscan import ops, reduce
    >>> reduce(ops.sum, torch.tensor([1, 2, 3, 4]))
    tensor(10)
    >>> a, b = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
    >>> reduce(ops.affine, (a, b), init=(1.0, 4.0))             # h[1] = 0.5 · (0.5 · 4 + 1) + 1
    (tensor(0.2500), tensor(2.5000))

    The order is kept, so that `op` need not be commutative; with `reverse` it is
    x[L−1] ∘ … ∘ x[0]. Parameters are those of `associative_scan`. Nothing is written but the
    result, in the shape of the batch without the axis, with a leading S for S packed sequences.
    `lower` is applied to it; to get the state before `lower`, reduce `with_lower(op, None)`. With
    `lower` the dtypes are those of a scan's outputs. Without it they are those of the state, where
    float32 beside float64 becomes float64.

    Differentiable in xs and init. If the derivative reads the state before each step (an affine map
    does, for the gradient of `a`; a sum does not), the forward kernel writes all states.

    An empty sequence gives init, or the identity. ValueError for one if there is neither, or if
    `lower` reads the inputs at the last step, since an empty sequence has no last step. With
    offsets on a GPU, and in graphs, there may be no error; the result is then undefined.

    Raises what `associative_scan` raises.

    Cost per element: as the scan's, without its writes.
    """
    if unknown or surplus or xs is NOT_PASSED:
        refuse = functools.partial(refuse_call, op=op, xs=xs)
        checked(op, xs, axis_meant(unknown, axis), refuse, reduce, surplus, unknown)
    if torch.compiler.is_dynamo_compiling():
        options = {"xs": xs, "axis": axis, "reverse": reverse, "init": init, "offsets": offsets,
                   "backend": backend, "deterministic": deterministic}  # fmt: skip
        return HOOKS.compiled_scan(op, options, "reduce")
    op = by_name(op)
    if isinstance(op, Monoid) and not op.sees_nothing:
        op = present(op)
    if isinstance(op, Monoid) and deterministic is None:
        named = "auto" if backend is None else backend
        found = runner.call(op.reductions, xs, axis, reverse, True, init, True, named, offsets)
        if found is not runner.MISS:
            return found
    if overridden(xs, init, offsets):
        options = {"init": init, "offsets": offsets, "backend": backend}
        return handed_over(reduce, op, xs, axis, reverse, **options, deterministic=deterministic)
    backend = checked(op, xs, axis, checked_backend, backend, deterministic)
    entry = None
    if isinstance(op, Monoid) and op.lower is None:
        reverse = checked(op, xs, axis, flag, "reverse", reverse)
        entry = entry_of(op.reductions, xs, axis, reverse, True, init, True, backend, offsets)
        found = runner.MISS if entry is None else entry.run()
        if found is not runner.MISS:
            return found
    if type(xs) is not torch.Tensor and holds_dtensors(xs):
        options = {"reverse": reverse, "init": init, "offsets": offsets, "backend": backend}
        return HOOKS.of_dtensors(reduce, op, xs, axis, **options)
    call = bind(op, xs, axis, flag("reverse", reverse), True, init, True, offsets, final_only=True)
    require_last_inputs(call)
    _, finals, _ = run_call(call, backend, entry)
    return reduced(call, finals, last_inputs(call) if call.operator.lower_takes_inputs else [])


def reduced(call: ScanCall, finals: list[torch.Tensor], raw: list[torch.Tensor]) -> Any:
    """What `reduce` returns for these final carries: lowered, in the dtypes of results.

    raw: `last_inputs`, where `lower` takes them.
    """
    if call.operator.lower is None:
        dtypes = [leaf.dtype for leaf in call.traced.state]
        results = [t.to(d) for t, d in zip(finals, dtypes, strict=True)]
        return unflatten(results, call.state_spec)
    outputs, spec = lowered(call, widen(finals), raw)
    results = [t.to(leaf.dtype) for t, leaf in zip(outputs, call.traced.outputs, strict=True)]
    return unflatten(owned(results, [*call.leaves, *(call.init or ())]), spec)


def last_inputs(call: ScanCall) -> list[torch.Tensor]:
    """The inputs at the last step of every sequence (its first position if reverse)."""
    leaves, where = widen(call.leaves), (call.axis, call.reverse, call.offsets)
    return [at_last_steps(t, *where) for t in leaves]


def require_last_inputs(call: ScanCall) -> None:
    """Raise ScanValueError where `lower` reads the last inputs of an empty sequence."""
    if call.operator.lower_takes_inputs and has_known_empty_sequence(call):
        raise ScanValueError(
            f"lower of {call.operator.name!r} takes the inputs at the last step, and an empty "
            "sequence has none"
        )
