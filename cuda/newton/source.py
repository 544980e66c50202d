"""The CUDA C++ of a solution by Newton's method: the step, its tangent, how inputs are read and
outputs written, then `newton_windows.cuh`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...autodiff.newton_operator import NewtonOperator, derive_newton
from ...program.dtypes import CPP_MEMORY
from ...program.operator import Operator, spans
from .. import parameters
from ..kernel import (
    MESSAGE_WORDS,
    CudaKernel,
    LanesTile,
    newton_padding,
    newton_plane,
    numbers_of,
    raw_words,
    words_of,
)
from ..source import (
    NEVER_CUT,
    NOT_PACKED,
    OUTER_OFFSET,
    carry_address,
    function,
    load_init,
    operator_source,
    shared_memory,
    store_final,
)
from ..walk.step import CPP, by_powers_of_two, fused, step_source, walk_step


@functools.lru_cache(maxsize=256)
def source(kernel: CudaKernel) -> str:
    """The whole translation unit."""
    step = walk_step(kernel.operator, kernel.final, False, False)
    return "\n".join(
        [
            '#include "scalar.h"', '#include "device.cuh"', '#include "wait_for_slots.cuh"',
            operator_source(kernel.operator, kernel.aggregate_components), NEVER_CUT,
            step_source(kernel.operator, step), constants(kernel), tangent_source(kernel.operator),
            shared_memory(kernel.memory), parameters.struct_text(parameters.fields(kernel)),
            OUTER_OFFSET, NOT_PACKED, load_init(kernel), store_final(kernel),
            *inputs(kernel), outputs(kernel), WORDS, kept_inputs(kernel.operator),
            '#include "newton_windows.cuh"', "",
        ]
    )  # fmt: skip


def constants(kernel: CudaKernel) -> str:
    """The constants that the template reads."""
    tile, newton = kernel.tile, derive_newton(kernel.operator)
    assert isinstance(tile, LanesTile) and kernel.newton is not None
    count = len(numbers_of(kernel.operator))
    values = {
        "int THREADS": tile.threads,
        "int CHAINS": tile.block_channels,
        "int ITEMS": tile.items,
        "int MOST": kernel.newton.max_iterations,
        "float TOLERANCE": f"{float(kernel.newton.tolerance).hex()}f",
        "int NUMBERS": count,
        "int MESSAGE_WORDS": MESSAGE_WORDS,
        "int PLANE": newton_plane(tile),
        "int PAD": newton_padding(tile),
        "int RAW_WORDS": raw_words(kernel.operator),
        "bool DIAGONAL": str(newton.is_diagonal).lower(),
        "int SLOPES": count if newton.is_diagonal else count * count,
        "int INPUT_COUNT": max(len(kernel.inputs), 1),
        "int OUTER": kernel.outer,
        "bool REVERSE": str(kernel.reverse).lower(),
        "bool HAS_FINAL": str(bool(kernel.final)).lower(),
    }
    return "\n".join(f"constexpr {name} = {value};" for name, value in values.items())


def tangent_source(op: Operator) -> str:
    """`tangent`, which computes the step and its Jacobian at h, and what converts a state to its
    numbers and back."""
    newton, numbers = derive_newton(op), numbers_of(op)
    count = len(numbers)
    state = spans(op.state)
    given = [  # the inputs of `NewtonOperator.tangent`
        *(f"h[{k}]" for k in range(count)),
        *(f"h[{k}]" for k in range(count)),  # not read
        *(f"a.s{c}" for k in op.constant for c in state[k]),
        *(f"x.x{c}" for c in range(len(op.lift.inputs))),
    ]  # fmt: skip
    results = [f"f[{k}]" for k in range(count)] + [
        f"slope[{place(newton, row, column, count)}]" for row, column in newton.entries
    ]
    moving = newton.tangent.depending_on(range(count))
    program = fused(by_powers_of_two(newton.tangent, moving, False))
    lines = CPP.statements(program, given, results)
    return "\n".join(
        [
            function("INLINE void tangent(const float* h, const State& a, const Raw& x, float* f, "
                     "float* slope)", "(void)h, (void)a, (void)x, (void)slope;", lines),
            function("INLINE void get_numbers(const State& s, float* h)", "",
                     [f"h[{k}] = s.s{c};" for k, c in enumerate(numbers)]),
            function("INLINE void put_numbers(State& s, const float* h)", "",
                     [f"s.s{c} = h[{k}];" for k, c in enumerate(numbers)]),
        ]
    )  # fmt: skip


def place(newton: NewtonOperator, row: int, column: int, count: int) -> int:
    """Where an entry of J stands among the slopes."""
    return row if newton.is_diagonal else row * count + column


def inputs(kernel: CudaKernel) -> Sequence[str]:
    """How inputs are read: `find_inputs`, the addresses of a chain's inputs at a step,
    `advance_inputs`, which adds some steps, and `load_raw`, the inputs so many steps further,
    scalar by scalar."""
    op = kernel.operator
    kinds = op.lift.inputs
    found, advanced, read = [], [], []
    for j, k in enumerate(kernel.inputs):
        along = f"P.input_step[{j}]"
        found.append(f"from[{j}] = {carry_address('input', j, along=False)} + step * {along};")
        advanced.append(f"from[{j}] += (REVERSE ? -steps : steps) * {along};")
        leaf = kernel.leaf["input", k]
        memory = CPP_MEMORY[leaf.dtype]
        read.append(f"const {memory}* p{j} = (const {memory}*)(from[{j}] + "
                    f"(REVERSE ? -steps : steps) * {along});")  # fmt: skip
        for n, c in enumerate(spans(op.inputs)[k]):
            if c in op.used_inputs:
                kind = CPP.types[kinds[c]]
                read.append(f"x.x{c} = from_memory<{kind}>(p{j}[{leaf.offsets[n]}]);")
    finding = "find_inputs(const char** from, const Params& P, int row, i64 channel, i64 step)"
    advancing = "advance_inputs(const char** from, const Params& P, i64 steps)"
    loading = "load_raw(Raw& x, const Params& P, const char* const* from, i64 steps)"
    unused = "(void)from, (void)P, (void)row, (void)channel;"
    return [
        function(f"INLINE void {finding}", unused, [AT, *found]),
        function(f"INLINE void {advancing}", "(void)from, (void)P, (void)steps;", advanced),
        function(f"INLINE void {loading}", "(void)x, (void)from, (void)steps;", read),
    ]


# A scalar in planes of 32-bit words.
WORDS = """\
template <class T> INLINE void put_words(u32* to, const T& x) {
    u32 words[(sizeof(T) + 3) / 4] = {};
    __builtin_memcpy(words, &x, sizeof(T));
    UNROLL for (int k = 0; k < (int)(sizeof(T) + 3) / 4; ++k) to[k * PLANE] = words[k];
}
template <class T> INLINE void get_words(const u32* from, T& x) {
    u32 words[(sizeof(T) + 3) / 4];
    UNROLL for (int k = 0; k < (int)(sizeof(T) + 3) / 4; ++k) words[k] = from[k * PLANE];
    __builtin_memcpy(&x, words, sizeof(T));
}"""


def kept_inputs(op: Operator) -> str:
    """`put_raw` and `get_raw`: the inputs of a step in planes."""
    put, get, at = [], [], 0
    for c in sorted(op.used_inputs):
        put.append(f"put_words(to + {at} * PLANE, x.x{c});")
        get.append(f"get_words(from + {at} * PLANE, x.x{c});")
        at += words_of(op.lift.inputs[c])
    return "\n".join(
        [
            function("INLINE void put_raw(u32* to, const Raw& x)", "(void)to, (void)x;", put),
            function("INLINE void get_raw(const u32* from, Raw& x)", "(void)from, (void)x;", get),
        ]
    )


AT = "if (REVERSE) step = P.length - 1 - step;"


def outputs(kernel: CudaKernel) -> str:
    """`store_out`, which writes what `lower` makes of a state."""
    op = kernel.operator
    lines = [AT]
    for k in range(len(op.outputs)):
        laid = kernel.leaf["output", k]
        memory = CPP_MEMORY[laid.dtype]
        address = carry_address("output", k, along=False)
        lines.append(f"{memory}* to{k} = ({memory}*)({address} + step * P.output_step[{k}]);")
        for n, c in enumerate(spans(op.outputs)[k]):
            lines.append(f"to{k}[{laid.offsets[n]}] = to_memory<{memory}>(y.y{c});")
    given = "const Params& P, int row, i64 channel, i64 step, const Out& y"
    return function(f"INLINE void store_out({given})", "", lines)
