"""Backward passes as lists of commands, cached with one prepared call.

The slots of such a list are the saved tensors, then the cotangents; its outputs are the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...caching.bounded import BoundedCache
from ...engines.base import forced_choices as overrides
from ...engines.base.commands import Slot, SlotArgument
from ...engines.base.executable import CommandList, Executable, FunctionSpec
from ...engines.base.scan_spec import MaybeTensor, TensorSpec
from ...errors import BackendError
from ...torch_private import storage_number
from ..native import runner
from .prepared_call import tensor_key

aten = torch.ops.aten
MAX_BACKWARD = 64  # lists of one forward call; each has other needed gradients or strides


class BackwardList:
    """results[k]: the number of the output that is the gradient of tensor k; None: it has none."""

    def __init__(self, executable: Executable, results: Sequence[int | None]) -> None:
        self.executable, self.results = executable, results

    def run(self, given: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        """The gradients. given: the saved tensors, then the cotangents."""
        outputs, _ = runner.run(self.executable, given)
        return [None if k is None else outputs[k] for k in self.results]


class BackwardLists(BoundedCache[Any, Any]):
    """The lists of one forward call, by needed gradients and layouts; None for a backward pass that
    is no list."""

    def __init__(self) -> None:
        super().__init__(MAX_BACKWARD)

    def find(self, needed: Sequence[bool], given: Sequence[MaybeTensor]) -> BackwardList | None:
        key = layout_key(needed, given)
        found: BackwardList | None = None if key is None else self.get(key)
        return found

    def gradients(
        self,
        needed: Sequence[bool],
        given: Sequence[MaybeTensor],
        make: Callable[[], BackwardList | None],
        falls_back: bool,
    ) -> list[MaybeTensor] | None:
        """The gradients by the list for these, which `make` makes at the first time; None where the
        caller has to compute them in another way: this backward pass is no list, or the list cannot
        be made or run now and `falls_back` is set (else BackendError is raised)."""
        key = layout_key(needed, given)
        if key is None:
            return None
        try:
            if key not in self:
                self.insert(key, make())
            found: BackwardList | None = self.get(key)
            return None if found is None else found.run(given)
        except BackendError:
            if not falls_back:
                raise
            return None


def layout_key(needed: Sequence[bool], given: Sequence[MaybeTensor]) -> Any:
    """The key of a backward list; None where no list may be used.

    needed: which gradients are needed; given: the saved tensors and the cotangents. The forward
    call fixes their shapes, but a hook on saved tensors may return others.
    """
    if torch.is_grad_enabled() or overrides.generation:
        return None
    kinds = tensor_key(given, with_grad=False)
    return None if kinds is None else (tuple(needed), kinds)


def commands_on(tensors: Sequence[MaybeTensor], device: torch.device) -> CommandList:
    """An empty list whose first slots are these tensors."""
    names = tuple(("tensor", k) for k in range(len(tensors)))
    specs = [None if t is None else TensorSpec.of(t, with_address=True) for t in tensors]
    return CommandList(FunctionSpec(names, device), specs)


def viewed(
    commands: CommandList,
    tensors: Sequence[MaybeTensor],
    k: int,
    layout: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Slot, torch.Tensor]:
    """A view of this shape and these strides of the tensor in slot k."""
    t = tensors[k]
    assert t is not None
    view = t.as_strided(*layout)
    arguments = SlotArgument(k), *layout
    return commands.torch(aten.as_strided.default, arguments, TensorSpec.of(view)), view


def finished(
    commands: CommandList, gradients: Mapping[int, Slot], count: int, scan: Executable
) -> BackwardList:
    """The list whose outputs are these gradients of `count` tensors. scan: what it runs."""
    made = commands.build([*gradients.values()], [], lambda: scan.plan)
    number_of = {k: n for n, k in enumerate(gradients)}
    return BackwardList(made, [number_of.get(k) for k in range(count)])


def summed(commands: CommandList, slot: Slot, shape: Sequence[int]) -> Slot:
    """The tensor, summed to a shape that broadcasts to its own: `sum_to_size`."""
    given = commands.spec_of(slot)
    if given.shape == tuple(shape):
        return slot
    more = given.ndim - len(shape)
    dims = tuple(
        d for d, n in enumerate(given.shape) if d < more or (n != 1 and shape[d - more] == 1)
    )
    if dims:
        reduced = [1 if d in dims else n for d, n in enumerate(given.shape)]
        arguments = SlotArgument(slot), dims, True
        spec = TensorSpec.dense(reduced, given.dtype, given.device)
        slot = commands.torch(aten.sum.dim_IntList, arguments, spec)
    return reshaped(commands, slot, tuple(shape))


def reshaped(commands: CommandList, slot: Slot, shape: tuple[int, ...]) -> Slot:
    """A result in another shape. For autograd it is a tensor of its own, so that the caller may
    change it in place."""
    given = commands.spec_of(slot)
    if given.shape == shape:
        return slot
    sample = torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device="meta")
    made = sample.reshape(shape)
    is_view = storage_number(made) == storage_number(sample)
    function = aten._unsafe_view.default if is_view else aten.reshape.default
    spec = replace(given, shape=shape, strides=made.stride())
    return commands.torch(function, (SlotArgument(slot), shape), spec)
