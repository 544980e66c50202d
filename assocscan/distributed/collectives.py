"""The two collectives of a distributed scan: a small element of every rank, on every rank; and its
derivative, the sum over ranks of the cotangents of one rank's element.

Each is one collective, whatever the number of leaves and their dtypes: the leaves travel as bytes.
They are torch's functional collectives, which compilers see as operations. Each is the derivative
of the other, so that there are derivatives of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private import all_gather_bytes, all_to_all_bytes
from ..torch_state import is_differentiable
from .ranks import Ranks

Tensors = list[torch.Tensor]
MaybeTensor = torch.Tensor | None
ALIGNMENT = 16  # bytes: where a leaf begins, so that its bytes can be viewed in any dtype


def gather(
    ranks: Ranks, axis: int, element: Sequence[torch.Tensor], token: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """A token, and the elements of all ranks, stacked along a new dimension `axis` in the order of
    ranks. Differentiable.

    token: made by `token_of`, or by an earlier collective, which is then entered later in backward
        passes.
    """
    after, *stacked = Gather.apply(ranks, axis, token, *element)
    return after, stacked


def token_of(*tensors: torch.Tensor) -> torch.Tensor:
    """An uninitialised number that connects a collective with these tensors.

    All ranks must enter the backward pass of a collective, and several in the same order: also a
    rank whose element depends on no tensor that requires a gradient, or whose results are not used.
    So collectives take a token and return one: those that a gradient needs are a chain in the graph
    of every rank. The gradients that tokens bring must be zeros: `zeros_like_token` repeats them.
    """
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
        results = gathered(ranks, axis, element)
        after = torch.zeros_like(token)
        ctx.ranks, ctx.axis = ranks, axis
        ctx.like = [(t.shape, t.dtype) for t in results]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in results if not is_differentiable(t)])
        ctx.save_for_backward(after)
        return (after, *results)

    @staticmethod
    def backward(ctx: Any, _: MaybeTensor, *cotangents: MaybeTensor) -> tuple[Any, ...]:
        (after,) = ctx.saved_tensors
        places = [k for k, (_, d) in enumerate(ctx.like) if d.is_floating_point or d.is_complex]
        given = []
        for k in places:
            shape, dtype = ctx.like[k]
            g = cotangents[k]
            given.append(torch.zeros(shape, dtype=dtype, device=after.device) if g is None else g)
        token, *sums = SumOverRanks.apply(ctx.ranks, ctx.axis, after, *given)
        by_place = dict(zip(places, sums, strict=True))
        return (None, None, token, *(by_place.get(k) for k in range(len(ctx.like))))


class SumOverRanks(torch.autograd.Function):
    """(ranks, axis, token, *cotangents) → (token, *sums): the sum over ranks of what they hold for
    this rank, slice `rank` along `axis`.

    Added in the order of ranks, so that equal inputs give equal bits.
    """

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, axis: int, token: torch.Tensor, *cotangents: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        after = torch.zeros_like(token)
        ctx.ranks, ctx.axis = ranks, axis
        ctx.save_for_backward(after)
        return (after, *summed(ranks, axis, cotangents))

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, *tangents: torch.Tensor) -> tuple[Any, ...]:
        (after,) = ctx.saved_tensors
        return (None, None, *Gather.apply(ctx.ranks, ctx.axis, after, *tangents))


def gathered(ranks: Ranks, axis: int, element: Sequence[torch.Tensor]) -> Tensors:
    """The leaves of all ranks' elements; one all-gather."""
    first = element[0]
    if all(t.dtype == first.dtype for t in element):  # packed by one operation
        rows = torch.cat([t.resolve_conj().resolve_neg().flatten() for t in element])
        if rows.numel():
            sent = rows.view(torch.uint8)
            rows = all_gather_bytes(sent, ranks.size, ranks.name).view(first.dtype)
        found = rows.view(ranks.size, -1).split([t.numel() for t in element], 1)
        stacked = [t.view(ranks.size, *like.shape) for t, like in zip(found, element, strict=True)]
    else:
        own = packed(element, 0)
        received = all_gather_bytes(own, ranks.size, ranks.name) if own.numel() else own
        stacked = unpacked(received.view(ranks.size, -1), element)
    # Each in memory of its own: results may be written to, and kept.
    return [t.movedim(0, axis).clone(memory_format=torch.contiguous_format) for t in stacked]


def summed(ranks: Ranks, axis: int, cotangents: Sequence[torch.Tensor]) -> Tensors:
    """The sums over ranks; one all-to-all."""
    rows = [t.movedim(axis, 0) for t in cotangents]
    sent = packed(rows, 1)
    count = sent.shape[1]
    received = all_to_all_bytes(sent.flatten(), [count] * ranks.size, ranks.name) if count else sent
    like = [t[0] for t in rows]
    return [t.sum(0) for t in unpacked(received.view(ranks.size, -1), like)]


def packed(tensors: Sequence[torch.Tensor], leading: int) -> torch.Tensor:
    """The bytes of the tensors, one after the other, behind `leading` common dimensions (0 or 1).
    Each begins at a multiple of ALIGNMENT."""
    parts = []
    for t in tensors:
        flat = t.resolve_conj().resolve_neg().reshape(*t.shape[:leading], -1)
        data = flat.contiguous().view(torch.uint8)
        parts.append(torch.nn.functional.pad(data, (0, -data.shape[-1] % ALIGNMENT)))
    return torch.cat(parts, -1)


def unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Tensors:
    """Tensors of the shapes and dtypes of `like`, with the rows as a dimension in front."""
    found, start = [], 0
    for t in like:
        count = t.numel() * t.element_size()
        if count == 0:
            found.append(t.new_empty((rows.shape[0], *t.shape)))
            continue
        data = rows[:, start : start + count].contiguous()
        found.append(data.view(t.dtype).view(-1, *t.shape))
        start += count + -count % ALIGNMENT
    return found
