"""The gradient of a distributed scan: one collective, and two passes over the local part.

The local scan is an ordinary scan with an initial carry. Two autograd functions stand around it:
`Entrance` makes the carry, from the local part and the collective, and `Exit` takes the outputs.

    carry ── local scan ──> y, f         f: the carry that leaves the part; carry[r + 1] = f[r]

The cotangent of f on rank r, λ[r], comes from the ranks after it. With c[q] the gradient of rank
q's outputs with respect to its carry alone,

    λ[r] = c[r + 1] + (∂ carry[r + 2] / ∂ f[r])ᵀ c[r + 2] + … + (∂ final / ∂ f[r])ᵀ final̅

and the carries after r are f[r] combined with totals that every rank has from the forward pass. So
`Exit`, which autograd enters before the local scan, computes c[r] (a reverse reduction, nothing is
written), gathers all c, and gives λ[r] to the local scan as the cotangent of f. What then arrives
at `Entrance` is the gradient of init, on the rank that comes first.

A gradient that is differentiated again (create_graph) takes the way of `carries`, which consists of
differentiable steps: `Exit` then passes cotangents on, and `Entrance` computes its own part again
with a graph. From then on this pair of nodes does so in every backward pass: the graph of the
gradient reaches the local scan without going through `Exit`. So it does from the start under hooks
of saved tensors: those of activation checkpointing run the forward pass again, collectives
included, at the first use in each call of autograd, and `Exit` calls it only on ranks that a carry
enters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..api.associative_scan import run_call
from ..api.eager_gradient import by_autograd
from ..program.operator import Operator
from ..program.operator import spans as component_spans
from ..program.vectors.vector_operator import VectorOperator, part_spans
from ..runtime import backends
from ..runtime.autograd import only_carries
from ..runtime.scan_call import ScanCall
from ..runtime.vectors.recomputed_gradient import RecomputedGradient
from ..torch_private import saved_tensors_hooks
from ..torch_state import is_differentiable
from .agreement import meet
from .carries import Part, Tensors, carries, scan_states, selected, totals, zeros_of_carry
from .collectives import gather, token_of

MaybeTensor = torch.Tensor | None


@dataclass
class Link:
    """What `Entrance` and `Exit` of one call share.

    total: of the local part, where it is known; `Entrance` takes it.
    by_steps: whether gradients take the way of `carries`.
    entering: how many tensors `Entrance` returns as the entering carry; 0 where nothing enters.
    leaving: the numbers of the leaves of f that the local scan returns.
    """

    part: Part
    total: Tensors | None
    by_steps: bool
    entering: int = 0
    leaving: tuple[int, ...] = ()


def linked_scan(part: Part) -> tuple[Tensors, Tensors]:
    """The outputs of the local part and the final of the whole, differentiable."""
    call = part.call
    link = Link(part.without_memory(), part.total, saved_tensors_hooks(True) is not None)
    # `Entrance` keeps its tensors, so it gets views: a repeated leaf that still exists when the
    # backward pass runs has a gradient that something may read (`RecomputedGradient.of_call`).
    leaves = [t.view_as(t) for t in call.leaves]
    made = Entrance.apply(link, len(leaves), *leaves, *(call.init or ()))
    token, stacked = made[0], list(made[1 : 1 + len(call.traced.state)])
    rest = list(made[1 + len(call.traced.state) :])
    entering, final = rest[: link.entering], rest[link.entering :]
    init = entering or None
    wants_leaving = (bool(part.after) or call.return_final) and (bool(init) or call.length > 0)
    local = call.changed(init=init, return_final=wants_leaving)
    if not call.return_final:
        local.leaving = read_later(local, part.backend)
    if part.prepared is not None:
        outputs, leaving = part.prepared.differentiable_results(local)
    else:
        outputs, leaving, _ = run_call(local, part.backend)
    through = [k for k, t in enumerate(outputs) if is_differentiable(t)]
    edges = [edge(outputs[k]) for k in through], [edge(t) for t in entering]
    link.leaving = local.final
    results = Exit.apply(link, edges, (len(through), len(leaving), len(final)), token,
                         *stacked, *[outputs[k] for k in through], *leaving, *final)  # fmt: skip
    for place, k in enumerate(through):
        outputs[k] = results[place]
    return outputs, list(results[len(through) :])


def read_later(call: ScanCall, backend: str) -> tuple[int, ...] | None:
    """The numbers of the leaves of f that have a cotangent where the final is not wanted: those
    that outputs of later parts depend on. The local scan does not return the others. None where
    it is not known: all are returned.
    """
    if backend == "eager" or backends.matrix_operator(call, backend) is not None:
        return None
    operator = backends.vector_operator(call, backend) or call.traced.operator
    return None if operator is None else lowered_leaves(operator)


@functools.lru_cache(maxsize=256)
def lowered_leaves(operator: Operator | VectorOperator) -> tuple[int, ...]:
    """The state leaves that outputs depend on: `lower` reads some, and `combine` computes these
    from others."""
    if isinstance(operator, VectorOperator):
        spans, carried = part_spans(operator.state), operator.carry_parts(())
    else:
        spans, carried = component_spans(operator.state), operator.carry_components(())
    return tuple(k for k, span in enumerate(spans) if not set(carried).isdisjoint(span))


def edge(t: torch.Tensor) -> GradientEdge | None:
    """Where the gradient of a tensor arrives; None where it has none. It does not hold the tensor's
    memory."""
    return get_gradient_edge(t) if t.requires_grad else None


class Entrance(torch.autograd.Function):
    """(link, count, *leaves, *init) → (token, *totals of all parts, *entering carry, *final).

    token: a number without meaning that connects `Exit` with this node on every rank.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, count: int, *tensors: torch.Tensor) -> Any:
        part = link.part.with_tensors(tensors).with_total(link.total)
        link.total = None
        token, stacked = totals(part)
        entering, final = carries(part, part.call.return_final, stacked)
        link.entering = len(entering)
        ctx.link, ctx.count = link, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token, *tensors)
        results = [*(t.clone() for t in entering), *final]
        integers = [t for t in results if not is_differentiable(t)]
        ctx.mark_non_differentiable(*stacked, *integers)
        return (token, *stacked, *results)

    @staticmethod
    def backward(ctx: Any, _: Any, *cotangents: MaybeTensor) -> tuple[MaybeTensor, ...]:
        link: Link = ctx.link
        token, *tensors = ctx.saved_tensors
        count, needed = ctx.count, ctx.needs_input_grad[2:]
        given = cotangents[len(link.part.call.traced.state) :]
        if link.by_steps:
            return (None, None, *again(link, token, tensors, needed, given))
        grads: list[MaybeTensor] = [None] * len(tensors)
        arrived = given[: link.entering] if link.part.init is not None else ()
        for k in range(count, len(tensors)):
            if needed[k]:
                g = arrived[k - count] if arrived else None
                grads[k] = torch.zeros_like(tensors[k]) if g is None else g
        for k in range(count):
            if needed[k] and tensors[k].numel() == 0:
                grads[k] = torch.zeros_like(tensors[k])
        return (None, None, *grads)


def again(
    link: Link,
    token: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    needed: Sequence[bool],
    given: Sequence[MaybeTensor],
) -> list[MaybeTensor]:
    """The gradients of `Entrance`'s tensors by differentiable steps: its results computed again."""
    create = torch.is_grad_enabled()
    meet(link.part.ranks, f"the gradient by steps (create_graph={create})")
    with torch.enable_grad():
        own = [t.view_as(t) if needs else t.detach()
               for t, needs in zip(tensors, needed, strict=True)]  # fmt: skip
        part = link.part.with_tensors(own)
        after, stacked = totals(part, token)
        entering, final = carries(part, part.call.return_final, stacked)
    results, seeds = [after, *entering, *final], [torch.zeros_like(after), *given]
    return by_autograd(results, seeds, own, create_graph=create)


class Exit(torch.autograd.Function):
    """(link, edges, counts, token, *totals, *outputs, *leaving, *final) → (*outputs, *final).

    edges: of the outputs and of the entering carry, where c is computed.
    leaving: the carry that leaves the local part. final: the one that leaves the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, link: Link, edges: Any, counts: tuple[int, int, int], *tensors: torch.Tensor
    ) -> Any:
        states = len(link.part.call.traced.state)
        outputs, leaving, _ = counts
        ctx.link, ctx.edges, ctx.counts = link, edges, counts
        given = tensors[1 + states :]
        ctx.save_for_backward(*tensors[1 : 1 + states], *given[outputs : outputs + leaving])
        results = [t.detach() for t in (*given[:outputs], *given[outputs + leaving :])]
        ctx.mark_non_differentiable(*[t for t in results if not is_differentiable(t)])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: MaybeTensor) -> tuple[Any, ...]:
        link: Link = ctx.link
        states = len(link.part.call.traced.state)
        outputs, leaving, final = ctx.counts
        token = ctx.saved_tensors[0].new_zeros((), dtype=torch.float32)
        if not link.by_steps:
            link.by_steps = torch.is_grad_enabled()
            meet(link.part.ranks, f"the gradient (create_graph={link.by_steps})")
        totals_: list[MaybeTensor] = [None] * states
        if link.by_steps:
            passed = (*cotangents[:outputs], *[None] * leaving, *cotangents[outputs:])
            return (None, None, None, token, *totals_, *passed)
        saved = ctx.saved_tensors
        own = carry_cotangents(link, ctx.edges, cotangents[:outputs])
        values = dict(zip(link.leaving, saved[states:], strict=False))
        arriving = cotangents_after(link.part, saved[:states], values, own, cotangents[outputs:])
        return (None, None, None, token, *totals_, *cotangents[:outputs],
                *arriving, *[None] * final)  # fmt: skip


def carry_cotangents(link: Link, edges: Any, cotangents: Sequence[MaybeTensor]) -> Tensors:
    """c of this rank: the gradient of its outputs with respect to the entering carry alone, for the
    differentiable leaves of the state; zeros where nothing enters.

    Where nothing enters, the totals of segments that the pass for all gradients takes are computed
    here, while the other ranks compute their c: then that pass does not wait for the collective
    first. With `return_final` it carries more leaves, and computes its own totals.
    """
    part = link.part
    pairs = [(e, g) for e, g in zip(edges[0], cotangents, strict=True)
             if e is not None and g is not None]  # fmt: skip
    wanted = [e for e in edges[1] if e is not None]
    found: Sequence[MaybeTensor] = [None] * len(wanted)
    if pairs and not link.entering and not part.call.return_final:
        hand_totals(pairs)
    if pairs and wanted and part.call.length:
        with only_carries():
            found = torch.autograd.grad([e for e, _ in pairs], wanted, [g for _, g in pairs],
                                        retain_graph=True, allow_unused=True)  # fmt: skip
    by_leaf = iter(found)
    received = [next(by_leaf) if e is not None else None for e in edges[1]]
    result = []
    for k, leaf in enumerate(part.call.traced.state):
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            g = received[k] if received else None
            result.append(zeros_of_carry(part.call, k) if g is None else g)
    return result


def hand_totals(pairs: Sequence[tuple[GradientEdge, torch.Tensor]]) -> None:
    """Have the local scan compute the totals of its backward pass, for outputs with these
    cotangents. It is asked directly: autograd would run what lies behind its inputs too."""
    node: Any = pairs[0][0].node
    scan = getattr(node, "scan", None)
    if not isinstance(scan, RecomputedGradient) or scan.handed is None or not scan.handed.cuts:
        return
    given: list[MaybeTensor] = [None] * scan.result_count
    for e, g in pairs:
        assert e.node is node
        given[e.output_nr] = g
    scan.hand_totals(node.saved_tensors, given)


def cotangents_after(
    part: Part,
    stacked: Sequence[torch.Tensor],
    leaving: Mapping[int, torch.Tensor],
    own: Tensors,
    final: Sequence[MaybeTensor],
) -> list[MaybeTensor]:
    """λ of this rank, one entry for each leaf of `leaving`. One collective.

    leaving: f of this rank, by the numbers of its leaves. Nothing after this rank reads the leaves
        of f that are not there.
    own: c of this rank. final: the cotangents that this rank gives to the final of the whole.
    """
    call, axis = part.call, part.call.axis
    smooth = [k for k, leaf in enumerate(call.traced.state)
              if leaf.dtype.is_floating_point or leaf.dtype.is_complex]  # fmt: skip
    sent = list(own)
    if call.return_final:
        for k in smooth:
            g = final[k]
            sent.append(zeros_of_carry(part.call, k) if g is None else g)
    if not sent:  # no leaf of the state is differentiable: so it is on all ranks
        return [None] * len(leaving)
    _, received = gather(part.ranks, axis, sent, token_of(*sent))
    if not leaving:
        return []
    after = part.after
    # What each carry after this part is given: the ranks' own c, and for the last the final's.
    given = [[c.select(axis, rank) for rank in after] for c in received[: len(smooth)]]
    ends = [t.sum(axis) for t in received[len(smooth) :]]
    result: dict[int, MaybeTensor] = dict.fromkeys(leaving)
    for place, k in enumerate(smooth):
        at = [*given[place], *ends[place : place + 1]]
        if k in leaving and at:
            result[k] = at[0]
    # How many carries are f combined with totals of later parts: those that enter the parts after
    # the next one, and the final.
    steps = len(after) if call.return_final else len(after) - 1
    if steps <= 0:
        return list(result.values())
    sources = [k for k in smooth if k in leaving]
    with torch.enable_grad():
        # This rank's total stands in for a leaf that is not read.
        start = [leaving.get(k, t.select(axis, part.ranks.rank)) for k, t in enumerate(stacked)]
        start = [t.detach().requires_grad_(k in sources) for k, t in enumerate(start)]
        later = scan_states(call, selected(part, stacked, after), start)
        later = [t.narrow(axis, 0, steps) for t in later]
    seeds = [
        torch.stack([*given[place][1:], *ends[place : place + 1]], axis)
        for place in range(len(smooth))
    ]
    found = by_autograd([later[k] for k in smooth], seeds, [start[k] for k in sources])
    for k, g in zip(sources, found, strict=True):
        before = result[k]
        if g is not None:
            result[k] = g if before is None else before + g
    return list(result.values())
