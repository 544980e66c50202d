"""Scans with gradients that are nothing but launches, forward and backward: what warm calls run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..engines.base.job import Job, Tensors
from ..errors import BackendError
from ..program.transforms import state_outputs
from ..torch_state import needs_dispatcher
from .autograd import Optional, SingleLevelFunction, backward_of, gradients, like_of, reads_of
from .backward import Backward
from .batched_gradients import takes_batches, vmapped
from .launch import Launch, is_forced

MAX_BACKWARD = 64


class Launches:
    """Those of a scan without init and finals: forward, and backward by what it is given."""

    def __init__(
        self, job: Job, launch: Launch, tensors: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> None:
        self.job, self.launch, self.device = job, launch, tensors[0].device
        shown = state_outputs(job.operator)
        reads, self.states = reads_of(job, wanted)
        self.like = like_of(tensors, wanted)
        self.reads = [k in reads for k in range(len(tensors))]
        self.shown = [shown[k] for k in self.states]
        kinds = [dtype for _, _, dtype in launch.prepared.outputs]
        self.integers = [
            k for k, d in enumerate(kinds) if not (d.is_floating_point or d.is_complex)
        ]
        self.back: BoundedCache[Any, tuple[Launch, tuple[int, ...]] | None] = BoundedCache(
            MAX_BACKWARD
        )

    def forward(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        found = self.launch.run(tensors, self.device)
        return (self.job.engine(self.job.problem(tensors)) if found is None else found)[0]

    def key(
        self, needed: tuple[bool, ...], saved: Sequence[Optional], cotangents: Sequence[Optional]
    ) -> Any:
        """What the backward launch depends on; None where it is not to be known."""
        if torch.is_grad_enabled() or needs_dispatcher() or is_forced():
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

    def remember(self, key: Any, pass_: Backward) -> None:
        """Keep the backward launch, its inputs by their places in what was saved followed by the
        cotangents, and which tensors its outputs are the gradients of."""
        launch, wanted = Launch.of(pass_.problem(), self.job.engine), pass_.adjoint.wanted
        sizes = [like[0] for like in (self.like[k] for k in wanted) if like is not None]
        if launch is None or [size for size, _, _ in launch.prepared.outputs] != sizes:
            self.back.keep(key, None)
            return
        op, count = self.job.operator, len(self.like)
        first = count + len(self.states)
        places = [
            *range(count),
            *(count + self.states.index(k) if k in self.states else -1
              for k in range(len(op.state))),
            *range(first, first + len(op.outputs)),
        ]  # fmt: skip
        self.back.keep(key, (launch.at(places), wanted))


class LaunchedScan(SingleLevelFunction):
    """forward: (launches, *inputs) → outputs."""

    @staticmethod
    def forward(ctx: Any, known: Launches, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        result: list[Optional] = [None] * (len(ctx.like) + 1)
        if all(g is None for g in cotangents):
            return tuple(result)
        known: Launches = ctx.known
        saved = ctx.saved_tensors
        key = known.key(ctx.needs_input_grad, saved, cotangents)
        back = None if key is None else known.back.get(key)
        if back is not None:
            launch, wanted = back
            try:
                found = launch.run((*saved, *cotangents), known.device)
            except BackendError:
                if not known.job.falls_back:
                    raise
                found = None
            if found is not None:
                for k, g in zip(wanted, found[0], strict=True):
                    result[k + 1] = g
                return tuple(result)
        pass_ = backward_of(ctx, saved, cotangents)
        if key is not None and key not in known.back:
            with contextlib.suppress(BackendError):  # raised again, or fallen back from, below
                known.remember(key, pass_)
        return (None, *gradients(ctx.job, pass_))
