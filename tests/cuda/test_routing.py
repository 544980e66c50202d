"""Which scans the CUDA engine takes, what its plan says, and why it refuses the others."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import cuda_emulator
import pytest
import torch
from cuda_emulator import Emulated, emulated
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from assocscan import BackendError, associative_scan, explain, ops
from assocscan.api.bind_arguments import bind
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import launcher
from assocscan.cuda.kernel import LanesTile, Mode
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.program.transforms import reduction_only
from assocscan.runtime import backends as engines
from assocscan.runtime import gpu_engine_choice as gpu
from assocscan.runtime.scan_call import ScanCall

REASON = cuda_emulator.why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LANES: tuple[Mode, ...] = ("SERIAL", "CHAINED", "LOOKBACK")
LANES_TILE = LanesTile(64, 8, 2, 2, 2)  # 32 steps


@pytest.mark.parametrize("mode", LANES)
def test_the_plan_tells_how(mode: Mode) -> None:
    x = torch.ones(3, 200, 8)
    with emulated(processors=6), tuning.forced(Choice(LANES_TILE, mode)):
        plan = explain(ops.sum, x, 1, backend="cuda")
        assert not Emulated.launches
    assert plan.engine == f"cuda ({mode.lower()})"
    assert plan.normal_form == (3, 200, 8)
    assert plan.bytes_moved == 2 * x.nbytes
    assert "32 steps x 8 lanes" in plan.tile


def test_what_cannot_run_says_why() -> None:
    x = torch.ones(4, 3)
    with emulated():
        matrices = torch.ones(5, 16, 16)
        with pytest.raises(BackendError, match="matmul"):
            associative_scan(ops.matmul, matrices, 0, backend="cuda")
        with mock.patch.object(launcher, "has_bulk_copies", lambda device: False):
            associative_scan(ops.sum, x, 0, backend="cuda")
            with pytest.raises(BackendError, match=r"capability 9\.0"):
                associative_scan(ops.sum, x, 1, backend="cuda")
    engines.why_not_here.cache_clear()
    with (
        mock.patch.object(engines, "availability", lambda: {"cuda": None}),
        pytest.raises(BackendError, match="xs is on cpu"),
    ):
        associative_scan(ops.sum, x, backend="cuda")
    engines.why_not_here.cache_clear()
    with pytest.raises(BackendError, match="no NVIDIA GPU"):
        associative_scan(ops.sum, x, backend="cuda")


def test_devices_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not, device = launcher.why_not_device.__wrapped__, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(launcher, "attribute", lambda number, device: number != 95)
    for capability, said in (((7, 5), r"7\.5, the kernels need 8\.0"), ((9, 0), "cooperative")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert re.search(said, why_not(device))
    monkeypatch.setattr(launcher, "attribute", lambda number, device: 1)
    assert why_not(device) is None


def test_adjoints_of_large_elements_are_tritons() -> None:
    """56 bytes in float64, which the adjoint scan makes 184."""
    xs = tuple(torch.rand(7, n, dtype=torch.float64, requires_grad=True) for n in (4, 3))
    grads = []
    for backend in ("cuda", "eager"):
        with emulated():
            ys = associative_scan(ops.se3, xs, backend=backend)
            grads.append(torch.autograd.grad(sum(y.square().sum() for y in ys), xs))
            assert len(Emulated.launches) == (backend == "cuda")
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_adjoints_of_large_elements_are_tritons_in_the_operation_too() -> None:
    """Under a transform, under torch.compile and under a dispatch mode."""
    xs = tuple(torch.rand(7, n, dtype=torch.float64, requires_grad=True) for n in (4, 3))

    def loss(xs: tuple[Tensor, ...], backend: str = "cuda") -> Tensor:
        ys = associative_scan(ops.se3, xs, backend=backend)
        return torch.stack([y.square().sum() for y in ys]).sum()

    want = torch.autograd.grad(loss(xs, "eager"), xs)
    with emulated():
        got = torch.func.grad(loss)(xs)
        assert len(Emulated.launches) == 1
        torch.testing.assert_close(got, want)
        with BaseTorchDispatchMode():
            torch.testing.assert_close(torch.autograd.grad(loss(xs), xs), want)
        assert len(Emulated.launches) == 2
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(xs), xs), want)
        assert len(Emulated.launches) == 3


def chosen(*xs: Tensor, axis: int = 1, reverse: bool = False) -> str:
    tree, op = (xs, ops.affine) if len(xs) > 1 else (xs[0], ops.sum)
    call = bind(op, tree, axis, reverse, True, None, False, None)
    return engine_of(call)


def engine_of(call: ScanCall) -> str:
    spec, tensors = call.scan(call.traced.operator)
    return gpu.choose(spec, [None if t is None else TensorSpec.of(t) for t in tensors])[0]


def test_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 132 multiprocessors, by shape and layout; nothing is run."""
    monkeypatch.setattr(gpu, "cuda_reason", lambda *a: None)
    monkeypatch.setattr(launcher, "has_bulk_copies", lambda device: True)
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    lanes, rows = torch.empty(8, 1024, 64), torch.empty(4000, 1000)
    with emulated(processors=132):
        assert chosen(lanes) == "cuda"
        assert chosen(torch.rand(64).expand(8, 1024, 64), lanes) == "cuda"
        assert chosen(lanes[..., ::2]) == "triton"  # which would be copied first
        few = torch.empty(2, 4096, 64)
        assert chosen(few[..., ::2]) == chosen(few, torch.empty(2, 64, 4096).mT) == "cuda"
        assert chosen(few[:, ::4, ::2]) == "triton"  # short
        assert chosen(torch.empty(2, 64, 4096).mT, few) == "triton"  # the outputs are rows
        assert chosen(torch.empty(64, 4096, 64)[..., ::2]) == "triton"  # many chains
        assert chosen(lanes[:, :16]) == "triton"
        assert chosen(rows) == "triton"
        assert chosen(rows, reverse=True) == "cuda"
        assert chosen(rows[:, :100], reverse=True) == "triton"
        assert chosen(torch.empty(64, 1 << 17)) == "cuda"
        assert chosen(torch.empty(1 << 17), axis=0) == "cuda"
        matrices = bind(ops.matmul, torch.empty(8, 100, 2, 2), 1, False, True, None, False, None)
        assert engine_of(matrices) == "triton"  # short rows of large elements
        monkeypatch.setattr(launcher, "memory_bandwidth", lambda device: 3.3e12)
        many = torch.empty(4000, 8192)
        assert chosen(many) == chosen(many, many) == "triton"
        for op in (ops.logaddexp, ops.compensated_sum):
            call = bind(op, many, 1, False, True, None, False, None)
            assert engine_of(call) == "cuda"  # costly
            assert (
                engine_of(bind(op, many[:, :2048], 1, False, True, None, False, None)) == "triton"
            )
            spec, tensors = call.scan(reduction_only(call.traced.operator))
            assert gpu.choose(spec, [TensorSpec.of(t) for t in tensors])[0] == "triton"
    monkeypatch.setattr(gpu, "cuda_reason", lambda *a: "no")
    assert chosen(lanes) == "triton"
    assert chosen(torch.empty(1 << 17), axis=0) == "multipass"
    row = bind(ops.sum, torch.empty(1 << 17), 0, False, True, None, False, None)
    spec, _ = row.scan(row.traced.operator)
    unread = [None, TensorSpec.of(torch.zeros(()))]  # a sum's derivative
    for operator in (spec.operator, reduction_only(spec.operator)):
        reading_none = replace(spec, operator=operator, init=(0,), final=(0,))
        assert gpu.choose(reading_none, unread)[0] == "multipass"
