"""CUDA C++ of the totals of segments, where a long axis with few chains is cut.

A total says what a segment does to a carry that is not known yet. Going forward it is an element of
the monoid, all elements of the segment combined. Going back it is a map μ ↦ M·μ + l of cotangents
(`autodiff/vector_adjoint.total_step`). One block walks each segment of its lanes and stores the
total. In the kernel that follows, a block combines the totals of the segments before its own (going
back: behind its own). That gives the carry that enters its segment; then it walks the segment and
writes all results. So inputs are read twice, and the exponentials of a selective scan are taken
twice, but no block waits for another.

A reduction has no results at its steps. There every segment has a total, and the blocks of the
kernel that follows stand behind the last segment: what enters there is the final state. Nor has a
backward pass that gives the gradient of init alone: its blocks combine all totals from the last one
to the first, and what comes out is that gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...autodiff.vector_adjoint import total_step
from ...engines.base.vectors.kernel import VectorKernel
from ...program.cpp_and_triton_expressions import CPP
from ...program.program_builder import Program
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator, part_dtypes, part_spans, parts
from .leaves import leaf_parts
from .scope import Scope
from .step_graph import NotExpressible, StepGraph
from .step_text import StepText
from .text import VectorText, Widths


@dataclass(frozen=True)
class Totals:
    """What is kept of a segment: some parts, each a number for every state, or one for the lane.

    program: one step. Its inputs are the leaves and the parts so far, its outputs the new parts.
    first_input: the numbers of the inputs that are parts. kinds, varies, start: of each part, its
    dtype, whether every state has a number of its own, and its value before the first step. parts:
    going forward, which parts of the state they are.
    """

    program: Program
    input_varies: tuple[bool, ...]
    first_input: tuple[int, ...]
    kinds: tuple[str, ...]
    varies: tuple[bool, ...]
    start: tuple[float, ...]
    parts: tuple[int, ...] = ()

    def sizes(self, states: int) -> list[int]:
        """The numbers of each part of one lane."""
        return [states if v else 1 for v in self.varies]


@functools.lru_cache(maxsize=256)
def forward_totals(op: VectorOperator) -> Totals:
    """Totals of segments of a forward scan. Raises NotExpressible without an identity."""
    if op.identity is None:
        raise NotExpressible(f"{op.name!r} has no identity, which totals of segments begin with")
    parts = tuple(op.carry_parts(range(len(op.state))))
    builder = op.builder()
    after, _ = op.add_step(builder, False, False)
    kinds = part_dtypes(op.state)
    return Totals(
        builder.build([after[c] for c in parts]), op.step_varies, parts,
        tuple(kinds[c] for c in parts), tuple(op.state_varies[c] for c in parts),
        tuple(op.identity_values[c] for c in parts), parts,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def backward_totals(adjoint: VectorAdjoint) -> Totals:
    """Totals of segments of a backward pass: l, then the columns of M. Raises NotExpressible where
    they depend on the states."""
    op, program = adjoint.op, total_step(adjoint)
    if program is None:
        raise NotExpressible(f"the totals of {adjoint.name!r} depend on its states")
    kinds = part_dtypes(op.state)
    own = tuple(kinds[c] for c in adjoint.carry)
    size = len(own)
    first = len(program.inputs) - size * (size + 1)
    seeds_vary = op.parts_vary(adjoint.cotangent_leaves)
    unit = [float(row == column) for column in range(size) for row in range(size)]
    return Totals(
        program, (*op.step_varies, *seeds_vary, *([True] * (size + size * size))),
        tuple(range(first, len(program.inputs))), own * (size + 1), (True,) * (size + size * size),
        (*([0.0] * size), *unit),
    )  # fmt: skip


@dataclass(frozen=True)
class TotalsKernel(VectorKernel):
    """One kernel that computes totals."""

    operator: VectorOperator | VectorAdjoint

    @property
    def vectors(self) -> VectorOperator:
        return self.operator if isinstance(self.operator, VectorOperator) else self.operator.op

    @property
    def name(self) -> str:
        return self.operator.name

    @property
    def totals(self) -> Totals:
        if isinstance(self.operator, VectorOperator):
            return forward_totals(self.operator)
        return backward_totals(self.operator)

    def reads(self) -> set[tuple[str, int]]:
        """The leaves that a total depends on, by role and number."""
        op, used = self.vectors, self.totals.program.used_inputs
        names = [("input", k) for k, leaf in enumerate(op.inputs) for _ in range(parts(leaf))]
        if isinstance(self.operator, VectorAdjoint):
            names += [
                ("cotangent", k) for k in self.operator.cotangents
                for _ in range(parts(op.outputs[k]))
            ]  # fmt: skip
        return {name for v, name in enumerate(names, op.width) if v in used}


class TotalsText(VectorText):
    """The text of one `TotalsKernel`."""

    kernel: TotalsKernel

    def __init__(self, kernel: TotalsKernel, widths: Widths, ragged: bool) -> None:
        super().__init__(kernel, widths, ragged)
        self.totals, self.is_backward = kernel.totals, isinstance(kernel.operator, VectorAdjoint)
        self.leaves = [*[None] * self.op.width, *self.inputs]
        if isinstance(kernel.operator, VectorAdjoint):
            given = leaf_parts("cotangent", self.op.outputs, kernel)
            spans = part_spans(self.op.outputs)
            self.leaves += [given[n] for k in kernel.operator.cotangents for n in spans[k]]
        totals = self.totals
        self.leaves += [None] * (len(totals.program.inputs) - len(self.leaves))
        count = len(totals.kinds)
        graph = StepGraph(
            totals.program, totals.input_varies, totals.first_input, range(count), {}, self.op.name
        )
        self.step = StepText(self, graph, self.leaves, "")
        used = totals.program.used_inputs
        self.used = used
        self.stage_leaves(leaf if v in used else None for v, leaf in enumerate(self.leaves))

    def name(self, n: int) -> str:
        return f"total{n}[i]{'[k]' if self.totals.varies[n] else ''}"

    def text(self) -> str:
        totals, step = self.totals, self.step
        self.find_chains()
        self.load_steady(self.leaves, self.used)
        step.declare()
        declare_total(self, totals)
        for n, value in enumerate(totals.start):
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if totals.varies[n] else '1'}; ++k)",
                 f"{self.name(n)} = {CPP.literal(value, totals.kinds[n])};")  # fmt: skip
        self.open_tiles(self.is_backward)
        step.begin()
        for condition, size in (("if (size == CHUNK) {", "CHUNK"), ("} else {", "size")):
            unroll = max(1, 8 // self.tile.channels) if size == "CHUNK" else 1
            number = f"{size} - 1 - n" if self.is_backward else "n"
            self(condition, f"UNROLL_BY({unroll}) for (int n = 0; n < {size}; ++n) {{",
                 f"const int j = {number};")  # fmt: skip
            self.one_step(step)
            self("}")
        self("}")
        self.close_tiles()
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {", "if (has_lane(i)) {")
        item = self.kernel.carry_dtype.itemsize
        for n, kind in enumerate(totals.kinds):
            place, store = total_place(self, totals, "segment", n), CPP.types[kind]
            if totals.varies[n]:
                self(f"store_carry<{store}, {item}>({place}, total{n}[i]);")
            else:
                self(f"if (q == 0) store_bits<{store}, {item}>({place}, total{n}[i]);")
        self("}", "}")
        return self.whole()

    def one_step(self, step: StepText) -> None:
        totals = self.totals
        known = {v: self.name(n) for n, v in enumerate(totals.first_input)}
        scope = Scope(step, True, step.graph.handed, known)
        new, kept = [], []
        for n, v in enumerate(totals.program.outputs):
            level = "state" if totals.varies[n] else "lane"
            value = scope.value(v)
            new.append((level, f"const {CPP.types[totals.kinds[n]]} n{n} = {value};"))
            kept.append((level, f"{self.name(n)} = n{n};"))
        self.write_step(scope, [], [], [*new, *kept])


def declare_total(text: VectorText, totals: Totals) -> None:
    for n, kind in enumerate(totals.kinds):
        text.declare(f"total{n}", kind, totals.varies[n])


def total_place(text: VectorText, totals: Totals, segment: str, n: int) -> str:
    """Where a part of a segment's total is kept, for lane i."""
    sizes = totals.sizes(text.tile.states)
    return text.state_place("totals0", segment, sum(sizes), sum(sizes[:n]), totals.varies[n])


def load_total(text: VectorText, totals: Totals) -> None:
    """Declare and load the total of segment n; zeros for lanes that do not exist."""
    declare_total(text, totals)
    item = text.kernel.carry_dtype.itemsize
    text("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
    for n, kind in enumerate(totals.kinds):
        place, load = total_place(text, totals, "n", n), CPP.types[kind]
        if totals.varies[n]:
            text(f"UNROLL for (int k = 0; k < EACH; ++k) total{n}[i][k] = ({load})0;",
                 f"if (has_lane(i)) load_carry<{load}, {item}>(total{n}[i], {place});")  # fmt: skip
        else:
            text(f"total{n}[i] = has_lane(i) ? load_bits<{load}, {item}>({place}) : ({load})0;")
    text("}")
