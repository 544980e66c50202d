"""The CUDA C++ of one kernel: the operator, its leaves and parameters, then the template."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.resources import files

import torch

from ..operator import Operator, spans
from ..program import decode
from ..render import CPP
from .kernel import CudaKernel, LanesTile, words_of

MEMORY_TYPES = {
    torch.bool: "uint8_t", torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t",
    torch.int32: "int32_t", torch.int64: "int64_t", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float32: "float", torch.float64: "double", torch.complex64: "float",
    torch.complex128: "double",
}  # fmt: skip
ROLES = ("input", "output", "init", "edge", "final")
MODES = ("BLOCK", "RELAY", "AHEAD")


@functools.lru_cache(maxsize=1024)
def source(kernel: CudaKernel) -> str:
    """The whole translation unit."""
    template = "lanes_scan.cuh" if kernel.is_lanes else "rows_scan.cuh"
    return "\n".join(
        [
            '#include "scalar.h"', '#include "device.cuh"', '#include "status.cuh"',
            operator_source(kernel.operator, kernel.total), constants(kernel), parameters(kernel),
            '#include "cells.cuh"', leaves(kernel), '#include "element.cuh"',
            f'#include "{template}"', "",
        ]
    )  # fmt: skip


def operator_source(op: Operator, total: list[int]) -> str:
    """Readable CUDA C++ of one operator; shown by `Monoid.source("cuda")` too."""
    kinds = op.combine.output_dtypes
    raw = op.lift.inputs
    both = [f"{side}.s{c}" for side in "ab" for c in range(op.width)]
    inputs = [f"x.x{c}" for c in range(len(raw))]
    results = [f"y.s{c}" for c in total]
    state = [f"a.s{c}" for c in range(op.width)]
    outputs = [f"y.y{c}" for c in range(len(op.lower.outputs))]
    constants_ = op.identity or tuple(0 for _ in kinds)
    start = [f"y.s{c} = {CPP.literal(decode(constants_[c]), kinds[c])};" for c in total]
    words = words_of(kinds[c] for c in total)
    return "\n".join(
        [
            f"// {op.name}",
            CPP.struct("State", [(CPP.types[kinds[c]], f"s{c}") for c in total]),
            CPP.struct("Raw", [(CPP.types[raw[c]], f"x{c}") for c in sorted(op.used_inputs)]),
            CPP.struct(
                "Out", [(CPP.types[d], f"y{c}") for c, d in enumerate(op.lower.output_dtypes)]
            ),
            CPP.function("lift(const Raw& x)", "State",
                         CPP.statements(op.lift.select(total), inputs, results)),
            CPP.function("combine(const State& a, const State& b)", "State",
                         CPP.statements(op.combine.select(total), both, results)),
            CPP.function("identity()", "State", start),
            CPP.function("lower(const State& a, const Raw& x, bool edge)", "Out",
                         ["(void)edge;", *CPP.statements(op.lower, [*state, *inputs, "edge"],
                                                         outputs)]),
            f"constexpr int WORDS = {words.total};",
            conversion(total, [kinds[c] for c in total], words.counts),
        ]
    )  # fmt: skip


def conversion(total: list[int], kinds: list[str], counts: tuple[int, ...]) -> str:
    """to_words and from_words."""
    packing, unpacking, at = [], [], 0
    for c, kind, count in zip(total, kinds, counts, strict=True):
        if count == 2:
            packing.append(f"__builtin_memcpy(w + {at}, &s.s{c}, 8);")
            unpacking.append(f"__builtin_memcpy(&s.s{c}, w + {at}, 8);")
        elif kind == "f32":
            packing.append(f"w[{at}] = bits_of(s.s{c});")
            unpacking.append(f"s.s{c} = float_of(w[{at}]);")
        else:
            packing.append(f"w[{at}] = (uint32_t)s.s{c};")
            unpacking.append(f"s.s{c} = ({CPP.types[kind]})w[{at}];")
        at += count
    lines = ["INLINE void to_words(const State& s, uint32_t* w) {"]
    lines += [f"    {line}" for line in packing]
    lines += ["}", "INLINE State from_words(const uint32_t* w) {", "    State s;"]
    lines += [f"    {line}" for line in unpacking]
    return "\n".join([*lines, "    return s;", "}"])


def constants(kernel: CudaKernel) -> str:
    """The numbers that the template reads."""
    tile = kernel.tile
    words = words_of(kernel.operator.combine.output_dtypes[c] for c in kernel.total).total
    used = [kernel.leaf["input", k] for k in kernel.inputs]
    values: dict[str, object] = {
        "int INPUT_COUNT": len(kernel.inputs),
        "int OUTPUT_COUNT": len(kernel.operator.outputs),
        "int OUTER": kernel.outer,
        "int THREADS": tile.threads,
        "int ITEMS": tile.items,
        "int STAGES": tile.stages,
        "int BLOCKS_PER_PROCESSOR": tile.blocks,
        "int MODE": MODES.index(kernel.mode),
        "bool REVERSE": kernel.reverse,
        "bool EXCLUSIVE": kernel.exclusive,
        "bool HAS_INIT": kernel.init is not None,
        "bool HAS_FINAL": bool(kernel.final),
        "bool ANY_AHEAD": any(k in kernel.inputs for k in kernel.ahead),
        "bool ANY_SKEWED": any(leaf.align < 4 for leaf in used),
    }
    if isinstance(tile, LanesTile):
        values["int BLOCK_CHANNELS"] = tile.block_channels
        values["int CHANNELS"] = tile.channels
        # Looks at status words that a lane has under way: four registers for three words of state.
        values["int LOOKS"] = 8 if words <= 3 else 4 if words <= 6 else 2 if words <= 12 else 1
    else:
        values["int CHUNK"] = tile.chunk
        values["int FLIGHT"] = tile.flight
        values["int LEAD"] = tile.lead
        values["int ROUNDS"] = 5 if words <= 6 else 2 if words <= 12 else 1
    lines = [f"constexpr int {mode} = {n};" for n, mode in enumerate(MODES)]
    lines += [f"constexpr {name} = {str(value).lower()};" for name, value in values.items()]
    return "\n".join(lines)


def parameters(kernel: CudaKernel) -> str:
    """struct Params, in the order in which `scan.parameters` fills it."""

    def size(n: int) -> int:
        return max(n, 1)

    lines = []
    for role in ROLES:
        written = role in ("output", "final")
        n = len(kernel.numbers(role))
        lines.append(f"{'' if written else 'const '}char* {role}[{size(n)}];")
    lines += ["Header* header;", "char* slots;", "char* group_slots;", "u32* alarm;",
              "i64 slot_bytes;", "i64 length;", "i64 channels;"]  # fmt: skip
    outer = size(kernel.outer)
    for role in ROLES:
        n = size(len(kernel.numbers(role)))
        if role in ("input", "output"):
            lines.append(f"i64 {role}_step[{n}];")
        lines.append(f"i64 {role}_lane[{n}];")
        lines.append(f"i64 {role}_outer[{n}][{outer}];")
    lines.append(f"int outer_size[{outer}];")
    lines.append("int chains, tiles, channel_blocks, ranks, rest, radix, groups;")
    body = "\n".join(f"    {line}" for line in lines)
    return f"struct Params {{\n{body}\n}};\n{OUTER_OFFSET}"


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


def leaves(kernel: CudaKernel) -> str:
    """Input<J>, Output<J>, and what moves their scalars into Raw and out of Out."""
    op = kernel.operator
    parts = ["template <int J> struct Input;", "template <int J> struct Output;"]
    raw, outs = [], []
    edges = kernel.numbers("edge")
    in_spans, out_spans = spans(op.inputs), spans(op.outputs)
    for j, k in enumerate(kernel.inputs):
        leaf = kernel.leaf["input", k]
        memory = MEMORY_TYPES[leaf.dtype]
        edge = edges.index(k) if k in edges else -1
        parts.append(
            f"template <> struct Input<{j}> {{ typedef {memory} Memory; static constexpr int "
            f"SCALARS = {op.inputs[k].components}, ALIGN = {leaf.align}, EDGE = {edge}; "
            f"static constexpr bool ONE = {_bool(leaf.one)}, "
            f"AHEAD = {_bool(k in kernel.ahead)}; }};"
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
            f"template <> struct Output<{k}> {{ typedef {MEMORY_TYPES[leaf.dtype]} Memory; "
            f"typedef {kind} Value; static constexpr int SCALARS = {out.components}, "
            f"ALIGN = {leaf.align}; static constexpr bool ONE = false; }};"
        )
        for n, c in enumerate(out_spans[k]):
            outs.append(f"values.output{k}[v * {out.components} + {leaf.offsets[n]}] = y.y{c};")
    per = "CHANNELS" if kernel.is_lanes else "ITEMS"
    parts.append(_list("INPUTS", len(kernel.inputs)))
    parts.append(_list("OUTPUTS", len(op.outputs)))
    fields = " ".join(
        f"u32 input{j}[Cell<Input<{j}>, {per}>::WORDS];" for j in range(len(kernel.inputs))
    )
    parts.append(f"struct InputWords {{ {fields} }};")
    fields = " ".join(
        f"Output<{k}>::Value output{k}[{per} * Output<{k}>::SCALARS];"
        for k in range(len(op.outputs))
    )
    parts.append(f"struct OutputValues {{ {fields} }};")
    parts.append(_function("INLINE Raw raw_of(const InputWords& words, int v)", "Raw x;", raw, "x"))
    parts.append(
        _function("INLINE void put_outputs(OutputValues& values, int v, const Out& y)", "", outs)
    )
    parts.append(replace_edge(kernel))
    parts.append(load_init(kernel))
    parts.append(store_final(kernel))
    return "\n".join(parts)


def replace_edge(kernel: CudaKernel) -> str:
    """What leaves that are read ahead have at the last step: their edge, or zero."""
    op = kernel.operator
    edges = kernel.numbers("edge")
    lines = []
    for k, span in enumerate(spans(op.inputs)):
        if k not in kernel.ahead or k not in kernel.inputs:
            continue
        for n, c in enumerate(span):
            if c not in op.used_inputs:
                continue
            kind = CPP.types[op.lift.inputs[c]]
            if k not in edges:
                lines.append(f"x.x{c} = ({kind})0;")
                continue
            j, leaf = edges.index(k), kernel.leaf["edge", k]
            memory = MEMORY_TYPES[leaf.dtype]
            at = f"P.edge[{j}] + outer_offset(P.edge_outer[{j}], P, row)"
            value = f"((const {memory}*)({at}))[{leaf.offsets[n]}]"
            lines.append(f"x.x{c} = from_memory<{kind}>({value});")
    return _function("INLINE void replace_edge(Raw& x, const Params& P, int row)", "", lines)


def load_init(kernel: CudaKernel) -> str:
    """The state that enters a row, from memory or the identity."""
    op = kernel.operator
    kinds = op.combine.output_dtypes
    lines = []
    state_spans = spans(op.state)
    for j, k in enumerate(kernel.numbers("init")):
        leaf = kernel.leaf["init", k]
        memory = MEMORY_TYPES[leaf.dtype]
        kept = [(n, c) for n, c in enumerate(state_spans[k]) if c in kernel.total]
        if not kept:
            continue
        lines.append(
            f"const char* from{j} = P.init[{j}] + outer_offset(P.init_outer[{j}], P, row) "
            f"+ channel * P.init_lane[{j}];"
        )
        for n, c in kept:
            value = f"((const {memory}*)from{j})[{leaf.offsets[n]}]"
            lines.append(f"s.s{c} = from_memory<{CPP.types[kinds[c]]}>({value});")
    signature = "INLINE State load_init(const Params& P, int row, i64 channel)"
    return _function(signature, "State s = identity();", lines, "s")


def store_final(kernel: CudaKernel) -> str:
    """The state that leaves a row, to memory."""
    lines = []
    state_spans = spans(kernel.operator.state)
    for j, k in enumerate(kernel.final):
        leaf = kernel.leaf["final", k]
        memory = MEMORY_TYPES[leaf.dtype]
        lines.append(
            f"char* to{j} = P.final[{j}] + outer_offset(P.final_outer[{j}], P, row) "
            f"+ channel * P.final_lane[{j}];"
        )
        for n, c in enumerate(state_spans[k]):
            lines.append(f"(({memory}*)to{j})[{leaf.offsets[n]}] = to_memory<{memory}>(s.s{c});")
    signature = "INLINE void store_final(const Params& P, int row, i64 channel, const State& s)"
    return _function(signature, "", lines)


def _function(signature: str, first: str, lines: Iterable[str], result: str = "") -> str:
    body = [line for line in (first, *lines, f"return {result};" if result else "") if line]
    return "\n".join([f"{signature} {{", *(f"    {line}" for line in body), "}"])


def _list(name: str, count: int) -> str:
    return f"#define {name}(F) {' '.join(f'F({j})' for j in range(count))}"


def _bool(value: bool) -> str:
    return str(value).lower()


@functools.cache
def headers() -> dict[str, str]:
    """The handwritten files that a kernel includes."""
    found = {f.name: f for f in files(__package__).iterdir() if f.name.endswith(".cuh")}
    found["scalar.h"] = files("assocscan.engines").joinpath("scalar.h")
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}
