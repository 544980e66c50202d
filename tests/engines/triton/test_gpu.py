"""The Triton engines on a real GPU: sizes beyond 32 bits, streams, devices, graphs, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from table import AFFINE, TWO_FLAGS, Engine, Problem, check
from torch import Tensor

from assocscan import FallbackWarning, associative_scan, monoid, ops
from assocscan.engines.triton import loader as triton_loader
from assocscan.engines.triton import tiles
from assocscan.engines.triton.kernel import Tile
from assocscan.engines.triton.prepare import LoadedKernel
from assocscan.runtime import backends as engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ENGINES = (Engine("triton", "cuda"), Engine("multipass", "cuda"))
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
GIB = 1 << 30


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LoadedKernel]:
    """Every kernel launched, with its grid."""
    found: list[LoadedKernel] = []
    launch = LoadedKernel.launch

    def watched(kernel: LoadedKernel, given: Any) -> None:
        found.append(kernel)
        launch(kernel, given)

    monkeypatch.setattr(LoadedKernel, "launch", watched)
    return found


@pytest.fixture
def much_memory() -> Iterator[None]:
    """Room for an input, an output and a piece to compare, of 2^31 bytes each."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of free GPU memory")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def some_bytes(*shape: int) -> Tensor:
    """int8 values without a pattern that an error in addressing would preserve."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda", generator=generator)


def assert_is_cumsum(y: Tensor, x: Tensor) -> None:
    """y is the cumulative sum of x [rows, steps] along the steps, modulo 256; in pieces."""
    width = max(1, (1 << 27) // x.shape[0])
    carry = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
    for k in range(0, x.shape[1], width):
        piece = x[:, k : k + width].cumsum(1, dtype=torch.int64).add_(carry)
        carry = piece[:, -1:].clone()
        assert torch.equal(y[:, k : k + width], piece.to(torch.int8)), f"from step {k}"


@every_engine
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize(
    "shape,axis",
    [((1, 2**31 + 5), 1), ((2**16 + 1, 2**15 + 3), 1), ((2**16 + 1, 2**15 + 3), 0)],
    ids=["one row", "rows", "lanes"],
)
def test_more_than_32_bits(
    engine: Engine, shape: tuple[int, ...], axis: int, reverse: bool, launched: list[LoadedKernel]
) -> None:
    x = some_bytes(*shape)
    y = engine.scan(ops.sum, x, axis, reverse=reverse)
    assert launched[0].kernel.wide and launched[-1].kernel.wide
    if axis == 0:
        x, y = x.T, y.T
    if not reverse:
        assert_is_cumsum(y, x)
        return
    # y[t] + y'[t] = total + x[t] for the sum y' from the other side.
    total = y[:, :1].to(torch.int64)
    step = (1 << 27) // x.shape[0]
    before = torch.zeros_like(total)
    for k in range(0, x.shape[1], step):
        piece = x[:, k : k + step].to(torch.int64)
        sums = piece.cumsum(1).add_(before)
        before = sums[:, -1:].clone()
        assert torch.equal(y[:, k : k + step], (total + piece - sums).to(torch.int8)), k
    assert torch.equal(before.to(torch.int8), total.to(torch.int8))


@pytest.mark.usefixtures("much_memory")
def test_strides_of_more_than_32_bits() -> None:
    """Few elements, far apart: only the strides and offsets need 64 bits."""
    memory = torch.zeros(3 * GIB, dtype=torch.int8, device="cuda")
    for size, stride, axis in [
        ((3, 40), (GIB + 1, 1), 1),
        ((40, 3), (75_000_001, 1), 0),
        ((3, 40), (1, 75_000_001), 1),
        ((2, 3, 4), (1_500_000_001, 500_000_001, 1), 1),
    ]:
        x = memory.as_strided(size, stride)
        x.copy_(some_bytes(*size))
        for engine in ENGINES:
            y = engine.scan(ops.sum, x, axis)
            assert torch.equal(y, x.cumsum(axis, dtype=torch.int64).to(torch.int8)), (size, stride)


@pytest.mark.parametrize("shape", list(permutations((70_001, 5, 4))), ids=str)
def test_more_than_65535_programs(shape: tuple[int, ...], launched: list[LoadedKernel]) -> None:
    """One chain per program, the many chains in each dimension, dense and transposed."""
    x = torch.randint(-9, 9, shape, device="cuda")
    orders = [x, *(x.permute(p).contiguous().permute(inverse(p)) for p in permutations(range(3)))]
    for axis in (d for d in range(3) if shape[d] < 100):
        for laid_out in orders:
            launched.clear()
            with tiles.forced(Tile(1, 8, 1, 1)):
                y = associative_scan(ops.sum, laid_out, axis, backend="triton")
            assert torch.equal(y, x.cumsum(axis))
            assert max(launched[-1].grid) > 65_535


def inverse(permutation: tuple[int, ...]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


@every_engine
def test_the_context_survives_running_out_of_memory(engine: Engine) -> None:
    x = torch.ones(1, dtype=torch.int8, device="cuda").expand(2**20, 2**25)
    for axis in (0, 1):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            engine.scan(ops.sum, x, axis)
    small = torch.arange(1000, device="cuda")
    assert torch.equal(engine.scan(ops.sum, small), small.cumsum(0))


SHAPES = (((300, 257), 1), ((257, 300), 0), ((1, 100_000), 1), ((100_000, 2), 0))


@every_engine
def test_work_is_queued_on_the_current_stream(engine: Engine) -> None:
    """The input is written late on the same stream: another stream would read the old one."""
    for shape, axis in SHAPES:
        x, late = torch.zeros(shape, device="cuda"), torch.ones(shape, device="cuda")
        engine.scan(ops.sum, x, axis)  # compiled, so that the launch itself is not slow
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.copy_(late)
            y = engine.scan(ops.sum, x, axis)
            result = y.clone()
        side.synchronize()
        assert torch.equal(result, late.cumsum(axis))


@every_engine
def test_the_device_of_the_tensors_is_used(engine: Engine) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        for shape, axis in SHAPES:
            for _ in range(3):  # compiled, then known
                x = torch.ones(shape, device="cuda:1")
                y = engine.scan(ops.sum, x, axis)
                assert y.device == x.device
                assert torch.equal(y, x.cumsum(axis))
        assert torch.cuda.current_device() == 0


@every_engine
@pytest.mark.parametrize("shape,axis", SHAPES, ids=str)
def test_graph_capture(engine: Engine, shape: tuple[int, ...], axis: int) -> None:
    x = torch.zeros(shape, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        engine.scan(ops.sum, x, axis, return_final=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, final = engine.scan(ops.sum, x, axis, return_final=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randint(-4, 5, shape))
        graph.replay()
        assert torch.equal(y, x.cumsum(axis))
        assert torch.equal(final, x.sum(axis))


@pytest.mark.parametrize("backend", ["auto", "triton", "multipass"])
def test_runs_are_bitwise_equal(backend: str) -> None:
    for shape, axis in SHAPES:
        xs, _ = Problem("affine", shape, axis).inputs("cuda")
        runs = [associative_scan(AFFINE, xs, axis, backend=backend) for _ in range(5)]
        for run in runs[1:]:
            for one, other in zip(run, runs[0], strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@every_engine
def test_alignment_is_found_out_at_every_call(engine: Engine) -> None:
    """One shape, pointers that are multiples of 16 bytes and that are not, in turns."""
    memory = torch.randint(-9, 9, (4, 100_004), dtype=torch.int32, device="cuda").view(-1)
    for start in (0, 1, 2, 0, 3, 4, 1):
        for shape in ((2, 100_000), (1000, 200), (50, 4000)):
            x = memory[start : start + 200_000].view(shape)
            y = engine.scan(ops.sum, x, 1)
            assert torch.equal(y, x.cumsum(1, dtype=torch.int64).to(torch.int32)), (start, shape)


def test_auto_takes_the_right_engine_at_every_length() -> None:
    """Around the length from which an axis is cut, with few chains and with many."""
    for length in (2**15 - 1, 2**15, 2**15 + 1):
        for chains in (1, 3, 5000):
            for shape, axis in (((chains, length), 1), ((length, chains), 0)):
                x = torch.randint(-9, 9, shape, dtype=torch.int32, device="cuda")
                y = associative_scan(ops.sum, x, axis)
                assert torch.equal(y, x.cumsum(axis, dtype=torch.int64).to(torch.int32)), shape


@every_engine
def test_many_packed_sequences(engine: Engine) -> None:
    """More than a chunk has steps, most of them empty or short; auto cuts such an axis too."""
    length, sequences = 40_000, 1500
    inner = torch.randint(0, length, (sequences - 1,)).sort().values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), inner, torch.tensor([length])])
    x = torch.randint(-9, 9, (length,), device="cuda")
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    begin = offsets.cuda()[:-1].repeat_interleave(offsets.diff().cuda())
    expected = sums[1:] - sums[begin]
    for backend in (engine.name, "auto"):
        assert torch.equal(associative_scan(ops.sum, x, offsets=offsets, backend=backend), expected)


def test_backward_of_both_engines() -> None:
    """Float64 gradients of long axes are those of the eager engine."""
    for shape, axis in (((3, 40_000), 1), ((40_000, 3), 0), ((3000, 70), 1)):
        gradients = []
        for backend in ("triton", "multipass", "eager"):
            torch.manual_seed(0)
            a = (torch.rand(shape, dtype=torch.float64, device="cuda") - 0.1).requires_grad_()
            b = torch.randn(shape, dtype=torch.float64, device="cuda", requires_grad=True)
            _, h = associative_scan(ops.affine, (a, b), axis, backend=backend)
            gradients.append(torch.autograd.grad(h.square().sum(), (a, b)))
        for found in gradients[:2]:
            torch.testing.assert_close(found, gradients[2], rtol=1e-9, atol=1e-9)


def least_multiple(left: Tensor, right: Tensor) -> Tensor:
    return torch.lcm(left, right)


def test_auto_falls_back_with_one_warning() -> None:
    op = monoid(least_multiple, identity=1, name="triton_gpu_lcm")
    x = torch.tensor([12, 18, 27], device="cuda")
    with pytest.warns(FallbackWarning, match=r"'triton_gpu_lcm'.*lcm") as warned:
        first, second = associative_scan(op, x), associative_scan(op, x)
    assert len(warned) == 1
    assert first.tolist() == second.tolist() == [12, 36, 108]


def test_auto_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loader, "is_installed", lambda: False)
    engines.why_not_here.cache_clear()
    try:
        with pytest.warns(FallbackWarning, match="Triton is not installed"):
            y = associative_scan(ops.sum, torch.arange(5.0, device="cuda"))
    finally:
        engines.why_not_here.cache_clear()
    assert y.tolist() == [0, 1, 3, 6, 10]


@every_engine
def test_real_tiles(engine: Engine) -> None:
    """Lengths about the tiles' and chunks', with the exact operator that does not commute."""
    for length in (255, 256, 257, 1023, 1025, 2049):
        for flags in TWO_FLAGS:
            check(engine, Problem("bicyclic", (3, length), 1), flags)
            check(engine, Problem("bicyclic", (2, length, 33), 1), flags)
