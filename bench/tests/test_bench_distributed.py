"""`bench distributed`: the ranks, and that what they time is one scan over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank, World

from assocscan_bench.settings import Settings
from assocscan_bench.suite import distributed as suite
from assocscan_bench.suite.distributed import RECURRENCE, SELECTIVE, Work

WORKS = [
    Work(RECURRENCE, (2, 40, 3), torch.float32),
    Work(RECURRENCE, (1, 30, 5), torch.bfloat16),
    Work(SELECTIVE, (1, 20, 4, 3), torch.float32),
]


def check_scans(world: Rank, work: Work) -> None:
    """Every rank draws the same part: the whole is the part repeated."""
    torch.manual_seed(0)
    inputs, _, alone, over_ranks, total = suite.scans(torch.device("cpu"), work, world.group)
    series = [t.dim() == 3 for t in inputs]
    whole = [
        torch.cat([t] * world.size, 1) if s else t for t, s in zip(inputs, series, strict=True)
    ]
    wanted = alone(*whole).chunk(world.size, 1)[world.rank]
    close = {"rtol": 2e-2, "atol": 2e-2} if work.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(over_ranks(*inputs), wanted, **close)
    assert world.rank == 0 or not torch.allclose(alone(*inputs), wanted)
    found: Any = total()
    if work.scan == RECURRENCE:
        torch.testing.assert_close(found[1], alone(*inputs)[:, -1], **close)
    else:
        torch.testing.assert_close(found.flatten(1), alone(*inputs)[:, -1])


@pytest.mark.slow
@pytest.mark.thinned(5)
@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_scans(world: World, size: int, work: Work) -> None:
    world.run(check_scans, size, work)


@pytest.mark.exhaustive
@pytest.mark.parametrize("work", WORKS[1:], ids=str)
def test_ranks_answer_every_call(work: Work) -> None:
    """Twice, so that gradients of a graph that is kept are among them."""
    ranks = suite.Processes(2, "cpu", work)
    calls: list[Callable[[], int]] = [
        ranks.prepare(name)
        for name in (
            suite.COLLECTIVE,
            suite.TOTAL,
            *suite.PASSES,
            *map(suite.ALONE.format, suite.PASSES),
        )
    ]
    assert [call() for call in calls * 2] == [2] * 12
    with pytest.raises(RuntimeError, match="KeyError"):
        ranks.call("nothing")


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_bytes(work: Work) -> None:
    """Each tensor counts once."""
    rows, width = work.shape[0] * work.shape[1], work.shape[2]
    series = rows * width * work.dtype.itemsize
    if work.scan == RECURRENCE:
        assert work.bytes == (3 * series, 5 * series, 2 * series)
    else:
        assert work.bytes[0] == 4 * series + 2 * rows * 3 * 4
    assert work.state_bytes == 8 * work.shape[0] * width * (3 if work.scan == SELECTIVE else 1)


def test_cases_have_the_shapes_that_are_promised() -> None:
    gpu = Settings(torch.device("cuda"))
    assert [work.shape for work in suite.works(gpu)] == [
        (1, 1 << 24, 64), (8, 65536, 1536), (1, 65536, 1536, 16)
    ]  # fmt: skip
    assert [work.dtype for work in suite.works(gpu)] == [
        torch.float32, torch.bfloat16, torch.float32
    ]  # fmt: skip
