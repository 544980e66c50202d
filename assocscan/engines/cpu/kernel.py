"""`Kernel`, the key of one compiled CPU kernel, and its C++ source: the operator, then the lists of
ports and the constants that `scan.h` reads, then `scan.h`.

A leaf is one tensor. A port is one scalar of its elements, at a constant offset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ...program.cpp_and_triton_expressions import CPP, LIBRARY
from ...program.dtypes import CPP_MEMORY, FLOATS
from ...program.operator import Operator, spans
from ...program.operator_names import escaped
from ...program.program_builder import decode
from ...program.transforms import is_product
from ..base.cpp_and_cuda import headers_of, shared_headers

# If an operator has scalars of these kinds only, its bools are bytes, else 4 bytes (`field_types`).
NARROW = frozenset({"b1", "u8", "i8"})

# The most lanes of a staged job (rows, or segments of one row), and the unit of lanes of a direct
# job: 16 float32 are one vector of 64 bytes.
WIDE = 16
# The steps of a tile.
STEPS = 16
# Operators of at most this many instructions are unrolled over the steps of a tile.
SMALL = 48
# Packed sequences of one row that have fewer steps are scanned from memory to memory, without
# tiles, if the operator is cheap. ns per element of sums over sequences of one length, one core of
# the build machine, with tiles and without (float32): of 16 steps 5.2 and 0.7, of 256 steps 1.7 and
# 0.9, of 1024 steps 1.1 and 0.9. Where the operator calls the mathematical library, short
# sequences are scanned side by side instead (BESIDE in worker_threads.h).
SHORT = 512
# If such an operator selects, sequences of at most so many steps are scanned in runs, as the lanes
# of tiles (short_sequences.h). CPU time of the gradient of a running maximum, 10^6 sequences, two
# cores of an AMD EPYC busy with other work, 2026-11-27: of 0 to 32 steps 78 to 100 ms from memory
# to memory and 53 to 60 in runs, of 0 to 8 steps 30 and 15. A multiple of STEPS; the tables of 512
# do not fit in the first-level cache. Where the operator does not select, runs are not faster: 38
# ms in place of 22 for sums of 0 to 32.
RUN = 256
# The most lanes of a direct job. Their carries stay in the first-level cache: 2 KiB per float32
# component. Chosen by that size, not tuned.
DIRECT_LANES = 512
# The most bytes of the tiles of a direct job: jobs have fewer lanes where tiles would be larger.
# The value matters little while the tiles fit in the second-level cache: with one or three leaves
# of float32, float64 and complex64 in tiles, times of 64 to 512 KiB differ by at most 8 percent;
# 16 KiB take up to 40 percent longer.
TILE_BYTES = 1 << 17
# The largest `Kernel.cost` that is compiled: scalars per step plus operations / OPERATIONS. Seconds
# of GCC 12.2 on one core of the build machine: 4 at a cost of 200 (sums of vectors of 64), 14 at
# 400, 31 at 850 (products of 12 × 12 matrices), 61 at 1250 (14 × 14), 130 at 1600.
MAX_COST = 2000
OPERATIONS = 8


@dataclass(frozen=True)
class Access:
    """How the kernel reads or writes a leaf.

    lane: in the direct form, the distance between neighbouring lanes, in scalars; None: the leaf
        goes through a tile (`prepare.access_of`). In the staged form always 0.
    offsets: from the first component of an element to each of its components, in scalars.
    """

    dtype: torch.dtype
    lane: int | None
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """Everything that is a constant of one compiled kernel. Lengths, strides along the axis and
    between rows are run-time arguments.

    direct: the form, direct or staged (see scan.h).
    initial_leaves, final, shifted, boundary: as in a `ScanSpec`.
    access: how each leaf of `leaves` lies; None for one that is not read.
    """

    operator: Operator
    direct: bool
    exclusive: bool
    initial_leaves: tuple[int, ...] | None
    final: tuple[int, ...]
    shifted: tuple[int, ...]
    boundary: tuple[int, ...]
    access: tuple[Access | None, ...]

    @property
    def carry_components(self) -> list[int]:
        """The state components that a sequential carry must hold."""
        return self.operator.carry_components(self.final)

    @property
    def aggregate_components(self) -> list[int]:
        """The state components that the aggregate of several steps must hold."""
        return self.operator.aggregate_components(self.final)

    @property
    def is_small(self) -> bool:
        """Whether the operator is short. Then the steps of a tile are unrolled, and the operator's
        text stands wherever it is needed. A longer one is called, computes all lanes of a step,
        reads masks of bytes through tiles, and is compiled with less optimisation."""
        return self.operations <= SMALL

    @property
    def short(self) -> int:
        """Sequences of fewer steps are scanned without tiles, where a job is one row."""
        return 0 if self.direct or self.run or not is_cheap(self.operator) else SHORT

    @property
    def run(self) -> int:
        """Sequences of at most so many steps are scanned in runs, where a job is one row."""
        return RUN if not self.direct and is_cheap(self.operator) and selects(self.operator) else 0

    @property
    def scalars(self) -> int:
        """The scalars of one step: inputs that are read, the aggregate's components, outputs."""
        op = self.operator
        return len(op.used_inputs) + len(self.aggregate_components) + len(op.lower.outputs)

    @property
    def operations(self) -> int:
        op = self.operator
        return sum(len(p.instructions) for p in (op.lift, op.combine, op.lower))

    @property
    def cost(self) -> int:
        """A measure of the kernel's size; the time to compile grows like cost ** 1.6."""
        return self.scalars + self.operations // OPERATIONS

    @property
    def tiled(self) -> list[tuple[str, int]]:
        """The leaves that go through a tile: their lanes have no single small distance."""
        found = zip(self.leaves, self.access, strict=False)
        return [name for name, a in found if a is not None and a.lane is None]

    @property
    def lanes(self) -> int:
        """The most lanes of a job."""
        if not self.direct:
            return WIDE
        op, step = self.operator, 0
        for role, k in self.tiled:
            if role in ("input", "output"):
                leaf = (op.inputs if role == "input" else op.outputs)[k]
                step += leaf.components * (4 if leaf.scalar == "b1" else int(leaf.scalar[1:]) // 8)
        most = TILE_BYTES // (STEPS * step) if step else DIRECT_LANES
        return max(WIDE, min(DIRECT_LANES, most // WIDE * WIDE))

    @property
    def leaves(self) -> list[tuple[str, int]]:
        """The tensors in the order in which the kernel takes them: (role, number)."""
        op = self.operator
        roles: list[tuple[str, Iterable[int]]] = [
            ("input", range(len(op.inputs))),
            ("output", range(len(op.outputs))),
            ("init", self.initial_leaves or ()),
            ("final", self.final),
            ("boundary", self.boundary),
        ]
        return [(role, k) for role, numbers in roles for k in numbers]


def is_cheap(op: Operator) -> bool:
    """Whether a step is a few vector instructions, without calls of the mathematical library."""
    instructions = (*op.lift.instructions, *op.combine.instructions)
    return len(instructions) <= SMALL and not any(i.op in LIBRARY for i in instructions)


def selects(op: Operator) -> bool:
    """Whether a step chooses between values, which a compiler may make a branch."""
    programs = op.lift, op.combine, op.lower
    return any(i.op == "where" for p in programs for i in p.instructions)


def forgets(op: Operator) -> bool:
    """Whether combine computes with floats and selects, by a flag of the state, say, or by a count:
    what is NaN or infinite within an aggregate may be left out further on."""
    steps = op.combine.instructions
    computes = any(i.op in ("add", "sub", "mul", "div") and i.dtype in FLOATS for i in steps)
    return computes and any(i.op == "where" for i in steps)


@functools.lru_cache(maxsize=1024)
def source(kernel: Kernel) -> str:
    """The whole translation unit."""
    return "\n".join(
        [
            '#include "scalar.h"',
            operator_source(kernel.operator, kernel.carry_components, kernel.aggregate_components),
            ports(kernel),
            '#include "scan.h"',
            "",
        ]
    )


def operator_source(op: Operator, carry: list[int], aggregate: list[int]) -> str:
    """The structs and functions of an operator; `Monoid.source("cpp")` shows them to users.

    carry: the state components that a sequential carry holds; aggregate: those of a chunk.
    """
    kinds = op.combine.output_dtypes
    used = sorted(op.used_inputs)
    raw = op.lift.inputs
    types = field_types(op)
    state_fields = [(types[kinds[c]], f"s{c}") for c in aggregate]
    carry_fields = [(types[kinds[c]], f"s{c}") for c in carry]
    left, right = ([field(f"{side}.s{c}", kinds[c]) for c in range(op.width)] for side in "ab")
    inputs = [field(f"x.x{c}", kind) for c, kind in enumerate(raw)]
    outputs = [f"y.y{c}" for c in range(len(op.lower.outputs))]
    constants = op.identity or tuple(0 for _ in kinds)
    results = [f"y.s{c}" for c in aggregate]
    advanced = [f"y.s{c}" for c in carry]
    start = [f"y.s{c} = {CPP.literal(decode(constants[c]), kinds[c])};" for c in carry]
    both = left + right
    parts = [
        f"// {escaped(op.name)}",
        CPP.struct("State", state_fields),
        CPP.struct("Live", carry_fields),
        CPP.struct("Raw", [(types[raw[c]], f"x{c}") for c in used]),
        CPP.struct("Out", [(types[d], f"y{c}") for c, d in enumerate(op.lower.output_dtypes)]),
        CPP.function("lift(const Raw& x)", "State",
                     CPP.statements(op.lift.select(aggregate), inputs, results)),
        CPP.function("combine(const State& a, const State& b)", "State",
                     CPP.statements(op.combine.select(aggregate), both, results)),
        CPP.function("advance(const Live& a, const State& b)", "Live",
                     CPP.statements(op.combine.select(carry), both, advanced)),
        CPP.function("begin(const State& s)", "Live", [f"y.s{c} = s.s{c};" for c in carry]),
        CPP.function("identity()", "Live", start),
        CPP.function("lower(const Live& a, const Raw& x, bool edge)", "Out",
                     ["(void)edge;", *CPP.statements(op.lower, [*left, *inputs, "edge"], outputs)]),
    ]  # fmt: skip
    return "\n".join(parts)


def field_types(op: Operator) -> dict[str, str]:
    """The C++ type of each kind of scalar. A bool is an integer 0 or 1: of 1 byte if all scalars of
    the operator are bytes or bools, else of 4 bytes.

    GCC 12.2 does not vectorise bool: the operator "last valid value" took 9 ns per element with
    bool and 0.95 with bytes (4 × 8192 × 256 floats). Where bytes and floats are mixed, it uses
    vectors of two floats only: a Kalman filter of three states (64 × 4096) took 30 ms with bytes
    and 10 with 32-bit integers, which also compile in 4 seconds instead of 15.
    """
    kinds = {*op.lift.inputs, *op.combine.output_dtypes, *op.lower.output_dtypes}
    return CPP.types | {"b1": "uint8_t" if kinds <= NARROW else "int32_t"}


def field(name: str, kind: str) -> str:
    """The C++ expression that reads a field as a value of its kind."""
    return f"(bool){name}" if kind == "b1" else name


def ports(kernel: Kernel) -> str:
    """The lists of ports (macros that apply F to each port) and constants that `scan.h` reads."""
    op = kernel.operator
    order = {leaf: n for n, leaf in enumerate(kernel.leaves)}
    carry, aggregate = kernel.carry_components, kernel.aggregate_components
    kinds = op.combine.output_dtypes
    types = field_types(op)

    def access(role: str, k: int) -> Access:
        found = kernel.access[order[role, k]]
        assert found is not None
        return found

    def place(role: str, k: int, part: int) -> str:
        a = access(role, k)
        return f"{CPP_MEMORY[a.dtype]}, {order[role, k]}, {a.offsets[part]}, {a.lane or 0}"

    def boundary(k: int, part: int) -> str:
        if k not in kernel.boundary:
            return "-1, char, 0, 0"
        a = access("boundary", k)
        memory = CPP_MEMORY[a.dtype]
        return f"{order['boundary', k]}, {memory}, {a.offsets[part]}, {a.lane or 0}"

    inputs = [
        f"F(x{c}, {types[op.lift.inputs[c]]}, {place('input', k, n)}, {boundary(k, n)})"
        for k, span in enumerate(spans(op.inputs))
        for n, c in enumerate(span)
        if c in op.used_inputs
    ]
    outputs = [
        f"F(y{c}, {types[op.outputs[k].scalar]}, {place('output', k, n)})"
        for k, span in enumerate(spans(op.outputs))
        for n, c in enumerate(span)
    ]

    def states(role: str, chosen: Sequence[int], kept: Callable[[int], bool]) -> list[str]:
        parts = spans(op.state)
        return [
            f"F(s{c}, {types[kinds[c]]}, {place(role, k, n)})"
            for k in chosen
            for n, c in enumerate(parts[k])
            if kept(c)
        ]

    lists = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "LIVE": [f"F(s{c}, {types[kinds[c]]})" for c in carry],
        "STATE": [f"F(s{c}, {types[kinds[c]]})" for c in aggregate],
        "INITS": states("init", kernel.initial_leaves or (), lambda c: c in carry),
        "FINALS": states("final", kernel.final, lambda c: True),
    }
    lines = [f"#define {name}(F) {' '.join(entries)}" for name, entries in lists.items()]
    shifted = ", ".join(
        "true" if role == "input" and k in kernel.shifted else "false" for role, k in kernel.leaves
    )
    has_edge = bool(kernel.shifted) or len(op.lower.inputs) - 1 in op.lower.used_inputs
    constants = {
        "bool DIRECT": kernel.direct,
        "bool EXCLUSIVE": kernel.exclusive,
        "bool HAS_INIT": kernel.initial_leaves is not None,
        "bool HAS_EDGE": has_edge,
        "bool HAS_FINAL": bool(kernel.final),
        "bool REDUCES": not op.outputs and not has_edge,
        "bool SMALL": kernel.is_small,
        "bool SEGMENTED": not op.is_walked,
        "bool PRODUCT": is_product(op),
        "bool FORGETS": forgets(op),
        "int SHORT": kernel.short,
        "int RUN": kernel.run,
        "int WIDE": WIDE,
        "int STEPS": STEPS,
        "int LANES": kernel.lanes,
        "int LEAVES": len(kernel.leaves),
        "int SLOTS": len(kernel.tiled),
    }
    lines.extend(f"constexpr {name} = {str(value).lower()};" for name, value in constants.items())
    lines.append(f"constexpr bool SHIFTED[LEAVES] = {{{shifted}}};")
    moves = ", ".join(str(role in ("input", "output")).lower() for role, _ in kernel.leaves)
    lines.append(f"constexpr bool MOVES[LEAVES] = {{{moves}}};")
    tiled = kernel.tiled
    slots = ", ".join(str(tiled.index(n) if n in tiled else -1) for n in kernel.leaves)
    lines.append(f"constexpr int SLOT[LEAVES] = {{{slots}}};")
    return "\n".join(lines)


def headers() -> dict[str, str]:
    """The handwritten headers that a kernel includes, by file name."""
    found = {**shared_headers(), **headers_of("assocscan.engines.cpu", ".h")}
    return dict(sorted(found.items()))
