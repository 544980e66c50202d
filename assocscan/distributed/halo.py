"""The inputs just before a rank's part: what a causal convolution reads across the border."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ScanValueError
from .agreement import Facts, agreed
from .collectives import gather, tied, token_of
from .ranks import process_group, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def halo(
    x: torch.Tensor,
    count: int,
    state: torch.Tensor,
    reverse: bool = False,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` inputs before the local part x [B, L, C], and the last `count` of the whole.

    state: [B, count, C], the inputs before the whole, on every rank; its gradient is whole on the
        rank whose part comes first. With `reverse` all of this runs from the end.

    Parts may be shorter than `count`: the inputs then come from several ranks. Which those are is
    worked out on the device, so that nothing waits for it. Differentiable, of any order. The first
    result depends on the collective on every rank: a loss must depend on it.

    Cost: one all-gather of B · count · C numbers of each rank.
    """
    found = process_group(group)

    def bound() -> None:
        expected = (x.shape[0], count, x.shape[2])
        if tuple(state.shape) != expected:
            raise ScanValueError(
                f"the state has shape {list(state.shape)}, expected {list(expected)}"
            )

    def facts(_: None) -> tuple[Facts, int]:
        grad = torch.is_grad_enabled()
        told = {"the function": "a causal convolution", "reverse": str(reverse)}
        told["the dtype of x"] = str(x.dtype).removeprefix("torch.")
        told["the shape of x"] = f"[{x.shape[0]}, any, {x.shape[2]}]"
        told["the width of the convolution"] = str(count + 1)
        told["whether x requires a gradient"] = str(grad and x.requires_grad)
        told["whether the state requires a gradient"] = str(grad and state.requires_grad)
        return told, x.shape[1]

    agreed(bound, facts, found, x.device, check)
    ranks = ranks_of(found)
    order = ranks.in_order(reverse)
    place = order.index(ranks.rank)
    own = x.flip(1) if reverse else x
    start = state.flip(1) if reverse else state
    # The last inputs of this part, in scan order; with fewer, the first slots hold nothing.
    padded = torch.cat([start if place == 0 else torch.zeros_like(start), own], 1)
    missing = 0 if place == 0 else max(count - x.shape[1], 0)
    is_held = torch.arange(count, device=x.device) >= missing
    token, (tails, held) = gather(
        ranks, 0, [padded[:, padded.shape[1] - count :], is_held], token_of(x, state)
    )
    entering = start if place == 0 else last_held(tails, held, order[:place])
    leaving = last_held(tails, held, order)
    results = tied(entering, token), tied(leaving, token)
    return (results[0].flip(1), results[1].flip(1)) if reverse else results


def last_held(tails: torch.Tensor, held: torch.Tensor, ranks: list[int]) -> torch.Tensor:
    """The last slots that hold an input, of the slots of these ranks in order.

    tails [W, B, count, C], held bool [W, count]. The first of the ranks holds `count` inputs.
    """
    slots = torch.cat([tails[rank] for rank in ranks], 1)
    flags = torch.cat([held[rank] for rank in ranks])
    order = torch.argsort(flags, stable=True)  # those that hold nothing come first
    return slots.index_select(1, order[order.shape[0] - tails.shape[2] :])
