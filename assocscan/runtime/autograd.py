"""Differentiable scans: `Scan`, the autograd function around executables.

A gradient is a scan too: `GeneratedGradient` derives the adjoint operator (`autodiff.adjoint`) and
runs it by the same backend. The state that the adjoint reads is saved as further outputs of the
forward kernel, only where no output already is that state; inputs that it does not read are not
saved. Operators without a generated adjoint have other ways to a gradient, which stand above
(`api.custom_adjoint`, `api.eager_gradient`) and are run by the same function. Tangents (forward
mode) and torch.func take `TransformedScan`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..autodiff.adjoint import adjoint_reads
from ..autodiff.tangent import derive_tangent
from ..caching.bounded import BoundedCache
from ..engines.base.executable import Executable, Misaligned, Tensors
from ..engines.base.shifted_leaves import explicit
from ..engines.base.spec import Optional, ScanSpec
from ..engines.eager import program_interpreter as interpreted
from ..errors import BackendError
from ..program.matrix_operator import refuse_matrices
from ..program.operator import Operator
from ..program.transforms import state_outputs, with_outputs
from ..torch_private import (
    BelowAutograd,
    SingleLevelFunction,
    forward_mode_set_to,
    single_level_functions,
)
from ..torch_state import (
    in_functorch,
    in_functorch_or_forward_mode,
    is_differentiable,
    is_dual,
    is_forward_mode,
    is_tracked,
    needs_dispatcher,
)
from .adjoint_scan import Backward, Like
from .backward_cache import MAX_BACKWARD, CachedBackward, cached_backward, layout_key
from .batched_gradients import Mapped, takes_batches, vmapped
from .operation_arguments import Dispatch, call
from .tangent_scan import Forward, tangent_request

Spec = ScanSpec[Operator]


def run(
    dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[Optional]
) -> tuple[Tensors, Tensors]:
    """Outputs and finals, differentiable where a tensor requires a gradient or has a tangent.

    Raises UnsupportedOperation where the operator's derivative cannot be generated.
    """
    if not is_tracked(tensors):
        return dispatch.run(spec, tensors)
    count = len(spec.operator.outputs)
    results = differentiable(dispatch, spec, tensors).apply(tensors)
    return results[:count], results[len(results) - len(spec.final) :]


def differentiable(
    dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[Optional]
) -> GeneratedGradient:
    """The scan of these tensors, for the gradients and tangents that they ask for."""
    wanted = [t is not None and t.requires_grad for t in tensors]
    moves = [False] * len(tensors)
    if is_forward_mode():
        moves = [t is not None and is_dual(t) for t in tensors]
    return GeneratedGradient(dispatch, spec, tensors, wanted, moves)


def saving_operator(spec: Spec, wanted: Sequence[bool], moves: Sequence[bool]) -> Operator:
    """The operator that also gives the states that a derivative reads and no output is.

    wanted, moves: which tensors have a gradient and a tangent.
    """
    op = spec.operator
    refuse_matrices(op)
    states: set[int] = set()
    if True in wanted:
        states.update(reads_of(spec, wanted)[1])
    if True in moves:
        states.update(derive_tangent(op, tangent_request(spec, moves)).states)
    known = state_outputs(op)
    saving: Operator = with_outputs(op, tuple(sorted([k for k in states if k not in known])))
    return saving


def reads_of(spec: Spec, wanted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input leaves and the state leaves that backward scans read."""
    leaves = tuple([k for k in range(len(spec.operator.inputs)) if wanted[k]])
    return adjoint_reads(spec.operator, spec.exclusive, spec.init is not None, leaves, spec.final)


def run_derivative(
    dispatch: Dispatch, spec: Spec, tensors: Sequence[Optional]
) -> tuple[Tensors, Tensors]:
    """A derivative's scan; in the graph where a further derivative may be wanted. Where the engine
    cannot run it, `auto` has it run by torch operations."""
    try:
        if torch.is_grad_enabled() and not needs_dispatcher():
            return run(dispatch, *explicit(spec, tensors))
        return dispatch.run(spec, tensors)
    except BackendError as error:
        if not dispatch.falls_back:
            raise
        return interpreted.scan_instead(spec, tensors, str(error))


@contextlib.contextmanager
def lower_levels() -> Iterator[None]:
    """Where the torch.func levels below this one see what is done, and this one does not.

    torch runs the forward and the jvp of an autograd.Function without derivatives, for every level.
    """
    with (
        torch.enable_grad(),
        forward_mode_set_to(True),
        BelowAutograd(),
    ):
        yield


class Differentiable(Protocol):
    """A scan and a way to its gradient.

    batched: how the backward runs batches of cotangents.
    integers: the results that are not differentiable.
    """

    batched: Mapped
    integers: Sequence[int]

    def forward(self, tensors: Sequence[Optional]) -> Sequence[torch.Tensor]:
        """Outputs and finals, without derivatives."""

    def saved(
        self, tensors: Sequence[Optional], results: Sequence[torch.Tensor]
    ) -> Sequence[Optional]:
        """What the gradients read."""

    def gradients(
        self, saved: Sequence[Optional], needed: Sequence[bool], cotangents: Sequence[Optional]
    ) -> Sequence[Optional]:
        """One per tensor, for cotangents of the results; None where it is zero or not needed."""


class GeneratedGradient:
    """A scan whose gradient is the scan of the adjoint operator (`Differentiable`).

    wanted, moves: which tensors have a gradient and a tangent; offsets have none.
    executable: of the forward scan, where the call cache keeps this.
    """

    batched = staticmethod(vmapped)

    def __init__(
        self,
        dispatch: Dispatch,
        spec: Spec,
        tensors: Sequence[Optional],
        wanted: Sequence[bool],
        moves: Sequence[bool],
    ) -> None:
        op = saving_operator(spec, wanted, moves)
        self.spec = spec if op is spec.operator else replace(spec, operator=op)
        self.dispatch, self.moves = dispatch, True in moves
        self.offsets = None if spec.sequences is None else tensors[-1]
        self.count = len(tensors) - (self.offsets is not None)
        self.integers = integers_of(self.spec)
        self.shown = state_outputs(op)
        self.like = like_of(tensors[: self.count], wanted)
        self.reads: Sequence[bool] = [False] * self.count
        self.states: tuple[int, ...] = ()
        if True in wanted:
            self.read_for(wanted)
        self.executable: Executable | None = None
        self.backward: BoundedCache[Any, CachedBackward | None] = BoundedCache(MAX_BACKWARD)

    def read_for(self, wanted: Sequence[bool]) -> None:
        """Which tensors and states are saved for the gradients of these tensors."""
        spec, reads = self.spec, [False] * self.count
        leaves, self.states = reads_of(spec, wanted)
        for k in leaves:
            reads[k] = True
        if not spec.exclusive:  # init stands before the first state
            for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
                reads[k] = leaf in self.states
        self.reads = reads

    def apply(self, tensors: Sequence[Optional]) -> Tensors:
        """Outputs and finals, in the graph."""
        own = tensors[: self.count]
        if not in_functorch_or_forward_mode():
            return list(Scan.apply(self, *own))
        with single_level_functions():
            return list(TransformedScan.apply(self, *own))

    def whole(self, tensors: Sequence[Optional]) -> Sequence[Optional]:
        """The tensors in the order of `spec.names`, with the offsets."""
        return tensors if self.offsets is None else [*tensors, self.offsets]

    def forward(self, tensors: Sequence[Optional]) -> Tensors:
        if self.executable is not None:
            with contextlib.suppress(Misaligned):
                outputs, finals = self.executable.run(tensors)
                return outputs + finals
        outputs, finals = self.dispatch.run(self.spec, self.whole(tensors))
        return outputs + finals

    def saved(self, tensors: Sequence[Optional], results: Sequence[torch.Tensor]) -> list[Optional]:
        kept = [t if read else None for t, read in zip(tensors, self.reads, strict=True)]
        return kept + [results[self.shown[k]] for k in self.states]

    def gradients(
        self, saved: Sequence[Optional], needed: Sequence[bool], cotangents: Sequence[Optional]
    ) -> list[Optional]:
        given = (*saved, *cotangents)
        key = None if self.executable is None else layout_key(needed, given)
        known = None if key is None else self.backward.get(key)
        if known is not None:
            try:
                return known.run(given)
            except Misaligned:
                pass
            except BackendError:
                if not self.dispatch.falls_back:
                    raise
        states = dict(zip(self.states, saved[self.count :], strict=True))
        pass_ = Backward(
            self.spec, self.whole(saved[: self.count]), states, self.like, needed, cotangents
        )
        spec, tensors = pass_.scan()
        outputs, finals = run_derivative(self.dispatch, spec, tensors)
        found = pass_.gradients(outputs, finals)
        if key is not None and key not in self.backward:
            made = cached_backward(
                self.dispatch.backend, spec, tensors, given, [*outputs, *finals], found
            )
            self.backward.keep(key, made)
        return found


def integers_of(spec: ScanSpec[Any]) -> list[int]:
    """The numbers of the results that are not differentiable."""
    op = spec.operator
    kinds = [leaf.dtype for leaf in op.outputs] + [op.state[k].accumulator for k in spec.final]
    return [k for k, d in enumerate(kinds) if not (d.is_floating_point or d.is_complex)]


def like_of(tensors: Sequence[Optional], wanted: Sequence[bool]) -> list[Like]:
    """Shapes and dtypes of the tensors that a gradient is wanted of."""
    return [
        (t.shape, t.dtype) if wants and t is not None else None
        for t, wants in zip(tensors, wanted, strict=False)
    ]


class Scan(SingleLevelFunction):
    """forward: (scan, *inputs, *init) → (*outputs, *finals)."""

    @staticmethod
    def forward(ctx: Any, scan: Differentiable, *tensors: Optional) -> tuple[torch.Tensor, ...]:
        results = scan.forward(tensors)
        ctx.scan = scan
        ctx.set_materialize_grads(False)
        if scan.integers:
            ctx.mark_non_differentiable(*[results[k] for k in scan.integers])
        ctx.save_for_backward(*scan.saved(tensors, results))
        return tuple(results)

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
        needed = ctx.needs_input_grad[1:]
        if all(g is None for g in cotangents):
            return (None,) * (len(needed) + 1)
        return (None, *ctx.scan.gradients(ctx.saved_tensors, needed, cotangents))


class TransformedScan(SingleLevelFunction):
    """`Scan` on one level of torch.func, and in forward mode, with generated derivatives."""

    @staticmethod
    def forward(scan: GeneratedGradient, *tensors: Optional) -> tuple[torch.Tensor, ...]:
        with lower_levels():
            outputs, finals = call(scan.dispatch.backend, scan.spec, scan.whole(tensors))
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
        if scan.moves:
            ctx.save_for_forward(*tensors, *[output[k] for k in scan.shown.values()])
        if True not in needed:
            return
        scan.read_for(needed)
        scan.like = like_of(tensors, needed)
        ctx.save_for_backward(*scan.saved(tensors, output))

    backward = Scan.backward

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Optional) -> tuple[Optional, ...]:
        scan: GeneratedGradient = ctx.scan
        saved, count = ctx.saved_tensors, len(tangents)
        states = dict(zip(scan.shown, saved[count:], strict=True))
        if all(t is None for t in tangents):
            return (None,) * (len(scan.spec.operator.outputs) + len(scan.spec.final))
        with lower_levels() if in_functorch() else contextlib.nullcontext():
            pass_ = Forward(scan.spec, scan.whole(saved[:count]), states, tangents)
            outputs, finals = run_derivative(scan.dispatch, *pass_.scan())
            return tuple(pass_.results(outputs, finals))
