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
from typing import Any

import torch
from torch.autograd import forward_ad

from .backward import Backward
from .batched_gradients import takes_batches, vmapped
from .forward import Forward, tangent_request
from .job import Job, Tensors, adjoint_reads, is_differentiable, refuse_matrices
from .kept import Kept
from .launch import Launch, is_forced
from .modes import (
    in_other_mode,
    in_transform,
    is_dual,
    is_forward_mode,
    is_tracked,
    is_transformed,
)
from .operator import Operator
from .packing import explicit, state_outputs, with_outputs
from .problem import ScanProblem
from .tangent import derive_tangent

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
    return adjoint_reads(job.operator, job.exclusive, job.starts_from_carry, leaves, job.final)


def differentiably(job: Job, problem: ScanProblem) -> tuple[Tensors, Tensors]:
    """A derivative's problem, by the job's engine; in the graph where a further derivative may be
    wanted."""
    if torch.is_grad_enabled() and not in_other_mode():
        return run(*Job.of(explicit(problem), job.engine, job.operation))
    return job.run(problem)


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


class Scan(torch.autograd.Function):
    """forward: (job, *inputs, *init) → (*outputs, *finals)."""

    @staticmethod
    def forward(job: Job, *tensors: Optional) -> tuple[torch.Tensor, ...]:
        if not is_transformed():
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
        ctx.like = [
            (t.shape, t.dtype) if wants else None for t, wants in zip(tensors, needed, strict=True)
        ]
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
        pass_ = backward_of(ctx, ctx.saved_tensors, cotangents)
        outputs, finals = differentiably(ctx.job, pass_.problem())
        return (None, *pass_.gradients(outputs, finals))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Optional) -> tuple[Optional, ...]:
        saved, count = ctx.saved_tensors, len(tangents)
        states = dict(zip(ctx.shown, saved[count:], strict=True))
        if all(t is None for t in tangents):
            return (None,) * (len(ctx.job.operator.outputs) + len(ctx.job.final))
        with lower_levels() if in_transform() else contextlib.nullcontext():
            pass_ = Forward(ctx.job, saved[:count], states, tangents)
            outputs, finals = differentiably(ctx.job, pass_.problem())
            return tuple(pass_.results(outputs, finals))


def backward_of(ctx: Any, saved: Sequence[Optional], cotangents: Sequence[Optional]) -> Backward:
    """The backward pass from what a forward pass saved."""
    count = len(ctx.like)
    states = dict(zip(ctx.states, saved[count:], strict=True))
    needed = ctx.needs_input_grad[1:]
    return Backward(ctx.job, saved[:count], states, ctx.like, needed, cotangents)


class KnownScan:
    """A scan without init and finals of which the forward launch is known, and the backward
    launches by what they are given."""

    def __init__(
        self, job: Job, launch: Launch, tensors: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> None:
        self.job, self.launch, self.device = job, launch, tensors[0].device
        shown = state_outputs(job.operator)
        reads, self.states = reads_of(job, wanted)
        self.like = [
            (t.shape, t.dtype) if wants else None for t, wants in zip(tensors, wanted, strict=True)
        ]
        self.reads = [k in reads for k in range(len(tensors))]
        self.shown = [shown[k] for k in self.states]
        kinds = [dtype for _, _, dtype in launch.prepared.outputs]
        self.integers = [
            k for k, d in enumerate(kinds) if not (d.is_floating_point or d.is_complex)
        ]
        self.back: Kept[Any, tuple[Launch, tuple[int, ...]] | None] = Kept(64)

    def forward(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        found = self.launch.run(tensors, self.device)
        return (self.job.engine(self.job.problem(tensors)) if found is None else found)[0]

    def key(
        self, needed: tuple[bool, ...], saved: Sequence[Optional], cotangents: Sequence[Optional]
    ) -> Any:
        """What the backward launch depends on; None where it is not to be known."""
        if torch.is_grad_enabled() or in_other_mode() or is_forced():
            return None
        parts: list[Any] = [needed]
        for t in (*saved, *cotangents):
            if t is None:
                parts.append(None)
            elif type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_conj() or t.is_neg():
                return None
            else:
                parts += (t.dtype, t.stride())
        return tuple(parts)

    def remember(self, key: Any, pass_: Backward, problem: ScanProblem) -> None:
        """Keep the launch that the problem poses, its inputs by their places in what was saved
        followed by the cotangents, and which tensors its outputs are the gradients of."""
        launch = Launch.of(problem, self.job.engine)
        wanted = pass_.adjoint.wanted
        if launch is not None:
            alike = all(
                described is not None and described[0] == size
                for described, (size, _, _) in zip(
                    [self.like[k] for k in wanted], launch.prepared.outputs, strict=True
                )
            )
            op, count = self.job.operator, len(self.like)
            places = [
                *range(count),
                *(count + self.states.index(k) if k in self.states else -1
                  for k in range(len(op.state))),
                *range(count + len(self.states), count + len(self.states) + len(op.outputs)),
            ]  # fmt: skip
            launch.inputs = [places[k] for k in launch.inputs]
            if not alike:
                launch = None
        self.back.keep(key, None if launch is None else (launch, wanted))


class ScanKnown(torch.autograd.Function):
    """forward: (known, *inputs) → outputs, with nothing but launches where that can be."""

    @staticmethod
    def forward(ctx: Any, known: KnownScan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = known.forward(tensors)
        ctx.known, ctx.job, ctx.like, ctx.states = known, known.job, known.like, known.states
        ctx.set_materialize_grads(False)
        if known.integers:
            ctx.mark_non_differentiable(*[outputs[k] for k in known.integers])
        ctx.save_for_backward(
            *[t if read else None for t, read in zip(tensors, known.reads, strict=True)],
            *[outputs[k] for k in known.shown],
        )
        return tuple(outputs)

    @staticmethod
    @takes_batches(vmapped)
    def backward(ctx: Any, *cotangents: Optional) -> tuple[Optional, ...]:
        if all(g is None for g in cotangents):
            return (None,) * (len(ctx.like) + 1)
        known: KnownScan = ctx.known
        saved = ctx.saved_tensors
        key = known.key(ctx.needs_input_grad, saved, cotangents)
        back = None if key is None else known.back.get(key)
        if back is not None:
            launch, wanted = back
            found = launch.run((*saved, *cotangents), known.device)
            if found is not None:
                gradients: list[Optional] = [None] * (len(known.like) + 1)
                for k, g in zip(wanted, found[0], strict=True):
                    gradients[k + 1] = g
                return tuple(gradients)
        pass_ = backward_of(ctx, saved, cotangents)
        problem = pass_.problem()
        if key is not None and key not in known.back:
            known.remember(key, pass_, problem)
        outputs, finals = differentiably(ctx.job, problem)
        return (None, *pass_.gradients(outputs, finals))


_apply: Any = super(torch.autograd.Function, Scan).apply
apply_known: Any = super(torch.autograd.Function, ScanKnown).apply


def apply_scan(job: Job, tensors: Sequence[Optional]) -> tuple[torch.Tensor, ...]:
    """`Scan.apply` at the current level. `Function.apply` would hand a call under a torch.func
    transform to all levels, which the operation (`library`) has done already, and it looks up the
    signature of `forward` at every call (15 µs)."""
    if not is_transformed():
        results: tuple[torch.Tensor, ...] = _apply(job, *tensors)
        return results
    from torch._functorch import autograd_function

    with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
        results = _apply(job, *tensors)
    return results
