"""`auto` on GPUs: one Triton kernel where its programs fill the GPU, else the multi-pass engine."""

from __future__ import annotations

import math

import torch

from ..problem import ScanProblem
from . import multipass, triton_scan

# Chains per multiprocessor below which the axis is cut, and the shortest axis for which it pays.
FEW_CHAINS = 16
LONG_AXIS = 1 << 15


def scan(problem: ScanProblem) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the problem by the faster engine for its shape."""
    return multipass.scan(problem) if is_cut(problem) else triton_scan.scan(problem)


def is_cut(problem: ScanProblem) -> bool:
    """Whether the chains are too few, and the axis too long, for one program per chain."""
    if problem.length < LONG_AXIS:
        return False
    chains = math.prod(problem.carry_batch)
    return chains < FEW_CHAINS * triton_scan.processors(problem.device)


def explain(problem: ScanProblem) -> tuple[str, bool]:
    """Why the problem is cut into chunks or not, and whether it is."""
    chains = math.prod(problem.carry_batch)
    limit = FEW_CHAINS * triton_scan.processors(problem.device)
    if is_cut(problem):
        return f"{chains} chains are too few to fill the GPU (under {limit}): the axis is cut", True
    if problem.length < LONG_AXIS:
        return f"the axis is short (under {LONG_AXIS}): every program walks its chains", False
    return f"{chains} chains fill the GPU: every program walks its chains", False
