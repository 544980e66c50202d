"""Derivatives of the library operation on scans over vectors, at torch's Autograd key.

A scan has the recomputed gradient, which is the operation again, with the `VectorAdjoint` as its
operator. What no kernel computes, tangents and second derivatives, torch computes from the torch
operations of `engines.eager.vector_interpreter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engines.base.commands import Tensors
from ...engines.base.scan_spec import MaybeTensor, ScanSpec
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...torch_state import is_dual, is_forward_mode
from ..autograd import apply_here
from ..batched_gradients import Mapped, vmapped
from ..operation_arguments import Dispatch
from .recomputed_gradient import RecomputedGradient, is_float
from .saved_carries import by_operations


def run(dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Tensors:
    """The results of a scan over vectors, or of a backward pass of one, differentiable."""
    if is_forward_mode() and any(t is not None and is_dual(t) for t in tensors):
        return by_operations(dispatch.backend, spec, tensors)
    if isinstance(spec.operator, VectorAdjoint):
        return list(BackwardOfBackward(dispatch, spec, tensors).results(tensors))
    scan = RecomputedGradient(dispatch, spec, tensors)
    results = list(scan.results(tensors))
    if not spec.operator.saves_carries:
        del results[len(spec.operator.outputs)]
    return results


class BackwardOfBackward:
    """A backward pass that can be differentiated once more (`runtime.autograd.Differentiable`)."""

    batched: Mapped = staticmethod(vmapped)
    has_tangents = False

    def __init__(
        self,
        dispatch: Dispatch,
        spec: ScanSpec[VectorAdjoint],
        tensors: Sequence[MaybeTensor],
    ) -> None:
        op = spec.operator
        self.dispatch, self.spec = dispatch, spec
        self.offsets = [] if spec.sequences is None else [tensors[-1]]
        kinds = [leaf.dtype for leaf in op.outputs] + [op.state[k].accumulator for k in op.ends]
        self.integers = [k for k, dtype in enumerate(kinds) if not is_float(dtype)]

    def results(self, tensors: Sequence[MaybeTensor]) -> tuple[torch.Tensor, ...]:
        """The gradients, connected to the autograd graph."""
        return apply_here(self, tensors[: len(tensors) - len(self.offsets)])

    def scanned(self, tensors: Sequence[MaybeTensor]) -> Sequence[MaybeTensor]:
        """The tensors of the scan, from those of the autograd function."""
        return [*tensors, *self.offsets]

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        outputs, finals = self.dispatch.run(self.spec, self.scanned(tensors))
        return outputs + finals

    def set_wanted(self, tensors: Sequence[MaybeTensor], needed: Sequence[bool]) -> None:
        """What is saved does not depend on which gradients are wanted."""

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> Sequence[MaybeTensor]:
        carries = self.spec.operator.carries
        return [None if k == carries else t for k, t in enumerate(tensors)]

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        places = [k for k, n in enumerate(needed) if n and saved[k] is not None]
        chosen = [k for k, g in enumerate(cotangents) if g is not None]

        def results(*wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(places, wanted, strict=True))
            mixed = [given.get(k, t) for k, t in enumerate(saved)]
            found = by_operations(self.dispatch.backend, self.spec, self.scanned(mixed))
            return tuple(found[k] for k in chosen)

        primals: list[Any] = [saved[k] for k in places]
        _, pull = torch.func.vjp(results, *primals)  # type: ignore[misc]
        found = pull(tuple(cotangents[k] for k in chosen))
        at = dict(zip(places, found, strict=True))
        return [at.get(k) for k in range(len(needed))]
