"""`windowed` by kernels of its own (`engines/cpu/windows`, `cuda/windows`), where tensors are
memory that they can read. Calls and gradients are lists of commands, which repeated calls run again
(`runtime.prepared`). Second derivatives go through the composition of scans, as everything does
where tensors are not such memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...api.eager_gradient import through
from ...autodiff.verify import is_derivable
from ...cuda.windows import prepare as gpu
from ...engines.base.commands import Slot
from ...engines.base.cpp_and_cuda.windows import Form, pulled
from ...engines.base.executable import CommandList, Executable
from ...engines.base.executable import converted as in_dtype
from ...engines.base.explained_plan import Plan
from ...engines.base.scan_spec import (
    MaybeTensor,
    Strides,
    TensorSpec,
    dense_strides,
    memory_order,
    plain,
)
from ...engines.cpu import windows as cpu
from ...engines.cpu.compiler import why_unavailable
from ...engines.cpu.kernel import is_cheap
from ...errors import BackendError
from ...program.operator import Leaf, Operator
from ...pytrees import unflatten
from ...runtime import backends
from ...runtime.autograd import Scan
from ...runtime.batched_gradients import one_by_one
from ...runtime.native import runner
from ...runtime.prepared.backward_lists import (
    BackwardList,
    BackwardLists,
    commands_on,
    finished,
    summed,
)
from ...runtime.prepared.prepared_call import CacheEntry, PreparedCall
from ...runtime.scan_call import ScanCall
from ...torch_state import in_functorch_or_forward_mode, is_tracked
from ..operands import are_memory
from .windows_of_cotangents import Windowable, windowable

# The kernel uses blocks of `width` steps as lanes. With fewer than so many blocks in all chains
# together, scans are used, except for small calls (FEW_STEPS). Milliseconds of values and gradients
# of float32 (1, 2^20), kernel and scans, two threads: logaddexp of 16 blocks 95 and 161, of 8
# blocks 213 and 132; sums of 8 blocks 18 and 110, affine maps 82 and 78. Other programs used the
# same cores.
FEW_BLOCKS, FEW_OF_CHEAP = 16, 8
FEW_STEPS = 1 << 14
Leaves = list[Tensor]
# The same windows by scans: (leaves, offsets) ↦ outputs.
Composed = Callable[[Sequence[Tensor], Tensor | None], Leaves]


def cpu_takes(
    made_of: Windowable, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
) -> bool:
    """Whether the CPU's kernels are to make these windows. Their gradient recomputes the states;
    nothing but the inputs (and outputs, if the adjoint reads them) is saved."""
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


def gpu_takes(
    made_of: Windowable, call: ScanCall, width: int, offsets: Tensor | None, tracked: bool
) -> bool:
    """Whether the CUDA kernels are to. The forward pass saves the states between tiles (`gpu.Made`)
    for the gradient, unless that is made of windows of cotangents (`Windowable.adjoint`)."""
    op = made_of.operator
    if offsets is not None or width < 2 or not math.prod(call.batch):
        return False
    if backends.why_not_here(call.leaves[0].device, "cuda") is not None:
        return False
    return gpu.has_kernel(op) and (
        not tracked or made_of.adjoint is not None or gpu.has_gradient(op)
    )


@dataclass(frozen=True)
class WindowsSpec:
    """What `runtime.autograd` reads of the spec of a scan."""

    operator: Operator
    device: torch.device
    final: tuple[int, ...] = ()


class Windows:
    """One kind of call (`runtime.autograd.Differentiable`). It holds no tensor of the call: its
    tensors are the leaves, then offsets if there are any.

    order: the numbers of the batch dimensions, outermost in memory first, as `form` has them.
    executable: from the tensors to the outputs, and after them the states between tiles that a
        gradient on GPUs reads.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self, made_of: Windowable, call: ScanCall, width: int, tensors: Sequence[Tensor],
        on_cpu: bool, tracked: bool, composed: Composed,
    ) -> None:  # fmt: skip
        op = made_of.operator
        leaves = tensors[: len(op.inputs)]
        self.made_of, self.op, self.on_cpu, self.composed = made_of, op, on_cpu, composed
        self.tracked, self.batch = tracked, call.batch
        self.order = memory_order(call.batch, [(tuple(t.shape), t.stride()) for t in leaves])
        batch = tuple([call.batch[d] for d in self.order])
        self.form = Form(batch, self.order.index(call.axis), width, call.reverse)
        self.shapes = [tuple(t.shape) for t in leaves]
        self.is_packed = len(tensors) > len(leaves)
        self.spec = WindowsSpec(op, leaves[0].device)
        self.made: gpu.Made | None = None
        self.executable = self.forward_list(tensors)
        outputs, last = len(op.outputs), len(self.executable.outputs)
        self.reads = (True,) * len(tensors)
        self.saved_results = tuple(range(0 if made_of.reads_values else outputs, last))
        self.integers = [
            *(k for k, leaf in enumerate(op.outputs) if not leaf.dtype.is_floating_point),
            *range(outputs, last),
        ]
        self.backward = BackwardLists()

    def strides(self, leaf: Leaf) -> Strides:
        """Of a tensor with the shape of the batch and of this element, as kernels read it."""
        shape = (*self.form.batch, *leaf.shape)
        dense = dense_strides(shape)
        places = {d: k for k, d in enumerate(self.order)}
        count = len(self.order)
        return (*(dense[places[d]] for d in range(count)), *dense[count:])

    def placed(self, commands: CommandList, slot: Slot, leaf: Leaf) -> Slot:
        """A tensor as kernels read it: a copy, unless it is that already."""
        given = commands.spec_of(slot)
        shape, strides = (*self.batch, *leaf.shape), self.strides(leaf)
        same = given.shape == shape and all(
            s == e or n == 1 for n, s, e in zip(shape, given.strides, strides, strict=True)
        )
        if same or not math.prod(shape):
            return slot
        return commands.copy(slot, TensorSpec(shape, strides, given.dtype, given.device))

    def allocated(self, commands: CommandList, leaf: Leaf) -> Slot:
        return commands.allocate((*self.batch, *leaf.shape), leaf.dtype, self.strides(leaf))

    def offsets(self, commands: CommandList) -> Slot | None:
        if not self.is_packed:
            return None
        return commands.dense(in_dtype(commands, len(self.shapes), torch.int64))

    def forward_list(self, tensors: Sequence[Tensor]) -> Executable:
        op, commands = self.op, commands_on(tensors, self.spec.device)
        inputs = [self.placed(commands, k, leaf) for k, leaf in enumerate(op.inputs)]
        offsets = self.offsets(commands)
        if offsets is not None:
            commands.check_offsets(offsets, self.form.steps)
        outputs = [self.allocated(commands, leaf) for leaf in op.outputs]
        pulls = self.tracked and self.made_of.adjoint is None
        self.made = self.fill(commands, op, inputs, outputs, self.form, offsets, pulls)
        between = self.made.slots if pulls and self.made is not None else []
        return commands.build([*outputs, *between], [], self.plan)

    def fill(
        self, commands: CommandList, op: Operator, inputs: Sequence[Slot], outputs: Sequence[Slot],
        form: Form, offsets: Slot | None, gradient: bool,
    ) -> gpu.Made | None:  # fmt: skip
        if not self.on_cpu:
            return gpu.forward(commands, op, inputs, outputs, form, gradient)
        cpu.forward(commands, op, inputs, outputs, form, offsets)
        return None

    def plan(self) -> Plan:
        form = self.form
        return Plan(
            self.op.name, (form.outer, form.steps, form.inner), "windows", f"{form.width} steps",
            "", 0, "",
        )  # fmt: skip

    def results(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """All results, connected to the autograd graph."""
        if in_functorch_or_forward_mode():
            return self.composed(*self.parts(tensors))
        found: tuple[Tensor, ...] = Scan.apply(self, *tensors)
        return found

    def forward(self, tensors: Sequence[MaybeTensor]) -> Leaves:
        return runner.run(self.executable, tensors)[0]

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, *(results[k] for k in self.saved_results)]

    def parts(self, tensors: Sequence[Any]) -> tuple[list[Any], Any]:
        """Leaves, and offsets."""
        count = len(self.shapes)
        return list(tensors[:count]), tensors[count] if self.is_packed else None

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        """The gradient of each tensor."""
        count = len(self.op.outputs)
        cotangents, of_states = cotangents[:count], cotangents[count:]
        seeds = [g for g in cotangents if g is not None]
        tensors = [t for t in saved if t is not None]
        found: list[MaybeTensor] | None = None
        if not torch.is_grad_enabled() and are_memory(*seeds, *tensors):
            whole = [
                torch.zeros((*self.batch, *leaf.shape), dtype=leaf.dtype, device=self.spec.device)
                if g is None and leaf.dtype.is_floating_point else g
                for leaf, g in zip(self.op.outputs, cotangents, strict=True)
            ]  # fmt: skip
            given = [*saved, *(None if g is None else plain(g) for g in whole), *of_states]
            found = self.backward.gradients(
                needed, given, lambda: self.backward_list(needed, given), falls_back=True
            )
        if found is None:
            leaves, offsets = self.parts(tensors)
            found = through(
                lambda given: self.composed(given, offsets), leaves, needed[: len(leaves)],
                cotangents,
            )  # fmt: skip
            found += [None] * self.is_packed
        return found

    def backward_list(
        self, needed: Sequence[bool], given: Sequence[MaybeTensor]
    ) -> BackwardList | None:
        """given: leaves, offsets, what else is saved; then the cotangents of the outputs, and None
        for each of the states between tiles."""
        op, commands = self.op, commands_on(given, self.spec.device)
        adjoint, first = self.made_of.adjoint, len(self.reads) + len(self.saved_results)
        further = range(len(self.reads), first)  # the outputs, or the states between tiles
        seeds = [
            self.placed(commands, first + k, leaf)
            for k, leaf in enumerate(op.outputs) if leaf.dtype.is_floating_point
        ]  # fmt: skip
        inputs = []
        if adjoint is None or self.made_of.reads_values:
            inputs = [self.placed(commands, k, leaf) for k, leaf in enumerate(op.inputs)]
        wanted = [k for k, leaf in enumerate(op.inputs) if leaf.dtype.is_floating_point]
        made = [self.allocated(commands, op.inputs[k]) for k in wanted]
        offsets = self.offsets(commands)
        if adjoint is not None:
            form = replace(self.form, reverse=not self.form.reverse)
            if self.made_of.reads_values:
                pairs = zip(further, op.outputs, strict=True)
                seeds += [*(self.placed(commands, k, leaf) for k, leaf in pairs), *inputs]
            self.fill(commands, adjoint, seeds, made, form, offsets, False)
        elif self.made is None:
            cpu.backward(commands, op, inputs, seeds, made, self.form, offsets)
        else:
            if any(not commands.spec_of(k).is_dense for k in further):
                return None  # a hook on saved tensors gave back others
            at = dict(zip(self.executable.outputs[len(op.outputs) :], further, strict=True))
            gpu.backward(commands, op, inputs, seeds, made, self.made.at(at))
        gradients = {
            k: summed(commands, slot, self.shapes[k])
            for k, slot in zip(wanted, made, strict=True) if needed[k]
        }  # fmt: skip
        return finished(commands, gradients, len(self.reads), self.executable)


def in_one_pass(
    call: ScanCall, width: int, offsets: Tensor | None, backend: str | None,
    entry: CacheEntry | None, composed: Composed,
) -> Any:  # fmt: skip
    """The windows of a call; None where no kernel can make them, or scans are faster.

    entry: of this call in the cache, which is filled; None if it may not be cached.
    """
    op, leaves = call.traced.operator, call.leaves
    if type(op) is not Operator or not are_memory(*leaves):
        return None
    on_cpu = leaves[0].device.type == "cpu" and backend != "cuda"
    if backend not in ("auto", "cpu" if on_cpu else "cuda"):
        return None
    takes = cpu_takes if on_cpu else gpu_takes
    tracked, made_of = is_tracked(leaves), windowable(op)
    if not takes(made_of, call, width, offsets, tracked):
        return None
    if tracked and not is_derivable(call.operator, call.traced):  # scans warn
        return None
    packed = () if offsets is None else (offsets.to(leaves[0].device),)
    tensors: Sequence[Tensor] = (*(plain(t) for t in leaves), *packed)
    if entry is not None:
        if all(a is b for a, b in zip(entry.tensors, leaves, strict=False)):
            tensors = entry.tensors
        else:
            entry = None
    spec = call.traced.output_spec
    count = len(op.outputs)
    try:
        windows = Windows(made_of, call, width, tensors, on_cpu, tracked, composed)
        prepared = PreparedCall(
            windows.executable, windows if tracked else None, range(count),
            lambda ys: unflatten(list(ys), spec),
        )  # fmt: skip
        ys = prepared(tensors)
    except BackendError:  # no compiler took it, or there is no memory
        return None
    if entry is not None:
        entry.fill(prepared)
    return ys
