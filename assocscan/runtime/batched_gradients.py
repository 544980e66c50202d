"""Batches of cotangents: `torch.autograd.grad(is_grads_batched=True)`.

torch gives them to a backward in the form of a vmap that is older than torch.func and that few
operations know (`torch._vmap_internals`). Here they are taken out of it, mapped, and put back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_private import (
    LEGACY_VMAP,
    WithoutKeys,
    add_batch_dim,
    enter_legacy_vmap,
    is_legacy_batch,
    leave_legacy_vmap,
    remove_batch_dim,
    restore_vmap,
)

Optional = torch.Tensor | None
Gradients = tuple[Optional, ...]
Mapped = Callable[[Callable[..., Gradients], Sequence[Optional], int], Gradients]


def vmapped(function: Callable[..., Gradients], batches: Sequence[Optional], n: int) -> Gradients:
    """`function` of n batches at once."""
    places = tuple([None if t is None else 0 for t in batches])
    results, dims = restore_vmap(function, places, n, "error")(*batches)
    return tuple(t if d is None else t.movedim(d, 0) for t, d in zip(results, dims, strict=True))


def one_by_one(
    function: Callable[..., Gradients], batches: Sequence[Optional], n: int
) -> Gradients:
    """`function` of n batches, for one that differentiates, which torch.vmap refuses."""
    every = [function(*[None if t is None else t[k] for t in batches]) for k in range(n)]
    found = zip(*every, strict=True)
    return tuple(None if rows[0] is None else torch.stack(rows) for rows in found)


def takes_batches(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The decorator of a backward that batches of cotangents may come to; `ctx.scan.batched` runs
    it on them."""

    @functools.wraps(backward)
    def taking(ctx: Any, *cotangents: Optional) -> Gradients:
        is_traced = torch.compiler.is_compiling()
        if is_traced or not any(g is not None and is_legacy_batch(g) for g in cotangents):
            return backward(ctx, *cotangents)
        # A GPU's backward runs on a thread of its own, where the mode of the vmap is on but its
        # level, the only one, is not counted. The mode refuses to draw random numbers.
        level = max(leave_legacy_vmap() + 1, 1)
        enter_legacy_vmap()
        with WithoutKeys(LEGACY_VMAP):
            parts = [g if g is None else remove_batch_dim(g, level, 1, 0) for g in cotangents]
            n = max(t.shape[0] for t in parts if t is not None)
            batches = [t if t is None else t.expand(n, *t.shape[1:]) for t in parts]
            results = ctx.scan.batched(functools.partial(backward, ctx), batches, n)
            return tuple(t if t is None else add_batch_dim(t, 0, level) for t in results)

    return taking
