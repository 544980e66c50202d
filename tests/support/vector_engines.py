"""The engines for scans over vectors on GPUs, where they can run: on the GPU, or on CPU tensors in
the emulator of CUDA and in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import cuda_emulator
import pytest
import torch
from cuda_emulator import emulated
from table import GPU

from assocscan.cuda import launcher
from assocscan.cuda.vectors import prepare as cuda_vectors
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.vectors import prepare as tensors_of
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner


class VectorEngine(NamedTuple):
    """A backend, and the device of the tensors that it takes."""

    backend: str
    device: str

    @contextlib.contextmanager
    def running(self) -> Iterator[list[Executable]]:
        """Vectors of every size take its kernels here. Gives the executables that run as part of
        the library operation."""
        seen: list[Executable] = []
        prepare = executables.prepare

        def noting(*arguments: Any) -> Executable:
            seen.append(prepare(*arguments))
            return seen[-1]

        with contextlib.ExitStack() as stack:

            def patch(where: object, name: str, value: object) -> None:
                stack.enter_context(mock.patch.object(where, name, value))

            patch(gpu_engine_choice, "is_worth_vectors", lambda call: True)
            if self.backend == "cuda" and self.device == "cpu":
                patch(cuda_vectors, "shared_memory", lambda device: 227 << 10)
                for module in (cuda_vectors, tensors_of):
                    patch(module, "processors", lambda device: 1)
                patch(runner, "call", runner.never)
                patch(runner, "module", None)
                patch(runner, "_started", [os.getpid()])
                stack.enter_context(emulated())
            executables._PREPARED.clear()
            patch(executables, "prepare", noting)
            yield seen
        executables._PREPARED.clear()


def _param(backend: str, device: str, reason: str | None) -> Any:
    marks = [pytest.mark.skipif(reason is not None, reason=str(reason))]
    if device == "cuda":
        marks.append(pytest.mark.gpu)
    return pytest.param(VectorEngine(backend, device), marks=marks, id=f"{backend}-{device}")


VECTOR_ENGINES = [
    _param("cuda", "cpu", cuda_emulator.why_unavailable()),
    _param("cuda", "cuda", launcher.why_unavailable()),
    _param("triton", GPU, availability()["triton"]),
    _param("auto", "cuda", None if torch.cuda.is_available() else "no GPU"),
]
