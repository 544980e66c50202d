"""The tiles of CUDA kernels over vectors, and into how many segments they cut an axis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from assocscan.cuda.vectors import prepare
from assocscan.cuda.vectors import tile as tiles
from assocscan.cuda.vectors.tile import (
    CHUNKS,
    MOST_SEGMENTS,
    VectorTile,
    busy,
    choose_segments,
    cost_cut,
    cost_whole,
    cut_tiles,
    variants,
    whole_tiles,
)
from assocscan.engines.base.vectors.kernel import CHUNK

TILE = VectorTile(128, 4, 1, 4, 3, 3, 8)


@pytest.mark.parametrize("choose", [whole_tiles, cut_tiles])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 32, 33, 64, 128, 200, 1024])
def test_a_tile_is_whole_warps_with_all_states(size: int, backward: bool, choose: object) -> None:
    for tile in (v for t in choose(size, backward) for v in variants(t)):  # type: ignore[operator]
        assert tile.states == 1 << (size - 1).bit_length()
        assert tile.threads % 32 == 0 and 32 % tile.spread == 0
        assert tile.lanes * tile.states == tile.threads * tile.channels * tile.each
        assert tile.blocks >= 1 and tile.stages >= 2 and 32 % tile.group == 0
        assert tile.row_steps in (tile.group, CHUNK)


@pytest.mark.parametrize("size", [300, 600, 1024])
def test_carries_before_groups_fit_in_shared_memory(size: int) -> None:
    tile = whole_tiles(size, True)[-1]
    carries = CHUNK // tile.group * tile.threads * tile.channels * tile.each * 4
    assert carries <= 64 << 10


def test_busy() -> None:
    places = TILE.blocks * 10
    assert busy(TILE, places, 10) == 1 == busy(TILE, 3 * places, 10)
    assert busy(TILE, 1, 10) == 1 / places
    # One block more than there are places is a turn of its own.
    assert busy(TILE, places + 1, 10) == (places + 1) / (2 * places)


@pytest.mark.parametrize("backward", [False, True])
def test_the_cost_falls_with_the_places_that_are_taken(backward: bool) -> None:
    assert cost_whole(TILE, backward, 3 * 132, 132) == 1
    costs = [cost_whole(TILE, backward, n, 132) for n in (1, 10, 100, 3 * 132)]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    # A cut into one segment has no totals, yet its tile is another one's.
    assert cost_cut(TILE, backward, 3 * 132, 1, 132) == pytest.approx(
        tiles.CUT[backward] + tiles.ONE_SEGMENT
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("blocks", [1, 7, 48, 395, 396, 397, 10**6])
@pytest.mark.parametrize("chunks", [1, 2, CHUNKS, 2 * CHUNKS - 1, 2 * CHUNKS, 129, 2048, 10**6])
def test_segments_cover_the_axis(chunks: int, blocks: int, backward: bool) -> None:
    """All chunks, none twice, and no segment that is empty."""
    segments, each, cost = choose_segments(TILE, backward, blocks, chunks, 132, chunks)
    assert 1 <= segments <= MOST_SEGMENTS
    assert (segments - 1) * each < chunks <= segments * each
    assert cost > 0
    if segments > 1:
        assert each >= CHUNKS


def test_one_chunk_is_one_segment() -> None:
    for backward in (False, True):
        assert choose_segments(TILE, backward, 1, 1, 132, 1)[:2] == (1, 1)
        few = 2 * CHUNKS - 1
        assert choose_segments(TILE, backward, 1, few, 132, few)[:2] == (1, few)
        assert choose_segments(TILE, backward, 1, 64 * CHUNKS, 132, 1)[:2] == (1, 64 * CHUNKS)


@pytest.mark.parametrize("backward", [False, True])
def test_few_chains_of_a_long_axis_are_cut_and_many_are_not(backward: bool) -> None:
    few, chunks = 4, 2048
    tile = cut_tiles(16, backward)[0]
    segments, _, cost = choose_segments(tile, backward, few, chunks, 132, chunks)
    assert segments > 8
    assert cost < cost_whole(whole_tiles(16, backward)[0], backward, few, 132)
    cut = cut_tiles(16, backward)[0]
    many = 8 * cut.blocks * 132
    assert choose_segments(cut, backward, many, chunks, 132, chunks)[:2] == (1, chunks)


def test_a_cut_pays_more_for_reductions() -> None:
    """A reduction walks each segment once, another scan walks it twice."""
    cut, chunks, places = cut_tiles(16, False)[0], 2048, cut_tiles(16, False)[0].blocks * 132
    for blocks in (1, 4, 100):
        *_, scan = choose_segments(cut, False, blocks, chunks, 132, chunks)
        segments, _, reduction = choose_segments(cut, False, blocks, chunks, 132, chunks, True)
        assert segments > 1 and reduction < scan
    assert choose_segments(cut, False, 8 * places, chunks, 132, chunks, True)[:2] == (1, chunks)
    # Without a cut, neither has totals.
    assert cost_cut(cut, False, places, 1, 132, True) == cost_cut(cut, False, places, 1, 132)


def shares(shape: tuple[int, int, int], backward: bool) -> list[prepare.Share]:
    """For a batch [rows, steps, lanes] on an H200."""
    spec: Any = SimpleNamespace(
        sequences=None, device=torch.device("cpu"), length=shape[1], batch=shape,
        chains=shape[0] * shape[2], segments=None,
    )  # fmt: skip
    with mock.patch.object(prepare, "processors", lambda device: 132):
        return prepare.shares(spec, 2, 16, backward, lambda: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "shape, forward, backward",
    [  # as measured: docs/performance/vectors.md
        ((8, 4096, 1536), (32, False), (96, False)),
        ((4, 4096, 1536), (32, False), (64, True)),
        ((2, 2048, 1536), (64, True), (64, True)),
        ((1, 65536, 1536), (64, True), (64, True)),
    ],
)
def test_lanes_of_a_block_and_cuts_at_measured_shapes(
    shape: tuple[int, int, int], forward: tuple[int, bool], backward: tuple[int, bool]
) -> None:
    for wanted, is_backward in ((forward, False), (backward, True)):
        best = shares(shape, is_backward)[0]
        assert (best.tile.lanes, best.segments > 1) == wanted
