"""torch integration on a real GPU: graphs, compilation, streams, devices, memory, host time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from table import AFFINE, Engine, elements, values
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from assocscan import associative_scan, cumsum, linear_recurrence, ops, reduce
from assocscan.cuda import workspace
from assocscan.engines.base import chunk_tables as chunks
from assocscan.engines.base import packed_offsets as packed
from assocscan.engines.triton.matrix import prepare as matrix_scan
from assocscan.functional.recurrence import _RECURRENCE
from assocscan.testing import reference_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own words on its compiler and on its CUDA graphs.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

ENGINES = (Engine("triton", "cuda"), Engine("multipass", "cuda"))
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
PAIR = elements((values(torch.float64), ()), (values(torch.float64), ()))
MIB = 1 << 20


def pair(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    a, b = PAIR(torch.Generator().manual_seed(seed), shape)
    return tuple(t.to("cuda", dtype).contiguous().requires_grad_() for t in (a, b))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_engine
@pytest.mark.parametrize("shape,axis", [((2, 7), 1), ((2, 300), 1), ((150, 3), 0)], ids=str)
def test_finite_differences(engine: Engine, shape: tuple[int, ...], axis: int) -> None:
    """First and second derivatives in float64."""
    xs = pair(*shape)

    def scan(a: Tensor, b: Tensor) -> Tensor:
        h: Tensor = engine.scan(_RECURRENCE, (a, b), axis)
        return h

    options = {"check_undefined_grad": False, "fast_mode": shape[axis] > 10}
    assert torch.autograd.gradcheck(scan, xs, **options)
    assert torch.autograd.gradgradcheck(scan, xs, **options)


@every_engine
def test_transforms(engine: Engine) -> None:
    """vmap, both Jacobians, the Hessian: against the loop on the CPU."""
    a, b = (t.detach() for t in pair(6))

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return engine.scan(AFFINE, (a, b))[1].sin().sum()

    def loop(a: Tensor, b: Tensor) -> Tensor:
        total: Tensor = reference_scan(AFFINE, (a, b))[1].sin().sum()
        return total

    want = torch.autograd.functional.hessian(loop, (a.cpu(), b.cpu()))
    for mode in (
        hessian,
        lambda f, n: jacrev(jacrev(f, n), n),
        lambda f, n: jacfwd(jacfwd(f, n), n),
    ):
        got = mode(loss, (0, 1))(a, b)
        for row, expected in zip(got, want, strict=True):
            for one, other in zip(row, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other)
    many = torch.stack([a, b, a * b])
    got = vmap(grad(loss))(many, many)
    for k in range(3):
        torch.testing.assert_close(got[k], grad(loss)(many[k], many[k]))


@pytest.mark.parametrize("shape,axis", [((64, 1000), 1), ((4, 1000, 64), 1), ((1, 200_000), 1)])
def test_capture_of_forward_and_backward(shape: tuple[int, ...], axis: int) -> None:
    """torch.cuda.graph around both passes: replays see new inputs."""
    a, b = pair(*shape, dtype=torch.float32)
    g = torch.randn(shape, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear_recurrence(a, b, axis=axis), (a, b), g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        new = pair(*shape, dtype=torch.float32, seed=seed)
        with torch.no_grad():
            a.copy_(new[0]), b.copy_(new[1])
        graph.replay()
        torch.testing.assert_close(results, step())


class Recurrence(nn.Module):
    """A token mixer: gate and input from a projection, a recurrence, a projection back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(self.norm(x)).chunk(2, -1)
        a = torch.sigmoid(gate)
        h = linear_recurrence(a, (1 - a) * value)
        assert isinstance(h, Tensor)
        return x + self.outer(h)


class LanguageModel(nn.Module):
    def __init__(self, tokens: int = 97, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Recurrence(width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(steps):
        text = torch.randint(0, 97, (4, 129), device="cuda", generator=generator)
        loss = forward(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_language_model_trains(mode: str, autocast: bool) -> None:
    """One graph, with CUDA graphs too; the losses of eager training."""
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = LanguageModel().cuda()
        forward = torch.compile(model, fullgraph=True, mode=mode) if compiled else model
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            losses.append(train(model, forward, steps=6))
    assert losses[1] == pytest.approx(losses[0], rel=3e-2 if autocast else 1e-3)


@pytest.fixture
def nothing_lasting() -> None:
    """Forget the tensors that outlive calls, so that the test's calls make them."""
    torch.cuda.synchronize()
    workspace._SPACES.clear()
    packed._FLAGS.clear()
    matrix_scan.identity.cache_clear()
    chunks.even_chunks.cache_clear()


OFFSETS = torch.tensor([0, 3, 1000, 1000, 5000])
IN_GRAPHS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Any]]] = {
    "one row": ((1, 300_000), lambda x, offsets: cumsum(x)),
    "lanes": ((1, 5000, 96), lambda x, offsets: linear_recurrence(x.sigmoid(), x)),
    "packed": ((5000, 8), lambda x, offsets: associative_scan(ops.sum, x, offsets=offsets)),
    "packed, triton": (
        (5000, 8),
        lambda x, offsets: associative_scan(ops.sum, x, offsets=offsets, backend="triton"),
    ),
    "multipass": (
        (1, 40_000),
        lambda x, offsets: associative_scan(ops.sum, x, 1, backend="multipass"),
    ),
    "reduction": ((2, 40_000), lambda x, offsets: reduce(ops.sum, x, 1, backend="multipass")),
    "matrices": (
        (2, 300, 8, 8),
        lambda x, offsets: associative_scan(
            ops.matmul, x / 8, 1, inclusive=False, backend="multipass"
        ),
    ),
}


def gradient(y: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.sum(), x) if x.requires_grad else ()


@pytest.mark.usefixtures("nothing_lasting")
@pytest.mark.parametrize("case", IN_GRAPHS)
def test_cuda_graphs_of_torch_compile(case: str) -> None:
    """What outlives a call is not in the pool of torch.compile's graphs, and replays are right."""
    shape, scan = IN_GRAPHS[case]

    def function(x: Tensor, offsets: Tensor) -> Tensor:
        y: Tensor = scan(x.cos(), offsets)
        return y * 2

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    offsets = OFFSETS.cuda()
    counters["inductor"].clear()
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(shape, device="cuda", generator=generator)
        x.requires_grad_(case != "matrices")  # whose gradient the named engine does not generate
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x, offsets)
        got = y.detach().clone(), *gradient(y, x)
        y = function(x, offsets)
        want = y.detach(), *gradient(y, x)
        for one, other in zip(got, want, strict=True):  # the cosines round otherwise
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    assert not counters["inductor"]["cudagraph_skips"]


def test_graphed_callables() -> None:
    torch.manual_seed(0)
    model = Recurrence(32).cuda()
    sample = torch.randn(2, 50, 32, device="cuda", requires_grad=True)
    x = torch.randn(2, 50, 32, device="cuda")
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    got = torch.autograd.grad(graphed(x.requires_grad_()).square().sum(), list(model.parameters()))
    torch.testing.assert_close(got, expected)


def test_dynamic_lengths_are_one_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(linear_recurrence, fullgraph=True, dynamic=True, backend=counter)
    for length in (65, 100, 4096, 40_000):
        a, b = pair(3, length, dtype=torch.float32)
        got = torch.autograd.grad(compiled(a, b).sum(), (a, b))
        want = torch.autograd.grad(linear_recurrence(a, b).sum(), (a, b))
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_offsets_in_a_compiled_function(on: str) -> None:
    def scan(x: Tensor, offsets: Tensor) -> Tensor:
        y: Tensor = associative_scan(ops.sum, x * 2, offsets=offsets)
        return y

    compiled = torch.compile(scan, fullgraph=True, dynamic=True)
    for bounds in ([0, 3, 10], [0, 0, 4, 9, 20]):
        x = torch.randn(bounds[-1], device="cuda", dtype=torch.float64)
        offsets = torch.tensor(bounds, device=on)
        want = reference_scan(ops.sum, 2 * x.cpu(), offsets=torch.tensor(bounds))
        torch.testing.assert_close(compiled(x, offsets).cpu(), want)


@every_engine
def test_backward_on_the_stream_of_the_forward(engine: Engine) -> None:
    """The cotangent is written late on a side stream, where the forward pass ran."""
    a, b = pair(3000, 70, dtype=torch.float32)
    expected = torch.autograd.grad(engine.scan(_RECURRENCE, (a, b), 1).sum(), (a, b))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        h = engine.scan(_RECURRENCE, (a, b), 1)
        g = torch.zeros_like(h)
        torch.cuda._sleep(50_000_000)
        g.fill_(1.0)
        got = torch.autograd.grad(h, (a, b), g)
    side.synchronize()
    torch.testing.assert_close(got, expected)


def test_backward_on_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = None
    for device in ("cuda:0", "cuda:1"):
        for _ in range(2):  # cold, then warm
            a, b = (t.detach().to(device).requires_grad_() for t in pair(3, 50))
            with torch.cuda.device(0):
                got = torch.autograd.grad(linear_recurrence(a, b).sum(), (a, b))
            assert all(t.device == a.device for t in got)
            expected = expected or got
            torch.testing.assert_close([t.cpu() for t in got], [t.cpu() for t in expected])


@pytest.mark.parametrize("shape", [(1024, 8192), (8, 1024, 1024)], ids=str)
def test_peak_memory_of_training(shape: tuple[int, ...]) -> None:
    """a, b and h; then the cotangent and two gradients: nothing else of that size, ever."""
    a, b = pair(*shape, dtype=torch.float32)
    g = torch.randn(shape, device="cuda")
    for _ in range(2):
        torch.autograd.grad(linear_recurrence(a, b), (a, b), g)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    h = linear_recurrence(a, b)
    saved = torch.cuda.memory_allocated() - before
    gradients = torch.autograd.grad(h, (a, b), g)
    peak = torch.cuda.max_memory_allocated() - before
    assert len(gradients) == 2
    assert saved <= a.nbytes + MIB
    assert peak <= 1.05 * 3 * a.nbytes


def test_peak_memory_of_a_broadcast_input() -> None:
    """The gradient of a decay [D] is reduced from one full array."""
    _, b = pair(8, 1024, 1024, dtype=torch.float32)
    a = torch.rand(1024, device="cuda", requires_grad=True)
    g = torch.randn_like(b)
    for _ in range(2):
        torch.autograd.grad(linear_recurrence(a, b), (a, b), g)
    # What torch's own sum of an array of that size takes besides: 64 MiB with torch 2.11.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    b.detach().sum((0, 1))
    sums = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(linear_recurrence(a, b), (a, b), g)
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * 3 * b.nbytes + sums


def host_times(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Microseconds of host time of each call: medians of 15 batches, the calls by turns, so that
    all of them see what else the machine does."""
    for call in calls:
        for _ in range(30):
            call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(15):
        for call, times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) * 1e4)
    return [statistics.median(times) for times in found]


@pytest.mark.host_time
def test_host_time(record_property: Callable[[str, object], None]) -> None:
    """Printed with -s, beside torch.cumsum in the same run, of which the bounds are multiples."""
    a, b = pair(4, 16, dtype=torch.float32)
    g = torch.ones(4, 16, device="cuda")

    def plain(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
        detached = [t.detach() for t in inputs]
        return lambda: function(*detached)

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, g)

    def torch_cumsum(x: Tensor) -> Tensor:
        return torch.cumsum(x, 1)

    rows: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "torch.cumsum": (torch_cumsum, (a,)),
        "cumsum": (cumsum, (a,)),
        "linear_recurrence": (linear_recurrence, (a, b)),
    }
    times = host_times([kind(f, *xs) for kind in (plain, both) for f, xs in rows.values()])
    found = dict(zip(rows, zip(times[: len(rows)], times[len(rows) :], strict=True), strict=True))
    for name, (forward, gradient) in found.items():
        print(f"{name:20} forward {forward:6.1f} µs, with backward {gradient:6.1f} µs")
        record_property(name, (forward, gradient))
    for name in ("cumsum", "linear_recurrence"):
        for own, torchs, most in zip(found[name], found["torch.cumsum"], (1.5, 1.1), strict=True):
            assert own <= most * torchs
