"""`distributed.reduce`: all elements of a sequence whose parts lie on several ranks, combined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..api.bind_arguments import bind
from ..api.flags_and_backends import checked_backend, flag
from ..api.reduce import last_inputs, reduced
from ..errors import ScanValueError
from ..hooks import HOOKS
from ..monoids.call_errors import checked_call
from ..runtime.scan_call import ScanCall
from ..torch_state import needs_dispatcher
from .agreement import agreed, compared_ranks, device_of, over_ranks
from .carries import (
    Part,
    Tensors,
    exchanged_lengths,
    local_total,
    part_of,
    prefixes,
    total_ahead,
    traced_carries,
)
from .collectives import gather, token_of
from .facts import description
from .ranks import process_group, ranks_of, require_check, require_sendable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@over_ranks
@checked_call
def reduce(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    *,
    group: ProcessGroup | None = None,
    init: Any = None,
    check: bool | None = None,
    backend: str | None = "auto",
) -> Any:
    """`assocscan.reduce` of a sequence whose consecutive parts lie on the ranks of `group`.

        y = x[0] ∘ x[1] ∘ … ∘ x[L−1]   over the whole sequence, the part of rank 0 first

    Every rank passes its part, of any length, and gets the whole's result. The order is kept, so
    that `op` need not be commutative. Parameters are those of `assocscan.reduce` (there are no
    offsets); `group`, `init` and `check` are those of `distributed.associative_scan`.

    >>> import tempfile, torch, torch.distributed as dist
    >>> import assocscan
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> assocscan.distributed.reduce("mean", torch.tensor([1.0, 2.0, 6.0]))
    tensor(3.)
    >>> dist.destroy_process_group()

    Differentiable, of any order; gradients are those of the sum of all ranks' losses, so that the
    result's cotangent counts once for each rank that gives one. The gradient of init is whole on
    the rank whose part comes first in the order of the scan, and zero on the others.

    Raises what `assocscan.reduce` raises, and what `distributed.associative_scan` raises.

    Cost: that of `assocscan.reduce` on the local part; one all-gather of one state for each
    sequence of the batch; group size − 1 combinations of such states. A gradient: one all-to-all.
    """
    if torch.compiler.is_dynamo_compiling():
        name = None if group is None else group.group_name
        options = {"xs": xs, "axis": axis, "reverse": reverse, "init": init, "backend": backend,
                   "group": name, "check": check}  # fmt: skip
        return HOOKS.compiled_scan(op, options, "distributed.reduce")
    found = process_group(group)
    total: Tensors | None = None

    def bound() -> tuple[ScanCall, str]:
        require_check(check)
        named = checked_backend(backend, None)
        call = bind(op, xs, axis, flag("reverse", reverse), True, init, False, None)
        require_sendable(found, (*call.leaves, *(call.init or ())))
        return replace(call, return_final=True, final_only=True), named

    def facts(made: tuple[ScanCall, str]) -> Any:
        nonlocal total
        call, named = made
        described = description(call, "reduce", {"axis": call.axis, "reverse": call.reverse})
        if not needs_dispatcher():
            _, total = total_ahead(call, ranks_of(found), named)
        return described

    (call, named), lengths = agreed(bound, facts, found, device_of(xs), check)
    ranks = compared_ranks(found, lengths)
    if call.operator.lower_takes_inputs and lengths is None:
        lengths = exchanged_lengths(call, ranks)
    part = part_of(call, ranks, named, lengths).with_total(total)
    final, raw = final_and_last_inputs(part, lengths)
    return reduced(call, final, raw)


def final_and_last_inputs(part: Part, lengths: list[int] | None) -> tuple[Tensors, Tensors]:
    """The carry that leaves the whole; and the inputs at its last step, where `lower` takes them.
    One collective."""
    call, ranks, axis = part.call, part.ranks, part.call.axis
    if needs_dispatcher() and not call.operator.lower_takes_inputs:
        return traced_carries(part)[2], []
    sent = local_total(part)
    states, last = len(sent), ranks.rank
    if call.operator.lower_takes_inputs:
        assert lengths is not None
        nonempty = [rank for rank in ranks.in_order(call.reverse) if lengths[rank]]
        if not nonempty:
            raise ScanValueError(
                f"lower of {call.operator.name!r} takes the inputs at the last step, and the parts "
                "of all ranks are empty"
            )
        last = nonempty[-1]
        shapes = [(*t.shape[:axis], *t.shape[axis + 1 :]) for t in call.leaves]
        absent = [t.new_zeros(s) for t, s in zip(call.leaves, shapes, strict=True)]
        sent += last_inputs(call) if call.length else absent
    _, received = gather(ranks, axis, sent, token_of(*call.leaves, *(call.init or ())))
    found = prefixes(part, received[:states], part.contributing)
    raw = [t.select(axis, last) for t in received[states:]]
    return [t.select(axis, -1).clone() for t in found], raw
