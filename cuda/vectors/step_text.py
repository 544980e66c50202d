"""`StepText`: the text of the three turns at one kind of step (`step_graph`)."""

from __future__ import annotations

from collections.abc import Sequence

from ...engines.base.vectors.kernel import CHUNK
from ...program.cpp_and_triton_expressions import CPP
from ...program.program_builder import integer_range
from ...program.vectors.state_axis import REDUCTIONS
from .leaves import LeafPart
from .scope import Scope, steady_values
from .step_graph import StepGraph
from .text import SCALAR_BYTES, VectorText

COMBINE = {"add": "Add", "max": "Max", "min": "Min"}


class StepText:
    """The turns at one kind of step: of the first, which has no carry, or of the others.

    leaves: for each input of the graph, the part of a leaf that it is; None for inputs that come
    from the step before. tag: put before names; not empty for the first step, which has a tile of
    its own.
    """

    def __init__(
        self, text: VectorText, graph: StepGraph, leaves: Sequence[LeafPart | None], tag: str
    ) -> None:
        self.text, self.graph, self.leaves, self.tag = text, graph, leaves, tag
        steady = {v for v, leaf in enumerate(leaves) if leaf and not leaf.port.varies_in_time}
        self.steady = steady_values(graph, steady)
        self.summed = [*graph.sums, *graph.lifted]
        # How far apart the handed values of a step and of the next are, in numbers.
        self.pitch = text.tile.lanes + text.tile.row_lanes
        sizes = {
            v: -(-self.pitch * SCALAR_BYTES.get(self.kind(v), 4) // 16) * 16 for v in graph.handed
        }
        self.places = {}
        if tag and sum(sizes.values()) <= text.handed_bytes:
            at = text.handed_at  # the same memory: no tile has steps of both kinds
            for v, size in sizes.items():
                self.places[v], at = at, at + size
        else:
            steps = 1 if tag else CHUNK
            text.handed_at = text.shared
            self.places = {v: text.reserve(steps * size) for v, size in sizes.items()}
            text.handed_bytes = text.shared - text.handed_at

    def kind(self, v: int) -> str:
        return self.graph.program.dtypes[v]

    def shared_name(self, v: int) -> str:
        return f"{self.tag}shared{v}"

    def declare(self) -> None:
        """The arrays in shared memory."""
        for v, at in self.places.items():
            kind = CPP.types[self.kind(v)]
            self.text(f"{kind}* const {self.shared_name(v)} = ({kind}*)(shared + {at});")

    def begin(self) -> None:
        """The turn BEGIN. After it, nothing writes the tile's leaves and handed values in shared
        memory: they are read as `Frozen`."""
        self.text("const Frozen fixed_stage = frozen(stage);", "(void)fixed_stage;")
        if self.text.wide_bytes:
            at = f"shared + {self.text.wide_ring} + n % 2 * {self.text.wide_bytes}"
            self.text(f"const Frozen fixed_wide = frozen({at});", "(void)fixed_wide;")
        if self.graph.handed:
            self.hand_over()
        self.text("const Frozen fixed = frozen(shared);", "(void)fixed;")

    def hand_over(self) -> None:
        """The turn BEGIN: each thread of a lane takes some of the tile's steps. Only the threads of
        the lane read the results, so a barrier of the warp suffices."""
        scope = Scope(self, False, ())
        found = [(v, scope.value(v)) for v in self.graph.handed]
        self.text("UNROLL for (int o = 0; o < CHUNK; o += SPREAD) {", "const int j = q + o;",
                  "if (j < size) {", *scope.lines["step"],
                  "UNROLL for (int i = 0; i < CHANNELS; ++i) {",
                  "const int c = g * CHANNELS + i;", *scope.lines["lane"],
                  *(f"{self.shared_name(v)}[j * {self.pitch} + c] = {name};"
                    for v, name in found), "}", "}", "}", "sync_warp();")  # fmt: skip

    def scope_of_finish(self) -> Scope:
        """The values of FINISH."""
        return Scope(self, False, self.graph.handed, {v: f"p{v}[i][0]" for v in self.summed})

    # ---- sums over the states ----

    def declare_sums(self) -> None:
        """What a thread adds to the sums of the steps that are exchanged together."""
        for v in self.summed:
            self.text(f"{CPP.types[self.kind(v)]} p{v}[CHANNELS][TOGETHER];")

    def no_sums(self, m: str) -> list[str]:
        """For a step that does not exist."""
        return [f"UNROLL for (int i = 0; i < CHANNELS; ++i) p{v}[i][{m}] = 0;" for v in self.summed]

    def add_sums(self, scope: Scope, m: str) -> tuple[list[str], list[str]]:
        """The lines before and after the loop over the states. Lines inside it go to the scope."""
        before, after = [], []
        for v in self.graph.sums:
            i = self.graph.instruction(v)
            kind = CPP.types[i.dtype]
            op = COMBINE[REDUCTIONS[i.op]]
            before.append(f"{kind} sum{v} = {neutral(i.op, i.dtype)};")
            value = f"sum{v} = {op}::of(sum{v}, ({kind}){scope.value(i.args[0])});"
            known = f"if (q * EACH + k < {self.text.op.size}) " if self.text.padded else ""
            scope.lines["state"].append(known + value)
            after.append(f"p{v}[i][{m}] = sum{v};")
        after += [f"p{v}[i][{m}] = {scope.value(v)};" for v in self.graph.lifted]
        return before, after

    def finish(
        self, scope: Scope, sums: Sequence[str], lines: Sequence[str],
        stored: Sequence[tuple[LeafPart, str]], first: str, full: bool,
    ) -> None:  # fmt: skip
        """Exchange the sums of TOGETHER steps, from number `first` on; then the turn FINISH. After
        the exchange a thread has the sums of one step. If a lane has more threads than there are
        steps, several have the same one, and the first of them goes on. sums: lines of FINISH for
        lanes that exist. lines: for all lanes. stored: leaves with a value per step and lane, and
        the value to store. full: all these steps exist."""
        if not (self.summed or sums or lines or stored):
            return
        self.text("UNROLL for (int i = 0; i < CHANNELS; ++i) {")
        for v in self.summed:
            if v in self.graph.sums:
                op = COMBINE[REDUCTIONS[self.graph.instruction(v).op]]
                self.text(f"combine_over<{op}, SPREAD, 1>(p{v}[i]);")
            else:
                own = f"p{v}[i][0] = p{v}[i][m];"
                self.text("UNROLL for (int m = 1; m < TOGETHER; ++m)",
                          f"if (q / (SPREAD / TOGETHER) == m) {own}")  # fmt: skip
        self.text("}", "{", f"const int j = {first} + q / (SPREAD / TOGETHER);",
                  f"if (q % (SPREAD / TOGETHER) == 0{'' if full else ' && j < size'}) {{",
                  f"const Index t = {self.text.place('low + j')};", "(void)t;",
                  *(f"{leaf.memory} o_{leaf.tag}[CHANNELS];" for leaf, _ in stored),
                  *scope.lines["step"], "UNROLL for (int i = 0; i < CHANNELS; ++i) {",
                  "const int c = g * CHANNELS + i;", "(void)c;", *scope.lines["lane"],
                  *(f"o_{leaf.tag}[i] = to_memory<{leaf.memory}>({value});"
                    for leaf, value in stored),
                  "if (has_lane(i)) {", *sums, "}", *lines, "}")  # fmt: skip
        for leaf, _ in stored:
            self.text.store_lanes(leaf)
        self.text("}", "}")


def neutral(op: str, kind: str) -> str:
    """The value that changes no sum, maximum or minimum."""
    if op == "sum_states":
        return f"({CPP.types[kind]})0"
    if kind[0] == "f":
        return CPP.literal(float("-inf" if op == "max_states" else "inf"), kind)
    least, most = (0, 1) if kind == "b1" else integer_range(kind)
    return CPP.literal(least if op == "max_states" else most, kind)
