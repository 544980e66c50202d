"""The CPU's kernels of `windowed` and of its gradient: what `windows.h` reads, and the call of it.

Elements have the layout [outer, steps, inner, components]: leaves that lie otherwise are copied. As
for scans the operator is the only generated part; its derivatives are vjps of its three programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ...program.operator import Operator
from ...program.operator_names import escaped
from ..base.commands import Slot
from ..base.cpp_and_cuda.windows import (
    Form,
    PortLists,
    WindowTexts,
    floats,
    is_windowable,
    pulled,
    scalar_bytes,
)
from ..base.executable import CommandList
from .compiler import load
from .kernel import OPERATIONS, SMALL, STEPS, WIDE, field, field_types, is_cheap
from .threads_and_jobs import SERIAL_BYTES

# The largest kernels: scalars of one step, and operations / OPERATIONS. The gradient of products of
# 4 × 4 matrices, 62, is compiled in 5 seconds (GCC 12.2, one core of the build machine). Larger
# operators are composed of scans.
MAX_WINDOW_COST = 64
# Windows whose states would take more than so many bytes, of the fewest lanes, are composed of
# scans too: from 2^18 steps of one float32 on.
MAX_STATES_BYTES = 1 << 27
# The states of a segment (`windows.h`) take about so many bytes, and it has at least so many steps.
SEGMENT_BYTES, SEGMENT_STEPS = 1 << 14, 16


@functools.lru_cache(maxsize=256)
def has_kernel(op: Operator) -> bool:
    """Whether windows of the operator have a kernel of their own."""
    operations = sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))
    scalars = len(op.lift.inputs) + op.width + len(op.lower.outputs)
    return is_windowable(op) and scalars + operations // OPERATIONS <= MAX_WINDOW_COST


def fits(op: Operator, width: int) -> bool:
    """Whether the states of windows of so many steps, and their cotangents, are not too large."""
    sizes = [leaf.components * scalar_bytes(leaf.accumulator) for leaf in op.state]
    return 6 * WIDE * width * sum(sizes) <= MAX_STATES_BYTES


@functools.lru_cache(maxsize=256)
def source(op: Operator, gradient: bool) -> str:
    """The whole translation unit. Leaves: inputs, then outputs, or for a gradient cotangents of the
    outputs that are floats, then gradients of the inputs that are."""
    found = pulled(op) if gradient else None
    types, states = field_types(op), op.combine.output_dtypes
    texts, lists = WindowTexts(op, types, field), PortLists(types)
    parts = [f"// windows of {escaped(op.name)}", '#include "scalar.h"', *texts.forward()]
    lists.add("INPUTS", "x", op.inputs, range(len(op.lift.inputs)), op.lift.inputs)
    lists.texts["STATE"] = [f"F({name}, {type_})" for type_, name in texts.fields(states, "s")]
    results = op.lower.output_dtypes
    if found is None:
        parts += texts.lowered()
        lists.add("OUTPUTS", "y", op.outputs, range(len(results)), results)
    else:
        parts += texts.derivatives(found)
        lists.texts["COTANGENTS"] = [f"F(c{c}, {types[states[c]]})" for c in found.carried]
        lists.add("GIVEN", "g", floats(op.outputs), found.given, results)
        lists.add("GRADIENTS", "z", floats(op.inputs), found.wanted, op.lift.inputs)
    sizes = ", ".join(str(leaf.components * scalar_bytes(leaf.dtype)) for leaf in lists.leaves)
    lines = [
        *lists.defines(),
        f"constexpr bool SMALL = {int(is_cheap(op))};",
        f"#define GRADIENT {int(gradient)}",
        f"constexpr bool READS_STATES = {int(found is None or found.reads_states)};",
        f"constexpr bool READS_INPUTS = {int(found is None or found.reads_inputs)};",
        f"constexpr int WIDE = {WIDE}, STEPS = {STEPS}, LEAVES = {len(lists.leaves)};",
        f"constexpr i64 SEGMENT_BYTES = {SEGMENT_BYTES}, SEGMENT_STEPS = {SEGMENT_STEPS};",
        f"constexpr i64 ELEMENT_BYTES[LEAVES] = {{{sizes}}};",
        '#include "windows.h"',
        "",
    ]
    return "\n".join([*parts, *lines])


def forward(
    commands: CommandList, op: Operator, inputs: Sequence[Slot], outputs: Sequence[Slot],
    form: Form, offsets: Slot | None,
) -> None:  # fmt: skip
    """Append the call that fills the outputs. Tensors are of the shape of the batch and the
    element, contiguous in the form's order of dimensions. offsets: int64."""
    call(commands, op, False, [*inputs, *outputs], form, offsets)


def backward(
    commands: CommandList, op: Operator, inputs: Sequence[Slot], cotangents: Sequence[Slot],
    gradients: Sequence[Slot], form: Form, offsets: Slot | None,
) -> None:  # fmt: skip
    """Append the call that fills the gradients of the inputs that are floats. cotangents: of the
    outputs that are floats."""
    call(commands, op, True, [*inputs, *cotangents, *gradients], form, offsets)


def call(
    commands: CommandList, op: Operator, gradient: bool, slots: Sequence[Slot], form: Form,
    offsets: Slot | None,
) -> None:  # fmt: skip
    operations = sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))
    function = load(source(op, gradient), operations <= SMALL, f"windows of operator {op.name!r}")
    outer, steps, inner = form.outer, form.steps, form.inner
    if not steps * outer * inner:
        return
    moved = sum(commands.spec_of(slot).nbytes for slot in slots)
    threads = torch.get_num_threads() if moved > SERIAL_BYTES else 1
    sequences = 1 if offsets is None else commands.spec_of(offsets).shape[0] - 1
    template = [
        outer, steps, inner, min(form.width, steps), int(form.reverse), sequences, 0, threads
    ]  # fmt: skip
    addresses = [] if offsets is None else [(6, offsets)]
    addresses += list(enumerate(slots, len(template)))
    commands.call_host(op.name, function, [*template, *(0 for _ in slots)], addresses)
