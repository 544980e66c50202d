"""The C++ source of kernels over vectors: the operator's steps, the lists of ports and the
constants that `vector_scan.h` reads, then `vector_scan.h`.

A leaf is one tensor. A port is one scalar of its elements. Names in the generated code:

    s  the tiles: inputs x0, x1, …, outputs y0, …, cotangents g0, …, arrays of a step p…, q…, r…, z…
    c  the carry, forward: its parts s0, s1, …       t, n, w  the step, the state, the lane
    b, a  the carry before and after a step          m  the cotangent of the carry
    e  the kept values e0, … (f0, … of a first step)  d  the gradients d0, d1, …
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch

from ....autodiff.vector_adjoint import backward_step
from ....program.cpp_and_triton_expressions import CPP
from ....program.dtypes import CPP_MEMORY
from ....program.operator import Leaf
from ....program.operator_names import escaped
from ....program.program_builder import Program
from ....program.vectors.vector_operator import part_dtypes, part_spans, parts
from ...base.layout import scalar_size
from .declarations import (
    Statement,
    adds_to,
    array,
    assigns,
    indented,
    index,
    port,
    ports,
    struct,
)
from .emit import TYPES, Emission
from .kernel import (
    WIDTH,
    Access,
    AnyKernel,
    BackwardKernel,
    ForwardKernel,
    GradientAccess,
    chunk_steps,
)

Step = Callable[[bool], list[str]]


@functools.lru_cache(maxsize=512)
def source(kernel: AnyKernel) -> str:
    """The whole translation unit."""
    text = ForwardSource(kernel) if isinstance(kernel, ForwardKernel) else BackwardSource(kernel)
    return "\n".join([*text.lines(), '#include "vector_scan.h"', ""])


class KernelSource:
    """What the sources of forward and backward kernels have in common."""

    def __init__(self, kernel: AnyKernel, carry: list[int], first: bool) -> None:
        self.op, self.carry, self.first = kernel.op, carry, first
        self.order = {leaf: n for n, leaf in enumerate(kernel.leaves)}
        self.used, self.inputs = kernel.used, kernel.inputs
        self.state_kinds = part_dtypes(self.op.state)
        self.arrays: list[str] = []  # that steps need, declared in the struct Tiles

    def emitted(
        self, program: Program, input_varies: Sequence[bool], inputs: Sequence[str],
        statements: Sequence[Statement], varies: Sequence[bool], prefix: str,
    ) -> list[str]:  # fmt: skip
        """The statements of a step, whose arrays are added to `arrays`."""
        step = Emission(program, input_varies, inputs, statements, varies, prefix)
        self.arrays += step.fields()
        return step.statements()

    def head(self, backward: bool) -> list[str]:
        constants = {
            "int STATES": self.op.size, "int WIDTH": WIDTH, "int CHUNK": chunk_steps(self.op.size),
            "int LEAVES": len(self.order), "int CARRIES": self.order.get(("carries", 0), -1),
            "bool FIRST": str(self.first).lower(),
        }  # fmt: skip
        return [
            f"// {escaped(self.op.name)}",
            f"#define BACKWARD {int(backward)}",
            '#include "scalar.h"',
            *(f"constexpr {name} = {value};" for name, value in constants.items()),
            '#include "vector_tiles.h"',
        ]

    def part_fields(self) -> Iterable[tuple[int, str, int, Leaf, Access, int]]:
        """Of each part of the inputs that is read: its number, kind, leaf and place in it."""
        for k, span in enumerate(part_spans(self.op.inputs)):
            for n, c in enumerate(span):
                access = self.inputs[k]
                if c in self.used and access is not None:
                    yield c, self.op.inputs[k].scalar, k, self.op.inputs[k], access, n

    def input_ports(self) -> list[str]:
        return [
            port(f"x{c}", kind, access.dtype, self.order["input", k], n,
                 access.time, self.op.varies(leaf), access.lane)
            for c, kind, k, leaf, access, n in self.part_fields()
        ]  # fmt: skip

    def input_fields(self) -> list[str]:
        return [
            array(f"x{c}", kind, access.time, self.op.varies(leaf), access.lane)
            for c, kind, _, leaf, access, _ in self.part_fields()
        ]

    def input_expressions(self) -> list[str]:
        """Of all parts of the inputs: those that are not read have the expression `unread`."""
        found = ["unread"] * len(self.op.step_inputs[self.op.width :])
        for c, _, _, leaf, access, _ in self.part_fields():
            found[c] = f"s.x{c}{index(access.time, self.op.varies(leaf), access.lane)}"
        return found

    def carry_struct(self, name: str, carry: Sequence[int]) -> str:
        kinds, varies = self.state_kinds, self.op.state_varies
        fields = [array(f"s{c}", kinds[c], None, varies[c], True) for c in carry]
        return struct(f"alignas(64) {name}", fields)

    def carried(self, name: str) -> list[str]:
        """The expressions of the parts of the carry."""
        return [f"{name}.s{c}[{'n' if self.op.state_varies[c] else 0}][w]" for c in self.carry]

    @property
    def carry_varies(self) -> list[bool]:
        return [self.op.state_varies[c] for c in self.carry]

    def carry_expressions(self, name: str) -> list[str]:
        """Of all parts of the state."""
        known = dict(zip(self.carry, self.carried(name), strict=True))
        return [known.get(c, "unread") for c in range(self.op.width)]

    def carry_ports(
        self, role: str, leaves: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[str]:
        spans = part_spans(self.op.state)
        return [
            f"F(s{c}, {TYPES[self.state_kinds[c]]}, {CPP_MEMORY[dtype]}, {self.order[role, k]}, "
            f"{n * scalar_size(dtype)}, {int(self.op.state_varies[c])})"
            for k, dtype in zip(leaves, dtypes, strict=True)
            for n, c in enumerate(spans[k])
            if c in self.carry
        ]


class ForwardSource(KernelSource):
    """The source of a forward kernel."""

    def __init__(self, kernel: ForwardKernel) -> None:
        super().__init__(kernel, kernel.carry, kernel.first)
        self.kernel = kernel

    def lines(self) -> list[str]:
        op, kernel = self.op, self.kernel
        kinds, outputs, fields = part_dtypes(op.outputs), [], []
        for k, span in enumerate(part_spans(op.outputs)):
            leaf = op.outputs[k]
            for n, c in enumerate(span):
                fields.append(array(f"y{c}", kinds[c], True, op.varies(leaf), True))
                outputs.append(port(f"y{c}", kinds[c], leaf.dtype, self.order["output", k], n,
                                    True, op.varies(leaf), True))  # fmt: skip
        initial = [op.state[k].accumulator for k in kernel.initial]
        final = [op.state[k].accumulator for k in kernel.final]
        lists = {
            "INPUTS": self.input_ports(),
            "OUTPUTS": outputs,
            "INITS": self.carry_ports("init", kernel.initial, initial),
            "FINALS": self.carry_ports("final", kernel.final, final),
        }
        steps = [
            *(["    if constexpr (first) {", *self.step(True), "        return;", "    }"]
              if kernel.first else []),
            *self.step(False),
        ]  # fmt: skip
        return [
            *self.head(False),
            self.carry_struct("Carry", self.carry),
            "typedef Carry Saved;",
            struct("Tiles", [*self.input_fields(), *fields, *self.arrays]),
            *ports(lists),
            *self.identity(),
            "template <bool first> static inline void step(Tiles& s, Carry& c, int t) {",
            "    (void)t;",
            *steps,
            "}",
        ]  # fmt: skip

    def identity(self) -> list[str]:
        values = self.op.identity_values
        body = [
            f"{place} = {CPP.literal(values[c], self.state_kinds[c])};"
            for c, place in zip(self.carry, self.carried("c"), strict=True)
        ]
        return [
            "static void identity(Carry& c) {",
            "    for (int n = 0; n < STATES; ++n)",
            "        for (int w = 0; w < WIDTH; ++w) {",
            *("            " + line for line in body),
            "        }",
            "}",
        ]

    def step(self, first: bool) -> list[str]:
        op = self.op
        statements = [assigns(place) for place in self.carried("c")]
        varies = self.carry_varies
        for k, span in enumerate(part_spans(op.outputs)):
            for c in span:
                states = op.varies(op.outputs[k])
                statements.append(assigns(f"s.y{c}{index(True, states, True)}"))
                varies.append(states)
        inputs = [*self.carry_expressions("c"), *self.input_expressions()]
        step, prefix = self.kernel.step(first), "q" if first else "p"
        lines = self.emitted(step, op.step_varies, inputs, statements, varies, prefix)
        return indented(lines, 2 if first else 1)


class BackwardSource(KernelSource):
    """The source of a backward kernel."""

    def __init__(self, kernel: BackwardKernel) -> None:
        super().__init__(kernel, kernel.adjoint.carry, kernel.adjoint.first)
        self.kernel, self.adjoint = kernel, kernel.adjoint

    def cotangent_parts(self) -> Iterable[tuple[str, str, int, Leaf, Access, int]]:
        number = 0
        for k, leaf, access in zip(
            self.adjoint.cotangents, self.adjoint.cotangent_leaves, self.kernel.cotangents,
            strict=True,
        ):  # fmt: skip
            for n in range(parts(leaf)):
                yield f"g{number}", leaf.scalar, k, leaf, access, n
                number += 1

    def gradient_parts(self) -> Iterable[tuple[str, str, int, Leaf, GradientAccess, int]]:
        number = 0
        for k, leaf, access in zip(
            self.adjoint.wanted, self.adjoint.gradient_leaves, self.kernel.gradients, strict=True
        ):
            for n in range(parts(leaf)):
                yield f"d{number}", leaf.scalar, k, leaf, access, n
                number += 1

    def lines(self) -> list[str]:
        adjoint, varies = self.adjoint, self.op.varies
        cotangents = list(self.cotangent_parts())
        lists: dict[str, list[str]] = {
            "INPUTS": [
                *self.input_ports(),
                *(port(name, kind, a.dtype, self.order["cotangent", k], n,
                       a.time, varies(leaf), a.lane)
                  for name, kind, k, leaf, a, n in cotangents),
            ],
            "SEEDS": self.carry_ports("seed", adjoint.seeded, self.kernel.seed_dtypes),
            "ENDS": self.carry_ports(
                "end", self.kernel.ends, [self.op.state[k].accumulator for k in self.kernel.ends]
            ),
        }  # fmt: skip
        structs: dict[str, list[str]] = {"TILES": [], "TIMES": [], "LANES": [], "UNITS": []}
        lists.update({name: [] for name in structs})
        for name, kind, k, leaf, a, n in self.gradient_parts():
            where, states = gradient_list(a), varies(leaf)
            structs[where].append(array(name, kind, a.time, states, True))
            lists[where].append(
                f"F({name}, {TYPES[kind]}, {CPP_MEMORY[a.dtype]}, {self.order['gradient', k]}, "
                f"{n * scalar_size(a.dtype)}, {int(states)}, {int(a.adds)})"
            )
        tiles = self.input_fields() + [
            array(name, kind, a.time, varies(leaf), a.lane)
            for name, kind, _, leaf, a, _ in cotangents
        ]
        kept = [array(name, kind, True, states, True) for name, kind, states in self.kept_values()]
        recompute, pull = self.both(self.recompute), self.both(self.pull)
        return [
            *self.head(True),
            self.carry_struct("Carry", self.carry),
            self.carry_struct("Saved", adjoint.saved_parts),
            struct("Tiles", [*tiles, *self.arrays]),
            struct("Kept", kept),
            struct("TileGradients", structs["TILES"]),
            struct("TimeSums", structs["TIMES"]),
            struct("LaneSums", structs["LANES"]),
            struct("UnitSums", structs["UNITS"]),
            struct(
                "Sums",
                [
                    "TileGradients& tiles;",
                    "TimeSums& times;",
                    "LaneSums& lanes;",
                    "UnitSums& units;",
                ],
            ),
            *ports(lists),
            "static inline void restore(Carry& c, const Saved& s) {",
            "    (void)c; (void)s;",
            *(f"    std::memcpy(c.s{c}, s.s{c}, sizeof c.s{c});" for c in self.carry),
            "}",
            "template <bool first>",
            "static inline void recompute(Tiles& s, Carry* h, Kept& e, int t) {",
            "    const Carry& b = h[t];",
            "    Carry& a = h[t + 1];",
            "    (void)b; (void)a; (void)e;",
            *recompute,
            "}",
            "template <bool first>",
            "static inline void pull(",
            "    Tiles& s, const Carry* h, const Kept& e, Carry& m, Sums& d, int t",
            ") {",
            "    const Carry& b = h[t];",
            "    const Carry& a = h[t + 1];",
            "    (void)b; (void)a; (void)e;",
            *pull,
            "}",
        ]

    def both(self, step: Step) -> list[str]:
        if not self.first:
            return step(False)
        return ["    if constexpr (first) {", *indented(step(True), 1), "        return;", "    }",
                *step(False)]  # fmt: skip

    def kept_values(self, first: bool | None = None) -> list[tuple[str, str, bool]]:
        """The name, kind and variation of each kept value, of one kind of step or of both."""
        found = []
        for is_first in ((False, True) if self.first else (False,)) if first is None else (first,):
            kept = backward_step(self.adjoint, is_first).kept
            prefix = "f" if is_first else "e"
            found += [(f"{prefix}{k}", kind, varies) for k, (kind, varies) in enumerate(kept)]
        return found

    def recompute(self, first: bool) -> list[str]:
        step, kept = backward_step(self.adjoint, first), self.kept_values(first)
        statements = [assigns(place) for place in self.carried("a")]
        statements += [assigns(f"e.{name}{index(True, states, True)}") for name, _, states in kept]
        varies = [*self.carry_varies, *(states for _, _, states in kept)]
        inputs = [*self.carry_expressions("b"), *self.input_expressions()]
        prefix = "q" if first else "p"
        lines = self.emitted(
            step.recomputed, self.op.step_varies, inputs, statements, varies, prefix
        )
        return indented(lines, 1)

    def pull(self, first: bool) -> list[str]:
        step, kept = backward_step(self.adjoint, first), self.kept_values(first)
        inputs = [
            *self.carry_expressions("b"),
            *self.input_expressions(),
            *self.carried("a"),
            *(f"s.{name}{index(a.time, self.op.varies(leaf), a.lane)}"
              for name, _, _, leaf, a, _ in self.cotangent_parts()),
            *self.carried("m"),
            *(f"e.{name}{index(True, states, True)}" for name, _, states in kept),
        ]  # fmt: skip
        statements = [assigns(place) for place in self.carried("m")]
        varies = self.carry_varies
        for name, _, _, leaf, access, _ in self.gradient_parts():
            where, states = gradient_list(access), self.op.varies(leaf)
            place = f"d.{where.lower()}.{name}{index(access.time, states, True)}"
            statements.append(assigns(place) if where == "TILES" else adds_to(place))
            varies.append(states)
        prefix = "z" if first else "r"
        lines = self.emitted(step.pulled, step.pulled_varies, inputs, statements, varies, prefix)
        return indented(lines, 1)


def gradient_list(access: GradientAccess) -> str:
    """In which struct a gradient is gathered, and in which list of ports it stands."""
    return {(True, True): "TILES", (True, False): "TIMES", (False, True): "LANES",
            (False, False): "UNITS"}[access.time, access.lane]  # fmt: skip
