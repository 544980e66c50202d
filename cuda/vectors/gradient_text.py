"""`GradientText`: how a backward kernel adds up the gradients of leaves, and stores them.

Gradients that vary along the states are added up in MAIN. How they are summed depends on the leaf:

- rows (a value per step and state, for all lanes): over a thread's lanes, then over a warp by
  exchanges, then over the block in shared memory;
- lines (a value per step): over the block in shared memory;
- leaves that are equal at all steps: in registers over the steps, then, when the block has walked
  them all, over the block in shared memory.
"""

from __future__ import annotations

from ...engines.base.vectors.kernel import CHUNK, BackwardKernel
from ...program.cpp_and_triton_expressions import CPP
from .leaves import LeafPart
from .scope import Scope
from .text import SCALAR_BYTES, VectorText


class GradientText(VectorText):
    """gradients: the parts of the leaves whose gradient is wanted."""

    kernel: BackwardKernel
    gradients: list[LeafPart]

    @staticmethod
    def is_row(leaf: LeafPart) -> bool:
        """A gradient with a value per step and state, summed over the lanes."""
        return leaf.port.varies_in_time and leaf.port.state and not leaf.port.lane

    @staticmethod
    def is_line(leaf: LeafPart) -> bool:
        """A gradient with a value per step, summed over lanes and states."""
        return leaf.port.varies_in_time and not leaf.port.state and not leaf.port.lane

    def reserve_sums(self) -> None:
        """Shared memory for the sums over a block."""
        tile = self.tile
        self.rows = [leaf for leaf in self.gradients if self.is_row(leaf)]
        self.row_bytes = [SCALAR_BYTES.get(leaf.kind, 4) for leaf in self.rows]
        # If they are summed by the group, there are two regions: one is summed while the next group
        # fills the other.
        regions = 2 if tile.sums_by_group else 1
        rows = tile.threads // 32 * tile.row_steps * tile.states
        self.row_places = [self.reserve(regions * rows * size) for size in self.row_bytes]
        self.lines_places = {
            leaf.tag: self.reserve(CHUNK * tile.lanes * SCALAR_BYTES.get(leaf.kind, 4))
            for leaf in self.gradients if self.is_line(leaf)
        }  # fmt: skip
        # For the sums of `leave`.
        self.shared = max(self.shared, tile.threads * max(tile.each, tile.channels) * 8)

    def declare_sums(self) -> None:
        for leaf, at in zip(self.rows, self.row_places, strict=True):
            kind = CPP.types[leaf.kind]
            self(f"{kind}* const row_{leaf.tag} = ({kind}*)(shared + {at});")
        for tag, at in self.lines_places.items():
            kind = next(CPP.types[leaf.kind] for leaf in self.gradients if leaf.tag == tag)
            self(f"{kind}* const line_{tag} = ({kind}*)(shared + {at});")

    def row(self, leaf: LeafPart, warp: str, j: str) -> str:
        """Where a warp leaves its part of a row's gradient at step j of a tile."""
        turn = f"({j}) / GROUP % 2 * (THREADS / 32) + " if self.tile.sums_by_group else ""
        return f"row_{leaf.tag} + (({turn}{warp}) * ROW_STEPS + ({j}) % ROW_STEPS) * STATES"

    def add_gradient(self, scope: Scope, leaf: LeafPart, value: str) -> None:
        """A gradient that varies along the states: summed, or stored."""
        port = leaf.port
        if self.is_row(leaf):
            line = f"r_{leaf.tag}[own * EACH + k] += has_lane(i) ? {value} : 0;"
        elif not port.varies_in_time:
            if port.lane:
                line = f"d_{leaf.tag}[i][k] += {value};"
            else:
                line = f"d_{leaf.tag}[k] += has_lane(i) ? {value} : 0;"
        else:
            place = self.address(leaf, "t", "(lane0 + c)", "(q * EACH + k)")
            line = f"if (here(i, k)) {place} = to_memory<{leaf.memory}>({value});"
        scope.lines["state"].append(line)

    def sum_lines(self) -> None:
        """Sum the gradients of lines over the whole block, for the steps of a tile."""
        if self.lines_places:
            self("sync_block();")
        for leaf in self.gradients:
            if self.is_line(leaf):
                self("for (int j = tid; j < size; j += THREADS) {",
                     f"const Index t = {self.place('low + j')};",
                     f"{CPP.types[leaf.kind]} total = 0;",
                     f"for (int c = 0; c < LANES; ++c) total += line_{leaf.tag}[j * LANES + c];",
                     f"{self.address(leaf, 't', '0', '0')} = to_memory<{leaf.memory}>(total);",
                     "}")  # fmt: skip

    def sum_rows(self, first: str, count: str) -> None:
        """Sum the gradients of rows over the block, at `count` steps from number `first` on. A
        thread has SUMS adjacent states of one step. The leaves begin at different threads, so that
        threads without work on one take up the next."""
        if not self.rows:
            return
        self("sync_block();")
        for n, leaf in enumerate(self.rows):
            size, kind, item = self.op.size, CPP.types[leaf.kind], self.row_bytes[n]
            sums = min(self.tile.states, 16 // item)
            width = self.widths.get((leaf.role, leaf.k, leaf.part), 0)
            shift = n * self.tile.threads // len(self.rows)
            self("{", f"constexpr int SUMS = {sums};",
                 f"const {kind}* const rows = {self.row(leaf, '0', first)};",
                 f"for (int at = (tid + THREADS - {shift}) % THREADS * SUMS; "
                 f"at < ({count}) * STATES; at += THREADS * SUMS) {{",
                 f"const int j = {first} + at / STATES, state = at % STATES;",
                 f"const Index t = {self.place('low + j')};", f"{kind} total[SUMS] = {{}};",
                 "UNROLL for (int w = 0; w < THREADS / 32; ++w) {", f"{kind} part[SUMS];",
                 "const auto from = (const char*)(rows + w * (ROW_STEPS * STATES) + at);",
                 f"load_items<{kind}, {kind}>(part, from);",
                 "UNROLL for (int k = 0; k < SUMS; ++k) total[k] += part[k];", "}",
                 f"{leaf.memory} sum[SUMS];",
                 f"UNROLL for (int k = 0; k < SUMS; ++k) "
                 f"sum[k] = to_memory<{leaf.memory}>(total[k]);")  # fmt: skip
            if size % sums == 0 and width >= sums * leaf.itemsize >= 4:
                place = self.address(leaf, "t", "0", "state")
                self(f"if (state < {size}) store_adjacent(&{place}, sum);")
            else:
                place = self.address(leaf, "t", "0", "(state + k)")
                self("UNROLL for (int k = 0; k < SUMS; ++k)",
                     f"if (state + k < {size}) {place} = sum[k];")  # fmt: skip
            self("}", "}")

    def leave(self) -> None:
        """What is stored at the end: the gradient of init, and gradients summed over the steps."""
        is_one_of_many = self.kernel.cut and self.kernel.walks
        self(*(["if (segment == 0) {"] if is_one_of_many else []))
        self.state_leaves("end", self.kernel.ends, "m", load=False)
        self(*(["}"] if is_one_of_many else []))
        for leaf in self.gradients:
            port, kind = leaf.port, CPP.types[leaf.kind]
            if port.varies_in_time:
                continue
            if port.state and port.lane:
                place = self.address(leaf, "0", "(lane0 + g * CHANNELS + i)", "(q * EACH + k)")
                self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                     "UNROLL for (int k = 0; k < EACH; ++k)",
                     "if (here(i, k))",
                     f"{place} = to_memory<{leaf.memory}>(d_{leaf.tag}[i][k]);")  # fmt: skip
                continue
            self("{", f"{kind}* const all = ({kind}*)shared;", "sync_block();")
            if port.state:
                self("UNROLL for (int k = 0; k < EACH; ++k)",
                     f"all[g * STATES + q * EACH + k] = d_{leaf.tag}[k];",
                     "sync_block();",
                     f"for (int n = tid; n < {self.op.size}; n += THREADS) {{",
                     f"{kind} total = 0;",
                     "for (int o = 0; o < GROUPS; ++o) total += all[o * STATES + n];",
                     f"{self.address(leaf, '0', '0', 'n')} = to_memory<{leaf.memory}>(total);",
                     "}")  # fmt: skip
            else:
                place = self.address(leaf, "0", "(lane0 + n)", "0")
                if port.lane:
                    self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                         f"all[(g * CHANNELS + i) * SPREAD + q] = e_{leaf.tag}[i];")  # fmt: skip
                else:
                    self(f"all[tid] = e_{leaf.tag};")
                entries, each = ("LANES", "SPREAD") if port.lane else ("1", "THREADS")
                there = "lane0 + n < lanes" if port.lane else "true"
                self("sync_block();", f"for (int n = tid; n < {entries}; n += THREADS) {{",
                     f"{kind} total = 0;",
                     f"for (int o = 0; o < {each}; ++o) total += all[n * {each} + o];",
                     f"if ({there}) {place} = to_memory<{leaf.memory}>(total);", "}")  # fmt: skip
            self("}")
