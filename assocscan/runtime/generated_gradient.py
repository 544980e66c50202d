"""`GeneratedGradient`: a scan whose gradient is the scan of the adjoint operator.

The adjoint operator is derived (`autodiff.adjoint_operator`) and run by the same backend. State
leaves that it reads are further outputs of the forward kernel, unless an output already is that
leaf; inputs that it does not read are not saved. Operators without a generated adjoint get their
gradient from `api.custom_adjoint` or `api.eager_gradient`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..autodiff.adjoint_operator import adjoint_reads
from ..autodiff.tangent_operator import derive_tangent
from ..engines.base.commands import Tensors
from ..engines.base.executable import Executable
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..engines.base.shifted_leaves import explicit
from ..engines.eager import program_interpreter as interpreted
from ..errors import BackendError, UnsupportedOperation
from ..program.matrix_operator import refuse_matrices
from ..program.operator import Leaf, Operator
from ..program.transforms import state_outputs, with_outputs
from ..torch_state import (
    is_dual,
    is_forward_mode,
    is_tracked,
    needs_dispatcher,
)
from . import executable_cache as executables
from .autograd import apply_here, integers_of, outputs_and_finals
from .backward_pass import Backward, Like, may_walk
from .batched_gradients import vmapped
from .native import runner
from .operation_arguments import Dispatch
from .prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    viewed,
)
from .tangent_pass import Forward, tangent_request

Spec = ScanSpec[Operator]


def run(
    dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> tuple[Tensors, Tensors]:
    """Outputs and finals, differentiable where a tensor requires a gradient or has a tangent.

    Raises UnsupportedOperation where the operator's derivative cannot be generated.
    """
    if not is_tracked(tensors):
        return dispatch.run(spec, tensors)
    return differentiable(dispatch, spec, tensors).apply(tensors)


def differentiable(
    dispatch: Dispatch, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]
) -> GeneratedGradient:
    """The forward scan as a `GeneratedGradient`, which saves what the gradients (of tensors that
    require one) and the tangents (of tensors that carry one) need."""
    wanted = [t is not None and t.requires_grad for t in tensors]
    has_tangents = [False] * len(tensors)
    if is_forward_mode():
        has_tangents = [t is not None and is_dual(t) for t in tensors]
    return GeneratedGradient(dispatch, spec, tensors, wanted, has_tangents)


class GeneratedGradient:
    """A scan whose gradient is the scan of the adjoint operator (`Differentiable`).

    wanted, has_tangents: for each tensor, whether it has a gradient, and a tangent (offsets have
    neither).

    count: how many tensors there are; output_count: how many outputs there are without saved
    states.
    output_of_state: state leaf → index of the output that equals it.
    like: the shape and dtype of each tensor that has a gradient.
    reads, states: which tensors and which state leaves are saved for the backward pass; constant
        state leaves, which are read too, are saved as init.
    executable: of the forward scan; set where this object belongs to a prepared call.
    backward: the backward passes, used only with `executable`.
    """

    batched = staticmethod(vmapped)

    def __init__(
        self,
        dispatch: Dispatch,
        spec: Spec,
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool],
        has_tangents: Sequence[bool],
    ) -> None:
        op = saving_operator(spec, wanted, has_tangents)
        self.spec = spec if op is spec.operator else replace(spec, operator=op)
        self.dispatch, self.has_tangents = dispatch, True in has_tangents
        self.output_count = len(spec.operator.outputs)
        self.count = len(tensors)
        self.integers = integers_of(self.spec)
        self.output_of_state = state_outputs(op)
        self.like: Sequence[Like] = [None] * self.count
        self.reads: Sequence[bool] = [False] * self.count
        self.states: tuple[int, ...] = ()
        if True in wanted:
            self.set_wanted(tensors, wanted)
        self.executable: Executable | None = None
        self.backward = BackwardLists()

    def set_wanted(self, tensors: Sequence[MaybeTensor], wanted: Sequence[bool]) -> None:
        """Set `like`, `reads` and `states`, for the gradients of these tensors."""
        self.like = like_of(tensors, wanted)
        spec, reads = self.spec, [False] * self.count
        leaves, states = reads_of(spec, wanted)
        self.states = tuple([k for k in states if k not in spec.operator.constant])
        for k in leaves:
            reads[k] = True
        if not spec.exclusive:  # y[t] is saved, and the y[t−1] of the first step is init
            for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
                reads[k] = leaf in states
        if spec.sequences is not None:  # the offsets, which are last
            reads[-1] = True
        self.reads = reads

    @property
    def saved_results(self) -> tuple[int, ...]:
        """The numbers of the results that are saved."""
        return tuple([self.output_of_state[k] for k in self.states])

    def apply(self, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
        """Outputs and finals, connected to the autograd graph; saved states are dropped."""
        return outputs_and_finals(self.results(tensors), self.output_count, self.spec)

    def results(self, tensors: Sequence[MaybeTensor]) -> tuple[torch.Tensor, ...]:
        """Outputs, saved states among them, and finals, connected to the autograd graph."""
        return apply_here(self, tensors)

    def scanned(self, tensors: Sequence[MaybeTensor]) -> Sequence[MaybeTensor]:
        """The tensors of the scan, from those of the autograd function: the same, with offsets."""
        return tensors

    def forward(self, tensors: Sequence[MaybeTensor]) -> Tensors:
        if self.executable is not None:
            outputs, finals = runner.run(self.executable, tensors)
        else:
            outputs, finals = self.dispatch.run(self.spec, tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[torch.Tensor]
    ) -> list[MaybeTensor]:
        read = [t if reads else None for t, reads in zip(tensors, self.reads, strict=True)]
        return read + [results[self.output_of_state[k]] for k in self.states]

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        given = (*saved, *cotangents)
        if self.executable is not None:
            found = self.backward.gradients(
                needed, given, lambda: self.backward_list(needed, given), self.dispatch.falls_back
            )
            if found is not None:
                return found
        states = dict(zip(self.states, saved[self.count :], strict=True))
        states |= along_axis(self.spec, saved)
        rest = saved[: self.count], states, self.like, needed, cotangents
        if self.dispatch.scans_back and not (torch.is_grad_enabled() or needs_dispatcher()):
            op = replace(self.spec.operator, sequential=False)
            pass_ = Backward(replace(self.spec, operator=op), *rest)
            with contextlib.suppress(UnsupportedOperation, BackendError):
                outputs, finals = executables.run(self.dispatch.backend, *pass_.scan())
                results = (*outputs, *finals)
                if not results or bool(torch.stack([t.isfinite().all() for t in results]).all()):
                    return pass_.gradients(outputs, finals)
        pass_ = Backward(self.spec, *rest)
        outputs, finals = run_derivative(self.dispatch, *pass_.scan())
        return pass_.gradients(outputs, finals)

    def backward_list(
        self, needed: Sequence[bool], given: Sequence[MaybeTensor]
    ) -> BackwardList | None:
        """The backward pass from slots. None if it cannot be a list: a carry has several
        components, which are tensors of their own in the adjoint's scan, or the host must check the
        result first (`scans_back`)."""
        spec, saved = self.spec, self.count + len(self.states)
        if any(leaf.shape or leaf.dtype.is_complex for leaf in carried_leaves(spec)):
            return None
        # The scan counts only if its result is finite, which the host checks after it has run.
        if self.dispatch.scans_back:
            return None
        slots = [None if t is None else k for k, t in enumerate(given)]
        states = dict(zip(self.states, slots[self.count : saved], strict=True))
        commands, in_slot = commands_on(given, spec.device), dict(enumerate(given))
        first = len(spec.operator.inputs)
        for leaf, t in along_axis(spec, given).items():
            source, layout = first + (spec.init or ()).index(leaf), (tuple(t.shape), t.stride())
            slot, in_slot[slot] = viewed(commands, given, source, layout)
            states[leaf] = slot
        pass_ = Backward(spec, slots[: self.count], states, self.like, needed, slots[saved:])
        scan, places = pass_.scan()
        tensors = [None if k is None else in_slot[k] for k in places]
        executable = executables.prepare(self.dispatch.backend, scan, tensors)
        # The offsets are checked again: numpy, say, may have changed their memory since the forward
        # pass.
        if spec.sequences is not None and not executable.checks_offsets:
            commands.check_offsets(self.count - 1, spec.length)
        results = commands.inline(executable, places)
        return finished(commands, pass_.gradient_slots(commands, *results), self.count, executable)

    def tangents(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[MaybeTensor]
    ) -> Sequence[MaybeTensor]:
        """The tangent of each result. saved: the tensors, then the saved states."""
        count = len(tangents)
        states = dict(zip(self.output_of_state, saved[count:], strict=True))
        states |= along_axis(self.spec, saved)
        pass_ = Forward(self.spec, saved[:count], states, tangents)
        return pass_.results(*run_derivative(self.dispatch, *pass_.scan()))


def along_axis(spec: Spec, tensors: Sequence[MaybeTensor]) -> dict[int, torch.Tensor]:
    """The constant state leaves, which are the same at each step, in the shape of the batch: views
    of init, where that was saved.

    tensors: of the scan, the saved ones.
    """
    found = {}
    for k, leaf in enumerate(spec.init or (), len(spec.operator.inputs)):
        t = tensors[k]
        if leaf in spec.operator.constant and t is not None:
            if spec.sequences is not None:  # all packed sequences have the same
                t = t.select(0, 0) if spec.sequences else t.new_zeros(spec.carry_batch[1:])
            found[leaf] = t.unsqueeze(spec.axis).expand(spec.batch)
    return found


def carried_leaves(spec: Spec) -> list[Leaf]:
    """The leaves of init and of the finals."""
    return [spec.operator.state[k] for k in {*spec.final, *(spec.init or ())}]


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
    present = {*state_outputs(op), *op.constant}
    saving: Operator = with_outputs(op, tuple(sorted([k for k in states if k not in present])))
    return saving


def reads_of(spec: Spec, wanted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input leaves and the state leaves that the backward scan may read."""
    leaves = tuple([k for k in range(len(spec.operator.inputs)) if wanted[k]])
    has_init, walks = spec.init is not None, may_walk(spec)
    return adjoint_reads(spec.operator, spec.exclusive, has_init, leaves, spec.final, walks)


def run_derivative(
    dispatch: Dispatch, spec: Spec, tensors: Sequence[MaybeTensor]
) -> tuple[Tensors, Tensors]:
    """Outputs and finals of a derivative's scan.

    Where gradients are enabled (create_graph) they are differentiable themselves. Where no engine
    can run the scan, `auto` runs it by torch operations, and a named backend raises BackendError.
    """
    try:
        if torch.is_grad_enabled() and not needs_dispatcher():
            return run(dispatch, *explicit(spec, tensors))
        return dispatch.run(spec, tensors)
    except BackendError as error:
        if not dispatch.falls_back:
            raise
        return interpreted.scan_instead(spec, tensors, str(error))


def like_of(tensors: Sequence[MaybeTensor], wanted: Sequence[bool]) -> list[Like]:
    """The shape and dtype of each tensor that has a gradient; None for the others."""
    return [
        (t.shape, t.dtype) if wants and t is not None else None
        for t, wants in zip(tensors, wanted, strict=False)
    ]
