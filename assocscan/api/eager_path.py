"""The eager path: scans that call the user's own functions on whole tensors.

No `Program` is needed, so any callable can be scanned. Functions of elements are mapped over the
batch (`monoids.batch_mapping`), 16-bit floats are combined in float32, and torch's autograd
differentiates the operations.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ..engines.base.executable import CommandList, Executable
from ..engines.base.packed_offsets import validated
from ..engines.base.scan_spec import MaybeTensor, TensorSpec
from ..engines.eager import products
from ..engines.eager import scan as eager
from ..engines.eager.owned_results import owned
from ..errors import ScanTypeError, ScanValueError
from ..monoids.batch_mapping import map_elements
from ..monoids.monoid import Monoid
from ..program.dtypes import STORAGE_ONLY
from ..program.operator import Leaf, closure, components, promoted
from ..program.transforms import is_product
from ..pytrees import TreeSpec, align, flatten, leaf_paths, template, unflatten
from ..runtime.scan_call import ScanCall
from ..runtime.torch_operation import checked_when_run
from ..torch_private import without_transforms
from ..torch_state import innermost, is_traced, needs_dispatcher, without_autocast
from ..trace.fx_trace import isolated
from ..trace.missing_dtypes import is_missing
from ..trace.traced_monoid import lift_arguments
from .eager_starts import connected, finite_starts, starts_matter
from .empty_sequences import no_final

Tensors = list[torch.Tensor]

_RECORDED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "_RECORDED", default=None
)


@contextlib.contextmanager
def eager_scans() -> Iterator[list[str]]:
    """Records the operators whose scans run eagerly inside the `with` block; yields their names."""
    names: list[str] = []
    token = _RECORDED.set(names)
    try:
        yield names
    finally:
        _RECORDED.reset(token)


def widen(tensors: Tensors) -> Tensors:
    """16-bit floats as float32."""
    return [t.float() if t.dtype in STORAGE_ONLY else t for t in tensors]


@dataclass(frozen=True)
class EagerOperator:
    """An operator without programs, for the `ScanSpec` of a scan by the user's functions."""

    name: str
    inputs: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    identity: None = None
    sequential: bool = False


def prepare_eager(call: ScanCall, reason: str) -> tuple[Executable, list[MaybeTensor]]:
    """An executable of one command, which runs the user's functions, and the tensors to run it on.

    reason: why no generated engine runs the call, for the plan.
    """
    traced = call.traced
    operator = EagerOperator(
        call.operator.name, traced.inputs, traced.state, () if call.final_only else traced.outputs
    )
    spec, tensors = call.scan(operator)
    output_count, n = len(operator.outputs), len(call.leaves)

    def run(*given: torch.Tensor) -> Tensors:
        same = replace(call, leaves=list(given[:n]))
        if call.init is not None:
            same.init = list(given[n : n + len(call.init)])
        outputs, finals = eager_scan(same)
        return [*outputs, *finals]

    commands = CommandList(spec, [TensorSpec.of(t) for t in tensors if t is not None])
    carries = [(*call.carry_batch(k), *operator.state[k].shape) for k in spec.final]
    results = [
        *(TensorSpec((*call.batch, *leaf.shape), (), leaf.dtype, spec.device)
          for leaf in operator.outputs),
        *(TensorSpec(shape, (), operator.state[k].accumulator, spec.device)
          for k, shape in zip(spec.final, carries, strict=True)),
    ]  # fmt: skip
    name = f"{call.operator.name!r} by torch operations"
    # A monoid sees its leaves broadcast to the batch, a plain function sees them as they are.
    is_plain = not isinstance(call.operator, Monoid)
    shapes = [tuple(t.shape) for t in call.leaves] if is_plain else []
    slots = commands.eager(name, run, range(len(tensors)), results)
    executable = commands.build(
        slots[:output_count],
        slots[output_count:],
        lambda: eager.eager_plan(spec, call.operator.name, reason, shapes),
    )
    return executable, tensors


def eager_scan(call: ScanCall) -> tuple[Tensors, Tensors]:
    """Outputs, and finals (empty unless asked for).

    The caller's autocast is off meanwhile: kernels do not follow it, and results must be the same.
    """
    device_type = call.leaves[0].device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        with without_autocast(device_type):
            return eager_scan(call)
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(call.operator.name)
    try:
        return scan_leaves(call)
    except Exception as error:
        if not is_missing(error):
            raise
        dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in call.leaves)
        floats = [t.dtype.itemsize for t in call.leaves if t.is_floating_point()]
        # torch computes with no 8-bit floats; wider ones lack what integers alone have, as xor.
        instead = "int64" if floats and min(floats) > 1 else "float32"
        remedy = f"convert them first, to {instead} for instance"
        if any(t.is_complex() for t in call.leaves):
            remedy = "complex numbers have no order, for instance: pass x.abs(), or x.real"
        raise ScanTypeError(
            f"torch has no operation that operator {call.operator.name!r} needs for leaves of "
            f"({dtypes}): {str(error).rstrip('.')}; {remedy}"
        ) from error


def scan_leaves(call: ScanCall) -> tuple[Tensors, Tensors]:
    """lift, scan and lower. For a reduction only lift and the final carry: `reduce` applies lower
    itself."""
    raw = widen(call.leaves)
    states = lifted(call, raw)
    results, finals = scan_sequences(call, states)
    if call.final_only:
        return [], owned(connected(call, finals), [*call.leaves, *(call.init or ())])
    finals = [finals[k] for k in call.final]
    outputs, _ = lowered(call, results, raw)
    dtypes = [leaf.dtype for leaf in call.traced.outputs]
    results = [t.to(d) for t, d in zip(outputs, dtypes, strict=True)] + finals
    results = owned(connected(call, results), [*call.leaves, *(call.init or ())])
    return results[: len(outputs)], results[len(outputs) :]


def separate(t: torch.Tensor) -> torch.Tensor:
    """`t` as a node of its own in the autograd graph.

    For a backward pass that calls `torch.autograd.grad` on saved tensors that are still attached to
    the graph. One saved tensor may be computed from another, or be the same tensor: its gradient
    would count twice. A saved result comes from the scan itself: differentiating through it would
    start this backward pass again.
    """
    return t.view_as(t)


def lifted(call: ScanCall, raw: Tensors) -> Tensors:
    """The lifted elements in the accumulator dtypes of the state, expanded to the full batch shape.
    Leaves of a raw callable are only cast and keep their shapes."""
    if call.is_raw:
        state = promoted(tuple(Leaf(t.dtype) for t in raw))
        return [t.to(leaf.dtype) for t, leaf in zip(raw, state, strict=True)]
    lift = call.operator.lift
    if lift is None:
        return [
            t.to(leaf.accumulator).expand((*call.batch, *leaf.shape))
            for t, leaf in zip(raw, call.traced.state, strict=True)
        ]
    arguments = lift_arguments(call.input_spec)
    results, spec = map_elements(lift, raw, call.element_ndims, arguments, call.traced.pointwise)
    ordered = align(template(call.traced.state_spec), unflatten(results, spec), "lift")
    dtypes = [leaf.accumulator for leaf in call.traced.state]
    return [t.to(d) for t, d in zip(ordered, dtypes, strict=True)]


def lowered(call: ScanCall, states: Tensors, raw: Tensors) -> tuple[Tensors, TreeSpec]:
    """The outputs at these states, and their structure."""
    lower = call.operator.lower
    if lower is None:
        return states, call.state_spec
    ndims = [len(leaf.shape) for leaf in call.traced.state]
    arguments, ranks = states, ndims
    spec = flatten((template(call.state_spec),))[1]
    if call.operator.lower_takes_inputs:
        arguments, ranks = [*states, *raw], [*ndims, *call.element_ndims]
        spec = flatten((template(call.state_spec), template(call.input_spec)))[1]
    results, result_spec = map_elements(lower, arguments, ranks, spec, call.traced.pointwise)
    ordered = align(template(call.traced.output_spec), unflatten(results, result_spec), "lower")
    return ordered, call.traced.output_spec


def combiner(call: ScanCall) -> Callable[[Tensors, Tensors], Tensors]:
    """`combine` as a function of two lists of leaves, which still have the scan axis."""
    spec = call.state_spec
    tree = template(spec)
    name = f"operator {call.operator.name!r}"
    if call.is_raw:

        def combine(left: Tensors, right: Tensors) -> Tensors:
            result = call.operator.combine(unflatten(left, spec), unflatten(right, spec))
            leaves = align(tree, result, f"the result of {name}")
            check_slices(leaves, right, spec, name)
            return leaves

        return combine
    ndims = [len(leaf.shape) for leaf in call.traced.state] * 2
    pair = flatten((tree, tree))[1]
    pointwise = call.traced.pointwise

    def mapped(left: Tensors, right: Tensors) -> Tensors:
        results, result_spec = map_elements(
            call.operator.combine, [*left, *right], ndims, pair, pointwise
        )
        leaves = align(tree, unflatten(results, result_spec), f"the result of {name}")
        return [t.to(r.dtype) for t, r in zip(leaves, right, strict=True)]

    return mapped


def check_slices(leaves: list[Any], like: Tensors, spec: TreeSpec, name: str) -> None:
    """A raw callable must return slices of the dtypes and shapes that it was given."""
    paths = leaf_paths(spec, "element")
    for path, result, given in zip(paths, leaves, like, strict=True):
        if not isinstance(result, torch.Tensor):
            raise ScanTypeError(f"{name} returns {type(result).__name__} for {path}, not a tensor")
        if result.dtype != given.dtype:
            raise ScanTypeError(
                f"{name} changes the dtype of {path} from {given.dtype} to {result.dtype}"
            )
        if result.shape != given.shape:
            raise ScanValueError(
                f"{name} changes the shape of {path} from {list(given.shape)} to "
                f"{list(result.shape)}"
            )


def carry_of(call: ScanCall, states: Tensors) -> Tensors | None:
    """The carry that enters, init or the identity, in the batch shape without the axis; None where
    there is neither."""
    if call.init is not None:
        rest = range(len(call.init), len(states))  # what a sequential operator does not carry
        zeros = [states[k].new_zeros(()).expand(call.carry_batch(0)) for k in rest]
        return [*call.init, *zeros]
    if call.traced.identity is None:
        return None
    identity = call.traced.identity
    # A fake-tensor mode or a tracer may refuse tensors made outside of it, such as the identity.
    # So the identity is made again from its numbers.
    if needs_dispatcher():
        with isolated():
            numbers = [v.tolist() for v in identity]
        identity = tuple(
            torch.tensor(n, dtype=t.dtype, device=t.device)
            for n, t in zip(numbers, states, strict=True)
        )
    return [
        identity_like(v, t).expand((*call.carry_batch(k), *v.shape))
        for k, (v, t) in enumerate(zip(identity, states, strict=True))
    ]


def identity_like(v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A leaf of the identity with the device and dtype of `t`. No memory of the host is copied
    where a GPU can fill the tensor by itself: a copy waits for the GPU, and CUDA graphs cannot
    capture it."""
    if v.device == t.device or v.is_meta or t.device.type != "cuda":
        return v.to(t.device, t.dtype)
    numbers = v.flatten().tolist()
    if len(set(numbers)) == 1:
        return torch.full(v.shape, numbers[0], dtype=t.dtype, device=t.device)
    if not torch.cuda.is_current_stream_capturing():
        return v.to(t.device, t.dtype)
    filled = [torch.full((), x, dtype=t.dtype, device=t.device) for x in numbers]
    return torch.stack(filled).view(v.shape)


def scan_sequences(call: ScanCall, states: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs before `lower` (none of a reduction), and finals. Each packed sequence is scanned
    separately; without offsets the whole axis is one sequence."""
    combine, axis = combiner(call), call.axis
    carry = carry_of(call, states)
    one = reduce_one if call.final_only else scan_one
    if call.offsets is None:
        return one(call, combine, states, carry)
    if is_traced():
        return scan_traced_sequences(call, combine, states, carry)
    outputs, finals = [], []
    for part, entering in split_sequences(call, states, carry):
        ys, last = one(call, combine, part, entering)
        outputs.append(ys)
        finals.append(last)
    if not outputs:
        return states, empty_finals(call, states)
    joined = [torch.cat(parts, axis) for parts in zip(*outputs, strict=True)]
    if not call.return_final:
        return joined, []
    return joined, [torch.stack(parts) for parts in zip(*finals, strict=True)]


def scan_traced_sequences(
    call: ScanCall, combine: eager.Combine, states: Tensors, carry: Tensors | None
) -> tuple[Tensors, Tensors]:
    """Outputs before `lower`, and finals, where offsets have no values yet. They are checked when
    the graph runs."""
    assert call.offsets is not None
    offsets = checked_when_run(call.offsets, call.length).to(states[0].device)
    if states[0].shape[call.axis] == 0:
        return states, empty_finals(call, states, offsets.shape[0] - 1) if carry is None else carry
    if multiplies(call):
        combine, states, carry = products.with_kinds(states, carry)
    elif call.init is None and starts_matter(call, states):
        op, length = call.traced.operator, states[0].shape[call.axis]
        assert op is not None
        read = closure(op.combine, op.lowered_state | components(op.state, call.final))
        heads, _ = eager.heads_of(offsets.clamp(0, length), length, call.reverse)
        states = finite_starts(call, states, read, heads)
    sequential = isinstance(call.operator, Monoid) and call.operator.sequential
    results = eager.scan_marked(
        combine, states, call.axis, call.reverse, offsets, carry, call.init is not None,
        not call.inclusive, sequential,
    )  # fmt: skip
    outputs, finals = (leaves[: len(call.traced.state)] for leaves in results)
    return outputs, finals if call.return_final else []


def split_sequences(
    call: ScanCall, states: Tensors, carry: Tensors | None
) -> Iterator[tuple[Tensors, Tensors | None]]:
    """The states of every packed sequence, and the carry that enters it."""
    assert call.offsets is not None
    with without_transforms():
        bounds = validated(innermost(call.offsets).cpu(), call.length).tolist()
    for k, (begin, end) in enumerate(pairwise(bounds)):
        part = [t.narrow(call.axis, begin, end - begin) for t in states]
        yield part, None if carry is None else [c[k] for c in carry]


def empty_finals(call: ScanCall, states: Tensors, sequences: int = 0) -> Tensors:
    """The finals for offsets [0], which hold no sequence: tensors with a leading size of 0. In a
    graph there may be empty sequences, whose finals are undefined: 0."""
    axis = call.axis
    return [t.new_zeros((sequences, *t.shape[:axis], *t.shape[axis + 1 :])) for t in states]


def final_of_empty(call: ScanCall, carry: Tensors | None) -> Tensors:
    """The final carry of an empty sequence: the carry that enters. Raises ScanValueError where it
    is wanted and there is none. `bind` checks this only where it can read the offsets (not on a GPU
    or under a tracer)."""
    if carry is None and call.return_final:
        raise no_final(call)
    return list(carry or ())


def multiplies(call: ScanCall) -> bool:
    """Whether products are kept in range as a loop keeps them (`engines.eager.products`). Not of a
    function with a derivative of its own, which has to be called."""
    op, verified = call.traced.operator, call.traced.verified
    return op is not None and is_product(op) and not any(verified)


def reduce_one(
    call: ScanCall, combine: eager.Combine, states: Tensors, carry: Tensors | None
) -> tuple[Tensors, Tensors]:
    """No outputs, and the final carry of one sequence: of an empty one, the carry that enters."""
    if states[0].shape[call.axis] == 0:
        return [], final_of_empty(call, carry)
    if multiplies(call):
        combine, states, carry = products.with_kinds(states, carry)
    elif starts_matter(call, states):
        return [], finals_apart(call, combine, states, carry)
    finals = eager.reduce(combine, states, call.axis, call.reverse, entering(call, carry))
    return [], finals[: len(call.traced.state)]


def entering(call: ScanCall, carry: Tensors | None) -> Tensors | None:
    """The carry that enters, if it is init, with an axis of size 1."""
    if call.init is None or carry is None:
        return None
    return [c.unsqueeze(call.axis) for c in carry]


def finals_apart(
    call: ScanCall, combine: eager.Combine, states: Tensors, carry: Tensors | None
) -> Tensors:
    """The final carry, each leaf by a reduction with the `finite_starts` of what it depends on.
    Leaves that depend on the same share one."""
    op, init = call.traced.operator, entering(call, carry)
    assert op is not None
    known: dict[frozenset[int], Tensors] = {}
    finals = []
    for k in range(len(states)):
        read = closure(op.combine, components(op.state, (k,)))
        if read not in known:
            finite = finite_starts(call, states, read)
            known[read] = eager.reduce(combine, finite, call.axis, call.reverse, init)
        finals.append(known[read][k])
    return finals


def scan_one(
    call: ScanCall, combine: eager.Combine, states: Tensors, carry: Tensors | None
) -> tuple[Tensors, Tensors]:
    """Outputs before `lower`, and the final carry, of one sequence.

    An inclusive scan without init starts from its first element and does not use the identity.
    """
    axis, given, apart = call.axis, states, False
    if states[0].shape[axis] == 0:
        return states, final_of_empty(call, carry)
    if multiplies(call):
        combine, states, carry = products.with_kinds(states, carry)
    elif starts_matter(call, states):
        op = call.traced.operator
        assert op is not None
        read = closure(op.combine, op.lowered_state)
        states = finite_starts(call, states, read)
        # Whether finals depend on more than outputs do.
        apart = not components(op.state, call.final) <= read
    first = None if call.inclusive or carry is None else [c.unsqueeze(axis) for c in carry]
    sequential = isinstance(call.operator, Monoid) and call.operator.sequential
    init = entering(call, carry)
    results = eager.scan(combine, states, axis, call.reverse, init, first, sequential)
    outputs, finals = (leaves[: len(call.traced.state)] for leaves in results)
    if apart:
        finals = finals_apart(call, combine, given, carry)
    return outputs, finals
