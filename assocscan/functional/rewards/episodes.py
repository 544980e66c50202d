"""What scans of rewards share: their arguments, the ends of episodes, the scan that restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines.base.shifted_leaves import carry_shape, previous_state
from ...errors import ScanTypeError, ScanValueError
from ...monoids.leaf_checks import check_tensor, in_front
from ...monoids.monoid import Monoid
from ..argument_errors import check_devices, check_mask
from ..operands import carry_dtype, expanded, multiplier

Element = tuple[Tensor, Tensor, Tensor]
Lift = Callable[..., Element]
# What errors add to "expected a tensor": its place among the arguments differs between functions.
OF_BOOTSTRAP = ", the value of the state after the last step"


class Ends(NamedTuple):
    """Masks of the ends of episodes, in the shape of the rewards.

    stops: nothing flows back over this step.
    worthless: the state after it has no value.
    truncated: its value is taken from `next_values`; None where there are none.
    """

    stops: Tensor
    worthless: Tensor
    truncated: Tensor | None


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


def check_episodes(
    rewards: Tensor,
    done: Tensor | None,
    discount: Tensor | float,
    truncated: Tensor | None,
    next_values: Tensor | None,
) -> Ends:
    """Check these arguments; return where episodes end, in the shape of the rewards."""
    check_tensor("rewards", rewards)
    if not rewards.is_floating_point():
        raise ScanTypeError(f"rewards have dtype {rewards.dtype}, expected floats: rewards.float()")
    check_devices("rewards", rewards, discount=discount, next_values=next_values)
    check_number("discount", discount)
    done = mask("done", done, rewards)
    if truncated is None and next_values is None:
        return Ends(done, done, None)
    for name, value, other in (
        ("truncated", truncated, "next_values, the value of the state after each cut"),
        ("next_values", next_values, "truncated, which says after which steps they are read"),
    ):
        if value is None:
            continue
        if truncated is None or next_values is None:
            raise ScanValueError(f"{name} needs {other}")
        check_tensor(name, value)
    check_number("next_values", next_values)
    cuts = mask("truncated", truncated, rewards)
    return Ends(done | cuts, done & ~cuts, cuts)


def mask(name: str, value: Tensor | None, rewards: Tensor) -> Tensor:
    """A mask in the shape of the rewards; False everywhere for None."""
    if value is None:
        value = torch.zeros((), dtype=torch.bool, device=rewards.device)
    is_value = isinstance(value, Tensor) and value.is_floating_point()
    if name == "done" and is_value and value.shape != rewards.shape:
        raise ScanTypeError(
            f"done has dtype {value.dtype} and shape {list(value.shape)}, expected torch.bool, "
            "True where an episode ends; pass the value of the state after the last step as "
            "bootstrap="
        )
    check_mask(name, value, rewards, "rewards")
    return expanded(value, rewards, name, "the rewards")


def check_number(name: str, value: object) -> None:
    """Raise where this is neither a real number nor a tensor of them. A mask in this place is most
    likely `done`, and would be computed with, as weights of 1 and 0."""
    seen = f"is {value}" if isinstance(value, bool) else ""
    if not isinstance(value, (int, float)):
        check_tensor(name, value, " or a number")
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        seen = "is a mask of bool"
    if seen:
        raise ScanTypeError(
            f"{name} {seen}, expected a number or a tensor of numbers; were {name} and done "
            "swapped?"
        )
    if isinstance(value, Tensor):
        check_real(name, value)


def check_real(name: str, value: Tensor) -> None:
    """Raise for complex numbers: torch would drop their imaginary parts."""
    if value.is_complex():
        raise ScanTypeError(f"{name} has dtype {value.dtype}, expected real numbers")


def check_floats(name: str, value: Tensor) -> None:
    check_real(name, value)
    if not value.is_floating_point():
        raise ScanTypeError(f"{name} has dtype {value.dtype}, expected floats: {name}.float()")


def promoted_dtype(
    rewards: Tensor, others: Sequence[Tensor | float | None], bootstrap: Tensor | None
) -> torch.dtype:
    """The dtype of the result, as that of a linear recurrence whose init is the bootstrap."""
    if bootstrap is not None:
        check_real("bootstrap", bootstrap)
        if bootstrap.dtype == torch.bool:
            raise ScanTypeError(
                "bootstrap is a mask of bool, expected values; done is passed by name"
            )
    dtype = rewards.dtype
    for value in others:
        dtype = joined(dtype, value)
    if bootstrap is None or joined(dtype, bootstrap) == carry_dtype(dtype):
        return dtype
    return joined(dtype, bootstrap)


def joined(dtype: torch.dtype, value: Tensor | float | None) -> torch.dtype:
    """The float dtype to which tensors of `dtype` and a value promote; numbers, 0-dimensional
    tensors and None widen nothing. torch.compile cannot trace `torch.result_type`, which says the
    same."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not value.is_floating_point():
        return dtype
    return torch.promote_types(dtype, value.dtype)


def operand(name: str, value: Tensor | float, rewards: Tensor, dtype: torch.dtype) -> Tensor:
    """In the shape of the rewards, of stride 0 where it is constant."""
    found = multiplier(value, dtype, rewards.device, name)
    if not found.is_floating_point():
        found = found.to(carry_dtype(dtype))
    return expanded(found, rewards, name, "the rewards")


def values_after(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    axis: int,
    dtype: torch.dtype,
    offsets: Tensor | None,
    truncated: Tensor | None,
    next_values: Tensor | None,
) -> Tensor:
    """The value of the state after each step: the bootstrap after the last one of a sequence,
    `next_values` where an episode is cut."""
    a_step = rewards.new_empty(()).expand(carry_shape(rewards, axis, offsets))

    def a_step_of_rewards() -> str:
        said = f"the rewards without axis {axis}"
        return said if offsets is None else said + in_front(a_step.shape[0])

    bootstrap = expanded(bootstrap, a_step, "bootstrap", a_step_of_rewards)
    # A bootstrap of more bits is not rounded to those of the values.
    if torch.promote_types(values.dtype, bootstrap.dtype) != values.dtype:
        values = values.to(carry_dtype(dtype))
    after = previous_state(values, bootstrap, axis, True, offsets)  # backwards: the next value
    if truncated is None or next_values is None:
        return after
    return torch.where(truncated, operand("next_values", next_values, rewards, dtype), after)


def restarting(left: Element, right: Element) -> Element:
    """`ops.affine` that starts anew where `done` is set. A discount of zero alone would not do, in
    the values nor in the gradient of the discount: 0 · NaN is NaN."""
    a1, b1, earlier = left
    a2, b2, done = right
    a1, b1 = torch.where(done, 0.0, a1), torch.where(done, 0.0, b1)
    return a2 * a1, a2 * b1 + b2, earlier | done


def restarting_scans(
    name: str,
    lift: Callable[[torch.dtype], Lift],
    lower: Callable[[torch.dtype], Callable[..., Any]] | None = None,
) -> dict[torch.dtype, Monoid]:
    """The scan for each dtype of the result. `lift` makes the function for the dtype of the state,
    and `lower` for that of the result: 16-bit floats are rounded once."""
    lower = lower or (lambda dtype: lambda state: state[1].to(dtype))
    return {
        dtype: Monoid(
            restarting,
            identity=(1.0, 0.0, False),
            name=f"{name} in {dtype}",
            lift=lift(carry_dtype(dtype)),
            lower=lower(dtype),
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
