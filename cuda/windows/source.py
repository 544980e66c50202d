"""The CUDA C++ of windows: an operator, its derivatives, and what one kernel reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ...engines.base.cpp_and_cuda.windows import (
    PortLists,
    WindowTexts,
    floats,
    pulled,
    scalar_bytes,
)
from ...program.cpp_and_triton_expressions import CPP
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Leaf, Operator
from ...program.operator_names import escaped

# The fewest blocks of a multiprocessor, which bound a thread's registers, where channels are lanes.
MIN_BLOCKS = {"TOTALS": 1, "RESULTS": 1, "PULL": 3, "GATHER": 3}
KINDS = ("TOTALS", "RESULTS", "PULL", "GATHER")


@dataclass(frozen=True)
class WindowKernel:
    """One of the four kernels of `windows.cuh`.

    tile: the steps of a larger tile. even: whether all have as many. lanes: the channels of a
    block; 0: read through shared memory. has_m: whether tiles lie between those of a window's ends.
    """

    operator: Operator
    kind: str
    tile: int
    even: bool
    lanes: int
    has_m: bool


def lists_of(kernel: WindowKernel) -> PortLists:
    """What a kernel reads and writes, in the order of its parameters."""
    op, lists = kernel.operator, PortLists(CPP.types)
    states, raw = op.combine.output_dtypes, op.lift.inputs

    def add_numbers(name: str, prefix: str, numbers: Sequence[int]) -> None:
        """A tensor for each of these scalars of a state; none where there is no M."""
        numbers = list(numbers) if kernel.has_m else []
        leaves = [Leaf(EXACT_DTYPES[states[c]]) for c in numbers]
        lists.add(name, prefix, leaves, numbers, states)

    lists.add("INPUTS", "x", op.inputs, range(len(raw)), raw)
    add_numbers("TOTAL" if kernel.kind == "TOTALS" else "MIDDLE", "s", range(op.width))
    results = op.lower.output_dtypes
    if kernel.kind == "RESULTS":
        lists.add("OUTPUTS", "y", op.outputs, range(len(results)), results)
    if kernel.kind in ("PULL", "GATHER"):
        found = pulled(op)
        assert found is not None
        lists.add("GIVEN", "g", floats(op.outputs), found.given, results)
        if kernel.kind == "PULL":
            add_numbers("MIDDLE_COTANGENT", "c", found.carried)
        else:
            add_numbers("TOTAL_COTANGENT", "c", found.carried)
            lists.add("GRADIENTS", "z", floats(op.inputs), found.wanted, raw)
    return lists


@functools.lru_cache(maxsize=256)
def source(kernel: WindowKernel) -> str:
    """The whole translation unit."""
    op, lists = kernel.operator, lists_of(kernel)
    texts = WindowTexts(op, CPP.types, lambda name, kind: name)
    parts = [*texts.forward(), *(texts.lowered() if kernel.kind == "RESULTS" else [])]
    if kernel.kind in ("PULL", "GATHER"):
        found = pulled(op)
        assert found is not None
        parts += [*texts.derivatives(found), texts.summed(found)]
    element = max(leaf.components * scalar_bytes(leaf.dtype) for leaf in lists.leaves)
    return "\n".join(
        [
            f"// windows of {escaped(op.name)}",
            '#include "scalar.h"', '#include "device.cuh"', *parts, *lists.defines(),
            *(f"#define {kind} {k}" for k, kind in enumerate(KINDS)),
            f"#define KIND {kernel.kind}",
            f"#define HAS_M {int(kernel.has_m)}",
            f"constexpr int TILE = {kernel.tile}, LANES = {kernel.lanes};",
            f"constexpr int MIN_BLOCKS = {MIN_BLOCKS[kernel.kind] if kernel.lanes else 1};",
            f"constexpr bool EVEN = {str(kernel.even).lower()};",
            f"constexpr int LEAVES = {len(lists.leaves)};",
            f"constexpr int STAGE_BYTES = {-(-element * 32 * kernel.tile // 16) * 16};",
            '#include "windows.cuh"', "",
        ]
    )  # fmt: skip
