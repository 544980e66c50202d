"""Executables of scans over vectors by CUDA: one kernel, after that of the segments' totals where
the axis is cut. In a backward pass, torch then sums the parts of gradients that blocks leave."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...autodiff.vector_adjoint import backward_step
from ...engines.base.device_properties import processors, shared_memory
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ScanSpec, TensorSpec
from ...engines.base.vectors import prepare as tensors_of
from ...engines.base.vectors.kernel import CHUNK, BackwardKernel, VectorKernel, padded
from ...engines.base.vectors.prepare import Prepared, Spec, Tensors
from ...program.vectors.vector_adjoint import VectorAdjoint
from .. import launcher
from ..parameters import struct_format
from ..prepare import LoadedKernel
from .leaves import LeafPart, width_of
from .source import source, text_of
from .step_graph import NotExpressible
from .text import WHOLE, Widths, parameter_fields
from .tile import VectorTile, choose_segments, cost_whole, cut_tiles, variants, whole_tiles
from .totals_source import Totals, TotalsKernel, backward_totals, forward_totals

# A step of more than MAX_OPERATIONS (an estimate) is not compiled. A backward pass whose step has
# more than FEW_OPERATIONS has groups of at most SMALL_GROUP steps, whose states fit in registers: a
# selective scan has 22 operations; with all its arguments it has 60, and eight steps do not fit.
MAX_OPERATIONS, FEW_OPERATIONS, SMALL_GROUP = 400, 40, 4
MAX_PARAMETERS = 4096  # bytes
RESERVED = 1024  # bytes of shared memory that CUDA itself takes for each block


class Share(NamedTuple):
    """How the work is shared out: the tile of a block, the number of segments into which the axis
    is cut, and the chunks of each."""

    tile: VectorTile
    segments: int
    chunks: int


# A function that makes tensors and kernel for one `Share`, and the shares to try, the best first.
Ways = tuple[Callable[[Share], Prepared], list[Share]]


def prepare(spec: Spec, tensors: Tensors) -> Executable:
    """The executable of a forward scan. Raises NotExpressible for operators that these kernels
    cannot compute."""
    following: Spec | None = None
    if spec.followed_by is not None:
        has_carry = spec.from_identity or spec.init is not None
        following = replace(spec, operator=spec.followed_by, followed_by=None, init=None,
                            from_identity=has_carry, final=())  # fmt: skip
    return followed(forward_ways, spec, tensors, spec.operator.size, following)


def forward_ways(spec: Spec, tensors: Tensors) -> Ways:
    op = spec.operator
    check_size(op.name, sum(len(p.instructions) for p in (op.lift, op.combine, op.lower)))
    lane = tensors_of.forward_lane(spec, tensors)

    def build(share: Share) -> Prepared:
        found = tensors_of.forward(spec, tensors, share.tile)
        found.segments = share.segments
        return found

    return build, shares(spec, lane, op.size, False, lambda: forward_totals(op), op.is_reduction)


def prepare_backward(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Executable:
    """The executable of a backward pass. Raises NotExpressible as `prepare`."""
    following: ScanSpec[Any] | None = None
    if spec.followed_by is not None:
        following = replace(spec, operator=spec.followed_by, followed_by=None)
    return followed(backward_ways, spec, tensors, spec.operator.op.size, following)


def backward_ways(spec: ScanSpec[VectorAdjoint], tensors: Tensors) -> Ways:
    adjoint, size = spec.operator, spec.operator.op.size
    step = backward_step(adjoint, False)
    operations = len(step.recomputed.instructions) + len(step.pulled.instructions)
    check_size(adjoint.name, operations)

    def build(share: Share) -> Prepared:
        return tensors_of.backward(spec, tensors, share.tile, share.segments)

    found = shares(
        spec, adjoint.lane, size, True, lambda: backward_totals(adjoint), not adjoint.wanted
    )
    if operations > FEW_OPERATIONS:
        found = [
            s._replace(tile=replace(s.tile, group=min(s.tile.group, SMALL_GROUP))) for s in found
        ]
    return build, found


def followed(
    ways_of: Callable[[Any, Tensors], Ways], spec: ScanSpec[Any], tensors: Tensors, size: int,
    following: ScanSpec[Any] | None,
) -> Executable:  # fmt: skip
    """The executable, with the cut of the pass that follows and takes the totals.

    ways_of: `forward_ways` or `backward_ways`. following: None where no pass takes them.
    """
    build, ways = ways_of(spec, tensors)
    if following is not None:
        inputs = tensors[: len(following.operator.inputs)]
        whole = [way for way in ways if way.segments == 1]
        try:
            found, chunks = fitting(following, *ways_of(following, inputs))
            ways = cut_in(spec, size, found.segments) if found.segments > 1 else []
            assert all(way.chunks == chunks for way in ways)
        except NotExpressible:  # another engine will run it
            ways = []
        ways = [*ways, *whole]
    return launched(spec, build, ways)


def cut_in(spec: ScanSpec[Any], size: int, segments: int) -> list[Share]:
    """All tiles for cuts, each with so many segments. The chunks of a segment follow from their
    number, as `choose_segments` chooses both."""
    chunks = -(-spec.length // CHUNK)
    each, is_backward = -(-chunks // segments), isinstance(spec.operator, VectorAdjoint)
    return [Share(tile, segments, each) for tile in cut_tiles(size, is_backward)]


def shares(
    spec: ScanSpec[Any], lane: int | None, size: int, backward: bool, totals: Callable[[], Totals],
    reduces: bool = False,
) -> list[Share]:  # fmt: skip
    """Ways to share the work out, the best first. totals: called to see whether segments have
    totals; raises NotExpressible where they have none. reduces: whether nothing is walked after the
    totals (`VectorKernel.walks`)."""
    count, chunks = processors(spec.device), -(-spec.length // CHUNK)
    lanes = 1 if lane is None else spec.batch[lane]

    def blocks(tile: VectorTile) -> int:
        return spec.chains // max(lanes, 1) * -(-lanes // tile.lanes)

    tiles, others = whole_tiles(size, backward), cut_tiles(size, backward)
    whole = [Share(tile, 1, chunks) for tile in tiles]
    if spec.sequences is not None or not (spec.chains and spec.length):
        return whole
    if spec.segments is not None:
        return [*cut_in(spec, size, spec.segments), *whole]
    try:
        totals()
        most = chunks
    except NotExpressible:
        most = 1

    def choose(tile: VectorTile) -> tuple[Share, float]:
        segments, each, cost = choose_segments(
            tile, backward, blocks(tile), chunks, count, most, reduces
        )
        return Share(tile, segments, each), cost

    # The best of the tiles for cuts decides whether there is one. Those after it are for operators
    # for which its shared memory does not suffice, and count only where they agree with it.
    best, cost = choose(others[0])
    if cost >= cost_whole(tiles[0], backward, blocks(tiles[0]), count):
        return whole
    found = [best, *(choose(tile)[0] for tile in others[1:])]
    return [*(s for s in found if (s.segments > 1) == (best.segments > 1)), *whole]


def check_size(name: str, operations: int) -> None:
    if operations > MAX_OPERATIONS:
        raise NotExpressible(
            f"one step of {name!r} has {operations} operations; the limit of CUDA kernels over "
            f"vectors is {MAX_OPERATIONS}"
        )


@dataclass(eq=False)
class LoadedVectorKernel(LoadedKernel):
    """title: what `explain` says of the launch."""

    title: str = ""

    def shown(self) -> str:
        return self.title


def launched(
    spec: ScanSpec[Any], build: Callable[[Share], Prepared], shares: Sequence[Share]
) -> Executable:
    """The executable that launches the kernels, by the first way to share the work for which
    shared memory suffices. build: makes the tensors and the kernel for one."""
    found, chunks = fitting(spec, build, shares)
    kernel, sizes = found.kernel, found.sizes() | {"segment_chunks": chunks}
    if found.segments > 1 and spec.segments is None:
        launch(found, totals_kernel(found), sizes, with_totals(found), "totals of ")
    if kernel.walks or found.finals:  # else nothing but the totals is wanted
        launch(found, kernel, sizes, with_results(found), "")
    return found.build("cuda", kernel.tile.shown)


def with_totals(found: Prepared) -> range:
    """The segments whose totals are computed."""
    if not found.kernel.walks:
        return range(found.segments)
    # What walks a segment needs the totals of those before it; going back, of those behind it.
    if isinstance(found.kernel, BackwardKernel):
        return range(1, found.segments)
    return range(found.segments - 1)


def with_results(found: Prepared) -> range:
    """The segments that have blocks of the kernel that writes the results. If nothing is left to
    walk, one set of blocks with the number `segments`, one past the last: it combines all
    totals."""
    if found.kernel.walks:
        return range(found.segments)
    return range(found.segments, found.segments + 1)


def fitting(
    spec: ScanSpec[Any], build: Callable[[Share], Prepared], shares: Sequence[Share]
) -> tuple[Prepared, int]:
    """The kernel of the first share that fits: a multiprocessor's shared memory holds as many
    blocks as the tile says. If none fits, the last one is tried with fewer and fewer blocks. With
    it, the chunks of a segment."""
    if not (spec.chains and spec.length and spec.sequence_count):
        raise NotExpressible("a CUDA kernel over vectors needs at least one step")
    most = shared_memory(spec.device)
    tried = [s._replace(tile=tile) for s in shares for tile in variants(s.tile)]
    last = tried[-1]
    tried += [
        last._replace(tile=replace(last.tile, blocks=n)) for n in range(last.tile.blocks - 1, 0, -1)
    ]
    for share in tried:
        found = build(share)
        finish(found)
        walking = walking_kernel(found)
        text = text_of(walking, *rows_and_lanes(found, walking))
        if text.shared <= (most + RESERVED) // share.tile.blocks - RESERVED:
            return found, share.chunks
    raise NotExpressible(
        f"a tile of {spec.operator.name!r} needs more than the {most} bytes of shared memory that "
        "a block can have"
    )


def finish(found: Prepared) -> None:
    """Complete the kernel; where the axis is cut, with the tensor of the segments' totals."""
    if found.segments > 1:
        found.kernel = replace(found.kernel, cut=True)
        totals, ports, commands = totals_kernel(found), found.ports, found.commands
        numbers = sum(totals.totals.sizes(totals.tile.states))
        shape = (found.segments, ports.rows, padded(ports.lanes), numbers)
        if found.spec.segments is None:
            commands.slots["totals", 0] = commands.allocate(shape, totals.carry_dtype)
        given = commands.spec_of(commands.slots["totals", 0])
        assert (given.shape, given.dtype) == (shape, totals.carry_dtype)
        ports.add_whole("totals", given)
        if found.spec.followed_by is not None:
            found.outputs.append(commands.slots["totals", 0])
    kernel = found.complete_kernel()
    if not kernel.walks:
        ports_ = tuple(p for p in kernel.ports if p[0] not in ("input", "cotangent", "carries"))
        found.kernel = replace(kernel, ports=ports_)


def walking_kernel(found: Prepared) -> VectorKernel:
    """The kernel that walks steps, which has the most in shared memory."""
    return found.kernel if found.kernel.walks else totals_kernel(found)


def totals_kernel(found: Prepared) -> TotalsKernel:
    """The kernel that computes the totals of segments, with the ports that it needs."""
    kernel = found.kernel
    totals = TotalsKernel(
        kernel.tile, kernel.reverse, kernel.outer, False, kernel.wide, kernel.first, (), (),
        kernel.operator, cut=True,
    )  # fmt: skip
    needed = {*totals.reads(), ("totals", 0)}
    return replace(totals, ports=tuple(p for p in found.ports.found if p[:2] in needed))


def rows_and_lanes(found: Prepared, kernel: VectorKernel) -> tuple[Widths, bool]:
    """What a kernel's text is made for besides: the bytes of rows that are copied at a time, and
    whether the last block has fewer lanes."""
    specs = {name: found.commands.spec_of(found.commands.slots[name]) for name in kernel.pointers}
    return copy_widths(found, kernel, specs), found.ports.lanes % kernel.tile.lanes != 0


def launch(
    found: Prepared, kernel: VectorKernel, sizes: Mapping[str, int], segments: range, what: str
) -> None:
    """Add the launch of a kernel, with the blocks of these segments."""
    spec, commands, tile = found.spec, found.commands, kernel.tile
    slots = [*(commands.slots[name] for name in kernel.pointers)]
    slots += commands.offsets() if kernel.packed else []
    grid = found.groups * spec.sequence_count * len(segments)
    sizes = {**sizes, "first_segment": segments.start, "segments": len(segments)}
    fields = parameter_fields(kernel)
    format_ = struct.Struct(struct_format(fields))
    if grid >= 2**31 or format_.size > MAX_PARAMETERS:
        raise NotExpressible(f"a CUDA kernel for {grid} blocks with {len(fields)} parameters")
    tail = [*(sizes[name] for name in kernel.sizes()), -(-found.ports.lanes // tile.lanes)]
    tail += [found.ports.values[which] for which in kernel.strides()]
    function = launcher.load(source(kernel, *rows_and_lanes(found, kernel)), None, spec.device)
    names = [[*kernel.pointers, *([("offsets", 0)] if kernel.packed else [])]]
    title = (
        f"CUDA {what}{kernel.name!r} (vectors), {grid} blocks, {function.shared_bytes} bytes shared"
    )
    commands.launch(
        LoadedVectorKernel(
            kernel, function, grid, names, format_, tail, 0, 0, 1, title,  # type: ignore[arg-type]
        ),
        slots,
    )  # fmt: skip


def copy_widths(
    found: Prepared, kernel: VectorKernel, given: dict[tuple[str, int], TensorSpec]
) -> Widths:
    """For each part of a leaf that has rows, the bytes that are copied or stored at a time."""
    op, widths = kernel.vectors, []
    for role, k, port in kernel.ports:
        if role in WHOLE:
            continue
        leaf = LeafPart(role, k, 0, "", port)
        if leaf.is_staged and (port.lane or port.state):
            # Rows of lanes begin at a multiple of the tile's lanes and may end at the last lane, so
            # copies must divide both numbers.
            present = op.size if port.state else math.gcd(found.ports.lanes, kernel.tile.lanes)
            width = width_of(leaf, found.ports.values, given[role, k].alignment, present)
            widths.append(((role, k, 0), width))
    return tuple(widths)
