"""Packed sequences in CUDA kernels, which find the boundaries from `offsets` themselves: hard
offsets, in every mode of lanes and rows, in the emulator and on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulator
import pytest
import torch
from cuda_emulator import Emulated, emulated
from table import Engine, Flags, Problem, check

from assocscan import ScanValueError, associative_scan, linear_recurrence, monoid, ops, reduce
from assocscan.api.bind_arguments import bind
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import workspace
from assocscan.cuda.kernel import LanesTile, RowsTile
from assocscan.cuda.prepare import prepare
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.runtime.backends import availability
from assocscan.testing import bicyclic

LANES, ROWS = LanesTile(64, 8, 2, 2, 2), RowsTile(32, 2, 3, 16, 2, 2, late=1)  # 32 and 64 steps
# Lanes with two words of bits per thread do not exist; rows with 40 steps per thread have two.
WIDE = RowsTile(32, 40, 3, 64, 2, 1)
CHOICES = {
    "lanes-serial": Choice(LANES, "SERIAL"),
    "lanes-chained": Choice(LANES, "CHAINED"),
    "lanes-lookback": Choice(LANES, "LOOKBACK", group=2),
    "lanes-deep": Choice(LanesTile(64, 8, 2, 2, 4, lead=2), "LOOKBACK", group=2),
    "rows-serial": Choice(ROWS, "SERIAL"),
    "rows-lookback": Choice(ROWS, "LOOKBACK"),
    "rows-deep": Choice(RowsTile(32, 3, 7, 16, 2, 5, late=3), "LOOKBACK"),
    "rows-wide": Choice(WIDE, "LOOKBACK"),
}
Run = Callable[[list[torch.Tensor]], Any]
MACHINES = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]


@monoid(identity=(0, 0), name="bicyclic_of_test_boundaries")
def pairs(left: Any, right: Any) -> Any:
    return bicyclic(left, right)


@contextlib.contextmanager
def machine(name: str, choice: Choice | None) -> Iterator[Engine]:
    """The CUDA engine of a machine, with this choice of kernel; None: its own."""
    chosen = tuning.forced(choice) if choice else contextlib.nullcontext()
    if name == "gpu":
        if not torch.cuda.is_available() or availability()["cuda"] is not None:
            pytest.skip(str(availability()["cuda"]))
        with chosen:
            yield Engine("cuda", "cuda")
    else:
        if reason := cuda_emulator.why_unavailable():
            pytest.skip(reason)
        with emulated(processors=5), chosen:
            yield Engine("cuda")


def bounds_of(lengths: list[int]) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


def hard_bounds(steps: int) -> dict[str, tuple[int, ...]]:
    """Offsets that are hard for tiles of so many steps."""
    edges = {d + k * steps for k in (1, 2, 3) for d in (-1, 0, 1)}
    return {
        "one": (0, 3 * steps + 5),
        "ones": bounds_of([1] * (2 * steps + 3)),
        "edges": (0, *sorted(edges), 4 * steps),
        "giant among ones": bounds_of([1] * 9 + [3 * steps] + [1] * 9),
        # More entries in a tile than a warp loads together, at one place and side by side.
        "many empty": bounds_of([3, *[0] * 700, steps, *[0] * 300, 1, 0, 2, *[0] * 40]),
        "empty ends": bounds_of([*[0] * 5, steps, *[0] * 5]),
        "empty and short": bounds_of([0, 2, 1, 0, 3] * (steps // 4)),
    }


NAMES = sorted(hard_bounds(32))
FLAGS = (
    Flags(),
    Flags(reverse=True, final=True, init=True),
    Flags(inclusive=False, init=True),
    Flags(reverse=True, inclusive=False, final=True),
    Flags(final=True, init=True),
)


@pytest.mark.slow
@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", CHOICES)
@pytest.mark.parametrize("on", MACHINES)
def test_hard_offsets(on: str, kernel: str, name: str) -> None:
    """Every call twice; then with other offsets of as many sequences."""
    choice = CHOICES[kernel]
    bounds = hard_bounds(choice.tile.steps)[name]
    lanes = isinstance(choice.tile, LanesTile)
    shape, axis = ((bounds[-1], 5), 0) if lanes else ((2, bounds[-1]), 1)
    with machine(on, choice) as engine:
        for seed, flags in enumerate(FLAGS):
            Emulated.seed = seed + 1
            problem = Problem("bicyclic", shape, axis, bounds=bounds)
            for _ in range(2):
                check(engine, problem, flags)
        mirrored = tuple(bounds[-1] - b for b in reversed(bounds))
        check(engine, Problem("bicyclic", shape, axis, bounds=mirrored), FLAGS[1])


@pytest.mark.slow
@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", CHOICES)
@pytest.mark.parametrize("on", MACHINES)
def test_totals(on: str, kernel: str, name: str) -> None:
    """Of every sequence, where nothing else is wanted."""
    choice = CHOICES[kernel]
    bounds = hard_bounds(choice.tile.steps)[name]
    lanes = isinstance(choice.tile, LanesTile)
    shape, axis = ((bounds[-1], 5), 0) if lanes else ((2, bounds[-1]), 1)
    generator = torch.Generator().manual_seed(0)
    xs = tuple(torch.randint(0, 9, shape, generator=generator) for _ in range(2))
    carries = (len(bounds) - 1, *shape[:axis], *shape[axis + 1 :])
    starts = tuple(torch.randint(0, 9, carries, generator=generator) for _ in range(2))
    offsets = torch.tensor(bounds)
    with machine(on, choice) as engine:
        given, init = (tuple(t.to(engine.device) for t in ts) for ts in (xs, starts))
        for reverse, enters in itertools.product((False, True), (None, init)):
            found = reduce(
                pairs, given, axis, reverse, init=enters, offsets=offsets, backend="cuda"
            )
            wanted = reduce(
                pairs, xs, axis, reverse, init=enters and starts, offsets=offsets, backend="cpu"
            )
            for x, e in zip(found, wanted, strict=True):
                assert torch.equal(x.cpu(), e)


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("kernel", CHOICES)
@pytest.mark.parametrize("on", MACHINES)
def test_random_offsets(on: str, kernel: str) -> None:
    """Enough sequences that the search of an entry takes two rounds."""
    choice = CHOICES[kernel]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (700,), generator=generator)
    lengths[300:320] += 90
    bounds = bounds_of(lengths.tolist())
    lanes = isinstance(choice.tile, LanesTile)
    shape, axis = ((bounds[-1], 3), 0) if lanes else ((bounds[-1],), 0)
    with machine(on, choice) as engine:
        for flags in FLAGS:
            check(engine, Problem("bicyclic", shape, axis, bounds=bounds), flags)


@pytest.mark.slow(2)
@pytest.mark.parametrize("kernel", ["lanes-lookback", "rows-lookback", "rows-serial"])
@pytest.mark.parametrize("on", MACHINES)
def test_wrong_offsets(on: str, kernel: str) -> None:
    """Kernels read nothing out of bounds, end, and say which rule was broken at the next call."""
    choice = CHOICES[kernel]
    x = torch.randn(300, 8) if isinstance(choice.tile, LanesTile) else torch.randn(1, 300)
    axis = x.shape.index(300)
    rules = {
        "must not decrease": (0, 200, 100, 10**12, -(10**12), 300),
        r"offsets\[0\] must be 0": (5, 100, 300),
        r"offsets\[-1\] must be": (0, 100, 299),
    }
    with machine(on, choice) as engine:
        given, device = x.to(engine.device), torch.device(engine.device)
        good = torch.tensor((0, 120, 300))
        expected = associative_scan(ops.sum, given, axis, offsets=good, backend="cuda")
        run = prepared(given, axis, good.to(device))
        for rule, wrong in rules.items():
            values = torch.tensor(wrong).to(device)
            prepared(given, axis, values)([given, values])
            if on == "gpu":
                torch.cuda.synchronize()
            with pytest.raises(ScanValueError, match=rule):
                run([given, good.to(device)])
            [[found], _] = run([given, good.to(device)])
            torch.testing.assert_close(found, expected)
        workspace.check_alarm(device)


@pytest.mark.parametrize("on", MACHINES)
def test_repeated_calls(on: str) -> None:
    """Of a recurrence with gradients: with other values of the offsets, with offsets at another
    address, of another dtype, and with wrong ones."""
    with machine(on, None) as engine:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.rand(700, generator=generator) for _ in range(2))
        weight = torch.randn(700, generator=generator)
        first = torch.tensor((0, 30, 30, 699, 700), device=engine.device)
        second = torch.tensor((0, 0, 350, 352, 700), device=engine.device)
        shifted = torch.cat([first[:1], second])[1:]
        for offsets in (
            first, first, second, second, shifted,
            first.int(), first.int(), second.int(), second.int(), first,
        ):  # fmt: skip
            given = [t.to(engine.device).requires_grad_() for t in (a, b)]
            y = linear_recurrence(*given, axis=0, offsets=offsets, backend="cuda")
            found = [y, *torch.autograd.grad((y * weight.to(y)).sum(), given)]
            doubles = [t.double().requires_grad_() for t in (a, b)]
            wanted = associative_scan(
                ops.affine, tuple(doubles), 0, offsets=offsets.cpu(), backend="eager"
            )[1]
            expected = torch.autograd.grad((wanted * weight).sum(), doubles)
            for x, e in zip(found, [wanted, *expected], strict=True):
                torch.testing.assert_close(x.cpu(), e.float(), rtol=1e-5, atol=1e-5)
        if on == "gpu":  # the kernel is now what checks the values
            wrong = torch.tensor((0, 400, 350, 352, 700), device=engine.device)
            linear_recurrence(*given, axis=0, offsets=wrong, backend="cuda")
            torch.cuda.synchronize()
            with pytest.raises(ScanValueError, match="must not decrease"):
                linear_recurrence(*given, axis=0, offsets=first, backend="cuda")


def prepared(x: torch.Tensor, axis: int, offsets: torch.Tensor) -> Run:
    """The run of a kernel itself: the public functions read offsets on the CPU first."""
    good = torch.linspace(0, x.shape[axis], len(offsets)).long()
    call = bind(ops.sum, x, axis, False, True, None, False, good)
    spec, _ = call.scan(call.traced.operator)
    return prepare(spec, [TensorSpec.of(x, with_address=True), TensorSpec.of(offsets)]).run


@pytest.mark.slow
@pytest.mark.parametrize("length", [pytest.param(4096, marks=pytest.mark.exhaustive), 4093])
def test_a_packed_row_is_aligned_whatever_its_length(length: int) -> None:
    """A row that begins at a multiple of 16 bytes is copied as one, with offsets and without."""
    x, offsets = torch.ones(length), torch.tensor([0, 5, length])
    if reason := cuda_emulator.why_unavailable():
        pytest.skip(reason)
    with emulated(processors=3):
        for given in (None, offsets):
            associative_scan(ops.sum, x, offsets=given, backend="cuda")
            kernel, _ = Emulated.launches[-1]
            assert kernel is not None
            assert {leaf.align for role, _, leaf in kernel.leaves if role != "offsets"} == {16}
