"""The arguments of `nonlinear_recurrence`, checked and bound to the scan that runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...api.bind_arguments import batch_shape, bind_carry, check_lengths, monoid_axis
from ...caching.bounded import BoundedCache
from ...engines.base.packed_offsets import check_offsets
from ...engines.base.persistent_tensors import make_lasting
from ...engines.base.scan_spec import plain
from ...errors import AxisError, ScanTypeError, ScanValueError
from ...monoids.leaf_checks import NUMBERS, check_leaves, check_tensor
from ...monoids.leaf_names import LeafNames
from ...program.operator import Leaf
from ...pytrees import TreeSpec, flatten, leaf_paths
from ...runtime.scan_call import ScanCall
from ...torch_state import needs_dispatcher, same_shape
from ...wording import kind_of
from ..packing.resets import aligned_reset, refuse_offsets
from .step_operator import StepOperator, StepSpec, dtype_of_kind, known_operator, step_operator

EMPTY = flatten(())[1]
_NUMBERS: BoundedCache[Any, Tensor] = BoundedCache(1024)  # each holds one number
Function = Callable[..., Any]


@dataclass
class Arguments:
    """The arguments of one call, flattened.

    x, h, p: the leaves of xs, init and params; numbers of the last two are tensors.
    reset: the mask, a view that broadcasts as the leaves of xs do.
    """

    operator: StepOperator
    x: list[Tensor]
    h: list[Tensor]
    p: list[Tensor]
    reset: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What is scanned."""
        return (*self.x, *(() if self.reset is None else (self.reset,)))

    @property
    def carried(self) -> tuple[Tensor, ...]:
        """What enters with the initial carry: h, the parameters, and what a reset sets h to."""
        return (*self.h, *self.p, *(() if self.reset is None else self.h))


def gather(
    step: Function,
    xs: Any,
    init: Any,
    params: Any,
    lower: Function | None,
    reset: Tensor | None,
    axis: int,
    offsets: Tensor | None,
) -> Arguments:
    """Flatten the arguments and find the operator of the step. Raises where a leaf is no tensor, or
    the mask does not fit."""
    x, xs_spec = flatten(xs)
    h, init_spec = flatten(init)
    p, params_spec = ([], EMPTY) if isinstance(params, tuple) and not params else flatten(params)
    if not are_plain(step, lower, x, h, p):
        check_arguments(step, lower, (x, xs_spec), (h, init_spec), (p, params_spec))
    started = tuple([t.dtype if isinstance(t, Tensor) else kind_of_number(t) for t in h])
    inputs = tuple([t.dtype for t in x])
    weights = tuple(
        [t.dtype if isinstance(t, Tensor) else dtype_of_kind(kind_of_number(t), inputs) for t in p]
    )
    found = StepSpec(xs_spec, init_spec, params_spec, inputs, started, weights, reset is not None)
    operator, device = known_operator(step, lower, found), x[0].device
    if operator is None:
        check_arguments(step, lower, (x, xs_spec), (h, init_spec), (p, params_spec))
        check_order(x, h)
        operator = step_operator(step, lower, found)
    if reset is not None:
        reset = bound_reset(reset, x, xs_spec, axis, offsets, operator.name)
    return Arguments(
        operator,
        x,
        [as_carry(t, d, device) for t, d in zip(h, operator.dtypes, strict=True)],
        [as_carry(t, d, device) for t, d in zip(p, operator.parameters, strict=False)],
        reset,
    )


def check_order(x: Sequence[Tensor], h: Sequence[Any]) -> None:
    """Raise ScanValueError where init has the axis and xs has not: they were passed in the place of
    each other."""
    shapes = [list(t.shape) for t in h if isinstance(t, Tensor)]
    if shapes and len(min(shapes, key=len)) > max(t.dim() for t in x):
        raise ScanValueError(
            f"init has shape {shapes[0]} and xs {list(x[0].shape)}, but init has no axis of steps; "
            "the order of arguments is step, xs, init"
        )


def bound_reset(
    reset: Tensor, x: list[Tensor], spec: TreeSpec, axis: int, offsets: Any, name: str
) -> Tensor:
    """The mask in the shape of the batch. A gradient reads the tensor that a repeated call gets, so
    that is the view, not the mask that was passed."""
    refuse_offsets(offsets)
    names, ndims = LeafNames(), [0] * len(x)
    check_leaves(x, spec, names)
    axis = checked_axis(axis, x, spec, name, names)
    check_lengths(x, axis, spec, names)
    batch = batch_shape(x, ndims, spec, names)
    return aligned_reset(reset, plain(x[0]).expand(batch), axis, "xs")


def checked_axis(axis: int, x: list[Tensor], spec: TreeSpec, name: str, names: LeafNames) -> int:
    """The axis, not negative. Raises where the leaves do not line up, or have no such axis."""
    try:
        return monoid_axis(axis, x, [0] * len(x), spec, name, names)
    except ScanValueError as error:
        if isinstance(error, AxisError):
            raise
        text = str(error).partition(", or declare")[0]  # an element here has no dimensions
        raise ScanValueError(text) from None


PLAIN = (Tensor, torch.nn.Parameter)
PLAIN_OR_NUMBERS = (*PLAIN, int, float)


def are_plain(step: Any, lower: Any, x: list[Any], h: list[Any], p: list[Any]) -> bool:
    """Whether the arguments need no further check before a call like theirs is looked for. (Their
    layouts are looked at where none is found.)"""
    if not callable(step) or not (lower is None or callable(lower)) or not x or not h:
        return False
    return not (
        {type(t) for t in x}.difference(PLAIN)
        or {type(t) for t in (*h, *p)}.difference(PLAIN_OR_NUMBERS)
    )


def check_arguments(step: Any, lower: Any, *trees: tuple[list[Any], TreeSpec]) -> None:
    """Raise where an argument is no function, no tensor, or no number."""
    for name, fn in (("step", step), ("lower", lower)):
        if not callable(fn) and (fn is not None or name == "step"):
            raise ScanTypeError(f"{name} must be a function of one element, got {kind_of(fn)}")
    (x, xs_spec), *others = trees
    check_leaves(x, xs_spec)
    if not others[0][0]:
        raise ScanValueError("init is an empty pytree; give at least one tensor or number")
    for root, (leaves, spec) in zip(("init", "params"), others, strict=True):
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, NUMBERS):
                check_tensor(leaf_paths(spec, root)[k], leaf, " or a number")


def kind_of_number(value: Any) -> type:
    if isinstance(value, (bool, int, float, complex)):
        return type(value) if type(value) in (bool, int, float, complex) else float
    return int if isinstance(value, torch.SymInt) else float


def as_carry(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A leaf of init or params as a tensor; those of plain numbers are kept."""
    if isinstance(value, Tensor):
        return value
    dtype = Leaf(dtype).accumulator
    try:
        if not fits_exactly(value, dtype):
            raise TypeError
        if needs_dispatcher() or isinstance(value, (torch.SymInt, torch.SymFloat)):
            return torch.full((), value, dtype=dtype, device=device)
        key = type(value), str(value), dtype, device
        known = _NUMBERS.get(key)
        if known is None:
            with torch.inference_mode(False):
                known = _NUMBERS.insert(key, make_lasting(
                    lambda: torch.full((), value, dtype=dtype, device=device), device
                ))  # fmt: skip
        return known
    except (RuntimeError, TypeError, OverflowError):
        raise ScanTypeError(f"a number of init or params is {value!r}, which {dtype} cannot hold"
                            ) from None  # fmt: skip


def fits_exactly(value: Any, dtype: torch.dtype) -> bool:
    """Whether a number is one of a dtype of whole numbers, or the dtype is another one."""
    if dtype.is_floating_point or dtype.is_complex or isinstance(value, (bool, torch.SymInt)):
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def bind_step(
    given: Arguments, axis: int, reverse: bool, return_final: bool, offsets: Tensor | None
) -> ScanCall:
    """The call that runs the recurrence. Raises where shapes, devices or offsets do not fit."""
    op, names = given.operator, LeafNames()
    spec = op.spec
    check_leaves(given.x, spec.xs, names)
    for path, t in zip(names_of_carries(spec), (*given.h, *given.p), strict=True):
        check_tensor(path, t)
    ndims = [0] * len(given.x)
    axis = checked_axis(axis, given.x, spec.xs, op.name, names)
    check_lengths(given.x, axis, spec.xs, names)
    batch = batch_shape(given.x, ndims, spec.xs, names)
    leaves = [plain(t) for t in given.x]
    if given.reset is not None:
        leaves.append(given.reset)
    checked = check_offsets(offsets, leaves[0].shape[axis], leaves[0].device)
    input_spec = flatten(tuple(leaves))[1]
    kinds = tuple([Leaf(t.dtype) for t in leaves])
    traced = op.trace_for(input_spec, kinds)
    call = ScanCall(
        op, traced, input_spec, leaves, [0] * len(leaves), batch, axis, reverse, True, None,
        return_final, checked, leaving=tuple(range(len(given.h))), leaving_spec=spec.init,
    )  # fmt: skip
    call.init = bound_carries(call, given)
    return call


def bound_carries(call: ScanCall, given: Arguments) -> list[Tensor]:
    """The leaves of init and params, expanded to the shape of a carry, in its dtypes."""
    spec = given.operator.spec
    whole = call.carry_batch(0)
    paths = names_of_carries(spec)
    places = [*range(len(given.h) + len(given.p)), *range(len(given.h))][: len(given.carried)]
    bound = []
    for path, t, leaf in zip(
        [paths[k] for k in places], given.carried, call.traced.state, strict=False
    ):
        check_carry(call, path, t, whole)
        bound.append(bind_carry(path, t, leaf, whole, call, "xs"))
    if call.offsets is not None:
        for k, t in enumerate(given.p, len(given.h)):
            refuse_sequences(paths[k], t, whole[1:])
    return bound


def check_carry(call: ScanCall, path: str, t: Tensor, whole: tuple[int, ...]) -> None:
    """Raise ScanValueError where a leaf of init or params does not have the shape of a carry."""
    if expands(t, whole):
        return
    hint = ""
    if path.startswith("params") and expands(t, call.batch):
        hint = "; what differs from step to step is passed in xs"
    elif path.startswith("init") and expands(
        call.leaves[0], t.shape[: call.axis] + t.shape[call.axis + 1 :]
    ):
        hint = "; the order of arguments is step, xs, init"
    elif call.offsets is not None and path.startswith("init"):
        hint = (
            f", which is that of each of the {whole[0]} sequences; a leading {whole[0]} is optional"
        )
    raise ScanValueError(
        f"{path} has shape {list(t.shape)}, which does not broadcast to {list(whole)}, the batch "
        f"shape of xs without the axis{hint}"
    )


def expands(t: Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if same_shape(t.shape, shape):
        return True
    try:
        t.expand(shape)
    except RuntimeError:
        return False
    return True


def refuse_sequences(path: str, t: Tensor, rest: tuple[int, ...]) -> None:
    """Raise ScanValueError for parameters of their own for each packed sequence."""
    if not expands(t, rest):
        raise ScanValueError(
            f"{path} has shape {list(t.shape)}, which does not broadcast to {list(rest)}, the "
            "batch shape of xs without the axis; all packed sequences have the same parameters"
        )


@functools.lru_cache(maxsize=256)
def names_of_carries(spec: StepSpec) -> list[str]:
    """The names of the leaves of init and of params."""
    return [*leaf_paths(spec.init, "init"), *leaf_paths(spec.params, "params")]
