"""The scan as one operation of torch: `torch.ops.assocscan.scan`.

Compilers, tracers, transforms and dispatch modes see this operation; plain calls go to the engines
directly. It stands for a whole `ScanProblem`: the operator by its key (`keys`), its tensors in
three lists (inputs, init and edges; `read`, `given` and `edged` say which leaves they are), and the
flags. A backward scan is this operation too, with the adjoint's key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..engines.base.job import Job, refuse_matrices
from ..engines.base.layout import gather_tensors, result_layout
from ..engines.base.offsets import checked_values
from ..engines.base.problem import ScanProblem, plain
from ..engines.base.steps import explicit
from ..engines.eager import interpreted
from ..errors import BackendError, ScanValueError
from ..program import keys
from ..program.matrices import MatrixOperator
from ..program.operator import Operator
from ..torch_state import is_tracked
from . import backends as engines
from .autograd import run
from .operation_checks import (
    check_backend,
    check_memory_of,
    check_places,
    check_problem,
    why_not_engine,
)

Tensors = list[torch.Tensor]
Results = tuple[Tensors, Tensors]
Dim = int | None

OFFSETS = 5  # its place among the operation's arguments

_LIBRARY = torch.library.Library("assocscan", "DEF")
_LIBRARY.define(
    "scan(str key, str program, Tensor[] inputs, Tensor[] init, Tensor[] edges, Tensor? offsets, "
    "SymInt[] batch, int axis, bool reverse, bool exclusive, bool from_identity, int[] read, "
    "int[] given, int[] final, int[] ahead, int[] edged, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


@functools.cache
def engine(backend: str) -> Callable[[ScanProblem], Results]:
    """An engine that runs every problem as the operation, on this backend."""
    return functools.partial(call, backend)


def call(backend: str, problem: ScanProblem) -> Results:
    """The operation on a problem: outputs and finals."""
    key, program = keys.write(problem.operator)
    init, edges = problem.init or (), problem.ahead.items()
    results = torch.ops.assocscan.scan(
        key, program,
        [t for t in problem.inputs if t is not None],
        [t for t in init if t is not None],
        [t for _, t in edges if t is not None],
        problem.offsets, problem.batch, problem.axis, problem.reverse, problem.exclusive,
        problem.from_identity,
        [k for k, t in enumerate(problem.inputs) if t is not None],
        [k for k, t in enumerate(init) if t is not None],
        problem.final,
        [k for k, _ in edges],
        [k for k, t in edges if t is not None],
        backend,
    )  # fmt: skip
    count = len(problem.operator.outputs)
    return list(results[:count]), list(results[count:])


def problem_of(
    key: str,
    program: str,
    inputs: Sequence[torch.Tensor],
    init: Sequence[torch.Tensor],
    edges: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    batch: Sequence[int],
    axis: int,
    reverse: bool,
    exclusive: bool,
    from_identity: bool,
    read: Sequence[int],
    given: Sequence[int],
    final: Sequence[int],
    ahead: Sequence[int],
    edged: Sequence[int],
) -> ScanProblem:
    """The problem that the operation's arguments describe. Raises what `operation_checks` does."""
    op = cast(Operator, keys.read(key, program))
    places = [tuple(numbers) for numbers in (read, given, final, ahead, edged)]
    check_places(op, *places, (len(inputs), len(init), len(edges)))
    present = dict(zip(read, inputs, strict=True))
    starts = dict(zip(given, init, strict=True))
    beyond = dict(zip(edged, edges, strict=True))
    problem = ScanProblem(
        op, [present.get(k) for k in range(len(op.inputs))], tuple(batch), axis, reverse,
        exclusive, [starts.get(k) for k in range(len(op.state))] if given else None, from_identity,
        tuple(final), {k: beyond.get(k) for k in ahead}, offsets,
    )  # fmt: skip
    check_problem(problem)
    return problem


def with_lists(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Programs of AOTInductor pass None for an empty list. Only the offsets may be None."""
    return tuple([() if a is None and k != OFFSETS else a for k, a in enumerate(arguments)])


def compute(*arguments: Any) -> Tensors:
    """The kernel of every device: the engine that `backend` names."""
    arguments = with_lists(arguments)
    backend: str = arguments[-1]
    check_backend(backend)
    problem = problem_of(*arguments[:-1])
    check_memory_of(problem)
    device = problem.device
    reason = why_not_engine(problem, backend)
    name, falls_back = problem.operator.name, backend == "auto"
    if reason is not None and not falls_back:
        raise BackendError(f"the {backend} backend cannot run {name!r}: {reason}")
    problem.inputs = [None if t is None else plain(t) for t in problem.inputs]
    if problem.offsets is not None:
        problem.offsets = checked_values(problem.offsets, problem.length, device)
        check_finals(problem)
    try:
        if reason is not None:
            raise BackendError(reason)
        matrices = isinstance(problem.operator, MatrixOperator)
        outputs, finals = engines.function(backend, device, matrices)(problem)
    except BackendError as error:
        if not falls_back:
            raise
        outputs, finals = interpreted.scan_instead(problem, str(error))
    return [*outputs, *finals]


def check_finals(problem: ScanProblem) -> None:
    """The final of an empty sequence is init or the identity; looked at where nothing waits."""
    offsets = problem.offsets
    if not problem.final or problem.init is not None or problem.operator.identity is not None:
        return
    if offsets is not None and offsets.device.type == "cpu" and bool((offsets.diff() == 0).any()):
        raise ScanValueError(
            f"the final carry of an empty sequence is init or the identity, and "
            f"{problem.operator.name!r} declares no identity; pass init="
        )


def fake(*arguments: Any) -> Tensors:
    """Shapes, strides and dtypes of the results."""
    problem = problem_of(*arguments[:-1])
    outputs, finals = result_layout(problem, gather_tensors(problem))
    device = problem.device
    return [
        *(torch.empty_strided(n, s, dtype=d, device=device) for n, s, d in outputs),
        *(torch.empty(n, dtype=d, device=device) for n, d in finals),
    ]


def differentiable(keyset: Any, *arguments: Any) -> Tensors:
    """The Autograd key: another scan where a derivative is wanted (`autograd.Scan`)."""
    arguments = with_lists(arguments)
    inputs, init, edges = arguments[2:5]
    if not is_tracked([*inputs, *init, *edges]):
        with torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            results: Tensors = torch.ops.assocscan.scan.default.redispatch(below, *arguments)
        return results
    problem = problem_of(*arguments[:-1])
    refuse_matrices(problem.operator)
    problem = explicit(problem)
    operation = engine(arguments[-1])
    outputs, finals = run(*Job.of(problem, operation, operation))
    return [*outputs, *finals]


def batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensors, list[int]]:
    """torch.vmap: one more batch dimension, in front of the others; nothing is copied."""
    key, program, inputs, init, edges, offsets, batch, axis, *flags = arguments
    if in_dims[OFFSETS] is not None:
        raise NotImplementedError(
            "torch.vmap over offsets: sequences are packed along the axis, so pack the offsets of "
            "the batch into one list of offsets"
        )
    place = 0 if offsets is None else 1  # of a carry: the sequences come first
    results = torch.ops.assocscan.scan(
        key, program, in_front(inputs, in_dims[2], 0), in_front(init, in_dims[3], place),
        in_front(edges, in_dims[4], place), offsets, [info.batch_size, *batch], axis + 1, *flags,
    )  # fmt: skip
    finals = len(flags[5])
    return list(results), [0] * (len(results) - finals) + [place] * finals


def in_front(tensors: Tensors, dims: Sequence[Dim] | None, place: int) -> Tensors:
    """The mapped dimension at `place`; of size 1 in tensors that have none."""
    return [
        t.unsqueeze(place) if d is None else t.movedim(d, place)
        for t, d in zip(tensors, dims or [None] * len(tensors), strict=True)
    ]


_LIBRARY.impl("scan", compute, "CompositeExplicitAutograd")
_LIBRARY.impl("scan", differentiable, "Autograd", with_keyset=True)
# 16-bit inputs stay 16-bit, float32 inputs stay float32: states are combined in float32 anyway.
for _key in ("AutocastCPU", "AutocastCUDA"):
    _LIBRARY.impl("scan", torch.library.fallthrough_kernel, _key)
torch.library.register_fake("assocscan::scan", fake, lib=_LIBRARY)
torch.library.register_vmap("assocscan::scan", batched, lib=_LIBRARY)
