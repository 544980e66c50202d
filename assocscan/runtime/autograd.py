"""The autograd functions of scans: `Scan`, and `TransformedScan` for torch.func and forward mode.

Their argument says what is run and how the gradient is computed: `generated_gradient`,
`vectors.recomputed_gradient`, `api.custom_adjoint` or `api.eager_gradient`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..engines.base.commands import Tensors
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..torch_private import (
    BelowAutograd,
    SingleLevelFunction,
    forward_mode_set_to,
    single_level_functions,
)
from ..torch_state import in_functorch, in_functorch_or_forward_mode, is_differentiable
from .batched_gradients import Mapped, takes_batches
from .native import runner
from .native.programs import program_of
from .operation_arguments import call

if TYPE_CHECKING:
    from .generated_gradient import GeneratedGradient


@contextlib.contextmanager
def outer_derivatives() -> Iterator[None]:
    """Context for the forward and the jvp of an autograd function under nested torch.func
    transforms: the scan inside is differentiated by the outer levels, not by this one.

    torch disables grad mode and forward AD for all levels while it runs an autograd function, so
    both are enabled here. Dispatch starts below the Autograd key, so that this level, which has
    the autograd function, does not differentiate the scan a second time.
    """
    with (
        torch.enable_grad(),
        forward_mode_set_to(True),
        BelowAutograd(),
    ):
        yield


class _Wanted(threading.local):
    """Which gradients the backward passes of this thread compute."""

    carries_only = False


_WANTED = _Wanted()


@contextlib.contextmanager
def only_carries() -> Iterator[None]:
    """Context: backward passes of scans compute the gradient of `init` alone, and write no others.

    torch passes to an autograd function which inputs have a gradient, not which of them the present
    call of `torch.autograd.grad` asks for.
    """
    before = _WANTED.carries_only
    _WANTED.carries_only = True
    try:
        yield
    finally:
        _WANTED.carries_only = before


class Differentiable(Protocol):
    """What `Scan` runs: a scan, what it saves, and its gradients.

    spec: the scan. batched: runs the backward on batches of cotangents (`batched_gradients`).
    integers: the indices of the results of integer or bool dtype, which have no derivative.
    """

    spec: ScanSpec[Any]
    batched: Mapped
    integers: Sequence[int]

    def forward(self, tensors: Sequence[MaybeTensor]) -> Sequence[torch.Tensor]:
        """The results: outputs (saved states among them), then finals; without derivatives."""

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> Sequence[MaybeTensor]:
        """The tensors that `gradients` reads; None in the place of one that it does not read."""

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        """The gradient of each tensor, for cotangents of the results; None where it is zero or not
        needed."""


def outputs_and_finals(
    results: Sequence[torch.Tensor], outputs: int, spec: ScanSpec[Any]
) -> tuple[Tensors, Tensors]:
    """The first `outputs` results and the finals, which are last; saved states are dropped."""
    return list(results[:outputs]), list(results[len(results) - len(spec.final) :])


def integers_of(spec: ScanSpec[Any]) -> list[int]:
    """The indices of the results of integer or bool dtype, which have no derivative."""
    op = spec.operator
    kinds = [leaf.dtype for leaf in op.outputs] + [op.state[k].accumulator for k in spec.final]
    return [k for k, d in enumerate(kinds) if not (d.is_floating_point or d.is_complex)]


class Scan(SingleLevelFunction):
    """The autograd function: `apply(scan, *inputs, *init)` gives (*outputs, *finals)."""

    @staticmethod
    def forward(ctx: Any, scan: Differentiable, *tensors: MaybeTensor) -> tuple[torch.Tensor, ...]:
        results = scan.forward(tensors)
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        if scan.integers:
            ctx.mark_non_differentiable(*[results[k] for k in scan.integers])
        ctx.save_for_backward(*scan.saved(tensors, results))
        return tuple(results)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *cotangents: MaybeTensor) -> tuple[MaybeTensor, ...]:
        needed = ctx.needs_input_grad[1:]
        if all(g is None for g in cotangents):
            return (None,) * (len(needed) + 1)
        if _WANTED.carries_only:
            inputs = len(ctx.scan.spec.operator.inputs)
            needed = (*[False] * inputs, *needed[inputs:])
        return (None, *ctx.scan.gradients(ctx.saved_tensors, needed, cotangents))


class Context:
    """What `Scan.backward` reads of an autograd context."""

    def __init__(
        self, scan: Differentiable, saved: Sequence[MaybeTensor], needed: Sequence[bool]
    ) -> None:
        self.scan, self.saved_tensors, self.needs_input_grad = scan, saved, (False, *needed)


def backward_in_python(
    differentiable: Any, native_gradient: Any, saved: Sequence[MaybeTensor], needed: Sequence[bool],
    cotangents: Sequence[MaybeTensor],
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    """The backward of the C++ runner's autograd node where it needs Python. If the backward pass
    was made a list of commands that C++ can run, its program is inserted into the runner's cache,
    so that the next one needs no Python.

    differentiable: a `Differentiable` with a `BackwardLists`, `backward`. native_gradient: the
        `Gradient` of the C++ nodes, which has the runner's backward programs.
    """
    found = Scan.backward(Context(differentiable, saved, needed), *cotangents)[1:]
    given = (*saved, *cotangents)
    made = differentiable.backward.find(needed, given)
    if made is not None:
        program = None if runner.module is None else program_of(runner.module, made.executable)
        runner.insert_backward(native_gradient, needed, given, program, made.results)
    return found


class TransformedScan(SingleLevelFunction):
    """`Scan` for one level of torch.func and for forward mode; with generated and recomputed
    derivatives only."""

    @staticmethod
    def forward(scan: GeneratedGradient, *tensors: MaybeTensor) -> tuple[torch.Tensor, ...]:
        with outer_derivatives():
            outputs, finals = call(scan.dispatch.backend, scan.spec, scan.scanned(tensors))
        return (*outputs, *finals)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        scan: GeneratedGradient = inputs[0]
        tensors = inputs[1:]
        needed = ctx.needs_input_grad[1:]
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        integers = [t for t in output if not is_differentiable(t)]
        if integers:
            ctx.mark_non_differentiable(*integers)
        if scan.has_tangents:
            states = [output[k] for k in scan.output_of_state.values()]
            ctx.save_for_forward(*tensors, *states)
        if True not in needed:
            return
        scan.set_wanted(tensors, needed)
        ctx.save_for_backward(*scan.saved(tensors, output))

    backward = Scan.backward

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: MaybeTensor) -> tuple[MaybeTensor, ...]:
        scan: GeneratedGradient = ctx.scan
        if all(t is None for t in tangents):
            return (None,) * (len(scan.spec.operator.outputs) + len(scan.spec.final))
        with outer_derivatives() if in_functorch() else contextlib.nullcontext():
            return tuple(scan.tangents(ctx.saved_tensors, tangents))


def apply_here(scan: Any, tensors: Sequence[MaybeTensor]) -> tuple[torch.Tensor, ...]:
    """The results of `scan`, connected to the autograd graph of the innermost level: a transform of
    torch.func or forward mode, or none."""
    found: tuple[torch.Tensor, ...]
    if not in_functorch_or_forward_mode():
        found = Scan.apply(scan, *tensors)
    else:
        with single_level_functions():
            found = TransformedScan.apply(scan, *tensors)
    return found
