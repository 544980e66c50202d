"""The structure of J: which entries of the derivative's matrix the scan carries.

The affine monoid of a derivative multiplies its matrices. Entries that are zero or one for every t,
or equal up to sign to another entry, and stay so under products, are not carried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..program.program_builder import Builder
from .derivative_rules import Cotangent, choose

Entry = tuple[int, int]


@dataclass
class Group:
    """Entries of J that are equal up to sign, now and in every product."""

    members: dict[Entry, int]

    @property
    def representative(self) -> Entry:
        return next(iter(self.members))

    @property
    def sign(self) -> int:
        return self.members[self.representative]

    @property
    def diagonal(self) -> bool:
        return self.representative[0] == self.representative[1]

    def value(self, builder: Builder, entries: dict[Entry, int], kind: str) -> int:
        value = entries.get(self.representative)
        if value is None:
            return builder.const(0.0, kind)
        return builder.emit("neg", value) if self.sign < 0 else value


@dataclass
class Matrix:
    """The structure of J: its entries that are always one, and the groups that are carried."""

    ones: dict[Entry, int]
    groups: list[Group]


def group_entries(builder: Builder, entries: dict[Entry, int], carried: Sequence[int]) -> Matrix:
    """What a product of such matrices must carry: entries neither zero nor one for every t."""
    pattern = closure({e for e in entries if e[0] in carried and e[1] in carried})
    initial: dict[object, dict[Entry, int]] = {}
    for entry in sorted(pattern):
        key, sign = entry_class(builder, entries.get(entry), entry)
        initial.setdefault(key, {})[entry] = sign
    ones = initial.pop("one", {})
    groups = [Group(members) for members in initial.values()]
    generator = random.Random(0)
    while True:
        split_ones, split = refine(ones, groups, carried, generator)
        if len(split) == len(groups) and len(split_ones) == len(ones):
            return Matrix(ones, groups)
        ones, groups = split_ones, split


def entry_class(builder: Builder, value: int | None, entry: Entry) -> tuple[object, int]:
    """What equal entries share, and the sign relative to it."""
    if value is None:
        return ("zero", entry), 1
    if entry[0] == entry[1] and builder.literal(value) == 1:
        return "one", 1
    instruction = builder.instruction(value)
    if instruction is not None and instruction.op == "neg":
        return (instruction.args[0], entry[0] == entry[1]), -1
    return (value, entry[0] == entry[1]), 1


def choose_entry(builder: Builder, condition: int, first: Cotangent, other: Cotangent) -> Cotangent:
    """`choose`, with a negation outside: entries that differ in sign alone stay recognisable. The
    sign of a zero may change."""
    negated = None if other is None else builder.instruction(other)
    if first is None and negated is not None and negated.op == "neg":
        chosen = choose(builder, condition, None, negated.args[0])
        return None if chosen is None else builder.emit("neg", chosen)
    return choose(builder, condition, first, other)


def closure(pattern: set[Entry]) -> set[Entry]:
    """The entries that can be nonzero in a product of any number of such matrices."""
    while True:
        more = {(i, k) for i, j in pattern for j2, k in pattern if j == j2} - pattern
        if not more:
            return pattern
        pattern = pattern | more


def refine(
    ones: dict[Entry, int], groups: list[Group], carried: Sequence[int], generator: random.Random
) -> tuple[dict[Entry, int], list[Group]]:
    """Split groups whose entries differ in the product of two random integer matrices."""
    first, second = (draw(ones, groups, generator) for _ in range(2))
    product: dict[Entry, int] = {}
    for (i, j), a in second.items():
        for k in carried:
            if (j, k) in first:
                product[i, k] = product.get((i, k), 0) + a * first[j, k]
    kept = {e: s for e, s in ones.items() if product[e] == 1}
    result = [Group({e: 1}) for e in ones if e not in kept]
    for group in groups:
        parts: dict[int, dict[Entry, int]] = {}
        for entry, sign in group.members.items():
            parts.setdefault(sign * product.get(entry, 0), {})[entry] = sign
        result.extend(Group(members) for members in parts.values())
    return kept, result


def draw(ones: dict[Entry, int], groups: list[Group], generator: random.Random) -> dict[Entry, int]:
    """A random integer matrix with this structure."""
    matrix = dict.fromkeys(ones, 1)
    for group in groups:
        value = generator.randrange(1 << 20, 1 << 40)
        matrix.update({entry: sign * value for entry, sign in group.members.items()})
    return matrix


def entry_values(builder: Builder, matrix: Matrix, start: int, kind: str) -> dict[Entry, int]:
    """The matrix entries as values, from the group components that begin at `start`."""
    values = dict.fromkeys(matrix.ones, builder.const(1.0, kind))
    for k, group in enumerate(matrix.groups, start):
        for entry, sign in group.members.items():
            values[entry] = builder.emit("neg", k) if sign < 0 else k
    return values
