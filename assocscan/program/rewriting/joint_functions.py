"""One function in place of several, where what stands around them says more about their argument.

- log1p(exp(x)) with x <= 0 is `log1p_exp`: a short polynomial of e^x. `log1p_signed_exp` is
  log1p(exp(x)) or log1p(-exp(x)), by a condition.
- A sum of exp(x - m) over all x of which m is the greatest has a term of 1. So the error of each
  term counts beside 1, not beside itself: `exp_of_peak`. The sum is at least 1 (or 0 or infinite,
  if m is, or NaN): `log_of_sum`. And m is subtracted and added again, so that the sign of a zero
  does not matter: `peak` in place of `max`.

The functions of these names are in `engines/base/cpp_and_cuda/scalar.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..program_builder import Builder, Instruction, Program, decode


@functools.lru_cache(maxsize=256)
def with_joint_functions(program: Program) -> Program:
    """The program with these functions, in float32."""
    names = Values(program).renamed()
    if not names:
        return program
    builder = Builder(program.inputs)
    values = list(range(len(program.inputs)))
    for v, i in enumerate(program.instructions, len(program.inputs)):
        name, arguments = names.get(v, (i.op, i.args))
        args = tuple(values[a] for a in arguments)
        values.append(builder.append(Instruction(name, args, i.dtype, i.literal)))
    return builder.build([values[v] for v in program.outputs])


class Values:
    """The values of a program, and what is known of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first = len(program.inputs)

    def op(self, value: int) -> str | None:
        """The operation that makes a value; None for an input."""
        return None if value < self.first else self.program.instructions[value - self.first].op

    def args(self, value: int) -> tuple[int, ...]:
        return self.program.instructions[value - self.first].args

    def plain(self, value: int) -> int:
        """The value, which `detach` hands on."""
        while self.op(value) == "detach":
            value = self.args(value)[0]
        return value

    def literal(self, value: int) -> object:
        """The number of a constant, or None."""
        if self.op(value) != "const":
            return None
        return decode(self.program.instructions[value - self.first].literal)

    def floats(self, *ops: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The float32 values that these operations make, with their arguments."""
        for v, i in enumerate(self.program.instructions, self.first):
            if i.op in ops and i.dtype == "f32":
                yield v, i.args

    def renamed(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """The new operations and arguments of the values that change."""
        found = {}
        for v, (x,) in self.floats("log1p"):
            if self.op(x) == "exp" and self.is_never_positive(self.args(x)[0]):
                found[v] = "log1p_exp", self.args(x)
            if self.op(x) == "where":
                condition, plus, minus = self.args(x)
                if self.op(plus) != "exp" or (self.op(minus), self.args(minus)) != ("neg", (plus,)):
                    continue
                if self.is_never_positive(self.args(plus)[0]):
                    found[v] = "log1p_signed_exp", (condition, *self.args(plus))
        for terms, sums, total, peaks in self.sums_of_peaks():
            if self.only_summed(terms, sums, total):
                found.update({v: ("exp_of_peak", self.args(v)) for v in terms})
                found.update({v: ("peak", self.args(v)) for v in peaks})
                found.update(
                    (v, ("log_of_sum", args))
                    for v, args in self.floats("log")
                    if self.is_total_or_one(args[0], total)
                )
        return found

    # ---- log1p(exp(x)) ----

    def is_never_positive(self, value: int) -> bool:
        """Whether a value is at most 0, or NaN, whatever the inputs are. Known are -|x|, the lesser
        of two numbers less the greater one, and choices of such values."""
        op = self.op(value)
        if op == "const":
            return not self.literal(value) > 0  # type: ignore[operator]
        if op == "where":
            condition, *choices = self.args(value)
            if self.op(condition) == "eq" and choices[0] in self.args(condition):
                # There it is what it is compared with.
                choices[0] = sum(self.args(condition)) - choices[0]
            return all(map(self.is_never_positive, choices))
        if op == "detach":
            return self.is_never_positive(self.args(value)[0])
        if op == "neg":
            return self.op(self.args(value)[0]) == "abs"
        return op == "sub" and self.is_lesser(*self.args(value))

    def is_lesser(self, a: int, b: int) -> bool:
        """Whether a and b are the lesser and the greater of two numbers, chosen by comparing
        them."""
        if (self.op(a), self.op(b)) != ("where", "where"):
            return False
        (chosen, *lesser), (same, *greater) = self.args(a), self.args(b)
        if chosen != same or self.op(chosen) not in ("ge", "gt", "le", "lt"):
            return False
        order = list(self.args(chosen))
        if self.op(chosen) in ("le", "lt"):
            order.reverse()  # then the first one is the greater where the comparison holds
        return greater == order and lesser == order[::-1]

    # ---- sums of exp(x - m) ----

    def sums_of_peaks(self) -> Iterator[tuple[set[int], set[int], int, set[int]]]:
        """For each greatest number m that is subtracted from all that it is the greatest of: the
        terms exp(x - m), their sums, the sum of all of them, and the maxima that make m."""
        terms: dict[int, dict[int, int]] = {}  # m: {x: term}
        for v, (x,) in self.floats("exp"):
            if self.op(x) == "sub":
                number, m = map(self.plain, self.args(x))
                terms.setdefault(m, {})[number] = v
        adds = list(self.floats("add"))
        for m, of in terms.items():
            peaks: set[int] = set()
            numbers = self.greatest_of(self.unless_infinite(m), peaks)
            if len(numbers) < 2 or numbers != set(of):
                continue
            counts = dict.fromkeys(of.values(), 1)
            for v, (a, b) in adds:
                if a in counts and b in counts:
                    counts[v] = counts[a] + counts[b]
            totals = [v for v, count in counts.items() if count == len(of)]
            if len(totals) == 1:
                yield set(of.values()), set(counts), totals[0], peaks

    def unless_infinite(self, m: int) -> int:
        """The value that m is, or 0 where that is infinite."""
        if self.op(m) == "where":
            condition, a, b = self.args(m)
            if (
                self.op(condition) == "isinf"
                and self.literal(a) == 0
                and self.plain(self.args(condition)[0]) == self.plain(b)
            ):
                return self.plain(b)
        return m

    def greatest_of(self, value: int, peaks: set[int]) -> set[int]:
        """The numbers that a value is the greatest of; `peaks` gets the maxima on the way."""
        value = self.plain(value)
        if self.op(value) != "max":
            return {value}
        peaks.add(value)
        return {n for a in self.args(value) for n in self.greatest_of(a, peaks)}

    def only_summed(self, terms: set[int], sums: set[int], total: int) -> bool:
        """Whether terms and partial sums are used in sums alone."""
        partial = sums - {total}
        used = (
            v in sums
            for v, i in enumerate(self.program.instructions, self.first)
            if not partial.isdisjoint(i.args)
        )
        return all(used) and partial.isdisjoint(self.program.outputs)

    def is_total_or_one(self, value: int, total: int) -> bool:
        """Whether a value is the total, or 1 where that is 0."""
        if self.op(value) != "where":
            return value == total
        condition, a, b = self.args(value)
        return (
            self.op(condition) == "eq"
            and {0.0, None} == {self.literal(v) for v in self.args(condition)}
            and total in self.args(condition)
            and (self.literal(a), b) == (1, total)
        )
