"""The CUDA C++ of one kernel: the operator, its leaves and parameters, then the template."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ..engines.base.cpp_and_cuda import headers_of, shared_headers
from ..program.cpp_and_triton_expressions import CPP, inline
from ..program.dtypes import CPP_MEMORY
from ..program.operator import Operator, spans
from ..program.operator_names import escaped
from ..program.program_builder import decode
from . import parameters
from .kernel import (
    LOOKBACK_WARPS,
    CudaKernel,
    CudaLeaf,
    LanesTile,
    Region,
    SharedMemory,
    boundary_words,
    word_counts,
    word_statements,
)
from .lanes_tiles import unrolled
from .tile_choice_inputs import cost_of, looks
from .walk.parts import kept_source
from .walk.step import WalkStep, is_coarse, step_source, walk_step
from .walk.tile import ahead

MODES = ("SERIAL", "CHAINED", "LOOKBACK", "WALKED")


@functools.lru_cache(maxsize=1024)
def source(kernel: CudaKernel) -> str:
    """The whole translation unit."""
    walk = "parts_walk.cuh" if kernel.in_parts else "lanes_walk.cuh"
    lanes = walk if kernel.mode == "WALKED" else "lanes_scan.cuh"
    template = lanes if kernel.is_lanes else "rows_scan.cuh"
    return "\n".join(
        [
            *(["#define COARSE"] if takes_hardware_tanh(kernel) else []),
            '#include "scalar.h"', '#include "device.cuh"', '#include "wait_for_slots.cuh"',
            operator_source(kernel.operator, kernel.aggregate_components, kernel.cuts),
            *([step_source(kernel.operator, step_of(kernel))] if kernel.mode == "WALKED" else []),
            *([kept_source(kernel.operator, step_of(kernel))] if kernel.in_parts else []),
            constants(kernel), shared_memory(kernel.memory),
            parameters.struct_text(parameters.fields(kernel)),
            OUTER_OFFSET, PACKED if kernel.packed else NOT_PACKED,
            '#include "cells.cuh"', leaves(kernel), '#include "element.cuh"',
            f'#include "{template}"', "",
        ]
    )  # fmt: skip


def step_of(kernel: CudaKernel) -> WalkStep:
    """The step of a walk."""
    coarse = takes_hardware_tanh(kernel)
    return walk_step(kernel.operator, kernel.final, kernel.exclusive, coarse)


def takes_hardware_tanh(kernel: CudaKernel) -> bool:
    """`is_coarse` of a walk's leaves; False for other kernels."""
    leaves = (
        leaf.dtype
        for role, _, leaf in kernel.leaves
        if role in ("input", "output") and not leaf.still
    )
    return kernel.mode == "WALKED" and is_coarse(leaves)


def operator_source(op: Operator, aggregate: list[int], packed: bool = False) -> str:
    """The structs and functions of an operator; `Monoid.source("cuda")` shows them to users. States
    of packed sequences have a flag `cut`: a sequence starts in the range that they combine, so
    earlier elements do not matter."""
    kinds = op.combine.output_dtypes
    raw = op.lift.inputs
    both = [f"{side}.s{c}" for side in "ab" for c in range(op.width)]
    inputs = [f"x.x{c}" for c in range(len(raw))]
    results = [f"y.s{c}" for c in aggregate]
    state = [f"a.s{c}" for c in range(op.width)]
    outputs = [f"y.y{c}" for c in range(len(op.lower.outputs))]
    constants_ = op.identity or tuple(0 for _ in kinds)
    start = [f"y.s{c} = {CPP.literal(decode(constants_[c]), kinds[c])};" for c in aggregate]
    words = word_counts([*(kinds[c] for c in aggregate), *(["i32"] if packed else [])])
    fields = [(CPP.types[kinds[c]], f"s{c}") for c in aggregate]
    uncut = ["y.cut = 0;"] if packed else []
    combine = "combine_elements" if packed else "combine"
    return "\n".join(
        [
            f"// {escaped(op.name)}",
            CPP.struct("State", [*fields, *([("int32_t", "cut")] if packed else [])]),
            CPP.struct("Raw", [(CPP.types[raw[c]], f"x{c}") for c in sorted(op.used_inputs)]),
            CPP.struct(
                "Out", [(CPP.types[d], f"y{c}") for c, d in enumerate(op.lower.output_dtypes)]
            ),
            CPP.function("lift(const Raw& x)", "State",
                         [*CPP.statements(op.lift.select(aggregate), inputs, results), *uncut]),
            CPP.function(f"{combine}(const State& a, const State& b)", "State",
                         [*CPP.statements(op.combine.select(aggregate), both, results), *uncut]),
            *([COMBINE_CUT] if packed else []),
            CPP.function("identity()", "State", [*start, *uncut]),
            CPP.function("lower(const State& a, const Raw& x, bool boundary)", "Out",
                         ["(void)boundary;",
                          *CPP.statements(op.lower, [*state, *inputs, "boundary"], outputs)]),
            f"constexpr int WORDS = {sum(words)};",
            conversion(
                [*(f"s{c}" for c in aggregate), *(["cut"] if packed else [])],
                [*(kinds[c] for c in aggregate), *(["i32"] if packed else [])],
            ),
        ]
    )  # fmt: skip


CUT_OFF = "INLINE void cut_off(State& s) { s.cut = 1; }"
NEVER_CUT = """INLINE void cut_off(State&) {}
INLINE State combine_elements(const State& a, const State& b) { return combine(a, b); }"""
COMBINE_CUT = """INLINE State combine(const State& a, const State& b) {
    State y = combine_elements(a, b);
    if (b.cut) y = b;
    y.cut = a.cut | b.cut;
    return y;
}"""


def conversion(fields: list[str], kinds: list[str]) -> str:
    """The functions to_words and from_words, which convert a state to 32-bit words and back."""
    packing, unpacking = word_statements(fields, kinds)
    return "\n".join(
        [
            inline("to_words(const State& s, uint32_t* w)", packing),
            inline("from_words(const uint32_t* w)", ["State s;", *unpacking, "return s;"], "State"),
        ]
    )


def constants(kernel: CudaKernel) -> str:
    """The constants that the template reads."""
    tile = kernel.tile
    words = kernel.words
    used = [kernel.leaf["input", k] for k in kernel.inputs]
    values: dict[str, object] = {
        "int INPUT_COUNT": len(kernel.inputs),
        "int OUTPUT_COUNT": len(kernel.operator.outputs),
        "int OUTER": kernel.outer,
        "int THREADS": tile.threads,
        "int ITEMS": tile.items,
        "int STAGES": tile.stages,
        "int LEAD": tile.lead,
        "int BLOCKS_PER_PROCESSOR": tile.blocks,
        "int MODE": MODES.index(kernel.mode),
        "bool REVERSE": kernel.reverse,
        "int ROUND": kernel.round,
        "bool EXCLUSIVE": kernel.exclusive,
        "bool HAS_INIT": kernel.init is not None,
        "bool HAS_FINAL": bool(kernel.final),
        "bool ANY_SHIFTED": any(k in kernel.inputs for k in kernel.shifted),
        "bool SEGMENTED": kernel.cuts,
        "bool NUMBERED": kernel.numbered,
        "bool REPLACES_BOUNDARY": not all(
            kernel.copies_boundary(k) for k in kernel.shifted if k in kernel.inputs
        ),
        "bool ANY_SKEWED": any(leaf.align < 4 for leaf in used),
    }
    if isinstance(tile, LanesTile):
        values["int BLOCK_CHANNELS"] = tile.block_channels
        values["int CHANNELS"] = tile.channels
        values["int UNROLLED"] = unrolled(tile, cost_of(kernel.operator))
        group, wave = looks(words, tile.block_channels)
        values["int GROUP_LOOKS"] = group
        values["int WAVE_LOOKS"] = wave
    else:
        values["int CHUNK"] = tile.chunk
        values["int FLIGHT"] = tile.flight
        values["int LATE"] = tile.late
        values["int LOOKBACK_WARPS"] = LOOKBACK_WARPS
        values["int ROUNDS"] = 5 if words <= 6 else 2 if words <= 12 else 1
    if kernel.mode == "WALKED":
        step = step_of(kernel)
        values["int AHEAD"] = ahead(kernel, len(step.ready))
        # Whether the last step of a sequence is as any other: no leaf is read one step ahead.
        is_last = len(step.program.inputs) - 1
        shifts = any(k in kernel.inputs for k in kernel.shifted)
        values["bool LAST_ALIKE"] = not shifts and is_last not in step.program.used_inputs
        values["bool IN_PARTS"] = kernel.in_parts
    bits = boundary_words(kernel) if kernel.cuts else 0
    values["int BOUNDARY_WORDS"] = bits
    values["int TILE_WORDS"] = bits * (3 if kernel.numbered else 1)
    lines = [CUT_OFF if kernel.cuts else NEVER_CUT]
    lines += [f"constexpr int {mode} = {n};" for n, mode in enumerate(MODES)]
    lines += [f"constexpr {name} = {str(value).lower()};" for name, value in values.items()]
    return "\n".join(lines)


def shared_memory(memory: SharedMemory) -> str:
    """struct Shared, and the place and sizes of the ring after it."""
    sizes = {"RING_AT": memory.ring_at, "STAGE_BYTES": memory.stage_bytes,
             "SHARED_BYTES": memory.size}  # fmt: skip
    lines = ["struct Shared {", *(f"    {array.text}" for array in memory.arrays), "};"]
    lines += [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    return "\n".join([*lines, "static_assert(sizeof(Shared) <= RING_AT);"])


OUTER_OFFSET = """INLINE i64 outer_offset(const i64* strides, const Params& P, int row) {
    if constexpr (OUTER == 0) return 0;
    i64 offset = 0;
    UNROLL for (int d = OUTER - 1; d > 0; --d) {
        const int rest = row / P.outer_size[d];
        offset += (i64)(row - rest * P.outer_size[d]) * strides[d];
        row = rest;
    }
    return offset + (i64)row * strides[0];
}"""


# The offsets of packed sequences; where there are none, the functions exist and are not called.
PACKED = """#define SEQUENCES 1
INLINE i64 offset_at(const Params& P, int entry) { return ((const i64*)P.offsets)[entry]; }
INLINE const i64* offsets_of(const Params& P) { return (const i64*)P.offsets; }
INLINE int sequences_of(const Params& P) { return P.sequences; }"""
NOT_PACKED = """#define SEQUENCES 0
INLINE i64 offset_at(const Params&, int) { return 0; }
INLINE const i64* offsets_of(const Params&) { return 0; }
INLINE int sequences_of(const Params&) { return 1; }"""


def place(kernel: CudaKernel, region: Region, leaf: CudaLeaf) -> str:
    """Where a leaf lies in a stage, as members of Input<J> and Output<J>."""
    if kernel.mode == "WALKED":
        return (
            f"static constexpr int AT = {region.at}, GROUP = {region.group}; static constexpr bool "
            f"WIDE = {_bool(leaf.wide)}, STILL = {_bool(leaf.still)};"
        )
    if kernel.is_lanes:
        return f"static constexpr int AT = {region.at}, GROUP = {region.group};"
    return (
        f"static constexpr int AT = {region.at}, REGION = {region.size}; "
        f"static constexpr bool ALIGNED = {_bool(region.aligned)};"
    )


def leaves(kernel: CudaKernel) -> str:
    """Input<J>, Output<J>, and the functions that move scalars from inputs to Raw and from Out to
    outputs."""
    op = kernel.operator
    parts = ["template <int J> struct Input;", "template <int J> struct Output;"]
    raw, outs = [], []
    shared = kernel.memory
    boundaries = kernel.numbers("boundary")
    in_spans, out_spans = spans(op.inputs), spans(op.outputs)
    for j, k in enumerate(kernel.inputs):
        leaf = kernel.leaf["input", k]
        memory = CPP_MEMORY[leaf.dtype]
        copied = k in boundaries and kernel.copies_boundary(k)
        boundary = boundaries.index(k) if copied else -1
        parts.append(
            f"template <> struct Input<{j}> {{ typedef {memory} Memory; static constexpr int "
            f"SCALARS = {op.inputs[k].components}, ALIGN = {leaf.align}, BOUNDARY = {boundary}; "
            f"static constexpr bool ONE = {_bool(leaf.one)}, "
            f"SHIFTED = {_bool(k in kernel.shifted)}; {place(kernel, shared.inputs[j], leaf)} }};"
        )
        for n, c in enumerate(in_spans[k]):
            if c in op.used_inputs:
                at = leaf.offsets[n]
                index = f"{at}" if leaf.one else f"v * {op.inputs[k].components} + {at}"
                value = f"scalar_at<{memory}>(words.input{j}, {index})"
                raw.append(f"x.x{c} = from_memory<{CPP.types[op.lift.inputs[c]]}>({value});")
    for k, out in enumerate(op.outputs):
        leaf = kernel.leaf["output", k]
        kind = CPP.types[out.scalar]
        parts.append(
            f"template <> struct Output<{k}> {{ typedef {CPP_MEMORY[leaf.dtype]} Memory; "
            f"typedef {kind} Value; static constexpr int SCALARS = {out.components}, "
            f"ALIGN = {leaf.align}; static constexpr bool ONE = false; "
            f"{'' if kernel.is_lanes else place(kernel, shared.outputs[k], leaf)} }};"
        )
        for n, c in enumerate(out_spans[k]):
            outs.append(f"values.output{k}[v * {out.components} + {leaf.offsets[n]}] = y.y{c};")
    per = "CHANNELS" if kernel.is_lanes else "ITEMS"
    count = len(kernel.inputs)
    parts.append(_list("INPUTS", count))
    parts.append(_list("OUTPUTS", len(op.outputs)))
    fields = " ".join(f"u32 input{j}[Cell<Input<{j}>, {per}>::WORDS];" for j in range(count))
    parts.append(f"struct InputWords {{ {fields} }};")
    fields = " ".join(
        f"Output<{k}>::Value output{k}[{per} * Output<{k}>::SCALARS];"
        for k in range(len(op.outputs))
    )
    parts.append(f"struct OutputValues {{ {fields} }};")
    parts.append(function("INLINE Raw raw_of(const InputWords& words, int v)", "Raw x;", raw, "x"))
    parts.append(
        function("INLINE void put_outputs(OutputValues& values, int v, const Out& y)", "", outs)
    )
    parts.append(replace_boundary(kernel))
    parts.append(load_init(kernel))
    parts.append(store_final(kernel))
    return "\n".join(parts)


def carry_address(role: str, j: int, along: bool = True) -> str:
    """The address of a leaf of a channel. along: of a carry, for one of the packed sequences."""
    step, lane, outer = parameters.stride_fields(role)
    rest = f" + sequence * P.{step}[{j}]" if along else ""
    return f"P.{role}[{j}] + outer_offset(P.{outer}[{j}], P, row) + channel * P.{lane}[{j}]{rest}"


def replace_boundary(kernel: CudaKernel) -> str:
    """The function that gives shifted leaves their value at the last step: the boundary value, or
    zero."""
    op = kernel.operator
    boundaries = kernel.numbers("boundary")
    lines = []
    for k, span in enumerate(spans(op.inputs)):
        if k not in kernel.shifted or k not in kernel.inputs:
            continue
        for n, c in enumerate(span):
            if c not in op.used_inputs:
                continue
            kind = CPP.types[op.lift.inputs[c]]
            if k not in boundaries:
                lines.append(f"x.x{c} = ({kind})0;")
                continue
            j, leaf = boundaries.index(k), kernel.leaf["boundary", k]
            memory = CPP_MEMORY[leaf.dtype]
            at = carry_address("boundary", j)
            value = f"((const {memory}*)({at}))[{leaf.offsets[n]}]"
            lines.append(f"x.x{c} = from_memory<{kind}>({value});")
    return function(
        "INLINE void replace_boundary(Raw& x, const Params& P, int row, i64 channel, int sequence)",
        "",
        lines,
    )


def load_init(kernel: CudaKernel) -> str:
    """The function that loads the initial state of a row, from memory or the identity."""
    op = kernel.operator
    kinds = op.combine.output_dtypes
    lines = []
    state_spans = spans(op.state)
    for j, k in enumerate(kernel.numbers("init")):
        leaf = kernel.leaf["init", k]
        memory = CPP_MEMORY[leaf.dtype]
        kept = [(n, c) for n, c in enumerate(state_spans[k]) if c in kernel.aggregate_components]
        if not kept:
            continue
        lines.append(f"const char* from{j} = {carry_address('init', j)};")
        for n, c in kept:
            value = f"((const {memory}*)from{j})[{leaf.offsets[n]}]"
            lines.append(f"s.s{c} = from_memory<{CPP.types[kinds[c]]}>({value});")
    signature = "INLINE State load_init(const Params& P, int row, i64 channel, int sequence)"
    return function(signature, "State s = identity();", lines, "s")


def store_final(kernel: CudaKernel) -> str:
    """The function that stores the final state of a row."""
    lines = []
    state_spans = spans(kernel.operator.state)
    for j, k in enumerate(kernel.final):
        leaf = kernel.leaf["final", k]
        memory = CPP_MEMORY[leaf.dtype]
        lines.append(f"char* to{j} = {carry_address('final', j)};")
        for n, c in enumerate(state_spans[k]):
            lines.append(f"(({memory}*)to{j})[{leaf.offsets[n]}] = to_memory<{memory}>(s.s{c});")
    given = "const Params& P, int row, i64 channel, int sequence, const State& s"
    return function(f"INLINE void store_final({given})", "", lines)


def function(signature: str, first: str, lines: Iterable[str], result: str = "") -> str:
    body = [line for line in (first, *lines, f"return {result};" if result else "") if line]
    return "\n".join([f"{signature} {{", *(f"    {line}" for line in body), "}"])


def _list(name: str, count: int) -> str:
    return f"#define {name}(F) {' '.join(f'F({j})' for j in range(count))}"


def _bool(value: bool) -> str:
    return str(value).lower()


@functools.cache
def headers() -> dict[str, str]:
    """The handwritten files that a kernel includes, by file name."""
    found = shared_headers()
    for folder in ("", ".newton", ".vectors", ".walk", ".windows"):
        found = found | headers_of(f"assocscan.cuda{folder}", ".cuh")
    return dict(sorted(found.items()))
