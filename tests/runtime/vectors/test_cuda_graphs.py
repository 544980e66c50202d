"""Scans over vectors on a real GPU inside torch: compiled graphs, CUDA graphs, transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mamba_models import LanguageModel, config, losses, text
from torch import Tensor
from torch._dynamo.utils import counters
from torch.func import grad, vmap

from assocscan import selective_scan
from assocscan.engines.base.executable import Executable
from assocscan.nn import Mamba
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import executable_cache as executables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own words on its compiler and on its CUDA graphs.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

DEVICE = "cuda"
MODES = ("default", "reduce-overhead")
BOTH = {VectorOperator, VectorAdjoint}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Executable]]:
    """The executables that run as part of the library operation, one entry for each run."""
    found: list[Executable] = []
    prepare = executables.prepare

    def noting(*arguments: Any) -> Executable:
        found.append(prepare(*arguments))
        return found[-1]

    monkeypatch.setattr(executables, "prepare", noting)
    torch._dynamo.reset()
    counters["inductor"].clear()
    yield found
    torch._dynamo.reset()


def assert_kernels_of_vectors(seen: list[Executable], mode: str) -> None:
    """Nothing else ran than these, and CUDA graphs were made."""
    assert {type(e.spec.operator) for e in seen} == BOTH  # type: ignore[attr-defined]
    assert all("(vectors)" in e.plan.engine for e in seen)
    assert mode == "default" or not counters["inductor"]["cudagraph_skips"]


def draw(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """u, delta, A, B, C, D, z, delta_bias and init of a selective scan [batch, L, channels, N]."""
    batch, length, channels, states = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    wide, narrow = (batch, length, channels), (batch, length, states)
    tensors = [normal(*wide), 0.1 * normal(*wide), -normal(channels, states).exp(),
               normal(*narrow), normal(*narrow), normal(channels), normal(*wide),
               normal(channels), normal(batch, channels, states)]  # fmt: skip
    kept = (2, 5, 7, 8)  # parameters and init stay float32
    return [
        t.to(DEVICE, torch.float32 if k in kept else dtype).requires_grad_()
        for k, t in enumerate(tensors)
    ]


def scan(*x: Tensor) -> Any:
    return selective_scan(*x[:-1], delta_softplus=True, init=x[-1], return_final=True)


def results_and_gradients(
    function: Callable[..., Any], tensors: list[Tensor], cotangents: list[Tensor]
) -> list[Tensor]:
    """Copies: the next call of a CUDA graph writes the same memory."""
    torch.compiler.cudagraph_mark_step_begin()
    results = function(*tensors)
    gradients = torch.autograd.grad(results, tensors, cotangents)
    return [t.detach().clone() for t in (*results, *gradients)]


def close(got: Tensor, want: Tensor, rtol: float) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max()))


SHAPES = {
    "layer": (2, 300, 200, 16), "one chain": (1, 70, 1, 16), "64 states": (2, 100, 24, 64),
    "many chains": (4, 40, 1024, 8),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_selective_scan(
    mode: str, shape: tuple[int, int, int, int], dtype: torch.dtype, seen: list[Executable]
) -> None:
    """Values and gradients are those of plain calls, for new inputs of the same graph too."""
    compiled = torch.compile(
        lambda *x: scan(x[0] * 1, *x[1:]), fullgraph=True, mode=mode, dynamic=False
    )
    rtol = 1e-5 if dtype is torch.float32 else 2e-2
    for seed in range(5):
        tensors = draw(shape, seed, dtype)
        with torch.no_grad():
            cotangents = [torch.cos(7 * t) for t in scan(*tensors)]
        want = results_and_gradients(scan, tensors, cotangents)
        if seed == 0:
            seen.clear()
        got = results_and_gradients(compiled, tensors, cotangents)
        for a, b in zip(got, want, strict=True):
            close(a, b, rtol)
    assert_kernels_of_vectors(seen, mode)


def test_packed_sequences_in_a_cuda_graph(seen: list[Executable]) -> None:
    u, delta, A, B, C, *_ = draw((2, 300, 72, 16), 0, torch.float32)
    init = torch.randn(4, 2, 72, 16, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 33, 33, 170, 300], device=DEVICE)
    tensors = [u, delta, A, B, C, init]

    def call(*x: Tensor) -> Any:
        return selective_scan(
            *x[:-1], delta_softplus=True, init=x[-1], offsets=offsets, return_final=True
        )

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead", dynamic=False)
    cotangents = [torch.cos(7 * t.detach()) for t in call(*tensors)]
    want = results_and_gradients(call, tensors, cotangents)
    seen.clear()
    for _ in range(4):
        got = results_and_gradients(compiled, tensors, cotangents)
        for a, b in zip(got, want, strict=True):
            close(a, b, 1e-5)
    assert_kernels_of_vectors(seen, "reduce-overhead")


def test_lengths_are_one_graph(seen: list[Executable]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(scan, fullgraph=True, dynamic=True, backend=counter)
    for length in (20, 33, 500):
        tensors = draw((2, length, 40, 16), length, torch.float32)
        cotangents = [torch.cos(7 * t.detach()) for t in scan(*tensors)]
        want = results_and_gradients(scan, tensors, cotangents)
        seen.clear()
        for a, b in zip(results_and_gradients(compiled, tensors, cotangents), want, strict=True):
            close(a, b, 1e-5)
        assert_kernels_of_vectors(seen, "default")
    assert counter.frame_count == 1


def test_transforms_do_not_wait_for_the_gpu(seen: list[Executable]) -> None:
    """Nothing reads the memory of the GPU: the host goes on, and all of it can be captured."""
    tensors = [t.detach() for t in draw((2, 70, 40, 16), 0, torch.float32)]

    def loss(*x: Tensor) -> Tensor:
        y, last = scan(*x)
        return (y * y).sum() + last.sum()

    every = tuple(range(len(tensors)))
    step = grad(loss, every)
    many = [torch.stack([t, 0.5 * t]) for t in tensors]
    vmapped = vmap(step)
    for call, given in ((step, tensors), (vmapped, many)):
        want = call(*given)
        try:
            torch.cuda.set_sync_debug_mode("error")
            call(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(*given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(*given)
        graph.replay()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert_kernels_of_vectors(seen, "default")
    for k in range(2):
        one = step(*(t[k] for t in many))
        for a, b in zip(vmapped(*many), one, strict=True):
            close(a[k], b, 1e-5)


def test_memory_of_a_compiled_gradient(seen: list[Executable]) -> None:
    """No array of all states in either pass: the saved carries are a small part of it."""
    shape = (2, 2048, 512, 16)
    tensors = draw(shape, 0, torch.float32)
    compiled = torch.compile(scan, fullgraph=True, dynamic=False)
    cotangents = [torch.ones_like(t) for t in scan(*tensors)]
    for _ in range(2):
        torch.autograd.grad(compiled(*tensors), tensors, cotangents)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(compiled(*tensors), tensors, cotangents)
    states = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    assert torch.cuda.max_memory_allocated() - before < states
    assert_kernels_of_vectors(seen, "default")


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("mode", MODES)
def test_mamba(mode: str, autocast: bool, seen: list[Executable]) -> None:
    """Outputs, the state and all gradients of the layer."""
    torch.manual_seed(0)
    layer = Mamba(96).to(DEVICE)
    tensors = [torch.randn(2, 150, 96, device=DEVICE, requires_grad=True), *layer.parameters()]

    def call(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y, state = layer(x)
        return y.float(), state.scan

    compiled = torch.compile(call, fullgraph=True, mode=mode, dynamic=False)
    with torch.no_grad():
        cotangents = [torch.cos(7 * t) for t in call(tensors[0])]
    want = results_and_gradients(call, tensors, cotangents)
    seen.clear()
    for _ in range(4):
        got = results_and_gradients(compiled, tensors, cotangents)
        for a, b in zip(got, want, strict=True):
            close(a, b, 4e-2 if autocast else 1e-4)
    assert_kernels_of_vectors(seen, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_trains_as_that_of_transformers(mode: str, seen: list[Executable]) -> None:
    """Two blocks: the losses of transformers' model, whose scan is a loop in Python."""
    pytest.importorskip("transformers")
    from transformers.models.mamba import modeling_mamba

    torch.manual_seed(0)
    theirs = modeling_mamba.MambaForCausalLM(config(state_size=16, hidden_size=32)).train()
    ours = LanguageModel(theirs.config)
    ours.load_state_dict(theirs.state_dict())
    theirs, ours = theirs.to(DEVICE), ours.to(DEVICE)
    batches = [tokens.to(DEVICE) for tokens in text(20)]
    want = losses(theirs, batches)
    compiled = torch.compile(ours, fullgraph=True, mode=mode, dynamic=False)
    got = losses(compiled, batches)
    assert want[-1] < 0.8 * want[0]
    assert got == pytest.approx(want, rel=1e-3)
    assert_kernels_of_vectors(seen, mode)
