"""The Triton engine: lays a scan out as chains, chooses a tile and prepares one kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import BackendError
from ...program.operator import Operator, spans
from ..base.commands import Description
from ..base.device_properties import processors, shared_memory
from ..base.executable import CommandList, Executable
from ..base.explained_plan import Plan
from ..base.layout import (
    CollapsedDim,
    Given,
    Layout,
    lay_out,
    leaf_bytes,
    scalar_size,
    tensors_by_name,
)
from ..base.scan_spec import Name, ScanSpec, TensorSpec, check_memory
from . import loader as triton_loader
from .kernel import Cut, Port, Tile, TritonKernel
from .source import source
from .tiles import Shape, choose

Spec = ScanSpec[Operator]
# The bytes of a number by its type in Triton's signature; 0: written into the kernel.
WIDTHS = {"i32": 4, "i64": 8, "fp32": 4, "constexpr": 0}


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """One kernel. Raises BackendError where Triton cannot load it."""
    given = tensors_by_name(spec, tensors)
    layout = lay_out(spec, given)
    built = build(spec, layout)
    commands = CommandList(spec, tensors)
    copy_spread(commands, layout, given, layout.leaves)
    outputs, finals = commands.allocate_results(layout)
    if spec.chains:
        add_launch(commands, built)
    return commands.build(outputs, finals, lambda: plan_of(spec, layout, built))


def copy_spread(commands: CommandList, layout: Layout, given: Given, names: Iterable[Name]) -> None:
    """Copies of those of the named tensors whose elements are spread over memory."""
    for name in names:
        leaf = layout.leaves.get(name)
        if leaf is not None and leaf.copy:
            t = given[name]
            dense = TensorSpec.dense(t.shape, t.dtype, t.device)
            commands.slots[name] = commands.copy(commands.slots[name], dense)


def described_kernel(compiled: Any, tensors: int, numbers: int) -> Description:
    """A compiled kernel for the C++ runner: function, shared memory, and the bytes of each of the
    numbers that follow the tensors. None where Triton's own launcher does more than a launch, such
    as for kernels with scratch memory."""
    known = compiled.metadata
    extra = (known.global_scratch_size, known.profile_scratch_size, known.num_ctas - 1,
             known.launch_cooperative_grid, known.launch_pdl)  # fmt: skip
    kinds = list(compiled.src.signature.values())[tensors:]
    if any(extra) or len(kinds) != numbers or not set(kinds) <= set(WIDTHS):
        return None
    return compiled.function, known.shared, tuple([WIDTHS[kind] for kind in kinds])


@dataclass(eq=False)
class LoadedKernel:
    """A Triton kernel with every argument but its tensors (`GpuKernel`).

    names: the tensors in the kernel's order; carries: the shape of chunk carries; fused: as
        `float_options` has it. registers: the most that a thread may have, on NVIDIA GPUs.
    compiled: what Triton compiled at the first launch. It also depends on which tensors are aligned
        to 16 bytes: those of later launches are aligned alike, as an executable's tensors are.
    """

    function: Any
    kernel: Any  # TritonKernel or MatrixKernel
    grid: tuple[int, int, int]
    names: list[Name]
    integers: list[int]
    carries: tuple[int, ...] = ()
    fused: bool = False
    registers: int | None = None
    compiled: Any = None

    def shown(self) -> str:
        warps = self.kernel.tile.warps
        cut = getattr(self.kernel, "cut", "whole")
        part = "" if cut == "whole" else f" ({cut})"
        return f"Triton {self.kernel.operator.name!r}{part}, {self.grid[0]} x {warps} warps"

    @property
    def version(self) -> int:
        return int(self.compiled is not None)

    def described(self, slots: tuple[int, ...]) -> Description:
        """The kernel, once it is compiled. None where Triton's own launcher does more than a
        launch: on AMD GPUs, in the interpreter, and as `described_kernel` says."""
        if torch.version.cuda is None or self.compiled is None:
            return None
        found = described_kernel(self.compiled, len(slots), len(self.integers))
        if found is None:
            return None
        threads = 32 * self.compiled.metadata.num_warps
        return "triton", slots, tuple(self.integers), math.prod(self.grid), threads, *found

    def launch(self, given: Sequence[torch.Tensor]) -> None:
        """Triton's own launcher finds out anew, at every call, what kernel the arguments need; here
        it is always the same."""
        addresses = [t.data_ptr() for t in given]
        if 0 in addresses:
            check_memory(addresses, given)
        device = given[0].device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            if self.compiled is not None:
                self.compiled[self.grid](*addresses, *self.integers)
            else:
                self.compile_and_launch(given)
        else:
            with torch.cuda.device(device):
                self.compile_and_launch(given)

    def compile_and_launch(self, given: Sequence[torch.Tensor]) -> None:
        """Through Triton's launcher, which compiles what it does not know."""
        real = [torch.view_as_real(t) if t.is_complex() else t for t in given]
        device_type = given[0].device.type
        options: dict[str, Any] = {"num_warps": self.kernel.tile.warps}
        options |= float_options(device_type, self.fused)
        if self.registers is not None and is_nvidia(device_type):
            options["maxnreg"] = self.registers
        try:
            compiled = triton_loader.launch(
                self.function, self.grid, *real, *self.integers, **options
            )
        except Exception as error:
            if not type(error).__module__.startswith("triton"):
                raise
            words = str(error).strip().splitlines()
            raise BackendError(
                f"Triton cannot run the kernel of {self.kernel.operator.name!r}: "
                f"{type(error).__name__}{': ' + words[-1] if words else ''}"
            ) from error
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
            self.compiled = compiled


def add_launch(commands: CommandList, built: LoadedKernel, tables: Sequence[int] = ()) -> None:
    """The kernel on the tensors by name, then on tables: the offsets, where none are given."""
    slots = [commands.slots[name] for name in built.names]
    commands.launch(built, [*slots, *(tables or commands.offsets())])


@functools.cache
def float_options(device_type: str, fused: bool) -> dict[str, bool]:
    """NVIDIA's mathematical functions keep denormals. fused: whether a product and a sum may be one
    instruction, rounded once; else each is rounded, as on the CPU."""
    flags = {"enable_fp_fusion": fused}
    return {**flags, "enable_reflect_ftz": False} if is_nvidia(device_type) else flags


def is_nvidia(device_type: str) -> bool:
    return device_type == "cuda" and torch.version.hip is None


def plan_of(spec: Spec, layout: Layout, built: LoadedKernel, chunk: int = 0) -> Plan:
    """What the kernel does; `chunk`: the steps of a chunk of the multi-pass engine, or 0."""
    tile, lanes, read = built.kernel.tile, built.kernel.lanes, 0
    engine = "triton"
    if chunk:
        engine = f"multipass (chunks of {chunk})"
        read = sum(leaf_bytes(w, spec.batch) for (r, _), w in layout.leaves.items() if r == "input")
    what = f"{tile.chains} {'lanes' if lanes else 'rows'} x {tile.steps} steps"
    if lanes:
        what += f" ({tile.segments} segments of {tile.items})"
    ahead = ", next tile loaded ahead" if tile.prefetch else ""
    ahead = f", {tile.stages} stages" if tile.stages else ahead
    outer, _, inner = built.carries
    walk = "along the innermost dimension" if lanes else "along the axis"
    return Plan(
        spec.operator.name, (outer, spec.length, inner), engine,
        f"{what}, {tile.warps} warps{ahead}",
        f"{built.grid[0]} programs on {processors(spec.device)} multiprocessors",
        layout.bytes_moved(spec.batch) + read, f"loads coalesced {walk}",
    )  # fmt: skip


def build(
    spec: Spec, layout: Layout, cut: Cut = "whole", chunks: int = 1, chunk_length: int = 0,
    tile: Tile | None = None,
) -> LoadedKernel:  # fmt: skip
    """The kernel and its arguments; with a cut, for chunks of that many steps."""
    op, axis = spec.operator, spec.axis
    lanes = layout.rows[-1] if has_lanes(layout, axis) else None
    outer = layout.rows[:-1] if lanes else layout.rows
    groups = math.prod(row.size for row in outer)
    sequences = spec.sequence_count
    repeats = sequences if cut == "whole" else chunks
    read = [w for (role, _), w in layout.leaves.items() if role == "input"]
    shape = Shape(
        lanes is not None,
        lanes.size if lanes else groups * repeats,
        groups * repeats if lanes else 1,
        spec.length if cut == "whole" else chunk_length,
        max((scalar_size(w.dtype) for w in read), default=4),
        sum(scalar_size(w.dtype) * len(w.component_offsets) for w in read),
        processors(spec.device),
        spec.exclusive,
        shared_memory(spec.device),
        cut != "whole",
        spec.sequences is not None,
        (spec.reverse or bool(spec.shifted)) and spec.sequences is None and spec.length % 16 == 0,
        any(w.dtype.is_complex for w in read),
    )
    if tile is None:
        tile = choose(op, shape, spec.device.type == "cpu")
    kernel = TritonKernel(
        op, tile, lanes is not None,
        lanes is None and spec.sequences is None and cut == "whole"
        and spec.length <= tile.steps,
        spec.reverse, spec.exclusive, len(outer), spec.initial_leaves, spec.final,
        spec.shifted, spec.boundary,
        ports(spec, layout, lanes, outer, cut),
        spec.sequences is not None, cut, is_wide(layout, spec),
        lanes is not None and spec.sequences is None and not (tile.prefetch or tile.masked)
        and spec.length % tile.steps == 0 and lanes.size % tile.chains == 0,
    )  # fmt: skip
    programs = -(-shape.chains // tile.chains) * shape.outer
    return LoadedKernel(
        triton_loader.load(source(kernel)),
        kernel,
        (programs, 1, 1),
        [(role, k) for role, k, _ in kernel.ports],
        integers(kernel, spec, layout, lanes, outer, shape, (chunks, chunk_length)),
        (groups, repeats, lanes.size if lanes else 1),
    )


def has_lanes(layout: Layout, axis: int) -> bool:
    """Whether the innermost dimension, rather than the axis, is contiguous."""
    if not layout.rows or layout.rows[-1].size < 2:
        return False
    inner = layout.rows[-1].by_name
    steps = {name: w.strides[axis] for name, w in layout.leaves.items() if name[0] != "init"}
    closer = sum(
        inner[name] < step
        for name, step in steps.items()
        if name[0] in ("input", "output") and inner[name] and step
    )
    farther = sum(
        inner[name] > step
        for name, step in steps.items()
        if name[0] in ("input", "output") and inner[name] and step
    )
    return closer > farther


def ports(
    spec: Spec,
    layout: Layout,
    lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim],
    cut: Cut,
) -> tuple[tuple[str, int, Port], ...]:
    """Every leaf's port, in the order of the kernel's pointers. `totals` reads the inputs, and the
    boundary values of those that are lifted."""
    op, found = spec.operator, []
    aggregate = op.aggregate_components(spec.final)
    lifted = op.lift.select(aggregate).used_inputs
    parts = spans(op.inputs)
    for (role, k), walk in layout.leaves.items():
        read = role == "input" or (role == "boundary" and not lifted.isdisjoint(parts[k]))
        if cut == "totals" and not read:
            continue
        inner = 0 if lanes is None else lanes.by_name[role, k]
        strides = tuple(None if row.by_name[role, k] else 0 for row in outer)
        port = Port(
            walk.dtype, walk.component_offsets, unit(walk.strides[spec.axis]), unit(inner), strides
        )  # fmt: skip
        found.append((role, k, port))
    roles = {"totals": ("after",), "rescan": ("before",), "lookback": ("after", "before")}
    for role in roles.get(cut, ()):
        found.extend((role, c, Port(torch.float32, (0,), 0, 1, ())) for c in aggregate)
    return tuple(found)


def unit(stride: int) -> int | None:
    """A stride that is written into the kernel, or None. 2 is that of adjacent complex numbers."""
    return stride if stride in (0, 1, 2) else None


def integers(
    kernel: TritonKernel, spec: Spec, layout: Layout, lanes: CollapsedDim | None,
    outer: Sequence[CollapsedDim], shape: Shape, cut: tuple[int, int],
) -> list[int]:  # fmt: skip
    """The integer arguments: sizes, then the strides that the kernel asks for."""
    sequences = spec.sequence_count
    values = {"length": spec.length, "lanes": shape.chains, "chains": shape.chains,
              "sequences": sequences, "chunks": cut[0], "chunk_length": cut[1]}  # fmt: skip
    values.update({f"size{d}": row.size for d, row in enumerate(outer)})
    found = [values[name] for name in kernel.sizes()]
    for role, k, which in kernel.strides():
        walk = layout.leaves[role, k]
        if which == "step":
            found.append(walk.strides[spec.axis])
        elif which == "sequence":
            found.append(walk.sequence)
        elif which == "lane":
            assert lanes is not None
            found.append(lanes.by_name[role, k])
        else:
            found.append(outer[int(which.removeprefix("outer"))].by_name[role, k])
    return found


def is_wide(layout: Layout, spec: ScanSpec[Any]) -> bool:
    """Whether some offset, or the number of chains, needs 64 bits."""
    batch = spec.batch
    reach = max(
        sum((n - 1) * s for n, s in zip(batch, walk.strides, strict=True))
        + max(walk.component_offsets)
        + walk.sequence * (0 if spec.sequences is None else spec.sequences + 1)
        for walk in layout.leaves.values()
        if walk.component_offsets
    )
    return max(reach, spec.chains, spec.length) >= 2**31 - 2**16
