"""Integer vectors in Triton's kernels: what is changed in LLVM's text, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_targets import run_compiling
from torch import Tensor

from assocscan import selective_scan
from assocscan.engines.triton.corrections import lane_promises
from assocscan.engines.triton.kernel import Tile
from assocscan.engines.triton.tiles import forced
from assocscan.runtime import backends as engines

pytest.importorskip("triton", reason="Triton is not installed")

# Of the first `shl` only the second lane is read; the first one overflows for threads from 2 on.
# Its result is read in two blocks of code, so that LLVM keeps it in a register.
TEXT = """
target triple = "nvptx64-nvidia-cuda"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k(ptr addrspace(1) %p, i32 %n) {
  %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %i = insertelement <2 x i32> poison, i32 %t, i64 0
  %v = shufflevector <2 x i32> %i, <2 x i32> poison, <2 x i32> zeroinitializer
  %s = shl nuw nsw <2 x i32> %v, <i32 31, i32 2>
  %a = and <2 x i32> %v, <i32 31, i32 poison>
  %m = shufflevector <2 x i32> %a, <2 x i32> %s, <2 x i32> <i32 0, i32 3>
  %d = shl nuw nsw <2 x i32> %m, <i32 3, i32 248>
  %e = and <2 x i32> %m, <i32 poison, i32 248>
  %f = shufflevector <2 x i32> %d, <2 x i32> %e, <4 x i32> <i32 0, i32 3, i32 0, i32 3>
  store <4 x i32> %f, ptr addrspace(1) %p
  %y = extractelement <2 x i32> %s, i64 1
  %z = and i32 %y, 252
  %q = getelementptr i32, ptr addrspace(1) %p, i32 %z
  store i32 %n, ptr addrspace(1) %q
  %c = icmp sgt i32 %n, 0
  br i1 %c, label %yes, label %no
yes:
  %w = and i32 %y, 60
  %r = getelementptr i32, ptr addrspace(1) %p, i32 %w
  store i32 %n, ptr addrspace(1) %r
  br label %no
no:
  ret void
}
"""
WIDENED = "2147483648"  # 2^31, by which the first lane is multiplied in 64 bits


def test_promises_of_vectors_are_dropped() -> None:
    kept = """  %1 = shl nuw nsw i32 %x, 2
  %2 = or disjoint i32 %x, %y
  %3 = and <2 x i32> %v, <i32 31, i32 poison>
  %4 = fadd nnan <2 x float> %v, %w
  %5 = insertelement <2 x i32> poison, i32 %1, i64 0
"""
    dropped = """  %6 = shl nuw nsw <2 x i32> %v, <i32 31, i32 2>, !dbg !17
  %7 = lshr exact <2 x i32> %v, <i32 5, i32 1>
  %8 = or disjoint <16 x i32> %v, %w
  %9 = zext nneg <2 x i32> %v to <2 x i64>
  %10 = add nsw <2 x i32> %v, %w
"""
    found = lane_promises.without_promises(kept + dropped)
    assert (
        found
        == kept
        + """  %6 = shl <2 x i32> %v, <i32 31, i32 2>, !dbg !17
  %7 = lshr <2 x i32> %v, <i32 5, i32 1>
  %8 = or <16 x i32> %v, %w
  %9 = zext <2 x i32> %v to <2 x i64>
  %10 = add <2 x i32> %v, %w
"""
    )


def test_the_installed_compiler_takes_the_text_without_promises_right() -> None:
    """And with them wrong, if it is said to."""
    with_promises, without, is_needed = run_compiling(Path(__file__)).split()
    assert without == "False"
    assert with_promises == is_needed


def translated(text: str) -> str:
    from triton._C.libtriton import llvm  # type: ignore[import-not-found]

    llvm.init_targets()
    given = (text, "nvptx64-nvidia-cuda", "sm_90a", "+ptx80", [], True, False)
    try:
        return str(llvm.translate_to_asm(*given))
    except TypeError:  # Triton 3.8 has one argument more
        return str(llvm.translate_to_asm(*given, False))


def test_only_kernels_of_the_package_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other people's kernels, and their hook, are in the same process and stay as they are."""
    from triton import knobs

    asked = []

    def theirs(*arguments: Any) -> tuple[str, str]:
        asked.append(arguments)
        return "key", "hash"

    monkeypatch.setattr(lane_promises, "is_needed", lambda: True)
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs)

    def llir_of(*others: str) -> str:
        stages: dict[str, Any] = {"llir": lambda source, metadata: TEXT} | dict.fromkeys(others)
        knobs.runtime.add_stages_inspection_hook(None, stages, None, None, 90)
        return str(stages["llir"]("", {}))

    assert llir_of("ptx") == TEXT
    for _ in range(2):
        with lane_promises.mended():
            assert llir_of("ptx") == lane_promises.without_promises(TEXT) != TEXT
            assert llir_of("amdgcn") == TEXT
        assert llir_of("ptx") == TEXT
    assert knobs.runtime.add_stages_inspection_hook() == ("key", "hash")
    assert len(asked) == 8


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or engines.availability()["triton"] is not None, reason="no GPU"
)
def test_threads_read_their_own_inputs() -> None:
    """The gradient's forward pass over lanes of the batch, which was wrong."""
    torch.manual_seed(0)

    def along_the_batch(*shape: int) -> Tensor:
        return torch.randn(shape[::-1], dtype=torch.float64).permute(2, 1, 0)

    steps, channels, states = 129, 16, 4
    u, delta = along_the_batch(2, steps, channels), along_the_batch(2, steps, channels)
    B, C = along_the_batch(2, steps, states), along_the_batch(2, steps, states)
    A, D = -torch.rand(channels, states, dtype=torch.float64), torch.randn(channels).double()

    def run(backend: str, device: str, dtype: torch.dtype) -> Tensor:
        given = [t.to(device, dtype).requires_grad_() for t in (u, delta, A, B, C, D)]
        y = selective_scan(*given, delta_softplus=True, backend=backend)
        return y.detach().cpu().double()

    expected = run("eager", "cpu", torch.float64)
    for _ in range(2):
        with forced(Tile(2, 32, 8, 2, stages=4)):
            found = run("triton", "cuda", torch.float32)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


if __name__ == "__main__":
    sys.stdout.write(
        f"{WIDENED in translated(TEXT)} "
        f"{WIDENED in translated(lane_promises.without_promises(TEXT))} "
        f"{lane_promises.is_needed()}\n"
    )
