"""The Triton engine: lays a `ScanProblem` out as chains, chooses a tile and launches its kernel.

All that depends only on shapes, strides and flags is worked out once and kept (`Prepared`), so that
a warm call allocates its outputs and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...caching.bounded import BoundedCache
from ...errors import BackendError
from ..base.layout import (
    CollapsedDim,
    Layout,
    Strides,
    gather_tensors,
    initial_leaves,
    lay_out,
    scalar_size,
)
from ..base.problem import ScanProblem, check_memory
from . import loader as triton_loader
from .kernel import Cut, Port, TritonKernel
from .source import source
from .tiles import Shape, choose, forced_tile

_PREPARED: BoundedCache[Any, Prepared] = BoundedCache()

Tensors = dict[tuple[str, int], torch.Tensor]


@dataclass
class Prepared:
    """A kernel with every argument but its tensors."""

    launcher: Any
    kernel: TritonKernel
    grid: tuple[int, int, int]
    pointers: list[tuple[str, int]]
    integers: list[int]
    outputs: list[tuple[tuple[int, ...], Strides, torch.dtype]]
    finals: list[tuple[tuple[int, ...], torch.dtype]]
    copies: frozenset[tuple[str, int]]
    carries: tuple[int, ...]
    compiled: dict[tuple[bool, ...], Any] = field(default_factory=dict)


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem in one kernel: its outputs, and the final carries asked for."""
    tensors = gather_tensors(problem)
    prepared = prepare(problem, tensors)
    for name in prepared.copies:
        tensors[name] = tensors[name].contiguous()
    outputs, finals = allocate(prepared, problem, tensors)
    if math.prod(problem.carry_batch) != 0:
        tables = [] if problem.offsets is None else [problem.offsets.to(problem.device)]
        launch(prepared, tensors, tables)
    return outputs, finals


def allocate(
    prepared: Prepared, problem: ScanProblem, tensors: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and finals, entered among the tensors."""
    device = problem.device
    outputs = [
        torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, stride, dtype in prepared.outputs
    ]
    finals = [torch.empty(size, dtype=dtype, device=device) for size, dtype in prepared.finals]
    for k, t in enumerate(outputs):
        tensors["output", k] = t
    for k, t in zip(problem.final, finals, strict=True):
        tensors["final", k] = t
    return outputs, finals


def launch(prepared: Prepared, tensors: Tensors, tables: Sequence[torch.Tensor]) -> None:
    """Run the kernel. Triton's own launcher finds out anew, at every call, which arguments are
    aligned; here only the pointers are looked at, since the integers are always the same."""
    launch_given(prepared, [*(tensors[name] for name in prepared.pointers), *tables])


def launch_given(prepared: Prepared, given: Sequence[torch.Tensor]) -> None:
    """`launch` on the tensors in the kernel's order."""
    addresses = [t.data_ptr() for t in given]
    if 0 in addresses:
        check_memory(addresses, given)
    aligned = tuple([address % 16 == 0 for address in addresses])
    compiled = prepared.compiled.get(aligned)
    device = given[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        if compiled is not None:
            compiled[prepared.grid](*addresses, *prepared.integers)
        else:
            compile_and_launch(prepared, given, aligned)
    else:
        with torch.cuda.device(device):
            compile_and_launch(prepared, given, aligned)


def compile_and_launch(
    prepared: Prepared, given: Sequence[torch.Tensor], aligned: tuple[bool, ...]
) -> None:
    """Through Triton's launcher, which compiles what it does not know."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in given]
    options = {"num_warps": prepared.kernel.tile.warps, **float_options(given[0].device.type)}
    try:
        compiled = triton_loader.launch(
            prepared.launcher, prepared.grid, *real, *prepared.integers, **options
        )
    except Exception as error:
        if not type(error).__module__.startswith("triton"):
            raise
        words = str(error).strip().splitlines()
        raise BackendError(
            f"Triton cannot run the kernel of {prepared.kernel.operator.name!r}: "
            f"{type(error).__name__}{': ' + words[-1] if words else ''}"
        ) from error
    if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
        prepared.compiled[aligned] = compiled


@functools.cache
def float_options(device_type: str) -> dict[str, bool]:
    """Products and sums are rounded one by one, as on the CPU (memory is the limit anyway), and
    NVIDIA's mathematical functions keep denormals."""
    if device_type == "cuda" and torch.version.hip is None:
        return {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    return {"enable_fp_fusion": False}


def prepare(problem: ScanProblem, tensors: Tensors) -> Prepared:
    """The prepared launch for these shapes, strides and flags."""
    key = launch_key(problem, tensors)
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, build(problem, lay_out(problem, tensors)))
    return known


def launch_key(problem: ScanProblem, tensors: Tensors) -> tuple[Any, ...]:
    """All that a prepared launch depends on."""
    return (
        problem.operator, problem.batch, problem.axis, problem.reverse, problem.exclusive,
        problem.init is None, problem.from_identity, problem.final, tuple(problem.ahead),
        None if problem.offsets is None else len(problem.offsets), problem.device, forced_tile(),
        tuple((name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()),
    )  # fmt: skip


def build(
    problem: ScanProblem, layout: Layout, cut: Cut = "whole", chunks: int = 1, chunk_length: int = 0
) -> Prepared:
    """The kernel and its arguments; with a cut, for chunks of that many steps."""
    op, axis = problem.operator, problem.axis
    lanes = layout.rows[-1] if has_lanes(layout, axis) else None
    outer = layout.rows[:-1] if lanes else layout.rows
    groups = math.prod(row.size for row in outer)
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    repeats = sequences if cut == "whole" else chunks
    read = [w for (role, _), w in layout.walks.items() if role == "input"]
    shape = Shape(
        lanes is not None,
        lanes.size if lanes else groups * repeats,
        groups * repeats if lanes else 1,
        problem.length if cut == "whole" else chunk_length,
        max((scalar_size(w.dtype) for w in read), default=4),
        sum(scalar_size(w.dtype) * len(w.offsets) for w in read),
        processors(problem.device),
        problem.exclusive,
        shared_memory(problem.device),
    )
    tile = choose(op, shape, problem.device.type == "cpu")
    if lanes is None and tile.items > 1:
        raise AssertionError("rows are scanned with one item per segment")
    kernel = TritonKernel(
        op, tile, lanes is not None,
        lanes is None and problem.offsets is None and cut == "whole"
        and problem.length <= tile.steps,
        problem.reverse, problem.exclusive, len(outer), initial_leaves(problem), problem.final,
        tuple(problem.ahead), tuple(k for k, t in problem.ahead.items() if t is not None),
        ports(layout, axis, lanes, outer, cut, op.total(problem.final)),
        problem.offsets is not None, cut, is_wide(layout, problem),
    )  # fmt: skip
    programs = -(-shape.chains // tile.chains) * shape.outer
    return Prepared(
        triton_loader.load(source(kernel)), kernel, (programs, 1, 1),
        [(role, k) for role, k, _ in kernel.ports],
        integers(kernel, problem, layout, lanes, outer, shape, (chunks, chunk_length)),
        layout.outputs, layout.finals,
        frozenset(name for name, w in layout.walks.items() if w.copy),
        (groups, repeats, lanes.size if lanes else 1),
    )  # fmt: skip


def has_lanes(layout: Layout, axis: int) -> bool:
    """Whether the innermost dimension, rather than the axis, is contiguous."""
    if not layout.rows or layout.rows[-1].size < 2:
        return False
    inner = layout.rows[-1].by_name
    steps = {name: w.strides[axis] for name, w in layout.walks.items() if name[0] != "init"}
    closer = sum(
        inner[name] < step for name, step in steps.items()
        if name[0] in ("input", "output") and inner[name] and step
    )  # fmt: skip
    farther = sum(
        inner[name] > step for name, step in steps.items()
        if name[0] in ("input", "output") and inner[name] and step
    )  # fmt: skip
    return closer > farther


def ports(
    layout: Layout,
    axis: int,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    cut: Cut,
    total: list[int],
) -> tuple[tuple[str, int, Port], ...]:
    """Every leaf's port, in the order of the kernel's pointers."""
    found = []
    for (role, k), walk in layout.walks.items():
        if cut == "totals" and role != "input":
            continue
        inner = 0 if lanes is None else lanes.by_name[role, k]
        strides = tuple(None if row.by_name[role, k] else 0 for row in outer)
        port = Port(walk.dtype, walk.offsets, unit(walk.strides[axis]), unit(inner), strides)
        found.append((role, k, port))
    if cut != "whole":
        role = "after" if cut == "totals" else "before"
        found.extend((role, c, Port(torch.float32, (0,), 0, 1, ())) for c in total)
    return tuple(found)


def unit(stride: int) -> int | None:
    """A stride that is written into the kernel, or None."""
    return stride if stride in (0, 1) else None


def integers(
    kernel: TritonKernel, problem: ScanProblem, layout: Layout, lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim], shape: Shape, cut: tuple[int, int],
) -> list[int]:  # fmt: skip
    """The integer arguments: sizes, then the strides that the kernel asks for."""
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    values = {"length": problem.length, "lanes": shape.chains, "chains": shape.chains,
              "sequences": sequences, "chunks": cut[0], "chunk_length": cut[1]}  # fmt: skip
    values.update({f"size{d}": row.size for d, row in enumerate(outer)})
    found = [values[name] for name in kernel.sizes()]
    for role, k, which in kernel.strides():
        walk = layout.walks[role, k]
        if which == "step":
            found.append(walk.strides[problem.axis])
        elif which == "sequence":
            found.append(walk.sequence)
        elif which == "lane":
            assert lanes is not None
            found.append(lanes.by_name[role, k])
        else:
            found.append(outer[int(which.removeprefix("outer"))].by_name[role, k])
    return found


def is_wide(layout: Layout, problem: ScanProblem) -> bool:
    """Whether some offset, or the number of chains, needs 64 bits."""
    batch = problem.batch
    reach = max(
        sum((n - 1) * s for n, s in zip(batch, walk.strides, strict=True)) + max(walk.offsets)
        + walk.sequence * (0 if problem.offsets is None else len(problem.offsets))
        for walk in layout.walks.values() if walk.offsets
    )  # fmt: skip
    return max(reach, math.prod(problem.carry_batch), problem.length) >= 2**31 - 2**16


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; where there is no GPU (tests), that of an H100."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The shared memory that one program can have, in bytes; without a GPU that of an H100."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10) or 48 << 10)
