"""What the texts of forward and backward kernels over vectors have in common.

Names in the text: tid, the thread; q, g: which states and which lanes it has; lane0, the block's
first lane; c, a lane's number in the block; i, k: the number of a lane and of a state among the
thread's own. low, size: the first step and the steps of a tile; j: a step's number in it; t, its
place on the axis. s0, s1, …: the parts of the carry; w_…: parts of leaves that are equal at all
steps; x_…: parts of others; p…: sums over the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...engines.base.vectors.kernel import CHUNK, STRIDES, VectorKernel
from ...program.cpp_and_triton_expressions import CPP
from ...program.operator_names import escaped
from ...program.vectors.vector_operator import part_dtypes
from ..parameters import WORKSPACE, Field, struct_text
from .leaves import LeafPart, Staged, is_widened, leaf_parts
from .scope import Scope
from .tile import VectorTile

Widths = tuple[tuple[tuple[str, int, int], int], ...]
WHOLE = ("carries", "totals")  # roles of tensors that a kernel addresses by itself
SCALAR_BYTES = {"f64": 8, "i64": 8, "u64": 8}


def parameter_fields(kernel: VectorKernel) -> list[Field]:
    """struct Params."""
    found = [Field("char*", f"{role}{k}") for role, k in kernel.pointers]
    found += [Field("const char*", "offsets")] if kernel.packed else []
    found += [Field("i64" if f.type == "Header*" else f.type, f.name) for f in WORKSPACE]
    found += [Field("i64", name) for name in (*kernel.sizes(), "blocks")]
    return found + [Field("i64", f"{role}{k}_{which}") for role, k, which in kernel.strides()]


class VectorText:
    """The text of one kernel. Called with lines, it appends them.

    widths: of each staged part of a leaf, the bytes that are copied at a time. ragged: whether the
    last block has fewer lanes than the others.
    """

    def __init__(self, kernel: VectorKernel, widths: Widths, ragged: bool) -> None:
        self.kernel, self.op = kernel, kernel.vectors
        self.tile: VectorTile = kernel.tile
        self.widths, self.ragged = dict(widths), ragged
        self.padded = self.tile.states != self.op.size
        self.kinds = part_dtypes(self.op.state)
        self.lines: list[str] = []
        self.shared = 0
        self.inputs = leaf_parts("input", self.op.inputs, kernel)
        self.regions: dict[tuple[str, int, int], Staged] = {}
        self.stage_bytes = self.wide_bytes = 0
        self.handed_at = self.handed_bytes = 0

    def __call__(self, *lines: str) -> None:
        self.lines += lines

    # ---- shared memory ----

    def reserve(self, size: int) -> int:
        """The place of `size` bytes of shared memory."""
        at = self.shared
        self.shared += -(-size // 16) * 16
        return at

    def stage_leaves(self, leaves: Iterable[LeafPart | None]) -> None:
        """Give these leaves regions in the stages of the ring."""
        for leaf in leaves:
            if leaf is None or not leaf.is_staged:
                continue
            items = self.tile.states if leaf.port.state else self.tile.lanes
            items = items if leaf.port.state or leaf.port.lane else 1
            key = (leaf.role, leaf.k, leaf.part)
            width = self.widths.get(key, leaf.itemsize)
            neighbours = 1 if leaf.port.state else self.tile.row_lanes
            wide = self.wide_bytes if is_widened(leaf, self.tile) else None
            region = Staged(leaf, items, width, self.stage_bytes, neighbours, wide)
            self.regions[key] = region
            self.stage_bytes += region.size
            self.wide_bytes += 0 if wide is None else region.wide_size
        self.ring = self.reserve(self.tile.stages * self.stage_bytes)
        self.wide_ring = self.reserve(2 * self.wide_bytes)

    def region(self, leaf: LeafPart) -> Staged:
        return self.regions[leaf.role, leaf.k, leaf.part]

    # ---- addresses ----

    def stride(self, name: str, which: str, value: int | None) -> str | None:
        return f"{name}_{which}" if value is None else "1" if value else None

    def terms(self, leaf: LeafPart, *indices: tuple[str, str]) -> list[str]:
        """index · stride, for each index and the name of its stride; zeros are left out."""
        found = []
        for index, which in indices:
            stride = self.stride(leaf.name, which, leaf.port.by_name.get(which, 0))
            if stride is not None:
                found.append(index if stride == "1" else f"{index} * {stride}")
        return found

    def address(self, leaf: LeafPart, t: str, lane: str, state: str) -> str:
        """A part of a leaf in memory."""
        terms = self.terms(leaf, (t, "time"), (lane, "lane"), (state, "state"))
        return f"{leaf.name}[{' + '.join([str(leaf.part), *terms])}]"

    def place(self, step: str) -> str:
        """The place of a step on the axis."""
        return f"begin + count - 1 - ({step})" if self.kernel.reverse else f"begin + {step}"

    def find_chains(self) -> None:
        """Which chains the block has, and where step 0 of their leaves is."""
        kernel = self.kernel
        self("char* const shared = shared_memory();",
             "const int tid = thread_index(), q = tid % SPREAD, g = tid / SPREAD;",
             "(void)q, (void)g;")  # fmt: skip
        strides = [f"{role}{k}_{which}" for role, k, which in kernel.strides()]
        for name in (*kernel.sizes(), "blocks", *strides):
            self(f"const Index {name} = (Index)P.{name};", f"(void){name};")
        self("Index index = block_index();")
        if kernel.packed:
            self("const Index sequence = index % sequences;", "index /= sequences;")
        if kernel.cut:
            self("const Index segment = index % segments + first_segment;", "index /= segments;",
                 "const Index sequence = segment;", "(void)sequence;")  # fmt: skip
        self("const Index block = index % blocks;", "index /= blocks;",
             "const Index row = index, lane0 = block * LANES;", "(void)row;")  # fmt: skip
        for d in reversed(range(1, kernel.outer)):
            self(f"const Index outer{d} = index % size{d};", f"index /= size{d};")
        if kernel.outer:
            self("const Index outer0 = index;")
        if kernel.packed:
            for name, at in (("begin", ""), ("end", " + 1")):
                place = f"((const i64*)P.offsets)[sequence{at}]"
                self(f"const Index {name} = (Index)clamped({place}, length);")
            self("const Index count = end > begin ? end - begin : 0;")
        else:
            self("const Index begin = 0, count = length;", "(void)begin;")
        self(
            "const Index rest = count > START ? count - START : 0;",
            "const Index all_tiles = (rest + CHUNK - 1) / CHUNK + (START && count > 0);",
        )
        if kernel.cut:
            last = "START + (segment + 1) * segment_chunks"
            self(
                "const Index first_tile = segment == 0 ? 0 : START + segment * segment_chunks;",
                f"const Index last_tile = all_tiles < {last} ? all_tiles : {last};",
                "const Index tiles = last_tile > first_tile ? last_tile - first_tile : 0;",
                "(void)tiles;",
            )
        else:
            self("const Index first_tile = 0, last_tile = all_tiles, tiles = all_tiles;")
        for role, k, port in kernel.ports:
            if role in WHOLE:
                continue
            leaf = LeafPart(role, k, 0, "", port)
            names = [*STRIDES[3:], *(f"outer{d}" for d in range(kernel.outer))]
            terms = ["", *self.terms(leaf, *((which, which) for which in names))]
            self(f"{leaf.memory}* const {leaf.name} = ({leaf.memory}*)P.{leaf.name}"
                 f"{' + '.join(terms)};", f"(void){leaf.name};")  # fmt: skip
        check = "lane0 + g * CHANNELS + i < lanes" if self.ragged else "true"
        self("const auto has_lane = [&](int i) {", "(void)i;", f"return {check};", "};",
             "(void)has_lane;")  # fmt: skip
        check = f" && q * EACH + k < {self.op.size}" if self.padded else ""
        self("const auto here = [&](int i, int k) {", "(void)k;", f"return has_lane(i){check};",
             "};", "(void)here;")  # fmt: skip

    def load_steady(self, leaves: Iterable[LeafPart | None], used: Iterable[int]) -> None:
        """Load the parts of leaves that are equal at all steps, of the numbers `used`."""
        each, wanted = self.tile.each, set(used)
        for v, leaf in enumerate(leaves):
            if leaf is None or v not in wanted or leaf.port.varies_in_time:
                continue
            kind, port = CPP.types[leaf.kind], leaf.port
            size = f"{'[CHANNELS]' if port.lane else ''}{f'[{each}]' if port.state else ''}"
            place = self.address(leaf, "0", "(lane0 + g * CHANNELS + i)", "(q * EACH + k)")
            check = "here(i, k)" if port.state else "has_lane(i)"
            found = f"{check} ? from_memory<{kind}>({place}) : ({kind})0"
            name = f"w_{leaf.tag}{'[i]' if port.lane else ''}{'[k]' if port.state else ''}"
            self(f"{kind} w_{leaf.tag}{size};",
                 f"UNROLL for (int i = 0; i < {'CHANNELS' if port.lane else '1'}; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if port.state else '1'}; ++k)",
                 f"{name} = {found};")  # fmt: skip

    def declare(self, name: str, kind: str, varies: bool, before: str = "") -> None:
        self(f"{CPP.types[kind]} {name}{before}[CHANNELS]{'[EACH]' if varies else ''};")

    # ---- tiles ----

    def low_and_size(self, number: str) -> list[str]:
        """Lines for `low` and `size` of a tile. A first step without a carry has its own tile."""
        low = f"START + ({number} - START) * CHUNK"
        if not self.kernel.first:
            size = "const int size = (int)(count - low < CHUNK ? count - low : CHUNK);"
            return [f"const Index low = {number} * CHUNK;", size]
        return [f"const bool is_first = {number} == 0;", f"const Index low = is_first ? 0 : {low};",
                "const int most = is_first ? 1 : CHUNK;",
                "const int size = (int)(count - low < most ? count - low : most);"]  # fmt: skip

    def open_tiles(self, backward: bool) -> None:
        """Begin the loop over the tiles. Each round starts copies of a tile to come; the leaves
        of its own tile are in `stage`. The first rounds, n < 0, have no tile of their own."""
        number = (
            (lambda n: f"(last_tile - 1 - {n})") if backward else lambda n: f"(first_tile + {n})"
        )
        self("for (Index n = 1 - STAGES; n < tiles; ++n) {",
             "if (n >= 0) {", "copies_wait<STAGES - 2>();", "sync_block();", "}",
             "const Index ahead = n + STAGES - 1;", "if (ahead < tiles) {",
             f"const Index next = {number('ahead')};", *self.low_and_size("next"),
             f"char* const to = shared + {self.ring} + ahead % STAGES * STAGE_BYTES;",
             f"const Index t = {self.place('low')};", "(void)to, (void)t;")  # fmt: skip
        for region in self.regions.values():
            self(f"stage_rows<{self.rows_of(region)}>(to + {region.at}, "
                 f"{self.row_arguments(region)});")  # fmt: skip
        self.stage_more()
        self("}", "copies_commit();", "if (n < 0) {")
        self.widen_rows()
        self("continue;", "}", f"const Index tile = {number('n')};", *self.low_and_size("tile"),
             f"const char* const stage = shared + {self.ring} + n % STAGES * STAGE_BYTES;",
             "(void)stage;")  # fmt: skip

    def stage_more(self) -> None:
        """Start copies of what else the tile `next` needs, to come with its leaves."""

    def close_tiles(self) -> None:
        """The end of the loop over the tiles."""
        self.widen_rows()
        self("}")

    def widen_rows(self) -> None:
        """Widen the rows of the next tile. Each thread widens what it copied itself, so no barrier
        is needed between copy and widening."""
        widened = [region for region in self.regions.values() if region.wide is not None]
        if not widened:
            return
        self("if (n + 1 >= 0 && n + 1 < tiles) {", "copies_wait<STAGES - 2>();",
             f"const char* const from = shared + {self.ring} + (n + 1) % STAGES * STAGE_BYTES;",
             f"char* const to = shared + {self.wide_ring} + (n + 1) % 2 * {self.wide_bytes};",
             )  # fmt: skip
        for region in widened:
            kind = CPP.types[region.leaf.kind]
            self(f"widen_rows<{kind}, {self.rows_of(region)}, {region.wide_pitch}>"
                 f"(to + {region.wide}, from + {region.at});")  # fmt: skip
        self("}")

    def rows_of(self, region: Staged) -> str:
        """The template arguments of the functions that copy rows."""
        items = self.op.size if region.leaf.port.state else region.items
        return f"{region.leaf.memory}, {items}, {region.pitch}, {region.copied}"

    def row_arguments(self, region: Staged) -> str:
        """Where a tile's rows are in memory, for the functions that copy them."""
        leaf, port = region.leaf, region.leaf.port
        from_ = " + ".join(
            [leaf.name, str(leaf.part), *self.terms(leaf, ("t", "time"), ("lane0", "lane"))]
        )
        along = "state" if port.state else "lane"
        step = self.stride(leaf.name, "time", port.by_name["time"])
        item = self.stride(leaf.name, along, port.by_name[along]) or "0"
        present = f"{self.op.size}" if port.state else "lanes - lane0" if port.lane else "1"
        sign = "-" if self.kernel.reverse else ""
        return f"{from_}, {sign}({step}), {item}, size, {present}"

    def write_step(
        self, scope: Scope, before: Sequence[str], after: Sequence[str],
        carried: Sequence[tuple[str, str]],
    ) -> None:  # fmt: skip
        """The lines of a step of MAIN, each in the loop of its level: step, lane or state. before,
        after: lines of the lane around the loop over its states. carried: lines that set the new
        carry, with their levels; they come last."""
        lines = scope.lines
        self(f"const Index t = {self.place('low + j')};", "(void)t;", *lines["step"],
             "UNROLL for (int i = 0; i < CHANNELS; ++i) {", "const int c = g * CHANNELS + i;",
             "(void)c;", *lines["lane"], *before,
             "UNROLL for (int k = 0; k < EACH; ++k) {", *lines["state"],
             *(line for level, line in carried if level == "state"), "}", *after,
             *(line for level, line in carried if level == "lane"), "}")  # fmt: skip

    def store_lanes(self, leaf: LeafPart) -> None:
        """Store a leaf's values of the thread's lanes at step t: at once where its address and
        strides allow."""
        place, name = self.address(leaf, "t", "(lane0 + c)", "0"), f"o_{leaf.tag}"
        width, size = self.widths.get((leaf.role, leaf.k, leaf.part), 0), leaf.itemsize
        together = self.tile.channels * size
        at_once = self.tile.channels > 1 and together % 4 == 0 and width >= together
        if at_once:  # then the number of lanes is a multiple of CHANNELS
            self("if (has_lane(0)) {", "const int c = g * CHANNELS;",
                 f"store_adjacent(&{place}, {name});", "}")  # fmt: skip
        else:
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)", "if (has_lane(i)) {",
                 "const int c = g * CHANNELS + i;", f"{place} = {name}[i];", "}")  # fmt: skip

    # ---- carries in memory ----

    def carry_place(self, chunk: str, kept: Sequence[int], part: int) -> str:
        """Where a part of the carry before a chunk is kept, for lane i."""
        slot = f"(begin / CHUNK + sequence + {chunk})" if self.kernel.packed else chunk
        sizes = [self.kernel.part_size(c) for c in kept]
        at = sum(sizes[: kept.index(part)])
        return self.state_place("carries0", slot, sum(sizes), at, self.op.state_varies[part])

    def state_place(self, name: str, slot: str, size: int, at: int, varies: bool) -> str:
        """Where numbers of the states of lane i are kept: in slot number `slot` of a tensor. A slot
        has `size` numbers for each lane, of which `at` come before these."""
        lane = "(lane0 + g * CHANNELS + i)"
        index = f"{lane} * STATES + q * EACH" if varies else lane
        return (
            f"P.{name} + (i64)(({slot} * rows + row) * padded * {size} + {at} * padded + "
            f"{index}) * {self.kernel.carry_dtype.itemsize}"
        )

    def state_leaves(self, role: str, numbers: Sequence[int], prefix: str, load: bool) -> None:
        """Load or store the carried parts of state leaves."""
        given = leaf_parts(role, self.op.state, self.kernel)
        for c, leaf in enumerate(given):
            if leaf is None or leaf.k not in numbers or c not in self.kernel.carry:
                continue
            varies, kind = self.op.state_varies[c], CPP.types[self.kinds[c]]
            place = self.address(leaf, "0", "(lane0 + g * CHANNELS + i)", "(q * EACH + k)")
            name = f"{prefix}{c}[i]{'[k]' if varies else ''}"
            check = "here(i, k)" if varies else "has_lane(i)" if load else "has_lane(i) && q == 0"
            self("UNROLL for (int i = 0; i < CHANNELS; ++i)",
                 f"UNROLL for (int k = 0; k < {'EACH' if varies else '1'}; ++k)",
                 f"if ({check}) " + (
                     f"{name} = from_memory<{kind}>({place});" if load else
                     f"{place} = to_memory<{leaf.memory}>({name});"))  # fmt: skip

    # ---- the whole ----

    def whole(self) -> str:
        """The translation unit, with the lines so far as the kernel's body."""
        tile = self.tile
        constants = {
            "ALL_THREADS": tile.threads, "THREADS": tile.threads, "SPREAD": tile.spread,
            "CHANNELS": tile.channels, "EACH": tile.each, "LANES": tile.lanes,
            "GROUPS": tile.threads // tile.spread, "CHUNK": CHUNK, "STAGES": tile.stages,
            "START": int(self.kernel.first), "GROUP": tile.group, "TOGETHER": tile.together,
            "STATES": tile.states, "ROW_STEPS": tile.row_steps, "ROW_TOGETHER": tile.row_together,
            "STAGE_BYTES": self.stage_bytes, "SHARED_BYTES": max(self.shared, 16),
        }  # fmt: skip
        head = [
            f"// {escaped(self.kernel.name)}", '#include "scalar.h"',
            '#include "device.cuh"',
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"typedef {'i64' if self.kernel.wide else 'int'} Index;  // of tensors' entries",
            struct_text(parameter_fields(self.kernel)), '#include "vectors.cuh"',
            f"KERNEL(THREADS, {tile.blocks}) scan(PARAMETERS(Params, P)) {{",
        ]  # fmt: skip
        return "\n".join([*head, *indented(self.lines), "}", "LAUNCH_NUMBERS", ""])


def indented(lines: Sequence[str]) -> list[str]:
    """The lines, indented by the braces that are open."""
    found, depth = [], 1
    for line in lines:
        closing = line.startswith("}")
        found.append("    " * (depth - closing) + line)
        depth += line.count("{") - line.count("}")
    return found
