"""CUDA C++ of forward scans over vectors.

    tile by tile:  barrier → BEGIN → a few steps of MAIN → FINISH of these → the next steps → …

The carry stays in registers. Where a backward pass will follow, the carry before each chunk of
steps is stored, too. A reduction whose axis is cut has no tiles here: a block combines the totals
of all segments, and stores the final state.
"""

from __future__ import annotations

from ...engines.base.vectors.kernel import ForwardKernel
from ...program.cpp_and_triton_expressions import CPP
from .leaves import LeafPart, leaf_parts
from .scope import Scope
from .step_graph import StepGraph
from .step_text import StepText
from .text import VectorText, Widths
from .totals_source import forward_totals, load_total

# The steps that are unrolled, times lanes: as many as keep a tile's instructions in about as many
# kilobytes as there are OPERATIONS (docs/performance/vectors.md).
UNROLLED, OPERATIONS = 32, 800


class ForwardText(VectorText):
    """The text of one `ForwardKernel`."""

    kernel: ForwardKernel

    def __init__(self, kernel: ForwardKernel, widths: Widths, ragged: bool) -> None:
        super().__init__(kernel, widths, ragged)
        self.carry = kernel.carry
        self.outputs = leaf_parts("output", self.op.outputs, kernel)
        leaves = [*[None] * self.op.width, *self.inputs]
        self.first: StepText | None = None
        if not kernel.walks:
            return
        self.step = StepText(self, self.graph(False), leaves, "")
        self.first = StepText(self, self.graph(True), leaves, "first_") if kernel.first else None
        self.steps = [self.step, *([self.first] if self.first else [])]
        used = frozenset[int]().union(*(s.graph.program.used_inputs for s in self.steps))
        self.used = used
        self.stage_leaves(leaf if v in used else None for v, leaf in enumerate(leaves))

    def graph(self, first: bool) -> StepGraph:
        builder = self.op.builder()
        after, lowered = self.op.add_step(builder, first, self.kernel.exclusive)
        program = builder.build([*(after[c] for c in self.kernel.carry), *lowered])
        count = len(self.kernel.carry)
        results = {n: leaf.port.state for n, leaf in enumerate(self.outputs, count) if leaf}
        return StepGraph(
            program, self.op.step_varies, range(self.op.width), range(count), results, self.op.name
        )

    def text(self) -> str:
        kernel = self.kernel
        self.find_chains()
        if kernel.walks:
            self.load_steady([*[None] * self.op.width, *self.inputs], self.used)
            for step in self.steps:
                step.declare()
        self.enter()
        if kernel.walks:
            self.walk()
        is_last = kernel.cut and kernel.walks
        self(*(["if (tiles > 0 && last_tile == all_tiles) {"] if is_last else []))
        self.state_leaves("final", kernel.final, "s", load=False)
        self(*(["}"] if is_last else []))
        return self.whole()

    def walk(self) -> None:
        """All tiles of the block."""
        self.open_tiles(False)
        if self.first is not None:
            self("if (is_first) {")
            self.turns(self.first)
            self("} else {")
        if self.kernel.operator.saves_carries:
            self.store_carries()
        self.turns(self.step)
        self(*(["}"] if self.first is not None else []))
        self.close_tiles()

    def enter(self) -> None:
        """The carry before the first step: from init, or the identity."""
        for c in self.carry:
            varies, kind = self.op.state_varies[c], self.kinds[c]
            self.declare(f"s{c}", kind, varies)
            value = CPP.literal(self.op.identity_values[c], kind)
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if varies else '1'}; ++k)",
                 f"s{c}[i]{'[k]' if varies else ''} = {value};")  # fmt: skip
        self.state_leaves("init", self.kernel.initial, "s", load=True)
        if self.kernel.cut:
            self.enter_segment()

    def store_carries(self) -> None:
        """Store the carry before a chunk, for the backward pass."""
        item = self.kernel.carry_dtype.itemsize
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
        for c in self.carry:
            kind = CPP.types[self.kinds[c]]
            place = self.carry_place("(tile - START)", self.carry, c)
            if self.op.state_varies[c]:
                self(f"if (has_lane(i)) store_carry<{kind}, {item}>({place}, s{c}[i]);")
            else:
                self(f"if (has_lane(i) && q == 0) store_bits<{kind}, {item}>({place}, s{c}[i]);")
        self("}")

    def enter_segment(self) -> None:
        """The carry before the first step of a segment: combined with the totals of the segments
        before. Where there is no carry before the first step of all, it begins as a total."""
        totals, width = forward_totals(self.op), self.op.width
        program = self.op.combine.select(self.carry)
        graph = StepGraph(
            program, self.op.state_varies * 2, range(2 * width), range(len(self.carry)), {},
            self.op.name,
        )  # fmt: skip
        step = StepText(self, graph, [None] * (2 * width), "")
        names = {v: f"s{v}[i]{'[k]' if self.op.state_varies[v] else ''}" for v in self.carry}
        for n, c in enumerate(totals.parts):
            names[width + c] = f"total{n}[i]{'[k]' if totals.varies[n] else ''}"
        scope = Scope(step, True, (), names)
        new = []
        for c, v in zip(self.carry, program.outputs, strict=True):
            level, kind = "state" if self.op.state_varies[c] else "lane", CPP.types[self.kinds[c]]
            total = f"total{totals.parts.index(c)}[i]{'[k]' if level == 'state' else ''}"
            value = scope.value(v)
            first = f"START && n == 0 ? {total} : "
            new.append((c, level, f"const {kind} n{c} = {first}{value};"))
        self("UNROLL_BY(2) for (Index n = 0; n < segment; ++n) {")
        load_total(self, totals)
        lines = scope.lines
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {", *lines["step"], *lines["lane"],
             "UNROLL for (int k = 0; k < EACH; ++k) {", *lines["state"],
             *(line for _, level, line in new if level == "state"),
             *(f"{names[c]} = n{c};" for c, level, _ in new if level == "state"), "}",
             *(line for _, level, line in new if level == "lane"),
             *(f"{names[c]} = n{c};" for c, level, _ in new if level == "lane"),
             "}", "}")  # fmt: skip

    def turns(self, step: StepText) -> None:
        """All turns at one tile."""
        step.begin()
        if step is self.first:
            self.group(step, "0", full=False)
        else:
            operations = max(len(step.graph.program.instructions), 1)
            steps = min(UNROLLED, max(OPERATIONS // operations, 8))
            unroll = max(1, steps // (self.tile.together * self.tile.channels))
            loop = "for (int j0 = 0; j0 < CHUNK; j0 += TOGETHER)"
            self("if (size == CHUNK) {", f"UNROLL_BY({unroll}) {loop} {{")
            self.group(step, "j0", full=True)
            self("}", "} else {", "ROLLED for (int j0 = 0; j0 < size; j0 += TOGETHER) {")
            self.group(step, "j0", full=False)
            self("}", "}")

    def group(self, step: StepText, first: str, full: bool) -> None:
        """MAIN and FINISH at TOGETHER steps."""
        self("{")
        step.declare_sums()
        self(f"UNROLL for (int m = 0; m < TOGETHER; ++m) {{ const int j = {first} + m;")
        if not full:
            self("if (j < size) {")
        self.main(step)
        if not full:
            self("} else {", *step.no_sums("m"), "}")
        self("}")
        self.finish(step, first, full)
        self("}")

    def main(self, step: StepText) -> None:
        """MAIN at one step."""
        graph = step.graph
        carried = {}
        for c in self.carry:
            carried[c] = f"s{c}[i]{'[k]' if self.op.state_varies[c] else ''}"
        scope = Scope(step, True, graph.handed, carried)
        before, after = step.add_sums(scope, "m")
        results = list(graph.program.outputs)
        for leaf, v in zip(self.outputs, results[len(self.carry) :], strict=True):
            if leaf is not None and (leaf.port.state or graph.varies[v]):
                self.store_main(scope, leaf, scope.value(v))
        new = []
        for c, v in zip(self.carry, results, strict=False):
            level = "state" if self.op.state_varies[c] else "lane"
            kind = CPP.types[self.kinds[c]]
            name = scope.value(v)
            new.append((c, level, f"const {kind} n{c} = {name};"))
        self.write_step(scope, before, after, [
            *((level, line) for _, level, line in new),
            *((level, f"{carried[c]} = n{c};") for c, level, _ in new),
        ])  # fmt: skip

    def store_main(self, scope: Scope, leaf: LeafPart, value: str) -> None:
        """An output that varies along the states."""
        place = self.address(leaf, "t", "(lane0 + c)", "(q * EACH + k)")
        scope.lines["state"].append(f"if (here(i, k)) {place} = to_memory<{leaf.memory}>({value});")

    def finish(self, step: StepText, first: str, full: bool) -> None:
        """FINISH: the outputs that have one value for all states."""
        scope = step.scope_of_finish()
        results = []
        for leaf, v in zip(
            self.outputs, step.graph.program.outputs[len(self.carry) :], strict=True
        ):
            if leaf is not None and not (leaf.port.state or step.graph.varies[v]):
                results.append((leaf, scope.value(v)))
        step.finish(scope, (), (), results, first, full)
