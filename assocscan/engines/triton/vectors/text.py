"""What the texts of forward and backward kernels over vectors have in common.

Names in the text: s0, s1, … the parts of the carry; x0, … those of the inputs, in the numbering of
a step's programs (`VectorOperator.step_inputs`, whose first are the carry's). Where a thread has
several states, a part that varies along them has a name for each: s1_i0, s1_i1, ….
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import FLOATS
from ....program.operator import Leaf
from ....program.program_builder import Program, integer_range
from ....program.vectors.state_axis import REDUCTIONS, varying
from ....program.vectors.vector_operator import part_dtypes, parts
from ...base.vectors.kernel import CHUNK, VectorKernel
from ..emitter import pointer
from .memory import MemoryText, Value

UNREAD: Value = ("unread",)
LOG2E = math.log2(math.e)


def of_state(value: Value, i: int) -> str:
    """The tensor of a value for state i of each thread."""
    return value[i] if len(value) > 1 else value[0]


class VectorText(MemoryText):
    """The programs of one `VectorKernel`, and the carries that it keeps in memory."""

    def __init__(self, kernel: VectorKernel) -> None:
        super().__init__(kernel)
        self.kinds = part_dtypes(self.op.state)
        self.width = self.op.width

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
                self.load(f"x{c}", "input", k, n, self.op.step_inputs[c], when="any_step")

    def load_inputs(
        self, used: frozenset[int], t: str, suffix: str = "", when: str = "", later: int = 0
    ) -> list[Value]:
        """Loads the parts of the inputs at a step; their names. when, later: as `load` has them."""
        parts_of_leaves = dict(enumerate(self.leaf_parts(self.op.inputs), self.width))
        for c in self.varying(used):
            k, n = parts_of_leaves[c]
            self.load(f"x{c}{suffix}", "input", k, n, self.op.step_inputs[c], t, when, later)
        return self.input_names(used, suffix)

    def varying(self, used: frozenset[int]) -> list[int]:
        """The parts of the inputs that are read at every step."""
        return [
            c for c, (k, _) in enumerate(self.leaf_parts(self.op.inputs), self.width)
            if c in used and self.kernel.port["input", k].varies_in_time
        ]  # fmt: skip

    def input_names(self, used: frozenset[int], suffix: str = "") -> list[Value]:
        """The names of the parts of the inputs at a step; those that are not read are `unread`."""
        varying = self.varying(used)
        parts_of_leaves = self.leaf_parts(self.op.inputs)
        return [
            UNREAD if c not in used
            else self.named(f"x{c}{suffix if c in varying else ''}",
                            self.kernel.port["input", k].state)
            for c, (k, _) in enumerate(parts_of_leaves, self.width)
        ]  # fmt: skip

    def carried(self, prefix: str, parts_carried: Sequence[int]) -> list[Value]:
        """The names of these parts of a carry."""
        return [self.named(f"{prefix}{c}", self.op.state_varies[c]) for c in parts_carried]

    def all_parts(self, names: Sequence[Value] | None, known: Sequence[int]) -> list[Value]:
        """The names of all parts of a state, of which some are known; none if names is None."""
        found = dict(zip(known, names or [], strict=False))
        return [found.get(c, UNREAD) for c in range(self.width)]

    # Programs.

    def compute(
        self, program: Program, inputs: Sequence[Value], input_varies: Sequence[bool], prefix: str
    ) -> list[Value]:
        """The names of a program's outputs, whose values are computed here. input_varies: whether
        each input varies along the states."""
        names, varies = list(inputs), varying(program, input_varies)
        for k in range(len(program.instructions)):
            names.append(self.named(f"{prefix}{k}", varies[len(inputs) + k]))
            self.define(names, k, program, varies[len(inputs) + k])
        return [names[v] for v in program.outputs]

    def define(self, names: Sequence[Value], k: int, program: Program, fast: bool) -> None:
        """The value of instruction k. names: of all values of the program. fast: whether it varies
        along the states: then exponentials are as the CUDA engine's (`power_factors`)."""
        instruction, target = program.instructions[k], names[len(program.inputs) + k]
        if instruction.op in REDUCTIONS:
            value = names[instruction.args[0]]
            self(f"{target[0]} = {self.reduced(instruction.op, instruction.dtype, value)}")
            return
        power = fast and instruction.op == "exp" and instruction.dtype == "f32"
        factors = self.power_factors(instruction.args[0], program) if power else ()
        for i, name in enumerate(target):
            own = {v: of_state(names[v], i) for v in (*instruction.args, *factors)}
            if power:
                *other, last = (own[v] for v in factors)
                text = " * ".join([*other, f"({last} * {LOG2E})"])
                self(f"{name} = scalar.power_of_two({text})")
            elif instruction.op == "div" and instruction.dtype == "f32":
                # To two units in the last place; the exact one calls a function, around which
                # nothing can be rearranged.
                self("{} = {} / {}".format(name, *(own[v] for v in instruction.args)))
            else:
                text = TRITON.expression(instruction, own, program.dtypes)  # type: ignore[arg-type]
                self(f"{name} = {text}")

    def power_factors(self, v: int, program: Program) -> tuple[int, ...]:
        """The factors of value v, which is the power of e that is wanted: it is computed as a power
        of two, as by the CUDA engine (`cuda/vectors/scope.py`). Where v = x·y and y is equal at all
        steps, y·log2(e) is computed once for all of them."""
        if v >= len(program.inputs):
            i = program.instructions[v - len(program.inputs)]
            for x, y in (i.args, i.args[::-1]) if i.op == "mul" else ():
                if y in self.steady:
                    return x, y
        return (v,)

    @cached_property
    def steady(self) -> frozenset[int]:
        """The inputs of a step's programs that are equal at all steps."""
        leaves = enumerate(self.leaf_parts(self.op.inputs), self.width)
        ports = {c: self.kernel.port.get(("input", k)) for c, (k, _) in leaves}
        return frozenset(c for c, p in ports.items() if p is not None and not p.varies_in_time)

    def reduced(self, op: str, kind: str, value: Value) -> str:
        """A reduction over the states, as [lanes, 1]."""
        dtype = TRITON.types[kind]
        if op == "sum_states":
            whole = self.sum_of_thread(kind, value)
            if kind in FLOATS:
                return f"scalar.total({whole}, 1)"
            return f"tl.sum({whole}, 1, keep_dims=True).to({dtype})"
        least, most = (-math.inf, math.inf) if kind in FLOATS else integer_range(kind)
        known = self.with_padding(
            value, TRITON.literal(least if op == "max_states" else most, kind)
        )
        name = "max" if op == "max_states" else "min"
        if kind in FLOATS:  # Triton's own loses NaN
            whole = self.folded(f"scalar.{name}imum({{0}}, {{1}})", known)
            return f"tl.reduce({whole}, 1, scalar.{name}imum, keep_dims=True)"
        whole = self.folded(f"tl.{name}imum({{0}}, {{1}})", known)
        return f"tl.{name}({whole}, 1, keep_dims=True).to({dtype})"

    def sum_of_thread(self, kind: str, value: Value) -> str:
        """The sum over the states of each thread."""
        return self.folded("({0} + {1})", self.with_padding(value, TRITON.literal(0, kind)))

    def with_padding(self, value: Value, otherwise: str) -> list[str]:
        """A value with another one for states that do not exist."""
        if not self.padded:
            return list(value)
        return [f"tl.where(exists{i}, {name}, {otherwise})" for i, name in enumerate(value)]

    def folded(self, pattern: str, values: Sequence[str]) -> str:
        """Values combined in pairs, and the results again."""
        if len(values) == 1:
            return values[0]
        half = len(values) // 2
        return pattern.format(
            self.folded(pattern, values[:half]), self.folded(pattern, values[half:])
        )

    def set_carry(self, prefix: str, carry: Sequence[int], values: Sequence[Value]) -> None:
        """Give the parts of a carry their new values, all at once: one may be another's old one."""
        targets = self.carried(prefix, carry)
        new: list[Value] = [tuple(f"new_{name}" for name in target) for target in targets]
        for c, names, value in zip(carry, new, values, strict=True):
            self.shaped(names, value, self.op.state_varies[c])
        self.assign(targets, new)

    def assign(self, targets: Sequence[Value], values: Sequence[Value]) -> None:
        """Give values other names."""
        for names, value in zip(targets, values, strict=True):
            for target, name in zip(names, value, strict=True):
                self(f"{target} = {name}")

    def shaped(self, targets: Sequence[str], value: Value, varies: bool) -> None:
        """A value under other names, in the shape of one that varies along the states or not."""
        for i, target in enumerate(targets):
            self(f"{target} = tl.broadcast_to({of_state(value, i)}, {self.shape(varies)})")

    # Carries that are kept in memory.

    def store_carry(self, place: str, parts_kept: Sequence[int], names: Sequence[Value]) -> None:
        """Store the parts of a carry, as bits, from `place` on."""
        for address, c, value in zip(
            self.kept_addresses(place, parts_kept), parts_kept, names, strict=True
        ):
            bits = [self.as_bits(name, self.kinds[c]) for name in value]
            if self.op.state_varies[c]:
                self.store_states(address, "1", bits, [])
            else:
                self(f"tl.store({address}, {bits[0]})")

    def load_carry(self, place: str, parts_kept: Sequence[int], wanted: Sequence[int]) -> None:
        """Load the wanted parts of a carry to s0, s1, …"""
        for address, c in zip(self.kept_addresses(place, parts_kept), parts_kept, strict=True):
            if c not in wanted:
                continue
            if self.op.state_varies[c]:
                self.load_states(f"s{c}", address, "1", partial(self.from_bits, kind=self.kinds[c]))
            else:
                self(f"s{c} = {self.from_bits(f'tl.load({address})', self.kinds[c])}")

    def kept_addresses(self, place: str, parts_kept: Sequence[int]) -> list[str]:
        """Where the parts of a carry are kept, for our lanes and states."""
        found, at = [], 0
        for c in parts_kept:
            varies = self.op.state_varies[c]
            index = f"pair_slot * {self.tile.states} + pair_state" if varies else "slot"
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
                (value,) = self.carried(prefix, [c])
                self.store(role, k, n, value)

    def whole(self) -> str:
        """The kernel, with the lines so far as its body."""
        tables = ["offsets"] if self.kernel.packed else []
        return self.function([pointer(*name) for name in self.kernel.pointers], tables)
