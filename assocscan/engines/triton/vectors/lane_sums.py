"""Gradients that are summed over the lanes of a program.

Each warp adds up its own lanes group by group, and keeps the sums in memory. After a chunk they are
added up over the warps, which wait for each other once for the whole chunk.
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
        """Add up what the warps kept for the groups of a chunk."""
        tile = self.tile
        self("tl.debug_barrier()")  # all warps have written their sums
        self(f"""
            row_step = tl.arange(0, {CHUNK})[:, None] + origin
            row_state = tl.arange(0, {tile.states})[None, :] + origin
            places = {self.place("(begin_chunk + row_step)", "count")}
            of_step = row_step % {GROUP} * {tile.items} + row_state % {tile.items}
        """)
        mask = f"(row_step < groups_here * {GROUP})"
        mask += f" & (row_state < {self.op.size})" if self.padded else ""
        for first, found in self.batches():
            values = len(found) * GROUP * tile.items  # of a thread, before they were summed
            rest = values // min(self.lanes_of_warp.count, values)
            group = self.group_size(len(found))
            for i, (k, n) in enumerate(found):
                kind = self.op.inputs[k].scalar
                number = f"(of_step + {i * GROUP * tile.items})"
                place = (
                    f"({number} // {rest} * {tile.threads} + row_state // {tile.items}) * {rest}"
                )
                place = f"row_step // {GROUP} * {group} + {place} + {number} % {rest}"
                warps = []
                for warp in range(tile.warps):
                    at = f"{self.partials(first)} + {warp * (group // tile.warps)} + {place}"
                    warps.append(self.from_bits(f"tl.load({at}, mask={mask}, other=0)", kind))
                row, step = (
                    self.at("gradient", k, n, "places", "row"),
                    self.state_step("gradient", k),
                )
                memory = TRITON_MEMORY[self.kernel.port["gradient", k].dtype]
                total = self.folded("({0} + {1})", warps)
                self(f"tl.store({row} + row_state * {step}, ({total}).to({memory}), mask={mask})")
