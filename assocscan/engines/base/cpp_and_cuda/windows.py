"""Windows of an operator in C++ and CUDA: its functions, their vjps, and the lists of what is read
and written (`engines/cpu/windows.h`, `cuda/windows/windows.cuh`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ....autodiff.derivative_rules import Cotangent, or_zero, vjp
from ....errors import UnsupportedOperation
from ....program.cpp_and_triton_expressions import CPP
from ....program.dtypes import CPP_MEMORY, EXACT_DTYPES, FLOATS
from ....program.operator import Leaf, Operator, spans
from ....program.program_builder import Builder, Program


@dataclass(frozen=True)
class Form:
    """Where windows are: over dimension `axis` of the shape `batch`, of `width` steps."""

    batch: tuple[int, ...]
    axis: int
    width: int
    reverse: bool

    @property
    def outer(self) -> int:
        return math.prod(self.batch[: self.axis])

    @property
    def steps(self) -> int:
        return self.batch[self.axis]

    @property
    def inner(self) -> int:
        return math.prod(self.batch[self.axis + 1 :])


@dataclass(frozen=True)
class Pulled:
    """The vjps of an operator's programs.

    carried: the state components that have a cotangent. given: the outputs that have one. wanted:
        the inputs whose gradient is wanted.
    lower: (state, cotangents of the outputs) ↦ cotangents of the state.
    combine: (left, right, cotangents of the state) ↦ cotangents of left, then of right.
    lift: (inputs, cotangents of the state) ↦ gradients of the inputs.
    reads_states, reads_inputs: whether they depend on them. Those of a sum do not.
    """

    carried: tuple[int, ...]
    given: tuple[int, ...]
    wanted: tuple[int, ...]
    lower: Program
    combine: Program
    lift: Program
    reads_states: bool
    reads_inputs: bool


@functools.lru_cache(maxsize=256)
def is_windowable(op: Operator) -> bool:
    """Whether windows of the operator can have a kernel of their own."""
    return (
        not op.is_walked
        and op.edge is None
        and len(op.lower.inputs) - 1 not in op.lower.used_inputs
        and bool(op.outputs)
    )


@functools.lru_cache(maxsize=256)
def pulled(op: Operator) -> Pulled | None:
    """None where the gradient is that of a composition of scans."""
    count, raw = op.width, len(op.lift.inputs)
    if any(v >= count for v in op.lower.used_inputs) or any(
        leaf.dtype.is_complex for leaf in (*op.inputs, *op.state, *op.outputs)
    ):
        return None
    try:
        return _pulled(op, count, raw)
    except UnsupportedOperation:
        return None


def _pulled(op: Operator, count: int, raw: int) -> Pulled | None:
    states, outputs = op.combine.output_dtypes, op.lower.output_dtypes
    given = tuple(c for c, kind in enumerate(outputs) if kind in FLOATS)

    def build(
        program: Program, arguments: Sequence[str], at: Sequence[int], seeds: dict[int, str],
        size: int, results: int,
    ) -> tuple[Builder, list[Cotangent]]:  # fmt: skip
        builder = Builder((*arguments, *seeds.values()))
        places: list[Cotangent] = [None] * size
        for k, c in enumerate(seeds):
            places[c] = len(arguments) + k
        return builder, vjp(builder, program, at, places)[:results]

    def finished(builder: Builder, found: list[Cotangent], kinds: Sequence[str]) -> Program:
        values = [
            builder.cast(or_zero(builder, g, kind), kind)
            for g, kind in zip(found, kinds, strict=True)
        ]
        return builder.build(values)

    # lower reads the state alone: its other inputs are zeros that nothing depends on.
    lowering = Builder((*states, *(outputs[c] for c in given)))
    rest = [lowering.const(0, kind) for kind in op.lower.inputs[count:]]
    seeds: list[Cotangent] = [None] * len(outputs)
    for k, c in enumerate(given):
        seeds[c] = count + k
    of_state = vjp(lowering, op.lower, [*range(count), *rest], seeds)[:count]
    live = {c for c in range(count) if of_state[c] is not None and states[c] in FLOATS}
    while True:  # what is left out has no cotangent, not one of 0
        carried = sorted(live)
        combining, both = build(
            op.combine, (*states, *states), range(2 * count), {c: states[c] for c in carried},
            count, 2 * count,
        )  # fmt: skip
        more = {
            c for c in range(count)
            if states[c] in FLOATS and (both[c] is not None or both[count + c] is not None)
        }  # fmt: skip
        if more <= live:
            break
        live |= more
    kinds = [states[c] for c in carried]
    lifting, found = build(
        op.lift, op.lift.inputs, range(raw), {c: states[c] for c in carried}, count, raw
    )
    wanted = tuple(
        c for k, span in enumerate(spans(op.inputs)) for c in span
        if op.inputs[k].dtype.is_floating_point
    )  # fmt: skip
    if not wanted or not carried or not given:
        return None
    lower = finished(lowering, [of_state[c] for c in carried], kinds)
    combine = finished(
        combining, [both[s + c] for s in (0, count) for c in carried], [*kinds, *kinds]
    )
    lift = finished(lifting, [found[c] for c in wanted], [op.lift.inputs[c] for c in wanted])
    reads_states = any(v < 2 * count for v in combine.used_inputs) or any(
        v < count for v in lower.used_inputs
    )
    reads_inputs = reads_states or any(v < raw for v in lift.used_inputs)
    return Pulled(tuple(carried), given, wanted, lower, combine, lift, reads_states, reads_inputs)


@functools.lru_cache(maxsize=256)
def adjoint_of_sums(op: Operator) -> Operator | None:
    """The operator whose windows, in the other direction, are the gradient of this one's windows:
    where all slopes are constants and a combination adds. None where they are not."""
    found = pulled(op)
    if found is None or found.reads_inputs:
        return None
    count, size = op.width, len(found.carried)
    seeds = tuple(range(2 * count, 2 * count + size))
    if found.combine.outputs != (*seeds, *seeds):
        return None
    kinds = tuple(op.combine.output_dtypes[c] for c in found.carried)
    given = tuple(op.lower.output_dtypes[c] for c in found.given)

    def called(
        program: Program, unread: Sequence[str], read: Sequence[str], more: Sequence[str]
    ) -> Program:
        """The program with zeros for its first inputs, which it does not read."""
        builder = Builder((*read, *more))
        zeros = [builder.const(0, kind) for kind in unread]
        return builder.build(builder.inline(program, [*zeros, *range(len(read))]))

    adding = Builder((*kinds, *kinds))
    return Operator(
        f"gradient of {op.name}", tuple(floats(op.outputs)),
        tuple(Leaf(EXACT_DTYPES[kind]) for kind in kinds), tuple(floats(op.inputs)),
        called(found.lower, op.combine.output_dtypes, given, ()),
        adding.build([adding.emit("add", c, size + c) for c in range(size)]),
        called(found.lift, op.lift.inputs, kinds, (*given, "b1")), None,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def states_of(op: Operator) -> Operator:
    """The operator over its own states, each number a leaf: windows of what was combined before."""
    kinds = op.combine.output_dtypes
    lift, lower = Builder(kinds), Builder((*kinds, *kinds, "b1"))
    leaves = tuple(Leaf(EXACT_DTYPES[kind]) for kind in kinds)
    each = range(len(kinds))
    return Operator(
        op.name, leaves, leaves, leaves, lift.build(each), op.combine, lower.build(each),
        op.identity,
    )  # fmt: skip


def scalar_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def floats(leaves: Sequence[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.dtype.is_floating_point]


class PortLists:
    """The scalars that a kernel reads and writes, in named lists; one entry of a list is

        F(name, value type, memory type, leaf, component, components)

    Leaves are numbered in the order in which they are added. types: of each kind as a field.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self.types = types
        self.texts: dict[str, list[str]] = {}
        self.leaves: list[Leaf] = []

    def add(
        self, name: str, prefix: str, leaves: Sequence[Leaf], numbers: Sequence[int],
        kinds: Sequence[str],
    ) -> None:  # fmt: skip
        """A list of the scalars of these leaves; numbers: which of the kinds they are."""
        left = iter(numbers)
        self.texts[name] = [
            f"F({prefix}{c}, {self.types[kinds[c]]}, {CPP_MEMORY[leaf.dtype]}, {k}, {part}, "
            f"{leaf.components})"
            for k, leaf in enumerate(leaves, len(self.leaves))
            for part in range(leaf.components)
            for c in [next(left)]
        ]
        self.leaves += leaves

    def defines(self) -> list[str]:
        return [f"#define {name}(F) {' '.join(entries)}" for name, entries in self.texts.items()]


@dataclass(frozen=True)
class WindowTexts:
    """The structs and functions of an operator and of its vjps, in C++.

    types: of each kind of scalar as a field. read: the expression that reads such a field.
    """

    op: Operator
    types: Mapping[str, str]
    read: Callable[[str, str], str]

    def fields(self, kinds: Sequence[str], prefix: str) -> list[tuple[str, str]]:
        return [(self.types[kind], f"{prefix}{c}") for c, kind in enumerate(kinds)]

    def values(self, kinds: Sequence[str], prefix: str) -> list[str]:
        return [self.read(f"{prefix}{c}", kind) for c, kind in enumerate(kinds)]

    @property
    def inputs(self) -> list[str]:
        return self.values(self.op.lift.inputs, "x.x")

    @property
    def left(self) -> list[str]:
        return self.values(self.op.combine.output_dtypes, "a.s")

    @property
    def right(self) -> list[str]:
        return self.values(self.op.combine.output_dtypes, "b.s")

    def forward(self) -> list[str]:
        """State, Raw, lift and combine."""
        op = self.op
        made = [f"y.s{c}" for c in range(op.width)]
        return [
            CPP.struct("State", self.fields(op.combine.output_dtypes, "s")),
            CPP.struct("Raw", self.fields(op.lift.inputs, "x")),
            CPP.function("lift(const Raw& x)", "State", CPP.statements(op.lift, self.inputs, made)),
            CPP.function("combine(const State& a, const State& b)", "State",
                         CPP.statements(op.combine, [*self.left, *self.right], made)),
        ]  # fmt: skip

    def lowered(self) -> list[str]:
        """Out and lower."""
        op = self.op
        outputs = self.fields(op.lower.output_dtypes, "y")
        return [
            CPP.struct("Out", outputs),
            CPP.function("lower(const State& a, const Raw& x)", "Out", ["(void)a; (void)x;",
                         *CPP.statements(op.lower, [*self.left, *self.inputs, "false"],
                                         [f"y.{name}" for _, name in outputs])]),
        ]  # fmt: skip

    def derivatives(self, found: Pulled) -> list[str]:
        """The structs and functions of the vjps."""
        op, types = self.op, self.types
        states = op.combine.output_dtypes
        carried = [(types[states[c]], f"c{c}") for c in found.carried]
        given = [(types[op.lower.output_dtypes[c]], f"g{c}") for c in found.given]
        wanted = [(types[op.lift.inputs[c]], f"z{c}") for c in found.wanted]
        seeds = [f"c.{name}" for _, name in carried]
        pair = [f"y.{side}.{name}" for side in ("left", "right") for _, name in carried]
        return [
            CPP.struct("Cotangent", carried),
            CPP.struct("Pair", [("Cotangent", "left"), ("Cotangent", "right")]),
            CPP.struct("OutCotangent", given),
            CPP.struct("RawCotangent", wanted),
            CPP.function("added(const Cotangent& a, const Cotangent& b)", "Cotangent",
                         [f"y.{name} = a.{name} + b.{name};" for _, name in carried]),
            CPP.function("lower_vjp(const State& a, const OutCotangent& g)", "Cotangent",
                         ["(void)a;", *CPP.statements(
                             found.lower, [*self.left, *(f"g.{name}" for _, name in given)],
                             [f"y.{name}" for _, name in carried])]),
            CPP.function("combine_vjp(const State& a, const State& b, const Cotangent& c)", "Pair",
                         ["(void)a; (void)b;",
                          *CPP.statements(found.combine, [*self.left, *self.right, *seeds], pair)]),
            CPP.function("lift_vjp(const Raw& x, const Cotangent& c)", "RawCotangent",
                         ["(void)x;", *CPP.statements(found.lift, [*self.inputs, *seeds],
                                                      [f"y.{name}" for _, name in wanted])]),
        ]  # fmt: skip

    def summed(self, found: Pulled) -> str:
        """The sum of two cotangents of an input."""
        lines = [f"y.z{c} = a.z{c} + b.z{c};" for c in found.wanted]
        signature = "summed(const RawCotangent& a, const RawCotangent& b)"
        return CPP.function(signature, "RawCotangent", lines)
