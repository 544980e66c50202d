"""A `ScanProblem` run by torch operations, one per instruction of its programs.

The last resort of `auto`: backward scans and operations of compiled graphs have no function of the
user's to run in place of a kernel that cannot be compiled or run. Differentiable by autograd.
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch

from ...autodiff.evaluate import EXACT_DTYPES, evaluate
from ...errors import BackendError
from ...program.components import component_views, from_components
from ...program.ir import decode
from ...program.matrices import MatrixOperator
from ...program.operator import Leaf, spans
from ..base.fallback import warn_once
from ..base.problem import ScanProblem
from ..base.steps import explicit
from . import scan as eager

Tensors = list[torch.Tensor]


def scan_instead(problem: ScanProblem, reason: str) -> tuple[Tensors, Tensors]:
    """As `scan`, with one warning of the reason. Raises BackendError for what is no program."""
    name, operator = problem.operator.name, cast(object, problem.operator)
    if isinstance(operator, MatrixOperator):
        raise BackendError(f"no engine can run {name!r}: {reason}")
    warn_once(operator, f"{reason}; it is run by torch operations, which is slower")
    return scan(problem)


def scan(problem: ScanProblem) -> tuple[Tensors, Tensors]:
    """Outputs and finals."""
    problem = explicit(problem)
    op, axis = problem.operator, problem.axis
    raw = [part for k, leaf in enumerate(op.inputs) for part in parts_of(problem, k, leaf)]
    filled = [t.expand(problem.batch) for t in evaluated(problem, "lift", raw)]
    carries = entering(problem)
    if problem.offsets is None:
        states, last = one_sequence(problem, filled, carries)
    else:
        bounds = problem.offsets.cpu().clamp(0, problem.length).tolist()
        ends = [(begin, max(begin, end)) for begin, end in pairwise(bounds)]
        found = [
            one_sequence(
                problem, [t.narrow(axis, begin, end - begin) for t in filled],
                [c[k] for c in carries],
            )
            for k, (begin, end) in enumerate(ends)
        ]  # fmt: skip
        states = [torch.cat(p, axis) for p in zip(*(s for s, _ in found), strict=True)] or filled
        last = [torch.stack(p) for p in zip(*(f for _, f in found), strict=True)] or [
            t.new_empty(problem.carry_batch) for t in filled
        ]
    edge = torch.zeros((), dtype=torch.bool, device=problem.device)
    lowered = evaluated(problem, "lower", [*states, *raw, edge])
    finals = [joined(last, op.state, k, problem.carry_batch, True) for k in problem.final]
    outputs = [joined(lowered, op.outputs, k, problem.batch) for k in range(len(op.outputs))]
    return outputs, finals


def evaluated(problem: ScanProblem, name: str, values: Tensors) -> Tensors:
    """The outputs of lift, combine or lower."""
    return evaluate(getattr(problem.operator, name), values, EXACT_DTYPES)


def parts_of(problem: ScanProblem, number: int, leaf: Leaf) -> Tensors:
    """The components of an input, which broadcast to the batch; zeros of one that is not read."""
    t = problem.inputs[number]
    if t is not None:
        return component_views(t, leaf)
    return [torch.zeros((), device=problem.device)] * leaf.components


def entering(problem: ScanProblem) -> Tensors:
    """The components of the carry that enters: of init, elsewhere of the identity; zeros, which
    nothing reads, where there is neither."""
    op, shape, init = problem.operator, problem.carry_batch, problem.init
    constants = op.identity or tuple(0 for _ in range(op.width))
    found = []
    for k, (leaf, span) in enumerate(zip(op.state, spans(op.state), strict=True)):
        given = None if init is None else init[k]
        views = [None] * leaf.components if given is None else component_views(given, leaf)
        for component, view in zip(span, views, strict=True):
            kind = EXACT_DTYPES[op.combine.output_dtypes[component]]
            value = decode(constants[component])
            part = torch.tensor(value, dtype=kind, device=problem.device) if view is None else view
            found.append(part.to(kind).expand(shape))
    return found


def one_sequence(problem: ScanProblem, states: Tensors, carry: Tensors) -> tuple[Tensors, Tensors]:
    """The carries that `lower` is given, and the last one."""

    def combine(left: Tensors, right: Tensors) -> Tensors:
        shape = torch.broadcast_shapes(left[0].shape, right[0].shape)
        return [t.expand(shape) for t in evaluated(problem, "combine", [*left, *right])]

    axis = problem.axis
    if states[0].shape[axis] == 0:
        return states, carry
    lead = [c.unsqueeze(axis) for c in carry]
    init = None if problem.init is None else lead
    first = lead if problem.exclusive else None
    return eager.scan(combine, states, axis, problem.reverse, init, first)


def joined(
    parts: Tensors, leaves: tuple[Leaf, ...], number: int, batch: tuple[int, ...],
    is_carry: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A leaf from its components; carries of 16-bit floats are float32."""
    leaf = leaves[number]
    dtype = leaf.accumulator if is_carry else leaf.dtype
    mine: list[torch.Tensor | None] = [parts[c].expand(batch) for c in spans(leaves)[number]]
    return from_components(mine, Leaf(dtype, leaf.shape), batch, parts[0])
