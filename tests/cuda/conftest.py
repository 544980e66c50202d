"""Where the kernels over vectors run: in the emulator and, where there is one, on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import cuda_emulator
import pytest
from vector_kernels import Launched, noted, taken_for_all

from assocscan.cuda import launcher

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
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device, with the kernels over vectors taken for all operators."""
    with taken_for_all(request.param):
        yield request.param


@pytest.fixture
def prepared() -> Iterator[list[Launched]]:
    """What the CUDA engine prepared."""
    with noted() as found:
        yield found
