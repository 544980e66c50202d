"""What the texts of forward and backward kernels over vectors have in common.

Names in the text: s0, s1, … the parts of the carry; x0, … those of the inputs, in the numbering of
a step's programs (`VectorOperator.step_inputs`, whose first are the carry's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import FLOATS, TRITON_MEMORY
from ....program.operator import Leaf
from ....program.program_builder import Program, integer_range
from ....program.vectors.state_axis import REDUCTIONS
from ....program.vectors.vector_operator import part_dtypes, parts
from ...base.vectors.kernel import CHUNK, STRIDES, VectorKernel
from ..emitter import Emitter, plus, pointer, stride_name


class VectorText(Emitter):
    """The kernel function of one `VectorKernel`: chains, addresses, loads and stores, programs."""

    kernel: VectorKernel

    def __init__(self, kernel: VectorKernel) -> None:
        super().__init__(kernel, {})
        self.op, self.tile = kernel.vectors, kernel.tile
        self.padded = self.tile.states != self.op.size
        self.kinds = part_dtypes(self.op.state)
        self.width = self.op.width

    # Which chains, and where they lie.

    def find_chains(self) -> None:
        """The lanes, the states, and the indices of the other dimensions of this program."""
        self.find_program()
        self(f"""
            blocks = tl.cdiv(lanes, {self.tile.lanes})
            origin = tl.zeros([1, 1], {self.index})
            state = tl.arange(0, {self.tile.states})[None, :] + origin
            here = tl.arange(0, {self.tile.lanes})[:, None] + origin
        """)
        if self.kernel.packed:
            self.split_off("sequence", "sequences")
        self(f"""
            block = index % blocks
            index = index // blocks
            row = index
            lane = block * {self.tile.lanes} + here
            present = lane < lanes
            known = state < {self.op.size}
        """)
        self.split_outer()
        if self.kernel.packed:
            self.load_offsets("begin", "end")
            self("count = tl.maximum(end - begin, 0)")
        else:
            self("count = length")
        self(f"start = {int(self.kernel.first)}")
        self(f"chunks = tl.cdiv(tl.maximum(count - start, 0), {CHUNK})")

    def find_leaves(self) -> None:
        """Where step 0 of each leaf is for our lanes and states."""
        for role, k, port in self.kernel.ports:
            if role in ("carries", "scratch"):
                continue
            terms = [pointer(role, k), "origin"]
            for which in (*STRIDES[1:], *(f"outer{d}" for d in range(self.kernel.outer))):
                stride = port.by_name.get(which, 0)
                if stride == 1:
                    terms.append(which)
                elif stride is None:
                    terms.append(f"{which} * {stride_name(role, k, which)}")
                elif (which == "state" and port.state) or (which == "lane" and port.lane):
                    terms.append(f"{which} * 0")  # the same place for all of them
            self(f"{role}{k}_at = {' + '.join(terms)}")

    def at(self, role: str, k: int, part: int, t: str | None, of: str = "at") -> str:
        stride = self.kernel.port[role, k].by_name.get("time", 0)
        place = plus(f"{role}{k}_{of}", part)
        if t is None or stride == 0:
            return place
        return f"{place} + {t}" + ("" if stride == 1 else f" * {stride_name(role, k, 'time')}")

    def mask(self, role: str, k: int) -> str:
        """Of a load or store: lanes and states that exist."""
        port = self.kernel.port[role, k]
        found = ["present"] if port.lane else []
        if port.state and self.padded:
            found.append("known")
        return " & ".join(found)

    def load(
        self, role: str, k: int, part: int, kind: str, t: str | None = None, when: str = "",
        whole: bool = False,
    ) -> str:  # fmt: skip
        """A part of a leaf. when: a condition besides that of the lanes and states. whole: as a
        tile of all lanes and states."""
        mask = " & ".join(filter(None, [self.mask(role, k), when]))
        place = self.at(role, k, part, t)
        if whole:
            place = f"tl.broadcast_to({place}, {self.shape(True)})"
        text = f"tl.load({place}"
        text += f", mask={mask}, other=0)" if mask else ")"
        return self.converted(text, kind)

    def converted(self, loaded: str, kind: str) -> str:
        """A value from memory in the type of a program's value."""
        return f"({loaded} != 0)" if kind == "b1" else f"{loaded}.to({TRITON.types[kind]})"

    def store(
        self, role: str, k: int, part: int, value: str, t: str | None = None, when: str = ""
    ) -> None:
        port = self.kernel.port[role, k]
        mask = " & ".join(filter(None, [self.mask(role, k), when]))
        shape = f"[{self.tile.lanes if port.lane else 1}, {self.tile.states if port.state else 1}]"
        value = f"tl.broadcast_to(({value}).to({TRITON_MEMORY[port.dtype]}), {shape})"
        place = self.at(role, k, part, t)
        self(f"tl.store({place}, {value}{f', mask={mask}' if mask else ''})")

    def shape(self, varies: bool) -> str:
        return f"[{self.tile.lanes}, {self.tile.states if varies else 1}]"

    # Elements.

    def leaf_parts(self, leaves: Sequence[Leaf]) -> list[tuple[int, int]]:
        """Of each part: its leaf, and its place in it."""
        return [(k, n) for k, leaf in enumerate(leaves) for n in range(parts(leaf))]

    def load_constant_inputs(self, used: frozenset[int]) -> None:
        """The parts of the inputs that are equal at all steps. Like their gradients, they have no
        memory if there are no steps."""
        self("any_step = origin + length > 0")
        for c, (k, n) in enumerate(self.leaf_parts(self.op.inputs), self.width):
            if c in used and not self.kernel.port["input", k].varies_in_time:
                kind = self.op.step_inputs[c]
                self(f"x{c} = {self.load('input', k, n, kind, when='any_step')}")

    def load_inputs(
        self, used: frozenset[int], t: str, suffix: str = "", when: str = "", whole: bool = False
    ) -> list[str]:
        """Loads the parts of the inputs at a step; their names. whole: those that vary along the
        states as whole tiles, which decide how values are spread over the threads."""
        parts_of_leaves = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        for c in self.varying(used):
            k, n = parts_of_leaves[c]
            is_whole = whole and self.kernel.port["input", k].state
            value = self.load("input", k, n, self.op.step_inputs[c], t, when, is_whole)
            self(f"x{c}{suffix} = {value}")
        return self.input_names(used, suffix)

    def varying(self, used: frozenset[int]) -> list[int]:
        """The parts of the inputs that are read at every step."""
        return [
            c for c, (k, _) in enumerate(self.leaf_parts(self.op.inputs), self.width)
            if c in used and self.kernel.port["input", k].varies_in_time
        ]  # fmt: skip

    def input_names(self, used: frozenset[int], suffix: str = "") -> list[str]:
        """The names of the parts of the inputs at a step; those that are not read are `unread`."""
        varying = self.varying(used)
        return [
            "unread" if c not in used else f"x{c}{suffix}" if c in varying else f"x{c}"
            for c in range(self.width, len(self.op.step_inputs))
        ]

    def state_names(self, prefix: str, known: Sequence[int]) -> list[str]:
        return [f"{prefix}{c}" if c in known else "unread" for c in range(self.width)]

    # Programs.

    def compute(self, program: Program, inputs: Sequence[str], prefix: str) -> list[str]:
        """The names of a program's outputs, whose values are computed here."""
        names = list(inputs)
        for k, i in enumerate(program.instructions):
            names.append(f"{prefix}{k}")
            if i.op in REDUCTIONS:
                text = self.reduced(i.op, i.dtype, names[i.args[0]])
            else:
                text = TRITON.expression(i, names, program.dtypes)
            self(f"{names[-1]} = {text}")
        return [names[v] for v in program.outputs]

    def reduced(self, op: str, kind: str, value: str) -> str:
        """A reduction over the states, as [lanes, 1]."""
        dtype = TRITON.types[kind]
        if op == "sum_states":
            if self.padded:
                value = f"tl.where(known, {value}, {TRITON.literal(0, kind)})"
            return f"tl.sum({value}, 1, keep_dims=True).to({dtype})"
        least, most = (-math.inf, math.inf) if kind in FLOATS else integer_range(kind)
        if self.padded:
            end = TRITON.literal(least if op == "max_states" else most, kind)
            value = f"tl.where(known, {value}, {end})"
        name = "max" if op == "max_states" else "min"
        if kind in FLOATS:  # Triton's own loses NaN
            return f"tl.reduce({value}, 1, scalar.{name}imum, keep_dims=True)"
        return f"tl.{name}({value}, 1, keep_dims=True).to({dtype})"

    def set_carry(self, prefix: str, carry: Sequence[int], values: Sequence[str]) -> None:
        """Give the parts of a carry their new values, all at once: one may be another's old one."""
        for c, value in zip(carry, values, strict=True):
            shape = self.shape(self.op.state_varies[c])
            self(f"new_{prefix}{c} = tl.broadcast_to({value}, {shape})")
        for c in carry:
            self(f"{prefix}{c} = new_{prefix}{c}")

    # Carries that are kept in memory.

    def keep(self, place: str, parts_kept: Sequence[int], names: Sequence[str]) -> None:
        """Store the parts of a carry, as bits, from `place` on."""
        addresses = self.kept_addresses(place, parts_kept)
        for address, c, name in zip(addresses, parts_kept, names, strict=True):
            self(f"tl.store({address}, {self.as_bits(name, self.kinds[c])})")

    def kept(self, place: str, parts_kept: Sequence[int], wanted: Sequence[int]) -> None:
        """Load the wanted parts of a carry to s0, s1, …"""
        for address, c in zip(self.kept_addresses(place, parts_kept), parts_kept, strict=True):
            if c in wanted:
                self(f"s{c} = {self.from_bits(f'tl.load({address})', self.kinds[c])}")

    def kept_addresses(self, place: str, parts_kept: Sequence[int]) -> list[str]:
        """Where the parts of a carry are kept, for our lanes and states."""
        found, at = [], 0
        for c in parts_kept:
            varies = self.op.state_varies[c]
            index = f"lane * {self.tile.states} + state" if varies else "lane"
            found.append(f"{place} + {at} * padded + {index}")
            at += self.kernel.part_size(c)
        return found

    def as_bits(self, value: str, kind: str) -> str:
        bits = "tl.int64" if self.kernel.carry_dtype.itemsize == 8 else "tl.int32"
        if kind in FLOATS:
            own = "tl.int64" if kind == "f64" else "tl.int32"
            return f"{value}.to({own}, bitcast=True).to({bits})"
        return f"{value}.to({bits})"

    def from_bits(self, value: str, kind: str) -> str:
        if kind == "b1":
            return f"({value} != 0)"
        if kind in FLOATS:
            own = "tl.int64" if kind == "f64" else "tl.int32"
            return f"{value}.to({own}).to({TRITON.types[kind]}, bitcast=True)"
        return f"{value}.to({TRITON.types[kind]})"

    def chunk_place(self, chunk: str, parts_kept: Sequence[int]) -> str:
        """Where the carry before a chunk is kept: by chunk, then by row."""
        slot = f"(begin // {CHUNK} + sequence + {chunk})" if self.kernel.packed else chunk
        size = self.kernel.carry_size(parts_kept)
        return f"carries0_ptr + ({slot} * rows + row) * padded * {size}"

    def leave(self, role: str, leaves: Sequence[int], prefix: str) -> None:
        """Write the carry to these leaves; a part that is not carried is left out."""
        for c, (k, n) in enumerate(self.leaf_parts(self.op.state)):
            if k in leaves and c in self.kernel.carry:
                self.store(role, k, n, f"{prefix}{c}")

    def whole(self) -> str:
        """The kernel, with the lines so far as its body."""
        tables = ["offsets"] if self.kernel.packed else []
        return self.function([pointer(*name) for name in self.kernel.pointers], tables)
