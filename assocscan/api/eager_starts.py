"""Gradients of first elements on the eager path, where autograd differentiates what combines them:
they are 0, and spoil no others, for what no result depends on."""

from __future__ import annotations

import torch

from ..engines.eager.scan import in_place
from ..monoids.combinator_functions import SegmentedCombine
from ..program.operator import components
from ..runtime.scan_call import ScanCall
from ..torch_state import is_differentiable, may_be_differentiated

Tensors = list[torch.Tensor]


def starts_matter(call: ScanCall, states: Tensors) -> bool:
    """Whether `finite_starts` may be needed: where a derivative is wanted, and some elements have
    nothing before them, since there is no init or the operator has segments."""
    if call.traced.operator is None:
        return False
    begins = call.init is None or isinstance(call.operator.combine, SegmentedCombine)
    return begins and is_differentiated(states)


def finite_starts(
    call: ScanCall, states: Tensors, read: frozenset[int], heads: torch.Tensor | None = None
) -> Tensors:
    """`states` of one sequence, or of packed ones that begin at `heads`, in which first elements
    pass no gradient back, and have 0 where they are not finite, except for the components in
    `read`, which results take from a carry.

    An example is a[t] of a recurrence's first element: nothing comes before that it would multiply.
    No result depends on it, but autograd multiplies it by a cotangent of 0, which may be NaN.
    """
    op, axis, length = call.traced.operator, call.axis, states[0].shape[call.axis]
    assert op is not None
    flags = states[-1] if isinstance(call.operator.combine, SegmentedCombine) else None
    if heads is None:
        first = -1 if call.init is not None else length - 1 if call.reverse else 0  # -1: none
        heads = torch.arange(length, device=states[0].device) == first
    found = list(states)
    for k, t in enumerate(states[: len(op.state)]):
        if read & components(op.state, (k,)) or not is_differentiable(t):
            continue
        begins = in_place(heads, axis, t.dim())
        if flags is not None:
            begins = begins | flags.reshape(*flags.shape, *[1] * (t.dim() - flags.dim()))
        finite = torch.where(t.isfinite(), t, 0).detach()
        found[k] = torch.where(begins, finite, t)
    return found


def connected(call: ScanCall, results: Tensors) -> Tensors:
    """Results of sequences so short that nothing is combined, as functions of all leaves and init,
    with gradients of 0 for those that they do not depend on."""
    given = [t for t in (*call.leaves, *(call.init or ())) if is_differentiable(t)]
    is_short = call.length < 2 or call.offsets is not None
    if call.is_raw or not is_short or not is_differentiated(given):
        return results
    nothing = sum(t.flatten()[:0].abs().sum().to(torch.float64) for t in given)
    assert isinstance(nothing, torch.Tensor)
    yes = torch.ones((), dtype=torch.bool, device=nothing.device)
    return [
        torch.where(yes, t, nothing.to(t.dtype)) if is_differentiable(t) else t for t in results
    ]  # fmt: skip


def is_differentiated(tensors: Tensors) -> bool:
    """Whether derivatives of operations on these tensors may be wanted."""
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return is_recorded or may_be_differentiated()
