"""Elements as one tensor per component, and back."""

from __future__ import annotations

import torch

from .operator import Leaf


def component_views(t: torch.Tensor, leaf: Leaf) -> list[torch.Tensor]:
    """One tensor of the batch shape per component of the leaf."""
    if leaf.dtype.is_complex:
        t = torch.view_as_real(t.resolve_conj())
    rank = len(leaf.shape) + (1 if leaf.dtype.is_complex else 0)
    if rank == 0:
        return [t]
    return list(t.flatten(t.dim() - rank).unbind(-1))


def from_components(
    parts: list[torch.Tensor | None], leaf: Leaf, batch: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """The leaf with these components; None is zero."""
    first = parts[0] if len(parts) == 1 else None
    if first is not None and not leaf.shape and tuple(first.shape) == tuple(batch):
        return first.to(leaf.dtype)
    zero = like.new_zeros(batch, dtype=torch.empty(0, dtype=leaf.dtype).real.dtype)
    flat = torch.stack([zero if p is None else p.to(zero.dtype) for p in parts], -1)
    if leaf.dtype.is_complex:
        return torch.view_as_complex(flat.reshape(*batch, *leaf.shape, 2).contiguous())
    return flat.reshape((*batch, *leaf.shape))
