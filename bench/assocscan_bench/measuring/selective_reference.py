"""Selective scans and their gradients in float64, some channels of one sequence at a time.

All states at once would not fit into memory at the sizes that the kernels are made for. Channels
meet only in the gradients of B and C, sequences only in those of the parameters: these are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from assocscan import ops

from ..selective_inputs import Inputs, discretised, gated
from .reference import reference

# Of the states of a part in float64; the graph of its gradient keeps some twenty such arrays.
PART_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
# Of each tensor: the dimension of the sequences, and that of the channels.
DIMS: tuple[tuple[int | None, int | None], ...] = (
    (0, 2), (0, 2), (None, 0), (0, None), (0, None), (None, 0), (0, 2), (None, 0)
)  # fmt: skip


def exact(x: Inputs, cotangent: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
    """y [B, L, D]; with its cotangent the gradients of all tensors."""
    batch, length, width = x.u.shape
    states = x.A.shape[1]
    most = PART_BYTES.get(x.u.device.type, PART_BYTES["cpu"])
    channels = max(1, most // (8 * length * states))
    wide = Inputs(*(t.detach().double() for t in x))
    results = [torch.zeros_like(t) for t in (wide if cotangent is not None else wide[:1])]
    for sequence in range(batch):
        for first in range(0, width, channels):
            count = min(channels, width - first)

            def cut(t: Tensor, dims: tuple[int | None, int | None]) -> Tensor:
                of_batch, of_width = dims
                t = t if of_batch is None else t.narrow(of_batch, sequence, 1)  # noqa: B023
                return t if of_width is None else t.narrow(of_width, first, count)  # noqa: B023

            part = Inputs(*map(cut, wide, DIMS))
            if cotangent is None:
                cut(results[0], DIMS[0]).copy_(scanned(part))
                continue
            part = Inputs(*(t.detach().requires_grad_() for t in part))
            given = cut(cotangent, DIMS[0]).double()
            gradients = torch.autograd.grad(scanned(part), part, given, materialize_grads=True)
            for total, dims, g in zip(results, DIMS, gradients, strict=True):
                cut(total, dims).add_(g)
    return results[0] if cotangent is None else tuple(results)


def scanned(x: Inputs) -> Tensor:
    """y, by the reference of the recurrence of the states."""
    h: Tensor = reference(ops.affine, discretised(x), 1)[1]  # [B, L, D, N]
    return gated(x, (h * x.C[:, :, None]).sum(-1))
