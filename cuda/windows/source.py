"""The CUDA C++ of windows: an operator, its derivatives and the ports of one kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engines.base.windows import Pulled, derivatives, operator_texts, ports, pulled
from ...program.cpp_and_triton_expressions import CPP
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Leaf, Operator
from ...program.operator_names import escaped

KINDS = ("TOTALS", "RESULTS", "PULL", "GATHER")
Ports = list[tuple[torch.dtype, int]]


@dataclass(frozen=True)
class WindowKernel:
    """One of the four kernels (`windows.cuh`).

    of_states: over states as they are, each number a tensor of its own, in place of inputs.
    tile: the steps of a thread. lanes: the channels of a block; 0: through shared memory.
    has_middle, has_ends: of what M consists.
    """

    operator: Operator
    kind: str
    of_states: bool
    tile: int
    lanes: int
    has_middle: bool
    has_ends: bool


class Lists:
    """The lists of ports of a kernel; leaves are numbered as they are added."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.leaves: Ports = []

    def add(self, name: str, leaves: Sequence[Leaf], names: Sequence[tuple[str, str]]) -> None:
        self.texts[name] = ports(leaves, names, len(self.leaves))
        self.leaves += [(t.dtype, t.components) for t in leaves]

    def add_numbers(self, name: str, fields: Sequence[tuple[str, str]]) -> None:
        """A tensor for each number; fields: names and kinds."""
        leaves = [Leaf(EXACT_DTYPES[kind]) for _, kind in fields]
        self.add(name, leaves, [(n, CPP.types[kind]) for n, kind in fields])


def lists_of(kernel: WindowKernel) -> Lists:
    """What a kernel reads and writes, in the order of its parameters."""
    op, found = kernel.operator, Lists()
    states = op.combine.output_dtypes
    state = [(f"s{c}", kind) for c, kind in enumerate(states)]
    grads = pulled(op) if kernel.kind in ("PULL", "GATHER") else None

    def of_leaves(name: str, leaves: Sequence[Leaf], prefix: str, numbers: Sequence[int],
                  kinds: Sequence[str]) -> None:  # fmt: skip
        names = [(f"{prefix}{c}", CPP.types[kinds[c]]) for c in numbers]
        found.add(name, leaves, names)

    if kernel.of_states:
        found.add_numbers("INPUTS", [(f"x{c}", kind) for c, kind in enumerate(states)])
    else:
        of_leaves("INPUTS", op.inputs, "x", range(len(op.lift.inputs)), op.lift.inputs)
    if kernel.kind == "TOTALS":
        found.add_numbers("WHOLE", state if kernel.has_middle else [])
        found.add_numbers("ENDS", state if kernel.has_ends else [])
    if kernel.kind in ("RESULTS", "PULL"):
        found.add_numbers("MIDDLE", state if kernel.has_middle else [])
        found.add_numbers("ENDS", state if kernel.has_ends else [])
    if kernel.kind == "RESULTS":
        kinds = op.lower.output_dtypes
        if kernel.of_states:
            found.add_numbers("OUTPUTS", [(f"y{c}", kind) for c, kind in enumerate(states)])
        else:
            of_leaves("OUTPUTS", op.outputs, "y", range(len(kinds)), kinds)
    if grads is None:
        return found
    carried = [(f"c{c}", states[c]) for c in grads.carried]
    if kernel.of_states:
        wanted = [(f"z{c}", states[c]) for c in grads.carried]
    else:
        wanted = [(f"z{c}", op.lift.inputs[c]) for c in grads.wanted]
    if kernel.kind == "PULL":
        if kernel.of_states:
            found.add_numbers("GIVEN", [(f"g{c}", states[c]) for c in grads.carried])
        else:
            given = [t for t in op.outputs if t.dtype.is_floating_point]
            of_leaves("GIVEN", given, "g", grads.given, op.lower.output_dtypes)
        found.add_numbers("HEADS", wanted)
        found.add_numbers("TAILS", wanted)
        found.add_numbers("MIDDLE_COTANGENT", carried if kernel.has_middle else [])
        found.add_numbers("ENDS_COTANGENT", carried if kernel.has_ends else [])
    else:
        found.add_numbers("HEADS", wanted)
        found.add_numbers("TAILS", wanted)
        found.add_numbers("WHOLE_COTANGENT", carried if kernel.has_middle else [])
        found.add_numbers("ENDS_COTANGENT", carried if kernel.has_ends else [])
        if kernel.of_states:
            found.add_numbers("GRADIENTS", wanted)
        else:
            floats = [t for t in op.inputs if t.dtype.is_floating_point]
            of_leaves("GRADIENTS", floats, "z", grads.wanted, op.lift.inputs)
    return found


@functools.lru_cache(maxsize=256)
def source(kernel: WindowKernel) -> str:
    """The whole translation unit."""
    op, lists = kernel.operator, lists_of(kernel)
    grads = pulled(op) if kernel.kind in ("PULL", "GATHER") else None
    texts = operator_texts(op, kernel.of_states)
    if grads is not None:
        texts += derivatives(op, grads, kernel.of_states)
    stage = max(n * dtype_bytes(dtype) for dtype, n in lists.leaves) * 32 * kernel.tile
    defines = [f"#define {name}(F) {' '.join(entries)}" for name, entries in lists.texts.items()]
    return "\n".join(
        [
            f"// windows of {escaped(op.name)}",
            '#include "scalar.h"', '#include "device.cuh"',
            *texts, *defines,
            *(f"#define {kind} {k}" for k, kind in enumerate(KINDS)),
            f"#define KIND {kernel.kind}",
            f"constexpr int TILE = {kernel.tile}, LANES = {kernel.lanes};",
            f"constexpr int LEAVES = {len(lists.leaves)}, STAGE_BYTES = {-(-stage // 16) * 16};",
            f"constexpr bool HAS_MIDDLE = {str(kernel.has_middle).lower()};",
            f"constexpr bool HAS_ENDS = {str(kernel.has_ends).lower()};",
            '#include "windows.cuh"', "",
        ]
    )  # fmt: skip


def dtype_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize // (2 if dtype.is_complex else 1)


__all__ = ["KINDS", "Pulled", "WindowKernel", "lists_of", "source"]
