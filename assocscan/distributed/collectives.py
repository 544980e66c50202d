"""The two collectives of a distributed scan: an all-gather of one small element of each rank; and
its derivative, which gives each rank the sum, over all ranks, of the cotangents of its element.

Each is one collective, whatever the number of leaves and their dtypes: the leaves travel as bytes.
Each is the derivative of the other, so that there are derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private import all_gather_bytes, all_gather_into, all_to_all_bytes
from ..torch_state import is_differentiable, needs_dispatcher
from .agreement import meet
from .ranks import Ranks

Tensors = list[torch.Tensor]
MaybeTensor = torch.Tensor | None
ALIGNMENT = 16  # bytes: where a leaf begins, so that its bytes can be viewed in any dtype


def gather(
    ranks: Ranks, axis: int, element: Sequence[torch.Tensor], token: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """A token, and the elements of all ranks, stacked along a new dimension `axis` in the order of
    ranks: views of what was received. Differentiable.

    token: made by `token_of`, or by an earlier collective, which is then entered later in backward
        passes.
    """
    if not (
        torch.is_grad_enabled() or needs_dispatcher()
    ):  # an autograd node would cost more than the rest
        return token, gathered(ranks, axis, element)
    after, *stacked = Gather.apply(ranks, axis, token, *element)
    return after, stacked


def token_of(*tensors: torch.Tensor) -> torch.Tensor:
    """An uninitialised number that connects a collective with these tensors.

    All ranks must enter the backward pass of a collective, and several in the same order: even a
    rank whose element depends on no tensor that requires a gradient, or whose results are not used.
    So collectives take a token and return one: those that a gradient needs are a chain in the graph
    of every rank. The gradients that tokens bring must be zeros: `zeros_like_token` repeats them.
    """
    if not (torch.is_grad_enabled() or needs_dispatcher()):
        return tensors[0].new_empty((), dtype=torch.float32)
    return Token.apply(*tensors)  # type: ignore[no-any-return]


def tied(t: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`t`, whose gradient now enters the collective that made the token."""
    return Tie.apply(t, token)  # type: ignore[no-any-return]


class Tie(torch.autograd.Function):
    """`tied`."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        return t.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (token,) = ctx.saved_tensors
        return g, Zero.apply(g, token)


class Zero(torch.autograd.Function):
    """A token's gradient, connected with a cotangent and with the token."""

    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.like = g.shape, g.dtype
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return zeros_like_token(zero, *ctx.like), zero


class Token(torch.autograd.Function):
    """`token_of`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.like = [(t.shape, t.dtype) for t in tensors]
        return tensors[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, zero: torch.Tensor) -> tuple[MaybeTensor, ...]:
        return tuple(
            zeros_like_token(zero, *like) if needs else None
            for needs, like in zip(ctx.needs_input_grad, ctx.like, strict=True)
        )


def zeros_like_token(zero: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A gradient of zeros: connected with the token's, and without memory."""
    return zero.to(dtype).expand(shape)


class Gather(torch.autograd.Function):
    """`gather`: (ranks, axis, token, *element) → (token, *stacked leaves)."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, axis: int, token: torch.Tensor, *element: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # Autograd wants results that are no views of one tensor.
        results = [t.clone() for t in gathered(ranks, axis, element)]
        after = torch.zeros_like(token)
        ctx.ranks, ctx.axis = ranks, axis
        ctx.like = [(t.shape, t.dtype) for t in results]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in results if not is_differentiable(t)])
        ctx.save_for_backward(after)
        return (after, *results)

    @staticmethod
    def backward(ctx: Any, later: MaybeTensor, *cotangents: MaybeTensor) -> tuple[Any, ...]:
        (after,) = ctx.saved_tensors
        meet(ctx.ranks, "the derivative of a gather")
        places = [k for k, (_, d) in enumerate(ctx.like) if d.is_floating_point or d.is_complex]
        given = []
        for k in places:
            shape, dtype = ctx.like[k]
            g = cotangents[k]
            given.append(torch.zeros(shape, dtype=dtype, device=after.device) if g is None else g)
        token, *sums = SumOverRanks.apply(ctx.ranks, ctx.axis, after, later, *given)
        by_place = dict(zip(places, sums, strict=True))
        return (None, None, token, *(by_place.get(k) for k in range(len(ctx.like))))


class SumOverRanks(torch.autograd.Function):
    """(ranks, axis, token, later, *cotangents) → (token, *sums): the sum over ranks of what they
    hold for this rank, slice `rank` along `axis`.

    Added in the order of ranks, so that equal inputs give equal bits.

    later: the token of the sum before this one, if any, which is the derivative of a later gather:
        so sums are a chain as well, and in second derivatives every rank enters all of them, in one
        order, whether or not it uses what they give.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ranks: Ranks,
        axis: int,
        token: torch.Tensor,
        later: MaybeTensor,
        *cotangents: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        after = torch.zeros_like(token)
        ctx.ranks, ctx.axis, ctx.has_later = ranks, axis, later is not None
        ctx.save_for_backward(after)
        return (after, *summed(ranks, axis, cotangents))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, *tangents: torch.Tensor) -> tuple[Any, ...]:
        (after,) = ctx.saved_tensors
        meet(ctx.ranks, "the derivative of a sum")
        token, *stacked = Gather.apply(ctx.ranks, ctx.axis, after, *tangents)
        return (None, None, token, token if ctx.has_later else None, *stacked)


def gathered(ranks: Ranks, axis: int, element: Sequence[torch.Tensor]) -> Tensors:
    """The leaves of all ranks' elements, as views of one tensor; one all-gather."""
    sent = packed(element, 0)
    return unpacked(received_by(ranks, sent), element, axis)


def received_by(ranks: Ranks, sent: torch.Tensor) -> torch.Tensor:
    """The uint8 vectors of all ranks, as rows."""
    if not sent.numel():
        received = sent
    elif needs_dispatcher():
        received = all_gather_bytes(sent, ranks.size, ranks.name)
    else:
        received = sent.new_empty(ranks.size * len(sent))
        all_gather_into(received, sent, ranks.name)
    return received.view(ranks.size, -1)


def summed(ranks: Ranks, axis: int, cotangents: Sequence[torch.Tensor]) -> Tensors:
    """The sums over ranks; one all-to-all."""
    rows = [t.movedim(axis, 0) for t in cotangents]
    sent = packed(rows, 1)
    count = sent.shape[1]
    received = all_to_all_bytes(sent.flatten(), [count] * ranks.size, ranks.name) if count else sent
    like = [t[0] for t in rows]
    return [t.sum(0) for t in unpacked(received.view(ranks.size, -1), like, 0)]


def packed(tensors: Sequence[torch.Tensor], leading: int) -> torch.Tensor:
    """The bytes of the tensors, one after the other, behind `leading` common dimensions (0 or 1).
    Each begins at a multiple of ALIGNMENT."""
    flat = [t.resolve_conj().resolve_neg().reshape(*t.shape[:leading], -1) for t in tensors]
    if all(
        t.dtype == flat[0].dtype and t.shape[-1] * t.element_size() % ALIGNMENT == 0 for t in flat
    ):  # by one operation
        return torch.cat(flat, -1).view(torch.uint8)
    parts = []
    for t in flat:
        # A clone: one number may have the stride 0, and then it has no view as bytes.
        data = t.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        parts.append(torch.nn.functional.pad(data, (0, -data.shape[-1] % ALIGNMENT)))
    return torch.cat(parts, -1)


def unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor], axis: int) -> Tensors:
    """Views of bytes as tensors of the shapes and dtypes of `like`, with the rows as a dimension
    `axis`."""
    found, start = [], 0
    for t in like:
        count = t.numel() * t.element_size()
        if count == 0:
            stacked = t.new_empty((rows.shape[0], *t.shape))
        else:
            data = rows.narrow(1, start, count).view(t.dtype)
            stacked = data.view(rows.shape[0], *t.shape)
        found.append(stacked.movedim(0, axis))
        start += count + -count % ALIGNMENT
    return found
