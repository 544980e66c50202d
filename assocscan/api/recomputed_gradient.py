"""The recomputed gradient of a call, whose second derivatives are those of the user's functions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..errors import BackendError
from ..program.vectors.vector_operator import VectorOperator
from ..runtime.batched_gradients import one_by_one
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from ..runtime.vectors.handed_totals import HandedTotals
from ..runtime.vectors.recomputed_gradient import RecomputedGradient
from .eager_gradient import EagerGradient


class RecomputedGradientOfCall(RecomputedGradient):
    """`RecomputedGradient` of a plain call. Second derivatives are those of torch operations, as in
    `eager_gradient`, and so is the first where its kernel cannot be compiled.

    call: the call without its tensors, so that it can be cached.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self,
        call: ScanCall,
        dispatch: Dispatch,
        spec: ScanSpec[VectorOperator],
        tensors: Sequence[MaybeTensor],
    ) -> None:
        nothing: list[Any] = [None] * len(call.leaves)
        init = None if call.init is None else list[torch.Tensor]()
        self.call = call.changed(leaves=nothing, init=init, handed=None)
        super().__init__(dispatch, spec, tensors, handed=call.handed)

    def of_part(self, handed: HandedTotals | None) -> RecomputedGradientOfCall:
        """This object for another call on tensors of the same kinds."""
        found = copy.copy(self)
        found.handed = handed
        return found

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        if not torch.is_grad_enabled():
            try:
                return super().gradients(saved, needed, cotangents)
            except BackendError:  # the kernel of the backward pass cannot be compiled
                if not self.dispatch.falls_back:
                    raise
        tensors, call = saved[:-1], self.call
        count = len(self.given.operator.outputs)
        packed = tensors[-1:] if self.given.sequences is not None else ()
        if packed:
            call = call.changed(offsets=packed[0])
        eager = EagerGradient(call, self.dispatch, self.given, tensors)
        inner = len(tensors) - len(packed)
        without_carries = [*cotangents[:count], *cotangents[count + 1 :]]
        return [
            *eager.gradients(tensors[:inner], needed[:inner], without_carries),
            *[None for _ in packed],
        ]
