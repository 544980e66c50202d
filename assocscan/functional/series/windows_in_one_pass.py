"""`windowed` by kernels of its own (`engines/cpu/windows`, `cuda/windows`), where tensors are
memory that they can read. Gradients are kernels too. Second derivatives go through the composition
of scans, as everything does where tensors are not such memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    op: Operator
    form: Form
    order: tuple[int, ...]
    offsets: Tensor | None
    engine: type[OnCpu] | type[OnGpu]
    tracked: bool
    composed: Callable[[Sequence[Tensor]], Leaves]

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
        found, states = self.engine.forward(self, given)
        return [self.back(t) for t in found], states

    def backward(
        self, leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None], states: Any
    ) -> Leaves:
        """The gradients of the leaves of floats, in their shapes."""
        given = [self.there(t.detach(), self.batch) for t in leaves]
        device = leaves[0].device
        seeds = [
            torch.zeros(self.form.batch + leaf.shape, dtype=leaf.dtype, device=device)
            if g is None else self.there(g, self.batch)
            for leaf, g in zip(self.op.outputs, cotangents, strict=True)
            if leaf.dtype.is_floating_point
        ]  # fmt: skip
        found = self.engine.backward(self, given, seeds, states)
        wanted = [t for t in leaves if t.is_floating_point()]
        return [self.back(g).sum_to_size(t.shape) for g, t in zip(found, wanted, strict=True)]


class OnCpu:
    """The CPU's kernel. It makes what its gradient needs a second time."""

    @staticmethod
    def takes(
        op: Operator, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
    ) -> bool:
        if why_unavailable() is not None or not cpu.has_kernel(op):
            return False
        if tracked and pulled(op) is None:
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
    def forward(windows: Windows, leaves: Leaves) -> tuple[Leaves, None]:
        return cpu.windows(windows.op, leaves, windows.form, windows.offsets), None

    @staticmethod
    def backward(windows: Windows, leaves: Leaves, cotangents: Leaves, states: None) -> Leaves:
        return cpu.gradients(windows.op, leaves, cotangents, windows.form, windows.offsets)


class OnGpu:
    """The CUDA kernels. Their gradient reads the states of tiles again."""

    @staticmethod
    def takes(
        op: Operator, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
    ) -> bool:
        if offsets is not None or width < 2 or not math.prod(call.batch):
            return False
        if backends.why_not_here(call.leaves[0].device, "cuda") is not None:
            return False
        return gpu.has_kernel(op) and (not tracked or gpu.has_gradient(op))

    @staticmethod
    def forward(windows: Windows, leaves: Leaves) -> tuple[Leaves, gpu.Made]:
        return gpu.windows(windows.op, leaves, windows.form, windows.tracked)

    @staticmethod
    def backward(windows: Windows, leaves: Leaves, cotangents: Leaves, states: gpu.Made) -> Leaves:
        return gpu.gradients(windows.op, leaves, cotangents, states)


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
    tracked = is_tracked(leaves)
    if not engine.takes(op, call, width, offsets, tracked):
        return None
    if tracked and not is_derivable(call.operator, call.traced):  # scans warn
        return None
    order = memory_order(call.batch, [(tuple(t.shape), t.stride()) for t in leaves])
    batch = tuple([call.batch[d] for d in order])
    form = Form(batch, order.index(call.axis), width, call.reverse)
    windows = Windows(op, form, order, offsets, engine, tracked, composed)
    try:
        ys = OnePass.apply(windows, *leaves) if tracked else windows.forward(leaves)[0]
    except BackendError:  # no compiler took it, or there is no memory
        return None
    return unflatten(list(ys), call.traced.output_spec)


class OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, windows: Windows, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.scan = windows
        ctx.save_for_backward(*leaves)
        ctx.set_materialize_grads(False)
        found, ctx.states = windows.forward(leaves)
        ys = tuple(y.data for y in found)  # torch refuses changes in place of a function's views
        ctx.mark_non_differentiable(*[y for y in ys if not y.is_floating_point()])
        return ys

    @staticmethod
    @takes_batches
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        windows, leaves = ctx.scan, ctx.saved_tensors
        given = [g for g in cotangents if g is not None]
        if not given:
            return (None, *(None for _ in leaves))
        if torch.is_grad_enabled() or not are_memory(*given, *leaves):
            return (None, *of_composition(windows, leaves, cotangents))
        found = iter(windows.backward(leaves, cotangents, ctx.states))
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
