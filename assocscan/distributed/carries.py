"""The carries of a distributed scan: the total of every part, and those before a part combined.

`carries` is the whole computation by differentiable steps. `carry_gradient` has a cheaper first
derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..api.associative_scan import associative_scan, run_call
from ..api.eager_path import carry_of
from ..api.empty_sequences import no_final
from ..errors import ScanValueError
from ..monoids.combinators import with_lower
from ..monoids.monoid import Monoid
from ..monoids.raw_callables import SliceFunction
from ..program.operator_names import composed
from ..pytrees import TreeSpec, flatten, template, unflatten
from ..runtime.scan_call import ScanCall
from ..runtime.vectors.handed_totals import HandedTotals
from ..torch_private import all_gather_bytes
from ..torch_state import needs_dispatcher
from .collectives import gather, token_of
from .ranks import Ranks

if TYPE_CHECKING:
    from .prepared_part import PreparedPart

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Part:
    """One rank's part of a distributed call.

    call: the call on the local part; its init is that of the whole.
    backend: of the local scans.
    contributing: the ranks whose totals are combined, in the order of the scan: those whose part is
        not empty, and the first one if there is an init, which enters there. All ranks where the
        lengths are not known: an empty part then contributes the identity.
    prepared: the local passes of a call that is kept; None for others.
    total: of the local part, where it is known; for one use.
    """

    call: ScanCall
    ranks: Ranks
    backend: str
    contributing: tuple[int, ...]
    prepared: PreparedPart | None = None
    total: Tensors | None = None

    def with_total(self, total: Tensors | None) -> Part:
        """The same part with this total."""
        return Part(self.call, self.ranks, self.backend, self.contributing, self.prepared, total)

    def with_call(self, call: ScanCall) -> Part:
        """The same part with this call; its total is not known."""
        return Part(call, self.ranks, self.backend, self.contributing, self.prepared)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Part:
        """The part with these leaves and this init."""
        count = len(self.call.leaves)
        init = None if self.call.init is None else list(tensors[count:])
        return self.with_call(self.call.changed(leaves=list(tensors[:count]), init=init))

    def without_memory(self) -> Part:
        """The part with placeholders of the same shapes for its tensors, each with memory for one
        number. Backward passes read shapes and dtypes, never values."""
        if self.prepared is not None:
            light = self.prepared.part.call
            return self.with_call(self.call.changed(leaves=light.leaves, init=light.init))
        given = (*self.call.leaves, *(self.call.init or ()))
        return self.with_tensors(
            [torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape) for t in given]
        )

    @property
    def is_first(self) -> bool:
        """Whether this part comes first in the order of the scan: init enters here."""
        return self.ranks.rank == (self.ranks.size - 1 if self.call.reverse else 0)

    @property
    def init(self) -> Tensors | None:
        """The carry of the whole that enters this part; None on all ranks but the first."""
        return self.call.init if self.is_first else None

    @property
    def before(self) -> tuple[int, ...]:
        """The contributing ranks before this one in the order of the scan."""
        order = self.ranks.in_order(self.call.reverse)
        earlier = order[: order.index(self.ranks.rank)]
        return tuple([rank for rank in self.contributing if rank in earlier])

    @property
    def after(self) -> tuple[int, ...]:
        """The contributing ranks after this one in the order of the scan."""
        order = self.ranks.in_order(self.call.reverse)
        later = order[order.index(self.ranks.rank) + 1 :]
        return tuple([rank for rank in self.contributing if rank in later])


def part_of(call: ScanCall, ranks: Ranks, backend: str, lengths: Sequence[int] | None) -> Part:
    """The part of this rank, for a call whose arguments fit.

    lengths: of all parts, where they are known. They are exchanged where they matter: for an
        operator without an identity. (`reduce` also needs them where `lower` reads inputs.)
    """
    order = ranks.in_order(call.reverse)
    if lengths is None and call.traced.identity is None:
        lengths = exchanged_lengths(call, ranks)
    if lengths is None:
        contributing = order
    else:
        first = order[0] if call.init is not None else None
        contributing = [rank for rank in order if lengths[rank] or rank == first]
    if not contributing and (call.final_only or call.return_final):
        if call.traced.identity is None:
            raise no_final(call)
        contributing = order
    return Part(call, ranks, backend, tuple(contributing))


def exchanged_lengths(call: ScanCall, ranks: Ranks) -> list[int]:
    """The lengths of all parts, which the host reads.

    Raises ScanValueError where it cannot.
    """
    device = call.leaves[0].device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or needs_dispatcher():
        name = call.operator.name
        if call.traced.identity is None:
            why = f"{name!r} declares no identity"
            hint = "Declare an identity: monoid(…, identity=…)"
        else:
            why = f"lower of {name!r} takes the inputs at the last step"
            hint = "Reduce with_lower(op, None), which gives the state before lower"
        raise ScanValueError(
            f"{why}, so the ranks must tell one another which parts are empty, and the host must "
            f"read it: impossible in torch.compile and while a CUDA graph is captured. {hint}"
        )
    own = torch.tensor([call.length], dtype=torch.int64, device=device).view(torch.uint8)
    return [*map(int, all_gather_bytes(own, ranks.size, ranks.name).view(torch.int64).tolist())]


def total_ahead(call: ScanCall, ranks: Ranks, backend: str) -> tuple[ScanCall, Tensors]:
    """The call, which can take totals of segments, and the total of the local part. For ranks that
    compare: what fails in it fails before they wait for one another."""
    part = Part(call, ranks, backend, tuple(ranks.in_order(call.reverse)))
    if not call.final_only:
        call = with_handed_totals(part)
    return call, local_total(part.with_call(call))


def with_handed_totals(part: Part) -> ScanCall:
    """The call of the part, whose first pass hands totals of segments to its second one."""
    begins_alone = part.call.inclusive and part.init is None and not part.before
    return part.call.changed(handed=HandedTotals(part.call.traced.vectors, begins_alone))


def local_total(part: Part) -> Tensors:
    """All elements of the local part combined, after init where the part comes first: a carry.
    Nothing but the result is written."""
    if part.total is not None:
        return part.total
    call = total_call(part)
    if call.length == 0 and call.init is not None:
        return list(call.init)
    if call.length == 0 and call.traced.identity is None:  # not used: it does not contribute
        return [zeros_of_carry(call, k) for k in range(len(call.traced.state))]
    return run_call(call, part.backend)[1]


def zeros_of_carry(call: ScanCall, k: int) -> torch.Tensor:
    leaf = call.traced.state[k]
    shape = (*call.carry_batch(k), *leaf.shape)
    return torch.zeros(shape, dtype=leaf.accumulator, device=call.leaves[0].device)


def total_call(part: Part) -> ScanCall:
    """The reduction of the local part, after init where the part comes first."""
    return part.call.changed(init=part.init, inclusive=True, return_final=True, final_only=True)


def totals(part: Part, *before: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """A token, and the totals of all parts, stacked along the scan's axis in the order of ranks.

    before: the tokens of collectives whose backward passes run after that of this one.
    """
    call = part.call
    token = token_of(*before, *call.leaves, *(call.init or ()))
    if part.prepared is not None and not torch.is_grad_enabled():
        return token, part.prepared.totals(part)
    return gather(part.ranks, call.axis, local_total(part), token)


def prefixes(part: Part, stacked: Sequence[torch.Tensor], of: Sequence[int]) -> Tensors:
    """The totals of these ranks combined in order: every prefix, stacked along the axis."""
    return scan_states(part.call, selected(part, stacked, of), None)


def selected(part: Part, stacked: Sequence[torch.Tensor], of: Sequence[int]) -> Tensors:
    """The slices of these ranks, in this order."""
    if tuple(of) == tuple(range(part.ranks.size)):
        return list(stacked)
    axis, first, count = part.call.axis, of[0], len(of)
    if tuple(of) == tuple(range(first, first + count)):
        return [t.narrow(axis, first, count) for t in stacked]
    return [torch.cat([t.narrow(axis, k, 1) for k in of], axis) for t in stacked]


def carries(
    part: Part, with_final: bool, stacked: Sequence[torch.Tensor]
) -> tuple[Tensors, Tensors]:
    """The carry that enters the local part, and with `with_final` the one that leaves the whole.

    On the rank whose part comes first, init enters; the list is empty if nothing enters. The carry
    may be a view of `stacked`. The final has memory of its own, as results may be written to, and
    kept.

    stacked: the totals of all parts.
    """
    count, axis = len(part.before), part.call.axis
    entering: Tensors = []
    final: Tensors = []
    if with_final:
        found = prefixes(part, stacked, part.contributing)
        final = [t.select(axis, -1).clone() for t in found]
    elif count:
        found = prefixes(part, stacked, part.before)
    if count:
        entering = [t.select(axis, count - 1) for t in found]
    elif part.init is not None:
        entering = list(part.init)
    return entering, final


def traced_carries(part: Part) -> tuple[torch.Tensor, Tensors, Tensors]:
    """A token, the entering carry and the final, by the same operations on every rank.

    For compilers: they may reorder collectives, and do so alike only if the ranks' graphs differ in
    nothing but numbers. So init comes from the first rank by the collective, and something enters
    on every rank: init or the identity.
    """
    call, axis = part.call, part.call.axis
    order = part.ranks.in_order(call.reverse)
    own = local_total(part.with_call(call.changed(init=None)))
    token = token_of(*call.leaves, *(call.init or ()))
    token, received = gather(part.ranks, axis, [*own, *(call.init or ())], token)
    stacked = selected(part, received[: len(own)], order)
    if call.init is None:
        identity = carry_of(call, own)
        assert identity is not None
        start = [t.unsqueeze(axis) for t in identity]
    else:
        start = [t.narrow(axis, order[0], 1) for t in received[len(own) :]]
    rows = [torch.cat(pair, axis) for pair in zip(start, stacked, strict=True)]
    found = scan_states(call, rows, None)
    place = order.index(part.ranks.rank)
    return token, [t.select(axis, place) for t in found], [t.select(axis, -1) for t in found]


def scan_states(
    call: ScanCall, states: Sequence[torch.Tensor], init: Sequence[torch.Tensor] | None
) -> Tensors:
    """All prefixes of a few states along the axis of the call, by torch operations."""
    if states[0].shape[call.axis] == 1 and init is None:
        return list(states)
    op = on_states(call.operator, call.state_spec, tuple([len(s.shape) for s in call.traced.state]))
    start = None if init is None else unflatten(list(init), call.state_spec)
    xs = unflatten(list(states), call.state_spec)
    results = associative_scan(op, xs, call.axis, init=start, backend="eager")
    return list(flatten(results)[0])


@functools.lru_cache(maxsize=512)
def on_states(op: Monoid | SliceFunction, spec: TreeSpec, ndims: tuple[int, ...]) -> Any:
    """The operator on states of this structure, without lift and lower."""
    if isinstance(op, SliceFunction):
        return op.combine
    if op.lift is None and all(n == 0 for n in ndims):
        return op if op.lower is None else with_lower(op, None)
    return Monoid(
        op.combine,
        name=composed(f"states of {op.name}"),
        element_ndim=unflatten(list(ndims), spec) if template(spec) != 0 else ndims[0],
    )
