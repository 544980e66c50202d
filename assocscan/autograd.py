"""Differentiable scans on generated engines.

`Scan` is one autograd function for forward scans, backward scans and the backward scans of those:
its backward derives the adjoint operator (`adjoint`) and runs it by the same engine. The state that
the adjoint reads is saved as further outputs of the forward kernel, only where no output already is
that state, and only when a gradient will be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .adjoint import Adjoint, Request, derive
from .operator import Operator, spans
from .packing import (
    component_views,
    edge_mask,
    from_components,
    previous_state,
    state_outputs,
    with_edge_input,
    with_outputs,
)
from .problem import ScanProblem

Engine = Callable[[ScanProblem], tuple[list[torch.Tensor], list[torch.Tensor]]]
Tensors = list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Job:
    """A scan without its tensors. `given` are the state leaves that init has tensors for."""

    operator: Operator
    engine: Engine
    batch: tuple[int, ...]
    axis: int
    reverse: bool
    exclusive: bool
    given: tuple[int, ...] | None
    from_identity: bool
    final: tuple[int, ...]
    offsets: torch.Tensor | None

    @property
    def starts_from_carry(self) -> bool:
        return self.given is not None or self.from_identity

    def problem(self, tensors: Sequence[torch.Tensor]) -> ScanProblem:
        """With its tensors: the inputs, then the given leaves of init."""
        n = len(self.operator.inputs)
        init: list[torch.Tensor | None] | None = None
        if self.given is not None:
            init = [None] * len(self.operator.state)
            for k, t in zip(self.given, tensors[n:], strict=True):
                init[k] = t
        return ScanProblem(
            self.operator, list(tensors[:n]), self.batch, self.axis, self.reverse, self.exclusive,
            init, self.from_identity, self.final, offsets=self.offsets,
        )  # fmt: skip


def is_differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def run(job: Job, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Outputs and finals, differentiable where an input requires a gradient.

    Raises UnsupportedOperation where the operator's adjoint cannot be generated.
    """
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not needs:
        return job.engine(job.problem(tensors))
    count = len(job.operator.outputs)
    saving = replace(job, operator=with_outputs(job.operator, states_to_save(job, tensors)))
    results = list(Scan.apply(saving, *tensors))
    finals = len(job.final)
    return results[:count], results[len(results) - finals :] if finals else []


def states_to_save(job: Job, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The state leaves that the backward scan reads and no output already is."""
    op = job.operator
    wanted = tuple(k for k, t in enumerate(tensors[: len(op.inputs)]) if t.requires_grad)
    adjoint = derive(op, request(job, wanted, range(len(op.outputs)), job.final))
    return tuple(sorted(adjoint.saved_state(op) - state_outputs(op).keys()))


def request(
    job: Job, wanted: tuple[int, ...], outputs: Sequence[int], finals: Sequence[int]
) -> Request:
    parts = spans(job.operator.state)
    return Request(
        job.exclusive,
        job.starts_from_carry,
        wanted,
        frozenset(c for k in finals for c in parts[k]),
        frozenset(outputs),
    )


class Scan(torch.autograd.Function):
    """forward: (job, *inputs, *init) → (*outputs, *finals)."""

    @staticmethod
    def forward(job: Job, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, finals = job.engine(job.problem(tensors))
        return (*outputs, *finals)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        job, *tensors = inputs
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output if not is_differentiable(t)))
        source = state_outputs(job.operator)
        ctx.saved_states = tuple(source)
        ctx.input_count = len(tensors)
        ctx.save_for_backward(*tensors, *(output[k] for k in source.values()))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors = list(saved[: ctx.input_count])
        states = dict(zip(ctx.saved_states, saved[ctx.input_count :], strict=True))
        needed = [bool(n) for n in ctx.needs_input_grad[1:]]
        return (None, *Backward(ctx.job, tensors, states, needed, cotangents).gradients())


class Backward:
    """One backward pass: its operator, its inputs, and its results put back in their places."""

    def __init__(
        self,
        job: Job,
        tensors: Tensors,
        states: dict[int, torch.Tensor],
        needed: list[bool],
        cotangents: Sequence[torch.Tensor | None],
    ) -> None:
        op = job.operator
        self.job, self.tensors, self.states, self.needed = job, tensors, states, needed
        self.outputs = list(cotangents[: len(op.outputs)])
        self.finals = dict(zip(job.final, cotangents[len(op.outputs) :], strict=True))
        wanted = tuple(k for k in range(len(op.inputs)) if needed[k])
        seeds = [k for k, t in self.finals.items() if t is not None]
        given = [k for k, t in enumerate(self.outputs) if t is not None]
        self.adjoint: Adjoint = derive(op, request(job, wanted, given, seeds))
        self.wants_init = any(needed[len(op.inputs) :])

    def gradients(self) -> list[torch.Tensor | None]:
        """One entry per tensor of the forward call."""
        scan = self.differentiable if torch.is_grad_enabled() else self.direct
        outputs, finals = scan()
        op = self.job.operator
        result: list[torch.Tensor | None] = [None] * len(self.tensors)
        for k, g in zip(self.adjoint.wanted, outputs, strict=True):
            result[k] = g.sum_to_size(self.tensors[k].shape)
        carried = dict(zip(self.adjoint.carried, finals, strict=self.wants_init))
        parts = spans(op.state)
        for k, leaf in enumerate(self.job.given or (), len(op.inputs)):
            if self.needed[k]:
                init = self.tensors[k]
                batch = tuple(init.shape[: init.dim() - len(op.state[leaf].shape)])
                components = [carried.get(c) for c in parts[leaf]]
                g = from_components(components, op.state[leaf], batch, init)
                result[k] = g.to(init.dtype)
        return result

    def incoming(self) -> list[torch.Tensor | None]:
        """μ at the end of the axis, per state leaf of the adjoint: the finals' cotangents."""
        op = self.job.operator
        parts: dict[int, torch.Tensor] = {}
        for k, g in self.finals.items():
            if g is not None:
                views = component_views(g, op.state[k])
                parts.update(zip(spans(op.state)[k], views, strict=True))
        head: list[torch.Tensor | None] = [None] * self.adjoint.matrix_size
        return head + [parts.get(c) for c in self.adjoint.carried]

    def wanted_finals(self) -> tuple[int, ...]:
        if not self.wants_init:
            return ()
        first = self.adjoint.matrix_size
        return tuple(range(first, first + len(self.adjoint.carried)))

    def init_of(self, leaf: int) -> torch.Tensor | None:
        """The forward scan's init, which stands before the first state."""
        given = self.job.given or ()
        if leaf not in given:
            return None
        return self.tensors[len(self.job.operator.inputs) + given.index(leaf)]

    def inputs(self, previous: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """x[t], y[t−1], o̅[t] for those that the adjoint reads."""
        op, used = self.adjoint.operator, self.adjoint.operator.used_inputs
        states = [previous.get(k) for k in range(len(self.job.operator.state))]
        everything = [*self.tensors[: len(self.job.operator.inputs)], *states, *self.outputs]
        return [
            t if any(c in used for c in span) else None
            for t, span in zip(everything, spans(op.inputs), strict=True)
        ]

    def direct(self) -> tuple[Tensors, Tensors]:
        """By the engine, with the state read one step ahead in place."""
        job, n = self.job, len(self.job.operator.inputs)
        inputs = self.inputs(self.states)
        ahead: dict[int, torch.Tensor | None] = {}
        if not job.exclusive:
            ahead = {n + k: self.init_of(k) for k in self.states if inputs[n + k] is not None}
        return job.engine(
            ScanProblem(
                self.adjoint.operator, inputs, job.batch, job.axis, not job.reverse, True,
                self.incoming(), True, self.wanted_finals(), ahead, job.offsets,
            )
        )  # fmt: skip

    def differentiable(self) -> tuple[Tensors, Tensors]:
        """By `run`, on tensors that are in the graph: for second derivatives."""
        job = self.job
        states = self.states
        if not job.exclusive:
            states = {
                k: previous_state(y, self.init_of(k), job.axis, job.reverse, job.offsets)
                for k, y in states.items()
            }
        edge = edge_mask(job.batch, job.axis, job.reverse, job.offsets, self.tensors[0].device)
        op = with_edge_input(self.adjoint.operator)
        incoming = self.incoming()
        inputs = [*self.inputs(states), edge]
        absent = edge.new_zeros(()).expand([1] * len(job.batch))
        present = [
            absent.to(leaf.dtype).reshape([1] * len(job.batch) + [1] * len(leaf.shape)).expand(
                *absent.shape, *leaf.shape
            ) if t is None else t
            for t, leaf in zip(inputs, op.inputs, strict=True)
        ]  # fmt: skip
        given = tuple(k for k, t in enumerate(incoming) if t is not None)
        backward = Job(
            op, job.engine, job.batch, job.axis, not job.reverse, True, given, True,
            self.wanted_finals(), job.offsets,
        )  # fmt: skip
        return run(backward, [*present, *(t for t in incoming if t is not None)])
