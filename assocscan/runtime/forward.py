"""One forward-mode pass: the problem that the tangents pose, and its results in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..autodiff.tangent import Tangent, TangentRequest, derive_tangent
from ..engines.base.job import Job, Tensors
from ..engines.base.problem import ScanProblem
from ..engines.base.steps import edge_mask, previous_state
from ..program.components import component_views, from_components
from ..program.operator import spans


def tangent_request(job: Job, moves: Sequence[bool]) -> TangentRequest:
    """What is asked for where these of the job's tensors have tangents."""
    n = len(job.operator.inputs)
    moving = tuple([k for k in range(n) if moves[k]])
    return TangentRequest(job.exclusive, job.has_init, moving, True in moves[n:], job.final)


class Forward:
    """`results` are the outputs and finals of the scan, `tangents` those of its tensors."""

    def __init__(
        self,
        job: Job,
        tensors: Sequence[torch.Tensor | None],
        states: dict[int, torch.Tensor],
        tangents: Sequence[torch.Tensor | None],
    ) -> None:
        self.job, self.tensors, self.states = job, tensors, states
        self.tangents = [None if t is None or t._is_zerotensor() else t for t in tangents]
        request = tangent_request(job, [t is not None for t in self.tangents])
        self.tangent: Tangent = derive_tangent(job.operator, request)

    def problem(self) -> ScanProblem:
        """The tangents' scan, from the tangent of init."""
        job, op, tangent = self.job, self.job.operator, self.tangent
        n, used = len(op.inputs), tangent.operator.used_inputs
        device = next(t.device for t in self.tensors if t is not None)
        first = edge_mask(job.batch, job.axis, job.reverse, job.offsets, device)
        states = [self.states.get(k) for k in range(len(op.state))]
        if not job.exclusive:
            states = [None if y is None else self.previous(k, y) for k, y in enumerate(states)]
        everything = [first, *self.tensors[:n], *states, *self.tangents[:n]]
        inputs = [
            None if used.isdisjoint(span) else t
            for t, span in zip(everything, spans(tangent.operator.inputs), strict=True)
        ]
        if all(t is None for t in inputs):  # something has to say which device this is
            inputs[0] = first
        head = tangent.matrix_size
        finals = tuple(range(head, head + len(tangent.carried))) if job.final else ()
        return ScanProblem(
            tangent.operator, inputs, job.batch, job.axis, job.reverse, True, self.incoming(),
            True, finals, {}, job.offsets,
        )  # fmt: skip

    def previous(self, leaf: int, y: torch.Tensor) -> torch.Tensor:
        """y[t−1], init standing before the first."""
        job, beyond = self.job, None
        if job.given is not None and leaf in job.given:
            beyond = self.tensors[len(job.operator.inputs) + job.given.index(leaf)]
        return previous_state(y, beyond, job.axis, job.reverse, job.offsets)

    def incoming(self) -> list[torch.Tensor | None]:
        """The tangent of init, per state leaf of the tangents' scan."""
        op = self.job.operator
        parts: dict[int, torch.Tensor] = {}
        for leaf, t in zip(self.job.given or (), self.tangents[len(op.inputs) :], strict=True):
            if t is not None:
                parts.update(zip(spans(op.state)[leaf], component_views(t, op.state[leaf]),
                                 strict=True))  # fmt: skip
        head: list[torch.Tensor | None] = [None] * self.tangent.matrix_size
        return head + [parts.get(c) for c in self.tangent.carried]

    def results(self, outputs: Tensors, finals: Tensors) -> list[torch.Tensor | None]:
        """One tangent per output and final; None for integers."""
        job, op = self.job, self.job.operator
        found: list[torch.Tensor | None] = [None] * len(op.outputs)
        for k, t in zip(self.tangent.outputs, outputs, strict=True):
            found[k] = t
        carried = dict(zip(self.tangent.carried, finals, strict=bool(job.final)))
        for leaf in job.final:
            described = op.state[leaf]
            if not (described.dtype.is_floating_point or described.dtype.is_complex):
                found.append(None)
                continue
            rest = job.batch[: job.axis] + job.batch[job.axis + 1 :]
            if job.offsets is not None:
                rest = (job.offsets.shape[0] - 1, *rest)
            some = next(t for t in self.tangents if t is not None)
            components = [carried.get(c) for c in spans(op.state)[leaf]]
            found.append(from_components(components, described, rest, some))
        return found
