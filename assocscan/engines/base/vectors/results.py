"""The shapes, strides and dtypes of what scans over vectors and their backward passes write.

They follow from the metadata of the tensors alone, and sizes may be symbolic: this is what the
library operation declares of its results, and what the kernels of every engine write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....program.vectors.vector_adjoint import VectorAdjoint
from ....program.vectors.vector_operator import VectorOperator
from ..layout import Finals, Outputs, result_layout, tensors_by_name
from ..scan_spec import ScanSpec, Strides, TensorSpec, dense_strides
from .gradients import gradient_shape, gradient_strides
from .kernel import CHUNK, carry_dtype, padded, padded_states

Shape = tuple[int, ...]
Scan = ScanSpec[VectorOperator | VectorAdjoint]


@dataclass(frozen=True)
class ResultLayout:
    """What engines differ in.

    carries: the shape and dtype of the saved carries, of a forward scan or of its backward pass.
    strides: of the gradient of the input leaf with this number.
    """

    carries: Callable[[Scan], tuple[Shape, torch.dtype]]
    strides: Callable[[int, TensorSpec, ScanSpec[VectorAdjoint]], Strides]

    def results_of(
        self, spec: ScanSpec[Any], tensors: Sequence[TensorSpec | None]
    ) -> tuple[Outputs, Finals]:
        """Sizes, strides and dtypes of the outputs, the saved carries and the gradients among them;
        sizes and dtypes of the finals."""
        op = spec.operator
        if isinstance(op, VectorAdjoint):
            outputs = []
            for k in op.wanted:
                t = tensors[k]
                assert t is not None
                strides = self.strides(k, t, spec)
                outputs.append((gradient_shape(k, t, spec), strides, op.op.inputs[k].dtype))
            return outputs, [end_of(spec, k) for k in op.ends]
        outputs, finals = result_layout(spec, tensors_by_name(spec, tensors))
        if op.saves_carries:
            shape, dtype = self.carries(spec)
            outputs.append((shape, dense_strides(shape), dtype))
        return outputs, finals


def saved_parts(spec: Scan) -> tuple[VectorOperator, list[int]]:
    """The operator of the forward scan, and the parts of its state that are saved."""
    op = spec.operator
    if isinstance(op, VectorAdjoint):
        return op.op, op.saved_parts
    return op, op.carry_parts(spec.final)


def rows_and_lanes(spec: Scan) -> tuple[int, int]:
    """The sizes of the lanes, along which carries are laid out, and of all other chains."""
    lane = spec.operator.lane
    rows = [n for d, n in enumerate(spec.batch) if d not in (spec.axis, lane)]
    return math.prod(rows), 1 if lane is None else spec.batch[lane]


def end_of(spec: ScanSpec[VectorAdjoint], k: int) -> tuple[Shape, torch.dtype]:
    """The size and dtype of the gradient of the state leaf k of init."""
    leaf = spec.operator.state[k]
    return (*spec.carry_batch, *leaf.shape), leaf.accumulator


# ---- On GPUs ----


def gpu_carries(spec: Scan) -> tuple[Shape, torch.dtype]:
    """The carries before the chunks of CHUNK steps: [chunks + 1, rows, padded lanes, numbers].

    Those before the chunks of a packed sequence begin at `offset // CHUNK + sequence`. For a chunk
    and a row, the parts of the state follow one another: [padded lanes, padded states], or [padded
    lanes] for a part that all states share.

    No symbolic size can be 1, since torch asks whether one is, and compiles again where the answer
    changes: so there is a chunk more than needed. (With another shape, change
    `program.saved.vectors.FORMAT`.)
    """
    op, parts = saved_parts(spec)
    rows, lanes = rows_and_lanes(spec)
    numbers = sum(padded_states(op.size) if op.state_varies[c] else 1 for c in parts)
    chunks = spec.length // CHUNK + spec.sequence_count + 1
    return (chunks, rows, padded(lanes), numbers), carry_dtype(op)


GPU_RESULTS = ResultLayout(gpu_carries, gradient_strides)
