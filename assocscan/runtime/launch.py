"""`Launch`: a scan that is one kernel on a GPU, of which all but the tensors is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..cuda import scan as cuda_scan
from ..cuda import tuning
from ..engines.base.job import Engine, Tensors
from ..engines.base.layout import gather_tensors
from ..engines.base.problem import ScanProblem
from ..engines.triton import scan as triton_scan
from ..engines.triton import tiles
from . import gpu_choice as gpu


def is_forced() -> bool:
    """Whether somebody has chosen a tile: nothing that was chosen before is to run."""
    return tiles.forced_tile() is not None or tuning.forced_choice() is not None


class Launch:
    """The kernel; its inputs are those of the problem at the places `inputs`."""

    def __init__(self, prepared: triton_scan.Prepared | cuda_scan.Prepared, inputs: list[int]):
        self.prepared, self.inputs = prepared, inputs

    @staticmethod
    def of(problem: ScanProblem, engine: Engine) -> Launch | None:
        """What the engine would launch; None where that is not one kernel on the tensors as they
        lie."""
        if engine not in (triton_scan.scan, gpu.scan_cuda, gpu.scan):
            return None
        if engine is gpu.scan:
            engine = gpu.ENGINES[gpu.choose(problem)[0]]
        prepared: triton_scan.Prepared | cuda_scan.Prepared
        if engine is triton_scan.scan:
            prepared = triton_scan.prepare(problem, gather_tensors(problem))
            names = list(prepared.pointers)
        elif engine is gpu.scan_cuda and cuda_scan.why_not(problem) is None:
            prepared = cuda_scan.prepared_for(problem)
            names = [name for role in prepared.pointers for name in role]
        else:
            return None
        if prepared.copies or math.prod(problem.carry_batch) == 0:
            return None
        if any(role not in ("input", "output", "final") for role, _ in names):
            return None
        return Launch(prepared, [k for role, k in names if role == "input"])

    def at(self, places: Sequence[int]) -> Launch:
        """The same kernel where input k of the problem stands at places[k]."""
        return Launch(self.prepared, [places[k] for k in self.inputs])

    def run(self, tensors: Sequence[Any], device: torch.device) -> tuple[Tensors, Tensors] | None:
        """Outputs and finals; None where the tensors' addresses do not suit the kernel."""
        prepared = self.prepared
        given: Tensors = [tensors[k] for k in self.inputs]
        outputs = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype in prepared.outputs
        ]
        finals = [torch.empty(size, dtype=d, device=device) for size, d in prepared.finals]
        given += outputs
        given += finals
        if isinstance(prepared, cuda_scan.Prepared):
            if not cuda_scan.launch_warm(prepared, given, device):
                return None
        else:
            triton_scan.launch_given(prepared, given)
        return outputs, finals
