"""The finals of empty packed sequences, which no kernel reaches."""

from __future__ import annotations

import torch

from ..engines.base.scan_spec import ScanSpec
from ..program.element_components import from_components
from ..program.operator import Operator, spans
from ..program.program_builder import decode

Spec = ScanSpec[Operator]


def fill_finals(spec: Spec, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Write the final carry of an empty sequence to all finals: init where it is given, else the
    identity. `tensors`: the finals, then the init tensors of those leaves that have one."""
    op, count = spec.operator, len(spec.final)
    given = iter(tensors[count:])
    for k, t in zip(spec.final, tensors, strict=False):
        if k in (spec.init or ()):
            t.copy_(next(given).expand(t.shape))
        elif op.identity is not None:
            values: list[torch.Tensor | None] = [
                torch.full((), decode(op.identity[c]), device=t.device) for c in spans(op.state)[k]
            ]
            t.copy_(from_components(values, op.state[k], (), t).expand(t.shape))
    return []
