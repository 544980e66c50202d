"""Whole generated kernels against golden files: one of each form.

The scans run on meta tensors with tiles of their own, and nothing is launched: the texts are the
same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import golden
import pytest
import torch
from golden import check_golden
from torch import Tensor

from assocscan import associative_scan, monoid, ops
from assocscan.engines.triton.kernel import Tile
from assocscan.engines.triton.matrix.source import source as matrix_source
from assocscan.engines.triton.prepare import LoadedKernel
from assocscan.engines.triton.source import source
from assocscan.engines.triton.tiles import forced
from assocscan.program.matrix_operator import MatrixOperator
from assocscan.runtime import backends
from assocscan.runtime import executable_cache as executables

pytest.importorskip("triton", reason="Triton is not installed")

# [rows, steps] and [outer, steps, lanes].
ROWS, LANES = (3, 100), (2, 9, 5)
ROW, WIDE_ROW, LOADED_AHEAD = Tile(2, 8, 1, 1), Tile(1, 128, 1, 1), Tile(2, 8, 1, 1, prefetch=True)
PIECES, ONE_SEGMENT, STAGED = Tile(1, 4, 4, 1), Tile(4, 1, 2, 1), Tile(4, 4, 2, 1, stages=2)


def last_valid(left: Any, right: Any) -> Any:
    """A bool beside a float: bools are int8 where elements are exchanged."""
    return left[0] | right[0], torch.where(right[0], right[1], left[1])


LAST_VALID = monoid(last_valid, identity=(False, 0.0), name="golden_last_valid")
RECURRENCE = monoid(
    ops.affine.combine, identity=(1.0, 0.0), lower=lambda h: h[1], name="golden_recurrence"
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def affine(batch: Sequence[int], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """h[t] = a[t] h[t−1] + b[t], by one kernel."""
    xs = (meta(*batch, dtype=dtype), meta(*batch, dtype=dtype))
    associative_scan(ops.affine, xs, 1, **{"backend": "triton", **options})


def carry(*batch: int) -> tuple[Tensor, Tensor]:
    return meta(*batch), meta(*batch)


def packed_rows() -> None:
    offsets = torch.tensor([0, 5, 5, 100])
    affine(ROWS, offsets=offsets, init=carry(3, 3), return_final=True, reverse=True)


def marked_lanes() -> None:
    batch = (1, 100, 6)
    associative_scan(LAST_VALID, (meta(*batch, dtype=torch.bool), meta(*batch)), 1,
                     backend="triton", return_final=True)  # fmt: skip


def adjoint() -> None:
    """The forward scan, then the backward scan that reads the saved state one step further, and
    `init` beyond the axis."""
    a, b, h = (meta(*shape).requires_grad_() for shape in (ROWS, ROWS, (3,)))
    y = associative_scan(RECURRENCE, (a, b), 1, init=(meta(3), h), backend="triton")
    torch.autograd.grad(y, (a, b, h), torch.empty_like(y))


def matrices(size: int, **options: Any) -> None:
    xs = meta(2, 7, size, size, dtype=torch.bfloat16), meta(2, 7, size)
    associative_scan(ops.matrix_affine, xs, 1, backend="triton", **options)


FINAL_AND_INIT = {"init": carry(2, 5), "return_final": True}
# The name of the golden file → the tile, the scan, and which of its kernels is meant.
KERNELS: dict[str, tuple[Tile, Callable[[], None], int]] = {
    "rows_in_one_tile": (WIDE_ROW, lambda: affine(ROWS), 0),
    "rows_in_several_tiles": (LOADED_AHEAD, lambda: affine(ROWS, reverse=True), 0),
    "rows_exclusive": (ROW, lambda: affine(ROWS, inclusive=False, return_final=True), 0),
    "rows_packed": (ROW, packed_rows, 0),
    "rows_totals": (WIDE_ROW, lambda: affine((3, 100_000), backend="multipass"), 0),
    "rows_rescan": (WIDE_ROW, lambda: affine((3, 100_000), backend="multipass"), -1),
    "rows_adjoint": (ROW, adjoint, -1),
    "rows_adjoint_in_pieces": (PIECES, adjoint, -1),
    "lanes_one_segment": (ONE_SEGMENT, lambda: affine(LANES, **FINAL_AND_INIT), 0),
    "lanes_segments": (STAGED, lambda: affine(LANES, **FINAL_AND_INIT), 0),
    "lanes_segments_of_bools": (STAGED, marked_lanes, 0),
    "lanes_segments_exclusive": (STAGED, lambda: affine(LANES, inclusive=False), 0),
    "lanes_of_complex_numbers": (STAGED, lambda: affine(LANES, torch.complex64), 0),
    "lanes_totals": (STAGED, lambda: affine((1, 100_000, 5), backend="multipass"), 0),
    "lanes_rescan": (STAGED, lambda: affine((1, 100_000, 5), backend="multipass",
                                            init=carry(1, 5), return_final=True), -1),
    "matrices": (Tile(1, 1, 1, 4), lambda: matrices(16, return_final=True, inclusive=False), 0),
    "matrices_in_slices": (Tile(1, 1, 1, 4), lambda: matrices(64, reverse=True), 0),
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that would be launched."""
    launched: list[Any] = []
    monkeypatch.setattr(LoadedKernel, "launch", lambda loaded, _: launched.append(loaded.kernel))
    monkeypatch.setattr(backends, "why_not", lambda call, backend: None)  # meta is no GPU
    yield launched
    executables._PREPARED.clear()


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(kernels: list[Any], name: str) -> None:
    tile, scan, which = KERNELS[name]
    with forced(tile):
        scan()
    kernel = kernels[which]
    is_matrix = isinstance(kernel.operator, MatrixOperator)
    text = (matrix_source if is_matrix else source)(kernel)
    # The first line has the operator's name: that of the first of equal operators.
    head, _, body = text.partition("\n")
    assert head.startswith('"""Generated by assocscan: ')
    check_golden(f"triton/{name}.triton", body)


def test_every_golden_file_has_its_kernel() -> None:
    found = {path.name for path in (golden.GOLDEN / "triton").iterdir()}
    assert found == {f"{name}.triton" for name in KERNELS}
