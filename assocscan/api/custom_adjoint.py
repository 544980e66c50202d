"""Gradients through a hand-written adjoint: `monoid(adjoint=(M, element))`.

For operators whose Jacobian is too large to generate (products of large matrices). Let y be the
states, e = lift(x), and g the cotangent of y that comes from the outputs. Then

    λ = lower_M(reverse scan of M over element(y[t], e[t+1], g[t]))
    ē[t] = (∂combine/∂right at (y[t−1], e[t]))ᵀ λ[t],   ē[0] = λ[0] without init
    init̄ = (∂combine/∂left at (init, e[0]))ᵀ λ[0]

λ is the whole cotangent of y, from the outputs and from all later steps. At the last step there is
no e[t+1]. `element` gets e[0] in its place, so the author must choose M and `element` such that λ
does not depend on it. The cotangent of the final carry is added to g at the last step. All of this
is differentiable torch code around one scan of M, so autograd can differentiate it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..engines.base.shifted_leaves import previous_state
from ..monoids.batch_mapping import map_elements
from ..program.transforms import with_outputs
from ..pytrees import align, flatten, template, unflatten
from ..runtime.autograd import Scan, integers_of, outputs_and_finals
from ..runtime.batched_gradients import one_by_one
from ..runtime.operation_arguments import Dispatch
from ..runtime.scan_call import ScanCall
from ..torch_state import is_differentiable
from .eager_gradient import by_autograd
from .eager_path import combiner, lifted, lowered, separate, widen

Tensors = list[Tensor]


def applies(call: ScanCall) -> bool:
    """Whether the operator has a hand-written adjoint, and the call is one that it is valid for:
    inclusive, without offsets, not empty."""
    return (
        getattr(call.operator, "adjoint", None) is not None
        and call.inclusive
        and call.offsets is None
        and call.length > 0
    )


class CustomAdjoint:
    """A scan with a hand-written adjoint.

    Implements the protocol `runtime.autograd.Differentiable`. The forward kernel also writes all
    states. Its results, and so their cotangents, are in the order: outputs, states, finals.

    scan: `associative_scan`, which scans the adjoint.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self, call: ScanCall, dispatch: Dispatch, spec: ScanSpec[Any], scan: Callable[..., Any]
    ) -> None:
        self.scan = scan
        states = tuple(range(len(spec.operator.state)))
        self.call, self.dispatch, self.output_count = call, dispatch, len(spec.operator.outputs)
        self.spec = replace(spec, operator=with_outputs(spec.operator, states))
        self.integers = integers_of(self.spec)

    def apply(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph; the states are dropped."""
        results = Scan.apply(self, *tensors)
        return outputs_and_finals(results, self.output_count, self.spec)

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        outputs, finals = self.dispatch.run(self.spec, tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, *results[self.output_count : len(self.spec.operator.outputs)]]

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        create_graph = torch.is_grad_enabled()
        read = [t for t in saved if t is not None]
        if create_graph:
            read = [separate(t) for t in read]
        else:
            read = [t.detach().requires_grad_(is_differentiable(t)) for t in read]
        n = len(needed)
        with torch.enable_grad():
            pass_ = _Gradients(self.call, read[:n], read[n:], create_graph, self.scan)
            found = pass_.run(self.output_count, list(cotangents))
        return [g if n else None for g, n in zip(found, needed, strict=True)]


class _Gradients:
    """One backward pass.

    tensors: the leaves of xs, then of init. states: those that the forward kernel wrote.
    create_graph: whether the gradients are to be differentiable, as in `torch.autograd.grad`.
    scan: as of `CustomAdjoint`.
    """

    def __init__(
        self,
        call: ScanCall,
        tensors: Tensors,
        states: Tensors,
        create_graph: bool,
        scan: Callable[..., Any],
    ) -> None:
        n = len(call.leaves)
        self.call = replace(call, leaves=tensors[:n], init=tensors[n:] or None)
        self.raw, self.init = widen(tensors[:n]), tensors[n:]
        self.states, self.create_graph = states, create_graph
        self.tensors, self.scan = tensors, scan

    def run(
        self, output_count: int, cotangents: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of `tensors`, for the cotangents of outputs, states and finals, in this
        order."""
        call, axis, states = self.call, self.call.axis, widen(self.states)
        state_end = output_count + len(self.states)
        elements = [e.expand(y.shape) for e, y in zip(lifted(call, self.raw), states, strict=True)]
        g, sums = self.from_outputs(states, cotangents[:output_count])
        for k, extra in enumerate(cotangents[output_count:state_end]):
            if extra is not None:
                g[k] = g[k] + extra
        for k, last in zip(call.final, cotangents[state_end:], strict=True):
            if last is not None:
                edge = 0 if call.reverse else call.length - 1
                g[k] = g[k].index_add(
                    axis, torch.tensor([edge], device=g[k].device), last.unsqueeze(axis)
                )
        right, initial = self.through_combine(
            states, elements, self.reverse_scan(states, elements, g)
        )
        inputs = self.tensors[: len(call.leaves)]
        lifted_back = self.vjp(elements, inputs, right)
        total = [a if b is None else a + b for a, b in zip(lifted_back, sums, strict=True)]
        return [*total, *initial]

    def through_combine(
        self, states: Tensors, elements: Tensors, adjoint_states: Tensors
    ) -> tuple[Tensors, Tensors]:
        """ē and the cotangents of init, from λ.

        Without init the first state is the first element, with no call of `combine`, so ē there is
        λ itself.
        """
        call, axis, kept = self.call, self.call.axis, len(states)
        edge = call.length - 1 if call.reverse else 0
        start, count = 0, call.length
        if self.init:
            before = [
                previous_state(y, i, axis, call.reverse, None)
                for y, i in zip(states, self.init, strict=True)
            ]
        else:
            start, count = 0 if call.reverse else 1, call.length - 1
            before = [t.narrow(axis, 1 - start, count) for t in states]
        right = [t.narrow(axis, start, count) for t in elements]
        coming = [t.narrow(axis, start, count) for t in adjoint_states]
        found = self.vjp(combiner(call)(before, right), [*right, *before], coming)
        if self.init:
            return found[:kept], [t.select(axis, edge) for t in found[kept:]]
        ends = [
            (t.narrow(axis, edge, 1), e) for t, e in zip(adjoint_states, found[:kept], strict=True)
        ]
        return [torch.cat(pair[::-1] if call.reverse else pair, axis) for pair in ends], []

    def from_outputs(
        self, states: Tensors, cotangents: list[torch.Tensor | None]
    ) -> tuple[Tensors, list[torch.Tensor | None]]:
        """The cotangents that the outputs give to the states and, where `lower` also takes the
        inputs, to the inputs."""
        call = self.call
        inputs = list(self.tensors[: len(call.leaves)])
        if call.final_only:
            return [torch.zeros_like(y) for y in states], [None] * len(inputs)
        outputs, _ = lowered(call, states, self.raw)  # the states, where there is no lower
        filled = [
            torch.zeros_like(y) if o is None else o.to(y.dtype)
            for y, o in zip(outputs, cotangents, strict=True)
        ]
        if call.operator.lower is None:
            return filled, [None] * len(inputs)
        found = self.vjp(outputs, [*states, *inputs], filled)
        return found[: len(states)], list(found[len(states) :])

    def reverse_scan(self, states: Tensors, elements: Tensors, g: Tensors) -> Tensors:
        """λ: the scan of the adjoint monoid in the opposite direction."""
        call = self.call
        assert call.operator.adjoint is not None
        monoid, element = call.operator.adjoint
        shift = 1 if call.reverse else -1
        following = [e.roll(shift, call.axis) for e in elements]
        tree = template(call.state_spec)
        ndims = [len(leaf.shape) for leaf in call.traced.state]
        leaves, spec = map_elements(
            element, [*states, *following, *g], ndims * 3, flatten((tree, tree, tree))[1], False
        )
        with torch.set_grad_enabled(self.create_graph):
            result = self.scan(monoid, unflatten(leaves, spec), call.axis, not call.reverse)
        return align(tree, result, f"the adjoint of {call.operator.name!r}")

    def vjp(self, outputs: Tensors, inputs: Tensors, cotangents: Tensors) -> Tensors:
        """Cotangents of `inputs`; zeros for an input that no output depends on."""
        seeds = [g.to(y.dtype) for y, g in zip(outputs, cotangents, strict=True)]
        grads = by_autograd(
            outputs, seeds, inputs, create_graph=self.create_graph, retain_graph=True
        )
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)]
