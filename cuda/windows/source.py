"""The CUDA C++ of windows: an operator, its derivatives, and what one kernel reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ...engines.base.windows import PortLists, WindowTexts, floats, pulled, scalar_bytes
from ...program.cpp_and_triton_expressions import CPP
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Leaf, Operator
from ...program.operator_names import escaped

KINDS = ("TOTALS", "RESULTS", "PULL", "GATHER")


@dataclass(frozen=True)
class WindowKernel:
    """One of the four kernels of `windows.cuh`.

    tile: the steps of a thread. lanes: the channels of a block; 0: read through shared memory.
    has_middle, has_ends: of what M consists.
    """

    operator: Operator
    kind: str
    tile: int
    lanes: int
    has_middle: bool
    has_ends: bool


def lists_of(kernel: WindowKernel) -> PortLists:
    """What a kernel reads and writes, in the order of its parameters."""
    op, lists = kernel.operator, PortLists(CPP.types)
    states, raw = op.combine.output_dtypes, op.lift.inputs
    every = range(op.width)

    def add_numbers(
        name: str, prefix: str, numbers: Sequence[int], kinds: Sequence[str], present: bool = True
    ) -> None:
        """A tensor for each scalar."""
        numbers = list(numbers) if present else []
        leaves = [Leaf(EXACT_DTYPES[kinds[c]]) for c in numbers]
        lists.add(name, prefix, leaves, numbers, kinds)

    lists.add("INPUTS", "x", op.inputs, range(len(raw)), raw)
    if kernel.kind in ("TOTALS", "RESULTS", "PULL"):
        add_numbers("MIDDLE", "s", every, states, kernel.has_middle)
        add_numbers("ENDS", "s", every, states, kernel.has_ends)
    results = op.lower.output_dtypes
    if kernel.kind == "RESULTS":
        lists.add("OUTPUTS", "y", op.outputs, range(len(results)), results)
    if kernel.kind in ("PULL", "GATHER"):
        found = pulled(op)
        assert found is not None
        if kernel.kind == "PULL":
            lists.add("GIVEN", "g", floats(op.outputs), found.given, results)
        add_numbers("HEADS", "z", found.wanted, raw)
        add_numbers("TAILS", "z", found.wanted, raw)
        add_numbers("MIDDLE_COTANGENT", "c", found.carried, states, kernel.has_middle)
        add_numbers("ENDS_COTANGENT", "c", found.carried, states, kernel.has_ends)
        if kernel.kind == "GATHER":
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
            f"constexpr int TILE = {kernel.tile}, LANES = {kernel.lanes};",
            f"constexpr int LEAVES = {len(lists.leaves)};",
            f"constexpr int STAGE_BYTES = {-(-element * 32 * kernel.tile // 16) * 16};",
            f"constexpr bool HAS_MIDDLE = {str(kernel.has_middle).lower()};",
            f"constexpr bool HAS_ENDS = {str(kernel.has_ends).lower()};",
            '#include "windows.cuh"', "",
        ]
    )  # fmt: skip
