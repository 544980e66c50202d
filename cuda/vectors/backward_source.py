"""CUDA C++ of backward passes over vectors (`autodiff/vector_adjoint`).

    tile by tile, from the last one (a tile is a chunk, whose first carry is saved; it is copied to
    shared memory a tile ahead):
        barrier → BEGIN
        MAIN  forwards: the carry before each group of steps, to shared memory
              backwards, group by group: its states again, in registers; then pull the cotangent
              of the carry back through each step; FINISH of these steps
        barrier → sums of rows over the block

Where the axis is cut and the gradient of init alone is wanted, nothing is walked: `enter_segment`
combines all totals, and `leave` stores the result.

Gradients of leaves with one value per step and lane are sums over the states, and are stored in
FINISH. The gradient of a row (one value per step and state, for all lanes) is summed over a
thread's lanes, over a warp by exchanges, and over the block in shared memory; torch sums what
several blocks add up, in a fixed order. The gradient of a leaf that is equal at all steps is summed
in registers.

Names in the text, besides those in `text`: h0, …: the carry before each step of a group; y…: the
values that the recomputation keeps for the way back; m0, …: the cotangent of the carry; d…, e…:
sums of gradients, of MAIN and of FINISH; r…: what a step adds to the gradient of a row.
"""

from __future__ import annotations

from ...autodiff.vector_adjoint import backward_step, with_shared_products
from ...engines.base.vectors.kernel import CHUNK, BackwardKernel
from ...program.cpp_and_triton_expressions import CPP
from ...program.vectors.vector_operator import part_dtypes
from .gradient_text import GradientText
from .leaves import LeafPart, is_narrow, leaf_parts
from .scope import Scope
from .step_graph import StepGraph, Turn
from .step_text import StepText
from .text import SCALAR_BYTES, Widths
from .totals_source import backward_totals, load_total

WALKED = 8  # steps forwards that are unrolled, times lanes (docs/performance/vectors.md)


class BackwardText(GradientText):
    """The text of one `BackwardKernel`."""

    kernel: BackwardKernel

    def __init__(self, kernel: BackwardKernel, widths: Widths, ragged: bool) -> None:
        super().__init__(kernel, widths, ragged)
        self.adjoint = kernel.operator
        self.carry = list(self.adjoint.carry)
        self.gradients: list[LeafPart] = []
        if not kernel.walks:  # what follows is of the walk
            return
        op = self.op
        cotangents = [
            leaf for leaf in leaf_parts("cotangent", op.outputs, kernel) if leaf is not None
        ]
        self.leaves = [*[None] * op.width, *self.inputs, *cotangents, *[None] * len(self.carry)]
        self.mu_at = len(self.leaves) - len(self.carry)
        wanted = leaf_parts("gradient", op.inputs, kernel)
        self.gradients = [leaf for leaf in wanted if leaf is not None]
        self.kept: dict[str, list[int]] = {}
        self.step = StepText(self, self.graph(False, ""), self.leaves, "")
        self.first = None
        if kernel.first:
            self.first = StepText(self, self.graph(True, "first_"), self.leaves, "first_")
        self.steps = [self.step, *([self.first] if self.first else [])]
        used = frozenset[int]().union(*(s.graph.program.used_inputs for s in self.steps))
        self.used = used
        self.stage_leaves(leaf if v in used else None for v, leaf in enumerate(self.leaves))
        tile = self.tile
        self.edges = {
            c: self.reserve(
                CHUNK // tile.group * tile.threads * tile.channels
                * (tile.each if op.state_varies[c] else 1) * SCALAR_BYTES.get(self.kinds[c], 4)
            ) for c in self.carry
        }  # fmt: skip
        # Each thread copies the carry of its own states, a tile ahead.
        self.carry_at, self.carry_bytes = dict[int, int](), 0
        for c in self.carry:
            self.carry_at[c] = self.carry_bytes
            self.carry_bytes += tile.threads * tile.channels * self.own_bytes(c)
        self.carry_ring = self.reserve(tile.stages * self.carry_bytes)
        self.reserve_sums()

    def own_bytes(self, c: int) -> int:
        """The bytes of a part of the saved carry, for one lane of a thread."""
        each = self.tile.each if self.op.state_varies[c] else 1
        return each * self.kernel.carry_dtype.itemsize

    def graph(self, first: bool, tag: str) -> StepGraph:
        """Both programs of a backward step in one: the carry, the kept values, the cotangent of the
        carry, the gradients."""
        op, adjoint = self.op, self.adjoint
        step = backward_step(adjoint, first)
        kinds = part_dtypes(adjoint.cotangent_leaves)
        varies = op.parts_vary(adjoint.cotangent_leaves)
        count, carried = len(op.step_inputs), len(self.carry)
        more = [*kinds, *(self.kinds[c] for c in self.carry)]
        more_varies = [*varies, *(op.state_varies[c] for c in self.carry)]
        builder = op.builder(more, more_varies)
        recomputed = builder.inline(step.recomputed, range(count))
        seeds = range(count, count + len(kinds))
        incoming = range(count + len(kinds), count + len(kinds) + carried)
        pulled = builder.inline(
            step.pulled,
            [*range(count), *recomputed[:carried], *seeds, *incoming, *recomputed[carried:]],
        )
        program = builder.build([*recomputed, *pulled])
        program = with_shared_products(program, op.builder(more, more_varies), count)
        kept = len(step.kept)
        # The kept values, between the two carries, are no results.
        first_gradient = 2 * carried + kept
        graph = StepGraph(
            program, [*op.step_varies, *varies, *(op.state_varies[c] for c in self.carry)],
            {*range(op.width), *incoming},
            [*range(carried), *range(carried + kept, first_gradient)],
            {n: leaf.port.state for n, leaf in enumerate(self.gradients, first_gradient)}, op.name,
            {v for v, leaf in enumerate(self.leaves) if leaf and is_narrow(leaf)},
        )  # fmt: skip
        self.kept[tag] = sorted({
            v for v in program.outputs[carried : carried + kept]
            if v >= graph.inputs and graph.turns[v] is Turn.MAIN
        })  # fmt: skip
        return graph

    def text(self) -> str:
        self.find_chains()
        if self.kernel.walks:
            self.load_steady(self.leaves, self.used)
            for step in self.steps:
                step.declare()
            self.declare_places()
        self.enter()
        if self.kernel.walks:
            self.walk()
        self.leave()
        return self.whole()

    def walk(self) -> None:
        """All tiles of the block."""
        for c in self.carry:
            self.declare(f"h{c}", self.kinds[c], self.op.state_varies[c], "[GROUP + 1]")
        self.open_tiles(True)
        if self.first is not None:
            self("if (is_first) {")
            self.first_tile(self.first)
            self("} else {")
        self.chunk()
        self(*(["}"] if self.first is not None else []))
        self.close_tiles()

    def declare_places(self) -> None:
        for c, at in self.edges.items():
            kind = CPP.types[self.kinds[c]]
            self(f"{kind}* const edge{c} = ({kind}*)(shared + {at});", f"(void)edge{c};")
        self.declare_sums()

    def enter(self) -> None:
        """The cotangent of the carry that leaves, and sums of nothing."""
        for c in self.carry:
            varies, kind = self.op.state_varies[c], self.kinds[c]
            self.declare(f"m{c}", kind, varies)
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if varies else '1'}; ++k)",
                 f"m{c}[i]{'[k]' if varies else ''} = 0;")  # fmt: skip
        self.state_leaves("seed", self.adjoint.seeded, "m", load=True)
        if self.kernel.cut:
            self.enter_segment()
        for leaf in self.gradients:
            kind, port = CPP.types[leaf.kind], leaf.port
            if port.varies_in_time:
                continue
            if not port.state:
                self(f"{kind} e_{leaf.tag}{'[CHANNELS]' if port.lane else ''} = {{}};")
                continue
            size = "[CHANNELS][EACH]" if port.lane else "[EACH]"
            self(f"{kind} d_{leaf.tag}{size};",
                 f"UNROLL for (int i = 0; i < {'CHANNELS' if port.lane else '1'}; ++i)",
                 "UNROLL for (int k = 0; k < EACH; ++k)",
                 f"d_{leaf.tag}{'[i]' if port.lane else ''}[k] = 0;")  # fmt: skip

    def enter_segment(self) -> None:
        """The cotangent of the carry that leaves a segment: μ ↦ M·μ + l for each of the segments
        behind it, from the last one. Without a walk, `segment` is the number of segments, and all
        of them are combined."""
        totals, count = backward_totals(self.adjoint), len(self.carry)
        behind = "segments - 1; n > segment" if self.kernel.walks else "segment - 1; n >= 0"
        self(f"UNROLL_BY(2) for (Index n = {behind}; --n) {{")
        load_total(self, totals)
        self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
             "UNROLL for (int k = 0; k < EACH; ++k) {")  # fmt: skip
        for row, c in enumerate(self.carry):
            columns = (
                f" + total{(col + 1) * count + row}[i][k] * m{other}[i][k]"
                for col, other in enumerate(self.carry)
            )
            kind = CPP.types[self.kinds[c]]
            self(f"const {kind} n{c} = total{row}[i][k]{''.join(columns)};")
        self(*(f"m{c}[i][k] = n{c};" for c in self.carry), "}", "}")

    # ---- MAIN ----

    def state_name(self, c: int, m: str) -> str:
        return f"h{c}[{m}][i]{'[k]' if self.op.state_varies[c] else ''}"

    def kept_name(self, step: StepText, v: int, m: str) -> str:
        return f"{step.tag}y{v}[{m}][i]{'[k]' if step.graph.varies[v] else ''}"

    def before(self, m: str) -> dict[int, str]:
        """The names of the carry before step m of a group."""
        return {c: self.state_name(c, m) for c in self.carry}

    def advance(self, step: StepText, m: str, after: str, keep: bool) -> None:
        """One step forwards, from h[m] to h[after]; with the kept values if `keep`."""
        scope = Scope(step, True, step.graph.handed, self.before(m))
        outputs = step.graph.program.outputs
        carried = []
        for c, v in zip(self.carry, outputs, strict=False):
            level = "state" if self.op.state_varies[c] else "lane"
            name = scope.value(v)
            carried.append((level, f"const {CPP.types[self.kinds[c]]} n{c} = {name};"))
        for v in self.kept[step.tag] if keep else []:
            level = "state" if step.graph.varies[v] else "lane"
            carried.append((level, f"{self.kept_name(step, v, m)} = {scope.value(v)};"))
        for c in self.carry:
            level = "state" if self.op.state_varies[c] else "lane"
            carried.append((level, f"{self.state_name(c, after)} = n{c};"))
        self.write_step(scope, [], [], carried)

    def pull(self, step: StepText, m: str, slot: str) -> None:
        """One step backwards, number m of a group; `slot`: its number among those whose sums are
        exchanged together."""
        graph, carried = step.graph, len(self.carry)
        outputs = graph.program.outputs
        known = self.before(m)
        for c, v in zip(self.carry, outputs, strict=False):
            # A value that all states share is computed before the loop over them.
            if v >= graph.inputs and graph.varies[v] == self.op.state_varies[c]:
                known[v] = self.state_name(c, f"{m} + 1")
        known |= {v: self.kept_name(step, v, m) for v in self.kept[step.tag]}
        for n, c in enumerate(self.carry):
            known[self.mu_at + n] = f"m{c}[i]{'[k]' if self.op.state_varies[c] else ''}"
        scope = Scope(step, True, graph.handed, known)
        results = outputs[len(outputs) - carried - len(self.gradients) :]
        before, after = step.add_sums(scope, slot)
        for leaf, v in zip(self.gradients, results[carried:], strict=True):
            if leaf.port.state:
                self.add_gradient(scope, leaf, scope.value(v))
        new = []
        for c, v in zip(self.carry, results, strict=False):
            level = "state" if self.op.state_varies[c] else "lane"
            new.append((c, level, scope.value(v)))
        self.write_step(scope, before, after, [
            *((level, f"const {CPP.types[self.kinds[c]]} n{c} = {name};")
              for c, level, name in new),
            *((level, f"m{c}[i]{'[k]' if level == 'state' else ''} = n{c};")
              for c, level, _ in new),
        ])  # fmt: skip

    def chunk(self) -> None:
        """All turns at a chunk."""
        step = self.step
        self.load_carries()
        step.begin()
        self("if (size == CHUNK) {")
        self.groups(step, full=True)
        self("} else {")
        self.groups(step, full=False)
        self("}")
        self.sum_lines()
        if not self.tile.sums_by_group:
            self.sum_rows("0", "size")

    def staged_carry(self, c: int, number: str) -> str:
        """Where the saved carry of lane i is in shared memory, of the tile in round `number`."""
        at = self.carry_ring + self.carry_at[c]
        return (
            f"shared + {at} + {number} % STAGES * {self.carry_bytes} + "
            f"(i * THREADS + tid) * {self.own_bytes(c)}"
        )

    def stage_more(self) -> None:
        """Start copies of the carry before the tile `next`; zeros for lanes that do not exist."""
        self(*(["if (!is_first) {"] if self.first is not None else []))
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
        for c in self.carry:
            place = self.carry_place("(next - START)", self.adjoint.saved_parts, c)
            self(f"stage_bytes<{self.own_bytes(c)}>({self.staged_carry(c, 'ahead')}, "
                 f"has_lane(i) ? {place} : P.carries0, has_lane(i));")  # fmt: skip
        self(*(["}"] if self.first is not None else []), "}")

    def load_carries(self) -> None:
        """Load the carry before the tile: what this thread copied itself."""
        item = self.kernel.carry_dtype.itemsize
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
        for c in self.carry:
            kind, place = CPP.types[self.kinds[c]], self.staged_carry(c, "n")
            if self.op.state_varies[c]:
                self(f"load_carry<{kind}, {item}>(h{c}[0][i], {place});")
            else:
                self(f"h{c}[0][i] = load_bits<{kind}, {item}>({place});")
        self("}")

    def move_edges(self, load: bool) -> None:
        """Load or store the carry before group e, of all lanes i."""
        self("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
        for c in self.carry:
            kind, name, varies = CPP.types[self.kinds[c]], f"h{c}[0][i]", self.op.state_varies[c]
            each = "EACH" if varies else "1"
            at = f"edge{c} + ((e * CHANNELS + i) * THREADS + tid) * {each}"
            if varies:
                self(f"load_items<{kind}, {kind}>({name}, (const char*)({at}));" if load else
                     f"store_items((char*)({at}), {name});")  # fmt: skip
            else:
                self(f"{name} = *({at});" if load else f"*({at}) = {name};")
        self("}")

    def groups(self, step: StepText, full: bool) -> None:
        """MAIN at a chunk. full: it has CHUNK steps."""
        group = self.tile.group
        here = "" if full else "if (j < size) "
        count = f"{CHUNK // group}" if full else "(size + GROUP - 1) / GROUP"
        self(f"const int groups = {count};", "ROLLED for (int e = 0; e < groups; ++e) {")
        self.move_edges(load=False)
        unroll = max(1, WALKED // self.tile.channels)
        self("if (e + 1 < groups) {",
             f"UNROLL_BY({unroll}) for (int o = 0; o < GROUP; ++o) {{",
             "const int j = e * GROUP + o;")  # fmt: skip
        self.advance(step, "0", "0", keep=False)
        self("}", "}", "}", "ROLLED for (int e = groups - 1; e >= 0; --e) {")
        self.move_edges(load=True)
        self.declare_kept(step)
        self("UNROLL for (int m = 0; m < GROUP; ++m) {", "const int j = e * GROUP + m;",
             f"{here}{{")  # fmt: skip
        self.advance(step, "m", "m + 1", keep=True)
        self("}", "}")
        self("UNROLL for (int b = GROUP / TOGETHER - 1; b >= 0; --b) {")
        self.pulls(step, "e * GROUP + b * TOGETHER", "b * TOGETHER + slot", here)
        self("}")
        if self.tile.sums_by_group:
            self.sum_rows("e * GROUP", "GROUP" if full else "min_int(GROUP, size - e * GROUP)")
        self("}")

    def declare_kept(self, step: StepText) -> None:
        for v in self.kept[step.tag]:
            self.declare(f"{step.tag}y{v}", step.kind(v), step.graph.varies[v], "[GROUP]")

    def pulls(self, step: StepText, first: str, m: str, here: str) -> None:
        """TOGETHER steps backwards. Gradients of rows are summed over the warp for ROW_TOGETHER
        steps at once."""
        step.declare_sums()
        self("UNROLL for (int batch = TOGETHER / ROW_TOGETHER - 1; batch >= 0; --batch) {")
        for leaf in self.rows:
            self(f"{CPP.types[leaf.kind]} r_{leaf.tag}[ROW_TOGETHER * EACH];",
                 f"UNROLL for (auto& r : r_{leaf.tag}) r = 0;")  # fmt: skip
        self("UNROLL for (int own = ROW_TOGETHER - 1; own >= 0; --own) {",
             "const int slot = batch * ROW_TOGETHER + own;",
             f"const int m = {m}, j = {first} + slot;", f"{here}{{")  # fmt: skip
        self.pull(step, "m", "slot")
        self("}")
        if here and step.summed:
            self("else {", *step.no_sums("slot"), "}")
        self("}")
        for leaf in self.rows:
            place = self.row(leaf, "tid / 32", f"{first} + batch * ROW_TOGETHER")
            self(f"combine_over<Add, 32 / SPREAD, SPREAD>(r_{leaf.tag});",
                 f"store_row({place} + q * EACH, r_{leaf.tag});")  # fmt: skip
        self("}")
        self.finish(step, first, not here)

    def first_tile(self, step: StepText) -> None:
        """All turns at the first step, which has no carry before it."""
        for c in self.carry:  # not read
            varies = self.op.state_varies[c]
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if varies else '1'}; ++k)",
                 f"h{c}[0][i]{'[k]' if varies else ''} = 0;")  # fmt: skip
        step.begin()
        self.declare_kept(step)
        self("{", "const int j = 0, m = 0;", "(void)m;")
        self.advance(step, "0", "1", keep=True)
        self("}")
        self.pulls(step, "0", "slot", "if (j < size) ")
        self.sum_lines()
        self.sum_rows("0", "1")

    # ---- FINISH ----

    def finish(self, step: StepText, first: str, full: bool) -> None:
        """FINISH of TOGETHER steps: the gradients that have one value for all states."""
        outputs = step.graph.program.outputs
        results = outputs[len(outputs) - len(self.gradients) :]
        scope, sums, lines, stored = step.scope_of_finish(), [], [], []
        for leaf, v in zip(self.gradients, results, strict=True):
            if leaf.port.state:
                continue
            value, kind = scope.value(v), CPP.types[leaf.kind]
            if not leaf.port.varies_in_time:
                sums.append(f"e_{leaf.tag}{'[i]' if leaf.port.lane else ''} += {value};")
            elif leaf.port.lane:
                stored.append((leaf, value))
            else:
                lines.append(f"line_{leaf.tag}[j * LANES + c] = has_lane(i) ? {value} : ({kind})0;")
        step.finish(scope, sums, lines, stored, first, full)
