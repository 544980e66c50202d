"""Triton source of a scan over matrices.

    find the chain, its bounds and its carry
    step by step:  load → combine → store

One program walks one chain; every leaf is a tile of the element's own shape, and the carry stays in
registers. Products are `tl.dot(…, input_precision="ieee")`: float32 as exact as on the CPU, never
TF32. With 8 terms, which `tl.dot` does not take in every version, they are broadcast products and
their sum. That sum is over the first axis, because Triton rewrites the other orders to a dot whose
precision one cannot choose.

On NVIDIA GPUs a float32 dot loads both operands whole into registers, which spills from 64 terms on
(sm_90, 64×64×64, 8 warps: 255 registers and 368 bytes of stack per thread). Longer products are
summed in slices (`slice`), in a loop that reads its operands from memory: leaves of the element
where they are, everything else, the carry included, from a few KB of scratch per program, which
the caches hold. Barriers separate its writes from its reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ....program.cpp_and_triton_expressions import TRITON
from ....program.dtypes import TRITON_MEMORY
from ....program.matrix_operator import Step
from ..emitter import Emitter, pointer, stride_name
from ..source import header
from .kernel import MatrixKernel, TilePort

# The fewest terms that `tl.dot` takes in every version from 3.6 on.
LEAST_TERMS = 16


@functools.lru_cache(maxsize=1024)
def source(kernel: MatrixKernel) -> str:
    """The whole module: the kernel `scan`."""
    return header(kernel.operator.name) + f"\n\n{_Body(kernel).text()}"


class _Body(Emitter):
    """The kernel function of one `MatrixKernel`.

    Names in the text, with the number of a leaf: x element, h carry, g carry after the step; v0,
    v1, … are values of `combine`. The list [c] is that of the carry's leaves.
    """

    kernel: MatrixKernel

    def __init__(self, kernel: MatrixKernel) -> None:
        super().__init__(kernel, {"c": kernel.carry_leaves})
        self.op = kernel.operator
        self.program, self.shapes = self.op.combine, self.op.combine.shapes
        self.kind = "f64" if self.op.accumulator == torch.float64 else "f32"
        self.dtype = TRITON.types[self.kind]
        self.count = len(self.op.state)

    # The kernel, top down.

    def text(self) -> str:
        self.find_chain()
        self.find_bounds()
        self.find_leaves()
        self.enter()
        with self.block("for q in range(start, count):"):
            self.step()
        for k in self.kernel.final:
            self.store("final", k, self.at("final", k), f"h{k}")
        pointers = [pointer(role, k) for role, k in self.kernel.pointers]
        return self.function(pointers, ["offsets"] if self.kernel.packed else [])

    def find_chain(self) -> None:
        """Which chain this program has: the index of each outer dimension, and its sequence."""
        self.find_program()
        if self.kernel.scratch:
            size = self.kernel.scratch_size
            self(f"scratch = scratch0_ptr + tl.cast(index, tl.int64) * {size}")
        if self.kernel.packed:
            self.split_off("sequence", "sequences")
        self.split_outer()

    def find_bounds(self) -> None:
        """begin and count: which part of the axis is ours."""
        if self.kernel.packed:
            self.load_offsets("begin", "end")
            self("count = tl.maximum(end - begin, 0)")
        else:
            self("count = length")

    def find_leaves(self) -> None:
        """Where each leaf's step 0 is for our chain, and its element's tile from there."""
        sizes = {n for _, _, port in self.kernel.ports for n in port.shape}
        sizes |= {n for value in self.kernel.scratch for n in self.shapes[value]}
        for n in sorted(sizes):
            self(f"i{n} = {self.range(n)}")
        if any(self.kernel.is_sliced(v) for v in self.kernel.needed):
            self(f"terms = {self.range(self.kernel.slice)}")
        for role, k, port in self.kernel.ports:
            self(f"{role}{k}_at = {' + '.join([pointer(role, k), *self.terms(role, k, port)])}")
            indices = [f"i{n}" for n in port.shape]
            self(f"{role}{k}_tile = {offsets(indices, self.element_strides(role, k))}")

    def range(self, n: int) -> str:
        return f"tl.arange(0, {n}).to(tl.int64)" if self.kernel.wide else f"tl.arange(0, {n})"

    def terms(self, role: str, k: int, port: TilePort) -> list[str]:
        found = self.outer_terms(role, k, port.outer)
        if self.kernel.packed and role in ("init", "final"):
            found.append(f"sequence * {stride_name(role, k, 'sequence')}")
        return found

    def element_strides(self, role: str, k: int) -> list[str]:
        port = self.kernel.port[role, k]
        return [
            stride_name(role, k, f"element{d}") if s is None else str(s)
            for d, s in enumerate(port.element)
        ]

    def at(self, role: str, k: int, t: str | None = None) -> str:
        """Where a leaf is, at place t on the axis."""
        step = self.kernel.port[role, k].step
        if t is None or step == 0:
            return f"{role}{k}_at"
        return f"{role}{k}_at + {t}" + ("" if step == 1 else f" * {stride_name(role, k, 'step')}")

    def load(self, role: str, k: int, t: str | None = None) -> str:
        return self.cast(
            f"tl.load({self.at(role, k, t)} + {role}{k}_tile)", self.kernel.port[role, k].dtype
        )

    def cast(self, value: str, memory: torch.dtype) -> str:
        return value if memory == self.op.accumulator else f"{value}.to({self.dtype})"

    def store(self, role: str, k: int, at: str, value: str) -> None:
        memory = TRITON_MEMORY[self.kernel.port[role, k].dtype]
        self(f"tl.store({at} + {role}{k}_tile, {value}.to({memory}))")

    def store_outputs(self, t: str) -> None:
        for k, leaf in enumerate(self.op.shown):
            self.store("output", k, self.at("output", k, t), f"h{leaf}")

    def enter(self) -> None:
        """The carry before step `start`: what entered, or the first element."""
        kernel = self.kernel
        for k in kernel.carry_leaves:
            if kernel.start != "fresh":
                self(f"h{k} = {self.load('init', k)}")
            elif kernel.fills:
                self(f"h{k} = {self.load('identity', k)}")
            else:
                self(f"h{k} = tl.full({list(self.op.state[k].shape)}, 0, {self.dtype})")
        if kernel.start == "given":
            self("start = 0")
        elif kernel.start == "fresh":
            self("start = 1")
            self.take_first()
        else:
            self(f"start = tl.cast(tl.load(fresh0_ptr + sequence), {self.index})")
            with self.block("if start > 0:"):
                self.take_first()
        self.keep_carry()

    def take_first(self) -> None:
        """The first element is the carry, as it is."""
        with self.block("if count > 0:"):
            self(f"first = {self.place('0', 'count')}")
            if self.kernel.exclusive:
                self.store_outputs("first")
            for k in self.kernel.carry_leaves:
                self(f"h{k} = {self.load('input', k, 'first')}")
            if not self.kernel.exclusive:
                self.store_outputs("first")

    def keep_carry(self) -> None:
        """The carry's leaves that sliced products read, in scratch."""
        kept = [k for k in self.kernel.scratch if k < self.count]
        for k in kept:
            self.keep(k, f"h{k}")
        if kept:
            self("tl.debug_barrier()")

    def keep(self, value: int, name: str) -> None:
        rows, columns = self.shapes[value]
        tile = offsets([f"i{rows}", f"i{columns}"], [str(columns), "1"])
        self(f"tl.store(scratch + {self.kernel.scratch[value]} + {tile}, {name})")

    # One step.

    def step(self) -> None:
        self(f"t = {self.place('q', 'count')}")
        for k in range(self.count):
            if self.count + k in self.kernel.tiles:
                self(f"x{k} = {self.load('input', k, 't')}")
        if self.kernel.exclusive:
            self.store_outputs("t")
        results = self.combine()
        if self.kernel.scratch:
            self("tl.debug_barrier()")
        for k, result in zip(self.kernel.carry_leaves, results, strict=True):
            self(f"g{k} = {result}")
        self("h[c] = g[c]")
        self.keep_carry()
        if not self.kernel.exclusive:
            self.store_outputs("t")

    def combine(self) -> list[str]:
        """The carry ∘ the element: the names of the carried leaves' new values."""
        names = {k: f"h{k}" for k in range(self.count)}
        names.update({self.count + k: f"x{k}" for k in range(self.count)})
        kernel = self.kernel
        for number, step in enumerate(self.program.steps, 2 * self.count):
            if number not in kernel.tiles or number not in kernel.needed:
                continue
            names[number] = f"v{number}"
            if kernel.is_sliced(number):
                self.sliced_product(number, step)
            else:
                operands = [names[a] for a in step.arguments]
                self(f"v{number} = {self.expression(step, operands)}")
            if number in kernel.scratch:
                self.keep(number, f"v{number}")
                self("tl.debug_barrier()")
        return [names[self.program.outputs[k]] for k in kernel.carry_leaves]

    def expression(self, step: Step, names: Sequence[str]) -> str:
        shapes = [self.shapes[a] for a in step.arguments]
        match step.op:
            case "dot":
                return self.product(names, shapes)
            case "add" | "sub" | "mul":
                sign = {"add": "+", "sub": "-", "mul": "*"}[step.op]
                rank = len(step.shape)
                a, b = (
                    f"{name}[None, :]" if len(shape) < rank else name
                    for name, shape in zip(names, shapes, strict=True)
                )
                return f"{a} {sign} {b}"
            case "scale" | "shift":
                sign = "*" if step.op == "scale" else "+"
                return f"{names[0]} {sign} {TRITON.literal(step.number, self.kind)}"
            case "neg":
                return f"-{names[0]}"
            case "trans":
                return f"tl.trans({names[0]})"
            case "sum":
                return f"tl.sum({names[0]}, {step.axis})"
            case _:
                return f"tl.expand_dims({names[0]}, {step.axis})"

    def product(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        a, b = names
        (rows, terms), (_, columns) = shapes
        if terms < LEAST_TERMS or min(rows, columns) < 8:
            return f"tl.sum(tl.trans({a})[:, :, None] * {b}[:, None, :], 0)"
        return f'tl.dot({a}, {b}, input_precision="ieee", out_dtype={self.dtype})'

    def sliced_product(self, number: int, step: Step) -> None:
        """A product summed in slices of its terms, both factors read from memory."""
        (rows, terms), (_, columns) = (self.shapes[a] for a in step.arguments)
        size, stages = self.kernel.slice, max(self.kernel.tile.stages, 1)
        left, right = (self.factor(a) for a in step.arguments)
        self(f"v{number} = tl.full([{rows}, {columns}], 0, {self.dtype})")
        with self.block(f"for s in tl.range(0, {terms}, {size}, num_stages={stages}):"):
            for name, (base, strides, memory), indices in (
                ("l", left, [f"i{rows}", "(s + terms)"]),
                ("r", right, ["(s + terms)", f"i{columns}"]),
            ):
                value = f"tl.load({base} + {offsets(indices, strides)})"
                self(f"{name}{number} = {self.cast(value, memory)}")
            self(
                f"v{number} = tl.dot(l{number}, r{number}, v{number}, "
                f'input_precision="ieee", out_dtype={self.dtype})'
            )

    def factor(self, argument: int) -> tuple[str, list[str], torch.dtype]:
        """Where a factor lies: its first scalar, its strides by row and column, its dtype."""
        value, transposed = self.kernel.factor(argument)
        if self.kernel.is_element(value):
            k = value - self.count
            base, strides = self.at("input", k, "t"), self.element_strides("input", k)
            memory = self.kernel.port["input", k].dtype
        else:
            base = f"scratch + {self.kernel.scratch[value]}"
            strides, memory = [str(self.shapes[value][1]), "1"], self.op.accumulator
        return base, strides[::-1] if transposed else strides, memory


def offsets(indices: Sequence[str], strides: Sequence[str]) -> str:
    """The offsets of a tile: `i8[:, None] * 8 + i8[None, :]`; of a vector `i8`."""
    views = [""] if len(indices) == 1 else ["[:, None]", "[None, :]"]
    return " + ".join(
        f"{i}{view}" if stride == "1" else f"{i}{view} * {stride}"
        for i, view, stride in zip(indices, views, strides, strict=True)
    )
