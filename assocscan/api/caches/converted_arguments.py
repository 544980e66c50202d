"""Prepared calls that convert their arguments first: `init` to the dtype of the state and the shape
of the batch, `offsets` to int64.

Both come last among the tensors of a call, so all of them are converted from some number on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engines.base.commands import Slot, SlotArgument
from ...engines.base.executable import CommandList, Executable
from ...engines.base.executable import converted as in_dtype
from ...engines.base.scan_spec import MaybeTensor, TensorSpec
from ...runtime.autograd import apply_here
from ...runtime.generated_gradient import GeneratedGradient
from ...runtime.native import runner
from ...runtime.prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    summed,
)
from ...runtime.vectors.recomputed_gradient import RecomputedGradient
from ...torch_state import in_functorch_or_forward_mode

Kinds = Sequence[tuple[torch.dtype, tuple[int, ...]]]


def kinds_of(tensors: Sequence[torch.Tensor]) -> Kinds:
    """The dtypes and shapes of these tensors."""
    return [(t.dtype, tuple(t.shape)) for t in tensors]


def with_converted(tensors: Sequence[Any], kinds: Kinds, first: int) -> list[Any]:
    """The tensors, of which those from number `first` on are converted and expanded."""
    made = list(tensors)
    for k, (dtype, shape) in enumerate(kinds, first):
        if made[k] is not None:
            made[k] = made[k].to(dtype).expand(shape)
    return made


def after_conversion(
    scan: Executable, tensors: Sequence[torch.Tensor], bound: Sequence[torch.Tensor], first: int
) -> Executable:
    """The list that converts the tensors from number `first` on to those that `bind` made of them,
    and scans."""
    commands = commands_on(tensors, scan.spec.device)
    converted = [converted_to(commands, k, bound[k]) for k in range(first, len(bound))]
    slots = [*range(first), *converted]
    outputs, finals = commands.inline(scan, slots)
    return commands.build(outputs, finals, lambda: scan.plan)


def converted_to(commands: CommandList, slot: Slot, t: torch.Tensor) -> Slot:
    """A tensor of the list in the dtype and the shape of `t`."""
    slot = in_dtype(commands, slot, t.dtype)
    if commands.spec_of(slot).shape == t.shape:
        return slot
    arguments = SlotArgument(slot), tuple(t.shape)
    made = TensorSpec.of(t, with_address=True)
    return commands.torch(torch.ops.aten.expand.default, arguments, made)


class ConvertedGradient:
    """The gradient of a scan whose arguments are converted first, for the tensors as they were
    given (`Differentiable`): these are saved, and their gradients are summed to their shapes.
    Backward passes are lists, as those of the scan itself.

    scan: the scan of converted tensors. executable: the conversions and the scan.
    tensors: as they were given; bound: as they are scanned, converted from number `first` on.
    """

    def __init__(
        self,
        scan: GeneratedGradient | RecomputedGradient,
        executable: Executable,
        tensors: Sequence[torch.Tensor],
        bound: Sequence[torch.Tensor],
        first: int,
    ) -> None:
        self.scan, self.executable, self.first = scan, executable, first
        self.spec, self.batched, self.integers = scan.spec, scan.batched, scan.integers
        self.kinds, self.given = kinds_of(bound[first:]), kinds_of(tensors[first:])
        self.reads, self.saved_results = scan.reads, scan.saved_results
        self.count = len(tensors)
        self.backward = BackwardLists()

    def results(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if in_functorch_or_forward_mode():
            return self.scan.results(with_converted(tensors, self.kinds, self.first))
        return apply_here(self, tensors)

    def forward(self, tensors: Sequence[MaybeTensor]) -> list[torch.Tensor]:
        outputs, finals = runner.run(self.executable, tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> Sequence[MaybeTensor]:
        return self.scan.saved(tensors, results)

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        given = (*saved, *cotangents)
        by_list = self.backward.gradients(
            needed, given, lambda: self.backward_list(needed, given), self.scan.dispatch.falls_back
        )
        if by_list is not None:
            return by_list
        whole = with_converted(saved, self.kinds, self.first)
        found = list(self.scan.gradients(whole, needed, cotangents))
        for k, (dtype, shape) in enumerate(self.given, self.first):
            g = found[k]
            if g is not None:
                found[k] = (g if g.shape == shape else g.sum_to_size(shape)).to(dtype)
        return found

    def backward_list(
        self, needed: Sequence[bool], given: Sequence[MaybeTensor]
    ) -> BackwardList | None:
        """The backward pass of the scan as a list, with the conversions before it and the sums of
        gradients after it."""
        whole = with_converted(given, self.kinds, self.first)
        inner = self.scan.backward_list(needed, whole)
        if inner is None:
            return None
        commands, slots = commands_on(given, self.spec.device), list(range(len(given)))
        for k in range(self.first, self.first + len(self.kinds)):
            t = whole[k]
            if t is not None:
                slots[k] = converted_to(commands, k, t)
        outputs, _ = commands.inline(inner.executable, slots)
        gradients = {k: outputs[j] for k, j in enumerate(inner.results) if j is not None}
        for k, (dtype, shape) in enumerate(self.given, self.first):
            if k in gradients:
                gradients[k] = in_dtype(commands, summed(commands, gradients[k], shape), dtype)
        return finished(commands, gradients, self.count, inner.executable)


class AfterConversion:
    """The gradient of a scan whose arguments torch converts first, from number `first` on, and so
    their gradients too. Python runs it."""

    def __init__(self, scan: RecomputedGradient, bound: Sequence[torch.Tensor], first: int) -> None:
        self.scan, self.first = scan, first
        self.kinds = kinds_of(bound[first:])
        self.reads, self.integers, self.backward = scan.reads, scan.integers, scan.backward
        self.saved_results = scan.saved_results

    def results(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.scan.results(with_converted(tensors, self.kinds, self.first))
