"""Gradients of scans over vectors, by recomputation.

The forward kernel saves the carries that enter its chunks; the backward kernel computes the states
again, chunk by chunk, and sums the gradient of a leaf that is broadcast. So neither pass has an
array of the size of all states. Second derivatives are those of torch operations, as in
`eager_gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..autodiff.vector_adjoint import VectorAdjoint, vector_adjoint
from ..engines.base.commands import Tensors
from ..engines.base.executable import Executable
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..program.vectors.vector_operator import VectorOperator
from ..runtime import executable_cache as executables
from ..runtime.autograd import Scan, integers_of, outputs_and_finals
from ..runtime.batched_gradients import one_by_one
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from .eager_gradient import EagerGradient


class RecomputedGradient:
    """A scan over vectors; implements the protocol `runtime.autograd.Differentiable`.

    call: the call without its tensors, so that it can be kept. given: the scan; `spec` also saves
    the carries. executable: of `spec`; set by the call cache where it keeps this object.
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
        self.call = replace(call, leaves=nothing, init=None if call.init is None else [])
        self.dispatch, self.given = dispatch, spec
        self.executable: Executable | None = None
        self.spec = replace(spec, operator=replace(spec.operator, saves_carries=True))
        self.offsets = [] if spec.sequences is None else [tensors[-1]]
        self.integers = [k + (k >= len(spec.operator.outputs)) for k in integers_of(spec)]
        self.integers.append(len(spec.operator.outputs))  # the carries, which are bytes
        without_offsets = tensors[: len(tensors) - len(self.offsets)]
        wanted = [t is not None and t.requires_grad for t in without_offsets]
        # Derived now, so that an operation without a derivative is found in the forward pass.
        outputs = [k for k, leaf in enumerate(spec.operator.outputs) if is_float(leaf.dtype)]
        self.adjoint(wanted, outputs, list(spec.final)).step(False)

    def adjoint(
        self, needed: Sequence[bool], outputs: Sequence[int], finals: Sequence[int]
    ) -> VectorAdjoint:
        spec, op = self.given, self.given.operator
        count = len(op.inputs)
        initial = spec.initial_leaves
        return vector_adjoint(
            op, spec.exclusive, initial is None and not spec.exclusive, spec.final,
            tuple(k for k in range(count) if needed[k]), tuple(outputs), tuple(finals),
            True in needed[count:],
        )  # fmt: skip

    def apply(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph."""
        results = Scan.apply(self, *tensors[: len(tensors) - len(self.offsets)])
        return outputs_and_finals(results, len(self.given.operator.outputs), self.given)

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        if self.executable is not None:
            outputs, finals = self.executable.run(tensors)
        else:
            outputs, finals = self.dispatch.run(self.spec, [*tensors, *self.offsets])
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, results[len(self.given.operator.outputs)]]

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        *tensors, carries = saved
        count = len(self.given.operator.outputs)
        cotangents = [*cotangents[:count], *cotangents[count + 1 :]]
        if torch.is_grad_enabled():
            eager = EagerGradient(self.call, self.dispatch, self.given, [*tensors, *self.offsets])
            return eager.gradients(tensors, needed, cotangents)
        return self.first_gradients(tensors, carries, needed, cotangents)

    def first_gradients(
        self,
        tensors: Sequence[MaybeTensor],
        carries: MaybeTensor,
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        spec, op = self.given, self.given.operator
        inputs, count = len(op.inputs), len(op.outputs)
        outputs = [k for k in range(count) if cotangents[k] is not None]
        finals = dict(zip(spec.final, cotangents[count:], strict=True))
        seeded = [k for k, g in finals.items() if g is not None]
        adjoint = self.adjoint(needed, outputs, seeded)
        forward: ScanSpec[Any] = spec
        backward = replace(forward, operator=adjoint, init=None, from_identity=False, final=())
        given = [
            *tensors[:inputs], *(cotangents[k] for k in outputs), carries,
            *(finals[k] for k in seeded), *self.offsets,
        ]  # fmt: skip
        found, ends = executables.run(self.dispatch.backend, backward, given)
        result: list[MaybeTensor] = [None] * len(needed)
        for k, g in zip(adjoint.wanted, found, strict=True):
            result[k] = spread(g, tensors[k])
        if adjoint.wants_init:
            at = dict(zip(adjoint.ends, ends, strict=True))
            for n, k in enumerate(spec.init or (), inputs):
                if needed[n]:
                    result[n] = at.get(k)
        return result


def spread(g: torch.Tensor, leaf: MaybeTensor) -> torch.Tensor:
    """The gradient of a leaf from the one that has size 1 where the leaf has stride 0.

    torch's `expand` adds up what comes back along the dimensions that it repeated: each entry gets
    an equal part. Nothing of the repeated size is allocated.
    """
    assert leaf is not None
    if g.shape == leaf.shape:
        return g
    return (g / (leaf.numel() // max(g.numel(), 1))).expand(leaf.shape)


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
