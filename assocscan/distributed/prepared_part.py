"""Keeps the local passes of a distributed call, and runs them again for later calls on tensors of
the same shapes, strides and dtypes.

Each pass is one list of commands, which the C++ runner runs. The first leaves the totals of the
part in one buffer, as the collective sends it. The second is the local scan; where the carry that
enters is the total of one rank, it reads it from the buffer that was received.

Calls whose ranks compare their arguments or exchange the lengths of their parts are not kept: they
wait for the other ranks anyway.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..api.associative_scan import gradient_of, operator_of, run_call
from ..api.recomputed_gradient import RecomputedGradientOfCall
from ..caching.bounded import Calls
from ..engines.base.commands import Allocate, Slot, SlotArgument
from ..engines.base.executable import CommandList, Executable, FunctionSpec
from ..engines.base.scan_spec import TensorSpec
from ..errors import BackendError
from ..monoids.captured_values import present
from ..monoids.monoid import Monoid, by_name
from ..runtime import backends
from ..runtime import executable_cache as executables
from ..runtime.native import runner
from ..runtime.operation_arguments import Dispatch
from ..runtime.prepared.backward_lists import commands_on
from ..runtime.prepared.prepared_call import Key, entry_of
from ..runtime.scan_call import ScanCall
from .carries import Part, Tensors, carries, local_total, total_call
from .collectives import ALIGNMENT, gathered, received_by

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

aten = torch.ops.aten
KEPT = Calls()


def key_of(
    op: Any, xs: Any, init: Any, flags: tuple[Any, ...], backend: str, group: ProcessGroup
) -> tuple[Key | None, tuple[torch.Tensor, ...]]:
    """The key of a call, None where such calls are not kept; and its tensors.

    flags: axis, reverse, inclusive and return_final.
    """
    op = by_name(op)
    if not isinstance(op, Monoid):
        return None, ()
    op = present(op)
    axis, reverse, inclusive, return_final = flags
    entry = entry_of(KEPT, xs, axis, reverse, inclusive, init, return_final, backend)
    if entry is None:
        return None, ()
    return (op, group.group_name, group.rank(), group.size(), entry.key), entry.tensors


def kept(key: Key, tensors: Sequence[torch.Tensor]) -> Part | None:
    """The part of an earlier call with this key, with these tensors."""
    part: Part | None = KEPT.get(key)
    return None if part is None else part.with_tensors(tensors)


def keep(key: Key, part: Part, tensors: Sequence[torch.Tensor]) -> Part:
    """The part with its passes, kept for later calls; unchanged where they cannot be prepared.

    tensors: as the caller gave them. Where `bind` converted init to new tensors, the call is not
        kept.
    """
    call = part.call
    bound = (*call.leaves, *(call.init or ()))
    can_run = part.backend != "eager" and backends.why_not(call, part.backend) is None
    if not can_run or call.traced.identity is None or call.length == 0:
        return part
    if len(bound) != len(tensors) or any(a is not b for a, b in zip(bound, tensors, strict=True)):
        return part
    light = part.without_memory()
    made = replace(light, prepared=PreparedPart(light))
    KEPT.insert(key, made)
    return made.with_tensors(tensors)


class PreparedPart:
    """The local passes of a kept call.

    part: the part without the memory of its tensors.
    total: leaves the totals in one buffer; None before it is prepared, and if it cannot be.
    total_is_known: whether it was tried to prepare `total`.
    scan: the local scan without gradients; None before it is prepared.
    gradient: the local scan with gradients; None before it is prepared, and for scans that are not
        over vectors.
    """

    def __init__(self, part: Part) -> None:
        self.part = part
        self.total: TotalInBuffer | None = None
        self.total_is_known = False
        self.scan: Executable | None = None
        self.gradient: RecomputedGradientOfCall | None = None

    def totals(self, part: Part) -> Tensors:
        """The totals of all parts, stacked along the axis in the order of ranks."""
        return self.stacked(part, self.received(part))

    def received(self, part: Part) -> torch.Tensor | None:
        """The buffers of all ranks as rows; None if `total` cannot be prepared: no collective has
        run then. The totals of segments go to the local scan (`HandedTotals`)."""
        if not self.total_is_known:
            with contextlib.suppress(BackendError):  # `local_total` meets it too, and reports it
                self.total = total_in_buffer(part)
                self.total_is_known = True
        return None if self.total is None else self.total.received(part)

    def stacked(self, part: Part, rows: torch.Tensor | None) -> Tensors:
        """The totals of all parts from what `received` gave."""
        axis = part.call.axis
        if rows is None:
            return gathered(part.ranks, axis, local_total(part))
        assert self.total is not None
        return self.total.stacked(rows, axis)

    def results(self, part: Part) -> tuple[Tensors, Tensors]:
        """The outputs of the local part, and the final of the whole where it is wanted; without
        gradients."""
        call, rows = part.call, self.received(part)
        takes_rows = rows is not None and not call.return_final and len(part.before) == 1
        entering: Tensors = []
        final: Tensors = []
        if self.scan is None or not takes_rows:
            is_alone = rows is not None and not part.before and not call.return_final
            stacked = [] if is_alone else self.stacked(part, rows)
            entering, final = carries(part, call.return_final, stacked)
        if rows is not None and self.scan is None:
            with contextlib.suppress(BackendError):  # `run_call` meets it too, and reports it
                self.scan = local_scan(part, entering, rows if takes_rows else None)
        if rows is None or self.scan is None:
            local = call.changed(init=entering or None, return_final=False)
            return run_call(local, part.backend)[0], final
        given = [*call.leaves, *([rows] if takes_rows else entering), *handed_totals(part)]
        return runner.run(self.scan, given)[0], final

    def differentiable_results(self, local: ScanCall) -> tuple[Tensors, Tensors]:
        """The outputs and finals of the local scan, connected to the autograd graph."""
        backend = self.part.backend
        if self.gradient is None and backends.vector_operator(local, backend) is not None:
            spec, tensors = local.scan(operator_of(local, backend))
            found, _ = gradient_of(local, Dispatch(backend), spec, tensors)
            if isinstance(found, RecomputedGradientOfCall):
                self.gradient = found.of_part(None)  # what is kept holds no totals
        if self.gradient is not None:
            with contextlib.suppress(BackendError):  # `run_call` meets it too, and reports it
                tensors = [*local.leaves, *(local.init or ())]
                return self.gradient.of_part(local.handed).apply(tensors)
        outputs, finals, _ = run_call(local, backend)
        return outputs, finals


def handed_totals(part: Part) -> Tensors:
    """The totals of segments that the first pass handed over: one tensor, or none."""
    handed = part.call.handed
    return [] if handed is None or handed.forward is None else [handed.forward]


def local_scan(part: Part, entering: Tensors, rows: torch.Tensor | None) -> Executable:
    """The local scan, of the leaves, the carry that enters and the totals of segments, if any.

    rows: what was received, if the scan takes it in the place of `entering`, which are views of it.

    Raises BackendError where no kernel can be made.
    """
    call, totals = part.call.changed(init=entering or None, return_final=False), handed_totals(part)
    spec, tensors = call.scan(operator_of(call, part.backend))
    if totals:
        assert call.handed is not None
        inner = executables.prepare(part.backend, *call.handed.following(spec, tensors, totals[0]))
    else:
        inner = executables.prepare(part.backend, spec, tensors)
    if rows is None:
        return inner
    given = [*call.leaves, rows, *totals]
    commands = commands_on(given, spec.device)
    place = len(call.leaves)
    slots = [*range(place)]
    for t in entering:
        layout = tuple(t.shape), t.stride(), t.storage_offset()
        view = SlotArgument(place), *layout
        slots.append(commands.torch(aten.as_strided.default, view, TensorSpec.of(t)))
    slots += range(place + 1, len(given))
    outputs, _ = commands.inline(inner, slots)
    return commands.build(outputs, [], lambda: inner.plan)


class TotalInBuffer:
    """The pass that leaves a part's totals in one buffer, laid out as by `collectives.packed`.

    places: of each leaf of the state, its shape and where it begins in a rank's row.
    """

    def __init__(
        self, executable: Executable, dtype: torch.dtype, places: Sequence[tuple[Any, int]]
    ) -> None:
        self.executable, self.dtype, self.places = executable, dtype, places

    def received(self, part: Part) -> torch.Tensor:
        """The buffers of all ranks, as rows. The totals of segments go to the local scan."""
        handed = part.call.handed
        assert handed is not None
        (buffer,), segments = runner.run(self.executable, [*part.call.leaves, *(part.init or ())])
        handed.hand(segments)
        return received_by(part.ranks, buffer.view(torch.uint8)).view(self.dtype)

    def stacked(self, rows: torch.Tensor, axis: int) -> Tensors:
        """Views of the rows: the leaves of all ranks, stacked along the axis."""
        return [
            rows.narrow(1, start, math.prod(shape)).view(rows.shape[0], *shape).movedim(0, axis)
            for shape, start in self.places
        ]


def total_in_buffer(part: Part) -> TotalInBuffer | None:
    """The prepared pass; None if no kernel computes the totals, and if they are empty or have
    several dtypes. Raises BackendError where no kernel can be made."""
    call = total_call(part)
    if backends.why_not(call, part.backend) is not None:
        return None
    assert call.handed is not None
    spec, tensors = call.scan(operator_of(call, part.backend))
    inner = executables.prepare(part.backend, call.handed.reduction(spec), tensors)
    names, count = inner.spec.names, len(inner.spec.names)
    commands = CommandList(FunctionSpec(names, spec.device), inner.specs[:count])
    finals = inner.finals
    kinds = [kind for slot in finals if (kind := inner.specs[slot]) is not None]
    allocated = {c.slot for c in inner.commands if isinstance(c, Allocate)}
    if len({kind.dtype for kind in kinds}) != 1 or not allocated >= {*finals}:
        return None
    if len({*finals}) < len(finals) or not all(kind.nbytes and kind.is_dense for kind in kinds):
        return None
    dtype, starts = kinds[0].dtype, [0]
    for kind in kinds:
        nbytes = kind.nbytes + -kind.nbytes % ALIGNMENT
        starts.append(starts[-1] + nbytes // dtype.itemsize)
    buffer = commands.allocate((starts[-1],), dtype)
    views = dict[Slot, Slot]()
    for slot, kind, start in zip(finals, kinds, starts, strict=False):
        view = SlotArgument(buffer), kind.shape, kind.strides, start
        views[slot] = commands.torch(aten.as_strided.default, view, kind)
    segments, _ = commands.inline(inner, range(count), views)
    made = commands.build([buffer], segments, lambda: inner.plan)
    places = [(kind.shape, start) for kind, start in zip(kinds, starts, strict=False)]
    return TotalInBuffer(made, dtype, places)
