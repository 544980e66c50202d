"""Differentiable scans on generated engines.

`Scan` is one autograd function for forward scans, backward scans and the backward scans of those:
its backward derives the adjoint operator (`adjoint`) and runs it by the same engine. The state that
the adjoint reads is saved as further outputs of the forward kernel, only where no output already is
that state, and only when a gradient will be needed; inputs that it does not read are not saved.
Tangents (forward mode) are a scan too (`tangent`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..autodiff.tangent import derive_tangent
from ..engines.base.job import Job, Tensors, adjoint_reads, is_differentiable, refuse_matrices
from ..engines.base.problem import ScanProblem
from ..engines.base.steps import explicit
from ..engines.eager import interpreted
from ..errors import BackendError
from ..program.operator import Operator
from ..program.transforms import state_outputs, with_outputs
from ..torch_state import (
    in_functorch,
    in_functorch_or_forward_mode,
    is_dual,
    is_forward_mode,
    is_tracked,
    needs_dispatcher,
)
from .backward import Backward, Like
from .batched_gradients import takes_batches, vmapped
from .forward import Forward, tangent_request

Optional = torch.Tensor | None


def run(job: Job, tensors: Sequence[Optional]) -> tuple[Tensors, Tensors]:
    """Outputs and finals, differentiable where an input requires a gradient or has a tangent.

    Raises UnsupportedOperation where the operator's derivative cannot be generated.
    """
    if not is_tracked(tensors):
        return job.run(job.problem(tensors))
    count = len(job.operator.outputs)
    wanted = [t is not None and t.requires_grad for t in tensors]
    moves = [False] * len(tensors)
    if is_forward_mode():
        moves = [t is not None and is_dual(t) for t in tensors]
    operator = saving_operator(job, wanted, moves)
    if operator is not job.operator or True in moves:
        job = replace(job, operator=operator, moves=True in moves)
    results = list(apply_scan(job, tensors))
    finals = len(job.final)
    return results[:count], results[len(results) - finals :] if finals else []


def prepared_job(job: Job, wanted: Sequence[bool]) -> Job:
    """The job with the outputs that its backward scan reads, for gradients of these tensors."""
    return replace(job, operator=saving_operator(job, wanted, [False] * len(wanted)))


def saving_operator(job: Job, wanted: Sequence[bool], moves: Sequence[bool]) -> Operator:
    """The operator that also gives the states that a derivative reads and no output is.

    `wanted`, `moves`: which tensors of the job have a gradient and a tangent.
    """
    op = job.operator
    refuse_matrices(op)
    states: set[int] = set()
    if True in wanted:
        states.update(reads_of(job, wanted)[1])
    if True in moves:
        states.update(derive_tangent(op, tangent_request(job, moves)).states)
    known = state_outputs(op)
    return with_outputs(op, tuple(sorted([k for k in states if k not in known])))


def reads_of(job: Job, wanted: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input leaves and the state leaves that the job's backward scans read."""
    leaves = tuple([k for k in range(len(job.operator.inputs)) if wanted[k]])
    return adjoint_reads(job.operator, job.exclusive, job.has_init, leaves, job.final)


def differentiably(job: Job, problem: ScanProblem) -> tuple[Tensors, Tensors]:
    """A derivative's problem, by the job's engine; in the graph where a further derivative may be
    wanted. Where the engine cannot run it, `auto` has it run by torch operations."""
    try:
        if torch.is_grad_enabled() and not needs_dispatcher():
            return run(*Job.of(explicit(problem), job.engine, job.operation, job.falls_back))
        return job.run(problem)
    except BackendError as error:
        if not job.falls_back:
            raise
        return interpreted.scan_instead(problem, str(error))


@contextlib.contextmanager
def lower_levels() -> Iterator[None]:
    """Where the torch.func levels below this one see what is done, and this one does not.

    torch runs the forward and the jvp of an autograd.Function without derivatives, for every level.
    """
    with (
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        yield


# An autograd function that acts on one level of torch.func's transforms. `torch.autograd.Function`,
# which derives from it, hands a call to all levels, which the operation (`library`) has done
# already, and looks up the signature of `forward` at every call (15 µs). It is private to torch;
# checked on 2.11, 2.13 and 2.15.
if TYPE_CHECKING:
    SingleLevelFunction = torch.autograd.Function
else:
    SingleLevelFunction = torch.autograd.function._SingleLevelFunction


class Scan(SingleLevelFunction):
    """forward: (job, *inputs, *init) → (*outputs, *finals)."""

    @staticmethod
    def forward(job: Job, *tensors: Optional) -> tuple[torch.Tensor, ...]:
        if not in_functorch_or_forward_mode():
            outputs, finals = job.run(job.problem(tensors))
            return (*outputs, *finals)
        with lower_levels():
            outputs, finals = job.operation(job.problem(tensors))
        return (*outputs, *finals)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        job: Job = inputs[0]
        tensors = inputs[1:]
        needed = ctx.needs_input_grad[1:]
        ctx.job = job
        ctx.set_materialize_grads(False)
        integers = [t for t in output if not is_differentiable(t)]
        if integers:
            ctx.mark_non_differentiable(*integers)
        shown = state_outputs(job.operator)
        if job.moves:
            ctx.shown = shown
            ctx.save_for_forward(*tensors, *[output[k] for k in shown.values()])
        if True not in needed:
            return
        reads, states = reads_of(job, needed)
        ctx.like = like_of(tensors, needed)
        ctx.states = states
        saved: list[Optional] = [None] * len(tensors)
        for k in reads:
            saved[k] = tensors[k]
        if job.given and not job.exclusive:
            for k, leaf in enumerate(job.given, len(job.operator.inputs)):
                if leaf in states:
                    saved[k] = tensors[k]
        ctx.save_for_backward(*saved, *[output[shown[k]] for k in states])

    @staticmethod
    @takes_batches(vmapped)
    def backward(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
        if all(g is None for g in cotangents):
            return (None,) * (len(ctx.like) + 1)
        return (None, *gradients(ctx.job, backward_of(ctx, ctx.saved_tensors, cotangents)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Optional) -> tuple[Optional, ...]:
        saved, count = ctx.saved_tensors, len(tangents)
        states = dict(zip(ctx.shown, saved[count:], strict=True))
        if all(t is None for t in tangents):
            return (None,) * (len(ctx.job.operator.outputs) + len(ctx.job.final))
        with lower_levels() if in_functorch() else contextlib.nullcontext():
            pass_ = Forward(ctx.job, saved[:count], states, tangents)
            outputs, finals = differentiably(ctx.job, pass_.problem())
            return tuple(pass_.results(outputs, finals))


def like_of(tensors: Sequence[Optional], wanted: Sequence[bool]) -> list[Like]:
    """Shapes and dtypes of the tensors that a gradient is wanted of."""
    return [
        (t.shape, t.dtype) if wants and t is not None else None
        for t, wants in zip(tensors, wanted, strict=True)
    ]


def backward_of(ctx: Any, saved: Sequence[Optional], cotangents: Sequence[Optional]) -> Backward:
    """The backward pass from what a forward pass saved."""
    count = len(ctx.like)
    states = dict(zip(ctx.states, saved[count:], strict=True))
    needed = ctx.needs_input_grad[1:]
    return Backward(ctx.job, saved[:count], states, ctx.like, needed, cotangents)


def gradients(job: Job, pass_: Backward) -> list[Optional]:
    """What the backward pass finds, for every tensor of the job."""
    outputs, finals = differentiably(job, pass_.problem())
    return pass_.gradients(outputs, finals)


def apply_scan(job: Job, tensors: Sequence[Optional]) -> tuple[torch.Tensor, ...]:
    """`Scan.apply` at the current level."""
    if not in_functorch_or_forward_mode():
        results: tuple[torch.Tensor, ...] = Scan.apply(job, *tensors)
        return results
    from torch._functorch import autograd_function

    with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        results = Scan.apply(job, *tensors)
    return results
