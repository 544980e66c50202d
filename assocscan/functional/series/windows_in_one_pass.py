"""`windowed` by kernels of its own (`engines/cpu/windows`, `cuda/windows`), where tensors are
memory that they can read. Gradients are kernels too. Second derivatives go through the composition
of scans, as everything does where tensors are not such memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...autodiff.verify import is_derivable
from ...cuda.windows import prepare as gpu
from ...engines.base.cpp_and_cuda.windows import Form, pulled
from ...engines.base.scan_spec import memory_order, plain
from ...engines.cpu import windows as cpu
from ...engines.cpu.compiler import why_unavailable
from ...engines.cpu.kernel import is_cheap
from ...errors import BackendError
from ...program.operator import Operator
from ...pytrees import unflatten
from ...runtime import backends
from ...runtime.batched_gradients import Mapped, one_by_one, takes_batches
from ...runtime.scan_call import ScanCall
from ...torch_state import is_tracked
from ..operands import are_memory
from .windows_of_cotangents import Windowable, windowable

# Where chains have fewer blocks of `width` steps together, which the kernel takes as lanes, it is
# left to scans, unless there is little to compute. Milliseconds of values and gradients of float32
# (1, 2^20), kernel and scans, two threads: logaddexp of 16 blocks 95 and 161, of 8 blocks 213 and
# 132; sums of 8 blocks 18 and 110, affine maps 82 and 78. Other programs used the same cores.
FEW_BLOCKS, FEW_OF_CHEAP = 16, 8
FEW_STEPS = 1 << 14
Leaves = list[Tensor]


@dataclass
class Windows:
    """One call. order: of the batch dimensions in memory, outermost first. composed: gives
    the same windows of the leaves by scans. batched: as `batched_gradients` takes it."""

    batched: ClassVar[Mapped] = staticmethod(one_by_one)

    made_of: Windowable
    form: Form
    order: tuple[int, ...]
    offsets: Tensor | None
    engine: type[OnCpu] | type[OnGpu]
    tracked: bool
    composed: Callable[[Sequence[Tensor]], Leaves]

    @property
    def op(self) -> Operator:
        return self.made_of.operator

    def there(self, t: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A leaf as the kernel reads it; shape: that of the batch, in the order of dimensions."""
        element = t.shape[len(self.order) :]
        rest = range(len(self.order), t.dim())
        return plain(t).expand(shape + element).permute(*self.order, *rest).contiguous()

    def back(self, t: Tensor) -> Tensor:
        places = sorted(range(len(self.order)), key=lambda d: self.order[d])
        return t.permute(*places, *range(len(places), t.dim()))

    @property
    def batch(self) -> tuple[int, ...]:
        places = sorted(range(len(self.order)), key=lambda d: self.order[d])
        return tuple([self.form.batch[d] for d in places])

    def forward(self, leaves: Sequence[Tensor]) -> tuple[Leaves, Any]:
        """The outputs, and what the engine keeps for `backward`."""
        given = [self.there(t.detach(), self.batch) for t in leaves]
        pulled_back = self.tracked and self.made_of.adjoint is None
        found, states = self.engine.forward(self.op, given, self.form, self.offsets, pulled_back)
        return [self.back(t) for t in found], states

    def backward(
        self,
        leaves: Sequence[Tensor],
        ys: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        states: Any,
    ) -> Leaves:
        """The gradients of the leaves of floats, in their shapes. ys: the outputs."""
        device = leaves[0].device
        seeds = [
            torch.zeros(self.form.batch + leaf.shape, dtype=leaf.dtype, device=device)
            if g is None else self.there(g, self.batch)
            for leaf, g in zip(self.op.outputs, cotangents, strict=True)
            if leaf.dtype.is_floating_point
        ]  # fmt: skip
        adjoint, reads_values = self.made_of.adjoint, self.made_of.reads_values
        given = []
        if adjoint is None or reads_values:
            given = [self.there(t.detach(), self.batch) for t in leaves]
        if adjoint is None:
            found = self.engine.backward(self.op, given, seeds, self.form, self.offsets, states)
        else:
            form = replace(self.form, reverse=not self.form.reverse)
            if reads_values:
                seeds += [self.there(y.detach(), self.batch) for y in ys] + given
            found, _ = self.engine.forward(adjoint, seeds, form, self.offsets, False)
        wanted = [t for t in leaves if t.is_floating_point()]
        return [self.back(g).sum_to_size(t.shape) for g, t in zip(found, wanted, strict=True)]


class OnCpu:
    """The CPU's kernel. It makes what its gradient needs a second time."""

    @staticmethod
    def takes(
        made_of: Windowable, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
    ) -> bool:
        op = made_of.operator
        if why_unavailable() is not None or not cpu.has_kernel(op):
            return False
        if tracked and made_of.adjoint is None and pulled(op) is None:
            return False
        steps = max(call.length, 1)
        if not cpu.fits(op, min(width, steps)):
            return False
        chains = torch.Size(call.batch).numel() // steps
        sequences = 1 if offsets is None else max(offsets.shape[0] - 1, 1)
        # Of one sequence of mean length.
        blocks = chains * -(-steps // (min(width, steps) * sequences))
        if sequences > 1:  # threads share sequences
            blocks *= 2
        least = FEW_OF_CHEAP if is_cheap(op) else FEW_BLOCKS
        return blocks >= least or chains * steps <= FEW_STEPS

    @staticmethod
    def forward(
        op: Operator, leaves: Leaves, form: Form, offsets: Tensor | None, gradient: bool
    ) -> tuple[Leaves, None]:
        return cpu.windows(op, leaves, form, offsets), None

    @staticmethod
    def backward(
        op: Operator, leaves: Leaves, cotangents: Leaves, form: Form, offsets: Tensor | None,
        states: None,
    ) -> Leaves:  # fmt: skip
        return cpu.gradients(op, leaves, cotangents, form, offsets)


class OnGpu:
    """The CUDA kernels. Their gradient reads the states of tiles again."""

    @staticmethod
    def takes(
        made_of: Windowable, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
    ) -> bool:
        op = made_of.operator
        if offsets is not None or width < 2 or not math.prod(call.batch):
            return False
        if backends.why_not_here(call.leaves[0].device, "cuda") is not None:
            return False
        return gpu.has_kernel(op) and (
            not tracked or made_of.adjoint is not None or gpu.has_gradient(op)
        )

    @staticmethod
    def forward(
        op: Operator, leaves: Leaves, form: Form, offsets: Tensor | None, gradient: bool
    ) -> tuple[Leaves, gpu.Made]:
        return gpu.windows(op, leaves, form, gradient)

    @staticmethod
    def backward(
        op: Operator, leaves: Leaves, cotangents: Leaves, form: Form, offsets: Tensor | None,
        states: gpu.Made,
    ) -> Leaves:  # fmt: skip
        return gpu.gradients(op, leaves, cotangents, states)


def in_one_pass(
    call: ScanCall, width: int, offsets: Tensor | None, backend: str | None,
    composed: Callable[[Sequence[Tensor]], Leaves],
) -> Any:  # fmt: skip
    """The windows of a call; None where no kernel can make them, or scans are faster."""
    op, leaves = call.traced.operator, call.leaves
    if type(op) is not Operator or not are_memory(*leaves):
        return None
    on_cpu = leaves[0].device.type == "cpu" and backend != "cuda"
    if backend not in ("auto", "cpu" if on_cpu else "cuda"):
        return None
    engine: type[OnCpu] | type[OnGpu] = OnCpu if on_cpu else OnGpu
    tracked, made_of = is_tracked(leaves), windowable(op)
    if not engine.takes(made_of, call, width, offsets, tracked):
        return None
    if tracked and not is_derivable(call.operator, call.traced):  # scans warn
        return None
    order = memory_order(call.batch, [(tuple(t.shape), t.stride()) for t in leaves])
    batch = tuple([call.batch[d] for d in order])
    form = Form(batch, order.index(call.axis), width, call.reverse)
    windows = Windows(made_of, form, order, offsets, engine, tracked, composed)
    try:
        ys = OnePass.apply(windows, *leaves) if tracked else windows.forward(leaves)[0]
    except BackendError:  # no compiler took it, or there is no memory
        return None
    return unflatten(list(ys), call.traced.output_spec)


class OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, windows: Windows, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.scan = windows
        ctx.set_materialize_grads(False)
        found, ctx.states = windows.forward(leaves)
        ys = tuple(y.data for y in found)  # torch refuses changes in place of a function's views
        ctx.save_for_backward(*leaves, *(ys if windows.made_of.reads_values else ()))
        ctx.mark_non_differentiable(*[y for y in ys if not y.is_floating_point()])
        return ys

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        windows = ctx.scan
        count = len(windows.op.inputs)
        leaves, ys = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        given = [g for g in cotangents if g is not None]
        if not given:
            return (None, *(None for _ in leaves))
        if torch.is_grad_enabled() or not are_memory(*given, *leaves):
            return (None, *of_composition(windows, leaves, cotangents))
        found = iter(windows.backward(leaves, ys, cotangents, ctx.states))
        return (None, *(next(found) if t.is_floating_point() else None for t in leaves))


def of_composition(
    windows: Windows, leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, or mapped."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        # Of views, so that no gradient passes through what the leaves come from.
        views = [t.view_as(t) if t.requires_grad else t for t in leaves]
        ys = windows.composed(views)
        pairs = [
            (y, g) for y, g in zip(ys, cotangents, strict=True) if g is not None and y.requires_grad
        ]
        wanted = [t for t in views if t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [g for _, g in pairs],
                create_graph=further, allow_unused=True,
            )
        )  # fmt: skip
    return [next(found) if t.requires_grad else None for t in leaves]
