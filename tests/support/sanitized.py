r"""The CUDA engine on small problems of the table, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/sanitized.py
    compute-sanitizer --tool racecheck --kernel-name kns=scan \
        python tests/support/sanitized.py --racecheck

Every way to share an axis is forced in turn, with tiles that make several blocks and rings turn
over. `--racecheck` builds the kernels with mbarriers in place of named barriers (cuda/device.cuh),
whose hand-overs the tool can follow; it wants compute-sanitizer 2026.4 (the package
nvidia-cuda-sanitizer-api 13.5) or newer. Bulk copies take whole 16 bytes: inputs lie in zeroed
storage, so that initcheck has nothing to say of the bytes around them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from unittest import mock

import torch
import vector_cases
import vector_kernels
from table import LAYOUTS, Engine, Flags, Problem, check
from torch import Tensor

from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import compiler
from assocscan.cuda.kernel import LanesTile, RowsTile
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.runtime import gpu_engine_choice

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


def surrounded(before: int) -> Callable[[Tensor], Tensor]:
    """A layout in zeroed storage, `before` scalars behind its beginning."""

    def layout(x: Tensor) -> Tensor:
        storage = x.new_zeros(x.numel() + 64)
        return storage[before : before + x.numel()].view(x.shape).copy_(x)

    return layout


SURROUNDED = {"surrounded": surrounded(0), "surrounded, skewed": surrounded(1)}


def cells(mode: str) -> Iterator[tuple[Problem, Flags]]:
    """What is run in a mode."""
    outer, *inner = MODES[mode][1]
    for case, layout in product(CASES, SURROUNDED):
        for length in (2, 33, 517):
            yield from product([Problem(case, (outer, length, *inner), 1, layout)], FLAGS)
    segmented = Problem("bicyclic", (BOUNDS[-1], *inner), 0, "surrounded", BOUNDS)
    yield from product([segmented], FLAGS)


VECTORS = "vectors"  # the kernels over vectors of states, with their gradients
VECTOR_CASES = ("selective", "gated", "attention", "plain")
VECTOR_SHAPES = ((2, 37, 5, 3), (1, 66, 40, 16), (1, 64, 8, 33))
# Rows that are widened; a block of 384 threads going back, and one more with few lanes.
NARROW_SHAPES = ((1, 66, 99, 16), (1, 35, 3, 2))
# A last segment with few steps, and one with none; several blocks of lanes; 2×2 totals going back.
CUT_CELLS = (
    ("selective", (1, 99, 67, 16), torch.float32),
    ("selective", (2, 65, 5, 3), torch.bfloat16),
    ("gated", (1, 68, 40, 16), torch.bfloat16),
    ("turning", (1, 70, 5, 3), torch.float32),
)
Cell = tuple[str, tuple[int, int, int, int], torch.dtype]


def check_vectors() -> int:
    """Values and gradients of operators over vectors; returns how many scans there were."""
    whole: list[Cell] = [
        *((name, shape, torch.float32) for name, shape in product(VECTOR_CASES, VECTOR_SHAPES)),
        *(("selective", shape, torch.bfloat16) for shape in NARROW_SHAPES),
    ]

    def check_all(cells: Sequence[Cell], finals: bool) -> None:
        for name, shape, dtype in cells:
            leaves = vector_kernels.leaves_on("cuda", name, shape, dtype)
            vector_cases.check(vector_cases.CASES[name], leaves, backend="cuda", finals=finals)

    with (
        mock.patch.object(gpu_engine_choice, "is_worth_vectors", lambda call: True),
        vector_kernels.noted() as prepared,
    ):
        check_all(whole, True)
        assert 384 in {p.kernel.tile.threads for p in prepared}
        with vector_kernels.cut(1):
            check_all(CUT_CELLS, False)  # totals for finals too would be many kernels more
        cut = {type(p.kernel.operator) for p in prepared if p.segments > 1}
        assert cut == set(vector_kernels.PASSES)
    return len(whole) + len(CUT_CELLS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*MODES, VECTORS]
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(names)}; all of them")
    parser.add_argument("--racecheck", action="store_true", help="mbarriers for named barriers")
    given = parser.parse_args()
    if unknown := sorted(set(given.modes) - set(names)):
        parser.error(f"unknown modes {', '.join(unknown)}; there are {', '.join(names)}")
    compiler.OPTIONS += ("-lineinfo", "-DRACECHECK") if given.racecheck else ("-lineinfo",)
    LAYOUTS.update(SURROUNDED)
    wrong = 0
    for mode in given.modes or names:
        scans = 0
        if mode == VECTORS:
            print(f"{mode}: {check_vectors()} scans", flush=True)
            continue
        with tuning.forced(MODES[mode][0]):
            for problem, flags in cells(mode):
                try:
                    check(Engine("cuda", "cuda"), problem, flags)
                except AssertionError as error:
                    wrong += 1
                    print(f"{mode}: {error}")
                scans += 1
        torch.cuda.synchronize()
        print(f"{mode}: {scans} scans", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
