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
from assocscan.engines.base.commands import Launch
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.scan_spec import ScanSpec, TensorSpec
from assocscan.engines.triton.corrections import lane_promises
from assocscan.engines.triton.matrix import prepare as matrix_scan
from assocscan.engines.triton.prepare import LoadedKernel, float_options

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip


def compiled(loaded: LoadedKernel, given: list[torch.dtype], target: GPUTarget) -> Any:
    """The kernel for arguments that are aligned as torch allocates them."""
    function = loaded.function
    types = [POINTERS[dtype] for dtype in given] + ["i32"] * len(loaded.integers)
    aligned = [*([16] * len(given)), *loaded.integers]
    attributes = {(k,): [["tt.divisibility", 16]] for k, n in enumerate(aligned) if n % 16 == 0}
    source = ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, types, strict=True)),
        constexprs={},
        attrs=attributes,
    )
    options = {"num_warps": loaded.kernel.tile.warps, **float_options("cpu", False)}
    with lane_promises.mended():  # Triton keeps what is compiled here
        return triton.compile(source, target=target, options=options)


def spilled(kernel: Any) -> int:
    """Bytes of stack per thread on NVIDIA GPUs, vector registers in memory on AMD's."""
    if "amdgcn" in kernel.asm:
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"]).group(1))
    return resource_usage(kernel.asm["cubin"])[1]


Case = tuple[str, Executable]


def cases(target: str) -> Iterator[Case]:
    """Every size forward; for one target also, at 64, where registers are short, the adjoint,
    flags, dtypes and chunks."""
    one, cut = matrix_scan.prepare, matrix_scan.prepare_multipass
    for d in (8, 16, 32, 64):
        A, b = torch.ones(2, 9, d, d), torch.ones(2, 9, d)
        yield f"matmul {d}", one(*scan(ops.matmul, A))
        yield f"matrix_affine {d}", one(*scan(ops.matrix_affine, (A, b)))
    if target != "sm_90":
        return
    yield "adjoint", one(*scan(ops.matrix_affine.adjoint[0], (A.mT, A, b)))
    flags: dict[str, Any] = {"reverse": True, "exclusive": True, "final": (0, 1), "sequences": 2}
    offsets = torch.tensor([0, 4, 9])
    yield "flags", one(*scan(ops.matrix_affine, (A, b), offsets, **flags))
    yield "chunks", cut(*scan(ops.matrix_affine, (A, b), offsets, **flags))
    init = [torch.ones(2, 2, d, d), torch.ones(2, 2, d)]
    yield "init", one(*scan(ops.matrix_affine, (A, b), *init, offsets, **flags, init=(0, 1)))
    for dtype in (torch.bfloat16, torch.float64):
        yield f"{dtype}", one(*scan(ops.matrix_affine, (A.to(dtype), b.to(dtype))))


def scan(op: Any, xs: Any, *more: torch.Tensor, **options: Any) -> Any:
    """The spec, and the specs of its tensors."""
    traced, leaves, ndims = op.of(xs)
    batch = tuple(leaves[0].shape[: leaves[0].dim() - ndims[0]])
    spec = ScanSpec(traced.matrices, batch, 1, leaves[0].device, **options)
    return spec, [TensorSpec.of(t) for t in (*leaves, *more)]


def main(name: str) -> None:
    target = GPUTarget(*TARGETS[name])
    if target.backend == "hip":
        matrix_scan.choose_slice = lambda device: 0
    for label, executable in cases(name):
        for command in executable.commands:
            if isinstance(command, Launch):
                given = [executable.specs[k].dtype for k in command.slots]
                kernel = compiled(command.kernel, given, target)
                text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
                row = {"label": label, "spilled": spilled(kernel), "tf32": "tf32" in text}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
