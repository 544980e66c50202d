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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..program.cpp_and_triton_expressions import LIBRARY
from ..program.dtypes import FLOATS
from ..program.program_builder import Builder, Instruction, Program
from ..program.vectors.state_axis import REDUCTIONS
from ..program.vectors.vector_adjoint import VectorAdjoint
from ..program.vectors.vector_operator import VectorOperator, part_dtypes, part_spans
from .derivative_rules import Cotangent, or_zero, vjp

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


# Cached, because its properties are slow.
vector_adjoint = functools.lru_cache(maxsize=1024)(VectorAdjoint)


@functools.lru_cache(maxsize=256)
def backward_step(adjoint: VectorAdjoint, first: bool) -> BackwardStep:
    """Raises UnsupportedOperation for an operation without a derivative rule."""
    op, carry = adjoint.op, adjoint.carry
    state_kinds = part_dtypes(op.state)
    count = len(op.step_inputs)
    seeds_kinds, seeds_vary = seeded_outputs(adjoint)
    more = [*(state_kinds[c] for c in carry), *seeds_kinds, *(state_kinds[c] for c in carry)]
    carry_varies = [op.state_varies[c] for c in carry]
    more_varies = [*carry_varies, *seeds_vary, *carry_varies]

    step = op.step(first, adjoint.exclusive, carry)
    builder = op.builder(more, more_varies)
    reached = range(count, count + len(carry))  # y[t], as inputs
    given = iter(range(count + len(carry), count + len(carry) + len(seeds_kinds)))
    incoming = range(count + len(carry) + len(seeds_kinds), count + len(more))
    seeds: list[Cotangent] = [
        m if state_kinds[c] in FLOATS else None for c, m in zip(carry, incoming, strict=True)
    ]
    found = vjp(builder, step, range(count), [*seeds, *output_seeds(adjoint, given)])
    results = [or_zero(builder, found[c], state_kinds[c]) for c in carry]
    spans = part_spans(op.inputs)
    wanted = [op.width + c for leaf in adjoint.wanted for c in spans[leaf]]
    results += [or_zero(builder, found[v], op.step_inputs[v]) for v in wanted]
    joint = builder.build(results)
    # A first step's y[t] is often an input, which is read from there.
    known = {} if first else equal_values(step.select(range(len(carry))), joint, reached)
    return split(op, joint, step.select(range(len(carry))), known, more, more_varies)


def with_shared_products(program: Program, builder: Builder, first: int) -> Program:
    """The program with products a·(b·c) taken as (a·b)·c where a·b is computed anyway, and b·c for
    nothing else. That rounds in another order, so only values change that depend on an input from
    number `first` on: cotangents. builder: has the same inputs.
    """
    n = len(program.inputs)
    uses = Counter([*program.outputs, *(a for i in program.instructions for a in i.args)])
    products = {frozenset(i.args) for i in program.instructions if is_float_product(i)}
    values, depends = list(range(n)), [v >= first for v in range(n)]

    def shared(i: Instruction) -> tuple[int, int, int] | None:
        """a, b and c of a product that is to be changed."""
        for a, inner in (i.args, i.args[::-1]):
            product = program.instructions[inner - n] if inner >= n else None
            if product is None or uses[inner] > 1 or not is_float_product(product):
                continue
            for b, c in (product.args, product.args[::-1]):
                if frozenset({a, b}) in products and a != c:
                    return a, b, c
        return None

    for i in program.instructions:
        depends.append(any(depends[a] for a in i.args))
        found = shared(i) if depends[-1] and is_float_product(i) else None
        if found is None:
            values.append(builder.repeat(i, values))
        else:
            a, b, c = (values[v] for v in found)
            values.append(builder.emit("mul", builder.emit("mul", a, b), c))
    return builder.build([values[v] for v in program.outputs])


def is_float_product(i: Instruction) -> bool:
    return i.op == "mul" and i.dtype in FLOATS


def seeded_outputs(adjoint: VectorAdjoint) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The dtypes of the parts of the outputs with a cotangent; whether they vary along the
    states."""
    leaves = adjoint.cotangent_leaves
    return part_dtypes(leaves), adjoint.op.parts_vary(leaves)


def output_seeds(adjoint: VectorAdjoint, given: Iterator[int]) -> list[Cotangent]:
    """The cotangents of all parts of the outputs: those that are given, in their order, and None
    for the others."""
    op, seeds = adjoint.op, list[Cotangent]()
    kinds = part_dtypes(op.outputs)
    for k, span in enumerate(part_spans(op.outputs)):
        for c in span:
            seed = next(given) if k in adjoint.cotangents else None
            seeds.append(seed if kinds[c] in FLOATS else None)
    return seeds


@functools.lru_cache(maxsize=256)
def total_step(adjoint: VectorAdjoint) -> Program | None:
    """One step, going back, of a segment's total: the map μ ↦ M·μ + l from the cotangent of the
    carry that leaves the segment to that of the carry that enters it.

    A program (y[t−1], x[t], o̅[t], l, M) → (l, M), with the K parts of the carry: M is given column
    by column. None where a step's Jacobian depends on the states, or is not the same map for each
    state: then the total is not known before the states are.
    """
    op, carry = adjoint.op, adjoint.carry
    kinds = part_dtypes(op.state)
    if not all(op.state_varies[c] and kinds[c] in FLOATS for c in carry):
        return None
    count, size = len(op.step_inputs), len(carry)
    seeds_kinds, seeds_vary = seeded_outputs(adjoint)
    own = [kinds[c] for c in carry]
    more = [*seeds_kinds, *own, *(own * size)]
    builder = op.builder(more, [*seeds_vary, *([True] * (size + size * size))])
    given = range(count, count + len(seeds_kinds))
    parts = range(count + len(seeds_kinds), count + len(more))
    step, results = op.step(False, adjoint.exclusive, carry), list[int]()
    for n in range(size + 1):  # l, then the columns of M
        outputs = output_seeds(adjoint, iter(given))
        seeds = [*parts[n * size : (n + 1) * size], *(outputs if n == 0 else [None] * len(outputs))]
        found = vjp(builder, step, range(count), seeds)
        results += [or_zero(builder, found[c], kinds[c]) for c in carry]
    program = builder.build(results)
    depends = any(v < op.width for v in program.used_inputs)
    return None if depends or any(i.op in REDUCTIONS for i in program.instructions) else program


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
        everything.append(-1 if not is_forward[k] else first.repeat(i, everything))
    recomputed = first.build([*values, *(everything[v] for v in kept)])
    kinds = [(joint.dtypes[v], first.varies(everything[v])) for v in kept]

    second = op.builder(
        [*more, *(kind for kind, _ in kinds)], [*more_varies, *(v for _, v in kinds)]
    )
    places = {v: n + k for k, v in enumerate(kept)} | known
    mapped = list(range(n))
    for k in range(n, n + len(joint.instructions)):
        mapped.append(places[k] if k in places else second.repeat(instruction(k), mapped))
    pulled = second.build([mapped[v] for v in joint.outputs])
    varies = (*op.step_varies, *more_varies, *(v for _, v in kinds))
    return BackwardStep(recomputed, pulled, tuple(kinds), varies)
