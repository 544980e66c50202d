"""Runs a `ScanSpec` by torch operations, one per instruction of its programs.

`auto` uses it if no kernel can be compiled or run. A forward call could run the user's function
instead, but a backward scan or an operation of a compiled graph has none. autograd can
differentiate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...autodiff.evaluate import evaluate
from ...errors import BackendError
from ...program.dtypes import EXACT_DTYPES
from ...program.element_components import component_views, from_components
from ...program.matrix_operator import MatrixOperator
from ...program.operator import Leaf, Operator, spans
from ...program.program_builder import decode
from ..base.executable import CommandList, Executable
from ..base.fallback_warning import warn_once
from ..base.layout import result_layout
from ..base.scan_spec import MaybeTensor, Name, ScanSpec, TensorSpec
from ..base.shifted_leaves import explicit
from . import scan as eager
from .owned_results import owned
from .scan import eager_plan

Tensors = list[torch.Tensor]
Spec = ScanSpec[Operator]
Given = dict[Name, MaybeTensor]


def prepare(spec: Spec, tensors: Sequence[TensorSpec | None], reason: str = "") -> Executable:
    """An executable of one command, which runs torch operations. Raises BackendError for operators
    over matrices, which have no scalar programs."""
    operator: object = spec.operator
    if isinstance(operator, MatrixOperator):
        raise BackendError(f"no engine can run {operator.name!r}: {reason}")

    def run(*given: MaybeTensor) -> Tensors:
        outputs, finals = scan(spec, given)
        return [*outputs, *finals]

    commands = CommandList(spec, tensors)
    outputs, finals = result_layout(spec, {})
    sizes = [(size, dtype) for size, _, dtype in outputs] + finals
    specs = [TensorSpec.dense(size, dtype, spec.device) for size, dtype in sizes]
    slots = commands.eager("torch operations", run, range(len(tensors)), specs)
    count = len(spec.operator.outputs)
    return commands.build(
        slots[:count], slots[count:], lambda: eager_plan(spec, spec.operator.name, reason)
    )


def scan_instead(
    spec: ScanSpec[Any], tensors: Sequence[MaybeTensor], reason: str
) -> tuple[Tensors, Tensors]:
    """`scan`, with one warning that gives the reason. Raises BackendError for operators over
    matrices, which have no scalar programs."""
    if isinstance(spec.operator, MatrixOperator):
        raise BackendError(f"no engine can run {spec.operator.name!r}: {reason}")
    warn_once(spec.operator, f"{reason}; it is run by torch operations, which is slower")
    return scan(spec, tensors)


def scan(spec: Spec, tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
    """The outputs and finals of a scan, in memory of their own."""
    spec, tensors = explicit(spec, tensors)
    given = dict(zip(spec.names, tensors, strict=True))
    op = spec.operator
    raw = [part for k, leaf in enumerate(op.inputs) for part in parts_of(spec, given, k, leaf)]
    filled = [t.expand(spec.batch) for t in evaluate(op.lift, raw, EXACT_DTYPES)]

    def combine(left: Tensors, right: Tensors) -> Tensors:
        shape = torch.broadcast_shapes(left[0].shape, right[0].shape)
        return [t.expand(shape) for t in evaluate(op.combine, [*left, *right], EXACT_DTYPES)]

    states, last, _ = eager.scan_sequences(
        combine, spec, filled, entering(spec, given), given.get(("offsets", 0))
    )
    edge = torch.zeros((), dtype=torch.bool, device=spec.device)
    lowered = evaluate(op.lower, [*states, *raw, edge], EXACT_DTYPES)
    finals = [joined(last, op.state, k, spec.carry_batch, True) for k in spec.final]
    outputs = [joined(lowered, op.outputs, k, spec.batch) for k in range(len(op.outputs))]
    results = owned([*outputs, *finals], tensors)
    return results[: len(outputs)], results[len(outputs) :]


def parts_of(spec: Spec, given: Given, number: int, leaf: Leaf) -> Tensors:
    """The components of an input, broadcastable to the batch; zeros for one that is not read."""
    t = given["input", number]
    if t is not None:
        return component_views(t, leaf)
    return [torch.zeros((), device=spec.device)] * leaf.components


def entering(spec: Spec, given: Given) -> Tensors:
    """The components of the initial carry: those of init where it is given, else of the identity.
    Without either they are zeros, which are not read."""
    op, shape = spec.operator, spec.carry_batch
    constants = op.identity or tuple(0 for _ in range(op.width))
    found = []
    for k, (leaf, span) in enumerate(zip(op.state, spans(op.state), strict=True)):
        init = given.get(("init", k))
        views = [None] * leaf.components if init is None else component_views(init, leaf)
        for component, view in zip(span, views, strict=True):
            kind = EXACT_DTYPES[op.combine.output_dtypes[component]]
            value = decode(constants[component])
            part = torch.tensor(value, dtype=kind, device=spec.device) if view is None else view
            found.append(part.to(kind).expand(shape))
    return found


def joined(
    parts: Tensors, leaves: tuple[Leaf, ...], number: int, batch: tuple[int, ...],
    is_carry: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A leaf made from its components. A carry has the leaf's accumulator dtype: float32 for 16-bit
    floats."""
    leaf = leaves[number]
    dtype = leaf.accumulator if is_carry else leaf.dtype
    mine: list[torch.Tensor | None] = [parts[c].expand(batch) for c in spans(leaves)[number]]
    return from_components(mine, Leaf(dtype, leaf.shape), batch, parts[0])
