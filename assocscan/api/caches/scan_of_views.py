"""A scan of views of a function's tensors as a list of commands, with its gradient.

Making the views, and the views of their gradients, takes longer in Python than small kernels. So a
call of such a function is one list: the views, the scan, the views of its results; with one
autograd node on the function's own tensors, whose backward pass is one list too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engines.base.commands import Slot
from ...engines.base.executable import CommandList, Executable
from ...engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec
from ...monoids.monoid import Monoid
from ...program.vectors.vector_operator import VectorOperator
from ...runtime import executable_cache as executables
from ...runtime.autograd import Scan
from ...runtime.batched_gradients import one_by_one
from ...runtime.native import runner
from ...runtime.operation_arguments import Dispatch
from ...runtime.prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    reshaped,
    viewed,
)
from ...runtime.vectors.recomputed_gradient import RecomputedGradient, SlotAndTensor
from ...runtime.vectors.saved_carries import ALIGNMENT
from ...torch_state import in_functorch
from ..eager_gradient import through

Options = Any  # hashable
Plain = Callable[[Options, Sequence[Tensor]], tuple[Tensor, ...]]
ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]
# A result of the function: the number of the scan's output or final that it is, and the shape that
# the function gives it.
Result = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Views:
    """What a function scans: arguments of `associative_scan`, whose leaves are views of the
    function's tensors. xs has a leaf for each of the function's first tensors, in their order.

    repeated: for each leaf of xs, the dimensions along which its view repeats the tensor.
    init_sources: for each leaf of init, the number of the function's tensor; None for a constant.
    outputs, finals: the function's results, the outputs first.
    """

    op: Monoid
    xs: tuple[Tensor, ...]
    axis: int
    reverse: bool
    init: tuple[Tensor, ...] | None
    backend: str
    repeated: tuple[tuple[int, ...], ...]
    init_sources: tuple[int | None, ...]
    outputs: tuple[Result, ...]
    finals: tuple[Result, ...]

    @property
    def sources(self) -> tuple[int | None, ...]:
        """For each tensor of the scan, the number of the function's tensor; None for a constant."""
        return (*range(len(self.xs)), *self.init_sources)


class GradientOfViews(RecomputedGradient):
    """The gradient of a scan of views. Along dimensions in which a view repeats the function's
    tensor, the kernel sums the gradient: no hook and no caller sees the view, and so nobody misses
    its entries.

    repeated: as in `Views`.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        spec: ScanSpec[VectorOperator],
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool],
        repeated: Sequence[tuple[int, ...]],
    ) -> None:
        # Set first: the base class asks for `summed_dims`.
        self.summed = [
            () if t is None else tuple(d for d in dims if t.shape[d] > 1)
            for t, dims in zip(tensors, repeated, strict=False)
        ]
        super().__init__(dispatch, spec, tensors, wanted)

    def summed_dims(self, leaf: int) -> tuple[int, ...]:
        return self.summed[leaf]


class ScanOfViews:
    """A call of a function, prepared (`runtime.autograd.Differentiable`). It holds no tensor of the
    call.

    kinds: of the function's tensors. layouts: of what is scanned, the views of the tensors that
        `sources` numbers.
    plain, options: the function by `associative_scan`, and its arguments that are no tensors.
    constants: what is scanned and is no view, by its number.
    executable: from the function's tensors to its results, the saved carries after the outputs.
    returned, saved_results: numbers of results of the executable: the function's own, and the
        carries.
    inner: the gradient of the scan; None where none is wanted.
    raw: the results of the scan as it gives them: the outputs, the carries, the finals.
    is_named: whether the caller named the backend, which then runs the call or raises.
    backward: the backward passes.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self,
        plain: Plain,
        options: Options,
        views: Views,
        spec: ScanSpec[VectorOperator],
        scanned: Sequence[Tensor],
        tensors: Sequence[Tensor],
    ) -> None:
        self.plain, self.options, self.backend = plain, options, views.backend
        self.outputs, self.finals, self.sources = views.outputs, views.finals, views.sources
        self.is_named = views.backend != "auto"
        self.kinds = [TensorSpec.of(t) for t in tensors]
        self.layouts = [layout_of(t) for t in scanned]
        self.constants = {n: t for n, t in enumerate(scanned) if self.sources[n] is None}
        needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self.inner: GradientOfViews | None = None
        if True in needs:
            wanted = [k is not None and needs[k] for k in self.sources]
            self.inner = GradientOfViews(
                Dispatch(views.backend), spec, scanned, wanted, views.repeated
            )
            spec = self.inner.spec
        self.spec = spec
        self.raw: list[TensorSpec] = []
        self.executable = self.forward_executable(tensors)
        count, saved = len(self.outputs), int(self.inner is not None)
        self.saved_results = tuple(range(count, count + saved))  # the carries
        self.integers = self.saved_results  # they are bits, which have no derivative
        self.reads = (True,) * len(tensors)
        last = range(count + saved, count + saved + len(self.finals))
        self.returned = (*range(count), *last)
        self.backward = BackwardLists()

    def results(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All results, connected to the autograd graph."""
        found: tuple[Tensor, ...] = Scan.apply(self, *tensors)
        return found

    def forward(self, tensors: Sequence[MaybeTensor]) -> list[Tensor]:
        outputs, finals = runner.run(self.executable, tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, *(results[k] for k in self.saved_results)]

    def forward_executable(self, tensors: Sequence[MaybeTensor]) -> Executable:
        commands = commands_on(tensors, self.spec.device)
        slots, scanned = zip(*self.views_of(commands, tensors), strict=True)
        inner = executables.prepare(self.backend, self.spec, scanned)
        outputs, finals = commands.inline(inner, slots)
        self.raw = [commands.spec_of(slot) for slot in (*outputs, *finals)]
        carries = outputs[len(self.spec.operator.outputs) :]
        return commands.build(
            [*(reshaped(commands, outputs[k], shape) for k, shape in self.outputs), *carries],
            [reshaped(commands, finals[k], shape) for k, shape in self.finals],
            lambda: inner.plan,
        )

    def views_of(
        self, commands: CommandList, tensors: Sequence[MaybeTensor]
    ) -> list[SlotAndTensor]:
        """The views that are scanned, and the constants. The function's tensors are given first."""
        found = []
        for n, (k, layout) in enumerate(zip(self.sources, self.layouts, strict=True)):
            if k is None:
                constant = self.constants[n]
                found.append((commands.constant(constant), constant))
            else:
                found.append(viewed(commands, tensors, k, layout))
        return found

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        """The gradient of each of the function's tensors."""
        given = (*saved, *cotangents)
        found: Sequence[MaybeTensor] | None = None
        if not self.are_changed(saved):
            found = self.backward.gradients(
                needed, given, lambda: self.backward_list(saved, needed, cotangents),
                falls_back=not self.is_named,
            )  # fmt: skip
        return self.by_torch(saved, needed, cotangents) if found is None else found

    def are_changed(self, saved: Sequence[MaybeTensor]) -> bool:
        """Whether a hook on saved tensors gave back other strides, or carries that kernels cannot
        read."""
        *tensors, carries = saved
        assert carries is not None
        kinds = [None if t is None else TensorSpec.of(t) for t in tensors]
        is_whole = carries.is_contiguous() and carries.data_ptr() % ALIGNMENT == 0
        return kinds != self.kinds or carries.device != self.spec.device or not is_whole

    def by_torch(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        """`gradients` by calling the function again by `plain`, under autograd or torch.func.
        Where it is asked for, they have derivatives themselves."""
        tensors = [t for t in saved[: len(self.kinds)] if t is not None]
        seeds = [cotangents[k] for k in self.returned]
        if not in_functorch():
            return through(lambda given: self.plain(self.options, given), tensors, needed, seeds)
        places = [k for k, n in enumerate(needed) if n]
        chosen = [n for n, g in enumerate(seeds) if g is not None]

        def results(*wanted: Tensor) -> tuple[Tensor, ...]:
            mixed = list(tensors)
            for k, t in zip(places, wanted, strict=True):
                mixed[k] = t
            found = self.plain(self.options, mixed)
            return tuple([found[n] for n in chosen])

        _, pull = torch.func.vjp(results, *[tensors[k] for k in places])  # type: ignore[misc]
        at = dict(zip(places, pull(tuple(seeds[n] for n in chosen)), strict=True))
        return [at.get(k) for k in range(len(needed))]

    def backward_list(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> BackwardList:
        """The backward pass, from the saved tensors and the cotangents to the gradients."""
        inner, tensors = self.inner, (*saved, *cotangents)
        carries = saved[len(self.kinds)]
        assert inner is not None and carries is not None
        commands = commands_on(tensors, self.spec.device)
        scanned = [*self.views_of(commands, tensors), (len(self.kinds), carries)]
        # A cotangent for each result of the scan, in the shape that the scan gave it. Result
        # `returned[i]` of the executable is result `numbers[i]` of the scan.
        seeds: list[SlotAndTensor | None] = [None] * len(self.raw)
        first_final = len(inner.given.operator.outputs) + 1
        numbers = [k for k, _ in self.outputs] + [first_final + k for k, _ in self.finals]
        for number, result in zip(numbers, self.returned, strict=True):
            g = cotangents[result]
            if g is not None:
                layout = layout_of(g.view(self.raw[number].shape))
                seeds[number] = viewed(commands, tensors, len(saved) + result, layout)
        needs = [k is not None and needed[k] for k in self.sources]
        found, scan = inner.append_backward(commands, scanned, needs, seeds)
        gradients = dict[int, Slot]()
        for n, slot in found.items():
            k = self.sources[n]
            assert k is not None
            gradients[k] = reshaped(commands, slot, self.kinds[k].shape)
        return finished(commands, gradients, len(self.kinds), scan)


def layout_of(t: Tensor) -> ShapeAndStrides:
    return tuple(t.shape), t.stride()
