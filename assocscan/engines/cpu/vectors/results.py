"""The shapes and strides of what the kernels of scans over vectors write. They follow from the
metadata of the tensors alone, sizes may be symbolic, and do not depend on the number of threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator
from ...base.layout import Finals, Outputs, result_layout, tensors_by_name
from ...base.scan_spec import ScanSpec, TensorSpec, dense_strides
from ...base.vectors.gradients import order_like
from .kernel import WIDTH, carry_bytes, chunk_steps

Shape = tuple[int, ...]


def results_of(spec: ScanSpec[Any], tensors: Sequence[TensorSpec | None]) -> tuple[Outputs, Finals]:
    """Sizes, strides and dtypes of the outputs, the saved carries and the gradients among them;
    sizes and dtypes of the finals."""
    op = spec.operator
    if isinstance(op, VectorAdjoint):
        outputs = []
        for k in op.wanted:
            t = tensors[k]
            assert t is not None
            shape = gradient_shape(k, t, spec)
            outputs.append((shape, order_like(t, shape), op.op.inputs[k].dtype))
        return outputs, [end_of(spec, k) for k in op.ends]
    outputs, finals = result_layout(spec, tensors_by_name(spec, tensors))
    if op.saves_carries:
        shape = carries_shape(spec)
        outputs.append((shape, dense_strides(shape), torch.uint8))
    return outputs, finals


def carries_shape(spec: ScanSpec[VectorOperator | VectorAdjoint]) -> Shape:
    """The bytes of the carries that enter the chunks, by chunk, row and block of lanes.

    No symbolic size can be 1, since torch asks whether one is, and compiles again where the answer
    changes: there is a chunk more than needed, and the blocks are no dimension of their own. (With
    another shape, change `program.saved.vectors.FORMAT`.)
    """
    op = spec.operator
    if isinstance(op, VectorAdjoint):
        forward, parts = op.op, op.saved_parts
    else:
        forward, parts = op, op.carry_parts(spec.final)
    chunks = spec.length // chunk_steps(forward.size) + spec.sequence_count + 1
    others = [n for d, n in enumerate(spec.batch) if d not in (spec.axis, op.lane)]
    lanes = 1 if op.lane is None else spec.batch[op.lane]
    return chunks, math.prod(others), -(-lanes // WIDTH) * carry_bytes(forward, parts)


def gradient_shape(k: int, t: TensorSpec, spec: ScanSpec[VectorAdjoint]) -> Shape:
    """The shape of the gradient of the input leaf k. What is summed is decided by `repeated`, not
    by strides: another leaf with stride 0 has a gradient for each entry."""
    repeated = spec.operator.repeated[spec.operator.wanted.index(k)]
    return tuple(1 if d in repeated else n for d, n in enumerate(t.shape))


def end_of(spec: ScanSpec[VectorAdjoint], k: int) -> tuple[Shape, torch.dtype]:
    """The size and dtype of the gradient of the state leaf k of init."""
    leaf = spec.operator.state[k]
    return (*spec.carry_batch, *leaf.shape), leaf.accumulator
