"""One backward pass: the adjoint's scan and its tensors, and the gradients from its results.

A pass is run on tensors, or made a list of commands from the slots of tensors (`backward_lists`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from ..autodiff.adjoint_operator import Adjoint, adjoint_of
from ..engines.base.commands import Slot, SlotArgument, Tensors
from ..engines.base.executable import CommandList, converted
from ..engines.base.scan_spec import ScanSpec, TensorSpec
from ..program.element_components import component_views, from_components
from ..program.operator import Operator, spans
from .prepared.backward_lists import summed

aten = torch.ops.aten
T = TypeVar("T")
Spec = ScanSpec[Operator]
Like = tuple[torch.Size, torch.dtype] | None


def may_walk(spec: Spec) -> bool:
    """Whether a backward scan may be a loop, where a scan would carry too much: on CPUs, which walk
    along the axis anyway. On a GPU a loop of many steps leaves most of it idle."""
    return spec.device.type == "cpu"


class Backward(Generic[T]):
    """A backward pass: `scan` gives the scan to run, `gradients` or `gradient_slots` converts its
    results. T: tensors or slots.

    spec: the forward scan.
    tensors: its inputs, init and offsets; None for one that was not saved.
    states: the saved states, by state leaf.
    like: the shape and dtype of each tensor of the forward scan; None for one without a gradient.
    needed: for each of these tensors, whether its gradient is needed now.
    cotangents: of the outputs, then of the finals; None for zero.
    """

    def __init__(
        self,
        spec: Spec,
        tensors: Sequence[T | None],
        states: Mapping[int, T | None],
        like: Sequence[Like],
        needed: Sequence[bool],
        cotangents: Sequence[T | None],
    ) -> None:
        op = spec.operator
        n, count = len(op.inputs), len(op.outputs)
        self.spec, self.states, self.needed, self.like = spec, states, needed, like
        self.tensors = dict(zip(spec.names, tensors, strict=True))
        self.cotangents = cotangents
        self.outputs = list(cotangents[:count])
        self.finals = dict(zip(spec.final, cotangents[count:], strict=True))
        wanted = tuple([k for k in range(n) if needed[k]])
        given = tuple([k for k, t in enumerate(self.outputs) if t is not None])
        seeds = tuple([k for k, t in self.finals.items() if t is not None])
        has_init = spec.init is not None
        self.adjoint: Adjoint = adjoint_of(
            op, spec.exclusive, has_init, wanted, given, seeds, may_walk(spec)
        )
        self.wants_init = True in needed[n:]

    def scan(self) -> tuple[Spec, list[T | None]]:
        """The adjoint's scan and its tensors.

        It goes in the opposite direction and reads y[t−1]. An inclusive forward scan saved y[t]:
        y[t−1] is then one step ahead in the order of the adjoint's scan, so the leaf is `shifted`.
        An exclusive one saved y[t−1] itself.
        """
        spec, n = self.spec, len(self.spec.operator.inputs)
        inputs = self.inputs()
        shifted: tuple[int, ...] = ()
        if not spec.exclusive:
            moving = [k for k in self.states if k not in spec.operator.constant]
            shifted = tuple([n + k for k in moving if inputs[n + k] is not None])
        beyond = {k: self.tensors.get(("init", k - n)) for k in shifted}
        boundary = tuple([k for k in shifted if beyond[k] is not None])
        incoming = self.incoming()
        init = tuple([k for k, t in enumerate(incoming) if t is not None])
        scan = ScanSpec(
            self.adjoint.operator, spec.batch, spec.axis, spec.device, not spec.reverse, True, init,
            True, self.wanted_finals(), shifted, boundary, spec.sequences,
        )  # fmt: skip
        tensors = [*inputs, *(incoming[k] for k in init), *(beyond[k] for k in boundary)]
        if spec.sequences is not None:
            tensors.append(self.tensors["offsets", 0])
        return scan, tensors

    def inputs(self) -> list[T | None]:
        """The input leaves x[t], y[t−1] and o̅[t]; None for one that the adjoint does not read."""
        op = self.spec.operator
        states = [self.states.get(k) for k in range(len(op.state))]
        saved = [self.tensors["input", k] for k in range(len(op.inputs))]
        everything = [*saved, *states, *self.outputs]
        return [t if read else None for t, read in zip(everything, self.adjoint.reads, strict=True)]

    def incoming(self) -> list[T | None]:
        """The carry that enters the adjoint's scan, one entry for each state leaf of the adjoint
        operator: μ, the cotangent of the carry (docs/how/derivatives.md), after the forward scan's
        last step. It consists of the cotangents of the finals."""
        op = self.spec.operator
        parts: dict[int, T] = {}
        for k, g in self.finals.items():
            if g is not None:
                views: Any = [g]  # a slot is of a leaf with one component
                if isinstance(g, torch.Tensor):
                    views = component_views(g, op.state[k])
                parts.update(zip(spans(op.state)[k], views, strict=True))
        head: list[T | None] = [None] * self.adjoint.matrix_size
        return head + [parts.get(c) for c in self.adjoint.carried]

    def wanted_finals(self) -> tuple[int, ...]:
        """The state leaves of the adjoint whose final carry is the cotangent of init."""
        if not self.wants_init:
            return ()
        first = self.adjoint.matrix_size
        return tuple(range(first, first + len(self.adjoint.carried)))

    def gradients(self, outputs: Tensors, finals: Tensors) -> list[torch.Tensor | None]:
        """The gradient of each tensor of the forward scan, from the adjoint's results."""
        op = self.spec.operator
        result: list[torch.Tensor | None] = [None] * len(self.like)
        for k, g in zip(self.adjoint.wanted, outputs, strict=True):
            described = self.like[k]
            assert described is not None
            result[k] = g if g.shape == described[0] else g.sum_to_size(described[0])
        if not self.wants_init:
            return result
        carried = dict(zip(self.adjoint.carried, finals, strict=True))
        parts = spans(op.state)
        for k, leaf in enumerate(self.spec.init or (), len(op.inputs)):
            described = self.like[k]
            if self.needed[k] and described is not None:
                shape, dtype = described
                components = [carried.get(c) for c in parts[leaf]]
                some: Any = next(t for t in self.cotangents if t is not None)
                # In the dtype of carries: a 16-bit leaf would round a gradient of float32.
                state = replace(op.state[leaf], dtype=op.state[leaf].accumulator)
                g = from_components(components, state, self.spec.carry_batch, some)
                result[k] = (g if g.shape == shape else g.sum_to_size(shape)).to(dtype)
        return result

    def gradient_slots(
        self, commands: CommandList, outputs: Sequence[Slot], finals: Sequence[Slot]
    ) -> dict[int, Slot]:
        """The same as commands, by the number of the tensor; carries have one component."""
        spec, result = self.spec, dict[int, Slot]()
        for k, slot in zip(self.adjoint.wanted, outputs, strict=True):
            described = self.like[k]
            assert described is not None
            result[k] = summed(commands, slot, described[0])
        if not self.wants_init:
            return result
        carried = dict(zip(self.adjoint.carried, finals, strict=True))
        parts = spans(spec.operator.state)
        for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
            described = self.like[k]
            if not self.needed[k] or described is None:
                continue
            shape, dtype = described
            end = carried.get(parts[leaf][0])
            if end is None:
                some: Any = next(t for t in self.cotangents if t is not None)
                made = TensorSpec.dense(shape, dtype, spec.device)
                arguments = SlotArgument(some), tuple(shape), dtype
                result[k] = commands.torch(aten.new_zeros.default, arguments, made)
            else:
                wide = converted(commands, end, spec.operator.state[leaf].accumulator)
                result[k] = converted(commands, summed(commands, wide, shape), dtype)
        return result
