"""`HandedTotals`: totals of segments from one pass over a sequence to the next one.

Where an axis is cut, a scan over vectors computes the totals of its segments, then its results. A
distributed scan reduces its part before it scans it, and the totals of the reduction are the same:
it returns them (`ScanSpec.before`), and the scan takes them (`ScanSpec.segments`). So both
passes over the part together take the time of one scan. Going back it is the same with the gradient
of init alone, then all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...engines.base.commands import Tensors
from ...engines.base.scan_spec import MaybeTensor, ScanSpec
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator
from .. import executable_cache as executables

Results = tuple[Tensors, Tensors]


@dataclass(frozen=True)
class BackwardTotals:
    """Totals of a backward pass, and what they depend on.

    cotangents: of the outputs; versions: theirs at that time, which change when they are written.
    """

    totals: torch.Tensor
    adjoint: VectorAdjoint
    cotangents: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    def fit(self, adjoint: VectorAdjoint, cotangents: Sequence[MaybeTensor]) -> bool:
        """Whether the totals of this pass are the same."""
        own = self.adjoint
        return (
            (own.op, own.exclusive, own.first, own.carry, own.cotangents, own.lane)
            == (adjoint.op, adjoint.exclusive, adjoint.first, adjoint.carry, adjoint.cotangents,
                adjoint.lane)
            and len(cotangents) == len(self.cotangents)
            and all(a is b for a, b in zip(cotangents, self.cotangents, strict=True))
            and self.versions == versions_of(self.cotangents)
        )  # fmt: skip


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([t._version for t in tensors])


class HandedTotals:
    """What the reduction of a sequence hands to the scan of the same sequence, once in each
    direction. `ScanCall.handed` of both calls is the same object.

    operator: of the scan.
    begins_alone: of the scan (`ScanSpec.begins_alone`). If the first step has a carry before it,
        the segments begin at other steps than if it has none; so the reduction then begins with the
        identity.
    """

    def __init__(self, operator: VectorOperator | None, begins_alone: bool) -> None:
        self.operator, self.begins_alone = operator, begins_alone
        self.forward: torch.Tensor | None = None
        self.backward: BackwardTotals | None = None

    def run(self, backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results:
        """Outputs and finals of the reduction, or of the scan that follows."""
        operator = self.operator
        if operator is None or not isinstance(spec.operator, VectorOperator):
            return executables.run(backend, spec, tensors)
        if spec.operator.is_reduction:
            if not self.begins_alone and spec.begins_alone and operator.identity is not None:
                spec = replace(spec, from_identity=True)
            finals, totals = keeping(backend, replace(spec, before=operator), tensors)
            self.forward = totals if spec.begins_alone == self.begins_alone else None
            return [], finals
        totals, self.forward = self.forward, None
        if spec.begins_alone != self.begins_alone:
            totals = None
        return with_totals(backend, spec, tensors, totals)

    def run_backward(
        self, backend: str, spec: ScanSpec[VectorAdjoint], tensors: Sequence[MaybeTensor],
        before: VectorAdjoint | None,
    ) -> Results:  # fmt: skip
        """The same of backward passes: first the one that gives the gradient of init alone.

        before: the operator of the other one, if this is the first.
        """
        adjoint = spec.operator
        first = len(adjoint.op.inputs)
        cotangents = tensors[first : first + len(adjoint.cotangents)]
        if before is not None:
            ends, totals = keeping(backend, replace(spec, before=before), tensors)
            if totals is not None:
                given = tuple([g for g in cotangents if g is not None])
                self.backward = BackwardTotals(totals, adjoint, given, versions_of(given))
            return [], ends
        kept, self.backward = self.backward, None
        fits = kept is not None and kept.fit(adjoint, cotangents)
        return with_totals(backend, spec, tensors, kept.totals if kept and fits else None)


def keeping(
    backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[Tensors, torch.Tensor | None]:
    """The finals of a scan without outputs; and the totals of its segments, if it has any."""
    totals, finals = executables.run(backend, spec, tensors)
    return finals, totals[0] if totals else None


def with_totals(
    backend: str,
    spec: ScanSpec[Any],
    tensors: Sequence[MaybeTensor],
    totals: torch.Tensor | None,
) -> Results:
    """Outputs and finals of a scan whose segments have these totals."""
    if totals is None:
        return executables.run(backend, spec, tensors)
    return executables.run(backend, replace(spec, segments=totals.shape[0]), [*tensors, totals])
