"""V-trace: targets and advantages of steps that another policy took."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...api.tensor_subclasses import overridable, takes_parts
from ...errors import ScanTypeError, ScanValueError
from ...monoids.leaf_checks import check_axis, check_tensor
from ...torch_state import loadable
from ...wording import shown
from ..argument_errors import check_devices, named_scan
from ..operands import checked_offsets, for_dtype
from .episodes import (
    OF_BOOTSTRAP,
    Element,
    Lift,
    check_episodes,
    check_floats,
    check_steps,
    operand,
    promoted_dtype,
    restarting_scans,
    values_after,
)

__all__ = ["VTraceResult", "vtrace"]


@loadable
@takes_parts
class VTraceResult(NamedTuple):
    """What `vtrace` returns: targets of the values, and advantages of the actions."""

    targets: Tensor
    advantages: Tensor


@overridable
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    discount: Tensor | float,
    done: Tensor | None = None,
    axis: int = -1,
    *,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> VTraceResult:
    """V-trace targets and advantages, for steps that were taken by an older policy.

        ρ[t] = min(clip_rho, exp(log_ratios[t])),  c[t] = min(clip_c, exp(log_ratios[t]))
        δ[t] = ρ[t] · (rewards[t] + discount · values[t+1] − values[t])
        targets[t] = values[t] + δ[t] + discount · c[t] · (targets[t+1] − values[t+1])
        advantages[t] = ρ[t] · (rewards[t] + discount · targets[t+1] − values[t])

    >>> import torch, assocscan
    >>> rewards, values = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    >>> log_ratios = torch.tensor([0.0, -1.0, 1.0])
    >>> targets, advantages = assocscan.vtrace(log_ratios, rewards, values, torch.tensor(4.0), 0.5)
    >>> targets, advantages
    (tensor([2.0920, 2.1839, 3.0000]), tensor([1.0920, 0.1839, 0.0000]))

    log_ratios: log π(action) − log μ(action), in the shape of the rewards, of the policy π that
        learns and μ that acted.
    rewards: any shape with the axis, as [B, T].
    values: of the states at the steps, in the shape of the rewards.
    bootstrap: the value of the state after the last step, and both values[t+1] and targets[t+1]
        there: a tensor in the shape of the rewards without the axis, as [B].
    discount: a number, or a tensor in the shape of the rewards.
    done: bool, in the shape of the rewards. done[t]: an episode ends with step t; the discount is 0
        there.
    truncated: bool, in the shape of the rewards. truncated[t]: an episode was cut after step t.
        Then next_values[t] is both values[t+1] and targets[t+1].
    next_values: in the shape of the rewards; read only where truncated is True.
    clip_rho, clip_c: numbers; infinity clips nothing.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; bootstrap
        then has a leading S, or is that of all sequences alike, which is meant where both fit.

    Tensors of other shapes broadcast to these. `done` and `truncated` are as in
    `discounted_returns`. A step that is both counts as truncated: where a time limit may fall on a
    terminal state, pass `truncated & ~terminated`.

    There is no λ, which other libraries multiply with c[t] (`lambda_` in rlax): it is 1 here. With
    log_ratios of 0 and clips of 1, targets − values is then `gae` with a decay of 1.

    Differentiable; nothing is detached. As targets of a loss, both are used without their
    gradients: call it under `torch.no_grad()`. Both have the shape of the rewards and the dtype to
    which the arguments promote (a float32 bootstrap beside 16-bit rewards does not make the result
    float32).

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: rewards, values or log_ratios are not tensors of floats, bootstrap is not a
            tensor, discount is one of bool, a clip is not a number.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: shapes do not broadcast to that of the rewards; one of `truncated` and
            `next_values` without the other; a clip is negative or NaN.

    Cost per element: about 60 flops (two exp, twice), reads log_ratios, rewards, values twice and
    done, writes two numbers.

    Source: L. Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted
    actor-learner architectures", ICML 2018.
    """
    ends = check_episodes(rewards, done, discount, truncated, next_values)
    axis = check_axis(axis, rewards.shape, rewards.dim(), "rewards")
    check_tensor("log_ratios", log_ratios)
    check_tensor("bootstrap", bootstrap, OF_BOOTSTRAP)
    check_devices("rewards", rewards, log_ratios=log_ratios, values=values, bootstrap=bootstrap)
    check_steps(values, rewards, axis)
    check_floats("log_ratios", log_ratios)
    check_floats("values", values)
    dtype = promoted_dtype(rewards, [values, log_ratios, discount, next_values], bootstrap)
    values = operand("values", values, rewards, dtype)
    ratios = operand("log_ratios", log_ratios, rewards, dtype)
    discount = operand("discount", discount, rewards, dtype)
    log_rho, log_c = (
        operand(name, log_clip(name, clip), rewards, dtype)
        for name, clip in (("clip_rho", clip_rho), ("clip_c", clip_c))
    )
    sequences = checked_offsets(offsets, rewards, axis)
    after = values_after(
        rewards, values, bootstrap, axis, dtype, sequences, ends.truncated, next_values
    )
    found = named_scan(
        {"xs": "rewards", "xs[1]": "values", "xs[2]": "values", "xs[3]": "log_ratios",
         "xs[4]": "discount", "xs[7]": "done", "xs[8]": "done"},
        for_dtype(V_TRACE, dtype),
        (rewards, values, after, ratios, discount, log_rho, log_c, ends.stops, ends.worthless),
        axis, reverse=True, inclusive=False, offsets=sequences, backend=backend,
        deterministic=deterministic,
    )  # fmt: skip
    return VTraceResult(*found)


def log_clip(name: str, value: float) -> float:
    """The logarithm of a clip: exp(min(log ratio, log clip)) overflows nowhere, not even in the
    gradient of what is clipped."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ScanTypeError(f"{name} is {shown(value)}, expected a number")
    if not value >= 0:
        raise ScanValueError(f"{name} is {value}, expected a number ≥ 0")
    return math.log(value) if value > 0 else -math.inf


def clipped(log_ratio: Tensor, log_clip: Tensor) -> Tensor:
    """min(clip, ratio). The gradient at a tie is the ratio's: on policy, with a clip of 1, every
    step is one, and `torch.minimum` would halve it."""
    return torch.where(log_ratio > log_clip, log_clip, log_ratio).exp()


def surprise(
    reward: Tensor, value: Tensor, after: Tensor, discount: Tensor, worthless: Tensor
) -> Tensor:
    weight, after = torch.where(worthless, 0.0, discount), torch.where(worthless, 0.0, after)
    return reward + weight * after - value


def entering(dtype: torch.dtype) -> Lift:
    def lift(
        reward: Tensor, value: Tensor, after: Tensor, log_ratio: Tensor, discount: Tensor,
        log_rho: Tensor, log_c: Tensor, stops: Tensor, worthless: Tensor,
    ) -> Element:  # fmt: skip
        delta = surprise(reward, value, after, discount, worthless)
        rho, c = clipped(log_ratio, log_rho), clipped(log_ratio, log_c)
        kept = torch.where(stops, 0.0, discount) * torch.where(stops, 0.0, c)  # c may be infinite
        return kept, (rho * delta).to(dtype), stops

    return lift


def leaving(dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """Target and advantage, of the difference between target and value at the next step: the scan
    is exclusive."""

    def lower(state: Element, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        reward, value, after, log_ratio, discount, log_rho, log_c, stops, worthless = xs
        kept, difference = torch.where(stops, 0.0, discount), torch.where(stops, 0.0, state[1])
        rho, c = clipped(log_ratio, log_rho), clipped(log_ratio, log_c)
        base = surprise(reward, value, after, discount, worthless)
        target = value + (rho * base + kept * torch.where(stops, 0.0, c) * difference)
        return target.to(dtype), (rho * (base + kept * difference)).to(dtype)

    return lower


# Exclusive: each result is made of the state at the next step and of the inputs at this one.
V_TRACE = restarting_scans("vtrace", entering, leaving)
