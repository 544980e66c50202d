"""Loads and stores of a Triton kernel: the elements and the results of a tile iteration.

What lies side by side in memory is loaded and stored in one piece, wide for each thread, and split
into values of the tile's shape:

    the items of a segment of a row, which a thread combines in sequence, in either direction. Of a
    leaf that is read one step further, its items in one aligned piece, and the one item beyond it
    the two parts of complex numbers in adjacent lanes

Names in the text, beside those of `body`: v, a piece; w, the one item beyond a piece; `place`,
where a segment begins in memory; `pair`, the part of a complex number in its block of lanes.
"""

from __future__ import annotations

from dataclasses import replace

from ...program.cpp_and_triton_expressions import TRITON
from ...program.dtypes import TRITON_MEMORY
from ...program.operator import spans
from .emitter import joined, names, plus, pointer, stride_name, times
from .frame import Frame
from .kernel import TritonKernel


class Memory(Frame):
    """A kernel's frame, and the loads and stores of its tile iterations."""

    def __init__(self, kernel: TritonKernel) -> None:
        super().__init__(kernel)
        tile = self.tile
        self.is_piece = not kernel.lanes and tile.items > 1 and tile.segments > 1
        self.piece_shape = f"{self.tile_shape[:-1]}, {tile.items}]"
        self.pair_shape = f"[{tile.segments}, {2 * tile.chains}]"
        self.has_pairs = any(self.is_pair(role, k) for role, k, _ in kernel.ports)
        self.loads = range(1) if self.is_piece else range(tile.items)
        self.lowered: dict[int, list[str]] = {}  # by component: the results at the items so far

    def is_pair(self, role: str, k: int) -> bool:
        """Whether a leaf is of complex numbers, one for each lane, side by side. Not where the
        elements one step earlier are loaded, too (`one_item_before`)."""
        port, kernel = self.kernel.port[role, k], self.kernel
        if role not in ("input", "output") or not kernel.lanes or k in kernel.boundary:
            return False
        if kernel.exclusive and self.tile.items == 1:
            return False
        return port.lane == 2 and port.offsets == (0, 1)

    def find_leaves(self) -> None:
        super().find_leaves()
        if not self.has_pairs:
            return
        size = 2 * self.tile.chains
        self(f"""
            pair = 2 * first_lane + tl.arange(0, {size})[None, :]
            pair_present = pair < 2 * lanes
        """)
        for role, k, port in self.kernel.ports:
            if self.is_pair(role, k):
                outer = self.terms(role, k, replace(port, lane=0))
                self(f"{role}{k}_pairs = {' + '.join([pointer(role, k), *outer, 'pair'])}")

    # Where an item is.

    def find_step(self, q: str, u: int) -> None:
        """p: the step in the sequence; t: its place on the axis; `valid`: whether it is ours."""
        self.find_step_of(plus(self.first_item(q), u))
        ours = "here < size" if self.kernel.cut == "whole" else f"{self.on_tile('r')} < count"
        if not self.kernel.lanes:
            self(f"t = {self.place('p', 'size')}")
        self(f"here = {'p' if self.tile.segments > 1 else self.on_tile('p')}")
        if self.kernel.full:
            return
        self(f"valid = present & ({ours})")
        if self.has_pairs:
            step, end = ("p", "size") if self.kernel.cut == "whole" else ("r", "count")
            self(f"pair_valid = pair_present & ({self.on_pairs(step)} < {end})")

    def find_starts(self, role: str, q: str) -> None:
        """Where the first item of each segment is, of lanes: the others are at equal distances."""
        if not self.kernel.lanes:
            return
        self.find_step_of(self.first_item(q))
        self(f"t = {self.place('p', 'size')}")
        for found, k, port in self.kernel.ports:
            if found != role:
                continue
            of = "pairs" if self.is_pair(role, k) else "at"
            distance = ""
            if port.step != 0:
                distance = f" + {times('t', port.step, stride_name(role, k, 'step'))}"
            self(f"{role}{k}_start = {role}{k}_{of}{distance}")

    def inside(self, *conditions: str, of: str = "valid") -> str:
        """The mask of a load or store: that there is an element, and these."""
        shaped = self.on_pairs if of == "pair_valid" else self.on_tile
        found = [*([] if self.kernel.full else [of]), *conditions]
        return f"mask={shaped(' & '.join(found))}" if found else ""

    def first_item(self, q: str) -> str:
        """The step at which each segment begins."""
        if self.tile.segments == 1:
            return q
        return f"{q} + segment" if self.tile.items == 1 else f"{q} + segment * {self.tile.items}"

    def find_step_of(self, offset: str) -> None:
        if self.kernel.cut == "whole":
            self(f"p = {offset}")
        else:
            self(f"""
                r = {offset}
                p = first + r
            """)

    def find_piece(self, q: str) -> None:
        """places: those of each segment's items, upwards; `inside`: whether they are ours. In terms
        that show Triton how places are aligned. `place`: in the sequence, where the segment
        begins."""
        items, packed = self.tile.items, self.kernel.packed
        self.find_step_of(self.first_item(q))
        near, size = "near" if packed else "places", self.on_piece("size") if packed else "size"
        inside = f"({near} >= 0)" if self.kernel.reverse else f"({near} < {size})"
        if self.kernel.cut != "whole":
            inside += f" & {self.on_piece('r < count')}"
        self(f"""
            place = {f"size - (p + {items})" if self.kernel.reverse else "p"}
            {near} = {self.on_piece("place")} + tl.arange(0, {items})[None, None, :]
            inside = {self.on_piece("present")} & {inside}
        """)
        if packed:
            self(f"places = near + {self.on_piece('begin')}")

    def on_piece(self, value: str) -> str:
        """With a dimension for the items of a segment."""
        return f"tl.expand_dims({self.on_tile(value)}, 2)"

    def on_pairs(self, value: str) -> str:
        """In the shape of a tile of both parts of complex numbers."""
        return f"tl.broadcast_to({value}, {self.pair_shape})"

    # Loads.

    def load(self, raw: str, q: str) -> None:
        """The inputs of the iteration that begins at step q; `unpack` follows."""
        self.find_starts("input", q)
        for u in self.loads:
            if self.is_piece:
                self.find_piece(q)
            else:
                self.find_step(q, u)
            for name, value in self.loaded_at(u):
                self(f"{raw}{name} = {value}")

    def loaded_at(self, u: int) -> list[tuple[str, str]]:
        """What is loaded at item u, or of all items: names without their first letter, and how."""
        found = {}
        for k, n, c in self.raw:
            if self.is_piece:
                found[f"v{c}"] = self.loaded_piece(k, n)
                if k in self.kernel.shifted:
                    found[f"w{c}"] = self.loaded_beyond(k, n)
            elif self.is_pair("input", k):
                found[f"v{k}_{u}"] = self.loaded_pair(k, u)
            else:
                found[f"{c}_{u}"] = self.loaded(k, n, c, u)
        return list(found.items())

    def move(self, source: str, target: str) -> None:
        """What was loaded under one letter is named by another."""
        for u in self.loads:
            for name, _ in self.loaded_at(u):
                self(f"{target}{name} = {source}{name}")

    def unpack(self, raw: str) -> None:
        """The values at each item, from the pieces and pairs."""
        items, done = self.tile.items, set()
        if self.is_piece and self.kernel.boundary:
            self.find_step_of(self.first_item("q"))
        for k, _, c in self.raw:
            if self.is_piece:
                found = self.split(f"{raw}v{c}", items, f"{raw}{c}", self.tile_shape)
                if k in self.kernel.shifted:
                    found = (
                        [f"{raw}w{c}", *found[:-1]]
                        if self.kernel.reverse
                        else [*found[1:], f"{raw}w{c}"]
                    )
                if self.kernel.reverse:
                    found.reverse()
                for u, value in enumerate(found):
                    inside = self.on_tile(f"p + {u + 1} < size")
                    self(f"{raw}{c}_{u} = {self.or_boundary(k, c, value, inside)}")
            elif self.is_pair("input", k) and k not in done:
                done.add(k)
                for u in range(items):
                    shape = f"{self.tile_shape[:-1]}, 2]"
                    two = ", ".join(f"{raw}{c + part}_{u}" for part in range(2))
                    self(f"{two} = tl.split(tl.reshape({raw}v{k}_{u}, {shape}))")

    def loaded(self, k: int, part: int, c: int, u: int) -> str:
        """An input component at item u; of a leaf that is read one step further, after it."""
        if k not in self.kernel.shifted:
            return load_text(self.item_address("input", k, part, u), self.inside())
        further = "here + 1 < size"
        at = self.item_address("input", k, part, u, 1)
        return self.or_boundary(k, c, load_text(at, self.inside(f"({further})")), further)

    def loaded_before(self, k: int, part: int) -> str:
        """An input component one step before item 0; of a leaf that is read one step further, at
        item 0."""
        at = self.item_address("input", k, part, 0, 0 if k in self.kernel.shifted else -1)
        return load_text(at, f"mask={self.on_tile('known')}")

    def loaded_piece(self, k: int, part: int) -> str:
        """All items of each segment."""
        return f"tl.load({self.piece_address('input', k, part)}, mask=inside, other=0)"

    def loaded_beyond(self, k: int, part: int) -> str:
        """The item one step further than the last of each segment."""
        items = self.tile.items
        beyond, inside = f"place + {items}", f"place + {items} < size"
        if self.kernel.reverse:
            beyond, inside = "place - 1", "place > 0"
        if self.kernel.cut != "whole":
            inside = f"({inside}) & (r < count)"
        begin = "begin + " if self.kernel.packed else ""
        at = self.address("input", k, f"({begin}{beyond})")
        at = self.on_tile(plus(at, self.kernel.port["input", k].offsets[part]))
        return f"tl.load({at}, mask={self.on_tile(f'present & ({inside})')}, other=0)"

    def loaded_pair(self, k: int, u: int) -> str:
        """Both parts of a complex number at item u."""
        if k not in self.kernel.shifted:
            return load_text(self.item_address("input", k, 0, u), self.inside(of="pair_valid"))
        further = f"({self.on_pairs('p')} + 1 < size)"
        at = self.item_address("input", k, 0, u, 1)
        return load_text(at, self.inside(further, of="pair_valid"))

    def or_boundary(self, k: int, c: int, value: str, inside: str) -> str:
        """A value, or beyond the edge of a leaf that is read one step further the boundary's."""
        if k not in self.kernel.boundary:
            return value
        memory = TRITON_MEMORY[self.kernel.port["input", k].dtype]
        return f"tl.where({inside}, {value}, boundary_x{c}.to({memory}))"

    def item_address(self, role: str, k: int, part: int, u: int, further: int = 0) -> str:
        """Where a component of a leaf is at item u, or so many steps further; of a pair, where both
        parts are."""
        shaped = self.on_pairs if self.is_pair(role, k) else self.on_tile
        if not self.kernel.lanes:
            step = f"p + {further}" if further > 0 else f"p - {-further}"
            t = f"({self.place(f'({step})', 'size')})" if further else "t"
            return shaped(plus(self.address(role, k, t), self.kernel.port[role, k].offsets[part]))
        port, steps = self.kernel.port[role, k], u + further
        at = plus(f"{role}{k}_start", port.offsets[part])
        if port.step == 0 or steps == 0:
            return shaped(at)
        sign = "-" if (steps < 0) != self.kernel.reverse else "+"
        stride = stride_name(role, k, "step")
        if self.kernel.wide:
            stride = f"tl.cast({stride}, tl.int64)"
        distance = times(str(abs(steps)), port.step, stride) if port.step != 1 else str(abs(steps))
        return shaped(f"{at} {sign} {distance}")

    def address(self, role: str, k: int, t: str) -> str:
        """Where the first component of a leaf is at place t on the axis."""
        port = self.kernel.port[role, k]
        at = f"{role}{k}_at"
        if port.step != 0:
            at += f" + {times(t, port.step, stride_name(role, k, 'step'))}"
        return at

    def piece_address(self, role: str, k: int, part: int) -> str:
        """Where a component of a leaf is at all items of each segment."""
        start = self.on_piece(f"{role}{k}_at")
        at = plus(self.address(role, k, "places"), self.kernel.port[role, k].offsets[part])
        at = at.removeprefix(f"{role}{k}_at")
        return f"tl.broadcast_to({start}{at}, {self.piece_shape})"

    # Elements and results.

    def lift(self, raw: str, u: int, result: str) -> None:
        """The element at item u, of which the components of an aggregate."""
        arguments = ", ".join(self.raw_value(raw, c, u) for c in self.lifted)
        self(f"""
            {result}[*a] = lift({arguments})
            {result}[a] = {self.on_tile(f"{result}[a]")}
        """)

    def raw_value(self, raw: str, c: int, u: int) -> str:
        """An input component in the type that the operator computes in."""
        kind = self.op.lift.inputs[c]
        leaf = next(k for k, span in enumerate(spans(self.op.inputs)) if c in span)
        memory = TRITON_MEMORY[self.kernel.port["input", leaf].dtype]
        name = f"{raw}{c}_{u}"
        return name if memory == TRITON.types[kind] else f"{name}.to({TRITON.types[kind]})"

    def store(self, state: str, u: int) -> None:
        """lower, and write what the caller gets at item u; pieces, when all items are there."""
        op, width = self.op, self.op.width
        if not self.writes or not op.lower.outputs:
            return
        used = sorted(op.lower.used_inputs)
        edge = width + len(op.lift.inputs)
        arguments = [f"{state}{v}" for v in used if v < width]
        arguments += [self.raw_value("x", v - width, u) for v in used if width <= v < edge]
        if edge in used:
            arguments.append(self.on_tile("here == size - 1"))
        letter = f"y{u}_" if self.is_piece else "y"
        self(f"{names(letter, range(len(op.lower.outputs)))} = lower({', '.join(arguments)})")
        if self.is_piece and u < self.tile.items - 1:
            return
        if self.is_piece:
            self.find_piece("q")
        if u == 0:
            self.find_starts("output", "q")
        for k, span in enumerate(spans(op.outputs)):
            memory = TRITON_MEMORY[self.kernel.port["output", k].dtype]
            if self.is_pair("output", k):
                both = ", ".join(f"{self.on_tile(f'y{c}')}.to({memory})" for c in span)
                value = f"tl.reshape(tl.join({both}), {self.pair_shape})"
                at = self.item_address("output", k, 0, u)
                self(store_text(at, value, self.inside(of="pair_valid")))
                continue
            for n, c in enumerate(span):
                if self.is_piece:
                    at, value = self.piece_address("output", k, n), self.piece(c, memory)
                    self(store_text(at, value, "mask=inside"))
                else:
                    value = f"{self.on_tile(f'y{c}')}.to({memory})"
                    self(store_text(self.item_address("output", k, n, u), value, self.inside()))

    def piece(self, c: int, memory: str) -> str:
        """Results at all items of each segment, upwards in memory."""
        items = range(self.tile.items)
        values = [f"{self.on_tile(f'y{u}_{c}')}.to({memory})" for u in items]
        whole = joined(values[::-1] if self.kernel.reverse else values)
        return f"tl.reshape({whole}, {self.piece_shape})"


def load_text(at: str, mask: str) -> str:
    return f"tl.load({at}, {mask}, other=0)" if mask else f"tl.load({at})"


def store_text(at: str, value: str, mask: str) -> str:
    return f"tl.store({at}, {value}, {mask})" if mask else f"tl.store({at}, {value})"
