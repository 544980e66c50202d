"""The CPU's kernels of `windowed` and of its gradient: what `windows.h` reads, and one call of it.

Elements have the layout [outer, steps, inner, components]: leaves that lie otherwise are copied. As
for scans the operator is the only generated part; its derivatives are vjps of its three programs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...autodiff.derivative_rules import Cotangent, vjp
from ...errors import BackendError, UnsupportedOperation
from ...program.cpp_and_triton_expressions import CPP
from ...program.dtypes import CPP_MEMORY, FLOATS
from ...program.operator import Operator, spans
from ...program.operator_names import escaped
from ...program.program_builder import Builder, Program
from ..base.commands import NO_MEMORY
from ..base.huge_pages import empty_strided
from .compiler import load
from .kernel import OPERATIONS, SMALL, STEPS, WIDE, field, field_types
from .threads_and_jobs import SERIAL_BYTES

# The largest kernels: scalars of one step, and operations / OPERATIONS. The gradient of products of
# 4 × 4 matrices, 62, is compiled in 5 seconds (GCC 12.2, one core of the build machine). Larger
# operators are composed of scans.
MAX_WINDOW_COST = 64
# Windows whose states take more than so many bytes per thread, in the gradient, are composed of
# scans too: from 2^18 steps of one float32 on.
MAX_STATES_BYTES = 1 << 27


@dataclass(frozen=True)
class Pulled:
    """The vjps of an operator's programs.

    carried: the state components that have a cotangent. given: the outputs that have one. wanted:
        the inputs whose gradient is wanted.
    lower: (state, cotangents of the outputs) ↦ cotangents of the state.
    combine: (left, right, cotangents of the state) ↦ cotangents of left, then of right.
    lift: (inputs, cotangents of the state) ↦ gradients of the inputs.
    reads_states: whether `lower` or `combine` depends on states. reads_inputs: whether any of the
        three depends on states or inputs. Both are false for a sum.
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
def has_kernel(op: Operator) -> bool:
    """Whether windows of the operator have a kernel of their own."""
    operations = sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))
    scalars = len(op.lift.inputs) + op.width + len(op.lower.outputs)
    return (
        not op.is_walked
        and op.edge is None
        and len(op.lower.inputs) - 1 not in op.lower.used_inputs
        and scalars + operations // OPERATIONS <= MAX_WINDOW_COST
        and bool(op.outputs)
    )


def fits(op: Operator, width: int) -> bool:
    """Whether the states of windows of so many steps, and their cotangents, are not too large."""
    sizes = [leaf.components * scalar_bytes(leaf.accumulator) for leaf in op.state]
    return 6 * WIDE * width * sum(sizes) <= MAX_STATES_BYTES


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
            builder.const(0.0, kind) if g is None else builder.cast(g, kind)
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
def source(op: Operator, gradient: bool) -> str:
    """The whole translation unit. Leaves: inputs, then outputs, or for a gradient cotangents of the
    outputs that are floats, then gradients of the inputs that are."""
    found = pulled(op) if gradient else None
    types, states, raw = field_types(op), op.combine.output_dtypes, op.lift.inputs
    state_fields = [(types[kind], f"s{c}") for c, kind in enumerate(states)]
    out_fields = [(types[kind], f"y{c}") for c, kind in enumerate(op.lower.output_dtypes)]
    x_fields = [(types[kind], f"x{c}") for c, kind in enumerate(raw)]
    left, right = ([field(f"{side}.s{c}", k) for c, k in enumerate(states)] for side in "ab")
    inputs = [field(f"x.x{c}", kind) for c, kind in enumerate(raw)]
    set_state = [f"y.s{c}" for c in range(op.width)]
    parts = [
        f"// windows of {escaped(op.name)}",
        '#include "scalar.h"',
        CPP.struct("State", state_fields),
        CPP.struct("Raw", x_fields),
        CPP.function("lift(const Raw& x)", "State", CPP.statements(op.lift, inputs, set_state)),
        CPP.function("combine(const State& a, const State& b)", "State",
                     CPP.statements(op.combine, [*left, *right], set_state)),
    ]  # fmt: skip
    leaves: list[tuple[torch.dtype, int]] = [(t.dtype, t.components) for t in op.inputs]
    lists = {
        "INPUTS": ports(op.inputs, [(f"x{c}", types[k]) for c, k in enumerate(raw)], 0),
        "STATE": [f"F({name}, {type_})" for type_, name in state_fields],
    }
    if found is None:
        outputs = [name for _, name in out_fields]
        parts += [
            CPP.struct("Out", out_fields),
            CPP.function("lower(const State& a, const Raw& x)", "Out", ["(void)a; (void)x;",
                         *CPP.statements(op.lower, [*left, *inputs, "false"],
                                         [f"y.{name}" for name in outputs])]),
        ]  # fmt: skip
        lists["OUTPUTS"] = ports(op.outputs, [(n, t) for t, n in out_fields], len(leaves))
        leaves += [(t.dtype, t.components) for t in op.outputs]
    else:
        parts += derivatives(op, found, types, left, right, inputs)
        given = [t for t in op.outputs if t.dtype.is_floating_point]
        wanted = [t for t in op.inputs if t.dtype.is_floating_point]
        lists["COTANGENTS"] = [f"F(c{c}, {types[states[c]]})" for c in found.carried]
        lists["GIVEN"] = ports(
            given, [(f"g{c}", types[op.lower.output_dtypes[c]]) for c in found.given], len(leaves)
        )
        leaves += [(t.dtype, t.components) for t in given]
        lists["GRADIENTS"] = ports(
            wanted, [(f"z{c}", types[raw[c]]) for c in found.wanted], len(leaves)
        )
        leaves += [(t.dtype, t.components) for t in wanted]
    lines = [f"#define {name}(F) {' '.join(entries)}" for name, entries in lists.items()]
    sizes = ", ".join(str(n * scalar_bytes(dtype)) for dtype, n in leaves)
    lines += [
        f"#define GRADIENT {int(gradient)}",
        f"constexpr bool READS_STATES = {int(found is None or found.reads_states)};",
        f"constexpr bool READS_INPUTS = {int(found is None or found.reads_inputs)};",
        f"constexpr int WIDE = {WIDE}, STEPS = {STEPS}, LEAVES = {len(leaves)};",
        f"constexpr int WIDEST = {max(scalar_bytes(leaf.accumulator) for leaf in op.state)};",
        f"constexpr i64 ELEMENT_BYTES[LEAVES] = {{{sizes}}};",
        '#include "windows.h"',
        "",
    ]
    return "\n".join([*parts, *lines])


def scalar_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def ports(leaves: Sequence, names: Sequence[tuple[str, str]], first: int) -> list[str]:  # type: ignore[type-arg]
    """F(name, value type, memory type, leaf, component, components) of each scalar."""
    left = iter(names)
    return [
        f"F({name}, {value}, {CPP_MEMORY[leaf.dtype]}, {k}, {part}, {leaf.components})"
        for k, leaf in enumerate(leaves, first)
        for part in range(leaf.components)
        for name, value in [next(left)]
    ]


def derivatives(
    op: Operator, found: Pulled, types: dict[str, str], left: list[str], right: list[str],
    inputs: list[str],
) -> list[str]:  # fmt: skip
    """The structs and functions of the vjps."""
    states = op.combine.output_dtypes
    carried = [(types[states[c]], f"c{c}") for c in found.carried]
    given = [(types[op.lower.output_dtypes[c]], f"g{c}") for c in found.given]
    wanted = [(types[op.lift.inputs[c]], f"z{c}") for c in found.wanted]
    seeds = [f"c.{name}" for _, name in carried]
    pair = [f"y.{side}.{name}" for side in ("left", "right") for _, name in carried]
    sums = [f"y.{name} = a.{name} + b.{name};" for _, name in carried]
    return [
        CPP.struct("Cotangent", carried),
        CPP.struct("Pair", [("Cotangent", "left"), ("Cotangent", "right")]),
        CPP.struct("OutCotangent", given),
        CPP.struct("RawCotangent", wanted),
        CPP.function("added(const Cotangent& a, const Cotangent& b)", "Cotangent", sums),
        CPP.function("lower_vjp(const State& a, const OutCotangent& g)", "Cotangent",
                     ["(void)a;", *CPP.statements(
                         found.lower, [*left, *(f"g.{name}" for _, name in given)],
                         [f"y.{name}" for _, name in carried])]),
        CPP.function("combine_vjp(const State& a, const State& b, const Cotangent& c)", "Pair",
                     ["(void)a; (void)b;",
                      *CPP.statements(found.combine, [*left, *right, *seeds], pair)]),
        CPP.function("lift_vjp(const Raw& x, const Cotangent& c)", "RawCotangent",
                     ["(void)x;", *CPP.statements(found.lift, [*inputs, *seeds],
                                                  [f"y.{name}" for _, name in wanted])]),
    ]  # fmt: skip


@dataclass(frozen=True)
class Form:
    """Where windows are: over dimension `axis` of the shape `batch`, of `width` steps."""

    batch: tuple[int, ...]
    axis: int
    width: int
    reverse: bool


def windows(
    op: Operator, leaves: Sequence[Tensor], form: Form, offsets: Tensor | None
) -> list[Tensor]:
    """The outputs, contiguous. leaves: of the shape of the batch and the element, contiguous."""
    results = [new(form.batch + leaf.shape, leaf.dtype) for leaf in op.outputs]
    run(op, False, [*leaves, *results], form, offsets)
    return results


def gradients(
    op: Operator, leaves: Sequence[Tensor], cotangents: Sequence[Tensor], form: Form,
    offsets: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs that are floats. cotangents: of the outputs that are floats."""
    results = [new(form.batch + t.shape, t.dtype) for t in op.inputs if t.dtype.is_floating_point]
    run(op, True, [*leaves, *cotangents, *results], form, offsets)
    return results


def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype)


def run(
    op: Operator, gradient: bool, tensors: Sequence[Tensor], form: Form, offsets: Tensor | None
) -> None:
    operations = sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))
    function = load(source(op, gradient), operations <= SMALL, f"windows of operator {op.name!r}")
    steps, outer = form.batch[form.axis], math.prod(form.batch[: form.axis])
    inner = math.prod(form.batch[form.axis + 1 :])
    if not steps * outer * inner:
        return
    moved = sum(t.nbytes for t in tensors)
    threads = torch.get_num_threads() if moved > SERIAL_BYTES else 1
    packed = None if offsets is None else offsets.to("cpu", torch.int64).contiguous()
    arguments = [
        outer, steps, inner, min(form.width, steps), int(form.reverse),
        1 if packed is None else packed.shape[0] - 1, 0 if packed is None else packed.data_ptr(),
        threads, *(t.data_ptr() for t in tensors),
    ]  # fmt: skip
    if function((ctypes.c_int64 * len(arguments))(*arguments)) == NO_MEMORY:
        raise BackendError(
            f"no memory left: the buffers of windows of {op.name!r} cannot be allocated"
        )
