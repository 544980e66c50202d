"""Every operator's CUDA kernels compile by NVRTC for real GPUs, where there is none."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_emulator import emulated
from operators import CASES
from steps import gru
from torch.utils._pytree import tree_map

from assocscan import BackendError, associative_scan, monoid, nonlinear_recurrence, ops
from assocscan.caching import cache_folder
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import compiler, launcher
from assocscan.cuda.kernel import CudaKernel, LanesTile
from assocscan.cuda.source import headers
from assocscan.cuda.tile_choice_inputs import Choice

pytest.importorskip("cupy", reason="CuPy is not installed")
try:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()
except Exception as error:  # whatever the search for the library raises
    pytest.skip(f"NVRTC was not found: {type(error).__name__}", allow_module_level=True)

ROW, LANES = (1, 1 << 22), (1, 1 << 16, 64)
PROCESSORS = 132


class Stop(Exception):
    """The kernel is known; nothing is to run."""


def kernel_of(run: Callable[[], Any]) -> tuple[str, CudaKernel]:
    """The source that a scan would launch on an H100."""
    found: list[tuple[str, CudaKernel]] = []

    def load(source: str, kernel: CudaKernel, device: torch.device) -> Any:
        found.append((source, kernel))
        raise Stop

    with (
        emulated(processors=PROCESSORS),
        mock.patch.object(launcher, "load", load),
        pytest.raises(Stop),
    ):
        run()
    return found[0]


def unwritten(case: Any, batch: tuple[int, ...]) -> Any:
    """Inputs that nothing ever touches, so that they take no memory; floats in float32."""
    example = case.draw(torch.Generator(), (1,) * len(batch))

    def leaf(x: torch.Tensor) -> torch.Tensor:
        dtype = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(
            x.dtype, x.dtype
        )
        return torch.empty((*batch, *x.shape[len(batch) :]), dtype=dtype)

    return tree_map(leaf, example)


def compiled(source: str, *options: str) -> tuple[str, str]:
    """PTX and log; the PTX where the options name a virtual architecture. Kept in the cache folder,
    by content."""
    parts = source, *headers().values(), *compiler.OPTIONS, *options, compiler.nvrtc_version()
    name = f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.ptx.json"
    known = cache_folder.read(name)
    if known is None:
        known = json.dumps(compiled_afresh(source, *options)).encode()
        cache_folder.store(name, known)
    text, log = json.loads(known)
    return text, log


def compiled_afresh(source: str, *options: str) -> tuple[str, str]:
    texts = headers()
    program = nvrtc.createProgram(
        source, "scan.cu", [t.encode() for t in texts.values()], [name.encode() for name in texts]
    )
    nvrtc.compileProgram(program, (*compiler.OPTIONS, *options))
    text, log = nvrtc.getPTX(program), nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    return text if isinstance(text, str) else text.decode(), log


def report(source: str, architecture: str, *options: str) -> tuple[int, int]:
    """Registers, and bytes spilled, that the assembler tells of a kernel."""
    _, log = compiled(source, f"-arch={architecture}", "--ptxas-options=-v", *options)
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None and spilled is not None, log
    return int(registers[1]), int(spilled[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks_keep_their_states_in_registers(dtype: torch.dtype) -> None:
    """A GRU and its gradient, on tiles that leave room for the warps of all chains."""
    found: list[tuple[str, CudaKernel]] = []

    def load(source: str, kernel: CudaKernel, device: torch.device) -> Any:
        found.append((source, kernel))
        return mock.Mock(blocks_per_processor=1, threads=32)

    xs = tuple(torch.empty(8, 64, 1536, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = tuple(torch.empty(1536, dtype=dtype, requires_grad=True) for _ in range(3))
    with emulated(processors=PROCESSORS), mock.patch.object(launcher, "load", load):
        h = nonlinear_recurrence(gru, xs, 0.0, params=weights, backend="cuda")
        torch.autograd.grad(h, [*xs, *weights], torch.empty_like(h))
    assert [kernel.mode for _, kernel in found] == ["WALKED"] * 2
    for source, kernel in found:
        registers, spilled = report(source, "sm_90", *compiler.ROUNDED_ALIKE)
        assert spilled == 0 and registers <= 200
        assert 3 * kernel.shared_bytes <= 227 << 10  # three warps of 32 chains per multiprocessor


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", {case.op.name: case for case in CASES}.values(), ids=str)
def test_every_operator_compiles(case: Any) -> None:
    """Rows for sm_90, lanes for sm_80; or the engine says what is too much for it."""
    for batch, capability in ((ROW, (9, 0)), (LANES, (8, 0))):
        xs = unwritten(case, batch)
        try:
            source, _ = kernel_of(lambda xs=xs: associative_scan(case.op, xs, 1, backend="cuda"))
        except BackendError as error:
            assert re.search("bytes, more than 512|no state|matrices|cannot", str(error))
            continue
        if capability == (8, 0):  # to PTX: the assembler is most of the time
            assert ".target sm_80" in compiled(source, "-arch=compute_80")[0]
        else:
            assert compiler.cubin(source, capability)


RECURRENCE = monoid(
    lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
    identity=(1.0, 0.0),
    name="compiled_recurrence",
    lower=lambda state: state[1],
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape,choice",
    [
        (ROW, None),
        (LANES, None),
        ((8, 1 << 13, 1536), None),
        ((12288, 8192), None),
        ((8, 256, 1536), None),
        ((8, 1 << 13, 1536), Choice(LanesTile(256, 64, 4, 8, 3), "CHAINED")),
    ],
    ids=["row", "few lanes", "many lanes", "many rows", "short lanes", "relay"],
)
def test_recurrences_do_not_spill(
    shape: tuple[int, ...], choice: Choice | None, dtype: torch.dtype
) -> None:
    a, b = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)

    def run() -> Any:
        if choice is None:
            return associative_scan(RECURRENCE, (a, b), 1, backend="cuda")
        with tuning.forced(choice):
            return associative_scan(RECURRENCE, (a, b), 1, backend="cuda")

    source, kernel = kernel_of(run)
    registers, spilled = report(source, "sm_90a")
    assert spilled == 0
    assert registers * (kernel.tile.threads + 96) * kernel.tile.blocks <= 65536


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [ROW, (1, 74749, 1536)], ids=["row", "lanes"])
def test_packed_recurrences_do_not_spill(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    offsets = torch.linspace(0, shape[1], 1000).long()
    source, kernel = kernel_of(
        lambda: associative_scan(RECURRENCE, (a, b), 1, offsets=offsets, backend="cuda")
    )
    registers, spilled = report(source, "sm_90a")
    assert kernel.packed and spilled == 0
    roles = 224 if kernel.is_lanes else 320
    assert registers * (kernel.tile.threads + roles) * kernel.tile.blocks <= 65536


@pytest.mark.slow
@pytest.mark.thinned(1)
@pytest.mark.parametrize("shape", [ROW, LANES])
@pytest.mark.parametrize("packed", [False, True])
def test_every_generation(packed: bool, shape: tuple[int, ...]) -> None:
    """The architectures that NVRTC knows, of those that have been sold; rows from 9.0 on."""
    x = torch.empty(shape)
    offsets = torch.tensor((0, 5, shape[1])) if packed else None
    source, _ = kernel_of(lambda: associative_scan(ops.sum, x, 1, offsets=offsets, backend="cuda"))
    known = [a for a in (80, 86, 89, 90, 100, 120) if a in nvrtc.getSupportedArchs()]
    assert {80, 90} <= set(known)
    for architecture in known:
        if shape == LANES or architecture >= 90:
            assert compiler.cubin(source, divmod(architecture, 10))
