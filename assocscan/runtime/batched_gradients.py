"""Backward passes on batches of cotangents: `torch.autograd.grad(is_grads_batched=True)`.

torch calls the backward with batched tensors of its legacy vmap (`torch._vmap_internals`), which is
older than torch.func and supports few operations. `takes_batches` unwraps them, runs the backward
on the whole batch by one of the two functions here, and wraps the gradients again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engines.base.scan_spec import MaybeTensor
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

Gradients = tuple[MaybeTensor, ...]
# A way to run a backward on batches: (backward, batched cotangents, batch size) → gradients.
Mapped = Callable[[Callable[..., Gradients], Sequence[MaybeTensor], int], Gradients]


def vmapped(
    function: Callable[..., Gradients], batches: Sequence[MaybeTensor], n: int
) -> Gradients:
    """`function` mapped over the first dimension (size n) of the batches, by torch.func's vmap."""
    places = tuple([None if t is None else 0 for t in batches])
    results, dims = restore_vmap(function, places, n, "error")(*batches)
    return tuple(t if d is None else t.movedim(d, 0) for t, d in zip(results, dims, strict=True))


def one_by_one(
    function: Callable[..., Gradients], batches: Sequence[MaybeTensor], n: int
) -> Gradients:
    """`function` called for each of the n entries of the batches, and the results stacked.

    For a function that calls `torch.autograd.grad`, which torch.func's vmap does not support.
    """
    every = [function(*[None if t is None else t[k] for t in batches]) for k in range(n)]
    found = zip(*every, strict=True)
    return tuple(None if rows[0] is None else torch.stack(rows) for rows in found)


def takes_batches(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorator of a backward: legacy batches of cotangents are unwrapped and run by
    `ctx.scan.batched`, which is `vmapped` or `one_by_one`."""

    @functools.wraps(backward)
    def taking(ctx: Any, *cotangents: MaybeTensor) -> Gradients:
        is_traced = torch.compiler.is_compiling()
        if is_traced or not any(g is not None and is_legacy_batch(g) for g in cotangents):
            return backward(ctx, *cotangents)
        # Leaving and entering again is the only way to read the nesting level. On the thread of a
        # GPU's backward it is 0, although the batch has level 1. The VmapMode key is excluded
        # because random operations raise an error under it.
        level = max(leave_legacy_vmap() + 1, 1)
        enter_legacy_vmap()
        with WithoutKeys(LEGACY_VMAP):
            parts = [g if g is None else remove_batch_dim(g, level, 1, 0) for g in cotangents]
            n = max(t.shape[0] for t in parts if t is not None)
            batches = [t if t is None else t.expand(n, *t.shape[1:]) for t in parts]
            results = ctx.scan.batched(functools.partial(backward, ctx), batches, n)
            return tuple(t if t is None else add_batch_dim(t, 0, level) for t in results)

    return taking
