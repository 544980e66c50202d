"""`HandedTotals`: totals of segments from one pass over a sequence to the next one.

Where an axis is cut, a scan over vectors computes the totals of its segments, then its results. A
distributed scan reduces its part before it scans it, and the totals of the reduction are the same:
it returns them (`ScanSpec.followed_by`), and the scan takes them (`ScanSpec.segments`). So both
passes over the part together take the time of one scan. Backward it is
the same: a first pass computes the gradient of init alone, and hands its totals to a second one,
which computes all gradients.
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
from ...torch_private import version_of
from .. import executable_cache as executables

Results = tuple[Tensors, Tensors]


@dataclass(frozen=True)
class BackwardTotals:
    """Totals of a backward pass, and what they depend on.

    cotangents: of the outputs. versions: their version counters when the totals were computed;
        writing to a tensor raises its counter.
    """

    totals: torch.Tensor
    adjoint: VectorAdjoint
    cotangents: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    def fit(self, adjoint: VectorAdjoint, cotangents: Sequence[MaybeTensor]) -> bool:
        """Whether a pass with this operator and these cotangents has the same totals."""
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
    return tuple([version_of(t) for t in tensors])


class HandedTotals:
    """What the reduction of a sequence hands to the scan of the same sequence, once in each
    direction. `ScanCall.handed` of both calls is the same object.

    operator: of the scan.
    begins_alone: whether the scan has no carry at its start (`ScanSpec.begins_alone`). It then
        walks its first step alone, so that every chunk begins one step later. Both calls must cut
        at the same steps, so the reduction before a scan with a carry begins with the identity.
    cuts: whether the last reduction handed over totals of segments.
    """

    def __init__(self, operator: VectorOperator | None, begins_alone: bool) -> None:
        self.operator, self.begins_alone = operator, begins_alone
        self.forward: torch.Tensor | None = None
        self.backward: BackwardTotals | None = None
        self.cuts = False

    def reduction(self, spec: ScanSpec[Any]) -> ScanSpec[Any]:
        """The reduction that returns its totals as one output; `spec` where it has none to hand."""
        operator = self.operator
        if operator is None or not isinstance(spec.operator, VectorOperator):
            return spec
        if not self.begins_alone and spec.begins_alone and operator.identity is not None:
            spec = replace(spec, from_identity=True)
        if spec.begins_alone != self.begins_alone:
            return spec
        return replace(spec, followed_by=operator)

    def run(self, backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results:
        """Outputs and finals of the reduction, or of the scan that follows."""
        totals, self.forward = self.forward, None
        if not (isinstance(spec.operator, VectorOperator) and spec.operator.is_reduction):
            return executables.run(backend, *self.following(spec, tensors, totals))
        found, finals = executables.run(backend, self.reduction(spec), tensors)
        self.hand(found)
        return [], finals

    def following(
        self, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor], totals: torch.Tensor | None
    ) -> tuple[ScanSpec[Any], Sequence[MaybeTensor]]:
        """The scan after a reduction that handed these totals, and its tensors."""
        fits = isinstance(spec.operator, VectorOperator) and spec.begins_alone == self.begins_alone
        return taking(spec, tensors, totals if fits else None)

    def hand(self, found: Tensors) -> None:
        """Store what `reduction` returned as outputs: its totals, or nothing."""
        self.forward = found[0] if found else None
        self.cuts = bool(found)

    def run_backward(
        self, backend: str, spec: ScanSpec[VectorAdjoint], tensors: Sequence[MaybeTensor],
        followed_by: VectorAdjoint | None,
    ) -> Results:  # fmt: skip
        """Gradients, and gradients of init, of a backward pass.

        followed_by: set in the pass that comes first, for the gradient of init alone or for the
            totals alone: the operator of the pass for all gradients, which follows.
        """
        adjoint, stored = spec.operator, self.backward
        self.backward = None
        first = len(adjoint.op.inputs)
        cotangents = tensors[first : first + len(adjoint.cotangents)]
        if followed_by is None:
            totals = None
            if stored is not None and stored.fit(adjoint, cotangents):
                totals = stored.totals
            return executables.run(backend, *taking(spec, tensors, totals))
        given = tuple([g for g in cotangents if g is not None])
        if any(g.is_inference() for g in given):  # they have no version counters
            return executables.run(backend, spec, tensors)
        found, ends = executables.run(backend, replace(spec, followed_by=followed_by), tensors)
        if found:
            self.backward = BackwardTotals(found[0], adjoint, given, versions_of(given))
        return [], ends


def taking(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor], totals: torch.Tensor | None
) -> tuple[ScanSpec[Any], Sequence[MaybeTensor]]:
    """The pass that takes these totals and does not compute them, and its tensors; both unchanged
    for None."""
    if totals is None:
        return spec, tensors
    return replace(spec, segments=totals.shape[0]), [*tensors, totals]
