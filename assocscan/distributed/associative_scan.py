"""`distributed.associative_scan`: one scan of a sequence whose parts lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..api.associative_scan import run_call
from ..api.bind_arguments import bind
from ..api.flags_and_backends import checked_backend, flag
from ..hooks import HOOKS
from ..monoids.call_errors import checked_call
from ..monoids.leaf_names import OWN, LeafNames
from ..pytrees import unflatten
from ..runtime.scan_call import ScanCall
from ..torch_state import is_differentiable, needs_dispatcher
from .agreement import agreed, compared_ranks, device_of, over_ranks
from .carries import (
    Part,
    Tensors,
    carries,
    part_of,
    total_ahead,
    totals,
    traced_carries,
    with_handed_totals,
)
from .carry_gradient import linked_scan
from .collectives import tied
from .facts import description
from .prepared_part import keep, kept, key_of
from .ranks import process_group, ranks_of, require_check, require_sendable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLAGS = ("axis", "reverse", "inclusive", "return_final")


@over_ranks
@checked_call
def associative_scan(
    op: Any,
    xs: Any,
    axis: int = 0,
    reverse: bool = False,
    inclusive: bool = True,
    *,
    group: ProcessGroup | None = None,
    init: Any = None,
    return_final: bool = False,
    check: bool | None = None,
    backend: str | None = "auto",
) -> Any:
    """`assocscan.associative_scan` of a sequence whose consecutive parts lie on ranks of a group.

        y[t] = x[0] ∘ x[1] ∘ … ∘ x[t],   t over the whole sequence, the part of rank 0 first

    Every rank passes its part and gets the same part of the result. Parts may have any lengths,
    zero included. Parameters are those of `assocscan.associative_scan` (there are no offsets), and:

    group: the process group; the default one for None.
    init: the carry that enters the whole, given on every rank with the same values.
    return_final: also return the carry that leaves the whole, on every rank.
    check: whether ranks first compare what they are called with, and raise the same error on every
        rank where they disagree. None: on gloo. On NCCL the host then waits for the GPU. Without
        it, ranks that disagree wait for one another until the group's timeout.

    >>> import tempfile, torch, torch.distributed as dist
    >>> import assocscan
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> assocscan.distributed.associative_scan("max", torch.tensor([1, 3, 2]), return_final=True)
    (tensor([1, 3, 3]), tensor(3))
    >>> dist.destroy_process_group()

    Differentiable, of any order. Gradients are those of the sum of all ranks' losses: a cotangent
    of the final counts once for each rank that gives one. The gradient of init is whole on the rank
    whose part comes first in the order of the scan, and zero on the others. Every rank takes part
    in every backward pass; one that has no loss adds `0 * y.sum()`.

    The same number of ranks with the same parts gives the same bits; other parts round differently,
    as every other grouping of the elements does.

    Raises what `assocscan.associative_scan` raises; ValueError where there is no process group,
    where ranks disagree, and for empty parts of an operator without identity where the host cannot
    exchange their lengths (torch.compile, CUDA graphs).

    Cost: that of `reduce` and of a scan on the local part; one all-gather of one state for each
    sequence of the batch; group size − 1 combinations of such states. First gradients: one more
    all-gather; and before the pass that gives all gradients, one that gives that of the carry
    alone. Where CUDA kernels over vectors cut the local part into segments, the second pass takes
    their totals from the first, and both together cost about one scan.

    Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990, section 1.2:
    scans on fewer processors than elements.
    """
    if torch.compiler.is_dynamo_compiling():
        name = None if group is None else group.group_name
        return HOOKS.compiled_scan(
            op,
            {
                "xs": xs, "axis": axis, "reverse": reverse, "inclusive": inclusive, "init": init,
                "return_final": return_final, "backend": backend, "group": name, "check": check,
            },
            "distributed.associative_scan",
        )  # fmt: skip
    flags = {"axis": axis, "reverse": reverse, "inclusive": inclusive, "return_final": return_final}
    return scan(lambda: (op, xs, init), xs, flags, group, check, backend)


def scan(
    operands: Callable[[], tuple[Any, Any, Any]],
    like: Any,
    flags: Mapping[str, Any],
    group: ProcessGroup | None,
    check: bool | None,
    backend: str | None = "auto",
    function: str = "associative_scan",
    names: LeafNames = OWN,
) -> Any:
    """What `associative_scan` returns.

    operands: makes op, xs and init; an error that it raises is sent to the other ranks.
    like: tensors on the device of xs. flags: axis, reverse, inclusive, return_final.
    function: the public function that was called. names: what it calls the leaves.
    """
    found = process_group(group)
    key: Any = None
    tensors: Sequence[torch.Tensor] = ()
    ahead: tuple[ScanCall, Tensors] | None = None

    def bound() -> tuple[ScanCall, str, Part | None]:
        nonlocal key, tensors
        require_check(check)
        named = checked_backend(backend, None)
        op, xs, init = operands()
        axis, *rest = [flags[n] if n == "axis" else flag(n, flags[n]) for n in FLAGS]
        reverse, inclusive, return_final = rest
        key, tensors = key_of(op, xs, init, (axis, *rest), named, found)
        known = None if key is None else kept(key, tensors)
        if known is not None:
            return known.call, named, known
        call = bind(op, xs, axis, reverse, inclusive, init, False, None, names)
        require_sendable(found, (*call.leaves, *(call.init or ())))
        return call.changed(return_final=return_final), named, None

    def facts(made: tuple[ScanCall, str, Part | None]) -> Any:
        nonlocal ahead
        call, named, _ = made
        options = {"axis": call.axis, "reverse": call.reverse, "inclusive": call.inclusive,
                   "return_final": call.return_final}  # fmt: skip
        described = description(call, function, options, names)
        if not needs_dispatcher():
            with torch.no_grad():  # gradients have their own way: `carry_gradient`
                ahead = total_ahead(call, ranks_of(found), named)
        return described

    (call, named, part), lengths = agreed(bound, facts, found, device_of(like), check)
    if ahead is not None:
        call, total = ahead
        part = part_of(call, compared_ranks(found, lengths), named, lengths).with_total(total)
    elif part is None:
        part = part_of(call, compared_ranks(found, lengths), named, lengths)
        if key is not None and lengths is None:
            part = keep(key, part, tensors)
    outputs, final = scan_part(part)
    ys = unflatten(outputs, call.traced.output_spec)
    return (ys, unflatten(final, call.state_spec)) if call.return_final else ys


def scan_part(part: Part) -> tuple[Tensors, Tensors]:
    """The outputs of the local part, and the final of the whole (empty where it is not wanted)."""
    call = part.call
    tensors = (*call.leaves, *(call.init or ()))
    is_traced = needs_dispatcher()
    if is_traced:
        token, entering, final = traced_carries(part)
    else:
        if call.handed is None:
            call = with_handed_totals(part)
            part = part.with_call(call)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return linked_scan(part)
        if part.prepared is not None:
            return part.prepared.results(part)
        entering, final = carries(part, call.return_final, totals(part)[1])
    local = call.changed(init=entering or None, return_final=False)
    outputs, _, _ = run_call(local, part.backend)
    if is_traced:  # a backward pass has the collective whether or not the loss reads the final
        outputs = [tied(t, token) if is_differentiable(t) else t for t in outputs]
    return outputs, final if call.return_final else []
