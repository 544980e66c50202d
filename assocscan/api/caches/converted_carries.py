"""Kept calls whose `init` is no carry yet: it is converted to the dtype of the state, and expanded
to the shape of the batch, by the kept call itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...engines.base.commands import Slot, SlotArgument
from ...engines.base.executable import CommandList, Executable, converted
from ...engines.base.scan_spec import MaybeTensor, TensorSpec
from ...errors import BackendError
from ...runtime.autograd import apply_here
from ...runtime.generated_gradient import GeneratedGradient
from ...runtime.native import runner
from ...runtime.prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    layout_key,
    summed,
)
from ...runtime.vectors.recomputed_gradient import RecomputedGradient
from ...torch_state import in_functorch_or_forward_mode

Kinds = Sequence[tuple[torch.dtype, tuple[int, ...]]]


def kinds_of(init: Sequence[torch.Tensor]) -> Kinds:
    """The dtypes and shapes of the tensors of init."""
    return [(t.dtype, tuple(t.shape)) for t in init]


def with_converted(tensors: Sequence[Any], kinds: Kinds, first: int) -> list[Any]:
    """The tensors, of which those from number `first` on are converted and expanded."""
    made = list(tensors)
    for k, (dtype, shape) in enumerate(kinds, first):
        if made[k] is not None:
            made[k] = made[k].to(dtype).expand(shape)
    return made


def after_conversion(
    scan: Executable, tensors: Sequence[torch.Tensor], init: Sequence[torch.Tensor], first: int
) -> Executable:
    """The list that makes `init`, as `bind` made it, of the tensors from number `first` on, and
    scans."""
    commands = commands_on(tensors, scan.spec.device)
    slots = [*range(first), *(
        converted_to(commands, k, t) for k, t in enumerate(init, first)
    ), *range(first + len(init), len(tensors))]  # fmt: skip
    outputs, finals = commands.inline(scan, slots)
    return commands.build(outputs, finals, lambda: scan.plan)


def converted_to(commands: CommandList, slot: Slot, t: torch.Tensor) -> Slot:
    """A tensor of the list in the dtype and the shape of `t`."""
    slot = converted(commands, slot, t.dtype)
    if commands.spec_of(slot).shape == t.shape:
        return slot
    arguments = SlotArgument(slot), tuple(t.shape)
    made = TensorSpec.of(t, with_address=True)
    return commands.torch(torch.ops.aten.expand.default, arguments, made)


class ConvertedGradient:
    """The gradient of a scan whose `init` is converted first, for the tensors as they were given
    (`Differentiable`): these are saved, and their gradients are summed to their shapes. Backward
    passes are lists, as those of the scan itself.

    scan: the scan of converted tensors. executable: the conversions and the scan.
    tensors: given; init: as they are converted, which are those from number `first` on.
    """

    def __init__(
        self,
        scan: GeneratedGradient,
        executable: Executable,
        tensors: Sequence[torch.Tensor],
        init: Sequence[torch.Tensor],
        first: int,
    ) -> None:
        self.scan, self.executable, self.first = scan, executable, first
        self.spec, self.batched, self.integers = scan.spec, scan.batched, scan.integers
        self.kinds = kinds_of(init)
        self.given = kinds_of(tensors[first : first + len(init)])
        self.reads, self.saved_results = scan.reads, scan.saved_results
        self.count = scan.count
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
    ) -> list[MaybeTensor]:
        return self.scan.saved(tensors, results)

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        given = (*saved, *cotangents)
        key = layout_key(needed, given)
        if key is not None:
            try:
                if key not in self.backward:
                    self.backward.keep(key, self.backward_list(needed, given))
                known: BackwardList | None = self.backward.get(key)
                if known is not None:
                    return known.run(given)
            except BackendError:
                if not self.scan.dispatch.falls_back:
                    raise
        whole = with_converted(saved, self.kinds, self.first)
        found = self.scan.gradients(whole, needed, cotangents)
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
                gradients[k] = converted(commands, summed(commands, gradients[k], shape), dtype)
        return finished(commands, gradients, self.count, inner.executable)


class AfterConversion:
    """The gradient of a scan whose `init` torch converts and expands first, and so the gradient of
    init too. Python runs it."""

    def __init__(self, scan: RecomputedGradient, init: Sequence[torch.Tensor], first: int) -> None:
        self.scan, self.kinds = scan, kinds_of(init)
        self.first = first  # the number of the first tensor of init
        self.reads, self.integers, self.backward = scan.reads, scan.integers, scan.backward
        self.saved_results = scan.saved_results

    def results(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.scan.results(with_converted(tensors, self.kinds, self.first))
