"""`Job`: a scan without its tensors, and what its derivatives will read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...autodiff.adjoint import Adjoint, Request, derive
from ...errors import UnsupportedOperation
from ...program.matrices import MatrixOperator
from ...program.operator import Operator, spans
from ...torch_state import needs_dispatcher
from .problem import ScanProblem

Engine = Callable[[ScanProblem], tuple[list[torch.Tensor], list[torch.Tensor]]]
Tensors = list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Job:
    """A scan without its tensors. `given` are the state leaves that init has tensors for.

    `engine` runs it on memory; `operation` makes it visible to whoever looks (`library`).
    """

    operator: Operator
    engine: Engine
    operation: Engine
    batch: tuple[int, ...]
    axis: int
    reverse: bool
    exclusive: bool
    given: tuple[int, ...] | None
    from_identity: bool
    final: tuple[int, ...]
    offsets: torch.Tensor | None
    moves: bool = False  # some tensor carries a tangent
    falls_back: bool = False  # derivatives that no engine can run are run by torch operations

    @property
    def has_init(self) -> bool:
        return self.given is not None

    @staticmethod
    def of(
        problem: ScanProblem, engine: Engine, operation: Engine, falls_back: bool = False
    ) -> tuple[Job, list[torch.Tensor | None]]:
        """The job of a problem that reads nothing ahead, and its tensors."""
        assert not problem.ahead
        given = None
        init = problem.init
        if init is not None:
            given = tuple(k for k, t in enumerate(init) if t is not None)
        job = Job(
            problem.operator, engine, operation, problem.batch, problem.axis, problem.reverse,
            problem.exclusive, given, problem.from_identity, problem.final, problem.offsets,
            falls_back=falls_back,
        )  # fmt: skip
        return job, [*problem.inputs, *(t for t in init or () if t is not None)]

    def run(self, problem: ScanProblem) -> tuple[Tensors, Tensors]:
        """Results of a problem, without derivatives on memory."""
        return (self.operation if needs_dispatcher() else self.engine)(problem)

    def problem(self, tensors: Sequence[torch.Tensor | None]) -> ScanProblem:
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


def refuse_matrices(op: Operator | MatrixOperator) -> None:
    """Raise UnsupportedOperation for an operator over whole matrices: it has no derivative."""
    if isinstance(op, MatrixOperator):
        raise UnsupportedOperation("its elements are matrices too large to unroll")


@functools.lru_cache(maxsize=1024)
def adjoint_reads(
    op: Operator, exclusive: bool, with_init: bool, wanted: tuple[int, ...], final: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input leaves and the state leaves that a backward scan can read."""
    adjoint = adjoint_of(op, exclusive, with_init, wanted, tuple(range(len(op.outputs))), final)
    inputs = tuple(k for k in range(len(op.inputs)) if adjoint.reads[k])
    return inputs, tuple(sorted(adjoint.saved_state(op)))


@functools.lru_cache(maxsize=1024)
def adjoint_of(
    op: Operator,
    exclusive: bool,
    with_init: bool,
    wanted: tuple[int, ...],
    outputs: tuple[int, ...],
    finals: tuple[int, ...],
) -> Adjoint:
    """The adjoint with cotangents of these outputs and finals."""
    parts = spans(op.state)
    seeded = frozenset(c for k in finals for c in parts[k])
    return derive(op, Request(exclusive, with_init, wanted, seeded, frozenset(outputs)))
