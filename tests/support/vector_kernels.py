"""Tiles and segments forced on the CUDA kernels over vectors, and what was launched then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from cuda_emulator import emulated, forget
from vector_cases import CASES, leaves_of

from assocscan.cuda.vectors import prepare
from assocscan.cuda.vectors.tile import VectorTile
from assocscan.engines.base.commands import Launch
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.vectors import prepare as tensors_of
from assocscan.engines.base.vectors.prepare import Prepared
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.native import runner

PASSES = (VectorOperator, VectorAdjoint)
# One tile of each kind that the engine makes.
KINDS_OF_TILES = [
    VectorTile(128, 4, 1, 4, 3, 3, 8),
    VectorTile(384, 8, 2, 2, 2, 1, 8),
    VectorTile(128, 4, 2, 4, 2, 2, 8),
    VectorTile(96, 4, 2, 4, 2, 2, 8),
    VectorTile(64, 4, 2, 4, 2, 2, 4),
    VectorTile(64, 32, 1, 8, 3, 1, 8),
    VectorTile(384, 8, 2, 2, 2, 1, 8, sums_by_group=True),
    VectorTile(64, 4, 2, 4, 2, 2, 4, sums_by_group=True, widens=False),
]


@contextlib.contextmanager
def taken_for_all(device: str) -> Iterator[None]:
    """The CUDA kernels over vectors are taken for all operators: in the emulator for device "cpu".
    Scans run without the runner in C++, which calls the GPU's kernels."""
    with contextlib.ExitStack() as stack:
        patch = lambda where, **values: stack.enter_context(  # noqa: E731
            mock.patch.multiple(where, **values)
        )
        patch(gpu_engine_choice, is_worth_vectors=lambda *given: True)
        if device == "cpu":
            patch(prepare, shared_memory=lambda device: 227 << 10)
            for module in (prepare, tensors_of):
                patch(module, processors=lambda device: 1)
        patch(runner, call=runner.never, module=None, _started=[os.getpid()])
        executables._PREPARED.clear()
        if device == "cpu":
            stack.enter_context(emulated())
        yield
        executables._PREPARED.clear()


class Launched(NamedTuple):
    """kernel: the one that writes the results. segments: into which the axis is cut."""

    executable: Executable
    kernel: Any
    segments: int


def launched(executable: Executable) -> list[tuple[type, int]]:
    """The kernels of an executable, and how many blocks each has."""
    kernels = [c.kernel for c in executable.commands if isinstance(c, Launch)]
    return [(type(k.kernel), k.grid) for k in kernels]  # type: ignore[attr-defined]


def kernels_of(executable: Executable) -> list[type]:
    """The kernels alone."""
    return [kind for kind, _ in launched(executable)]


def passes(prepared: list[Launched], segments: int | None = None) -> set[type]:
    """The types of the operators that ran: forward, backward; of those with so many segments."""
    return {type(p.kernel.operator) for p in prepared if segments is None or p.segments == segments}


@contextlib.contextmanager
def noted() -> Iterator[list[Launched]]:
    """What the CUDA engine prepares."""
    found: list[Launched] = []
    launched, fitting = prepare.launched, prepare.fitting
    chosen: list[Prepared] = []

    def noting_kernel(*arguments: Any) -> Any:
        kernel, chunks = fitting(*arguments)
        chosen.append(kernel)
        return kernel, chunks

    def noting(*arguments: Any) -> Executable:
        executable = launched(*arguments)
        found.append(Launched(executable, chosen[-1].kernel, chosen[-1].segments))
        return executable

    with mock.patch.multiple(prepare, launched=noting, fitting=noting_kernel):
        yield found


def cut(chunks: int) -> AbstractContextManager[None]:
    """Every scan that can be cut has segments of so many chunks, with few blocks if need be."""
    cut_tiles = prepare.cut_tiles

    def choose(
        tile: Any, backward: bool, blocks: int, total: int, processors: int, most: int,
        reduces: bool = False,
    ) -> Any:  # fmt: skip
        return (1, total, 0.0) if most == 1 else (-(-total // chunks), chunks, 0.0)

    def tiles(size: int, backward: bool) -> list[VectorTile]:
        found = cut_tiles(size, backward)
        return [*found, replace(found[-1], blocks=1)]

    return prepared_with(choose_segments=choose, cut_tiles=tiles)


def tiled(tile: VectorTile, backward: VectorTile | None = None) -> AbstractContextManager[None]:
    """Kernels have this tile; those of backward passes another one, if given."""

    def choose(size: int, is_backward: bool) -> list[VectorTile]:
        return [(backward or tile) if is_backward else tile]

    return prepared_with(whole_tiles=choose, cut_tiles=choose)


@contextlib.contextmanager
def prepared_with(**functions: Any) -> Iterator[None]:
    """The engine prepares by these functions in the place of its own."""
    with mock.patch.multiple(prepare, **functions), forgotten():
        yield


@contextlib.contextmanager
def with_wide_indices() -> Iterator[None]:
    """Kernels compute with 64-bit indices, as for tensors of more than 2^31 entries."""
    complete = Prepared.complete_kernel

    def wide(self: Prepared) -> Any:
        complete(self)
        self.kernel = replace(self.kernel, wide=True)
        return self.kernel

    with mock.patch.object(Prepared, "complete_kernel", wide), forgotten():
        yield


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Without what was prepared before, and without leaving anything prepared."""
    forget_all()
    try:
        yield
    finally:
        forget_all()


def forget_all() -> None:
    forget()
    for case in CASES.values():  # operators that are not registered
        case.op.calls.clear()
        case.op.reductions.clear()


def leaves_on(
    device: str, name: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    return [x.to(device) for x in leaves_of(CASES[name], *shape, dtype=dtype)]
