"""One forward-mode pass: the tangents' scan and its tensors, and the tangents of the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..autodiff.tangent_operator import Tangent, TangentRequest, derive_tangent
from ..engines.base.commands import Tensors
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..engines.base.shifted_leaves import edge_mask, previous_state
from ..program.element_components import component_views, from_components
from ..program.operator import Operator, spans
from ..torch_private import is_zero_tensor

Spec = ScanSpec[Operator]


def tangent_request(spec: Spec, has_tangents: Sequence[bool]) -> TangentRequest:
    """What the tangents' scan depends on, besides the operator.

    has_tangents: for each tensor of the scan, whether it has a tangent.
    """
    n = len(spec.operator.inputs)
    moving = tuple([k for k in range(n) if has_tangents[k]])
    has_init = spec.init is not None
    return TangentRequest(spec.exclusive, has_init, moving, True in has_tangents[n:], spec.final)


class Forward:
    """A forward-mode pass: `scan` gives the scan to run, `results` converts its results.

    spec, tensors: the scan that is differentiated.
    states: the states that the tangents' scan reads, by state leaf.
    tangents: of the inputs, then of init; None for zero.
    """

    def __init__(
        self,
        spec: Spec,
        tensors: Sequence[MaybeTensor],
        states: dict[int, torch.Tensor],
        tangents: Sequence[MaybeTensor],
    ) -> None:
        self.spec, self.states = spec, states
        self.tensors = dict(zip(spec.names, tensors, strict=True))
        self.tangents = [None if t is None or is_zero_tensor(t) else t for t in tangents]
        request = tangent_request(spec, [t is not None for t in self.tangents])
        self.tangent: Tangent = derive_tangent(spec.operator, request)

    def scan(self) -> tuple[Spec, list[MaybeTensor]]:
        """The tangents' scan and its tensors. The carry that enters is the tangent of init."""
        spec, op, tangent = self.spec, self.spec.operator, self.tangent
        n, used = len(op.inputs), tangent.operator.used_inputs
        offsets = self.tensors.get(("offsets", 0))
        first = edge_mask(spec.batch, spec.axis, spec.reverse, offsets, spec.device)
        states = [self.states.get(k) for k in range(len(op.state))]
        if not spec.exclusive:
            constant = op.constant
            states = [
                y if y is None or k in constant else self.previous(k, y)
                for k, y in enumerate(states)
            ]
        primals = [self.tensors["input", k] for k in range(n)]
        everything = [first, *primals, *states, *self.tangents[:n]]
        inputs = [
            None if used.isdisjoint(span) else t
            for t, span in zip(everything, spans(tangent.operator.inputs), strict=True)
        ]
        if all(t is None for t in inputs):  # the operation needs one, for its device
            inputs[0] = first
        head = tangent.matrix_size
        finals = tuple(range(head, head + len(tangent.carried))) if spec.final else ()
        incoming = self.incoming()
        init = tuple([k for k, t in enumerate(incoming) if t is not None])
        scan = ScanSpec(
            tangent.operator, spec.batch, spec.axis, spec.device, spec.reverse, True, init, True,
            finals, sequences=spec.sequences,
        )  # fmt: skip
        tensors = [*inputs, *(incoming[k] for k in init)]
        return scan, tensors if offsets is None else [*tensors, offsets]

    def previous(self, leaf: int, y: torch.Tensor) -> torch.Tensor:
        """y[t−1]; at the first step, init."""
        spec, beyond = self.spec, self.tensors.get(("init", leaf))
        offsets = self.tensors.get(("offsets", 0))
        return previous_state(y, beyond, spec.axis, spec.reverse, offsets)

    def incoming(self) -> list[MaybeTensor]:
        """The carry that enters the tangents' scan, one entry for each state leaf of the tangent
        operator: the tangent of init."""
        op = self.spec.operator
        parts: dict[int, torch.Tensor] = {}
        count = len(op.inputs) + len(self.spec.init or ())
        for leaf, t in zip(
            self.spec.init or (), self.tangents[len(op.inputs) : count], strict=True
        ):
            if t is not None:
                parts.update(
                    zip(spans(op.state)[leaf], component_views(t, op.state[leaf]), strict=True)
                )
        head: list[MaybeTensor] = [None] * self.tangent.matrix_size
        return head + [parts.get(c) for c in self.tangent.carried]

    def results(self, outputs: Tensors, finals: Tensors) -> list[torch.Tensor | None]:
        """The tangent of each output and final; None for integers and where it is zero."""
        spec, op = self.spec, self.spec.operator
        found: list[torch.Tensor | None] = [None] * len(op.outputs)
        for k, t in zip(self.tangent.outputs, outputs, strict=True):
            found[k] = t
        carried = dict(zip(self.tangent.carried, finals, strict=bool(spec.final)))
        for leaf in spec.final:
            described = op.state[leaf]
            if not (described.dtype.is_floating_point or described.dtype.is_complex):
                found.append(None)
                continue
            some = next(t for t in self.tangents if t is not None)
            components = [carried.get(c) for c in spans(op.state)[leaf]]
            found.append(from_components(components, described, spec.carry_batch, some))
        return found
