"""Derivatives of selections: what `where` does not choose is left out, not multiplied by zero.

In where(c, a, b) the cotangent of a is where(c, g, 0). Its product with a slope that is infinite or
NaN must be 0 where c does not hold, but 0 · inf is NaN. So the rules of `derivative_rules` are
applied to g, and the selection is put around their results.

An entry of a derivative's matrix J is then a selection too, such as where(reset, 0, a). A scan that
carries J as a number multiplies what comes later by its zeros: 0 · NaN again. `block_masks` finds
the condition on which a block of J is zero; the scan carries it as a flag, and adds nothing where
the flag is set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..program.program_builder import Builder

Entry = tuple[int, int]
# A condition, and whether it holds.
Literal = tuple[int, bool]


@dataclass(frozen=True)
class Mask:
    """A selection that gives zero where `condition` is `zero_where`, else `rest`."""

    condition: int
    zero_where: bool
    rest: int

    def around(self, builder: Builder, value: int) -> int:
        """The same selection with `value` as its rest."""
        zero = builder.const(0.0, builder.dtype(value))
        a, b = (zero, value) if self.zero_where else (value, zero)
        return builder.emit("where", self.condition, a, b)


def mask_of(builder: Builder, value: int) -> Mask | None:
    """`value` as a selection between zero and something else; None if it is none."""
    i = builder.instruction(value)
    if i is None or i.op != "where":
        return None
    condition, a, b = i.args
    if builder.literal(a) == 0:
        return Mask(condition, True, b)
    if builder.literal(b) == 0:
        return Mask(condition, False, a)
    return None


def masks_of(builder: Builder, value: int) -> tuple[list[Mask], int]:
    """The masks around a value, the outermost first, and what they are around."""
    masks: list[Mask] = []
    while (mask := mask_of(builder, value)) is not None:
        masks.append(mask)
        value = mask.rest
    return masks, value


def masked(builder: Builder, masks: Sequence[Mask], value: int) -> int:
    """A value with these masks around it."""
    if builder.literal(value) == 0:
        return value
    for mask in reversed(masks):
        value = mask.around(builder, value)
    return value


def added(builder: Builder, a: int, b: int) -> int:
    """a + b, with what makes both zero around the sum, so that its products are selected too. Of
    two values of which one condition takes one or the other: a selection. The sign of a zero may
    change."""
    first, x = masks_of(builder, a)
    second, y = masks_of(builder, b)
    if not first or not second:
        return builder.emit("add", a, b)
    one, other = first[0], second[0]
    if one.condition == other.condition and one.zero_where != other.zero_where:
        chosen = (other.rest, one.rest) if one.zero_where else (one.rest, other.rest)
        return builder.emit("where", one.condition, *chosen)
    common = zeros_of(builder, first) & zeros_of(builder, second)
    if not common:
        return builder.emit("add", a, b)
    a, b = (
        masked(builder, without_zeros(builder, masks, common), rest)
        for masks, rest in ((first, x), (second, y))
    )
    outer = [Mask(c, holds, a) for c, holds in sorted(common)]
    return masked(builder, outer, added(builder, a, b))


def without_zeros(builder: Builder, masks: Sequence[Mask], common: set[Literal]) -> list[Mask]:
    """The masks for where none of the `common` literals holds."""
    found: list[Mask] = []
    for mask in masks:
        zeros = zeros_of(builder, [mask])
        if zeros.isdisjoint(common):
            found.append(mask)
        else:
            found.extend(Mask(c, holds, mask.rest) for c, holds in sorted(zeros - common))
    return found


def zeros_of(builder: Builder, masks: Sequence[Mask]) -> set[Literal]:
    """The literals of which each makes a value with these masks zero."""
    found: set[Literal] = set()
    left = [(mask.condition, mask.zero_where) for mask in masks]
    while left:
        c, holds = left.pop()
        i = builder.instruction(c)
        if i is not None and i.op == "not":
            left.append((i.args[0], not holds))
        elif i is not None and i.op == ("or" if holds else "and"):
            left.extend((a, holds) for a in i.args)
        else:
            found.add((c, holds))
    return found


@dataclass(frozen=True)
class Block:
    """A block of J that is zero as a whole where `mask` holds.

    rows: the state components of the block; J has no entries between them and others.
    """

    rows: tuple[int, ...]
    mask: int


def block_masks(
    builder: Builder, entries: dict[Entry, int], carried: Sequence[int], edges: Collection[int]
) -> tuple[dict[Entry, int], list[Block]]:
    """The entries without the selections that make whole blocks zero, and these blocks.

    edges: conditions that hold only at the first step of a sequence. Nothing precedes it, so that
    it does not matter what J is there.
    """
    inner = {e: v for e, v in entries.items() if e[0] in carried and e[1] in carried}
    unmasked, blocks = dict(entries), list[Block]()
    for rows in connected(inner, carried):
        own = {e: v for e, v in inner.items() if e[0] in rows}
        if not own:
            continue
        zeros = set.intersection(*(zeros_in(builder, value, edges) for value in own.values()))
        if not zeros:
            continue
        blocks.append(Block(rows, any_of(builder, zeros)))
        for entry, value in own.items():
            unmasked[entry] = without_selection(builder, value, zeros)
    return unmasked, blocks


def connected(entries: Collection[Entry], rows: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The rows in groups between which there are no entries."""
    left = list(rows)
    while left:
        group = {left[0]}
        while True:
            more = {k for e in entries if not group.isdisjoint(e) for k in e} - group
            if not more:
                break
            group |= more
        yield tuple(r for r in left if r in group)
        left = [r for r in left if r not in group]


def zeros_in(builder: Builder, value: int, edges: Collection[int]) -> set[Literal]:
    """The literals of which each makes an entry zero, because nothing of it is selected."""
    i = builder.instruction(value)
    if i is None:
        return set()
    if i.op in ("neg", "cast"):
        return zeros_in(builder, i.args[0], edges)
    if i.op == "where" and i.args[0] in edges:
        return zeros_in(builder, i.args[2], edges)
    mask = mask_of(builder, value)
    if mask is not None:
        return zeros_of(builder, [mask]) | zeros_in(builder, mask.rest, edges)
    if i.op in ("add", "where"):
        a, b = (zeros_in(builder, v, edges) for v in i.args[-2:])
        return a & b
    return set()


def any_of(builder: Builder, literals: Collection[Literal]) -> int:
    """Whether one of the literals holds."""
    values = [c if holds else builder.emit("not", c) for c, holds in sorted(literals)]
    total = values[0]
    for value in values[1:]:
        total = builder.emit("or", total, value)
    return total


def without_selection(builder: Builder, value: int, zeros: set[Literal]) -> int:
    """An entry for where none of these literals holds."""
    masks, rest = masks_of(builder, value)
    i = builder.instruction(rest)
    if i is not None and i.op in ("neg", "cast"):
        rest = builder.emit(i.op, without_selection(builder, i.args[0], zeros), dtype=i.dtype)
    elif i is not None and i.op in ("add", "where"):
        parts = (without_selection(builder, v, zeros) for v in i.args[-2:])
        rest = builder.emit(i.op, *i.args[:-2], *parts)
    return masked(builder, without_zeros(builder, masks, zeros), rest)
