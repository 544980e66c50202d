"""The CUDA engine on a real GPU: beyond 32 bits, streams, CUDA graphs, epochs, host time, speed."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from table import CASES, Engine, Flags, Problem, check
from torch import Tensor

from assocscan import BackendError, associative_scan, cumsum, monoid, ops
from assocscan.cli import stress_kernels
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import launcher, workspace
from assocscan.cuda.kernel import LanesTile, Mode, RowsTile
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or engines.availability()["cuda"] is not None,
        reason=str(engines.availability()["cuda"]),
    ),
]

CUDA = Engine("cuda", "cuda")
GIB = 1 << 30
LANES_TILE, ROWS_TILE = LanesTile(256, 32, 2, 2, 3), RowsTile(128, 4, 3, 64, 4, 2)
MODES: tuple[tuple[Choice, tuple[int, ...], int], ...] = (
    (Choice(LANES_TILE, "SERIAL"), (2, 1, 40), 1),
    (Choice(LANES_TILE, "CHAINED"), (2, 1, 40), 1),
    (Choice(LANES_TILE, "LOOKBACK"), (2, 1, 40), 1),
    (Choice(LanesTile(256, 32, 2, 2, 4, lead=2), "LOOKBACK", group=1), (1, 1, 40), 1),
    (Choice(ROWS_TILE, "SERIAL"), (3, 1), 1),
    (Choice(ROWS_TILE, "LOOKBACK"), (3, 1), 1),
    (Choice(RowsTile(64, 4, 7, 64, 4, 5, late=3), "LOOKBACK"), (3, 1), 1),
)
RECURRENCE = monoid(
    lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
    identity=(1.0, 0.0),
    name="test_cuda_gpu_recurrence",
    lower=lambda state: state[1],
)


@pytest.mark.parametrize("choice,shape,axis", MODES)
def test_every_length(choice: Choice, shape: tuple[int, ...], axis: int) -> None:
    """Up to two tiles and a step, in one problem after another, without waiting in between."""
    flags = (Flags(), Flags(True, True, True, True), Flags(False, False, True, True))
    with tuning.forced(choice):
        for length in range(1, 2 * choice.tile.steps + 2):
            full = (*shape[:axis], length, *shape[axis + 1 :])
            check(CUDA, Problem("bicyclic", full, axis), flags[length % 3])


@pytest.mark.parametrize("case", CASES)
def test_operators_at_their_own_tiles(case: str) -> None:
    for shape, axis in (((1, 5000, 64), 1), ((3, 4100), 1), ((300, 700), 1)):
        problem = Problem(case, shape, axis)
        flags = Flags(reverse=True, final=True)
        check(CUDA, problem, flags if problem.allows(flags) else Flags())


def test_more_than_32_bits() -> None:
    length = (1 << 32) + 5
    if torch.cuda.mem_get_info()[0] < 20 * GIB:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = torch.randint(-128, 128, (length,), dtype=torch.int8, device="cuda")
    y = associative_scan(ops.sum, x, backend="cuda")
    carry = 0
    for begin in range(0, length, 1 << 28):
        part = x[begin : begin + (1 << 28)].cumsum(0, dtype=torch.int64) + carry
        assert torch.equal(y[begin : begin + (1 << 28)], part.to(torch.int8))
        carry = int(part[-1])


@pytest.mark.parametrize(
    "choice",
    [
        Choice(LANES_TILE, "LOOKBACK"),
        Choice(ROWS_TILE, "LOOKBACK"),
        Choice(RowsTile(128, 12, 7, 256, 4, 5, late=3), "LOOKBACK"),
    ],
)
def test_a_graph_replayed(choice: Choice) -> None:
    """A thousand times, with changing inputs and plain calls in between."""
    shape, axis = ((20000, 40), 0) if isinstance(choice.tile, LanesTile) else ((2, 50000), 1)
    x = torch.zeros(shape, dtype=torch.int32, device="cuda")
    with tuning.forced(choice):
        associative_scan(ops.sum, x, axis, backend="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = associative_scan(ops.sum, x, axis, backend="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for k in range(1000):
            x.random_(-99, 99)
            graph.replay()
            wrong += (y != x.cumsum(axis, dtype=torch.int32)).any()
            if k % 7 == 0:
                plain = associative_scan(ops.sum, x, axis, backend="cuda")
                wrong += (plain != y).any()
    assert int(wrong) == 0


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_without_warming_up_says_so() -> None:
    x = torch.ones(4, 3, 5, device="cuda", dtype=torch.int16)
    known = dict(launcher._LOADED)
    launcher._LOADED.clear()
    executables._PREPARED.clear()
    ops.sum.calls.clear()
    try:
        with (
            pytest.raises(BackendError, match="once before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            associative_scan(ops.max, x, 1, backend="cuda")
    finally:
        launcher._LOADED.update(known)
        torch.cuda.synchronize()


def test_streams_side_by_side() -> None:
    xs = [torch.randint(-9, 9, (1, 300_000, 8), device="cuda") for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in xs]
    for _ in range(50):
        for x, stream, found in zip(xs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(associative_scan(ops.sum, x, 1, backend="cuda"))
    torch.cuda.synchronize()
    for x, found in zip(xs, results, strict=True):
        assert all(torch.equal(y, x.cumsum(1)) for y in found)


def test_the_epoch_wraps() -> None:
    x = torch.randint(-9, 9, (1 << 20,), device="cuda")
    associative_scan(ops.sum, x, backend="cuda")
    torch.cuda.synchronize()
    for space in workspace._SPACES.values():
        space.memory[4:8].view(torch.int32).fill_(-4)
    for _ in range(6):
        assert torch.equal(associative_scan(ops.sum, x, backend="cuda"), x.cumsum(0))


@pytest.mark.parametrize("words", [1, 2, 6, 12])
def test_message_passing(words: int) -> None:
    assert stress_kernels.message_passing(torch.device("cuda"), words, 300) == 0


@pytest.mark.parametrize("mode", ["SERIAL", "CHAINED", "LOOKBACK"])
def test_denormals_survive(mode: Mode) -> None:
    x = torch.full((5000, 8), 1e-41, device="cuda")
    with tuning.forced(Choice(LanesTile(256, 8, 4, 8, 3), mode)):
        y = associative_scan(ops.max, x, backend="cuda")
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    "shape,axis", [((8, 4096, 256), 1), ((1, 1 << 20), 1), ((1, 1 << 17, 8), 1)]
)
def test_the_same_bits_every_time(shape: tuple[int, ...], axis: int) -> None:
    a, b = torch.rand(shape, device="cuda"), torch.randn(shape, device="cuda")
    first = associative_scan(RECURRENCE, (a, b), axis, backend="cuda")
    for _ in range(50):
        assert torch.equal(first, associative_scan(RECURRENCE, (a, b), axis, backend="cuda"))


@pytest.mark.host_time
def test_host_time() -> None:
    """A warm call takes little of the host's time; printed with -s."""
    x = torch.ones(4, 64, 32, device="cuda")
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            cumsum_by_cuda(x)
        times.append((time.perf_counter() - begin) / 50)
    median = 1e6 * statistics.median(times)
    print(f"host time of a warm call: {median:.1f} µs; aim 20")
    assert median < 60


def cumsum_by_cuda(x: Tensor) -> Tensor:
    y: Tensor = associative_scan(ops.sum, x, 1, backend="cuda")
    return y


def test_compile_time_and_disk_cache() -> None:
    x = torch.ones(300, 5, device="cuda", dtype=torch.float64)
    begin = time.perf_counter()
    y = associative_scan(ops.sum, x, backend="cuda")
    compiled = time.perf_counter() - begin
    launcher._LOADED.clear()
    executables._PREPARED.clear()
    ops.sum.calls.clear()
    begin = time.perf_counter()
    associative_scan(ops.sum, x, backend="cuda")
    loaded = time.perf_counter() - begin
    print(f"first call {compiled:.3f} s, from the disk cache {loaded:.4f} s; aims 1 and 0.05")
    torch.testing.assert_close(y, cumsum(x.cpu(), 0).cuda())
