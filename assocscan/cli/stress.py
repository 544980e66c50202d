"""``python -m assocscan stress``: random scans, many times, on several streams, checked.

Problems are drawn once, a third of them packed sequences; every launch takes one at random.
Integers must be equal to the reference bit by bit. Floats must be as near to a float64 scan as the
oracle's tolerance says, and equal bit by bit to the first launch of the same problem. On a GPU,
launches go to several streams, and during half of the time another kernel holds most
multiprocessors.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import associative_scan, ops
from ..engines.base.device_properties import processors
from ..monoids.monoid import Monoid, monoid
from ..testing import bicyclic
from . import stress_kernels

STREAMS = 3
REPORT_EVERY = 2000
BICYCLIC = monoid(bicyclic, identity=(0, 0), name="stress_bicyclic")
SMALLEST = 1e-30  # below it, float32 rounds to zero what float64 still holds
FLOAT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@dataclass
class Problem:
    """One scan, what it must give, and what it gave first."""

    op: Monoid
    xs: tuple[torch.Tensor, ...]
    axis: int
    reverse: bool
    inclusive: bool
    expected: list[torch.Tensor]
    offsets: torch.Tensor | None = None
    first: list[torch.Tensor] = field(default_factory=list)

    def scan(self, backend: str) -> list[torch.Tensor]:
        xs = self.xs if len(self.xs) > 1 else self.xs[0]
        y, final = associative_scan(
            self.op, xs, self.axis, self.reverse, self.inclusive, return_final=True,
            offsets=self.offsets, backend=backend,
        )  # fmt: skip
        return [*tensors_of(y), *tensors_of(final)]

    def describe(self) -> str:
        x = self.xs[0]
        packed = "" if self.offsets is None else f" {len(self.offsets) - 1} sequences"
        return (
            f"{self.op.name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)} strides "
            f"{list(x.stride())} axis {self.axis} reverse {self.reverse} inclusive "
            f"{self.inclusive}{packed}"
        )


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return list(tree) if isinstance(tree, tuple) else [tree]


def draw(
    generator: random.Random, device: torch.device, elements: int, packed: float = 1 / 3
) -> Problem:
    """A random operator, shape, layout and direction; lengths are spread evenly over scales.

    packed: the share of problems that are packed sequences.
    """
    kind = generator.choice(["bicyclic", "sum", "affine", "affine", "max", "matrix"])
    length = int(2 ** generator.uniform(0, elements.bit_length() - 1))
    others = max(1, elements // length)
    lanes = generator.choice([1, 1, generator.randint(1, min(others, 200))])
    rows = min(generator.choice([1, 3, 64]), max(1, others // lanes))
    shape = (rows, length) if lanes == 1 else (rows, length, lanes)
    dtype = generator.choice([torch.float32, torch.bfloat16, torch.float64])
    seed = torch.Generator().manual_seed(generator.randrange(1 << 31))

    def integers(low: int, high: int, kind: torch.dtype, *element: int) -> torch.Tensor:
        return torch.randint(low, high, (*shape, *element), generator=seed).to(kind)

    def floats(scale: float, shift: float) -> torch.Tensor:
        return (torch.rand(shape, generator=seed, dtype=torch.float64) * scale + shift).to(dtype)

    op, xs = {
        "bicyclic": lambda: (BICYCLIC, (integers(0, 4, torch.int64), integers(0, 4, torch.int64))),
        "sum": lambda: (ops.sum, (integers(-99, 99, generator.choice([torch.int8, torch.int32])),)),
        "matrix": lambda: (ops.matmul, (integers(-9, 9, torch.int32, 2, 2),)),
        "affine": lambda: (ops.affine, (floats(0.1, 0.9), floats(2, -1))),
        "max": lambda: (ops.max, (floats(2, -1),)),
    }[kind]()
    xs = tuple(x.to(device) for x in xs)
    if generator.random() < 0.3:  # addresses that are multiples of the scalar alone
        xs = tuple(torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape) for x in xs)
    offsets = cut(generator, seed, length) if generator.random() < packed else None
    problem = Problem(op, xs, 1, generator.random() < 0.5, generator.random() < 0.7, [])
    problem.offsets = None if offsets is None else offsets.to(device)
    reference = Problem(
        op, tuple(widened(x.cpu()) for x in xs), 1, problem.reverse, problem.inclusive, [], offsets
    )
    problem.expected = [t.to(device) for t in reference.scan("cpu")]
    return problem


def cut(generator: random.Random, seed: torch.Generator, length: int) -> torch.Tensor:
    """Offsets of random sequences: from one to as many as there are elements, spread evenly over
    scales, all along the axis or in its first part; some are empty."""
    count = int(2 ** generator.uniform(0, length.bit_length()))
    end = generator.choice([length, length, max(1, length // 8)])
    places = torch.randint(0, end + 1, (count,), generator=seed).sort().values
    return torch.cat([places.new_zeros(1), places, places.new_full((1,), length)])


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def mistakes(problem: Problem, results: list[torch.Tensor]) -> torch.Tensor:
    """How many of the results are wrong: a tensor, so that nothing waits for it."""
    found = results[0].new_zeros((), dtype=torch.int64)
    for result, expected, first in zip(results, problem.expected, problem.first, strict=True):
        if result.is_floating_point():
            tolerance = FLOAT_TOLERANCE[problem.xs[0].dtype]
            finite = torch.where(expected.isfinite(), expected, 0.0)
            scale = finite.abs() + finite.square().mean().sqrt() + SMALLEST
            near = (result.double() - expected).abs() <= tolerance * scale
            found += ~(near | (result == expected)).all()  # infinities are equal or wrong
            found += (bits(result) != bits(first)).any()
        else:
            found += (result != expected).any()
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


@contextlib.contextmanager
def on_stream(streams: list[Any], number: int) -> Iterator[None]:
    if streams:
        with torch.cuda.stream(streams[number % len(streams)]):
            yield
    else:
        yield


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 when nothing was wrong."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend = options.backend or ("cuda" if device.type == "cuda" else "cpu")
    generator = random.Random(options.seed)
    on_gpu = device.type == "cuda"
    streams: list[Any] = [torch.cuda.Stream(device) for _ in range(STREAMS)] if on_gpu else []
    side = torch.cuda.Stream(device) if on_gpu else None
    print(f"{options.launches} launches of backend {backend!r} on {device}, seed {options.seed}")
    if on_gpu and backend == "cuda":
        for words in (1, 2, 6):
            wrong = stress_kernels.message_passing(device, words, 1000)
            print(f"message passing, {words} words: {wrong} wrong")
            if wrong:
                return 1
    share = 1.0 if options.packed else 1 / 3
    problems = [draw(generator, device, options.elements, share) for _ in range(options.problems)]
    for problem in problems:
        problem.first = problem.scan(backend)
    if on_gpu:
        torch.cuda.synchronize(device)
    # One row per stream: additions to one number from two streams would be lost.
    counts = torch.zeros(STREAMS, len(problems), dtype=torch.int64, device=device)
    begin, done = time.perf_counter(), 0
    while done < options.launches and time.perf_counter() - begin < options.seconds:
        which = generator.randrange(len(problems))
        if side is not None and done % 50 == 0 and done % (2 * REPORT_EVERY) >= REPORT_EVERY:
            with torch.cuda.stream(side):
                stress_kernels.hold(device, processors(device) - 4, 300_000)
        with on_stream(streams, done):
            found = mistakes(problems[which], problems[which].scan(backend))
            counts[done % STREAMS, which].add_(found)
        done += 1
        if done % REPORT_EVERY == 0:
            print(f"  {done} launches, {int(counts.sum())} wrong", file=sys.stderr)
    if on_gpu:
        torch.cuda.synchronize(device)
    total = int(counts.sum())
    for problem, count in zip(problems, counts.sum(0).tolist(), strict=True):
        if count:
            print(f"WRONG {count} times: {problem.describe()}")
    seconds = time.perf_counter() - begin
    print(f"{done} launches of {len(problems)} problems in {seconds:.1f} s: {total} wrong")
    return int(total > 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=60, help="different scans to draw")
    parser.add_argument("--elements", type=int, default=1 << 19, help="elements per scan, at most")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packed", action="store_true", help="packed sequences alone")
    parser.add_argument("--backend", help="default: cuda on a GPU, cpu without one")
    parser.add_argument("--device")
