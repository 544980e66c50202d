"""Compiles the kernels over matrices for one GPU target, without a GPU, and prints what they use.

Run by `test_matrices` in a process of its own: `python tests/support/compile_matrices.py sm_90`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from gpu_targets import TARGETS, resource_usage
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from assocscan import ops
from assocscan.engines.base.job import Engine
from assocscan.engines.base.problem import ScanProblem
from assocscan.engines.triton.matrix import scan as matrix_scan
from assocscan.engines.triton.scan import float_options

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip


def compiled(prepared: Any, given: list[torch.Tensor], target: GPUTarget) -> Any:
    """The kernel for arguments that are aligned as torch allocates them."""
    function = prepared.launcher
    types = [POINTERS[t.dtype] for t in given] + ["i32"] * len(prepared.integers)
    aligned = [*([16] * len(given)), *prepared.integers]
    attributes = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(aligned) if n % 16 == 0}
    source = ASTSource(
        fn=function, signature=dict(zip(function.arg_names, types, strict=True)), constexprs={},
        attrs=attributes,
    )  # fmt: skip
    options = {"num_warps": prepared.kernel.tile.warps, **float_options("cpu")}
    return triton.compile(source, target=target, options=options)


def spilled(kernel: Any) -> int:
    """Bytes of stack per thread on NVIDIA GPUs, vector registers in memory on AMD's."""
    if "amdgcn" in kernel.asm:
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"]).group(1))
    return resource_usage(kernel.asm["cubin"])[1]


def problems(target: str) -> Iterator[tuple[str, ScanProblem, Engine]]:
    """Every size forward; for one target also, at 64, where registers are short, the adjoint,
    flags, dtypes and chunks."""
    for d in (8, 16, 32, 64):
        A, b = torch.ones(2, 9, d, d), torch.ones(2, 9, d)
        yield f"matmul {d}", problem(ops.matmul, A), matrix_scan.scan
        yield f"matrix_affine {d}", problem(ops.matrix_affine, (A, b)), matrix_scan.scan
    if target != "sm_90":
        return
    adjoint = problem(ops.matrix_affine.adjoint[0], (A.mT, A, b))
    yield "adjoint", adjoint, matrix_scan.scan
    options: dict[str, Any] = {"reverse": True, "exclusive": True, "final": (0, 1)}
    options["offsets"] = torch.tensor([0, 4, 9])
    flags = problem(ops.matrix_affine, (A, b), **options)
    yield "flags", flags, matrix_scan.scan
    yield "chunks", flags, matrix_scan.scan_multipass
    options["init"] = [torch.ones(2, 2, d, d), torch.ones(2, 2, d)]
    yield "init", problem(ops.matrix_affine, (A, b), **options), matrix_scan.scan
    for dtype in (torch.bfloat16, torch.float64):
        wanted = problem(ops.matrix_affine, (A.to(dtype), b.to(dtype)))
        yield f"{dtype}", wanted, matrix_scan.scan


def problem(op: Any, xs: Any, **options: Any) -> ScanProblem:
    spec, leaves, ndims = op.of(xs)
    batch = tuple(leaves[0].shape[: leaves[0].dim() - ndims[0]])
    return ScanProblem(spec.matrices, leaves, batch, 1, **options)


def main(name: str) -> None:
    target = GPUTarget(*TARGETS[name])
    if target.backend == "hip":
        matrix_scan.choose_slice = lambda device: 0
    launched: list[tuple[Any, list[torch.Tensor]]] = []

    def note(prepared: Any, tensors: Any, tables: Any) -> None:
        launched.append((prepared, [*(tensors[n] for n in prepared.pointers), *tables]))

    matrix_scan.launch = note
    for label, wanted, engine in problems(name):
        launched.clear()
        engine(wanted)
        for prepared, given in launched:
            kernel = compiled(prepared, given, target)
            text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
            row = {"label": label, "spilled": spilled(kernel), "tf32": "tf32" in text}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
