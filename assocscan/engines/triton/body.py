"""A tile iteration of a Triton kernel: load → lift → scan → lower → store, in one of four forms.

    one_segment      no communication: every thread walks its chains on its own
    one_item         the scan of the tile is the result
    one_item_before  the same for exclusive scans: the scan of the elements one step earlier
    several_items    aggregates of the segments, their scan, then each segment from its prefix

Lanes that hold no element come after those that do, in scan order, so nothing is padded: positions
only mask loads and stores. The text is unrolled over the items of a segment, because a thread's
items must be separate values for loads to be coalesced along the chains.

Names in the text; a number after them is a component, after an underscore an item (`emitter`
explains [c], [a] and [b]):

    x  inputs             i  scan of elements or aggregates    h  carry before the iteration
    s  lifted element     k  aggregate of a segment            g  state at an item
    q  first step         p  step in the sequence              t  place on the axis
    valid  whether there is an element                         carried  whether a carry has entered
"""

from __future__ import annotations

from .emitter import picked, pointer
from .kernel import LOOKBACK_GROUP
from .memory import Memory


class KernelBody(Memory):
    """The kernel function of one `TritonKernel`."""

    def text(self) -> str:
        """The function `scan`."""
        self.find_chains()
        self.find_bounds()
        self.find_leaves()
        self.load_boundary()
        self.enter()
        if self.kernel.one_tile:
            self("q = 0")
            self.iteration()
        else:
            self.loop()
        self.leave()
        pointers = [pointer(role, k) for role, k, _ in self.kernel.ports]
        return self.function(pointers, self.kernel.tables())

    def loop(self) -> None:
        """The iterations; with `prefetch`, the next one's inputs n are loaded before its work."""
        tile = self.tile
        steps = f"0, steps, {tile.steps}"
        pipelined = f"tl.range({steps}, num_stages={tile.stages})"
        if tile.prefetch:
            self.load("x", f"tl.cast(0, {self.index})")
        with self.block(f"for q in {pipelined if tile.stages else f'range({steps})'}:"):
            if tile.prefetch:
                self.load("n", f"q + {tile.steps}")
            self.iteration()
            if tile.prefetch:
                self.move("n", "x")

    def iteration(self) -> None:
        """One tile, in the form for it."""
        if not self.kernel.starts_from_carry:
            self("carried = (q > 0) | entered" if self.kernel.cut in ("rescan", "lookback")
                 else "carried = (q > 0)")  # fmt: skip
        if not self.tile.prefetch or self.kernel.one_tile:
            self.load("x", "q")
        self.unpack("x")
        if self.tile.segments == 1:
            self.one_segment()
        elif self.tile.items > 1 or not self.writes:
            self.several_items()
        elif self.kernel.exclusive:
            self.one_item_before()
        else:
            self.one_item()

    # The four forms.

    def one_segment(self) -> None:
        """Every thread walks its chains on its own."""
        for u in range(self.tile.items):
            self.find_step("q", u)
            self.lift("x", u, "s")
            if self.kernel.exclusive:
                self.store("h", u)
            self("g[*c] = advance(h[*c], s[*a])")
            if u == 0:
                self.or_first("s", "carried")
            if (self.kernel.final or not self.writes) and not self.kernel.full:
                self("h[c] = tl.where(valid, g[c], h[c])")
            else:
                self("h[c] = g[c]")
            if not self.kernel.exclusive:
                self.store("h", u)

    def one_item(self) -> None:
        """Inclusive, one item per segment: the scan of the tile gives the outputs."""
        self.find_step("q", 0)
        self.lift("x", 0, "s")
        self.scan_segments("s")
        if self.kernel.single and not self.kernel.starts_from_carry:
            self("g[c] = i[c]")
        else:
            self("g[*c] = advance(h[*c], i[*a])")
            self.or_first("i", "carried")
        self.store("g", 0)
        if self.kernel.final:
            self("hit = here == size - 1")
            self.take_final("g")
        self.carry_on()

    def one_item_before(self) -> None:
        """Exclusive, one item per segment: the scan of the elements one step earlier, in which the
        carry takes the first place.

        These elements are loaded again, from the cache: shifting the result of the scan would take
        hundreds of shuffles. The first element may lack the components of an aggregate that are
        none of the carry: the left argument of `combine` is read as a carry only.
        """
        self.find_step("q", 0)
        valid = "" if self.kernel.full else "valid & "
        self(f"known = {valid}(segment > 0)")
        self.find_starts("input", "q")
        for k, n, c in self.raw:
            if c in self.lifted:
                self(f"z{c}_0 = {self.loaded_before(k, n)}")
        self.lift("z", 0, "m")
        self("m[c] = tl.where(segment == 0, h[c], m[c])")
        self.scan_segments("m")
        self("g[c] = i[c]")
        self.store("g", 0)
        if self.kernel.single and not self.kernel.final:
            return
        self.lift("x", 0, "s")
        self("w[*c] = advance(g[*c], s[*a])")
        if self.kernel.final:
            self("hit = here == size - 1")
            self.take_final("w")
        if not self.kernel.single:
            self.find_end()
            self.take("h", "w", "c")

    def several_items(self) -> None:
        """Aggregates of the segments, their scan, then each segment again from its prefix."""
        for u in range(self.tile.items):
            self.lift("x", u, "s")
            if u == 0:
                self("k[a] = s[a]")
            else:
                self.combine("k", "s")
        if self.writes:
            self.scan_before()
            if self.kernel.cut == "lookback":
                self.find_end()
                self.take("e", "i", "a")
                self.look_back()
            self.find_prefix()
            self.walk_items()
        else:
            self.scan_segments("k")
        self.carry_on()

    def find_prefix(self) -> None:
        """g, the state before each segment: the carry, then all segments before."""
        self("g[*c] = advance(h[*c], b[*a])")
        self.or_first("b", "carried")
        self("g[c] = tl.where(segment == 0, h[c], g[c])")

    def walk_items(self) -> None:
        """Every segment step by step from g; w: the state after the sequence's last step."""
        kernel, last = self.kernel, self.tile.items - 1
        if kernel.final:
            self("w[c] = g[c]")
        for u in range(self.tile.items):
            self.find_step("q", u)
            if kernel.exclusive:
                self.store("g", u)
                if u == last and not kernel.final:
                    break
            self.lift("x", u, "s")
            self("g[*c] = advance(g[*c], s[*a])")
            if u == 0:
                self.or_first("s", "carried | (segment > 0)")
            if not kernel.exclusive:
                self.store("g", u)
            if kernel.final:
                self("w[c] = tl.where(here == size - 1, g[c], w[c])")
        if kernel.final:
            begin = "q" if kernel.cut == "whole" else "first - q"
            self(f"hit = (size - 1 - {begin}) // {self.tile.items} == segment")
            self.take_final("w")

    def look_back(self) -> None:
        """h: the carry before our tile, from its total e and those of the tiles before it.

        Tiles are in groups. A tile publishes its total (flag 1), waits for those of the earlier
        tiles of its group (m: all of these), and for the prefix p up to the end of the group
        before, which the last tile of a group publishes (flag 2). So totals are always combined in
        one order, whichever program comes first, and only the last tiles wait for each other.
        """
        count = LOOKBACK_GROUP
        self(f"""
            tl.store(after[a]_ptr + flat, e[a], mask=present)
            tl.debug_barrier()
            tl.atomic_xchg(flags + own_flag, 1, sem="release")
            rank = chunk % {count}
            member = tl.arange(0, {count})[:, None]
            earlier = member < rank
            at_member = flags + own_flag + (member - rank) * blocks
            waiting = rank > 0
            while waiting:
                seen = tl.atomic_add(at_member, 0, mask=earlier, sem="acquire")
                waiting = tl.min(tl.where(earlier, seen, 1)) == 0
            tl.debug_barrier()
            shown = tl.broadcast_to(earlier & present, [{count}, {self.tile.chains}])
            beside = flat + (member - rank) * lanes
            m[a] = tl.load(after[a]_ptr + beside, mask=shown, other=0, volatile=True)
        """)
        scanned = self.as_bytes("m")
        scanned = f"({scanned})" if len(self.components["a"]) > 1 else scanned
        self(f"""
            m[*a] = tl.associative_scan({scanned}, 0, combine)
            m[b] = m[b] != 0
        """)
        here = f"tl.broadcast_to(member == rank - 1, [{count}, {self.tile.chains}])"
        for c in self.components["a"]:
            self(f"m{c} = {picked(f'm{c}', here, 0, self.kinds[c])}")
        self(f"""
            t[*a] = combine({self.as_bytes("m")}, {self.as_bytes("e")})
            t[b] = t[b] != 0
            alone = {self.on_carry("rank")} == 0
            t[a] = tl.where(alone, e[a], t[a])
            begun = chunk >= {count}
            at_before = flags + own_flag - (rank + 1) * blocks
            waiting = begun
            while waiting:
                waiting = tl.atomic_add(at_before, 0, sem="acquire") != 2
            tl.debug_barrier()
            before = flat - (rank + 1) * lanes
            p[a] = tl.load(before[a]_ptr + before, mask=present & begun, other=0, volatile=True)
            later = {self.on_carry("begun")}
            q[*a] = combine({self.as_bytes("p")}, {self.as_bytes("t")})
            q[b] = q[b] != 0
            q[a] = tl.where(later, q[a], t[a])
        """)
        with self.block(f"if rank == {count - 1}:"):
            self("""
                tl.store(before[a]_ptr + flat, q[a], mask=present)
                tl.debug_barrier()
                tl.atomic_xchg(flags + own_flag, 2, sem="release")
            """)
        self(f"""
            c[*a] = combine({self.as_bytes("p")}, {self.as_bytes("m")})
            c[b] = c[b] != 0
            c[a] = tl.where(alone, p[a], c[a])
            c[a] = tl.where(later, c[a], m[a])
        """)
        self.enter_from_before()

    # Between elements.

    def combine(self, left: str, right: str) -> None:
        """left = left ∘ right, of aggregates."""
        self(f"{left}[*a] = combine({self.as_bytes(left)}, {self.as_bytes(right)})")
        self(f"{left}[b] = {left}[b] != 0")

    def scan_segments(self, elements: str) -> None:
        """i: the inclusive scan of one element per segment."""
        if self.components["a"]:
            scanned = self.as_bytes(elements)
            scanned = f"({scanned})" if len(self.components["a"]) > 1 else scanned
            self(f"""
                i[*a] = tl.associative_scan({scanned}, {self.axis}, combine)
                i[b] = i[b] != 0
            """)

    def as_bytes(self, prefix: str) -> str:
        """An aggregate with bools as int8: Triton exchanges no bools between threads."""
        return ", ".join(self.as_byte(prefix, c) for c in self.components["a"])

    def as_byte(self, prefix: str, c: int) -> str:
        return f"{prefix}{c}.to(tl.int8)" if self.kinds[c] == "b1" else f"{prefix}{c}"

    def scan_before(self) -> None:
        """i: the inclusive scan of k; b: the scan of the segments before, of the first its own
        element. One scan of both, for which `combine_before` is associative: `tl.gather` of i wants
        all segments of a chain in one warp, and so moves every input and output between threads."""
        if not self.components["a"]:
            return
        element = self.as_bytes("k")
        alone = f"tl.zeros({self.tile_shape}, tl.int32)"
        self(f"""
            pairs = ({element}, {element}, {alone})
            i[*a], b[*a], several = tl.associative_scan(pairs, {self.axis}, combine_before)
            i[b] = i[b] != 0
            b[b] = b[b] != 0
        """)

    def or_first(self, first: str, condition: str) -> None:
        """g is the first element itself where no state comes before it."""
        if not self.kernel.starts_from_carry:
            self(f"g[c] = tl.where({condition}, g[c], {first}[c])")

    def carry_on(self) -> None:
        """h: the carry after this iteration."""
        if self.kernel.one_tile:
            return
        self.find_end()
        self.take("e", "i", "a")
        self("g[*c] = advance(h[*c], e[*a])")
        self.or_first("e", "carried")
        self("h[c] = g[c]")

    def find_end(self) -> None:
        self(f"at_end = {self.on_tile(f'segment == {self.tile.segments - 1}')}")

    def take(self, result: str, values: str, components: str) -> None:
        """The values of the last segment, in the shape of a carry."""
        for c in self.components[components]:
            self(f"{result}{c} = {self.taken(values, c, 'at_end')}")

    def take_final(self, state: str) -> None:
        """last: the state where `hit` holds, if the last of our steps is in this iteration."""
        self(f"ends = (count - 1 >= q) & (count - 1 < q + {self.tile.steps})")
        for c in self.components["c"]:
            value = self.taken(state, c, self.on_tile("hit"))
            self(f"last{c} = tl.where(ends, {value}, last{c})")

    def taken(self, prefix: str, c: int, where: str) -> str:
        """The one value along the segments where `where` holds."""
        return picked(f"{prefix}{c}", where, self.axis, self.kinds[c])
