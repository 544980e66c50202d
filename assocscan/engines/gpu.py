"""`auto` on GPUs: one Triton kernel where its programs fill the GPU, else the multi-pass engine."""

from __future__ import annotations

import math

import torch

from ..problem import ScanProblem
from . import multipass, triton_scan

# The axis is cut where it is long and programs are few. Measured on an H100 (132 multiprocessors,
# 2026-11-21) as fractions of copy, affine float32: 64 rows of 2^20 run at 0.66 in one kernel and at
# 0.61 cut, 8 rows of 2^22 at 0.11 and 0.60; 64 programs of 16 lanes at 0.74 and 0.58, 16 of them at
# 0.19 and 0.57. 16 rows of 8192 run at 0.75 in one kernel, cut at 0.36.
FEW_PROGRAMS = 0.42
LONG_AXIS = 1 << 15
NARROW_TILE_BYTES = 64


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem by the faster engine for its shape."""
    return multipass.scan(problem) if is_cut(problem) else triton_scan.scan(problem)


def is_cut(problem: ScanProblem) -> bool:
    """Whether the programs are too few, and the axis too long, for one program per chain."""
    if problem.length < LONG_AXIS:
        return False
    return programs(problem) < FEW_PROGRAMS * triton_scan.processors(problem.device)


def programs(problem: ScanProblem) -> int:
    """About how many programs walk the chains: one per row, or per 64 bytes of adjacent lanes."""
    chains = math.prod(problem.carry_batch)
    first = next(t for t in problem.inputs if t is not None)
    if problem.length > 1 and first.stride(problem.axis) <= 1:
        return chains
    inner = math.prod(problem.batch[problem.axis + 1 :])
    together = min(inner, NARROW_TILE_BYTES // min(first.dtype.itemsize, 8))
    return chains // max(together, 1)


def explain(problem: ScanProblem) -> tuple[str, bool]:
    """Why the problem is cut into chunks or not, and whether it is."""
    if is_cut(problem):
        return f"{programs(problem)} programs would not fill the GPU: the axis is cut", True
    if problem.length < LONG_AXIS:
        return f"the axis is short (under {LONG_AXIS}): every program walks its chains", False
    return f"{programs(problem)} programs fill the GPU: each walks its chains", False
