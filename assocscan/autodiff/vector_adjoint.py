"""The reverse-mode derivative of a scan over vectors, by recomputation.

A step of the scan is (y[t], out[t]) = S(y[t−1], x[t]). Going back from the last step, with μ[t] the
cotangent that reaches y[t] from later steps and from the final carry,

    (μ[t−1], x̄[t]) = vjp of S at (y[t−1], x[t]), applied to (μ[t], o̅[t]).

The states y are not saved: they are wider than what they are made of. The forward scan saves the
carry that enters each chunk of steps; the backward pass computes the states of a chunk again
(`BackwardStep.recomputed`), then walks back through it (`BackwardStep.pulled`). Where a leaf of
the inputs is broadcast, its gradient is summed in the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..program.cpp_and_triton_expressions import LIBRARY
from ..program.dtypes import FLOATS
from ..program.program_builder import Builder, Instruction, Program, decode
from ..program.vectors.state_axis import REDUCTIONS
from ..program.vectors.vector_adjoint import VectorAdjoint
from ..program.vectors.vector_operator import VectorOperator, part_dtypes, part_spans
from .derivative_rules import Cotangent, vjp

# Forward values that the backward pass reads instead of computing them again.
EXPENSIVE = LIBRARY | REDUCTIONS.keys() | {"sigmoid", "pow", "rsqrt", "sqrt"}


@dataclass(frozen=True)
class BackwardStep:
    """One step of the backward pass, in two programs.

    recomputed: (y[t−1], x[t]) → the carry's parts of y[t], then the kept values.
    pulled: (y[t−1], x[t], the carry's parts of y[t], o̅[t], μ[t], the kept values) → μ[t−1], then
        x̄[t] of the wanted leaves.
    kept: the dtype of each kept value, and whether it varies along the states.
    pulled_varies: for each input of `pulled`, whether it varies along the states.
    """

    recomputed: Program
    pulled: Program
    kept: tuple[tuple[str, bool], ...]
    pulled_varies: tuple[bool, ...]


@functools.lru_cache(maxsize=1024)
def vector_adjoint(
    op: VectorOperator,
    exclusive: bool,
    first: bool,
    final: tuple[int, ...],
    wanted: tuple[int, ...],
    cotangents: tuple[int, ...],
    seeded: tuple[int, ...],
    wants_init: bool,
    repeated: tuple[tuple[int, ...], ...],
    lane: int | None,
) -> VectorAdjoint:
    """`VectorAdjoint` of these arguments; cached, because its properties are slow."""
    return VectorAdjoint(
        op, exclusive, first, final, wanted, cotangents, seeded, wants_init, repeated, lane
    )


@functools.lru_cache(maxsize=256)
def backward_step(adjoint: VectorAdjoint, first: bool) -> BackwardStep:
    """Raises UnsupportedOperation for an operation without a derivative rule."""
    op, carry = adjoint.op, adjoint.carry
    state_kinds = part_dtypes(op.state)
    count = len(op.step_inputs)
    seeds_kinds = part_dtypes(adjoint.cotangent_leaves)
    seeds_vary = op.parts_vary(adjoint.cotangent_leaves)
    more = [*(state_kinds[c] for c in carry), *seeds_kinds, *(state_kinds[c] for c in carry)]
    carry_varies = [op.state_varies[c] for c in carry]
    more_varies = [*carry_varies, *seeds_vary, *carry_varies]

    forward = op.builder()
    after, lowered = op.add_step(forward, first, adjoint.exclusive)
    step = forward.build([*(after[c] for c in carry), *lowered])

    builder = op.builder(more, more_varies)
    reached = range(count, count + len(carry))  # y[t], as inputs
    given = iter(range(count + len(carry), count + len(carry) + len(seeds_kinds)))
    incoming = range(count + len(carry) + len(seeds_kinds), count + len(more))
    seeds: list[Cotangent] = [
        m if state_kinds[c] in FLOATS else None for c, m in zip(carry, incoming, strict=True)
    ]
    kinds = part_dtypes(op.outputs)
    for k, span in enumerate(part_spans(op.outputs)):
        for c in span:
            seed = next(given) if k in adjoint.cotangents else None
            seeds.append(seed if kinds[c] in FLOATS else None)
    found = vjp(builder, step, range(count), seeds)
    results: list[int] = []
    for c in carry:
        results.append(or_zero(builder, found[c], state_kinds[c]))
    spans = part_spans(op.inputs)
    for leaf in adjoint.wanted:
        for c in spans[leaf]:
            results.append(or_zero(builder, found[op.width + c], op.step_inputs[op.width + c]))
    joint = builder.build(results)
    # A first step's y[t] is often an input, which is read from there.
    known = {} if first else equal_values(step.select(range(len(carry))), joint, reached)
    return split(op, joint, step.select(range(len(carry))), known, more, more_varies)


def or_zero(builder: Builder, value: Cotangent, kind: str) -> int:
    return builder.const(0, kind) if value is None else value


def equal_values(step: Program, joint: Program, reached: Sequence[int]) -> dict[int, int]:
    """The values of `joint` that are y[t], which the recomputation leaves in memory: value → input.

    Both programs begin with the same inputs, so that equal values have equal expressions."""
    numbers: dict[tuple[object, ...], int] = {}
    n = len(joint.inputs)
    for k, i in enumerate(joint.instructions, n):
        numbers[i.op, i.args, i.dtype, i.literal] = k
    mapped: dict[int, int | None] = {v: v for v in range(len(step.inputs))}
    for k, i in enumerate(step.instructions, len(step.inputs)):
        arguments = [mapped[a] for a in i.args]
        mapped[k] = None if None in arguments else numbers.get(
            (i.op, tuple(arguments), i.dtype, i.literal)
        )  # fmt: skip
    found = {}
    for value, place in zip(step.outputs, reached, strict=True):
        number = mapped[value]
        if number is not None and number >= n:
            found[number] = place
    return found


def split(
    op: VectorOperator,
    joint: Program,
    step: Program,
    known: dict[int, int],
    more: Sequence[str],
    more_varies: Sequence[bool],
) -> BackwardStep:
    """The two programs of a backward step: `joint` with its expensive forward values as inputs, and
    `step` with these as further outputs."""
    count, n = len(op.step_inputs), len(joint.inputs)
    is_forward = [v < count for v in range(n)]
    for i in joint.instructions:
        is_forward.append(all(is_forward[a] for a in i.args))

    def instruction(value: int) -> Instruction:
        return joint.instructions[value - n]

    kept: list[int] = []
    seen: set[int] = set()
    stack = list(joint.outputs)
    while stack:
        value = stack.pop()
        if value < n or value in seen or value in known:
            continue
        seen.add(value)
        if is_forward[value] and instruction(value).op in EXPENSIVE:
            kept.append(value)
        else:
            stack.extend(instruction(value).args)
    kept.sort()

    first = op.builder()
    values = first.inline(step, range(count))
    everything = list(range(n))
    for k in range(n, n + len(joint.instructions)):
        i = instruction(k)
        everything.append(-1 if not is_forward[k] else repeated(first, i, everything))
    recomputed = first.build([*values, *(everything[v] for v in kept)])
    kinds = [(joint.dtypes[v], first.varies(everything[v])) for v in kept]

    second = op.builder(
        [*more, *(kind for kind, _ in kinds)], [*more_varies, *(v for _, v in kinds)]
    )
    places = {v: n + k for k, v in enumerate(kept)} | known
    mapped = list(range(n))
    for k in range(n, n + len(joint.instructions)):
        mapped.append(places[k] if k in places else repeated(second, instruction(k), mapped))
    pulled = second.build([mapped[v] for v in joint.outputs])
    varies = (*op.step_varies, *more_varies, *(v for _, v in kinds))
    return BackwardStep(recomputed, pulled, tuple(kinds), varies)


def repeated(builder: Builder, i: Instruction, values: Sequence[int]) -> int:
    """The value of an instruction of another program, whose values are `values` here."""
    if i.op == "const":
        return builder.const(decode(i.literal), i.dtype)
    return builder.emit(i.op, *(values[a] for a in i.args), dtype=i.dtype)
