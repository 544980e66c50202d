"""Gradients by torch's autograd: the backward pass runs the scan again by torch operations and
differentiates them. For operators whose adjoint cannot be generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..runtime.autograd import Scan, integers_of, outputs_and_finals
from ..runtime.batched_gradients import one_by_one
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from .eager_path import eager_scan, separate

Tensors = list[Tensor]


def by_autograd(
    outputs: Sequence[Tensor],
    cotangents: Sequence[MaybeTensor],
    inputs: Sequence[Tensor],
    **options: bool,
) -> list[MaybeTensor]:
    """`torch.autograd.grad` of the outputs that have a graph and a cotangent; None for an input
    that requires no gradient, or that none of them depends on."""
    pairs = [
        (y, g)
        for y, g in zip(outputs, cotangents, strict=True)
        if g is not None and y.requires_grad
    ]
    if not pairs:
        return [None] * len(inputs)
    wanted = [t for t in inputs if t.requires_grad]
    ys, gs = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True, **options))
    return [next(grads) if t.requires_grad else None for t in inputs]


def through(
    function: Callable[[Tensors], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    cotangents: Sequence[MaybeTensor],
) -> list[MaybeTensor]:
    """Gradients by autograd through a function, which is called again for them.

    tensors: its arguments. needed: whether the gradient of each is wanted; the others are None.
    cotangents: of its results. Where autograd is enabled, gradients have derivatives themselves.
    """
    create_graph = torch.is_grad_enabled()
    if create_graph:
        tensors = [separate(t) for t in tensors]
    else:
        tensors = [t.detach().requires_grad_(bool(n)) for t, n in zip(tensors, needed, strict=True)]
    with torch.enable_grad():
        results = function(list(tensors))
    wanted = [t for t, n in zip(tensors, needed, strict=True) if n]
    found = iter(by_autograd(results, cotangents, wanted, create_graph=create_graph))
    return [next(found) if n else None for n in needed]


class EagerGradient:
    """The scan runs on the engine of its backend; its gradient is computed by autograd through the
    eager engine.

    Implements the protocol `runtime.autograd.Differentiable`.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self,
        call: ScanCall,
        dispatch: Dispatch,
        spec: ScanSpec[Any],
        tensors: Sequence[MaybeTensor],
    ) -> None:
        self.call, self.dispatch, self.spec = call, dispatch, spec
        self.integers = integers_of(spec)
        self.offsets = [] if spec.sequences is None else [tensors[-1]]

    def apply(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph."""
        results = Scan.apply(self, *tensors[: len(tensors) - len(self.offsets)])
        return outputs_and_finals(results, len(self.spec.operator.outputs), self.spec)

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        outputs, finals = self.dispatch.run(self.spec, [*tensors, *self.offsets])
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return tensors

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        tensors = [t for t in saved if t is not None]
        return through(self.eager_results, tensors, needed, cotangents)

    def eager_results(self, tensors: Tensors) -> Tensors:
        """Outputs and finals of the call on these tensors, by differentiable torch operations."""
        n = len(self.call.leaves)
        init = list(tensors[n:]) if self.call.init is not None else None
        outputs, finals = eager_scan(replace(self.call, leaves=list(tensors[:n]), init=init))
        return [*outputs, *finals]
