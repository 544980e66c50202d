"""Gradients of scans over vectors, by recomputation.

The forward kernel saves the carries that enter its chunks; the backward kernel computes the states
again, chunk by chunk, and sums the gradient of a leaf that is broadcast. So neither pass has an
array of the size of all states.

A leaf may be repeated along a dimension by `expand`, as parameters are along the axis. For
autograd its gradient has an entry for each repetition; the backward of `expand` adds them, so any
entries with the right sum will do. Where nothing else reads them, the kernel sums the gradient, and
each entry is an equal part of the sum, in a tensor with stride 0, which takes no memory. Something
else may read them if the tensor has hooks, or if it still exists when the backward pass runs: it
may be an argument of `torch.autograd.grad`. (Not noticed: a hook set after the scan on a tensor
that is then deleted.)
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...autodiff.vector_adjoint import backward_step, vector_adjoint
from ...engines.base.commands import Slot, Tensors
from ...engines.base.executable import CommandList, Executable
from ...engines.base.scan_spec import MaybeTensor, ScanSpec
from ...errors import BackendError
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator
from ...torch_private import SingleLevelFunction, has_hooks, sizes_before_expand
from ...torch_state import has_own_dispatch, needs_dispatcher
from .. import backends
from .. import executable_cache as executables
from ..autograd import apply_here, integers_of, outputs_and_finals
from ..batched_gradients import Mapped, vmapped
from ..native import runner
from ..operation_arguments import Dispatch
from ..prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    summed,
)
from .handed_totals import HandedTotals

T = TypeVar("T")
SlotAndTensor = tuple[Slot, torch.Tensor]


class RecomputedGradient:
    """A scan over vectors; implements the protocol `runtime.autograd.Differentiable`.

    given: the scan, which does not save its carries; `spec` does.
    executable: of `spec`; set where this object belongs to a prepared call.
    backward: the backward passes, used only with `executable`.
    handed: of the call; such a call is not cached.
    """

    batched: Mapped = staticmethod(vmapped)
    has_tangents = False

    def __init__(
        self,
        dispatch: Dispatch,
        spec: ScanSpec[VectorOperator],
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool] | None = None,
        handed: HandedTotals | None = None,
    ) -> None:
        """wanted: which tensors have a gradient; None: those that require one."""
        self.dispatch, self.handed = dispatch, handed
        self.executable: Executable | None = None
        self.backward = BackwardLists()
        self.repeated: dict[int, tuple[weakref.ref[torch.Tensor], tuple[int, ...]]] = {}
        op = spec.operator
        if op.saves_carries:  # by an outer derivative, whose backward pass has the lane too
            self.spec = spec
            self.given = replace(spec, operator=replace(op, saves_carries=False, lane=None))
        else:
            self.given = spec
            self.spec = backends.saving_carries(dispatch.backend, spec, tensors)
        # The saved carries, which are bits, come between the outputs and the finals.
        count = len(op.outputs)
        self.integers = [count, *(k + (k >= count) for k in integers_of(spec))]
        if wanted is None:
            wanted = [t is not None and t.requires_grad for t in tensors]
        self.wanted = wanted
        # Derived now, so that an operation without a derivative is found in the forward pass.
        self.require_derivative(wanted)

    @property
    def reads(self) -> tuple[bool, ...]:
        """All tensors are saved."""
        return (True,) * len(self.given.names)

    @property
    def saved_results(self) -> tuple[int, ...]:
        """The numbers of the results that are saved: the carries."""
        return (len(self.given.operator.outputs),)

    @property
    def result_count(self) -> int:
        """Of the outputs, the saved carries and the finals."""
        return len(self.given.operator.outputs) + 1 + len(self.given.final)

    def hand_totals(self, saved: Sequence[MaybeTensor], cotangents: Sequence[MaybeTensor]) -> None:
        """Compute the totals that the backward pass takes when it runs with these cotangents."""
        if self.handed is None or needs_dispatcher():
            return
        nothing = [False] * len(self.wanted)
        spec, tensors = self.backward_scan(saved, nothing, cotangents)
        following = self.backward_scan(saved, self.wanted, cotangents)[0].operator
        with contextlib.suppress(BackendError):  # the backward pass finds the same and says it
            self.handed.run_backward(self.dispatch.backend, spec, tensors, following)

    def require_derivative(self, wanted: Sequence[bool]) -> None:
        """Raise UnsupportedOperation where there is no gradient of the wanted tensors."""
        op, final = self.given.operator, list(self.given.final)
        outputs = [k for k, leaf in enumerate(op.outputs) if is_float(leaf.dtype)]
        backward_step(self.adjoint(wanted, outputs, final), False)

    def of_call(
        self, tensors: Sequence[MaybeTensor]
    ) -> tuple[RecomputedGradient, Sequence[MaybeTensor]]:
        """This object for one call, and the tensors for the autograd function. A leaf that `expand`
        made is replaced by another tensor on the same memory, so that autograd does not keep the
        leaf alive."""
        repeated = {}
        for k, t in enumerate(tensors[: len(self.given.operator.inputs)]):
            dims = () if t is None else repeated_dims(t, len(self.given.batch))
            if t is not None and dims:
                repeated[k] = weakref.ref(t), dims
        if not repeated:
            return self, tensors
        found = copy.copy(self)
        found.repeated = repeated
        return found, [
            same_memory(t) if t is not None and k in repeated else t for k, t in enumerate(tensors)
        ]

    def adjoint(
        self,
        needed: Sequence[bool],
        outputs: Sequence[int],
        finals: Sequence[int],
    ) -> VectorAdjoint:
        """The operator of the backward pass: for these wanted gradients, and for cotangents of
        these outputs and finals."""
        spec, op = self.given, self.given.operator
        count = len(op.inputs)
        wanted = tuple(k for k in range(count) if needed[k])
        return vector_adjoint(
            op, spec.exclusive, spec.begins_alone, spec.final, wanted,
            tuple(outputs), tuple(finals), True in needed[count:],
            tuple(self.summed_dims(k) for k in wanted), self.spec.operator.lane,
        )  # fmt: skip

    def apply(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph."""
        results = self.results(tensors)
        return outputs_and_finals(results, len(self.given.operator.outputs), self.given)

    def results(self, tensors: Sequence[MaybeTensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, the saved carries and the finals, connected to the autograd graph."""
        return apply_here(*self.of_call(tensors))

    def scanned(self, tensors: Sequence[MaybeTensor]) -> Sequence[MaybeTensor]:
        """The tensors of the scan, from those of the autograd function: the same, with offsets."""
        return tensors

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        if self.executable is not None:
            outputs, finals = runner.run(self.executable, tensors)
        elif self.handed is not None and not needs_dispatcher():
            outputs, finals = self.handed.run(self.dispatch.backend, self.spec, tensors)
        else:
            outputs, finals = self.dispatch.run(self.spec, tensors)
        return outputs + finals

    def set_wanted(self, tensors: Sequence[MaybeTensor], needed: Sequence[bool]) -> None:
        """What is saved does not depend on which gradients are wanted."""

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
        given = (*saved, *cotangents)
        if self.executable is not None and not self.repeated:
            by_list = self.backward.gradients(
                needed, given, lambda: self.backward_list(needed, given), falls_back=False
            )
            if by_list is not None:
                return by_list
        tensors = saved[:-1]
        backward, ordered = self.backward_scan(saved, needed, cotangents)
        adjoint = backward.operator
        if self.handed is None or needs_dispatcher():
            found, ends = self.dispatch.run(backward, ordered)
        else:
            inputs = len(self.given.operator.inputs)
            following = None
            if not adjoint.wanted and True in self.wanted[:inputs]:
                following = self.backward_scan(saved, self.wanted, cotangents)[0].operator
            found, ends = self.handed.run_backward(
                self.dispatch.backend, backward, ordered, following
            )
        result: list[MaybeTensor] = [None] * len(needed)
        for k, g in zip(adjoint.wanted, found, strict=True):
            result[k] = spread(g, tensors[k])
        for n, number in self.gradients_at_init(adjoint, needed).items():
            t = tensors[n]
            assert t is not None
            end = ends[number]
            result[n] = end if end.shape == t.shape else end.sum_to_size(t.shape)
        return result

    def backward_list(self, needed: Sequence[bool], given: Sequence[MaybeTensor]) -> BackwardList:
        """The backward pass from the slots of the saved tensors and the cotangents."""
        commands, saved = commands_on(given, self.spec.device), len(needed) + 1  # the carries
        # The offsets are checked again: numpy, say, may have changed their memory since the forward
        # pass.
        if self.given.sequences is not None:
            commands.check_offsets(len(needed) - 1, self.given.length)
        pairs: list[SlotAndTensor | None] = [
            None if t is None else (k, t) for k, t in enumerate(given)
        ]
        slots, scan = self.append_backward(commands, pairs[:saved], needed, pairs[saved:])
        for n in slots:
            if n >= len(self.given.operator.inputs):
                slots[n] = summed(commands, slots[n], given[n].shape)  # type: ignore[union-attr]
        return finished(commands, slots, len(needed), scan)

    def append_backward(
        self, commands: CommandList, saved: Sequence[SlotAndTensor | None],
        needed: Sequence[bool], cotangents: Sequence[SlotAndTensor | None],
    ) -> tuple[dict[int, Slot], Executable]:  # fmt: skip
        """Append the backward pass of these slots; the slot of each tensor's gradient, and what was
        appended. Those of init have the shape of the scan's carries."""
        spec, ordered = self.backward_scan(saved, needed, cotangents)
        tensors = [None if pair is None else pair[1] for pair in ordered]
        executable = executables.prepare(self.dispatch.backend, spec, tensors)
        places = [None if pair is None else pair[0] for pair in ordered]
        outputs, ends = commands.inline(executable, places)
        found = dict(zip(spec.operator.wanted, outputs, strict=True))
        found |= {n: ends[k] for n, k in self.gradients_at_init(spec.operator, needed).items()}
        return found, executable

    def backward_scan(
        self, saved: Sequence[T | None], needed: Sequence[bool], cotangents: Sequence[T | None]
    ) -> tuple[ScanSpec[VectorAdjoint], list[T | None]]:
        """The backward pass, and its tensors in the order of its names; anything may be given in
        the place of tensors, since they are only ordered. Its outputs are the gradients of the
        leaves that `wanted` of its operator lists, of size 1 in the dimensions that it sums; its
        finals are the gradients at init."""
        *tensors, carries = saved
        spec, op = self.given, self.given.operator
        inputs, count = len(op.inputs), len(op.outputs)
        outputs = [k for k in range(count) if cotangents[k] is not None]
        finals = dict(zip(spec.final, cotangents[count + 1 :], strict=True))
        seeded = [k for k, g in finals.items() if g is not None]
        adjoint = self.adjoint(needed, outputs, seeded)
        forward: ScanSpec[Any] = spec
        backward = replace(forward, operator=adjoint, final=())
        given = [
            *tensors[:inputs], *(cotangents[k] for k in outputs), carries,
            *(finals[k] for k in seeded), *tensors[inputs:],
        ]  # fmt: skip
        return backward, given

    def gradients_at_init(self, adjoint: VectorAdjoint, needed: Sequence[bool]) -> dict[int, int]:
        """From the number of a tensor of init whose gradient is needed to the number of the final
        of the backward pass that is its gradient; tensors whose gradient is zero are left out."""
        if not adjoint.wants_init:
            return {}
        numbers = {k: n for n, k in enumerate(adjoint.ends)}
        places = enumerate(self.given.init or (), len(self.given.operator.inputs))
        return {n: numbers[k] for n, k in places if needed[n] and k in numbers}

    def summed_dims(self, leaf: int) -> tuple[int, ...]:
        """The dimensions along which `expand` repeated a leaf that does not exist any more."""
        made, dims = self.repeated.get(leaf, (None, ()))
        return dims if made is not None and made() is None else ()


def same_memory(t: torch.Tensor) -> torch.Tensor:
    """A tensor with the values and the gradient of `t`, which does not keep `t` alive. A view does
    for tensors of subclasses, as those that compilers trace with are."""
    other: torch.Tensor = Alias.apply(t) if has_own_dispatch([t]) else t.view_as(t)
    return other


class Alias(SingleLevelFunction):
    """The same tensor, not as a view."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def repeated_dims(t: torch.Tensor, rank: int) -> tuple[int, ...]:
    """The batch dimensions along which `expand` repeated a tensor; () where something else reads
    its gradient, and for 16 bits: an equal part of a rounded sum would be rounded once more."""
    given = sizes_before_expand(t)
    if given is None or t.retains_grad or has_hooks(t) or t.dtype.itemsize <= 2:
        return ()
    more = t.dim() - len(given)
    return tuple(d for d in range(rank) if t.shape[d] > 1 and (d < more or given[d - more] == 1))


def spread(g: torch.Tensor, leaf: MaybeTensor) -> torch.Tensor:
    """The gradient of a leaf from the one that has size 1 where the leaf is repeated.

    torch's `expand` adds up what comes back along the dimensions that it repeated: each entry gets
    an equal part. Nothing of the repeated size is allocated.
    """
    assert leaf is not None
    if g.shape == leaf.shape:
        return g
    sizes = zip(leaf.shape, g.shape, strict=True)
    return (g / math.prod(n for n, m in sizes if n != m)).expand(leaf.shape)


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
