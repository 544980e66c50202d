"""How saved carries and gradients of scans over vectors lie in the memory of the CPU, whatever the
number of threads."""

from __future__ import annotations

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ...base.scan_spec import ScanSpec, Strides, TensorSpec
from ...base.vectors.gradients import gradient_shape, order_like
from ...base.vectors.results import ResultLayout, Scan, Shape, rows_and_lanes, saved_parts
from .kernel import WIDTH, carry_bytes, chunk_steps


def carries_of(spec: Scan) -> tuple[Shape, torch.dtype]:
    """The bytes of the carries that enter the chunks, by chunk, row and block of lanes.

    No symbolic size can be 1, since torch asks whether one is, and compiles again where the answer
    changes: there is a chunk more than needed, and the blocks are no dimension of their own. (With
    another shape, change `program.saved.vectors.FORMAT`.)
    """
    op, parts = saved_parts(spec)
    rows, lanes = rows_and_lanes(spec)
    chunks = spec.length // chunk_steps(op.size) + spec.sequence_count + 1
    return (chunks, rows, -(-lanes // WIDTH) * carry_bytes(op, parts)), torch.uint8


def gradient_strides(k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint]) -> Strides:
    """In the order of the leaf."""
    return order_like(t, gradient_shape(k, t, spec))


RESULTS = ResultLayout(carries_of, gradient_strides)
