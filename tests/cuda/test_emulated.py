"""The CUDA engine's kernels in the emulator: every thread a fiber, in random order, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import cuda_emulator
import pytest
import sanitized
import torch
from cuda_emulator import Emulated, emulated
from table import (
    CASES,
    LAYOUTS,
    TWO_FLAGS,
    Engine,
    Flags,
    Problem,
    check,
    expected,
    options,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import BackendError, Monoid, associative_scan, monoid, ops, reduce
from assocscan.__main__ import main
from assocscan.cli import stress, stress_kernels
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import prepare as scan
from assocscan.cuda import workspace
from assocscan.cuda.kernel import LanesTile, Mode, RowsTile
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.monoids.combinators import with_lift
from assocscan.runtime import generated_gradient
from assocscan.runtime.autograd import only_carries
from assocscan.testing import assert_scan_close, reference_scan

REASON = cuda_emulator.why_unavailable()
pytestmark = [pytest.mark.thinned(5), pytest.mark.skipif(REASON is not None, reason=str(REASON))]

CUDA = Engine("cuda")
LANES: tuple[Mode, ...] = ("SERIAL", "CHAINED", "LOOKBACK")
ROWS: tuple[Mode, ...] = ("SERIAL", "LOOKBACK")
# Two elements per thread and two channels: tiles of 32 steps. Rows: tiles of 64 steps.
LANES_TILE = LanesTile(64, 8, 2, 2, 2)
ROWS_TILE = RowsTile(32, 2, 3, 16, 2, 2, late=1)
DEEP = Choice(RowsTile(32, 3, 7, 16, 2, 5, late=3), "LOOKBACK")
SOME_FLAGS = (
    Flags(),
    Flags(reverse=True, final=True),
    Flags(inclusive=False, init=True),
    Flags(reverse=True, inclusive=False, final=True),
)


def grids() -> list[int]:
    return [grid for _, grid in Emulated.launches]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", LANES)
def test_lengths_of_lanes(mode: Mode) -> None:
    with emulated(processors=5), tuning.forced(Choice(LANES_TILE, mode, group=2)):
        for length in (*range(1, 2 * LANES_TILE.steps + 2), 200, 321):
            Emulated.seed = length
            flags = SOME_FLAGS[1 + length % (1 if mode == "SERIAL" else 3)]
            check(CUDA, Problem("bicyclic", (length, 5), 0), flags)
        assert max(grids()) == (1 if mode == "SERIAL" else 5)


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "choice",
    [
        Choice(LANES_TILE, "CHAINED"),
        Choice(LANES_TILE, "LOOKBACK", group=2),
        Choice(LanesTile(64, 64, 2, 2, 3), "LOOKBACK", group=2),
        Choice(ROWS_TILE, "LOOKBACK"),
        DEEP,
    ],
    ids=["chained", "lookback", "wide", "rows", "deep"],
)
def test_the_look_back_against_its_reference(choice: Choice) -> None:
    """Both find the same prefixes, in any order of threads (`lookback_reference.cuh`)."""
    lanes = isinstance(choice.tile, LanesTile)
    problem = Problem("bicyclic", (2, 350, 5) if lanes else (2, 703), 1)
    for flags in SOME_FLAGS[1:3]:
        xs, init = problem.inputs()
        found = [tree_leaves(expected(problem, flags))]
        for compiler_flags in ((), ("-DREFERENCE_LOOKBACK",)):
            with emulated(processors=7, flags=compiler_flags), tuning.forced(choice):
                for seed in (1, 2):
                    Emulated.seed = seed
                    given = options(problem, flags, init)
                    ys = associative_scan(CASES["bicyclic"].op, xs, **given, backend="cuda")
                    found.append(tree_leaves(ys))
                assert max(grids()) > 2
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("lead", [1, 2])
def test_more_groups_than_looks(lead: int) -> None:
    """Groups of one tile, as many as blocks, several tiles ahead."""
    tile = replace(LANES_TILE, lead=lead, stages=lead + 1)
    with emulated(processors=12), tuning.forced(Choice(tile, "LOOKBACK", group=1)):
        for length in (30, 350, 384, 385, 1500):
            Emulated.seed = length
            check(CUDA, Problem("bicyclic", (length, 5), 0), Flags(init=True, final=True))
            check(CUDA, Problem("brackets", (length, 5), 0), SOME_FLAGS[1])
    assert max(grids()) == 12


@pytest.mark.thinned(4)
@pytest.mark.parametrize("mode", ROWS)
def test_lengths_of_rows(mode: Mode) -> None:
    with emulated(processors=3), tuning.forced(Choice(ROWS_TILE, mode)):
        for length in (*range(2, 2 * ROWS_TILE.steps + 2), 500, 901):
            Emulated.seed = length
            flags = SOME_FLAGS[1 + length % (1 if mode == "SERIAL" else 3)]
            check(CUDA, Problem("bicyclic", (2, length), 1), flags)
        assert max(grids()) == (2 if mode == "SERIAL" else 3)


@pytest.mark.exhaustive
def test_lengths_of_deep_rings() -> None:
    """Rings that hold all tiles of a block, and such that turn over."""
    with emulated(processors=8), tuning.forced(DEEP):
        steps = DEEP.tile.steps
        for length in (*range(2, 2 * steps + 2, 3), 3 * steps, 500, 6 * steps + 1, 40 * steps + 7):
            Emulated.seed = length
            check(CUDA, Problem("bicyclic", (2, length), 1), SOME_FLAGS[1 + length % 3])
        assert max(grids()) == 8


@pytest.mark.exhaustive
def test_wide_unaligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs then take memory of their own, for which the chosen tile leaves no room."""

    def lift(*xs: Tensor) -> Tensor:
        return torch.stack([x.sum(-1, keepdim=True) for x in xs]).sum(0)

    wide = monoid(
        lambda left, right: left + right, identity=0.0, name="test_cuda_wide", element_ndim=1,
        lift=lift, lower=lambda s, xs: tuple(x + s for x in xs),
    )  # fmt: skip
    xs = tuple((torch.randn(3 * 2082 * 4 + 1) / 100)[1:].view(3, 2082, 4) for _ in range(5))
    with emulated(processors=46):
        monkeypatch.setattr(scan, "shared_memory", lambda device: 101376)
        ys = associative_scan(wide, xs, 1, backend="cuda")
        kernel, _ = Emulated.launches[-1]
    assert kernel.tile.threads % 32 == 0
    assert_scan_close(ys, reference_scan(wide, xs, 1), length=2082 * 20)  # 20 numbers per step


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ("CHAINED", "LOOKBACK"))
@pytest.mark.parametrize("case", ["band", "brackets", "matrix"])
def test_operators_in_lanes(case: str, mode: Mode) -> None:
    with emulated(processors=6), tuning.forced(Choice(LANES_TILE, mode)):
        problem = Problem(case, (2, 130, 9), 1)
        check(CUDA, problem, TWO_FLAGS[problem.allows(TWO_FLAGS[1])])
        assert Emulated.launches


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", [Choice(ROWS_TILE, "LOOKBACK"), DEEP], ids=["ahead", "deep"])
@pytest.mark.parametrize("case", ["band", "brackets", "matrix"])
def test_operators_in_rows(case: str, choice: Choice) -> None:
    with emulated(processors=6), tuning.forced(choice):
        problem = Problem(case, (3, 300), 1)
        check(CUDA, problem, TWO_FLAGS[problem.allows(TWO_FLAGS[1])])
        assert Emulated.launches


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "tile,size",
    [
        (LanesTile(64, 4, 1, 2, 2), 4),  # 64 bytes per cell: teams of four lanes
        (LanesTile(64, 8, 1, 3, 3), 4),
        (LanesTile(64, 16, 2, 2, 2), 4),  # 128 bytes: teams of eight
        (LanesTile(64, 4, 2, 2, 3), 2),  # 32 bytes: teams of two
        (LanesTile(64, 2, 1, 2, 2), 4),  # too few lanes for a team
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", LANES)
def test_teams_of_lanes_copy_wide_elements(mode: Mode, tile: LanesTile, size: int) -> None:
    """Exact products, tiles that are whole and others, and a matrix beside a vector."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator, dtype=torch.int32)

    with emulated(processors=5), tuning.forced(Choice(tile, mode)):
        for length, lanes in ((3 * tile.steps, 16), (2 * tile.steps + 5, 18), (7, 16)):
            Emulated.seed = length
            x = drawn(2, length, lanes, size, size)
            for reverse in (False, True):
                y = associative_scan(ops.matmul, x, 1, reverse=reverse, backend="cuda")
                assert torch.equal(y, reference_scan(ops.matmul, x, 1, reverse=reverse))
        x, b = drawn(2, 2 * tile.steps, 16, size, size), drawn(2, 2 * tile.steps, 16, size)
        given: Any = {"init": (x[:, 0], b[:, 0]), "return_final": True, "inclusive": False}
        found = associative_scan(ops.matrix_affine, (x, b), 1, backend="cuda", **given)
        right = reference_scan(ops.matrix_affine, (x, b), 1, **given)
        assert all(map(torch.equal, tree_leaves(found), tree_leaves(right)))


@pytest.mark.parametrize(
    "dtype,is_lanes",
    [("bool", True), ("int8", False), ("bfloat16", True), ("bfloat16", False), ("float16", True),
     ("float64", False), ("complex64", True), ("complex64", False)],
)  # fmt: skip
def test_dtypes(dtype: str, is_lanes: bool) -> None:
    tile = LANES_TILE if is_lanes else ROWS_TILE
    shape, axis = ((2, 70, 12), 1) if is_lanes else ((3, 200), 1)
    with emulated(processors=4), tuning.forced(Choice(tile, "LOOKBACK")):
        check(CUDA, Problem(dtype, shape, axis), TWO_FLAGS[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape,axis", [((3, 70, 5), 1), ((3, 2, 201), 2)])
def test_layouts(layout: str, shape: tuple[int, ...], axis: int) -> None:
    """Odd sizes, addresses that are multiples of the scalar alone, broadcast and strided leaves."""
    with emulated(processors=4), tuning.forced(Choice(LANES_TILE, "CHAINED")):
        check(CUDA, Problem("bfloat16", shape, axis, layout), Flags())


RECURRENCE = monoid(
    lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
    identity=(1.0, 0.0),
    name="test_cuda_recurrence",
    lower=lambda state: state[1],
)


def loop(a: Tensor, b: Tensor, h: Tensor | None, reverse: bool) -> Tensor:
    steps = range(a.shape[1])
    outputs: list[Any] = [None] * a.shape[1]
    for t in reversed(steps) if reverse else steps:
        h = b[:, t] if h is None else a[:, t] * h + b[:, t]
        outputs[t] = h
    return torch.stack(outputs, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "reverse,with_init,dtype",
    [
        (False, False, torch.float32),
        (True, True, torch.float32),
        (False, True, torch.bfloat16),
        (True, True, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "choice,shape",
    [
        (Choice(LANES_TILE, "LOOKBACK"), (1, 150, 6)),
        (Choice(LANES_TILE, "SERIAL"), (2, 70, 5)),
        (Choice(ROWS_TILE, "LOOKBACK"), (2, 203)),
        (Choice(ROWS_TILE, "SERIAL"), (3, 200)),
        (DEEP, (1, 600)),
    ],
)
def test_backward_in_one_kernel(
    choice: Choice, shape: tuple[int, ...], with_init: bool, reverse: bool, dtype: torch.dtype
) -> None:
    """The adjoint reads the saved state one step ahead, and the init beyond the edge, which is
    float32 where the state is."""
    torch.manual_seed(0)
    a, b = torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)
    first = torch.randn(shape[:1] + shape[2:]).to(dtype)
    given = [t.requires_grad_() for t in (a, b, *([first] if with_init else []))]
    init = (torch.ones_like(first), first) if with_init else None
    weight = torch.randn(shape).to(dtype)
    with emulated(processors=3), tuning.forced(choice):
        y = associative_scan(RECURRENCE, (a, b), 1, reverse, init=init, backend="cuda")
        gradients = torch.autograd.grad((y * weight).sum(), given)
        assert len(Emulated.launches) == 2
    doubles = [t.detach().double().requires_grad_() for t in given]
    wanted = loop(*doubles[:2], doubles[2] if with_init else None, reverse)
    expected = torch.autograd.grad((wanted * weight.double()).sum(), doubles)
    close = 2e-5 if dtype == torch.float32 else 2e-2
    for g, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=close, atol=close)


@pytest.mark.thinned(11)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "choice,shape",
    [
        (Choice(LANES_TILE, "LOOKBACK"), (1, 350, 6)),
        (Choice(LANES_TILE, "SERIAL"), (2, 160, 5)),
        (Choice(ROWS_TILE, "LOOKBACK"), (2, 703)),
        (Choice(ROWS_TILE, "SERIAL"), (3, 320)),
    ],
)
def test_the_gradient_of_the_carry_alone(
    choice: Choice, shape: tuple[int, ...], reverse: bool
) -> None:
    """What a scan over ranks computes first in its backward pass: a reduction. It has the bits of
    the whole backward pass."""
    torch.manual_seed(0)
    a, b, g = torch.rand(shape), torch.randn(shape), torch.randn(shape)
    init = torch.randn(shape[:1] + shape[2:]).requires_grad_()
    given = [a.requires_grad_(), b.requires_grad_(), init]
    with emulated(processors=3), tuning.forced(choice):
        start = (torch.ones_like(init), init)
        y = associative_scan(RECURRENCE, (a, b), 1, reverse, init=start, backend="cuda")
        with only_carries():
            (alone,) = torch.autograd.grad(y, init, g, retain_graph=True)
        kernel = Emulated.launches[-1][0]
        assert kernel is not None and not kernel.operator.outputs
        assert torch.equal(alone, torch.autograd.grad(y, given, g)[2])


@pytest.mark.exhaustive
def test_warm_gradients_are_two_launches() -> None:
    """The second time, nothing is derived, laid out or looked up; where addresses differ, it is."""
    for op, count in ((RECURRENCE, 2), (ops.argmax, 2), (ops.sum, 1)):
        with emulated(processors=3):
            for round in range(4):
                xs = [torch.rand(2, 65)[:, round == 3 :] for _ in range(count)]
                if op is ops.argmax:
                    xs[1] = torch.arange(xs[0].shape[1]).expand(xs[0].shape)
                xs[0].requires_grad_()
                given = xs[0] if count == 1 else tuple(xs)
                with mock.patch.object(
                    generated_gradient, "Backward", wraps=generated_gradient.Backward
                ) as derived:
                    ys = associative_scan(op, given, 1, backend="cuda")
                    y = ys[0] if isinstance(ys, tuple) else ys
                    (got,) = torch.autograd.grad(y, xs[0], torch.ones_like(y))
                assert derived.call_count == (round in (0, 3)), (op.name, round)
                (want,) = torch.autograd.grad(
                    tree_leaves(associative_scan(op, given, 1, backend="eager"))[0],
                    xs[0],
                    torch.ones_like(y),
                )
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "choice", [Choice(LANES_TILE, "LOOKBACK"), Choice(ROWS_TILE, "LOOKBACK"), DEEP]
)
def test_reductions_write_nothing_else(choice: Choice) -> None:
    shape, axis = ((150, 6), 0) if isinstance(choice.tile, LanesTile) else ((6, 150), 1)
    xs = tuple(torch.randint(0, 4, shape) for _ in range(2))
    with emulated(processors=4), tuning.forced(choice):
        got = reduce(CASES["bicyclic"].op, xs, axis, reverse=True, backend="cuda")
        assert not Emulated.launches[-1][0].operator.outputs
    wanted = reference_scan(CASES["bicyclic"].op, xs, axis, reverse=True)
    last = [y.select(axis, 0) for y in wanted]
    assert all(torch.equal(a, b) for a, b in zip(got, last, strict=True))


@pytest.mark.thinned(12)
@pytest.mark.parametrize(
    "choice",
    [
        *(Choice(replace(LANES_TILE, stages=n), m, group=2) for m in LANES for n in (2, 4)),
        *(Choice(replace(LANES_TILE, stages=4, lead=2), m) for m in LANES),
        *(Choice(ROWS_TILE, m) for m in ROWS),
        DEEP,
    ],
    ids=lambda choice: f"{choice.mode}-{choice.tile.stages}-{choice.tile.lead}",
)
def test_reductions_of_several_tiles(choice: Choice) -> None:
    """Only the last tile of a chain is scanned: it may be whole, hold one step, or be the first;
    and several chains of a block follow one another."""
    op, steps = CASES["bicyclic"].op, choice.tile.steps
    is_lanes = isinstance(choice.tile, LanesTile)
    for number, length in enumerate((1, steps - 1, steps, steps + 1, 5 * steps, 9 * steps + 1)):
        shape = (3, length, 9) if is_lanes else (5, length)
        xs = tuple(torch.randint(0, 4, shape) for _ in range(2))
        init = tuple(torch.randint(0, 4, shape[:1] + shape[2:]) for _ in range(2))
        reverse, given = number % 2 == 1, init if number % 3 else None
        with emulated(processors=4), tuning.forced(choice):
            Emulated.seed = length
            got = reduce(op, xs, 1, reverse, init=given, backend="cuda")
        wanted = reference_scan(op, xs, 1, reverse, init=given)
        last = [y.select(1, 0 if reverse else -1) for y in wanted]
        assert all(torch.equal(a, b) for a, b in zip(got, last, strict=True)), length


ROUNDED = RowsTile(32, 16, 3, 64, 2, 2, late=1)  # tiles of 512 steps


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_reverse_rows_of_any_length(dtype: torch.dtype, mode: Mode, packed: bool) -> None:
    """Tiles are aligned: the first has steps before the row, which leave no trace."""
    generator = torch.Generator().manual_seed(0)
    with emulated(processors=3), tuning.forced(Choice(ROUNDED, mode)):
        for length in (1, 3, 17, 509, 512, 513, 1021, 1530, 1541):
            x = torch.randint(-100, -50, (length,), generator=generator).to(dtype)
            offsets = torch.tensor([0, 0, length // 3, length - 1, length]) if packed else None
            init = torch.full((4,) if packed else (), -60, dtype=dtype)
            for inclusive, start in ((True, None), (True, init), (False, init)):
                found, expected = (
                    associative_scan(
                        ops.max, x, 0, True, inclusive=inclusive, init=start, return_final=True,
                        offsets=offsets, backend=backend,
                    )
                    for backend in ("cuda", "cpu")
                )  # fmt: skip
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), length
                kernel, _ = Emulated.launches[-1]
                unit = 16 // x.itemsize
                assert kernel is not None and kernel.round == (unit if length % unit else 1)
                aligned = {leaf.align for role, _, leaf in kernel.leaves if role == "input"}
                assert aligned == {16}


BOUNDS = (0, 0, 1, 1, 40, 41, 75, 150, 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "choice", [Choice(LANES_TILE, m) for m in LANES] + [Choice(ROWS_TILE, m) for m in ROWS] + [DEEP]
)
def test_packed_sequences(choice: Choice) -> None:
    shape, axis = ((150, 5), 0) if isinstance(choice.tile, LanesTile) else ((2, 150), 1)
    with emulated(processors=5), tuning.forced(choice):
        for flags in (*TWO_FLAGS, Flags(reverse=True, final=True)):
            check(CUDA, Problem("bicyclic", shape, axis, bounds=BOUNDS), flags)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "choice,shape,reverse",
    [
        (Choice(LANES_TILE, "LOOKBACK"), (1, 150, 6), True),
        (Choice(ROWS_TILE, "LOOKBACK"), (2, 150), False),
        (DEEP, (1, 150), True),
    ],
)
def test_backward_of_packed_sequences(
    choice: Choice, shape: tuple[int, ...], reverse: bool
) -> None:
    """The state before a sequence's first step is its init, not the end of the one before."""
    torch.manual_seed(0)
    a, b = torch.rand(shape), torch.randn(shape)
    first = torch.randn(len(BOUNDS) - 1, *shape[:1], *shape[2:])
    weight = torch.randn(shape)
    given = [t.requires_grad_() for t in (a, b, first)]
    with emulated(processors=3), tuning.forced(choice):
        y = associative_scan(
            RECURRENCE, (a, b), 1, reverse, init=(torch.ones_like(first), first),
            offsets=torch.tensor(BOUNDS), backend="cuda",
        )  # fmt: skip
        gradients = torch.autograd.grad((y * weight).sum(), given)
    doubles = [t.detach().double().requires_grad_() for t in given]
    parts = [
        loop(doubles[0][:, i:j], doubles[1][:, i:j], doubles[2][k], reverse)
        for k, (i, j) in enumerate(pairwise(BOUNDS))
        if i < j
    ]
    expected = torch.autograd.grad((torch.cat(parts, 1) * weight.double()).sum(), doubles)
    for g, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(g, e.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "choice", [Choice(LANES_TILE, m) for m in LANES] + [Choice(ROWS_TILE, m) for m in ROWS] + [DEEP]
)
def test_any_order_of_threads_gives_the_same_bits(choice: Choice) -> None:
    shape = (1, 170, 6) if isinstance(choice.tile, LanesTile) else (2, 333)
    a, b = torch.rand(shape), torch.randn(shape)
    with emulated(processors=5), tuning.forced(choice):
        results = []
        for seed in range(1, 7):
            Emulated.seed = seed * 7919
            results.append(associative_scan(ops.affine, (a, b), 1, backend="cuda"))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "choice", [Choice(LANES_TILE, "LOOKBACK"), Choice(ROWS_TILE, "LOOKBACK"), DEEP]
)
def test_the_epoch_wraps(choice: Choice) -> None:
    """Slots are cleared before a tag could come again."""
    shape = (150, 4) if isinstance(choice.tile, LanesTile) else (4, 150)
    axis = 0 if isinstance(choice.tile, LanesTile) else 1
    x = torch.randint(-9, 9, shape)
    with emulated(processors=3), tuning.forced(choice):
        scan = lambda: associative_scan(ops.sum, x, axis, backend="cuda")  # noqa: E731
        associative_scan(ops.sum, torch.cat([x] * 3, axis), axis, backend="cuda")  # uses more slots
        (space,) = workspace._SPACES.values()
        header = space.memory[:12].view(torch.int32)
        assert header.tolist() == [0, 1, 0]
        header[1] = -4  # two launches before the last epoch
        slots = space.memory[workspace.HEADER_BYTES :]
        for epoch in (-3, 0, 1):
            assert torch.equal(scan(), x.cumsum(axis))
            assert header.tolist() == [0, epoch, 0]
            assert (slots.count_nonzero() == 0) == (epoch == 0)


def test_a_launch_that_does_not_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks missing, the others wait in vain: they give up, and the next call says so."""
    x = torch.ones(500, 8)
    with emulated(processors=4), tuning.forced(Choice(LANES_TILE, "LOOKBACK")):
        launch = Emulated.launch
        Emulated.clock_step = 1 << 33
        monkeypatch.setattr(
            Emulated, "launch", lambda self, grid, *rest: launch(self, grid - 1, *rest)
        )
        associative_scan(ops.sum, x, backend="cuda")
        monkeypatch.setattr(Emulated, "launch", launch)
        monkeypatch.setattr(Emulated, "clock_step", 20)
        with pytest.raises(BackendError, match="gave up"):
            associative_scan(ops.sum, x, backend="cuda")
        workspace._SPACES.clear()
        assert torch.equal(associative_scan(ops.sum, x, backend="cuda"), x.cumsum(0))


def test_an_empty_axis() -> None:
    xs = (torch.ones(3, 0, 2), torch.ones(3, 0, 2))
    init = (torch.full((3, 2), 2.0), torch.full((3, 2), 5.0))
    with emulated():
        (a, _), final = associative_scan(
            ops.affine, xs, 1, init=init, return_final=True, backend="cuda"
        )
        _, identity = associative_scan(ops.affine, xs, 1, return_final=True, backend="cuda")
        assert not Emulated.launches
    assert a.shape == (3, 0, 2)
    assert [t.unique().tolist() for t in (*final, *identity)] == [[2.0], [5.0], [1.0], [0.0]]


@pytest.mark.parametrize("shape,axis", [((0, 5, 3), 1), ((2, 5, 0), 1), ((0, 5), 1)])
def test_an_empty_batch(shape: tuple[int, ...], axis: int) -> None:
    x = torch.ones(shape)
    with emulated():
        y, final = associative_scan(ops.sum, x, axis, return_final=True, backend="cuda")
        assert not Emulated.launches
    assert y.shape == shape and final.numel() == 0


def test_nan_payloads_are_not_tags() -> None:
    x = torch.full((300, 4), -1, dtype=torch.int32).view(torch.float32)
    x[::7] = 1.0
    with emulated(processors=4), tuning.forced(Choice(LANES_TILE, "CHAINED")):
        y = associative_scan(ops.sum, x, backend="cuda")
    assert y[1:].isnan().all() and not y[:1].isnan().any()


@pytest.mark.thinned(5)
@pytest.mark.parametrize("processors", [4, 132])
@pytest.mark.parametrize("shape,axis", [((3, 700, 40), 1), ((1, 5000), 1), ((300, 7), 0)])
def test_tiles_of_the_model(shape: tuple[int, ...], axis: int, processors: int) -> None:
    """The tiles that shapes get by themselves."""
    with emulated(processors=processors):
        check(CUDA, Problem("affine", shape, axis), Flags(final=True))


@pytest.mark.slow
def test_message_passing_alone() -> None:
    with emulated(processors=4):
        for words in (1, 4):
            assert stress_kernels.message_passing(torch.device("cpu"), words, 2) == 0


@pytest.mark.slow
def test_stress_finds_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments = ["stress", "--launches", "30", "--problems", "6", "--elements", "2000"]
    assert main([*arguments, "--seed", "3"]) == 0
    assert "30 launches of 6 problems" in capsys.readouterr().out
    draw = stress.draw

    def spoilt(*given: Any) -> stress.Problem:
        problem = draw(*given)
        problem.expected[0].view(-1)[-1:] += 1
        return problem

    monkeypatch.setattr(stress, "draw", spoilt)
    assert main([*arguments, "--seed", "3"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_tiles_of_one_channel_and_inputs_that_are_wide() -> None:
    one = Choice(LanesTile(64, 1, 1, 2, 4, 2), "LOOKBACK")
    with emulated(processors=4), tuning.forced(one):
        check(CUDA, Problem("affine", (1, 200, 3), 1), Flags())
    wide = with_lift(ops.sum, last_of_many, element_ndim=1)
    x = torch.rand(2, 100, 5, 80)
    with emulated():
        y = associative_scan(wide, x, 1, backend="cuda")
        torch.testing.assert_close(y, x[..., -1].cumsum(1))
        with pytest.raises(BackendError, match="reads 520 bytes per element"):
            associative_scan(wide, torch.rand(2, 100, 5, 130), 1, backend="cuda")


def last_of_many(x: Tensor) -> Tensor:
    return x[-1]


def test_outputs_that_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as is read and written by a step on a GPU with little shared memory."""
    monkeypatch.setattr(scan, "shared_memory", lambda device: 101376)

    def many(count: int) -> Monoid:
        return monoid(
            torch.add, identity=0.0, name=f"test_cuda_writes_{count}", element_ndim=1,
            lift=last_of_many, lower=lambda state: torch.stack([state] * count, -1),
        )  # fmt: skip

    x = torch.rand(3, 100, 64, dtype=torch.float64)
    with emulated():
        y = associative_scan(many(128), x, 1, backend="cuda")
        torch.testing.assert_close(y, x[..., -1:].cumsum(1).expand(3, 100, 128))
        with pytest.raises(BackendError, match="writes 1032 bytes per element"):
            associative_scan(many(129), x, 1, backend="cuda")


@pytest.mark.exhaustive
def test_short_rows_of_wide_elements() -> None:
    """320 bytes each: tiles shrink to fewer threads until they fit."""
    for width in (40, 64):
        op = monoid(
            lambda a, b: a + b, identity=0.0, name=f"ends_of_{width}", element_ndim=1,
            lift=lambda x: x[..., 0] + x[..., -1],
        )  # fmt: skip
        x = torch.rand(2, 300, width, dtype=torch.float64)
        with emulated(processors=3):
            y = associative_scan(op, x, 1, backend="cuda")
        torch.testing.assert_close(y, (x[..., 0] + x[..., -1]).cumsum(1))


@pytest.mark.exhaustive
def test_rows_are_shared_by_as_many_blocks_as_their_tile_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every block looks at all others: not by as many as fit."""
    monkeypatch.setattr(Emulated, "blocks_per_processor", 4)
    with emulated(processors=3), tuning.forced(Choice(ROWS_TILE, "LOOKBACK")):
        check(Engine("cuda"), Problem("bicyclic", (2, 1500), 1), Flags())
        assert Emulated.launches[-1][1] == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("beside,per_chain", [(2, 1), (3, 2)])
def test_blocks_side_by_side(monkeypatch: pytest.MonkeyPatch, beside: int, per_chain: int) -> None:
    """Short axes: fewer blocks than chains, as many, and more."""
    monkeypatch.setattr(Emulated, "blocks_per_processor", beside)
    tile = replace(LANES_TILE, items=4, blocks=beside)
    with emulated(processors=3), tuning.forced(Choice(tile, "SERIAL")):
        for rows, channels in ((1, 5), (2, 24), (5, 30)):
            for flags in SOME_FLAGS[1:3]:
                length = per_chain * tile.steps - 1
                check(CUDA, Problem("bicyclic", (rows, length, channels), 1), flags)
                chains = rows * -(-channels // tile.block_channels)
                assert Emulated.launches[-1][1] == min(chains, 3 * beside)


def test_short_axes_take_blocks_side_by_side() -> None:
    with emulated(processors=2):
        check(CUDA, Problem("affine", (4, 100, 64), 1), Flags(init=True, final=True))
        kernel = Emulated.launches[-1][0]
        assert kernel is not None and kernel.tile.threads == 128 and kernel.tile.blocks > 1


def test_divisions_by_multiplication() -> None:
    for divisor in (1, 2, 3, 7, 24, 127, 1 << 20, (1 << 31) - 1):
        factor, shift = scan.inverse(divisor)
        assert 0 < factor < 1 << 32
        for n in (0, 1, divisor - 1, divisor, 12345, 2**31 - 2, 2**31 - 1):
            assert (n * factor >> shift) == n // divisor


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", sanitized.MODES)
def test_what_compute_sanitizer_is_given(mode: str) -> None:
    """It runs what it says, on a GPU of 132 multiprocessors."""
    choice, _ = sanitized.MODES[mode]
    added = mock.patch.dict(LAYOUTS, sanitized.SURROUNDED)
    with added, emulated(processors=132), tuning.forced(choice):
        problem, flags = list(sanitized.cells(mode, packed=False))[7]
        check(Engine("cuda"), problem, flags)
        kernel, grid = Emulated.launches[-1]
        assert kernel is not None and kernel.tile == choice.tile and kernel.mode == choice.mode
        assert problem.length == 517 and grid > 1


@pytest.mark.parametrize("mode", LANES)
def test_states_of_many_words(mode: Mode) -> None:
    """5 × 5 matrices, and the gradient of 4 × 4 ones, in lanes; exact products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (2, 75, 5, 5, 5), generator=generator, dtype=torch.int32)
    with emulated(processors=5), tuning.forced(Choice(LanesTile(64, 4, 1, 1, 2), mode)):
        y = associative_scan(ops.matmul, x, 1, backend="cuda")
        assert torch.equal(y, reference_scan(ops.matmul, x, 1))
        a = (torch.rand(2, 75, 4, 4, 4, generator=generator) / 4).requires_grad_()
        g = torch.rand(2, 75, 4, 4, 4, generator=generator)
        found, right = (
            torch.autograd.grad(associative_scan(ops.matmul, a, 1, backend=backend), a, g)[0]
            for backend in ("cuda", "eager")
        )
        torch.testing.assert_close(found, right)
        assert len(Emulated.launches) == 3
