"""The tensors of a kernel over vectors: a program's chains, where their leaves lie, loads, stores.

A pair is a lane and one of its threads. Leaves with states are addressed by pairs, others by lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ...base.vectors.kernel import CHUNK, STRIDES, VectorKernel
from ..emitter import Emitter, joined, plus, pointer, stride_name

# The names of a value's tensors: one, or one for each state of a thread.
Value = tuple[str, ...]


class MemoryText(Emitter):
    """The addresses, loads and stores of one `VectorKernel`."""

    kernel: VectorKernel

    def __init__(self, kernel: VectorKernel) -> None:
        super().__init__(kernel, {})
        self.op, self.tile = kernel.vectors, kernel.tile
        self.padded = self.tile.states != self.op.size

    # Which chains, and where they lie.

    def find_chains(self) -> None:
        """The lanes, the states, and the indices of the other dimensions of this program. Lanes
        that do not exist read the last lane's leaves, and their results are not stored. `slot` is
        the number that each of them would have: saved carries have room for all."""
        self.find_program()
        self(f"""
            blocks = tl.cdiv(lanes, {self.tile.lanes})
            origin = tl.zeros([1, 1], {self.index})
            here = tl.arange(0, {self.tile.lanes})[:, None] + origin
            pair = tl.arange(0, {self.pairs})[:, None] + origin
            item = tl.arange(0, {self.tile.items})[None, :] + origin
        """)
        if self.kernel.packed:
            self.split_off("sequence", "sequences")
        self(f"""
            block = index % blocks
            index = index // blocks
            row = index
            slot = block * {self.tile.lanes} + here
            pair_slot = block * {self.tile.lanes} + pair // {self.tile.threads}
            pair_state = pair % {self.tile.threads} * {self.tile.items}
        """)
        for prefix in ("", "pair_"):
            slot = f"{prefix}slot"
            if not self.tile.full:
                self(f"{prefix}present = {slot} < lanes")
            self(f"{prefix}lane = {slot if self.tile.full else f'tl.minimum({slot}, lanes - 1)'}")
        if self.padded:
            self(f"state = tl.arange(0, {self.tile.threads})[None, :] * {self.tile.items} + origin")
            for i in range(self.tile.items):
                self(f"exists{i} = state + {i} < {self.op.size}")
        self.split_outer()
        if self.kernel.packed:
            self.load_offsets("begin", "end")
            self("count = tl.maximum(end - begin, 0)")
        else:
            self("count = length")
        self(f"start = {int(self.kernel.first)}")
        self(f"chunks = tl.cdiv(tl.maximum(count - start, 0), {CHUNK})")

    def find_leaves(self) -> None:
        """Where step 0 of each leaf is: of the row that our lanes are in, for each lane, and of
        leaves with states for the first state of each pair of a lane and a thread."""
        for role, k, port in self.kernel.ports:
            if role in ("carries", "scratch", "partials"):  # addressed where they are used
                continue
            terms: dict[bool, list[str]] = {False: [pointer(role, k), "origin"], True: []}
            for which in (*STRIDES[1:], *(f"outer{d}" for d in range(self.kernel.outer))):
                stride = port.by_name.get(which, 0)
                inside = which in ("lane", "state")
                index = f"pair_{which}" if inside and port.state else which
                if stride == 1:
                    terms[inside].append(index)
                elif stride is None:
                    terms[inside].append(f"{index} * {stride_name(role, k, which)}")
                elif (which == "state" and port.state) or (which == "lane" and port.lane):
                    terms[inside].append(f"{index} * 0")  # the same place for all of them
            self(f"{role}{k}_row = {' + '.join(terms[False])}")
            self(f"{role}{k}_at = {' + '.join([f'{role}{k}_row', *terms[True]])}")

    def stride(self, role: str, k: int, which: str) -> str:
        """The distance in memory of a leaf's steps, lanes or states."""
        step = self.kernel.port[role, k].by_name.get(which, 0)
        return stride_name(role, k, which) if step is None else str(step)

    def at(
        self, role: str, k: int, part: int, t: str | None, of: str = "at", later: int = 0
    ) -> str:
        """Where a part of a leaf is, `later` steps after the one at t. That distance is the same
        for all threads and groups, and computed once."""
        port, place = self.kernel.port[role, k], plus(f"{role}{k}_{of}", part)
        if t is None or not port.varies_in_time:
            return place
        step = self.stride(role, k, "time")
        place += f" + {t}" + ("" if step == "1" else f" * {step}")
        if later:
            sign = "-" if self.kernel.reverse else "+"
            place += f" {sign} {later} * tl.cast({step}, tl.int64)"
        return place

    def load(
        self, name: str, role: str, k: int, part: int, kind: str, t: str | None = None,
        when: str = "", later: int = 0,
    ) -> Value:  # fmt: skip
        """Load a part of a leaf. when: a condition besides that of the states, [1, 1]. t, later: as
        `at` has them."""
        port, place = self.kernel.port[role, k], self.at(role, k, part, t, later=later)
        if port.state:
            step = self.stride(role, k, "state")
            adjacent = step == "1" and self.tile.items > 1
            if adjacent and port.dtype is torch.bfloat16 and kind == "f32":
                return self.load_states(name, place, step, "scalar.widened({})".format, when)
            converted = partial(self.converted, kind=kind)
            return self.load_states(name, place, step, converted, when)
        text = f"tl.load({place}{f', mask={when}, other=0' if when else ''})"
        self(f"{name} = {self.converted(text, kind)}")
        return (name,)

    def load_states(
        self, name: str, place: str, step: str, converted: Callable[[str], str], when: str = ""
    ) -> Value:
        """Load the states of each thread, the first of which is at `place`, `step` apart: adjacent
        ones at once.

        One dimension has all pairs of a lane and a thread, even where lanes have the same states.
        Otherwise Triton loads elements one by one if there are more threads than elements, or
        gives the tensor another layout than values have, and moves every value.
        """
        values, size = self.of_states(name), self.tile.items
        if step == "1" and size > 1:
            mask = self.states_mask([when], "item", size)
            text = f"tl.load({place} + item{f', mask={mask}, other=0' if mask else ''})"
            self(f"{name}_all = {converted(text)}")
            loaded = self.split(f"{name}_all", size, f"{name}_all", f"[{self.pairs}]")
        else:
            loaded = []
            for i in range(size):
                mask = self.states_mask([when], str(i), 1)
                mask = f", mask={mask}, other=0" if mask else ""
                loaded.append(converted(f"tl.load({place} + {i} * {step}{mask})"))
        for value, text in zip(values, loaded, strict=True):
            self(f"{value} = tl.reshape({text}, {self.shape(True)})")
        return values

    def states_mask(self, present: Sequence[str], item: str, count: int) -> str:
        """The mask of `count` states of each thread, from number `item` on."""
        found = [condition for condition in present if condition]
        if self.padded and self.op.size % count == 0 and count > 1:  # all of them exist, or none
            found.append(f"(pair_state < {self.op.size})")
        elif self.padded:
            found.append(f"(pair_state + {item} < {self.op.size})")
        return " & ".join(found)

    def converted(self, loaded: str, kind: str) -> str:
        """A value from memory in the type of a program's value."""
        return f"({loaded} != 0)" if kind == "b1" else f"{loaded}.to({TRITON.types[kind]})"

    def store(
        self, role: str, k: int, part: int, value: Value, t: str | None = None, when: str = "",
        later: int = 0,
    ) -> None:  # fmt: skip
        port, place = self.kernel.port[role, k], self.at(role, k, part, t, later=later)
        memory, prefix = TRITON_MEMORY[port.dtype], "pair_" if port.state else ""
        masked = port.lane and not self.tile.full
        present = [c for c in (f"{prefix}present" if masked else "", when) if c]
        if port.state:
            values = [f"({v}).to({memory})" for v in value] * (self.tile.items // len(value))
            present += [] if port.lane else [f"(pair < {self.tile.threads})"]  # by the first lane
            self.store_states(place, self.stride(role, k, "state"), values, present)
            return
        (name,) = value
        mask = f", mask={' & '.join(present)}" if present else ""
        shape = f"[{self.tile.lanes if port.lane else 1}, 1]"
        self(f"tl.store({place}, tl.broadcast_to(({name}).to({memory}), {shape}){mask})")

    def store_states(
        self, place: str, step: str, values: Sequence[str], present: Sequence[str]
    ) -> None:
        """Store the states of each thread, the first of them at `place`, `step` apart."""
        size = len(values)
        together = step == "1" and size > 1
        shape = f"[{self.pairs}]" if together else f"[{self.pairs}, 1]"
        values = [f"tl.reshape(tl.broadcast_to({v}, {self.shape(True)}), {shape})" for v in values]
        if together:
            mask = self.states_mask(present, "item", size)
            whole = f"tl.reshape({joined(values)}, [{self.pairs}, {size}])"
            self(f"tl.store({place} + item, {whole}{f', mask={mask}' if mask else ''})")
            return
        for i, value in enumerate(values):
            mask = self.states_mask(present, str(i), 1)
            self(f"tl.store({place} + {i} * {step}, {value}{f', mask={mask}' if mask else ''})")

    @property
    def pairs(self) -> int:
        """Of a lane and a thread."""
        return int(self.tile.lanes * self.tile.threads)

    def shape(self, varies: bool) -> str:
        return f"[{self.tile.lanes}, {self.tile.threads if varies else 1}]"

    def of_states(self, name: str) -> Value:
        """The names of a value that varies along the states."""
        items = self.tile.items
        return (name,) if items == 1 else tuple(f"{name}_i{i}" for i in range(items))

    def named(self, name: str, varies: bool) -> Value:
        return self.of_states(name) if varies else (name,)
