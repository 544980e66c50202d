"""The multi-pass engine: no program waits for another, so it needs no forward progress.

    totals   every chunk of the axis is combined to its total
    prefixes the totals are scanned, by this engine again where they are many
    rescan   every chunk is scanned from the prefix before it

Each input is read twice and each output written once; a reduction, which has no outputs, needs no
third pass and reads each input once (`reduce`). The chunks depend on the shape alone, so
results are bitwise equal from run to run. Source: G. E. Blelloch, "Prefix sums and their
applications", CMU-CS-90-190, 1990, section 1.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Leaf, Operator, spans
from ...program.operator_names import composed
from ...program.program_builder import Builder
from ..base.chunk_tables import add_chunk_tables, count_chunks, cut_axis
from ..base.commands import Slot, SlotArgument
from ..base.device_properties import processors
from ..base.executable import CommandList, Executable
from ..base.explained_plan import Plan
from ..base.layout import Layout, lay_out, scalar_size, tensors_by_name
from ..base.scan_spec import ScanSpec, TensorSpec
from . import prepare as triton_scan
from . import tiles
from .kernel import Tile
from .prepare import Spec, add_launch, copy_spread
from .tiles import choose_chunk


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """Three passes; one where chunks would not be many fewer than steps, as with one chunk or with
    very short sequences."""
    length = chunk_length(spec)
    few = 2 * count_chunks(spec, length) <= spec.length
    nothing = spec.chains == 0 or not spec.operator.aggregate_components(spec.final)
    if spec.length <= length or not few or nothing:
        return triton_scan.prepare(spec, tensors)
    if not spec.operator.outputs and not spec.shifted:
        return prepare_reduction(spec, tensors, length)
    given = tensors_by_name(spec, tensors)
    layout, chunks = lay_out(spec, given), count_chunks(spec, length)
    totals, rescan = (
        triton_scan.build(spec, layout, cut, chunks, length) for cut in ("totals", "rescan")
    )
    commands = CommandList(spec, tensors)
    copy_spread(commands, layout, given, layout.leaves)
    tables = add_chunk_tables(commands, length)
    outputs, finals = commands.allocate_results(layout)

    op = spec.operator
    components = op.aggregate_components(spec.final)
    kinds = op.combine.output_dtypes
    totals_at = [commands.allocate(totals.carries, EXACT_DTYPES[kinds[c]]) for c in components]
    commands.slots.update({("after", c): k for c, k in zip(components, totals_at, strict=True)})
    add_launch(commands, totals, tables[:3])
    carries = ScanSpec(
        carry_operator(op, tuple(components)), totals.carries, 1, spec.device,
        sequences=spec.sequences,
    )  # fmt: skip
    prefixes, _ = add_scan(commands, carries, [*totals_at, *tables[3:]])
    commands.slots.update({("before", c): k for c, k in zip(components, prefixes, strict=True)})
    add_launch(commands, rescan, tables[:3])
    return commands.build(
        outputs, finals, lambda: triton_scan.plan_of(spec, layout, rescan, length)
    )


def prepare_lookback(spec: Spec, tensors: Sequence[TensorSpec | None]) -> Executable:
    """One pass over lanes of one sequence: every program has one tile, and waits for the carry from
    the tiles before it. For devices on which a program that has begun goes on, and for scans that
    `can_look_back`."""
    given = tensors_by_name(spec, tensors)
    layout, op = lay_out(spec, given), spec.operator
    tile = tile_of_lookback(spec, tensors, layout)
    chunks = -(-spec.length // tile.steps)
    built = triton_scan.build(spec, layout, "lookback", chunks, tile.steps, tile)
    commands = CommandList(spec, tensors)
    copy_spread(commands, layout, given, layout.leaves)
    outputs, finals = commands.allocate_results(layout)
    for role in ("after", "before"):
        for c in op.aggregate_components(spec.final):
            dtype = EXACT_DTYPES[op.combine.output_dtypes[c]]
            commands.slots[role, c] = commands.allocate(built.carries, dtype)
    shape, like = (1 + built.grid[0],), SlotArgument(outputs[0])
    made = TensorSpec.dense(shape, torch.int32, spec.device)
    zeros = torch.ops.aten.new_zeros.default
    add_launch(commands, built, [commands.torch(zeros, (like, shape, torch.int32), made)])

    def plan() -> Plan:
        return replace(triton_scan.plan_of(spec, layout, built), engine="triton (look-back)")

    return commands.build(outputs, finals, plan)


def can_look_back(spec: Spec, tensors: Sequence[TensorSpec | None]) -> bool:
    """Whether there is a kernel of a look-back for a scan: of lanes, of one sequence of several
    tiles, with outputs, and with states of few scalars."""
    op = spec.operator
    wide = tiles.width(op) > tiles.LOOKBACK_WIDTH
    if spec.sequences is not None or not op.outputs or op.sequential or tiles.loops(op) or wide:
        return False
    if spec.chains == 0 or not op.aggregate_components(spec.final) or not op.used_inputs:
        return False
    layout = lay_out(spec, tensors_by_name(spec, tensors))
    if not triton_scan.has_lanes(layout, spec.axis):
        return False
    return spec.length > tile_of_lookback(spec, tensors, layout).steps


def look_back_pays(spec: Spec, tensors: Sequence[TensorSpec | None]) -> bool:
    """Whether a look-back is faster than passes, where programs that have begun go on: lanes fill
    its tiles. Where they do not, Triton moves values between threads."""
    if len(spec.operator.used_inputs) > tiles.LOOKBACK_READ or not can_look_back(spec, tensors):
        return False
    layout = lay_out(spec, tensors_by_name(spec, tensors))
    return layout.rows[-1].size % tile_of_lookback(spec, tensors, layout).chains == 0


def tile_of_lookback(spec: Spec, tensors: Sequence[TensorSpec | None], layout: Layout) -> Tile:
    inputs = [t for t in tensors[: len(spec.operator.inputs)] if t is not None]
    size = max((scalar_size(t.dtype) for t in inputs), default=4)
    return tiles.lookback_tile(spec.operator, size, layout.rows[-1].size, spec.device.type == "cpu")


def add_scan(
    commands: CommandList, spec: Spec, slots: Sequence[Slot]
) -> tuple[list[Slot], list[Slot]]:
    """Another scan of this engine on tensors in these slots: its outputs and finals."""
    return commands.inline(prepare(spec, [commands.spec_of(k) for k in slots]), slots)


def prepare_reduction(spec: Spec, tensors: Sequence[TensorSpec | None], length: int) -> Executable:
    """The finals without outputs: every chunk is reduced as a packed sequence of its own, then the
    chunks' totals are reduced."""
    op = spec.operator
    leaves = whole_leaves(op, spec.final)
    commands = CommandList(spec, tensors)
    chunks, starts, _ = cut_axis(commands, length)
    totals = replace(
        spec, exclusive=False, init=None, from_identity=False, final=leaves,
        sequences=commands.spec_of(chunks).shape[0] - 1,
    )  # fmt: skip
    inputs = [commands.slots["input", k] for k in range(len(op.inputs))]
    first = triton_scan.prepare(
        totals, [*(commands.specs[k] for k in inputs), commands.spec_of(chunks)]
    )
    _, carries = commands.inline(first, [*inputs, chunks])
    given = None if spec.init is None else [k for k in leaves if k in spec.init]
    together = ScanSpec(
        leaf_carry_operator(op, leaves), totals.carry_batch, 0, spec.device, spec.reverse,
        init=None if given is None else tuple(leaves.index(k) for k in given),
        from_identity=spec.from_identity, final=tuple(leaves.index(k) for k in spec.final),
        sequences=spec.sequences,
    )  # fmt: skip
    slots = [*carries, *(commands.slots["init", k] for k in given or ())]
    _, finals = add_scan(commands, together, [*slots, *([] if starts is None else [starts])])
    return commands.build(
        [], finals, lambda: replace(first.plan, engine=f"multipass (chunks of {length})")
    )


def whole_leaves(op: Operator, final: tuple[int, ...]) -> tuple[int, ...]:
    """The state leaves that a total for these final ones consists of."""
    parts = spans(op.state)
    while True:
        needed = set(op.aggregate_components(final))
        leaves = tuple(k for k, span in enumerate(parts) if needed & set(span))
        if set(leaves) == set(final):
            return leaves
        final = leaves


def chunk_length(spec: Spec) -> int:
    """How many steps a chunk has."""
    interpreted = spec.device.type == "cpu"
    return choose_chunk(spec.length, spec.chains, processors(spec.device), interpreted)


@functools.lru_cache(maxsize=512)
def leaf_carry_operator(op: Operator, leaves: tuple[int, ...]) -> Operator:
    """`op` without outputs on states of these leaves, in the dtypes of carries."""
    parts = spans(op.state)
    components = tuple(c for k in leaves for c in parts[k])
    scalar = carry_operator(op, components)
    state = tuple(Leaf(op.state[k].accumulator, op.state[k].shape) for k in leaves)
    identity = None if op.identity is None else tuple(op.identity[c] for c in components)
    return Operator(
        scalar.name, state, state, (), scalar.lift, scalar.combine, scalar.lower.select(()),
        identity,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def carry_operator(op: Operator, components: tuple[int, ...]) -> Operator:
    """`op` on elements that are totals already: one scalar leaf per component."""
    kinds = [op.combine.output_dtypes[c] for c in components]
    n = len(components)
    place = {c: k for k, c in enumerate(components)}
    both = Builder([*kinds, *kinds])
    arguments = [place.get(c, 0) for c in range(op.width)]
    arguments += [n + place.get(c, 0) for c in range(op.width)]
    one, shown = Builder(kinds), Builder([*kinds, *kinds, "b1"])
    leaves = tuple(Leaf(EXACT_DTYPES[kind]) for kind in kinds)
    return Operator(
        composed(f"{op.name} (carries)"), leaves, leaves, leaves, one.build(list(range(n))),
        both.build(both.inline(op.combine.select(list(components)), arguments)),
        shown.build(list(range(n))), None,
    )  # fmt: skip
