"""Which tiles are chosen: what must hold for every shape, and what was measured."""

from __future__ import annotations

import random

import pytest
import torch

from assocscan import ops
from assocscan.api.bind_arguments import bind
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import lanes_tiles as lanes_tuning
from assocscan.cuda import rows_tiles as rows_tuning
from assocscan.cuda.kernel import LanesTile, RowsTile, Tile, lanes_stage_bytes, smaller
from assocscan.cuda.leaf_layout import copy_of
from assocscan.cuda.tile_choice_inputs import Choice, Shape
from assocscan.engines.base.scan_spec import TensorSpec


def shape_of(rows: int, length: int, channels: int, bandwidth: float = 3.35e12) -> Shape:
    """A recurrence in float32, of which one array is written."""
    return Shape(True, rows, length, channels, 2, (4, 4), 4, 132, 227 << 10, bandwidth, 3)


def test_copies_of_packed_carries_are_dense() -> None:
    """A carry of packed sequences has one dimension more than the axis leaves: [S, channels]."""
    call = bind(
        ops.affine, (torch.rand(8, 5, 4), torch.rand(8, 5, 4)), 0, False, True,
        (torch.rand(3, 5, 4), torch.rand(3, 5, 4)), False, torch.tensor([0, 2, 5, 8]),
    )  # fmt: skip
    spec, tensors = call.scan(call.traced.operator)
    name = ("init", 0)
    given = TensorSpec.of(dict(zip(spec.names, tensors, strict=True))[name])
    assert copy_of(given, spec, name, (0, 1, 2)).strides == (20, 4, 1)
    assert copy_of(given, spec, name, (2, 0, 1)).strides == (20, 1, 5)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (2,), (2, 2), (16,)])
@pytest.mark.parametrize("cost", [1, 48])
def test_short_rows_are_cut_evenly(rows: int, sizes: tuple[int, ...], cost: int) -> None:
    """All blocks that 4 KB each are enough for have about as many tiles as the others; their rings
    hold all of them or four."""
    for length in (150_000, 1_000_001, *(1 << n for n in range(16, 23))):
        gpu = (132, 227 << 10, 3.35e12)
        shape = Shape(False, rows, length // rows, 1, len(sizes), sizes, sizes[0], *gpu, cost)
        tile = tuning.choose(shape).tile
        assert isinstance(tile, RowsTile)
        tiles = rows * -(-shape.length // tile.steps)
        blocks, rounds = min(132, length * sizes[0] // 4096), -(-tiles // 132)
        assert min(tiles, 132) >= 0.7 * blocks
        assert rounds * tile.steps * blocks <= 1.4 * length
        assert rounds > rows_tuning.EVEN_TILES or tile.stages >= min(4, rounds)


def test_costly_operators_fall_back_to_fewer_threads() -> None:
    """Six inputs do not fit with 384 threads and 99 KB."""
    shape = Shape(True, 1, 1024, 4, 1, (4,) * 6, 4, 128, 99 << 10, 1e12, 28)
    assert tuning.choose(shape).tile.threads == 256
    shape = Shape(True, 8, 1 << 20, 4, 3, (2, 2), 2, 132, 227 << 10, 3.35e12, 60)
    tile = tuning.choose(shape).tile
    assert isinstance(tile, LanesTile) and tile.block_channels == 4 and tile.items > 9
    for words, threads in ((1, 512), (4, 384)):  # more words need more registers
        shape = Shape(True, 8, 4096, 1536, words, (4,), 4, 132, 227 << 10, 3.35e12, 48)
        assert tuning.choose(shape).tile.threads == threads


def test_rings_follow_the_bandwidth() -> None:
    """96 chains for 132 multiprocessors: each has its block, with what memory delivers in time."""
    slow, fast = (tuning.choose(shape_of(8, 8192, 1536, b)) for b in (3.35e12, 4.9e12))
    assert slow.mode == fast.mode == "SERIAL"
    assert isinstance(slow.tile, LanesTile) and slow.tile.block_channels == 128
    assert slow.tile.items < fast.tile.items


def test_the_last_tile_is_not_mostly_empty() -> None:
    tile = tuning.choose(shape_of(4, 8192, 112)).tile
    assert 8192 % tile.steps == 0


@pytest.mark.parametrize("seed", range(40))
def test_every_shape_has_a_tile(seed: int) -> None:
    draw = random.Random(seed)
    lanes, words = draw.random() < 0.7, draw.choice([1, 2, 3, 4, 6, 7, 12, 20, 24, 64, 128])
    sizes = tuple(draw.choice([1, 2, 4, 8, 16, 64]) for _ in range(draw.choice([1, 1, 2, 3, 5])))
    shape = Shape(
        lanes, draw.choice([1, 3, 64, 5000]), draw.choice([1, 7, 333, 8192, 1 << 20]),
        draw.choice([1, 3, 33, 64, 1000]) if lanes else 1, words, sizes, draw.choice([0, 2, 4, 64]),
        draw.choice([1, 20, 132]), draw.choice([99 << 10, 227 << 10]), 2e12,
        draw.choice([1, 30, 2000]),
    )  # fmt: skip
    choice = tuning.choose(shape)
    assert choice.tile.items >= 1 and isinstance(choice.tile, LanesTile) == lanes
    if isinstance(choice.tile, LanesTile):
        unrolled = lanes_tuning.unrolled(choice.tile, shape.cost)
        assert choice.tile.items % unrolled == 0


@pytest.mark.parametrize("sizes", [(4,), (2, 2, 2)])
def test_rows_of_one_tile_are_not_cut(sizes: tuple[int, ...]) -> None:
    for rows, length in ((263, 1000), (200, 600), (140, 3000)):
        gpu = (132, 227 << 10, 3.35e12)
        choice = tuning.choose(Shape(False, rows, length, 1, 2, sizes, sizes[0], *gpu, 3))
        assert choice.mode == "SERIAL" and choice.tile.steps <= 2.6 * length


def test_two_tiles_of_rows_fit() -> None:
    shape = Shape(False, 32, 131072, 1, 4, (4, 4), 0, 24, 99 << 10, 3.35e12, 7)
    tile = tuning.choose(shape).tile
    assert tile.stages == 2 and tile.items == 20 and 2 * tile.steps * 8 <= 99 << 10


def test_tiles_shrink_to_a_warp() -> None:
    for threads in (64, 192, 256, 384, 448):
        tile: Tile | None = RowsTile(threads, 20, 9, 2048, 8, lead=5, late=2)
        while tile is not None:
            last, tile = tile, smaller(tile)
            assert last.lead < last.stages and last.late < last.lead
        assert last.threads == 32 and last.items == 1


def test_groups_of_aggregates() -> None:
    """All of a wave where one look finds them, then up to 16, 9 where 16 would make too many."""
    choice = Choice(LanesTile(256, 64, 4, 8, 3), "LOOKBACK")
    assert [choice.radix(ranks, 2) for ranks in (4, 9, 10, 66, 132)] == [4, 9, 10, 16, 9]
    assert [choice.radix(ranks, 5) for ranks in (4, 5, 8, 33, 132)] == [4, 5, 8, 5, 33]


@pytest.mark.parametrize("length,size", [(1 << 23, 4), (1 << 25, 2), (1 << 28, 4)])
def test_long_sums_take_one_block_per_processor(length: int, size: int) -> None:
    shape = Shape(False, 1, length, 1, 1, (size,), size, 132, 227 << 10, 4.8e12, 1)
    tile = RowsTile(384, 48 // size, 9, 8192 // size, 8, lead=5, late=2)
    assert tuning.choose(shape) == Choice(tile, "LOOKBACK")


@pytest.mark.parametrize(
    "shape,mode,block_channels",
    [
        ((8, 8192, 1536), "SERIAL", 128),  # 96 chains
        ((8, 1024, 1536), "SERIAL", 32),  # 384 chains, nearly three rounds
        ((32, 512, 768), "SERIAL", 64),
        ((16, 1024, 1024), "SERIAL", 64),  # 256 chains, two rounds; 128 of 512-byte rows lose 5 %
        ((2, 8192, 4096), "SERIAL", 64),
        ((1, 65536, 1024), "LOOKBACK", 64),
        ((1, 1 << 20, 64), "LOOKBACK", 32),
    ],
)
def test_measured_on_an_h200(shape: tuple[int, int, int], mode: str, block_channels: int) -> None:
    choice = tuning.choose(shape_of(*shape, bandwidth=4.8e12))
    assert isinstance(choice.tile, LanesTile)
    assert (choice.mode, choice.tile.block_channels) == (mode, block_channels)


# (rows, length, channels), bytes of each input, words → mode, channels of a block.
REDUCTIONS = [
    ((8, 65536, 1536), (2, 2), 2, "SERIAL", 128),  # 96 chains
    ((8, 65536, 1536), (4, 4), 2, "SERIAL", 128),
    ((1, 1 << 24, 64), (4, 4), 2, "LOOKBACK", 32),
    ((1, 1 << 20, 64), (4, 4), 2, "LOOKBACK", 32),
    ((1, 1 << 20, 64), (2, 2), 2, "LOOKBACK", 64),
    ((4, 8192, 512), (4,), 1, "LOOKBACK", 64),
]


def reduction(
    shape: tuple[int, int, int], sizes: tuple[int, ...], words: int, written: int = 0
) -> Shape:
    return Shape(True, *shape, words, sizes, written, 132, 227 << 10, 4.8e12, 3)


@pytest.mark.parametrize("shape,sizes,words,mode,block_channels", REDUCTIONS)
def test_reductions(
    shape: tuple[int, int, int], sizes: tuple[int, ...], words: int, mode: str, block_channels: int
) -> None:
    choice = tuning.choose(reduction(shape, sizes, words))
    tile = choice.tile
    assert isinstance(tile, LanesTile)
    assert (choice.mode, tile.block_channels) == (mode, block_channels)
    ring = tile.stages * tile.steps * tile.block_channels * sum(sizes)
    assert ring >= 96 << 10  # 40 KB are what memory delivers in a latency of 1.2 microseconds


def test_the_table_of_reductions_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors change the choice of reductions, and of nothing else."""
    given = (8, 65536, 1536), (2, 2), 2
    scans = tuning.choose(reduction(*given, written=2))
    rates = dict(lanes_tuning.REDUCED_RATES, CHAINED=2.0)
    monkeypatch.setattr(lanes_tuning, "REDUCED_RATES", rates)
    assert tuning.choose(reduction(*given)).mode == "CHAINED"
    monkeypatch.setattr(lanes_tuning, "REDUCED_RATES", dict(rates, SIDE=9.0))
    monkeypatch.setattr(lanes_tuning, "REDUCED_SIDE_STEPS", 1 << 20)
    assert tuning.choose(reduction(*given)).tile.blocks > 1
    monkeypatch.setattr(lanes_tuning, "REDUCED_IN_FLIGHT", 0.1)
    assert tuning.choose(reduction(*given, written=2)) == scans


def test_blocks_that_have_chains_to_themselves_have_enough_under_way() -> None:
    """96 and 128 chains, forward and backward: at least nine tenths of what is best."""
    for chains in (96, 128):
        for sizes, written in (((4, 4), 4), ((4, 4, 4), 8), ((2, 2, 2), 4), ((4,), 4)):
            shape = Shape(True, 1, 8192, 64 * chains, 2, sizes, written, 132, 227 << 10, 4.8e12, 4)
            choice = tuning.choose(shape)
            tile = choice.tile
            assert isinstance(tile, LanesTile) and choice.mode == "SERIAL"
            blocks = shape.channels // tile.block_channels
            ring = tile.stages * tile.steps * tile.block_channels * sum(sizes)
            assert blocks <= 132 and blocks * ring >= 0.88 * lanes_tuning.in_flight(shape)


@pytest.mark.parametrize(
    "shape,block_channels,blocks",
    [((8, 256, 1536), 32, 3), ((8, 300, 1536), 32, 3), ((16, 256, 768), 32, 3)],
)
@pytest.mark.parametrize("bandwidth", [3.35e12, 4.8e12])
def test_short_axes_take_blocks_side_by_side(
    shape: tuple[int, int, int], block_channels: int, blocks: int, bandwidth: float
) -> None:
    choice = tuning.choose(shape_of(*shape, bandwidth=bandwidth))
    tile = choice.tile
    assert isinstance(tile, LanesTile) and choice.mode == "SERIAL" and tile.threads == 128
    assert (tile.block_channels, tile.blocks) == (block_channels, blocks)


@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (2, 2, 2), (12,), (16, 2), (8, 1), (48,)])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_blocks_side_by_side_fit(memory: int, sizes: tuple[int, ...], words: int) -> None:
    """So many rings, with what every block has beside, fit into a multiprocessor's memory."""
    for rows, length, channels in ((8, 300, 1536), (100, 64, 100), (3, 512, 10_000), (500, 9, 16)):
        gpu = (132, memory, 3.35e12)
        shape = Shape(True, rows, length, channels, words, sizes, sizes[0], *gpu, 3)
        for rate, choice in lanes_tuning.side_choices(shape):
            tile = choice.tile
            assert isinstance(tile, LanesTile) and 0 < rate < 1.2
            assert tile.block_channels % tile.channels == 0
            assert tile.threads * tile.channels % tile.block_channels == 0
            cells = [-(-tile.channels * size // 4) * 4 for size in sizes]
            need = tile.stages * lanes_stage_bytes(tile, cells)
            need += lanes_tuning.fixed_bytes(shape, tile) + 1024
            assert tile.blocks in (2, 3) and tile.blocks * need <= memory + 1024
            assert tile.blocks * lanes_tuning.warps(choice) <= 20


def test_wide_states_reduce_two_tiles_ahead() -> None:
    """Where blocks share a chain; where there are enough chains, blocks take whole ones."""
    for lanes, modes in ((16, ("LOOKBACK",)), (144, ("CHAINED", "SERIAL"))):
        shape = Shape(True, 4, 8192, lanes, 16, (64,), 64, 132, 227 << 10, 3.35e12, 112)
        choice = tuning.choose(shape)
        assert choice.mode in modes
        assert isinstance(choice.tile, LanesTile) and choice.tile.items >= 3
        assert choice.tile.lead == (2 if choice.mode == "LOOKBACK" else 1)
