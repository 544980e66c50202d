"""Where the kernels over vectors run: in the emulator and, where there is one, on the GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import cuda_emulator
import pytest
from cuda_emulator import emulated
from vector_kernels import Launched, noted

from assocscan.cuda import launcher
from assocscan.cuda.vectors import prepare
from assocscan.engines.base.vectors import prepare as tensors_of
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.native import runner

ON_GPU = launcher.why_unavailable() is None
needs_emulator = pytest.mark.skipif(
    cuda_emulator.why_unavailable() is not None, reason=str(cuda_emulator.why_unavailable())
)
DEVICES = [
    pytest.param("cpu", marks=needs_emulator),
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU")]),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device, with the kernels over vectors taken for all operators."""
    monkeypatch.setattr(gpu_engine_choice, "is_worth_vectors", lambda *given: True)
    if request.param == "cpu":
        monkeypatch.setattr(prepare, "shared_memory", lambda device: 227 << 10)
        for module in (prepare, tensors_of):
            monkeypatch.setattr(module, "processors", lambda device: 1)
    for name in ("call", "module"):
        monkeypatch.setattr(runner, name, None)
    monkeypatch.setattr(runner, "_started", [os.getpid()])
    executables._PREPARED.clear()
    with emulated() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param
    executables._PREPARED.clear()


@pytest.fixture
def prepared() -> Iterator[list[Launched]]:
    """What the CUDA engine prepared."""
    with noted() as found:
        yield found
