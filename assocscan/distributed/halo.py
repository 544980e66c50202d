"""The inputs just before a rank's part: what a causal convolution reads across the border."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ScanValueError
from ..hooks import HOOKS
from .agreement import Facts, agreed, compared_ranks, in_turn
from .collectives import gather, tied, token_of
from .facts import surroundings
from .ranks import process_group, require_sendable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def halo(
    x: torch.Tensor,
    count: int,
    state: torch.Tensor,
    reverse: bool = False,
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` inputs before the local part x [B, L, C], and the last `count` of the whole.

    state: [B, count, C], the inputs before the whole, on every rank; its gradient is whole on the
        rank whose part comes first. With `reverse` all of this runs from the end.

    Parts may be shorter than `count`: the inputs then come from several ranks. Which those are is
    worked out on the device, so that nothing waits for it. Differentiable, of any order. The first
    result depends on the collective on every rank: a loss must depend on it.

    Cost: one all-gather of B · count · C numbers of each rank.
    """
    if torch.compiler.is_dynamo_compiling():
        name = None if group is None else group.group_name
        return HOOKS.compiled_halo(x, count, state, reverse, name)
    found = process_group(group)

    def bound() -> None:
        expected = (x.shape[0], count, x.shape[2])
        if tuple(state.shape) != expected:
            raise ScanValueError(
                f"the state has shape {list(state.shape)}, expected {list(expected)}"
            )
        require_sendable(found, (x, state))

    def facts(_: None) -> tuple[Facts, int]:
        grad = torch.is_grad_enabled()
        described = {"the function": "a causal convolution", "reverse": str(reverse)}
        described |= surroundings((x, state))
        described["the dtype of x"] = str(x.dtype).removeprefix("torch.")
        described["the device of x"] = x.device.type
        described["the shape of x"] = f"[{x.shape[0]}, any, {x.shape[2]}]"
        described["the width of the convolution"] = str(count + 1)
        described["whether x requires a gradient"] = str(grad and x.requires_grad)
        described["whether the state requires a gradient"] = str(grad and state.requires_grad)
        return described, x.shape[1]

    _, lengths = in_turn(found, 1, lambda: agreed(bound, facts, found, x.device, None), lambda: x)
    ranks = compared_ranks(found, lengths)
    order = ranks.in_order(reverse)
    own, start = (x.flip(1), state.flip(1)) if reverse else (x, state)
    # The last inputs of this part, in scan order; with fewer, the first slots hold nothing.
    padded = torch.cat([torch.zeros_like(start), own], 1)
    tail = padded[:, padded.shape[1] - count :]
    is_held = torch.arange(count, device=x.device) >= count - x.shape[1]
    # The same operations on every rank, whatever it needs: see `traced_carries`.
    token, (tails, held, starts) = gather(ranks, 0, [tail, is_held, start], token_of(x, state))
    slots = torch.cat([starts[order[0]], *(tails[rank] for rank in order)], 1)
    flags = torch.cat([torch.ones_like(is_held), *(held[rank] for rank in order)])
    before = (1 + order.index(ranks.rank)) * count
    entering = tied(last_held(slots[:, :before], flags[:before], count), token)
    leaving = tied(last_held(slots, flags, count), token)
    return (entering.flip(1), leaving.flip(1)) if reverse else (entering, leaving)


def last_held(slots: torch.Tensor, flags: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` of the slots [B, S, C] that hold an input (`flags` bool [S]), in order."""
    order = torch.argsort(flags, stable=True)  # those that hold nothing come first
    return slots.index_select(1, order[order.shape[0] - count :])
