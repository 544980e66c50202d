"""Runs scans over vectors, and their backward passes, by torch operations on whole tensors.

For derivatives that no kernel computes: autograd, torch.func and forward mode can differentiate
these operations any number of times. And for scans of compiled graphs whose kernel cannot be
compiled. A value of a program is a tensor whose last dimension is the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...autodiff.evaluate import evaluate
from ...program.dtypes import EXACT_DTYPES
from ...program.operator import Leaf
from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator, part_spans
from ..base.scan_spec import MaybeTensor, ScanSpec
from . import scan as eager

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Walk:
    """The states of a scan.

    states: those that `lower` reads, for each part. first, last: the carries that enter and leave.
    raw: the parts of the inputs. bounds: of the packed sequences, or of the one that there is.
    """

    states: Tensors
    first: Tensors
    last: Tensors
    raw: Tensors
    bounds: list[int]


def walk(spec: ScanSpec[VectorOperator], tensors: Sequence[MaybeTensor]) -> Walk:
    given = dict(zip(spec.names, tensors, strict=True))
    op = spec.operator
    raw = [part for k, leaf in enumerate(op.inputs) for part in parts_of(given["input", k], leaf)]
    states = [
        t.expand(*spec.batch, op.size if varies else 1)
        for t, varies in zip(evaluate(op.lift, raw, EXACT_DTYPES), op.state_varies, strict=True)
    ]

    def combine(left: Tensors, right: Tensors) -> Tensors:
        results = evaluate(op.combine, [*left, *right], EXACT_DTYPES)
        shape = torch.broadcast_shapes(left[0].shape[:-1], right[0].shape[:-1])
        return [t.expand(*shape, x.shape[-1]) for t, x in zip(results, right, strict=True)]

    carries = entering(spec, given)
    states, last, bounds = eager.scan_sequences(
        combine, spec, states, carries, given.get(("offsets", 0))
    )
    return Walk(states, carries, last, raw, bounds)


def scan(spec: ScanSpec[VectorOperator], tensors: Sequence[MaybeTensor]) -> tuple[Tensors, Tensors]:
    """The outputs and finals of a scan, without carries that it should save."""
    return results_of(spec, walk(spec, tensors))


def results_of(spec: ScanSpec[VectorOperator], found: Walk) -> tuple[Tensors, Tensors]:
    """Outputs and finals."""
    op = spec.operator
    lowered = evaluate(op.lower, [*found.states, *found.raw], EXACT_DTYPES)
    outputs = [
        joined([lowered[c] for c in span], leaf, leaf.dtype, spec.batch)
        for leaf, span in zip(op.outputs, part_spans(op.outputs), strict=True)
    ]
    spans = part_spans(op.state)
    finals = [
        joined(
            [found.last[c] for c in spans[k]], op.state[k], op.state[k].accumulator,
            spec.carry_batch,
        )
        for k in spec.final
    ]  # fmt: skip
    return outputs, finals


def parts_of(t: MaybeTensor, leaf: Leaf) -> Tensors:
    """A leaf's parts, with the states as their last dimension."""
    assert t is not None
    t = t if leaf.shape else t.unsqueeze(-1)
    return [t.real, t.imag] if leaf.dtype.is_complex else [t]


def entering(spec: ScanSpec[VectorOperator], given: dict[tuple[str, int], Any]) -> Tensors:
    """The parts of the initial carry: of init where it is given, else of the identity; zeros, which
    are not read, without either."""
    op, found = spec.operator, []
    for k, (leaf, span) in enumerate(zip(op.state, part_spans(op.state), strict=True)):
        init = given.get(("init", k))
        for part, c in enumerate(span):
            kind = EXACT_DTYPES[op.combine.output_dtypes[c]]
            if init is None:
                value = torch.tensor(op.identity_values[c], dtype=kind, device=spec.device)
            else:
                value = parts_of(init, leaf)[part].to(kind)
            found.append(value.expand(*spec.carry_batch, op.size if op.state_varies[c] else 1))
    return found


def joined(parts: Tensors, leaf: Leaf, dtype: torch.dtype, batch: tuple[int, ...]) -> torch.Tensor:
    """A leaf made of its parts."""
    full = [p.expand(*batch, leaf.shape[0] if leaf.shape else 1) for p in parts]
    t = torch.complex(*full) if leaf.dtype.is_complex else full[0]
    t = t if leaf.shape else t.squeeze(-1)
    return t.to(dtype, copy=True, memory_format=torch.contiguous_format)


Results = Callable[..., tuple[torch.Tensor, ...]]
# (results, primals, cotangents of the results) → the gradients of the primals.
PullBack = Callable[[Results, Tensors, Tensors], Sequence[torch.Tensor]]


def by_transform(results: Results, primals: Tensors, cotangents: Tensors) -> Sequence[torch.Tensor]:
    """Gradients that all levels of torch.func, forward mode and autograd can differentiate."""
    found: tuple[torch.Tensor, ...]
    found, pull = torch.func.vjp(results, *primals)  # type: ignore[misc]
    return pull(tuple(like(g, y) for y, g in zip(found, cotangents, strict=True)))  # type: ignore[no-any-return]


def by_autograd(results: Results, primals: Tensors, cotangents: Tensors) -> Sequence[torch.Tensor]:
    """Gradients of plain tensors, without derivatives of their own."""
    with torch.enable_grad():
        primals = [t.detach().requires_grad_() for t in primals]
        found = results(*primals)
    pairs = [(y, like(g, y)) for y, g in zip(found, cotangents, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in pairs], primals, [g for _, g in pairs], materialize_grads=True
    )


def like(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return g.expand_as(y).to(y.dtype)


def backward(
    spec: ScanSpec[VectorAdjoint], tensors: Sequence[MaybeTensor], pull_back: PullBack
) -> tuple[Tensors, Tensors]:
    """The gradients of the leaves and of init, as the kernels of a backward pass give them; the
    saved carries are not read."""
    adjoint = spec.operator
    op, count = adjoint.op, len(adjoint.op.inputs)
    given = dict(zip(spec.names, tensors, strict=True))
    whole: ScanSpec[Any] = spec
    forward = replace(whole, operator=op, final=adjoint.seeded)
    starts: Tensors = []
    for k in spec.init or ():
        init = given["init", k]
        assert init is not None
        starts.append(init.expand(*spec.carry_batch, *op.state[k].shape))
    places = [*adjoint.wanted, *(count + k for k in adjoint.ends)]
    fixed = [*tensors[:count], *starts]
    offsets = [] if spec.sequences is None else [given["offsets", 0]]

    def results(*wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(places, wanted, strict=True))
        mixed = [values.get(k, t) for k, t in enumerate(fixed)]
        outputs, finals = scan(forward, [*mixed, *offsets])
        return (*(outputs[k] for k in adjoint.cotangents), *finals)

    primals: list[Any] = [fixed[k] for k in places]
    seeds: list[Any] = [*tensors[count : adjoint.carries], *tensors[adjoint.carries + 1 :]]
    cotangents = seeds[: len(adjoint.cotangents) + len(adjoint.seeded)]
    gradients = list(pull_back(results, primals, cotangents))
    for n, k in enumerate(adjoint.wanted):
        dims = adjoint.repeated[n]
        leaf = gradients[n].sum(dims, keepdim=True) if dims else gradients[n]
        gradients[n] = leaf.to(op.inputs[k].dtype)
    return gradients[: len(adjoint.wanted)], gradients[len(adjoint.wanted) :]
