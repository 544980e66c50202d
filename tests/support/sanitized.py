r"""The CUDA engine on small problems of the table, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/sanitized.py
    compute-sanitizer --tool racecheck --kernel-name kns=scan \
        python tests/support/sanitized.py --racecheck
    compute-sanitizer --tool synccheck python tests/support/sanitized.py --synccheck

Every way to share an axis is forced in turn, with tiles that make several blocks and rings turn
over; then come scans over vectors with their gradients. An argument picks the modes that begin with
it: `vectors`, for these alone. `--packed` leaves out what is no packed sequence of them.

`--racecheck` builds the kernels with mbarriers in place of named barriers (cuda/device.cuh),
whose hand-overs the tool can follow; it wants compute-sanitizer 2026.4 (the package
nvidia-cuda-sanitizer-api 13.5) or newer. `--synccheck` builds them with barriers that need no
convergence. Bulk copies take whole 16 bytes: inputs lie in zeroed storage, so that initcheck has
nothing to say of the bytes around them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from typing import Any, NamedTuple
from unittest import mock

import torch
import vector_cases
import vector_kernels
import walked_cases
import window_cases
from table import LAYOUTS, Engine, Flags, Problem, check
from torch import Tensor
from two_passes import check_gradients, check_rank
from vector_kernels import Launched

from assocscan import monoid, nonlinear_recurrence, reduce
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import compiler
from assocscan.cuda.kernel import LanesTile, RowsTile
from assocscan.cuda.newton import prepare as newton
from assocscan.cuda.tile_choice_inputs import Choice, Parts
from assocscan.engines.base.vectors.kernel import CHUNK, BackwardKernel
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.runtime import gpu_engine_choice
from assocscan.testing import bicyclic

LANES = LanesTile(128, 32, 2, 2, 3)
NARROW = LanesTile(64, 4, 2, 2, 3)  # a warp of warp_totals has more lanes than channels
ROWS = RowsTile(128, 4, 3, 64, 4, 2)
MODES = {
    "lanes-serial": (Choice(LANES, "SERIAL"), (2, 1, 40)),
    "lanes-chained": (Choice(LANES, "CHAINED"), (2, 1, 40)),
    "lanes-lookback": (Choice(LANES, "LOOKBACK"), (2, 1, 40)),
    "lanes-parts": (Choice(LanesTile(128, 32, 2, 2, 2), "LOOKBACK"), (2, 1, 40)),
    "lanes-narrow": (Choice(NARROW, "LOOKBACK"), (2, 1, 4)),
    "rows-serial": (Choice(ROWS, "SERIAL"), (3,)),
    "rows-lookback": (Choice(ROWS, "LOOKBACK"), (3,)),
    "rows-deep": (Choice(RowsTile(32, 2, 7, 32, 4, 5, late=3), "LOOKBACK"), (130,)),
}
FLAGS = (Flags(), Flags(True, True, True, True), Flags(False, False, True, True))


CASES = ("bicyclic", "affine", "brackets", "bfloat16")
BOUNDS = (0, 0, 3, 3, 200, 201, 500)
# Short sequences and empty ones, more of them than a warp loads together, beside a long one.
LENGTHS = [*[1] * 40, *[0] * 700, *[2, 0, 3] * 30, 600, *[1, 2] * 200]
MANY = (0, *accumulate(LENGTHS))


def surrounded(before: int) -> Callable[[Tensor], Tensor]:
    """A layout in zeroed storage, `before` scalars behind its beginning."""

    def layout(x: Tensor) -> Tensor:
        storage = x.new_zeros(x.numel() + 64)
        return storage[before : before + x.numel()].view(x.shape).copy_(x)

    return layout


SURROUNDED = {"surrounded": surrounded(0), "surrounded, skewed": surrounded(1)}


def cells(mode: str, packed: bool) -> Iterator[tuple[Problem, Flags]]:
    """What is run in a mode. packed: of packed sequences alone."""
    outer, *inner = MODES[mode][1]
    for case, layout in () if packed else product(CASES, SURROUNDED):
        for length in (2, 33, 517):
            yield from product([Problem(case, (outer, length, *inner), 1, layout)], FLAGS)
    for bounds, layout in (
        (BOUNDS, "surrounded"),
        (MANY, "surrounded"),
        (MANY, "surrounded, skewed"),
    ):
        yield from product([Problem("bicyclic", (bounds[-1], *inner), 0, layout, bounds)], FLAGS)


@monoid(identity=(0, 0), name="bicyclic_of_sanitized")
def pairs(left: Any, right: Any) -> Any:
    return bicyclic(left, right)


def check_totals(mode: str, device: str = "cuda") -> int:
    """Totals of packed sequences, nothing else; returns how many scans there were."""
    scans = 0
    for bounds, reverse, enters in product((BOUNDS, MANY), (False, True), (False, True)):
        shape = (bounds[-1], *MODES[mode][1][1:])
        xs = [torch.randint(0, 9, shape) for _ in range(2)]
        init = [torch.randint(0, 9, (len(bounds) - 1, *shape[1:])) for _ in range(2)]
        found = []
        for where, backend in ((device, "cuda"), ("cpu", "cpu")):
            given, starts = (tuple(t.to(where) for t in ts) for ts in (xs, init))
            found.append(
                reduce(
                    pairs, given, 0, reverse, init=starts if enters else None,
                    offsets=torch.tensor(bounds, device=where), backend=backend,
                )
            )  # fmt: skip
        assert all(torch.equal(x.cpu(), y) for x, y in zip(*found, strict=True)), (mode, reverse)
        scans += 1
    return scans


class Cell(NamedTuple):
    """A scan over vectors, with all gradients. shape: batch, steps, lanes, states.

    chunks: of each segment into which the axis is cut; 0 where it is not. bounds: of packed
    sequences, which have an init and finals.
    """

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    flags: Flags = Flags()
    chunks: int = 0
    bounds: tuple[int, ...] = ()


FINAL, EVERY = Flags(final=True), Flags(True, False, True, True)
SHAPES = ((2, 37, 5, 3), (1, 66, 40, 16), (1, 64, 8, 33))
# The kernels over vectors of states. Lanes that fill a block, and others; a ring of stages that
# turns over; rows of 16 bits that are widened, and rows that are too short for it.
VECTORS = {
    "vectors-whole": (
        *(Cell(*cell, flags=FINAL) for cell in product(("selective", "attention"), SHAPES)),
        *(Cell("gated", shape, flags=FINAL) for shape in SHAPES),
        Cell("plain", SHAPES[0], flags=FINAL),
        Cell("selective", (1, 34, 2, 200)),  # a warp for each lane
        Cell("selective", (1, 66, 99, 16), torch.bfloat16, FINAL),
        Cell("selective", (1, 35, 3, 2), torch.bfloat16, FINAL),
    ),
    # A last segment with few steps, and one with none; segments of one chunk, and of more chunks
    # than the ring has stages; several blocks of lanes; 2×2 totals going back.
    "vectors-cut": (
        Cell("selective", (1, 99, 67, 16), chunks=1),
        Cell("selective", (2, 65, 5, 3), torch.bfloat16, chunks=1),
        Cell("gated", (1, 68, 40, 16), torch.bfloat16, chunks=1),
        Cell("turning", (1, 70, 5, 3), chunks=1),
        Cell("selective", (1, 260, 5, 16), flags=Flags(reverse=True), chunks=5),
        Cell("gated", (1, 133, 40, 16), flags=EVERY, chunks=2),
    ),
    "vectors-flags": (
        Cell("selective", (2, 66, 96, 16), flags=EVERY),
        Cell("gated", (1, 66, 99, 16), torch.bfloat16, Flags(True, True, True)),
        Cell("selective", (2, 100, 40, 16), bounds=(0, 0, 3, 36, 36, 100)),
        Cell("gated", (1, 70, 99, 16), flags=Flags(reverse=True), bounds=(0, 1, 33, 70)),
        Cell("selective", (1, 40, 5, 3), torch.float64, Flags(init=True)),
    ),
}

# Both directions hand totals to the next pass: a backward pass that combines them and walks
# nothing, one of which nothing but the totals is wanted (on the rank that comes first), and kernels
# that take them. Operator, dtype, reverse, inclusive, finals.
TWO_PASSES = (
    ("selective", torch.float32, False, True, False),
    ("selective", torch.bfloat16, True, True, False),
    ("gated", torch.float32, True, False, True),
    ("turning", torch.float32, False, True, False),
)


def check_handed() -> int:
    """Values and gradients of two passes in each direction, and of each rank of three; returns how
    many cases there were."""
    with vector_kernels.taken_for_all("cuda"), vector_kernels.noted() as prepared:
        for name, dtype, *flags in TWO_PASSES:
            check_gradients(name, "cuda", *flags, 2 * CHUNK + 3, dtype)
    assert any(isinstance(p.kernel, BackwardKernel) and not p.kernel.walks for p in prepared)
    with vector_kernels.taken_for_all("cuda"):
        for name, dtype, reverse, *_ in TWO_PASSES:
            for rank in range(3):
                check_rank(name, "cuda", rank, reverse, dtype)
    return len(TWO_PASSES) * 4


def check_walked(device: str = "cuda") -> int:
    """Steps that are not associative, with gradients: whole rows, odd ones, other tiles, axes cut
    into parts that are right, mended, begun earlier or left, packed."""
    at = {"backend": "cuda", "device": device}
    scans = 0
    for dtype, reverse in product((torch.float32, torch.bfloat16), (False, True)):
        # A state that fires where it passes 1 has no right value within a rounding of 1.
        names = ("gated", "two numbers", "fires")[: 3 if dtype == torch.float32 else 2]
        for name, shape in product(names, ((3, 70, 64), (2, 67, 71), (140, 9, 32))):
            walked_cases.check(walked_cases.CASES[name], shape, dtype, at, reverse)
            scans += 1
        for channels, items in ((1, 1), (2, 8)):
            tile = LanesTile(32, 32 * channels, channels, items, 3)
            with tuning.forced(Choice(tile, "WALKED")):
                walked_cases.check(walked_cases.CASES["gated"], (2, 33, 71), dtype, at, reverse)
            scans += 1
    cuts = (
        (512, Parts(2, 256, 64)), (323, Parts(3, 128, 64, 32)), (500, Parts(4, 128, 8)),
        (512, Parts(4, 128, 64, 32, 0, 256, 1 << 16)), (512, Parts(4, 128, 64, 32, 64, slow=19)),
    )  # fmt: skip
    for (length, cut), name in product(cuts, ("gated", "two numbers")):
        tile = LanesTile(32, 32, 1, 8, 4)
        with tuning.forced(Choice(tile, "WALKED", parts=cut)):
            walked_cases.check(walked_cases.CASES[name], (2, length, 71), torch.float32, at)
        scans += 1
    gated = walked_cases.CASES["gated"]
    given = gated.draw((2, 70, 33), torch.float32, device)
    given["init"] = torch.zeros(5, 2, 33, device=device)
    xs = [t.requires_grad_() for t in given["xs"]]
    offsets = torch.tensor([0, 0, 15, 31, 64, 70], device=device)
    y = nonlinear_recurrence(gated.step, **given, offsets=offsets, backend="cuda")
    torch.autograd.grad(y.sum(), xs)
    return scans + 1


def check_newton(device: str = "cuda") -> int:
    """Newton's method with gradients: blocks of one chain and of several, of one warp and more,
    windows that are solved and windows that are walked."""
    at = {"backend": "cuda", "device": device, "method": "newton"}
    cases = [
        *product(("gated", "two numbers"), ((1, 1, 4), (4, 1, 4), (2, 4, 3), (8, 8, 2)), (24, 1)),
        ("fires", (2, 2, 4), 24),
    ]
    for name, (warps, chains, items), most in cases:
        tile = LanesTile(32 * warps, chains, 1, items, 0)
        with mock.patch.object(newton, "choose_tile", lambda *_, tile=tile: tile):
            walked_cases.check(
                walked_cases.CASES[name], (2, 300, 7), torch.float32, at | {"max_iterations": most},
                most == 1,
            )  # fmt: skip
    return len(cases)


def check_windows(device: str = "cuda") -> int:
    """Windows with gradients: lanes as they lie and through shared memory, one tile and several."""
    names = ("max", "affine", "logaddexp")
    shapes = ((2, 100, 40), (1, 90, 130), (2, 150, 3), (1, 257, 1))
    cases = list(product(names, shapes, (2, 17, 65, 89)))
    for name, shape, width in cases:
        op, inputs = window_cases.OPERATORS[name]
        window_cases.check(
            op, inputs(*shape), width, device, reverse=width == 17, rtol=2e-4, atol=2e-4
        )
    return len(cases)


def check_cell(cell: Cell, device: str) -> list[Launched]:
    """Values and gradients; returns the kernels that were prepared."""
    case, flags = vector_cases.CASES[cell.name], cell.flags
    leaves = vector_kernels.leaves_on(device, cell.name, cell.shape, cell.dtype)
    way = vector_kernels.cut(cell.chunks) if cell.chunks else contextlib.nullcontext()
    init = vector_cases.starts_of(case, leaves) if flags.init else None
    with way, vector_kernels.noted() as prepared:
        if cell.bounds:
            vector_cases.check_packed(
                case, leaves, cell.bounds, reverse=flags.reverse, backend="cuda"
            )
        else:
            vector_cases.check(
                case, leaves, reverse=flags.reverse, inclusive=flags.inclusive, backend="cuda",
                init=init, finals=flags.final,
            )  # fmt: skip
    return prepared


def check_vectors(mode: str, device: str = "cuda") -> int:
    """Values and gradients of the scans of a mode; returns how many there were."""
    prepared: list[Launched] = []
    with mock.patch.object(gpu_engine_choice, "is_worth_vectors", lambda call: True):
        vector_kernels.forget_all()
        for cell in VECTORS[mode]:
            found = check_cell(cell, device)
            assert vector_kernels.passes(found) == set(vector_kernels.PASSES), cell
            if cell.chunks:  # every kernel is cut
                assert all(p.segments > 1 for p in found), cell
            prepared += found
    backward = {p.kernel.tile for p in prepared if isinstance(p.kernel.operator, VectorAdjoint)}
    assert any(tile.channels == 2 for tile in backward)
    assert mode != "vectors-whole" or any(tile.threads == 384 for tile in backward)
    return len(VECTORS[mode])


CHECKS: dict[str, Callable[[], int]] = {
    "vectors-handed": check_handed, "walked": check_walked, "newton": check_newton,
    "windows": check_windows,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*MODES, *VECTORS, *CHECKS]
    parser.add_argument(
        "modes", nargs="*", default=[""],
        help=f"run those whose names begin with one of these, of {', '.join(names)}; else all",
    )  # fmt: skip
    parser.add_argument("--packed", action="store_true", help="packed sequences alone")
    parser.add_argument("--racecheck", action="store_true", help="mbarriers for named barriers")
    parser.add_argument("--synccheck", action="store_true", help="barriers without convergence")
    given = parser.parse_args()
    for begin in given.modes:
        if not any(name.startswith(begin) for name in names):
            parser.error(f"no mode begins with {begin}; there are {', '.join(names)}")
    compiler.OPTIONS += ("-lineinfo",)
    compiler.OPTIONS += ("-DRACECHECK",) if given.racecheck else ()
    compiler.OPTIONS += ("-DSYNCCHECK",) if given.synccheck else ()
    LAYOUTS.update(SURROUNDED)
    wrong = 0
    for mode in (name for name in names if name.startswith(tuple(given.modes))):
        scans = 0
        if mode in VECTORS:
            print(f"{mode}: {check_vectors(mode)} scans", flush=True)
            continue
        if mode in CHECKS:
            print(f"{mode}: {CHECKS[mode]()} scans", flush=True)
            continue
        with tuning.forced(MODES[mode][0]):
            for problem, flags in cells(mode, given.packed):
                try:
                    check(Engine("cuda", "cuda"), problem, flags)
                except AssertionError as error:
                    wrong += 1
                    print(f"{mode}: {error}")
                scans += 1
            scans += check_totals(mode)
        torch.cuda.synchronize()
        print(f"{mode}: {scans} scans", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
