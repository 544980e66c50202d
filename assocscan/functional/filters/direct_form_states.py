"""The state of a filter as scipy has it: that of the transposed direct form II.

    w[m][t] = w[m+1][t−1] + b[m+1] x[t] − a[m+1] y[t],    y[t] = b[0] x[t] + w[0][t−1]

for m = 0, …, K − 1, with w[K] = 0. The state w before the first step acts like w[m] entering beside
Σ b[k] x[m−k] at step m; the state after the last step is a sum of the last K inputs and outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engines.base.shifted_leaves import sequence_of_steps
from ...torch_state import is_symbolic
from .rational_filter import Steps


def impulses(zi: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """What the state before the first step lets enter at each step, in the shape of x.

    zi [S…, batch…, K], S where there are offsets.
    """
    axis, length, memory = steps.axis, x.shape[steps.axis], zi.shape[-1]
    if steps.offsets is None:
        if is_symbolic(length):  # may be less than the memory when the graph runs
            whole = torch.cat([zi.movedim(-1, axis), torch.zeros_like(x)], axis)
            return whole.narrow(axis, 0, length)
        kept = zi[..., :length].movedim(-1, axis)
        return torch.cat(
            [kept, torch.zeros_like(x.narrow(axis, 0, length - kept.shape[axis]))], axis
        )
    offsets = steps.offsets.to(x.device)
    position, sequence = torch.arange(length, device=x.device), sequence_of_steps(offsets, length)
    step = position - offsets[sequence]
    chosen = zi.movedim(-1, 1)[sequence, step.clamp(0, memory - 1)]  # [L, batch…]
    chosen = torch.where((step < memory).view(-1, *[1] * (chosen.dim() - 1)), chosen, 0)
    return chosen.movedim(0, axis)


def final_state(
    b: Tensor, a: Tensor, x: Tensor, y: Tensor, zi: Tensor | None, steps: Steps
) -> Tensor:
    """The state after the last step [S…, batch…, K], of b and a [..., K + 1] with a[0] = 1."""
    memory = b.shape[-1] - 1
    inputs, outputs = (last_steps(t, memory, steps) for t in (x, y))
    sums = [
        (b[..., m + 1 :] * inputs[..., : memory - m]).sum(-1)
        - (a[..., m + 1 :] * outputs[..., : memory - m]).sum(-1)
        for m in range(memory)
    ]
    final = torch.stack(sums, -1) if sums else inputs
    return final if zi is None else final + not_yet_entered(zi, x, steps)


def last_steps(x: Tensor, memory: int, steps: Steps) -> Tensor:
    """[S…, batch…, memory]: the last element, the one before it, …; 0 before the first."""
    axis, length = steps.axis, x.shape[steps.axis]
    if steps.offsets is None:
        if is_symbolic(length):
            before = x.new_zeros(*x.shape[:axis], memory, *x.shape[axis + 1 :])
            last = torch.cat([before, x], axis).narrow(axis, length, memory)
            return last.flip(axis).movedim(axis, -1)
        kept = min(memory, length)
        return pad(
            x.narrow(axis, length - kept, kept).flip(axis).movedim(axis, -1), (0, memory - kept)
        )
    offsets = steps.offsets.to(x.device)
    place = offsets[1:, None] - 1 - torch.arange(memory, device=x.device)  # [S, memory]
    exists = (place >= offsets[:-1, None]).view(*place.shape, *[1] * (x.dim() - 1))
    rows = x.movedim(axis, 0)
    if length == 0:
        return x.new_zeros((len(place), *rows.shape[1:], memory))
    found = rows[place.clamp(0, length - 1)]  # [S, memory, batch…]
    return torch.where(exists, found, 0).movedim(1, -1)


def not_yet_entered(zi: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """What of a state before the first step enters after the last one, where there are fewer steps
    than entries: zi moved on by the number of steps."""
    memory, length = zi.shape[-1], x.shape[steps.axis]
    if steps.offsets is None and not is_symbolic(length):
        length = min(length, memory)
        return pad(zi[..., length:], (0, length))
    place = torch.arange(memory, device=x.device)
    if steps.offsets is None:
        place = place + length
    else:
        place = place + steps.offsets.to(x.device).diff().view(-1, *[1] * (zi.dim() - 1))
    place = place.expand(zi.shape)
    moved = zi.gather(-1, place.clamp(max=memory - 1)) if memory else zi
    return torch.where(place < memory, moved, 0)
