"""`Scope`: the text that computes values of a step, written as they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ...program.cpp_and_triton_expressions import CPP
from ...program.program_builder import Instruction, decode
from .leaves import WIDE
from .step_graph import StepGraph, Turn

if TYPE_CHECKING:
    from .step_text import StepText

LEVELS = ("step", "lane", "state")


class Scope:
    """One turn's values. In MAIN a line stands at one of three levels: once for the step, in the
    loop over the thread's lanes (`i`), or in the loop over its states (`k`). In BEGIN and FINISH
    all lines are of one step and lane, in a loop over the thread's lanes.

    known: names of values that are not computed here. handed: the values that BEGIN left in shared
    memory; none for BEGIN itself. The lines refer to the variables of `VectorText` and `StepText`.
    """

    def __init__(
        self, step: StepText, is_main: bool, handed: Collection[int],
        known: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        self.step, self.graph, self.is_main = step, step.graph, is_main
        self.handed = handed
        self.names: dict[int, str] = dict(known or {})
        self.lines: dict[str, list[str]] = {level: [] for level in LEVELS}

    def value(self, v: int) -> str:
        """The name of a value."""
        if v not in self.names:
            self.names[v] = self.computed(v)
        return self.names[v]

    def computed(self, v: int) -> str:
        graph = self.graph
        if v < graph.inputs:
            return self.input(v)
        i = graph.instruction(v)
        if i.op == "const":
            return CPP.literal(decode(i.literal), i.dtype)
        if v in self.handed:
            kind = CPP.types[i.dtype]
            index = f"j * {self.step.pitch} + g * CHANNELS"
            at = f"fixed + {self.step.places[v]} + ({index}) * (int)sizeof({kind})"
            return self.load_lanes(kind, kind, f"v{v}", at)
        level = "state" if self.is_main and graph.varies[v] else "lane"
        return self.define(level, CPP.types[i.dtype], f"v{v}", self.expression(v, i))

    def expression(self, v: int, i: Instruction) -> str:
        if i.op == "exp" and i.dtype == "f32" and self.is_main and self.graph.turns[v] is Turn.MAIN:
            return self.power(i.args[0])
        for a in i.args:
            self.value(a)
        return CPP.expression(i, self.names, self.graph.program.dtypes)  # type: ignore[arg-type]

    def power(self, v: int) -> str:
        """e^v as a power of 2. Where v = x·y and y is equal at all steps, y·log2(e) is computed
        once for all of them."""
        if v >= self.graph.inputs and v not in self.names:
            i = self.graph.instruction(v)
            if i.op == "mul":
                for x, y in (i.args, i.args[::-1]):
                    if y in self.step.steady:
                        return f"exp2_fast({self.value(x)} * ({self.value(y)} * LOG2E))"
        return f"exp2_fast({self.value(v)} * LOG2E)"

    def define(self, level: str, kind: str, name: str, value: str) -> str:
        self.lines[level].append(f"const {kind} {name} = {value};")
        return name

    def input(self, v: int) -> str:
        """A leaf's part: from a register if it is equal at all steps, else from the stage, or, if
        it varies along everything, from memory."""
        step, leaf = self.step, self.step.leaves[v]
        assert leaf is not None, v
        kind = CPP.types[leaf.kind]
        if not leaf.port.varies_in_time:
            lane = "[i]" if leaf.port.lane else ""
            return f"w_{leaf.tag}{lane}{'[k]' if leaf.port.state else ''}"
        if not leaf.is_staged:
            place = step.text.address(leaf, "t", "(lane0 + c)", f"(q * {step.text.tile.each} + k)")
            found = f"here(i, k) ? from_memory<{kind}>({place}) : ({kind})0"
            return self.define("state", kind, f"x_{leaf.tag}", found)
        region = step.text.region(leaf)
        start = f"fixed_stage + {region.at} + j * {region.pitch}"
        if leaf.port.state:
            each, memory, size = step.text.tile.each, leaf.memory, leaf.itemsize
            if region.wide is not None:
                memory, size = kind, WIDE
                start = f"fixed_wide + {region.wide} + j * {region.wide_pitch}"
            self.lines["step"].append(f"{kind} x_{leaf.tag}[{each}];")
            self.lines["step"].append(
                f"load_frozen_items<{kind}, {memory}>(x_{leaf.tag}, {start} + q * {each * size});"
            )
            return f"x_{leaf.tag}[k]"
        if leaf.port.lane:
            place = f"{start} + g * (CHANNELS * {leaf.itemsize})"
            return self.load_lanes(kind, leaf.memory, f"x_{leaf.tag}", place)
        value = f"load_frozen_item<{kind}, {leaf.memory}>({start})"
        return self.define("step", kind, f"x_{leaf.tag}", value)

    def load_lanes(self, kind: str, memory: str, name: str, place: str) -> str:
        """Load the values of all lanes of the thread, which are adjacent, at once."""
        self.lines["step"] += [
            f"{kind} {name}[CHANNELS];", f"load_frozen_items<{kind}, {memory}>({name}, {place});"
        ]  # fmt: skip
        return f"{name}[i]"


def steady_values(graph: StepGraph, inputs: set[int]) -> set[int]:
    """The values that depend on nothing but these inputs and constants."""
    found = set(inputs)
    for v, i in enumerate(graph.program.instructions, graph.inputs):
        if all(a in found for a in i.args):
            found.add(v)
    return found
