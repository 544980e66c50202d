"""One backward pass: the problem that the adjoint poses, and its results put in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..autodiff.adjoint import Adjoint
from ..engines.base.job import Job, Tensors, adjoint_of
from ..engines.base.problem import ScanProblem
from ..program.components import component_views, from_components
from ..program.operator import spans

Like = tuple[torch.Size, torch.dtype] | None


class Backward:
    """`like` are shape and dtype of the forward call's tensors; `tensors` those that were saved."""

    def __init__(
        self,
        job: Job,
        tensors: Sequence[torch.Tensor | None],
        states: dict[int, torch.Tensor],
        like: Sequence[Like],
        needed: Sequence[bool],
        cotangents: Sequence[torch.Tensor | None],
    ) -> None:
        op = job.operator
        n, count = len(op.inputs), len(op.outputs)
        self.job, self.tensors, self.states, self.needed = job, tensors, states, needed
        self.like = like
        self.outputs = list(cotangents[:count])
        self.finals = dict(zip(job.final, cotangents[count:], strict=True))
        wanted = tuple([k for k in range(n) if needed[k]])
        given = tuple([k for k, t in enumerate(self.outputs) if t is not None])
        seeds = tuple([k for k, t in self.finals.items() if t is not None])
        self.adjoint: Adjoint = adjoint_of(op, job.exclusive, job.has_init, wanted, given, seeds)
        self.wants_init = True in needed[n:]

    def problem(self) -> ScanProblem:
        """The adjoint's scan, with the state read one step ahead in place."""
        job, n = self.job, len(self.job.operator.inputs)
        inputs = self.inputs()
        ahead: dict[int, torch.Tensor | None] = {}
        if not job.exclusive:
            ahead = {n + k: self.init_of(k) for k in self.states if inputs[n + k] is not None}
        return ScanProblem(
            self.adjoint.operator, inputs, job.batch, job.axis, not job.reverse, True,
            self.incoming(), True, self.wanted_finals(), ahead, job.offsets,
        )  # fmt: skip

    def inputs(self) -> list[torch.Tensor | None]:
        """x[t], y[t−1], o̅[t] for those that the adjoint reads."""
        op = self.job.operator
        states = [self.states.get(k) for k in range(len(op.state))]
        everything = [*self.tensors[: len(op.inputs)], *states, *self.outputs]
        return [t if read else None for t, read in zip(everything, self.adjoint.reads, strict=True)]

    def init_of(self, leaf: int) -> torch.Tensor | None:
        """The forward scan's init, which stands before the first state."""
        given = self.job.given or ()
        if leaf not in given:
            return None
        return self.tensors[len(self.job.operator.inputs) + given.index(leaf)]

    def incoming(self) -> list[torch.Tensor | None]:
        """μ at the end of the axis, per state leaf of the adjoint: the finals' cotangents."""
        op = self.job.operator
        parts: dict[int, torch.Tensor] = {}
        for k, g in self.finals.items():
            if g is not None:
                views = component_views(g, op.state[k])
                parts.update(zip(spans(op.state)[k], views, strict=True))
        head: list[torch.Tensor | None] = [None] * self.adjoint.matrix_size
        if not parts:
            return head + [None] * len(self.adjoint.carried)
        return head + [parts.get(c) for c in self.adjoint.carried]

    def wanted_finals(self) -> tuple[int, ...]:
        if not self.wants_init:
            return ()
        first = self.adjoint.matrix_size
        return tuple(range(first, first + len(self.adjoint.carried)))

    def gradients(self, outputs: Tensors, finals: Tensors) -> list[torch.Tensor | None]:
        """One entry per tensor of the forward call, from the adjoint's results."""
        op = self.job.operator
        result: list[torch.Tensor | None] = [None] * len(self.like)
        for k, g in zip(self.adjoint.wanted, outputs, strict=True):
            described = self.like[k]
            assert described is not None
            result[k] = g if g.shape == described[0] else g.sum_to_size(described[0])
        if not self.wants_init:
            return result
        carried = dict(zip(self.adjoint.carried, finals, strict=True))
        parts = spans(op.state)
        for k, leaf in enumerate(self.job.given or (), len(op.inputs)):
            described = self.like[k]
            if self.needed[k] and described is not None:
                shape, dtype = described
                batch = tuple(shape[: len(shape) - len(op.state[leaf].shape)])
                components = [carried.get(c) for c in parts[leaf]]
                some = next(t for t in (*self.outputs, *self.finals.values()) if t is not None)
                result[k] = from_components(components, op.state[leaf], batch, some).to(dtype)
        return result
