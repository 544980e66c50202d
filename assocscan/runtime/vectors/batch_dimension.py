"""The vmap rule of the library operation: the tensors with the mapped dimension where it goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...program.vectors.vector_adjoint import VectorAdjoint
from ...program.vectors.vector_operator import VectorOperator

Tensors = list[torch.Tensor]
Dim = int | None


def in_front(tensors: Tensors, dims: Sequence[Dim] | None, place: int) -> Tensors:
    """The tensors with the mapped dimension moved to `place`; unmapped ones get size 1 there."""
    return [
        t.unsqueeze(place) if d is None else t.movedim(d, place)
        for t, d in zip(tensors, dims or [None] * len(tensors), strict=True)
    ]


def vector_inputs(
    op: VectorOperator | VectorAdjoint,
    tensors: Tensors,
    dims: Sequence[Dim] | None,
    place: int,
    count: int,
) -> Tensors:
    """The inputs of a scan over vectors, or of its backward pass, with a mapped dimension of size
    `count`.

    A leaf with a gradient gets its full size, since each of the `count` gradients is a result: a
    dimension of size 1 would be summed. The cotangents of finals are carries, for which the
    dimension is at `place`.
    """
    if isinstance(op, VectorOperator):
        return in_front(tensors, dims, 0)
    dims = dims or [None] * len(tensors)
    moved = in_front(tensors, dims, 0)
    for k in op.wanted:
        moved[k] = moved[k].expand(count, *moved[k].shape[1:])
    at = op.carries
    moved[at] = joined_carries(tensors[at], dims[at], count)
    moved[at + 1 :] = in_front(tensors[at + 1 :], dims[at + 1 :], place)
    return moved


def split_carries(carries: torch.Tensor, count: int) -> torch.Tensor:
    """Saved carries with the mapped dimension as dimension 1. It is the outermost of the rows: an
    engine's choice of lanes was made before it was added."""
    chunks, rows, *rest = carries.shape
    return carries.view(chunks, count, rows // count, *rest)


def joined_carries(carries: torch.Tensor, dim: Dim, count: int) -> torch.Tensor:
    """The reverse of `split_carries`; carries that are not mapped are the same for all."""
    if dim is None:
        carries = carries.unsqueeze(1).expand(-1, count, *carries.shape[1:])
    else:
        carries = carries.movedim(dim, 1)
    return carries.flatten(1, 2)
