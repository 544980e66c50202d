"""A `ScanSpec` and its tensors as arguments of the operation `torch.ops.assocscan.scan`, and back.

The operator becomes two strings, its key and its text (`program/serialization`). The tensors become
three lists; with each comes a list of the same length, of the tensors' leaf numbers: `read` for
`inputs`, `given` for `init` (`ScanSpec.init`), `edged` for `edges` (`ScanSpec.boundary`). `ahead`
is `ScanSpec.shifted`: the input leaves that are read one step ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.base.commands import Tensors
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..program import deserialization, serialization
from ..program.vectors.vector_operator import VectorOperator
from ..torch_state import needs_dispatcher
from . import executable_cache as executables
from .operation_checks import check_places, check_scan

Results = tuple[Tensors, Tensors]


@dataclass(frozen=True)
class Dispatch:
    """Runs scans of a backend, by the executable or as the operation `torch.ops.assocscan.scan`.

    always: as the operation in every case. Otherwise only under torch.func, forward mode, a
    dispatch mode or jit.trace, which must see an operation.
    scans_back: whether the gradient of steps that are not associative is first tried as an
        associative scan of their derivatives, in parallel. Where it is not finite they are walked.
    """

    backend: str
    always: bool = False
    scans_back: bool = False

    def run(self, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results:
        """Outputs and finals. An executable computes no derivatives; the operation does."""
        if self.always or needs_dispatcher():
            return call(self.backend, spec, tensors)
        return executables.run(self.backend, spec, tensors)

    @property
    def falls_back(self) -> bool:
        """Whether the caller must use torch operations for a scan that no engine can run. False
        with `always`: the operation falls back by itself."""
        return self.backend == "auto" and not self.always


def call(backend: str, spec: ScanSpec[Any], tensors: Sequence[MaybeTensor]) -> Results:
    """Outputs and finals of a scan, by the operation `torch.ops.assocscan.scan`; saved carries are
    the last output."""
    key, program = serialization.write(spec.operator)
    given = dict(zip(spec.names, tensors, strict=True))
    read = [k for role, k in spec.names if role == "input" and given[role, k] is not None]
    results = torch.ops.assocscan.scan(
        key, program,
        [given["input", k] for k in read],
        [given["init", k] for k in spec.init or ()],
        [given["boundary", k] for k in spec.boundary],
        given.get(("offsets", 0)), spec.batch, spec.axis, spec.reverse, spec.exclusive,
        spec.from_identity or (spec.init is not None and not spec.init),
        read, spec.init or (), spec.final, spec.shifted, spec.boundary, backend,
    )  # fmt: skip
    op = spec.operator
    count = len(op.outputs) + (isinstance(op, VectorOperator) and op.saves_carries)
    return list(results[:count]), list(results[count:])


def scan_of(
    key: str,
    program: str,
    inputs: Sequence[torch.Tensor],
    init: Sequence[torch.Tensor],
    edges: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    batch: Sequence[int],
    axis: int,
    reverse: bool,
    exclusive: bool,
    from_identity: bool,
    read: Sequence[int],
    given: Sequence[int],
    final: Sequence[int],
    ahead: Sequence[int],
    edged: Sequence[int],
    backend: str,
) -> tuple[ScanSpec[Any], list[MaybeTensor]]:
    """The scan that the operation's arguments describe, and its tensors.

    Raises the errors of `operation_checks` where the arguments do not fit one another.
    """
    op = deserialization.read(key, program)
    places = [tuple(numbers) for numbers in (read, given, final, ahead, edged)]
    check_places(op, *places, (len(inputs), len(init), len(edges)))
    present = dict(zip(read, inputs, strict=True))
    starts = dict(sorted(zip(given, init, strict=True), key=lambda pair: pair[0]))
    beyond = dict(zip(edged, edges, strict=True))
    boundary = tuple(k for k in ahead if k in beyond)
    sequences = None
    if offsets is not None:  # `check_scan` below checks their shape
        sequences = offsets.shape[0] - 1 if offsets.dim() == 1 else 0
    first = next(t for t in (*inputs, *init, *edges))
    spec = ScanSpec(
        op, tuple(batch), axis, first.device, reverse, exclusive, tuple(starts) if given else None,
        from_identity, tuple(final), tuple(ahead), boundary, sequences,
    )  # fmt: skip
    tensors = [present.get(k) for k in range(len(op.inputs))]
    tensors += [*starts.values(), *(beyond[k] for k in boundary)]
    if offsets is not None:
        tensors.append(offsets)
    check_scan(spec, tensors, backend)
    return spec, tensors
