"""Text of Triton kernels: what kernels on scalars and kernels on matrices have in common.

Kernel code is Triton with one more notation, a name with a list of components in brackets:

    h[c] = tl.where(valid, g[c], h[c])      one line per component: h0 = tl.where(valid, g0, h0), …
    g[*c] = advance(h[*c], s[*a])           one line: g0, g1 = advance(h0, h1, s0, s1)

The letters and their components are `Emitter.components`: c, those of a carry; a, those of an
aggregate of several steps; b, those of an aggregate that are bools.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...program.cpp_and_triton_expressions import TRITON

EVERY = re.compile(r"(\w+)\[\*([abc])\]")
EACH = re.compile(r"\[([abc])\]")


class Described(Protocol):
    """The fields that `TritonKernel` and `MatrixKernel` share."""

    @property
    def reverse(self) -> bool: ...
    @property
    def outer(self) -> int: ...
    @property
    def packed(self) -> bool: ...
    @property
    def wide(self) -> bool: ...
    def strides(self) -> Iterable[tuple[str, int, str]]: ...
    def sizes(self) -> list[str]: ...


class Emitter:
    """Collects the lines of one kernel function; called with a text, it appends its lines."""

    kernel: Described

    def __init__(self, kernel: Described, components: Mapping[str, Sequence[int]]) -> None:
        self.kernel, self.components = kernel, components
        self.lines: list[str] = []
        self.depth = 1
        self.index = "tl.int64" if kernel.wide else "tl.int32"

    def __call__(self, text: str) -> None:
        for line in inspect.cleandoc(text).splitlines():
            self.lines += ["    " * self.depth + written for written in self.expand(line)]

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        """What is emitted inside stands below this line, indented."""
        self(line)
        self.depth += 1
        yield
        self.depth -= 1

    def expand(self, line: str) -> list[str]:
        """The lines of Triton that a line with component lists stands for."""
        line = EVERY.sub(lambda m: names(m[1], self.components[m[2]]), line)
        if line.startswith(" = "):  # a state without components, as second derivatives of max have
            return ["pass"]
        letters = set(EACH.findall(line))
        if not letters:
            return [line]
        (letter,) = letters
        return [line.replace(f"[{letter}]", str(c)) for c in self.components[letter]]

    def function(self, pointers: Sequence[str], tables: Sequence[str]) -> str:
        """The kernel `scan` with the lines so far as its body."""
        strides = [stride_name(*which) for which in self.kernel.strides()]
        groups = [pointers, tables, self.kernel.sizes(), strides]
        parameters = "\n".join(f"    {', '.join(group)}," for group in groups if group)
        body = "\n".join(self.lines)
        return f"@triton.jit\ndef scan(\n{parameters}\n):\n{body}\n"

    # Which chain, and where it lies.

    def find_program(self) -> None:
        """index: the number of the program."""
        if self.kernel.wide:
            for name in self.kernel.sizes():
                self(f"{name} = tl.cast({name}, tl.int64)")
        self(f"index = tl.cast(tl.program_id(0), {self.index})")

    def split_off(self, name: str, size: str) -> None:
        """The innermost part of `index`, which loses it."""
        self(f"""
            {name} = index % {size}
            index = index // {size}
        """)

    def split_outer(self) -> None:
        """outer0, outer1, …: what is left of `index`, by outer dimension."""
        for d in reversed(range(1, self.kernel.outer)):
            self.split_off(f"outer{d}", f"size{d}")
        if self.kernel.outer:
            self("outer0 = index")

    def load_offsets(self, begin: str, end: str, mask: str = "") -> None:
        """Where a packed sequence begins and ends, clamped to the axis: offsets on a GPU are never
        validated before the launch."""
        for name, at in ((begin, "sequence"), (end, "sequence + 1")):
            self(f"""
                {name} = tl.load(offsets + {at}{mask})
                {name} = tl.cast(tl.minimum(tl.maximum({name}, 0), length), {self.index})
            """)

    def outer_terms(self, role: str, k: int, strides: Sequence[int | None]) -> list[str]:
        """What the outer indices add to a leaf's address."""
        return [
            f"outer{d} * {stride_name(role, k, f'outer{d}')}"
            for d, stride in enumerate(strides) if stride is None
        ]  # fmt: skip

    def place(self, step: str, size: str) -> str:
        """The place on the axis of a step of a sequence of this size."""
        begin = "begin + " if self.kernel.packed else ""
        return f"{begin}{size} - 1 - {step}" if self.kernel.reverse else f"{begin}{step}"

    def split(self, value: str, count: int, name: str, shape: str) -> list[str]:
        """The values of the last dimension, of `count`, a power of two, as tensors of `shape`."""
        if count == 1:
            self(f"{name} = tl.reshape({value}, {shape})")
            return [name]
        halved = f"{shape[:-1]}, {count // 2}, 2]"
        self(f"{name}l, {name}r = tl.split(tl.reshape({value}, {halved}))")
        even = self.split(f"{name}l", count // 2, f"{name}l", shape)
        odd = self.split(f"{name}r", count // 2, f"{name}r", shape)
        return [v for two in zip(even, odd, strict=True) for v in two]


def joined(values: Sequence[str]) -> str:
    """Tensors along a new last dimension, which is several of two."""
    if len(values) == 1:
        return values[0]
    return f"tl.join({joined(values[::2])}, {joined(values[1::2])})"


def names(prefix: str, components: Iterable[int]) -> str:
    """`h0, h1` of h."""
    return ", ".join(f"{prefix}{c}" for c in components)


def pointer(role: str, k: int) -> str:
    return f"{role}{k}_ptr"


def stride_name(role: str, k: int, which: str) -> str:
    return f"{role}{k}_{which}"


def plus(text: str, offset: int) -> str:
    return f"{text} + {offset}" if offset else text


def times(text: str, stride: int | None, argument: str) -> str:
    """A product with a stride that is written into the kernel, or with an argument."""
    return text if stride == 1 else f"{text} * {argument if stride is None else stride}"


BITS = {"f32": "tl.int32", "f64": "tl.int64", "b1": "tl.int8"}


def picked(value: str, where: str, axis: int, kind: str) -> str:
    """The one value along an axis where `where` holds: the sum of its bits and of zeros, which is
    exact."""
    bits = value
    if kind in ("f32", "f64"):
        bits = f"{value}.to({BITS[kind]}, bitcast=True)"
    elif kind == "b1":
        bits = f"{value}.to(tl.int8)"
    taken = f"tl.sum(tl.where({where}, {bits}, 0), axis={axis}, keep_dims=True)"
    if kind in ("f32", "f64"):
        return f"{taken}.to({BITS[kind]}).to({TRITON.types[kind]}, bitcast=True)"
    return f"{taken} != 0" if kind == "b1" else f"{taken}.to({TRITON.types[kind]})"
