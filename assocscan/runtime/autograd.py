"""Differentiable scans: `Scan`, the autograd function around executables.

A gradient is a scan too: `GeneratedGradient` derives the adjoint operator (`autodiff.adjoint`) and
runs it by the same backend. State leaves that the adjoint reads are further outputs of the forward
kernel, unless an output already is that leaf; inputs that it does not read are not saved. Operators
without a generated adjoint get their gradient from `api.custom_adjoint` or `api.eager_gradient`,
which use the same autograd function. Forward mode and torch.func use `TransformedScan`.
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
from ..engines.base.scan_spec import Optional, ScanSpec
from ..engines.base.shifted_leaves import explicit
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
    return differentiable(dispatch, spec, tensors).apply(tensors)


def differentiable(
    dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[Optional]
) -> GeneratedGradient:
    """The forward scan as a `GeneratedGradient`, which saves what the gradients (of tensors that
    require one) and the tangents (of tensors that carry one) need."""
    wanted = [t is not None and t.requires_grad for t in tensors]
    has_tangents = [False] * len(tensors)
    if is_forward_mode():
        has_tangents = [t is not None and is_dual(t) for t in tensors]
    return GeneratedGradient(dispatch, spec, tensors, wanted, has_tangents)


def saving_operator(spec: Spec, wanted: Sequence[bool], has_tangents: Sequence[bool]) -> Operator:
    """The operator with further outputs: the state leaves that a derivative reads, without those
    that are an output already.

    wanted, has_tangents: for each tensor, whether it has a gradient, and a tangent.
    """
    op = spec.operator
    refuse_matrices(op)
    states: set[int] = set()
    if True in wanted:
        states.update(reads_of(spec, wanted)[1])
    if True in has_tangents:
        states.update(derive_tangent(op, tangent_request(spec, has_tangents)).states)
    known = state_outputs(op)
    saving: Operator = with_outputs(op, tuple(sorted([k for k in states if k not in known])))
    return saving


def reads_of(spec: Spec, wanted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input leaves and the state leaves that the backward scan may read."""
    leaves = tuple([k for k in range(len(spec.operator.inputs)) if wanted[k]])
    return adjoint_reads(spec.operator, spec.exclusive, spec.init is not None, leaves, spec.final)


def run_derivative(
    dispatch: Dispatch, spec: Spec, tensors: Sequence[Optional]
) -> tuple[Tensors, Tensors]:
    """Outputs and finals of a derivative's scan.

    Where gradients are enabled (create_graph) they are differentiable again. Where no engine can
    run the scan, `auto` runs it by torch operations, and a named backend raises BackendError.
    """
    try:
        if torch.is_grad_enabled() and not needs_dispatcher():
            return run(dispatch, *explicit(spec, tensors))
        return dispatch.run(spec, tensors)
    except BackendError as error:
        if not dispatch.falls_back:
            raise
        return interpreted.scan_instead(spec, tensors, str(error))


@contextlib.contextmanager
def outer_derivatives() -> Iterator[None]:
    """Context for the forward and the jvp of an autograd function under nested torch.func
    transforms: the scan inside is differentiated by the outer levels, not by this one.

    torch disables grad mode and forward AD for all levels while it runs an autograd function, so
    both are enabled again. Dispatch starts below the Autograd key, so that this level, which has
    the autograd function, does not differentiate the scan a second time.
    """
    with (
        torch.enable_grad(),
        forward_mode_set_to(True),
        BelowAutograd(),
    ):
        yield


class Differentiable(Protocol):
    """What `Scan` runs: a scan, what it saves, and its gradients.

    batched: runs the backward on batches of cotangents (`batched_gradients`).
    integers: the indices of the results of integer or bool dtype, which have no derivative.
    """

    batched: Mapped
    integers: Sequence[int]

    def forward(self, tensors: Sequence[Optional]) -> Sequence[torch.Tensor]:
        """The results: outputs (saved states among them), then finals; without derivatives."""

    def saved(
        self, tensors: Sequence[Optional], results: Sequence[torch.Tensor]
    ) -> Sequence[Optional]:
        """The tensors that `gradients` reads; None in the place of one that it does not read."""

    def gradients(
        self, saved: Sequence[Optional], needed: Sequence[bool], cotangents: Sequence[Optional]
    ) -> Sequence[Optional]:
        """The gradient of each tensor, for cotangents of the results; None where it is zero or not
        needed."""


class GeneratedGradient:
    """A scan whose gradient is the scan of the adjoint operator (`Differentiable`).

    wanted, has_tangents: for each tensor, whether it has a gradient, and a tangent (offsets have
    neither).

    count: how many tensors there are without the offsets; output_count: how many outputs there are
    without saved states.
    output_of_state: state leaf → index of the output that equals it.
    reads, states: which tensors and which state leaves are saved for the backward pass.
    executable: of the forward scan; set by the call cache where it keeps this object.
    backward: the executables of backward passes, used only with `executable`.
    """

    batched = staticmethod(vmapped)

    def __init__(
        self,
        dispatch: Dispatch,
        spec: Spec,
        tensors: Sequence[Optional],
        wanted: Sequence[bool],
        has_tangents: Sequence[bool],
    ) -> None:
        op = saving_operator(spec, wanted, has_tangents)
        self.spec = spec if op is spec.operator else replace(spec, operator=op)
        self.dispatch, self.has_tangents = dispatch, True in has_tangents
        self.output_count = len(spec.operator.outputs)
        self.offsets = None if spec.sequences is None else tensors[-1]
        self.count = len(tensors) - (self.offsets is not None)
        self.integers = integers_of(self.spec)
        self.output_of_state = state_outputs(op)
        self.like = like_of(tensors[: self.count], wanted)
        self.reads: Sequence[bool] = [False] * self.count
        self.states: tuple[int, ...] = ()
        if True in wanted:
            self.set_reads(wanted)
        self.executable: Executable | None = None
        self.backward: BoundedCache[Any, CachedBackward | None] = BoundedCache(MAX_BACKWARD)

    def set_reads(self, wanted: Sequence[bool]) -> None:
        """Set `reads` and `states`, for the gradients of these tensors."""
        spec, reads = self.spec, [False] * self.count
        leaves, self.states = reads_of(spec, wanted)
        for k in leaves:
            reads[k] = True
        if not spec.exclusive:  # y[t] is saved, and the y[t−1] of the first step is init
            for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
                reads[k] = leaf in self.states
        self.reads = reads

    def apply(self, tensors: Sequence[Optional]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph; saved states are dropped."""
        without_offsets = tensors[: self.count]
        if not in_functorch_or_forward_mode():
            results = list(Scan.apply(self, *without_offsets))
        else:
            with single_level_functions():
                results = list(TransformedScan.apply(self, *without_offsets))
        return results[: self.output_count], results[len(results) - len(self.spec.final) :]

    def with_offsets(self, tensors: Sequence[Optional]) -> Sequence[Optional]:
        """The tensors and, if the scan has them, the offsets: all of `spec.names`."""
        return tensors if self.offsets is None else [*tensors, self.offsets]

    def forward(self, tensors: Sequence[Optional]) -> Tensors:
        if self.executable is not None:
            with contextlib.suppress(Misaligned):
                outputs, finals = self.executable.run(tensors)
                return outputs + finals
        outputs, finals = self.dispatch.run(self.spec, self.with_offsets(tensors))
        return outputs + finals

    def saved(self, tensors: Sequence[Optional], results: Sequence[torch.Tensor]) -> list[Optional]:
        kept = [t if read else None for t, read in zip(tensors, self.reads, strict=True)]
        return kept + [results[self.output_of_state[k]] for k in self.states]

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
            self.spec,
            self.with_offsets(saved[: self.count]),
            states,
            self.like,
            needed,
            cotangents,
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
    """The indices of the results of integer or bool dtype, which have no derivative."""
    op = spec.operator
    kinds = [leaf.dtype for leaf in op.outputs] + [op.state[k].accumulator for k in spec.final]
    return [k for k, d in enumerate(kinds) if not (d.is_floating_point or d.is_complex)]


def like_of(tensors: Sequence[Optional], wanted: Sequence[bool]) -> list[Like]:
    """The shape and dtype of each tensor that has a gradient; None for the others."""
    return [
        (t.shape, t.dtype) if wants and t is not None else None
        for t, wants in zip(tensors, wanted, strict=False)
    ]


class Scan(SingleLevelFunction):
    """The autograd function: `apply(scan, *inputs, *init)` gives (*outputs, *finals)."""

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
    """`Scan` for one level of torch.func and for forward mode; with generated derivatives only."""

    @staticmethod
    def forward(scan: GeneratedGradient, *tensors: Optional) -> tuple[torch.Tensor, ...]:
        with outer_derivatives():
            outputs, finals = call(scan.dispatch.backend, scan.spec, scan.with_offsets(tensors))
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
        scan.set_reads(needed)
        scan.like = like_of(tensors, needed)
        ctx.save_for_backward(*scan.saved(tensors, output))

    backward = Scan.backward

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Optional) -> tuple[Optional, ...]:
        scan: GeneratedGradient = ctx.scan
        saved, count = ctx.saved_tensors, len(tangents)
        states = dict(zip(scan.output_of_state, saved[count:], strict=True))
        if all(t is None for t in tangents):
            return (None,) * (len(scan.spec.operator.outputs) + len(scan.spec.final))
        with outer_derivatives() if in_functorch() else contextlib.nullcontext():
            pass_ = Forward(scan.spec, scan.with_offsets(saved[:count]), states, tangents)
            outputs, finals = run_derivative(scan.dispatch, *pass_.scan())
            return tuple(pass_.results(outputs, finals))
