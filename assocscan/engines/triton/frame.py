"""A Triton kernel's frame: which chains a program has, where their tensors are, how carries enter
and leave. `body` adds the tile iterations in between.

A tile is [chains, segments] for rows and [segments, chains] for lanes; a carry has one segment.
"""

from __future__ import annotations

from ...program.cpp_and_triton_expressions import TRITON
from ...program.dtypes import TRITON_MEMORY
from ...program.operator import spans
from ...program.program_builder import decode
from .emitter import Emitter, plus, pointer, stride_name, times
from .kernel import Port, TritonKernel


class Frame(Emitter):
    """A kernel without its tile iterations."""

    kernel: TritonKernel

    def __init__(self, kernel: TritonKernel) -> None:
        self.op, self.tile = kernel.operator, kernel.tile
        self.kinds = self.op.combine.output_dtypes
        aggregate = kernel.aggregate_components
        booleans = [c for c in aggregate if self.kinds[c] == "b1"]
        super().__init__(kernel, {"c": kernel.carry_components, "a": aggregate, "b": booleans})
        self.axis = 0 if kernel.lanes else 1
        self.writes = kernel.cut != "totals"
        chains, segments = self.tile.chains, self.tile.segments
        self.carry_shape = f"[1, {chains}]" if kernel.lanes else f"[{chains}, 1]"
        self.tile_shape = f"[{segments}, {chains}]" if kernel.lanes else f"[{chains}, {segments}]"
        # One chain's bounds hold for the whole program, or each row of the tile has its own.
        self.uniform = kernel.lanes or not (kernel.packed or kernel.cut != "whole")
        self.lifted = sorted(self.op.lift.select(aggregate).used_inputs)
        self.raw = self.raw_components()

    def raw_components(self) -> list[tuple[int, int, int]]:
        """The input components that are read: (leaf, part, component)."""
        op = self.op
        used = op.used_inputs if self.writes else frozenset(self.lifted)
        return [
            (k, n, c) for k, span in enumerate(spans(op.inputs)) for n, c in enumerate(span)
            if c in used
        ]  # fmt: skip

    def on_carry(self, value: str) -> str:
        """In the shape of a carry."""
        return f"tl.broadcast_to({value}, {self.carry_shape})"

    def on_tile(self, value: str) -> str:
        """In the shape of a tile. Masks are never built from scalar conditions, which Triton's
        interpreter turns into integers."""
        return f"tl.broadcast_to({value}, {self.tile_shape})"

    # Before the loop.

    def find_chains(self) -> None:
        """Which chains this program has: the index of each dimension, `lane` for the innermost."""
        kernel, chains = self.kernel, self.tile.chains
        self.find_program()
        if kernel.cut == "lookback":  # in the order of the axis: programs wait for those before
            self(f"index = tl.cast(tl.atomic_add(flags, 1, sem='relaxed'), {self.index})")
        if kernel.lanes:
            self(f"""
                blocks = tl.cdiv(lanes, {chains})
                first_lane = index % blocks * {chains}
                lane = first_lane + tl.arange(0, {chains})[None, :]
                present = lane < lanes
                index = index // blocks
            """)
        else:
            self(f"""
                index = index * {chains} + tl.arange(0, {chains})[:, None]
                present = index < chains
            """)
        if kernel.cut == "lookback":
            self(f"""
                groups = tl.num_programs(0) // (blocks * chunks)
                chunk = index // groups
                index = index % groups * chunks + chunk
                own_flag = 1 + index * blocks + first_lane // {chains}
            """)
        if kernel.cut != "whole":
            self("flat = index * lanes + lane" if kernel.lanes else "flat = index")
            self.split_off("chunk", "chunks")
        elif kernel.packed:
            self.split_off("sequence", "sequences")
        self.split_outer()

    def find_bounds(self) -> None:
        """begin and size of the sequence; first and count of the steps of this chunk; steps: the
        most steps of a chain of this program."""
        kernel, cut = self.kernel, self.kernel.cut != "whole"
        mask = "" if self.uniform else ", mask=present, other=0"
        if kernel.packed and cut:
            self(f"""
                sequence = tl.cast(tl.load(chunk_sequence + chunk{mask}), {self.index})
                first = tl.cast(tl.load(chunk_first + chunk{mask}), {self.index})
            """)
        elif cut:
            self("first = chunk * chunk_length")
        if kernel.packed:
            self.load_offsets("begin", "size", mask)
            self("size = tl.maximum(size - begin, 0)")
        else:
            self("size = length")
        self("count = tl.maximum(tl.minimum(size - first, chunk_length), 0)" if cut
             else "count = size")  # fmt: skip
        self("steps = count" if self.uniform else "steps = tl.max(tl.where(present, count, 0))")
        if self.tile.segments > 1:
            view = "[:, None]" if kernel.lanes else "[None, :]"
            self(f"segment = tl.arange(0, {self.tile.segments}){view}")

    def find_leaves(self) -> None:
        """Where step 0 of each leaf is for our chains."""
        for role, k, port in self.kernel.ports:
            if role not in ("before", "after"):
                self(f"{role}{k}_at = {' + '.join([pointer(role, k), *self.terms(role, k, port)])}")

    def terms(self, role: str, k: int, port: Port) -> list[str]:
        """What the indices of a chain add to a leaf's address."""
        found = self.outer_terms(role, k, port.outer)
        if self.kernel.lanes and port.lane != 0:
            found.append(times("lane", port.lane, stride_name(role, k, "lane")))
        if self.kernel.packed and role in ("init", "final", "boundary"):
            found.append(f"sequence * {stride_name(role, k, 'sequence')}")
        return found

    def load_boundary(self) -> None:
        """The values beyond the edge of the leaves that are read one step further."""
        for k, n, c in self.raw:
            if k in self.kernel.boundary:
                self(f"boundary_x{c} = {self.load_once('boundary', k, n)}")

    def load_once(self, role: str, k: int, part: int) -> str:
        """A component of a leaf that has no steps, in the shape of a carry."""
        port = self.kernel.port[role, k]
        at = self.on_carry(plus(f"{role}{k}_at", port.offsets[part]))
        return f"tl.load({at}, mask={self.on_carry('present')}, other=0)"

    def enter(self) -> None:
        """h, the carry before the first step: from init, the identity, or the chunks before."""
        kernel, op = self.kernel, self.op
        given = set()
        if kernel.starts_from_carry:
            for k in kernel.init or ():
                for n, c in enumerate(spans(op.state)[k]):
                    if c in self.components["c"]:
                        value = self.load_once("init", k, n)
                        self(f"h{c} = {value}.to({TRITON.types[self.kinds[c]]})")
                        given.add(c)
        constants = op.identity  # also without a carry: the final of an empty sequence
        for c in self.components["c"]:
            if c not in given:
                constant = 0 if constants is None else decode(constants[c])
                self(f"h{c} = {self.on_carry(TRITON.literal(constant, self.kinds[c]))}")
        if kernel.cut == "lookback":
            self(f"entered = {self.on_carry('first')} > 0")
        elif kernel.cut == "rescan":
            self.enter_chunk()
        if kernel.final and self.tile.segments > 1:
            self("last[c] = h[c]")

    def enter_chunk(self) -> None:
        """The carry of a chunk that is not its sequence's first: all chunks before it."""
        self(f"entered = {self.on_carry('first')} > 0")
        row = "flat - lanes" if self.kernel.lanes else "flat - 1"
        loaded = f"tl.load(before[a]_ptr + {row}, mask=present & entered, other=0)"
        self(f"c[a] = {self.on_carry(loaded)}")
        self.enter_from_before()

    def enter_from_before(self) -> None:
        """h: the carry after c, all chunks before, where there are any."""
        if self.kernel.starts_from_carry:
            self("""
                d[*c] = advance(h[*c], c[*a])
                h[c] = tl.where(entered, d[c], h[c])
            """)
        else:
            self("h[c] = tl.where(entered, c[c], h[c])")

    # After the loop.

    def leave(self) -> None:
        """Write the carries: of the sequence as finals, of the chunk as totals."""
        kernel = self.kernel
        if kernel.cut == "totals":
            self("tl.store(after[c]_ptr + flat, h[c], mask=present)")
            return
        if not kernel.final:
            return
        state = "h" if self.tile.segments == 1 else "last"
        ours = "present"
        if kernel.cut != "whole":  # only the chunk with the sequence's last step, or its only one
            self(f"""
                end = {self.on_carry("first + count")}
                start = {self.on_carry("first")}
            """)
            ours = "present & (end >= size) & (start < tl.maximum(size, 1))"
        parts = spans(self.op.state)
        for k in kernel.final:
            port = kernel.port["final", k]
            for n, c in enumerate(parts[k]):
                at = self.on_carry(plus(f"final{k}_at", port.offsets[n]))
                value = f"{state}{c}.to({TRITON_MEMORY[port.dtype]})"
                self(f"tl.store({at}, {value}, mask={self.on_carry(ours)})")
