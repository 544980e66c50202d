"""What a Triton kernel does in each tile iteration: load → lift → scan → lower → store.

Every lane that holds no element comes after those that do, in scan order, so that no padding is
needed: positions only mask loads and stores. The text is unrolled over the items of a segment,
because a thread's items must be separate values for loads to be coalesced along the chains.

Names in the text: x raw inputs, s elements, i scanned totals, h the carry, g the carry at an item;
a number is a component, after an underscore an item.
"""

from __future__ import annotations

from ...program.operator import spans
from ...program.render import TRITON
from .frame import MEMORY_TYPES, Frame, call

BITS = {"f32": "tl.int32", "f64": "tl.int64", "b1": "tl.int8"}


class KernelBody(Frame):
    """The kernel function of one `TritonKernel`."""

    def text(self) -> str:
        self.find_chain()
        self.find_bounds()
        self.point_at_leaves()
        self.load_boundary()
        self.enter()
        if self.kernel.single:
            self("q = 0")
            self.iteration()
        else:
            prefetch = self.tile.prefetch
            if prefetch:
                self.load("x", f"tl.cast(0, {self.index})")
            loop = "range" if not self.tile.stages else "tl.range"
            more = f", num_stages={self.tile.stages}" if self.tile.stages else ""
            with self.block(f"for q in {loop}(0, steps, {self.tile.steps}{more}):"):
                if prefetch:
                    self.load("n", f"q + {self.tile.steps}")
                self.iteration()
                if prefetch:
                    for u in range(self.tile.items):
                        for _, _, c in self.raw:
                            self(f"x{c}_{u} = n{c}_{u}")
        self.leave()
        body = "\n".join(self.lines)
        return f"@triton.jit\ndef scan(\n{self.parameters()}\n):\n{body}\n"

    def iteration(self) -> None:
        if not self.kernel.starts_from_carry:
            entered = " | entered" if self.kernel.cut == "rescan" else ""
            self(f"carried = (q > 0){entered}")
        if not self.tile.prefetch or self.kernel.single:
            self.load("x", "q")
        if self.tile.segments == 1:
            self.sequential_iteration()
        elif self.tile.items > 1 or not self.writes:
            self.segmented_iteration()
        elif self.kernel.exclusive:
            self.shifted_iteration()
        else:
            self.tile_iteration()

    def lift(self, u: int, raw: str = "x", result: str = "s") -> None:
        """The element at item u, of which total components."""
        used = [self.raw_value(c, u, raw) for c in self.lifted]
        self(call("lift", used, [f"{result}{c}" for c in self.aggregate]))
        for c in self.aggregate:
            self(f"{result}{c} = tl.broadcast_to({result}{c}, {self.tile_shape})")

    def raw_value(self, c: int, u: int, raw: str = "x") -> str:
        kind = self.op.lift.inputs[c]
        leaf = next(k for k, span in enumerate(spans(self.op.inputs)) if c in span)
        memory = MEMORY_TYPES[self.kernel.port["input", leaf].dtype]
        name = f"{raw}{c}_{u}"
        return name if memory == TRITON.types[kind] else f"{name}.to({TRITON.types[kind]})"

    def begin_or(self, condition: str, fresh: str, result: str) -> None:
        """Where no carry has entered, the element itself."""
        for c in self.carry:
            self(f"{result}{c} = tl.where({condition}, {result}{c}, {fresh}{c})")

    def store(self, state: str, u: int) -> None:
        """lower, and write what the caller gets at item u."""
        if not self.writes:
            return
        op, width = self.op, self.op.width
        used = sorted(op.lower.used_inputs)
        raw = len(op.lift.inputs)
        arguments = [f"{state}{v}" for v in used if v < width]
        arguments += [self.raw_value(v - width, u) for v in used if width <= v < width + raw]
        if width + raw in used:
            arguments.append(self.full("here == size - 1"))
        results = [f"y{c}" for c in range(len(op.lower.outputs))]
        if not results:
            return
        self(call("lower", arguments, results))
        for k, span in enumerate(spans(op.outputs)):
            port = self.kernel.port["output", k]
            for n, c in enumerate(span):
                value = f"tl.broadcast_to(y{c}, {self.tile_shape}).to({MEMORY_TYPES[port.dtype]})"
                at = self.address("output", k, port, n, "t")
                self(f"tl.store({at}, {value}, mask={self.full('valid')})")

    def sequential_iteration(self) -> None:
        """One segment: every thread walks its chains on its own."""
        for u in range(self.tile.items):
            self.position("q", u)
            self.lift(u)
            if self.kernel.exclusive:
                self.store("h", u)
            self.advance("h", "s", "g")
            if u == 0 and not self.kernel.starts_from_carry:
                self.begin_or("carried", "s", "g")
            for c in self.carry:
                keeps = self.kernel.final or not self.writes
                self(f"h{c} = " + (f"tl.where(valid, g{c}, h{c})" if keeps else f"g{c}"))
            if not self.kernel.exclusive:
                self.store("h", u)

    def scan_segments(self, elements: str = "s") -> None:
        """i: the inclusive scan of the segments' totals, or of other elements."""
        if not self.aggregate:
            return
        totals = [
            f"{elements}{c}.to(tl.int8)" if self.kinds[c] == "b1" else f"{elements}{c}"
            for c in self.aggregate
        ]
        tuple_of = totals[0] if len(totals) == 1 else f"({', '.join(totals)})"
        names = ", ".join(f"i{c}" for c in self.aggregate)
        self(f"{names} = tl.associative_scan({tuple_of}, {self.axis}, combine)")
        for c in self.aggregate:
            if self.kinds[c] == "b1":
                self(f"i{c} = i{c} != 0")

    def take(self, name: str, c: int, where: str) -> str:
        """The one value along the segments where `where` holds, as a carry; exact for any bits."""
        kind = self.kinds[c]
        bits = f"{name}{c}"
        if kind in ("f32", "f64"):
            bits = f"{bits}.to({BITS[kind]}, bitcast=True)"
        elif kind == "b1":
            bits = f"{bits}.to(tl.int8)"
        taken = f"tl.sum(tl.where({where}, {bits}, 0), axis={self.axis}, keep_dims=True)"
        if kind in ("f32", "f64"):
            return f"{taken}.to({BITS[kind]}).to({TRITON.types[kind]}, bitcast=True)"
        return f"{taken} != 0" if kind == "b1" else f"{taken}.to({TRITON.types[kind]})"

    def take_final(self, state: str) -> None:
        """Keep the state after the last of our steps, if this iteration has it."""
        self(f"ends = (count - 1 >= q) & (count - 1 < q + {self.tile.steps})")
        for c in self.carry:
            value = self.take(state, c, self.full("hit"))
            self(f"last{c} = tl.where(ends, {value}, last{c})")

    def carry_on(self) -> None:
        """h: the carry after this iteration."""
        if self.kernel.single:
            return
        self(f"at_end = {self.full(f'segment == {self.tile.segments - 1}')}")
        for c in self.aggregate:
            self(f"e{c} = {self.take('i', c, 'at_end')}")
        self.advance("h", "e", "g")
        if not self.kernel.starts_from_carry:
            self.begin_or("carried", "e", "g")
        for c in self.carry:
            self(f"h{c} = g{c}")

    def tile_iteration(self) -> None:
        """Inclusive, one item per segment: the scan itself gives the outputs."""
        self.position("q", 0)
        self.lift(0)
        self.scan_segments()
        if self.kernel.single and not self.kernel.starts_from_carry:
            for c in self.carry:
                self(f"g{c} = i{c}")
        else:
            self.advance("h", "i", "g")
            if not self.kernel.starts_from_carry:
                self.begin_or("carried", "i", "g")
        self.store("g", 0)
        if self.kernel.final:
            self("hit = here == size - 1")
            self.take_final("g")
        self.carry_on()

    def shifted_iteration(self) -> None:
        """Exclusive, one item per segment: the elements one step earlier, the carry the first.

        They are loaded again, from the cache: a shift of the scan's result would go through
        hundreds of shuffles. What the carry lacks of a total is never needed of a first element.
        """
        self.position("q", 0)
        self("before = p - 1")
        self("known = valid & (segment > 0)")
        for k, n, c in self.raw:
            if c in self.lifted:
                step = "p" if k in self.kernel.shifted else "before"
                at = self.address(
                    "input", k, self.kernel.port["input", k], n, f"({self.place(step)})"
                )
                self(f"z{c}_0 = tl.load({at}, mask={self.full('known')}, other=0)")
        self.lift(0, "z", "m")
        for c in self.carry:
            self(f"m{c} = tl.where(segment == 0, h{c}, m{c})")
        self.scan_segments("m")
        for c in self.carry:
            self(f"g{c} = i{c}")
        self.store("g", 0)
        if self.kernel.single and not self.kernel.final:
            return
        self.lift(0)
        self.advance("g", "s", "w")
        if self.kernel.final:
            self("hit = here == size - 1")
            self.take_final("w")
        if not self.kernel.single:
            self(f"at_end = {self.full(f'segment == {self.tile.segments - 1}')}")
            for c in self.carry:
                self(f"h{c} = {self.take('w', c, 'at_end')}")

    def segmented_iteration(self) -> None:
        """Totals of the segments, their scan, then each segment again from its prefix."""
        items = self.tile.items
        for u in range(items):
            self.lift(u)
            if u == 0:
                for c in self.aggregate:
                    self(f"k{c} = s{c}")
            else:
                arguments = [f"{side}{c}" for side in "ks" for c in self.aggregate]
                converted = [
                    f"{a}.to(tl.int8)" if self.kinds[int(a[1:])] == "b1" else a for a in arguments
                ]
                self(call("combine", converted, [f"k{c}" for c in self.aggregate]))
                for c in self.aggregate:
                    if self.kinds[c] == "b1":
                        self(f"k{c} = k{c} != 0")
        for c in self.aggregate:
            self(f"s{c} = k{c}")
        self.scan_segments()
        if self.writes:
            self.walk_from_prefix()
        self.carry_on()

    def walk_from_prefix(self) -> None:
        self(f"previous = {self.full('tl.maximum(segment - 1, 0)')}")
        for c in self.aggregate:
            value = f"i{c}.to(tl.int8)" if self.kinds[c] == "b1" else f"i{c}"
            gathered = f"tl.gather({value}, previous, {self.axis})"
            self(f"b{c} = {gathered} != 0" if self.kinds[c] == "b1" else f"b{c} = {gathered}")
        self.advance("h", "b", "g")
        if not self.kernel.starts_from_carry:
            self.begin_or("carried", "b", "g")
        for c in self.carry:
            self(f"g{c} = tl.where(segment == 0, h{c}, g{c})")
        if self.kernel.final:
            for c in self.carry:
                self(f"w{c} = g{c}")
        for u in range(self.tile.items):
            self.position("q", u)
            last_item = u == self.tile.items - 1
            if self.kernel.exclusive:
                self.store("g", u)
                if last_item and not self.kernel.final:
                    break
            self.lift(u)
            self.advance("g", "s", "g")
            if u == 0 and not self.kernel.starts_from_carry:
                self.begin_or("carried | (segment > 0)", "s", "g")
            if not self.kernel.exclusive:
                self.store("g", u)
            if self.kernel.final:
                for c in self.carry:
                    self(f"w{c} = tl.where(here == size - 1, g{c}, w{c})")
        if self.kernel.final:
            ahead = "q" if self.kernel.cut == "whole" else "first - q"
            self(f"hit = (size - 1 - {ahead}) // {self.tile.items} == segment")
            self.take_final("w")
