"""Gradients that are summed over the lanes of a program.

Each warp adds up its own lanes group by group, and keeps the sums in memory. They are added up over
the warps at the beginning of the next chunk, where warps wait for each other anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ...base.vectors.kernel import CHUNK, BackwardKernel, VectorPort
from ..emitter import joined
from .exchange import Exchange
from .grouped_steps import GROUP
from .grouped_text import GroupedText
from .memory import Value

Part = tuple[int, int]  # of a gradient: its leaf's number, and its place in the leaf


def is_summed(gradient: VectorPort) -> bool:
    """Whether a gradient with states is summed over the lanes, step by step."""
    return gradient.state and gradient.varies_in_time and not gradient.lane


class LaneSumText(GroupedText):
    """Sums over lanes in one `BackwardKernel`."""

    kernel: BackwardKernel

    @cached_property
    def gradients(self) -> list[Part]:
        adjoint = self.kernel.operator
        return [(adjoint.wanted[k], n) for k, n in self.leaf_parts(adjoint.gradient_leaves)]

    @cached_property
    def summed(self) -> list[Part]:
        """The parts that are summed over the lanes."""
        return [(k, n) for k, n in self.gradients if is_summed(self.kernel.port["gradient", k])]

    @cached_property
    def lanes_of_warp(self) -> Exchange:
        """The lanes are shared evenly by the warps; threads of a lane are side by side."""
        lanes, threads = self.tile.lanes // self.tile.warps, self.tile.threads
        shape = f"[{self.tile.warps}, {lanes * threads}]"
        return Exchange(self, "lane", shape, lanes, threads)

    def of_present(self, value: str, k: int, shape: str) -> str:
        """A value of leaf k's gradient, 0 for lanes that do not exist."""
        whole = f"tl.broadcast_to({value}, {shape})"
        if self.tile.full:
            return whole
        return f"tl.where(present, {whole}, {TRITON.literal(0, self.op.inputs[k].scalar)})"

    def batches(self) -> Iterator[tuple[int, list[Part]]]:
        """The parts that are summed together, with the number of the first: those of one dtype, so
        many that their number is a power of two."""
        first = 0
        while first < len(self.summed):
            kinds = [self.op.inputs[k].scalar for k, _ in self.summed[first:]]
            same = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
            count = 1 << (same.bit_length() - 1)
            yield first, self.summed[first : first + count]
            first += count

    def keep_sums(self, sums: Mapping[Part, Sequence[Value]]) -> None:
        """Keep the sums over each warp's lanes. sums: of each part the values of all steps."""
        exchange, threads = self.lanes_of_warp, self.tile.threads
        for first, found in self.batches():
            values = [
                f"tl.reshape({name}, {exchange.shape})"
                for part in found for value in sums[part] for name in value
            ]  # fmt: skip
            kept = exchange.sums(values, f"kept{first}")
            kind, count = self.op.inputs[found[0][0]].scalar, len(kept)
            shape = f"[{self.pairs}]" if count > 1 else f"[{self.pairs}, 1]"
            text = joined([f"tl.reshape({self.as_bits(v, kind)}, {shape})" for v in kept])
            if count > 1:
                text = f"tl.reshape({text}, [{self.pairs}, {count}])"
            place, mask = f"pair * {count}", ""
            if len(values) < exchange.count:  # lane t has sum t % n: only the first n lanes store
                lane = f"pair // {threads}"
                mask = f", mask={lane} % {exchange.count} < {len(values)}"
                place = f"{lane} // {exchange.count} * {len(values) * threads}"
                place = f"{place} + pair % {exchange.count * threads}"
            at = f"{self.partials(first)} + g * {self.group_size(len(found))} + {place}"
            self(f"tl.store({at} + tl.arange(0, {count})[None, :], {text}{mask})")

    def group_size(self, parts: int) -> int:
        """The numbers that all warps keep for a group."""
        return parts * int(self.tile.warps) * GROUP * int(self.tile.states)

    def partials(self, first: int) -> str:
        """Where the sums are kept of the parts from number `first` of `summed` on: by group, by
        warp, by lane, by thread, and then in the order in which `Exchange.sums` leaves them."""
        groups = CHUNK // GROUP
        begin = f"tl.cast(tl.program_id(0), {self.index})"
        size = groups * self.group_size(len(self.summed))
        return f"partials0_ptr + {begin} * {size} + {groups * self.group_size(first)}"

    def add_sums(self) -> None:
        """Add up what the warps kept for the groups of the chunk after this one, if there is one.
        Each thread has the states of a step that a thread of a lane has."""
        tile, chunk = self.tile, CHUNK
        self(f"""
            sums_begin = start + (chunk + 1) * {chunk}
            sums_steps = tl.maximum(tl.minimum(count - sums_begin, {chunk}), 0) // {GROUP} * {GROUP}
            sums_pair = tl.arange(0, {chunk * tile.threads})[:, None] + origin
            sums_step = sums_pair // {tile.threads}
            sums_state = sums_pair % {tile.threads} * {tile.items}
            places = {self.place("(sums_begin + sums_step)", "count")}
        """)
        mask = "(sums_step < sums_steps)"
        if self.padded:
            state = "sums_state" if self.op.size % tile.items == 0 else "sums_state + item"
            mask += f" & ({state} < {self.op.size})"
        self(f"sums_exist = {mask}")
        for first, found in self.batches():
            group = self.group_size(len(found))
            for i, (k, n) in enumerate(found):
                place = f"sums_step // {GROUP} * {group} + {self.place_of_sums(i, len(found))}"
                warps = []
                for warp in range(tile.warps):
                    at = f"{self.partials(first)} + {warp * (group // tile.warps)} + {place}"
                    loaded = f"tl.load({at}, mask=sums_exist, other=0)"
                    warps.append(self.from_bits(loaded, self.op.inputs[k].scalar))
                total = self.folded("({0} + {1})", warps)
                memory = TRITON_MEMORY[self.kernel.port["gradient", k].dtype]
                at = self.at("gradient", k, n, "places", "row")
                stride = self.stride("gradient", k, "state")
                state = "sums_state + item" if stride == "1" else f"(sums_state + item) * {stride}"
                self(f"tl.store({at} + {state}, ({total}).to({memory}), mask=sums_exist)")

    def place_of_sums(self, part: int, parts: int) -> str:
        """Where the sums of a part are among what a warp keeps for a group."""
        tile = self.tile
        values = parts * GROUP * tile.items  # of a thread, before they were summed
        rest = values // min(self.lanes_of_warp.count, values)
        step, thread = f"(sums_step % {GROUP} + {part * GROUP})", f"sums_state // {tile.items}"
        if rest >= tile.items:  # the states of a thread are adjacent, which Triton can see so
            steps = rest // tile.items
            lane, at = f"{step} // {steps}", f"{step} % {steps} * {tile.items} + item"
        else:
            number = f"({step} * {tile.items} + item)"
            lane, at = f"{number} // {rest}", f"{number} % {rest}"
        return f"({lane} * {tile.threads} + {thread}) * {rest} + {at}"
