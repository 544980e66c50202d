"""A Triton kernel's frame: which chains a program has, where their tensors are, how carries enter
and leave. `body` adds the tile iterations in between.

A tile is [chains, segments] for rows and [segments, chains] for lanes; a carry has one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...program.ir import decode
from ...program.operator import spans
from ...program.render import TRITON
from .kernel import Port, TritonKernel

MEMORY_TYPES = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32", torch.float64: "tl.float64",
    torch.complex64: "tl.float32", torch.complex128: "tl.float64",
}  # fmt: skip


class Frame:
    """A kernel without its tile iterations."""

    def __init__(self, kernel: TritonKernel) -> None:
        self.kernel, self.op, self.tile = kernel, kernel.operator, kernel.tile
        self.lines: list[str] = []
        self.depth = 1
        self.kinds = self.op.combine.output_dtypes
        self.carry, self.aggregate = kernel.carry_components, kernel.aggregate_components
        self.index = "tl.int64" if kernel.wide else "tl.int32"
        self.axis = 0 if kernel.lanes else 1
        self.writes = kernel.cut != "totals"
        chains, segments = self.tile.chains, self.tile.segments
        self.carry_shape = f"[1, {chains}]" if kernel.lanes else f"[{chains}, 1]"
        self.tile_shape = f"[{segments}, {chains}]" if kernel.lanes else f"[{chains}, {segments}]"
        # One chain's bounds hold for the whole program, or each row of the tile has its own.
        self.uniform = kernel.lanes or not (kernel.packed or kernel.cut != "whole")
        self.lifted = sorted(self.op.lift.select(self.aggregate).used_inputs)
        self.raw = self.raw_components()

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        self(line)
        self.depth += 1
        yield
        self.depth -= 1

    def raw_components(self) -> list[tuple[int, int, int]]:
        """The input components that are read: (leaf, part, component)."""
        op = self.op
        used = op.used_inputs if self.writes else frozenset(self.lifted)
        return [
            (k, n, c) for k, span in enumerate(spans(op.inputs)) for n, c in enumerate(span)
            if c in used
        ]  # fmt: skip

    def parameters(self) -> str:
        kernel = self.kernel
        groups = [
            [pointer(role, k) for role, k, _ in kernel.ports],
            kernel.tables(),
            kernel.sizes(),
            [stride_name(*which) for which in kernel.strides()],
        ]
        return "\n".join(f"    {', '.join(group)}," for group in groups if group)

    def find_chain(self) -> None:
        """Which chains this program has: the index of each dimension, `lane` for the innermost."""
        kernel, chains = self.kernel, self.tile.chains
        if kernel.wide:
            for name in kernel.sizes():
                self(f"{name} = tl.cast({name}, tl.int64)")
        self(f"index = tl.cast(tl.program_id(0), {self.index})")
        if kernel.lanes:
            self(f"blocks = tl.cdiv(lanes, {chains})")
            self(f"lane = index % blocks * {chains} + tl.arange(0, {chains})[None, :]")
            self("present = lane < lanes")
            self("index = index // blocks")
        else:
            self(f"index = index * {chains} + tl.arange(0, {chains})[:, None]")
            self("present = index < chains")
        if kernel.cut != "whole":
            self("flat = index * lanes + lane" if kernel.lanes else "flat = index")
            self("chunk = index % chunks")
            self("index = index // chunks")
        elif kernel.packed:
            self("sequence = index % sequences")
            self("index = index // sequences")
        for d in reversed(range(1, kernel.outer)):
            self(f"outer{d} = index % size{d}")
            self(f"index = index // size{d}")
        if kernel.outer:
            self("outer0 = index")

    def find_bounds(self) -> None:
        """begin and size of the sequence; first and count of the steps that are ours."""
        kernel = self.kernel
        mask = "" if self.uniform else ", mask=present, other=0"
        if kernel.packed and kernel.cut != "whole":
            self(f"sequence = tl.cast(tl.load(chunk_sequence + chunk{mask}), {self.index})")
            self(f"first = tl.cast(tl.load(chunk_first + chunk{mask}), {self.index})")
        elif kernel.cut != "whole":
            self("first = chunk * chunk_length")
        if kernel.packed:
            for name, at in (("begin", "sequence"), ("size", "sequence + 1")):
                self(f"{name} = tl.load(offsets + {at}{mask})")
                self(f"{name} = tl.cast(tl.minimum(tl.maximum({name}, 0), length), {self.index})")
            self("size = tl.maximum(size - begin, 0)")
        else:
            self("size = length")
        if kernel.cut != "whole":
            self("count = tl.maximum(tl.minimum(size - first, chunk_length), 0)")
        else:
            self("count = size")
        if self.uniform:
            self("steps = count")
        else:
            self("steps = tl.max(tl.where(present, count, 0))")
        segment = f"tl.arange(0, {self.tile.segments})"
        if self.tile.segments > 1:
            self(f"segment = {segment}{'[:, None]' if kernel.lanes else '[None, :]'}")

    def point_at_leaves(self) -> None:
        """Where step 0 of each leaf is for our chains."""
        for role, k, port in self.kernel.ports:
            if role not in ("before", "after"):
                self(f"{role}{k}_at = {' + '.join([pointer(role, k), *self.terms(role, k, port)])}")

    def terms(self, role: str, k: int, port: Port) -> list[str]:
        found = []
        for d, stride in enumerate(port.outer):
            if stride is None:
                found.append(f"outer{d} * {stride_name(role, k, f'outer{d}')}")
        if self.kernel.lanes and port.lane != 0:
            found.append("lane" if port.lane == 1 else f"lane * {stride_name(role, k, 'lane')}")
        if self.kernel.packed and role in ("init", "final", "boundary"):
            found.append(f"sequence * {stride_name(role, k, 'sequence')}")
        return found

    def load_boundary(self) -> None:
        """What stands beyond the edge for leaves that are read ahead."""
        for k, n, c in self.raw:
            if k in self.kernel.boundary:
                self(f"boundary_x{c} = {self.carry_load('boundary', k, n, 'present')}")

    def carry_load(self, role: str, k: int, part: int, mask: str) -> str:
        """A component of a leaf that has no steps, in the shape of a carry."""
        port = self.kernel.port[role, k]
        at = plus(f"{role}{k}_at", port.offsets[part])
        return (
            f"tl.load(tl.broadcast_to({at}, {self.carry_shape}), "
            f"mask=tl.broadcast_to({mask}, {self.carry_shape}), other=0)"
        )

    def enter(self) -> None:
        """The carry before the first step: from init, the identity, the chunk before, or none."""
        kernel, op = self.kernel, self.op
        given = set()
        if kernel.starts_from_carry:
            for k in kernel.init or ():
                for n, c in enumerate(spans(op.state)[k]):
                    if c in self.carry:
                        value = self.carry_load("init", k, n, "present")
                        self(f"h{c} = {value}.to({TRITON.types[self.kinds[c]]})")
                        given.add(c)
        constants = op.identity  # also without a carry: the final of an empty sequence
        for c in self.carry:
            if c not in given:
                kind = self.kinds[c]
                value = TRITON.literal(0 if constants is None else decode(constants[c]), kind)
                self(f"h{c} = tl.broadcast_to({value}, {self.carry_shape})")
        if kernel.cut == "rescan":
            self.enter_chunk()
        if kernel.final and self.tile.segments > 1:
            for c in self.carry:
                self(f"last{c} = h{c}")

    def advance(self, left: str, right: str, result: str) -> None:
        """result = left ∘ right on the carried components; left and right are name prefixes."""
        arguments = [f"{left}{c}" for c in self.carry] + [f"{right}{c}" for c in self.aggregate]
        self(call("advance", arguments, [f"{result}{c}" for c in self.carry]))

    def enter_chunk(self) -> None:
        """The carry of a chunk that is not its sequence's first: all chunks before it."""
        self(f"entered = tl.broadcast_to(first, {self.carry_shape}) > 0")
        before = "flat - lanes" if self.kernel.lanes else "flat - 1"
        for c in self.aggregate:
            loaded = f"tl.load(before{c}_ptr + {before}, mask=present & entered, other=0)"
            self(f"c{c} = tl.broadcast_to({loaded}, {self.carry_shape})")
        before = "c"
        if self.kernel.starts_from_carry:
            self.advance("h", "c", "d")
            before = "d"
        for c in self.carry:
            self(f"h{c} = tl.where(entered, {before}{c}, h{c})")

    def load(self, name: str, q: str) -> None:
        """The inputs of the iteration that begins at step q."""
        for u in range(self.tile.items):
            self.position(q, u)
            for k, n, c in self.raw:
                self(f"{name}{c}_{u} = {self.input_load(k, n, c)}")

    def position(self, q: str, u: int) -> None:
        """p: the step in the sequence; t: its place on the axis; `valid`: whether it is ours."""
        offset = q
        if self.tile.segments > 1:
            offset += " + segment" if self.tile.items == 1 else f" + segment * {self.tile.items}"
        offset = plus(offset, u)
        if self.kernel.cut == "whole":
            self(f"p = {offset}")
        else:
            self(f"r = {offset}")
            self("p = first + r")
        self(f"t = {self.place('p')}")
        self("here = p" if self.tile.segments > 1 else f"here = {self.wide('p')}")
        ours = f"{self.wide('r')} < count" if self.kernel.cut != "whole" else "here < size"
        self(f"valid = present & ({ours})")

    def wide(self, value: str) -> str:
        """In the shape of a carry at least: masks are never built from scalar conditions, which
        Triton's interpreter turns into integers."""
        return f"tl.broadcast_to({value}, {self.tile_shape})"

    def place(self, p: str) -> str:
        begin = "begin + " if self.kernel.packed else ""
        return f"{begin}size - 1 - {p}" if self.kernel.reverse else f"{begin}{p}"

    def input_load(self, k: int, part: int, c: int) -> str:
        port = self.kernel.port["input", k]
        if k not in self.kernel.shifted:
            at = self.address("input", k, port, part, "t")
            return f"tl.load({at}, mask={self.full('valid')}, other=0)"
        at = self.address("input", k, port, part, f"({self.place('(p + 1)')})")
        mask = self.full("valid & (here + 1 < size)")
        loaded = f"tl.load({at}, mask={mask}, other=0)"
        if k not in self.kernel.boundary:
            return loaded
        kind = MEMORY_TYPES[port.dtype]
        return f"tl.where(here + 1 < size, {loaded}, boundary_x{c}.to({kind}))"

    def full(self, mask: str) -> str:
        return f"tl.broadcast_to({mask}, {self.tile_shape})"

    def address(self, role: str, k: int, port: Port, part: int, t: str) -> str:
        at = f"{role}{k}_at"
        if port.step is None:
            at += f" + {t} * {stride_name(role, k, 'step')}"
        elif port.step == 1:
            at += f" + {t}"
        return f"tl.broadcast_to({plus(at, port.offsets[part])}, {self.tile_shape})"

    def leave(self) -> None:
        """Write the carries: of the sequence as finals, of the chunk as totals."""
        kernel = self.kernel
        if kernel.cut == "totals":
            for c in self.carry:
                self(f"tl.store(after{c}_ptr + flat, h{c}, mask=present)")
            return
        if not kernel.final:
            return
        state = "h" if self.tile.segments == 1 else "last"
        ours = "present"
        if kernel.cut == "rescan":
            self(f"end = tl.broadcast_to(first + count, {self.carry_shape})")
            self(f"start = tl.broadcast_to(first, {self.carry_shape})")
            ours = "present & (end >= size) & (start < tl.maximum(size, 1))"
        parts = spans(self.op.state)
        for k in kernel.final:
            port = kernel.port["final", k]
            for n, c in enumerate(parts[k]):
                at = f"tl.broadcast_to({plus(f'final{k}_at', port.offsets[n])}, {self.carry_shape})"
                mask = f"tl.broadcast_to({ours}, {self.carry_shape})"
                self(f"tl.store({at}, {state}{c}.to({MEMORY_TYPES[port.dtype]}), mask={mask})")


def call(name: str, arguments: Sequence[str], results: Sequence[str]) -> str:
    if not results:  # a state without components, as second derivatives of max have
        return "pass"
    return f"{', '.join(results)} = {name}({', '.join(arguments)})"


def pointer(role: str, k: int) -> str:
    return f"{role}{k}_ptr"


def stride_name(role: str, k: int, which: str) -> str:
    return f"{role}{k}_{which}"


def plus(text: str, offset: int) -> str:
    return f"{text} + {offset}" if offset else text
