"""`explain`: how a scan would run, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..cuda import scan as cuda_scan
from ..cuda.kernel import LanesTile
from ..engines.base.layout import gather_tensors, lay_out, walk_bytes
from ..engines.base.problem import ScanProblem
from ..engines.cpu import scan as cpu
from ..engines.cpu.compiler import compiler_version
from ..engines.cpu.kernel import STEPS, WIDE
from ..engines.cpu.route import differences
from ..engines.triton import multipass
from ..engines.triton import scan as triton_scan
from ..errors import BackendError
from ..pytrees import leaf_paths
from ..runtime import backends as engines
from ..runtime import gpu_choice as gpu
from ..runtime.call import ScanCall
from .arguments import bind
from .keywords import flag, known_keywords, refuse_unknown, require_choice


@dataclass(frozen=True)
class Plan:
    """What `explain` returns; printing it gives one line per field.

    normal_form: (outer, length, inner) after dimensions were joined.
    engine, tile, grid: who runs it, on tiles of which shape, by how many threads.
    bytes_moved: each input read once, each output written once.
    why: the reason for the engine and the walk.
    """

    operator: str
    normal_form: tuple[int, int, int]
    engine: str
    tile: str
    grid: str
    bytes_moved: int
    why: str

    def __str__(self) -> str:
        outer, length, inner = self.normal_form
        rows = {
            "operator": self.operator,
            "normal form": f"[outer {outer}, length {length}, inner {inner}]",
            "engine": self.engine,
            "tile": self.tile,
            "grid": self.grid,
            "bytes moved": f"{self.bytes_moved:,}",
            "why": self.why,
        }
        return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


@known_keywords
def explain(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    init: Any = None,
    return_final: bool = False,
    offsets: torch.Tensor | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
    **unknown: NoReturn,
) -> Plan:
    """The `Plan` of `associative_scan` with the same arguments; nothing is scanned.

    >>> import torch
    >>> from assocscan import explain, ops
    >>> explain(ops.sum, torch.ones(8, 4096, 512), axis=1, backend="eager").engine
    'eager'

    Raises what `associative_scan` raises for arguments that do not fit, and for a named backend
    that cannot run.
    """
    if unknown:
        refuse_unknown(explain, unknown)
    if backend not in engines.BACKENDS:
        engines.refuse_backend(backend)
    require_choice(deterministic)
    flags = flag("reverse", reverse), flag("inclusive", inclusive)
    call = bind(op, xs, axis, *flags, init, flag("return_final", return_final), offsets)
    try:
        return plan_of(call, backend)
    except BackendError as error:
        if backend != "auto":
            raise
        return eager_plan(call, str(error))


def plan_of(call: ScanCall, backend: str) -> Plan:
    """The plan of a call. Raises BackendError where a kernel of it cannot be compiled."""
    reason = "asked for" if backend == "eager" else engines.why_not(call, backend)
    if reason is not None:
        if backend not in ("auto", "eager"):
            raise BackendError(f"the {backend} backend cannot run {call.operator.name!r}: {reason}")
        return eager_plan(call, reason)
    scan = engines.engine(call, backend)
    if scan is cpu.scan:
        return cpu_plan(call)
    if engines.matrix_operator(call, backend) is not None:
        return matrix_plan(call)
    problem = call.problem()
    named = next((name for name, engine in gpu.ENGINES.items() if scan is engine), "")
    engine, why = (named, "asked for") if named else gpu.choose(problem)
    if engine == "cuda":
        return cuda_plan(call.operator.name, problem, why)
    return triton_plan(call.operator.name, problem, why, engine == "multipass")


def matrix_plan(call: ScanCall) -> Plan:
    """The plan of elements that are large matrices."""
    chains = math.prod(call.batch) // max(call.length, 1)
    moved = 2 * sum(t.nbytes for t in call.leaves)
    return Plan(
        call.operator.name, (chains, call.length, 1), "triton (matrices)", "one element",
        f"{chains} chains, cut into chunks where they are few", moved,
        "elements are matrices of 8 to 64: a program walks a chain with the carry in registers",
    )  # fmt: skip


def triton_plan(name: str, problem: ScanProblem, why: str, cut: bool) -> Plan:
    """The plan of the Triton engines: `cut` into chunks, or one kernel."""
    tensors = gather_tensors(problem)
    layout = lay_out(problem, tensors)
    chunk = multipass.chunk_length(problem)
    if cut and problem.length > chunk:
        prepared = multipass.prepare(problem, layout, chunk)[1]
        engine = f"multipass (chunks of {chunk})"
        read = sum(
            walk_bytes(w, problem.batch) for (r, _), w in layout.walks.items() if r == "input"
        )
    else:
        prepared, engine, read = triton_scan.prepare(problem, tensors), "triton", 0
    tile = prepared.kernel.tile
    lanes = prepared.kernel.lanes
    what = f"{tile.chains} {'lanes' if lanes else 'rows'} x {tile.steps} steps"
    if lanes:
        what += f" ({tile.segments} segments of {tile.items})"
    ahead = ", next turn loaded ahead" if tile.prefetch else ""
    ahead = f", {tile.stages} stages" if tile.stages else ahead
    outer, _, inner = prepared.carries
    form = (outer, problem.length, inner)
    if problem.offsets is not None:
        form = (outer // max(len(problem.offsets) - 1, 1), problem.length, inner)
    walk = "along the innermost dimension" if lanes else "along the axis"
    return Plan(
        name, form, engine, f"{what}, {tile.warps} warps{ahead}",
        f"{prepared.grid[0]} programs on {triton_scan.processors(problem.device)} multiprocessors",
        layout.bytes_moved(problem.batch) + read, f"{why}; loads coalesced {walk}",
    )  # fmt: skip


CUDA_MODES = {
    "SERIAL": "a block walks its chains with the carry in registers",
    "CHAINED": "tiles hand their prefix on to the next tile of the chain",
    "LOOKBACK": "blocks share a chain: prefixes from the aggregates of the tiles before",
}


def cuda_plan(name: str, problem: ScanProblem, why: str) -> Plan:
    """The plan of the single-pass CUDA kernels. Raises BackendError where they cannot run."""
    prepared = cuda_scan.prepared_for(problem)
    layout = lay_out(problem, gather_tensors(problem))
    kernel, tile = prepared.kernel, prepared.kernel.tile
    width = f" x {tile.block_channels} lanes" if isinstance(tile, LanesTile) else ""
    inner = layout.rows[-1].size if kernel.is_lanes else 1
    outer = math.prod(row.size for row in layout.rows) // inner
    copies = f"; {len(prepared.copies)} inputs are copied first" if prepared.copies else ""
    return Plan(
        name, (outer, problem.length, inner), f"cuda ({kernel.mode.lower()})",
        f"{tile.steps} steps{width}, {tile.threads} threads, {tile.stages} tiles under way",
        f"{prepared.grid} blocks", layout.bytes_moved(problem.batch),
        f"{why}; {CUDA_MODES[kernel.mode]}{copies}",
    )  # fmt: skip


def eager_plan(call: ScanCall, reason: str) -> Plan:
    outer = 1
    for n in call.batch[: call.axis]:
        outer *= n
    inner = 1
    for n in call.batch[call.axis + 1 :]:
        inner *= n
    moved = 2 * sum(t.nbytes for t in call.leaves)
    return Plan(
        call.operator.name, (outer, call.length, inner), "eager", "whole tensors",
        f"{2 * max(call.length - 1, 1).bit_length()} levels of torch operations", moved, reason,
    )  # fmt: skip


def cpu_plan(call: ScanCall) -> Plan:
    problem = call.problem()
    tensors = gather_tensors(problem)
    prepared = cpu.prepare(problem, tensors)
    arguments, kernel = prepared.arguments, prepared.kernel
    inner, threads, block = arguments[1], arguments[2], arguments[7]
    outer = math.prod(prepared.sizes)
    if kernel.direct:
        tile = f"1 step x {min(block, inner)} lanes, carries of up to {kernel.lanes} lanes in cache"
        why = "the innermost dimension is contiguous: SIMD along it"
        form = (outer, call.length, inner)
    else:
        lanes = "segments of one row" if block == 1 else f"{block} rows"
        tile = f"{STEPS} steps x {WIDE if block == 1 else block} lanes ({lanes}), transposed"
        why = "the axis is contiguous, or the inner dimension is narrow: rows are the lanes"
        form = (outer, call.length, 1)
    different = differences(prepared.route, problem, lay_out(problem, tensors), paths(call))
    cut = prepared.jobs < threads and call.offsets is None
    grid = f"{threads} threads over {prepared.jobs} jobs" + (", the axis cut" if cut else "")
    return Plan(
        call.operator.name, form, f"cpu ({compiler_version()})", tile, grid, prepared.bytes,
        "; ".join([why, *different]),
    )  # fmt: skip


def paths(call: ScanCall) -> dict[tuple[str, int], str]:
    """How the caller names the tensors of a problem, by role and number."""
    assert call.spec is not None
    trees = {"input": (call.input_spec, "xs"), "init": (call.state_spec, "init"),
             "output": (call.spec.output_spec, "ys")}  # fmt: skip
    return {
        (role, k): path
        for role, (spec, root) in trees.items()
        for k, path in enumerate(leaf_paths(spec, root))
    }
