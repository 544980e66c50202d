"""Discounted sums of rewards, from the end of each episode."""

from __future__ import annotations

import torch
from torch import Tensor

from ...api.tensor_subclasses import overridable
from ...monoids.leaf_checks import check_axis, check_tensor
from ..argument_errors import check_devices, named_scan
from ..operands import carry_dtype, checked_offsets, for_dtype
from .episodes import (
    OF_BOOTSTRAP,
    Element,
    Lift,
    check_episodes,
    check_floats,
    check_number,
    check_steps,
    operand,
    promoted_dtype,
    restarting_scans,
    values_after,
)

__all__ = ["discounted_returns", "gae"]


@overridable
def discounted_returns(
    rewards: Tensor,
    discount: Tensor | float,
    done: Tensor | None = None,
    bootstrap: Tensor | None = None,
    axis: int = -1,
    *,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """G[t] = rewards[t] + discount · (1 − done[t]) · G[t+1], with G after the end = bootstrap or 0.

    >>> import torch, assocscan
    >>> done = torch.tensor([False, True, False, False])
    >>> assocscan.discounted_returns(torch.ones(4), 0.5, done, bootstrap=torch.tensor(8.0))
    tensor([1.5000, 1.0000, 3.5000, 5.0000])

    `done[t]` (bool) says that an episode ends with step t: what comes after it reaches nothing up
    to t, be it NaN. `discount` is a number, which is not rounded to 16 bits, or a tensor that
    broadcasts to the rewards; `bootstrap` is the value of the state after the last step, in the
    shape of the rewards without the axis.

    `truncated[t]` (bool) says that an episode was cut after step t, by a time limit, say: nothing
    flows across, and the value after the cut, `next_values[t]`, enters as G[t+1]. Only there are
    `next_values`, which broadcast to the rewards, read. A step that is both done and truncated is
    truncated: `done` may have the cuts as well, as in `terminated | truncated`. If a limit may
    fall on a terminal state, pass `truncated & ~terminated`.

    >>> truncated, after = torch.tensor([False, True, False, False]), torch.full((4,), 6.0)
    >>> assocscan.discounted_returns(
    ...     torch.ones(4), 0.5, truncated=truncated, next_values=after, bootstrap=torch.tensor(8.0)
    ... )
    tensor([3.0000, 4.0000, 3.5000, 5.0000])

    rewards may have any shape, as [B, T]. Returns G in that shape, in the dtype to which rewards,
    discount, next_values and bootstrap promote (a float32 bootstrap beside 16-bit rewards does not
    make the result float32). Differentiable in all but `done` and `truncated`.

    With `offsets` [S + 1], the boundaries of S sequences packed along the axis, `bootstrap` has a
    leading S: [S, B] for rewards [B, L]. One without it is that of all sequences alike: [B], even
    if S equals B.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: rewards are not a tensor of floats, discount or next_values is one of bool, or
            something is complex.
        ValueError: shapes do not broadcast to that of the rewards; one of `truncated` and
            `next_values` without the other.

    Cost per element: 3 flops and 3 selections, reads rewards and done, writes G.

    Source: R. S. Sutton and A. G. Barto, "Reinforcement Learning", 2nd ed., 2018, section 3.4.
    """
    ends = check_episodes(rewards, done, discount, truncated, next_values)
    if bootstrap is not None:
        check_tensor("bootstrap", bootstrap, OF_BOOTSTRAP)
    dtype = promoted_dtype(rewards, [discount, next_values], bootstrap)
    discount = operand("discount", discount, rewards, dtype)
    init = None
    if bootstrap is not None:
        if bootstrap.is_floating_point():  # the scan refuses what no float can hold
            bootstrap = bootstrap.to(carry_dtype(dtype))
        flag = torch.zeros_like(bootstrap, dtype=torch.bool)
        init = torch.ones_like(bootstrap), bootstrap, flag
    scans, xs = RETURNS, [rewards, discount, ends.stops]
    if ends.truncated is not None and next_values is not None:
        after_cut = operand("next_values", next_values, rewards, dtype)
        scans, xs = CUT_RETURNS, [*xs, ends.truncated, after_cut]
    returns: Tensor = named_scan(
        {"xs": "rewards", "xs[1]": "discount", "xs[2]": "done", "xs[3]": "truncated",
         "xs[4]": "next_values", "init": "bootstrap"},
        for_dtype(scans, dtype), tuple(xs), axis, reverse=True, init=init,
        offsets=offsets, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return returns


@overridable
def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    discount: Tensor | float,
    decay: Tensor | float,
    done: Tensor | None = None,
    axis: int = -1,
    *,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Generalised advantage estimates, restarted at the ends of episodes.

        δ[t] = rewards[t] + discount · (1 − done[t]) · values[t+1] − values[t]
        A[t] = δ[t] + discount · decay · (1 − done[t]) · A[t+1]

    >>> import torch, assocscan
    >>> rewards, values = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    >>> assocscan.gae(rewards, values, torch.tensor(4.0), 0.5, 0.5)
    tensor([1.1250, 0.5000, 0.0000])

    rewards: any shape with the axis, as [B, T].
    values: of the states at the steps, in the shape of the rewards. The returns to which values are
        fitted are A + values.
    bootstrap: the value of the state after the last step, a tensor in the shape of the rewards
        without the axis, as [B]; torch.zeros(()) where there is none.
    discount, decay: γ and λ, numbers or tensors in the shape of the rewards. With decay=0 A is δ,
        with decay=1 it is the discounted return less the value.
    done: bool, in the shape of the rewards. done[t]: an episode ends with step t.
    truncated: bool, in the shape of the rewards. truncated[t]: an episode was cut after step t.
        Then next_values[t] enters δ[t] in the place of values[t+1], and A[t] = δ[t].
    next_values: in the shape of the rewards; read only where truncated is True.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; bootstrap
        then has a leading S, or is that of all sequences alike: a [B] is read as such even if S
        equals B.

    Tensors of other shapes broadcast to these. `done` and `truncated` are as in
    `discounted_returns`. A step that is both counts as truncated: where a time limit may fall on a
    terminal state, pass `truncated & ~terminated`.

    >>> cut = torch.tensor([False, True, False])
    >>> assocscan.gae(
    ...     rewards, values, torch.tensor(4.0), 0.5, 0.5, truncated=cut, next_values=values + 1
    ... )
    tensor([1.1250, 0.5000, 0.0000])

    Returns A in the shape of the rewards, in the dtype to which rewards, values, discount, decay,
    next_values and bootstrap promote (a float32 bootstrap beside 16-bit rewards does not make the
    result float32). Differentiable.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: rewards or values are not tensors of floats, bootstrap is not a tensor, discount,
            decay or next_values is one of bool, or something is complex.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: shapes do not broadcast to that of the rewards; one of `truncated` and
            `next_values` without the other.

    Cost per element: 8 flops and 4 selections, reads rewards, values twice and done, writes A.

    Source: J. Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", ICLR 2016.
    """
    ends = check_episodes(rewards, done, discount, truncated, next_values)
    axis = check_axis(axis, rewards.shape, rewards.dim(), "rewards")
    check_tensor("bootstrap", bootstrap, OF_BOOTSTRAP)
    check_devices("rewards", rewards, values=values, bootstrap=bootstrap, decay=decay)
    check_steps(values, rewards, axis)
    check_number("decay", decay)
    check_floats("values", values)
    dtype = promoted_dtype(rewards, [values, discount, decay, next_values], bootstrap)
    values = operand("values", values, rewards, dtype)
    discount = operand("discount", discount, rewards, dtype)
    trace = operand("decay", decay, rewards, dtype)
    sequences = checked_offsets(offsets, rewards, axis)
    after = values_after(
        rewards, values, bootstrap, axis, dtype, sequences, ends.truncated, next_values
    )
    scans, masks = ADVANTAGES, [ends.stops]
    if ends.truncated is not None:
        scans, masks = CUT_ADVANTAGES, [ends.stops, ends.worthless]
    advantages: Tensor = named_scan(
        {"xs": "rewards", "xs[1]": "values", "xs[2]": "values", "xs[3]": "discount",
         "xs[4]": "decay", "xs[5]": "done", "xs[6]": "done"},
        for_dtype(scans, dtype), (rewards, values, after, discount, trace, *masks), axis,
        reverse=True, offsets=sequences, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return advantages


# Lifts for a dtype of the state.


def discounted(dtype: torch.dtype) -> Lift:
    def lift(reward: Tensor, discount: Tensor, done: Tensor) -> Element:
        return torch.where(done, 0.0, discount), reward.to(dtype), done

    return lift


def advantage(dtype: torch.dtype) -> Lift:
    def lift(
        reward: Tensor, value: Tensor, after: Tensor, discount: Tensor, decay: Tensor, done: Tensor
    ) -> Element:
        kept = torch.where(done, 0.0, discount)
        delta = reward + kept * torch.where(done, 0.0, after) - value
        return kept * torch.where(done, 0.0, decay), delta.to(dtype), done

    return lift


def discounted_or_cut(dtype: torch.dtype) -> Lift:
    """`discounted`, with the value after the cut in the reward."""

    def lift(
        start: Tensor, discount: Tensor, stops: Tensor, truncated: Tensor, after: Tensor
    ) -> Element:
        weight, after = torch.where(truncated, discount, 0.0), torch.where(truncated, after, 0.0)
        reward = torch.where(truncated, start + weight * after, start)
        return torch.where(stops, 0.0, discount), reward.to(dtype), stops

    return lift


def advantage_or_cut(dtype: torch.dtype) -> Lift:
    """`advantage`, where what stops need not be without a value."""

    def lift(
        reward: Tensor,
        value: Tensor,
        after: Tensor,
        discount: Tensor,
        decay: Tensor,
        stops: Tensor,
        worthless: Tensor,
    ) -> Element:
        weight, after = torch.where(worthless, 0.0, discount), torch.where(worthless, 0.0, after)
        delta = reward + weight * after - value
        kept = torch.where(stops, 0.0, discount) * torch.where(stops, 0.0, decay)
        return kept, delta.to(dtype), stops

    return lift


RETURNS = restarting_scans("discounted_returns", discounted)
CUT_RETURNS = restarting_scans("discounted_returns_with_cuts", discounted_or_cut)
ADVANTAGES = restarting_scans("gae", advantage)
CUT_ADVANTAGES = restarting_scans("gae_with_cuts", advantage_or_cut)
