"""Scans of steps that are not associative (`Operator.sequential`): calls and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engines.base.commands import Tensors
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..program.operator import Operator
from ..program.transforms import state_outputs, with_outputs
from ..pytrees import TreeSpec
from ..runtime import backends
from ..runtime.autograd import integers_of
from ..runtime.generated_gradient import GeneratedGradient, reads_of
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall

Spec = ScanSpec[Operator]


@dataclass
class SequentialCall(ScanCall):
    """A call in which the first leaves of a state enter: h, then the parameters.

    leaving_spec: the structure of h, which `leaving` numbers.
    """

    leaving_spec: TreeSpec | None = None

    def scan(self, operator: Any) -> tuple[ScanSpec[Any], list[MaybeTensor]]:
        spec, tensors = super().scan(operator)
        return replace(spec, init=tuple(range(len(self.init or ())))), tensors


def final_structure(call: ScanCall) -> TreeSpec:
    """The structure of the final carry that the caller gets."""
    if isinstance(call, SequentialCall) and call.leaving_spec is not None:
        return call.leaving_spec
    return call.state_spec


def why_not(call: ScanCall, backend: str) -> str | None:
    """Why the backend cannot run this call; None if it can (`runtime.backends.why_not`)."""
    reason = backends.why_not(call, backend)
    op, device = call.traced.operator, call.leaves[0].device
    on_cpu = backend in ("auto", "cpu") and device.type == "cpu"
    if reason is None and op is not None and op.sequential and not on_cpu:
        where = f"on {device}" if backend == "auto" else f"in the {backend} backend"
        return f"steps that are not associative have no kernel {where}"
    return reason


class SequentialGradient(GeneratedGradient):
    """A sequential scan whose gradient is the scan of the adjoint operator. Of constant state
    leaves, which are the same at each step, only init is saved."""

    def __init__(
        self,
        dispatch: Dispatch,
        spec: Spec,
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool],
    ) -> None:
        super().__init__(dispatch, spec, tensors, wanted, [False] * len(tensors))
        op = saving_operator(spec, wanted)
        self.spec = replace(spec, operator=op)
        self.integers = integers_of(self.spec)
        self.output_of_state = state_outputs(op)

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> list[MaybeTensor]:
        kept: list[MaybeTensor] = [
            t if read else None for t, read in zip(tensors, self.reads, strict=True)
        ]
        at = self.output_of_state
        return kept + [results[at[k]] if k in at else None for k in self.states]

    def filled(self, saved: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        """What was saved, with the constant state leaves: views of what was saved of init, so that
        second derivatives reach it."""
        constant = along_axis(self.spec, saved)
        pairs = zip(self.states, saved[self.count :], strict=True)
        return [*saved[: self.count], *(constant.get(k, t) for k, t in pairs)]

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        return super().gradients(self.filled(saved), needed, cotangents)

    @property
    def saved_results(self) -> tuple[int, ...]:
        numbers = self.output_of_state
        return tuple([numbers[k] for k in self.states if k in numbers])


def saving_operator(spec: Spec, wanted: Sequence[bool]) -> Operator:
    """The operator with the state leaves that its derivative reads as further outputs, without
    those that are an output already and the constant ones."""
    op = spec.operator
    states = set(reads_of(spec, wanted)[1]) - {*state_outputs(op), *op.constant}
    saving: Operator = with_outputs(op, tuple(sorted(states)))
    return saving


def along_axis(spec: Spec, tensors: Sequence[MaybeTensor]) -> dict[int, torch.Tensor]:
    """The constant state leaves, which are the same at each step, in the shape of the batch: views
    of init.

    tensors: of the scan.
    """
    found = {}
    for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
        t = tensors[k]
        if leaf in spec.operator.constant and t is not None:
            if spec.sequences is not None:  # all packed sequences have the same
                t = t.select(0, 0) if spec.sequences else t.new_zeros(spec.carry_batch[1:])
            found[leaf] = t.unsqueeze(spec.axis).expand(spec.batch)
    return found


def differentiable(
    dispatch: Dispatch, spec: Spec, tensors: Sequence[MaybeTensor]
) -> SequentialGradient:
    """The scan with the gradients of the tensors that require one."""
    wanted = [t is not None and t.requires_grad for t in tensors]
    return SequentialGradient(dispatch, spec, tensors, wanted)


def run(dispatch: Dispatch, spec: Spec, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
    """Outputs and finals, differentiable where a tensor requires a gradient."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return dispatch.run(spec, tensors)
    return differentiable(dispatch, spec, tensors).apply(tensors)
