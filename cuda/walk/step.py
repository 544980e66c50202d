"""The step of a walk (walker.cuh) as one program, arranged so that little waits for the carry.

A lane needs the carry of a step for the next one: what a walk costs is the latency from carry to
carry. So

- lift, combine and lower become one program, in which every value is computed once;
- what does not depend on the carry is a function of its own, `ready_of`, which the kernel calls for
  several steps at once, before their carries are there; the rest is `advance`. Parameters are
  components of the carry that every step passes on as they are, and count as not depending on it;
- sigmoid and tanh are made of 2^x, with the factor of x multiplied into what does not depend on the
  carry (`by_powers_of_two`);
- products are fused with sums and differences (`fused`); the compiler fuses none (`ROUNDED_ALIKE`
  in compiler.py), so that all copies of a step in a kernel round alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...program.cpp_and_triton_expressions import Cpp
from ...program.dtypes import FLOATS
from ...program.operator import Operator
from ...program.program_builder import Builder, Instruction, Program

# About how many cycles a result comes after its operands; OTHER for what is not here. They tell
# which of two products is there last, and parts.py estimates the time of a step from them.
LATENCY = {"sigmoid": 50, "tanh": 50, "exp": 40, "log": 40, "div": 40, "sqrt": 40, "const": 0}
OTHER = 5
# sigmoid(x) and tanh(x) as functions of x times a factor, which hardware_functions.cuh makes of
# 2^x: their names, and the factors.
BY_POWERS_OF_TWO = {
    "sigmoid": ("sigmoid_exp2", -1 / math.log(2)),
    "tanh": ("tanh_exp2", 2 / math.log(2)),
}


class WalkCpp(Cpp):
    """CUDA C++ with the functions of hardware_functions.cuh."""

    functions: ClassVar = Cpp.functions | {
        "fused": "fused", "sigmoid_exp2": "sigmoid_exp2", "tanh_exp2": "tanh_exp2",
    }  # fmt: skip


CPP = WalkCpp()


@dataclass(frozen=True)
class WalkStep:
    """A step as one program, and which of its values wait for the carry.

    program: its inputs are the components of the state, the raw inputs, and whether the step is the
        last one. Its outputs are the components `carried` of the state after the step, then the
        outputs of lower.
    carried: the state components that go from step to step.
    moving: the values that depend on the carry; `advance` computes them.
    ready: the values that `ready_of` computes and hands over to `advance`. They do not move, and a
        value that moves reads them, or they are outputs of the program. Constants and state
        components need not be handed over: `advance` has them.
    """

    program: Program
    carried: tuple[int, ...]
    moving: frozenset[int]
    ready: tuple[int, ...]

    @property
    def decides(self) -> bool:
        """Whether a value that waits for the carry is a condition or an integer. Such a step often
        forgets all at once: a neuron that fires starts from 0, whatever it was."""
        return any(self.program.dtypes[v] not in FLOATS for v in self.moving)


def is_coarse(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether a walk that reads and writes leaves of these dtypes at every step takes the
    hardware's tanh, with a relative error of up to 2^-11: where all floats are bfloat16, whose
    rounding costs up to 2^-8. That of float16 costs 2^-11, so that there the error would be as
    large."""
    return {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.bfloat16}


@functools.lru_cache(maxsize=1024)
def walk_step(op: Operator, final: tuple[int, ...], exclusive: bool, coarse: bool) -> WalkStep:
    """The arranged step. coarse: tanh is one instruction, and stays as it is (`is_coarse`)."""
    carried = tuple(op.carry_components(final))
    kinds, raw = op.combine.output_dtypes, op.lift.inputs
    builder = Builder((*kinds, *raw, "b1"))
    width, last = len(kinds), len(kinds) + len(raw)
    inputs = range(width, last)
    after = builder.inline(op.combine, [*range(width), *builder.inline(op.lift, inputs)])
    shown = range(width) if exclusive else after
    lowered = builder.inline(op.lower, [*shown, *inputs, last])
    program = builder.build([*(after[c] for c in carried), *lowered])
    program = fused(by_powers_of_two(program, moving_of(program, carried), coarse))
    moving = moving_of(program, carried)
    n = len(program.inputs)
    wanted = set(program.outputs)
    for value, i in enumerate(program.instructions, n):
        if value in moving:
            wanted.update(i.args)
    ready = sorted(
        v for v in wanted - moving
        if v >= width and (v < n or program.instructions[v - n].op != "const")
    )  # fmt: skip
    return WalkStep(program, carried, moving, tuple(ready))


def moving_of(program: Program, carried: Sequence[int]) -> frozenset[int]:
    """The values that depend on a state component that the step changes, as it does not change
    parameters."""
    changed = zip(carried, program.outputs, strict=False)
    return program.depending_on(c for c, value in changed if value != c)


def by_powers_of_two(program: Program, moving: frozenset[int], coarse: bool) -> Program:
    """The program with the functions of BY_POWERS_OF_TWO in place of sigmoids and tanhs that wait
    for the carry, if the factor f of their argument can be multiplied into what does not move: as
    in (a + b h) f = a f + (b f) h, where h moves. Then it takes no time between carries."""
    builder, n = Builder(program.inputs), len(program.inputs)
    values = list(range(n))

    def scaled(value: int, factor: float) -> int | None:
        """`value` times the factor, as a value of the new program in which the factor is multiplied
        into what does not move; None if that is not possible."""
        if value not in moving:
            kind = program.dtypes[value]
            return builder.emit("mul", values[value], builder.const(factor, kind))
        if value < n:
            return None
        i = program.instructions[value - n]
        if i.op == "neg":
            inner = scaled(i.args[0], factor)
            return None if inner is None else builder.emit("neg", inner)
        if i.op in ("add", "sub"):
            left, right = (scaled(a, factor) for a in i.args)
            return None if left is None or right is None else builder.emit(i.op, left, right)
        if i.op == "mul":
            for a, other in (i.args, i.args[::-1]):
                inner = scaled(a, factor)
                if inner is not None:
                    return builder.emit("mul", inner, values[other])
        return None

    for number, i in enumerate(program.instructions, n):
        argument = None
        if i.op in BY_POWERS_OF_TWO and i.dtype == "f32" and number in moving:
            name, factor = BY_POWERS_OF_TWO[i.op]
            if not (coarse and i.op == "tanh"):
                argument = scaled(i.args[0], factor)
        if argument is not None:
            values.append(builder.emit(name, argument))
        else:
            values.append(copied(builder, i, values))
    return builder.build([values[v] for v in program.outputs])


def fused(program: Program) -> Program:
    """The program with a fused multiply-add in place of each sum and difference of a product. Of
    two products the one that is ready later is fused; the other one is rounded first."""
    builder, n = Builder(program.inputs), len(program.inputs)
    values, ready = list(range(n)), [0] * n
    for i in program.instructions:
        ready.append(LATENCY.get(i.op, OTHER) + max((ready[a] for a in i.args), default=0))
        products = [
            a for a in i.args if a >= n and program.instructions[a - n].op == "mul"
        ]  # fmt: skip
        if i.op not in ("add", "sub") or i.dtype not in ("f32", "f64") or not products:
            values.append(copied(builder, i, values))
            continue
        late = max(products, key=lambda a: ready[a])
        first = late == i.args[0]
        x, y = (values[a] for a in program.instructions[late - n].args)
        rest = values[i.args[1] if first else i.args[0]]
        if i.op == "sub" and first:
            rest = builder.emit("neg", rest)
        elif i.op == "sub":
            x = builder.emit("neg", x)
        values.append(builder.emit("fused", x, y, rest))
    return builder.build([values[v] for v in program.outputs])


def copied(builder: Builder, i: Instruction, values: Sequence[int]) -> int:
    """Appends an instruction of another program, of which value v is `values[v]` here."""
    return builder.append(Instruction(i.op, tuple(values[a] for a in i.args), i.dtype, i.literal))


def step_source(op: Operator, step: WalkStep) -> str:
    """The CUDA C++ of a step: struct Ready, and the functions `ready_of` and `advance`."""
    program, moving = step.program, step.moving
    n, width = len(program.inputs), op.width
    given = [  # the names of the program's inputs
        *(f"a.s{c}" for c in range(width)),
        *(f"x.x{c}" for c in range(len(op.lift.inputs))),
        "last",
    ]  # fmt: skip
    # Constants stand in both functions.
    everywhere = {v for v, i in enumerate(program.instructions, n) if i.op == "const"}
    fields = step.ready
    # The statements of ready_of and of advance, and the names that the values have in them.
    early, late = [], []
    before, after = [*given], [*given]
    for field in fields:
        if field < n:
            after[field] = f"r.r{field}"
    for value, i in enumerate(program.instructions, n):
        name = f"v{value}"
        line = CPP.definition.format
        kind = CPP.types[i.dtype]
        if value in moving or value in everywhere:
            late.append(line(T=kind, name=name, value=CPP.expression(i, after, program.dtypes)))
        if value not in moving:
            early.append(line(T=kind, name=name, value=CPP.expression(i, before, program.dtypes)))
        before.append(name)
        after.append(f"r.r{value}" if value in fields else name)
    early += [f"y.r{v} = {before[v]};" for v in fields]
    results = [
        *(f"y.s{c}" for c in step.carried),
        *(f"out.y{c}" for c in range(len(op.lower.outputs))),
    ]
    late += [f"{to} = {after[v]};" for to, v in zip(results, program.outputs, strict=True)]
    return "\n".join(
        [
            CPP.struct("Ready", [(CPP.types[program.dtypes[v]], f"r{v}") for v in fields]),
            CPP.function("ready_of(const State& a, const Raw& x, bool last)", "Ready",
                         ["(void)a, (void)x, (void)last;", *early]),
            CPP.function("advance(const State& a, const Ready& r, Out& out)", "State",
                         ["(void)r, (void)out;", *late]),
        ]
    )  # fmt: skip
