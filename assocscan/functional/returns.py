"""Discounted sums of rewards, from the end of each episode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..api.tensor_subclasses import overridable
from ..engines.base.shifted_leaves import carry_shape, previous_state
from ..errors import ScanTypeError, ScanValueError
from ..monoids.leaf_checks import check_axis, check_tensor
from ..monoids.monoid import Monoid
from .argument_errors import check_devices, named_scan
from .operands import carry_dtype, checked_offsets, expanded

__all__ = ["discounted_returns", "gae"]


@overridable
def discounted_returns(
    rewards: Tensor,
    discount: Tensor | float,
    done: Tensor | None = None,
    bootstrap: Tensor | None = None,
    axis: int = -1,
    *,
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
    to t, be it NaN. `discount` is a number or a tensor that broadcasts to the rewards; `bootstrap`
    is the value of the state after the last step, in the shape of the rewards without the axis.
    Differentiable in all but `done`. The result has the dtype to which rewards, discount and
    bootstrap promote (a float32 bootstrap leaves 16-bit floats what they are).

    With `offsets`, sequences packed along the axis, `bootstrap` has a leading S.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: rewards are not a tensor of floats.
        ValueError: shapes do not broadcast to that of the rewards.

    Cost per element: 3 flops and 3 selections, reads rewards and done, writes G.

    Source: R. S. Sutton and A. G. Barto, "Reinforcement Learning", 2nd ed., 2018, section 3.4.
    """
    done = check_episodes(rewards, done, discount=discount)
    if bootstrap is not None:
        check_tensor("bootstrap", bootstrap)
    dtype = promoted_dtype(rewards, (discount,), bootstrap)
    rewards, discount = operands(rewards, dtype, discount=discount)
    init = None
    if bootstrap is not None:
        if bootstrap.is_floating_point():  # the scan refuses what no float can hold
            bootstrap = bootstrap.to(carry_dtype(dtype))
        flag = torch.zeros_like(bootstrap, dtype=torch.bool)
        init = torch.ones_like(bootstrap), bootstrap, flag
    returns: Tensor = named_scan(
        {"xs": "rewards", "xs[1]": "discount", "xs[2]": "done", "init": "bootstrap"},
        RETURNS, (rewards, discount, done), axis, reverse=True, init=init,
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

    `values` [..., T, ...] are those of the states at the steps, `bootstrap` that of the state after
    the last one, in the shape of the rewards without the axis; the returns to which values are
    fitted are A + values. Differentiable. The result has the dtype to which rewards, values,
    discount, decay and bootstrap promote (a float32 bootstrap leaves 16-bit floats what they are).

    With `offsets`, sequences packed along the axis, `bootstrap` has a leading S.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: rewards or values are not tensors of floats, bootstrap is not a tensor.
        IndexError, ValueError: `axis` is out of range (`AxisError`).
        ValueError: shapes do not broadcast to that of the rewards.

    Cost per element: 8 flops and 4 selections, reads rewards, values twice and done, writes A.

    Source: J. Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", ICLR 2016.
    """
    done = check_episodes(rewards, done, discount=discount)
    axis = check_axis(axis, rewards.shape, rewards.dim(), "rewards")
    check_tensor("bootstrap", bootstrap)
    check_devices("rewards", rewards, values=values, bootstrap=bootstrap, decay=decay)
    check_steps(values, rewards, axis)
    check_number("decay", decay)
    dtype = promoted_dtype(rewards, (values, discount, decay), bootstrap)
    rewards, values, discount, trace = operands(
        rewards, dtype, values=values, discount=discount, decay=decay
    )
    sequences = checked_offsets(offsets, rewards, axis)
    a_step = rewards.new_empty(()).expand(carry_shape(rewards, axis, sequences))
    bootstrap = expanded(bootstrap, a_step, "bootstrap", "the rewards at a step")
    # A bootstrap of more bits is not rounded to those of the values.
    wide = values
    if promoted_of(values, bootstrap) != values.dtype:
        wide = values.to(carry_dtype(dtype))
    after = previous_state(wide, bootstrap, axis, True, sequences)  # backwards: the next value
    advantages: Tensor = named_scan(
        {"xs": "rewards", "xs[1]": "values", "xs[2]": "values", "xs[3]": "discount",
         "xs[4]": "decay", "xs[5]": "done"},
        ADVANTAGES, (rewards, values, after, discount, trace, done), axis, reverse=True,
        offsets=sequences, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return advantages


def check_steps(values: Tensor, rewards: Tensor, axis: int) -> None:
    """Raise ScanValueError where the values hold the bootstrap as one step more."""
    check_tensor("values", values)
    steps = rewards.shape[axis]
    if values.dim() == rewards.dim() and values.shape[axis] == steps + 1 != 1:
        raise ScanValueError(
            f"values has shape {list(values.shape)}, one step more than the rewards, "
            f"{list(rewards.shape)}: pass values.narrow({axis}, 0, {steps}), and what comes after, "
            f"values.select({axis}, {steps}), as bootstrap"
        )


def check_episodes(rewards: Tensor, done: Tensor | None, *, discount: Tensor | float) -> Tensor:
    """Check rewards, discount and `done`, which is returned in the shape of the rewards."""
    check_tensor("rewards", rewards)
    if not rewards.is_floating_point():
        raise ScanTypeError(f"rewards have dtype {rewards.dtype}, expected floats: rewards.float()")
    if done is None:
        done = torch.zeros((), dtype=torch.bool, device=rewards.device)
    check_tensor("done", done)
    if done.dtype != torch.bool:
        raise ScanTypeError(
            f"done has dtype {done.dtype}, expected torch.bool; convert it with done.bool()"
        )
    check_devices("rewards", rewards, discount=discount, done=done)
    check_number("discount", discount)
    return expanded(done, rewards, "done", "the rewards")


def check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        check_tensor(name, value, " or a number")


def promoted_dtype(
    rewards: Tensor, others: Sequence[Tensor | float], bootstrap: Tensor | None
) -> torch.dtype:
    """The dtype of the result, as that of a linear recurrence whose init is the bootstrap."""
    dtype = rewards.dtype
    for value in others:
        dtype = joined(dtype, value)
    if bootstrap is None or joined(dtype, bootstrap) == carry_dtype(dtype):
        return dtype
    return joined(dtype, bootstrap)


def joined(dtype: torch.dtype, value: Tensor | float) -> torch.dtype:
    """The float dtype to which tensors of `dtype` and a value promote; numbers and 0-dimensional
    tensors widen nothing. torch.compile cannot trace `torch.result_type`, which says the same."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not value.is_floating_point():
        return dtype
    return torch.promote_types(dtype, value.dtype)


def operands(rewards: Tensor, dtype: torch.dtype, **others: Tensor | float) -> list[Tensor]:
    """The rewards and other operands in the shape of the rewards, of stride 0 where they are
    constant. The scan widens floats that are narrower than `dtype`, as it reads them; if none has
    this dtype, which is then that of the bootstrap, the rewards are converted."""
    found = []
    for name, value in others.items():
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=dtype, device=rewards.device)
        elif value.dim() == 0 or not value.is_floating_point():
            value = value.to(dtype)
        found.append(expanded(value, rewards, name, "the rewards"))
    return [rewards if promoted_of(rewards, *found) == dtype else rewards.to(dtype), *found]


Element = tuple[Tensor, Tensor, Tensor]


def discounted(reward: Tensor, discount: Tensor, done: Tensor) -> Element:
    return torch.where(done, 0.0, discount), reward.to(promoted_of(reward, discount)), done


def advantage(
    reward: Tensor, value: Tensor, after: Tensor, discount: Tensor, decay: Tensor, done: Tensor
) -> Element:
    kept = torch.where(done, 0.0, discount)
    delta = reward + kept * torch.where(done, 0.0, after) - value
    # The value after the last step may be wider: 16-bit floats do not follow it.
    return kept * decay, delta.to(promoted_of(reward, value, discount, decay)), done


def promoted_of(*tensors: Tensor) -> torch.dtype:
    """The dtype to which all promote."""
    return functools.reduce(torch.promote_types, [t.dtype for t in tensors])


def restarting(left: Element, right: Element) -> Element:
    """`ops.affine` that starts anew where `done` is set. A discount of zero alone would not do, in
    the values nor in the gradient of the discount: 0 · NaN is NaN."""
    a1, b1, earlier = left
    a2, b2, done = right
    a1, b1 = torch.where(done, 0.0, a1), torch.where(done, 0.0, b1)
    return a2 * a1, a2 * b1 + b2, earlier | done


def _restarting(name: str, lift: Callable[..., Element]) -> Monoid:
    identity = (1.0, 0.0, False)
    return Monoid(restarting, identity=identity, name=name, lift=lift, lower=lambda state: state[1])


RETURNS = _restarting("discounted_returns", discounted)
ADVANTAGES = _restarting("gae", advantage)
