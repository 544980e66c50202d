"""A function of elements applied to batches of them: directly if it is pointwise, else by vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..pytrees import TreeSpec, flatten, unflatten
from ..trace.fx_trace import as_tensor


def map_elements(
    fn: Callable[..., Any],
    arguments: Sequence[torch.Tensor],
    ndims: Sequence[int],
    spec: TreeSpec,
    pointwise: bool,
) -> tuple[list[torch.Tensor], TreeSpec]:
    """`fn(*tree)` for every batch index; the leaves of its result, batch dimensions first.

    `arguments` are leaves whose last `ndims` dimensions belong to an element; their batch
    dimensions broadcast against one another.
    """
    batch = torch.broadcast_shapes(
        *(t.shape[: t.dim() - n] for t, n in zip(arguments, ndims, strict=True))
    )
    structure: list[TreeSpec] = []

    def flat(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result, spec_out = flatten(fn(*unflatten(list(leaves), spec)))
        structure.append(spec_out)
        return tuple(as_tensor(r, leaves).to(leaves[0].device) for r in result)

    if pointwise:
        results = [r.expand(batch) for r in flat(*arguments)]
        return results, structure[-1]
    count = math.prod(batch)  # a -1 would be ambiguous where an element has size 0
    merged = [
        t.expand((*batch, *t.shape[t.dim() - n :])).reshape(count, *t.shape[t.dim() - n :])
        for t, n in zip(arguments, ndims, strict=True)
    ]
    if count == 0:  # vmap needs a row: one of zeros is mapped and dropped, which autograd records
        merged = [torch.cat([m, m.new_zeros(1, *m.shape[1:])]) for m in merged]
    mapped = torch.vmap(flat, randomness="different")(*merged)
    return [r[:count].reshape((*batch, *r.shape[1:])) for r in mapped], structure[-1]
