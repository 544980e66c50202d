"""Steps that are not associative, and the comparison of what `nonlinear_recurrence` makes of them
with a loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import steps
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import nonlinear_recurrence

Step = Callable[..., Any]


def two_numbers(state: Any, x: Any, weights: Any) -> Any:
    """A cell and what it shows of itself."""
    (h, c), (i, f, o), (u, v) = state, x, weights
    c = torch.sigmoid(f + u * h) * c + torch.sigmoid(i) * torch.tanh(v * h)
    return torch.sigmoid(o) * torch.tanh(c), c


def fires(v: Tensor, current: Tensor) -> Tensor:
    v = 0.9 * v + current
    return torch.where(v > 1, 0.0, v)


class Case(NamedTuple):
    """A step, how many leaves xs and params have, and how many h has."""

    step: Step
    inputs: int
    params: int
    states: int = 1

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(sum(shape))

        def leaf(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=torch.float64).to(device, dtype)

        xs = tuple(leaf(*shape) for _ in range(self.inputs))
        h = tuple(leaf(shape[0], *shape[2:]).float() for _ in range(self.states))
        params = tuple(leaf(*shape[2:]) for _ in range(self.params))
        return {
            "xs": xs if self.inputs > 1 else xs[0],
            "init": h if self.states > 1 else h[0],
            "params": params,
        }


CASES = {
    "gated": Case(steps.gru, 3, 3),
    "two numbers": Case(two_numbers, 3, 2, 2),
    "fires": Case(fires, 1, 0),
}


def loop(case: Case, given: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The states, and the last ones, in float64 (`steps.loop`)."""
    given = tree_map(lambda t: t.double(), given)
    states, last = steps.loop(
        case.step, given["xs"], given["init"], params=given["params"], **options
    )
    return tree_leaves(states), tree_leaves(last)


def sums_of(
    case: Case, given: dict[str, Any], reverse: bool, options: dict[str, Any] | None
) -> tuple[list[Tensor], Tensor]:
    """The states and the last ones, and a sum of them with weights: of the loop, or of a call with
    these options."""
    if options is None:
        states, last = loop(case, given, reverse=reverse)
    else:
        found = nonlinear_recurrence(
            case.step, **given, reverse=reverse, return_final=True, **options
        )
        states, last = map(tree_leaves, found)
    results = [*states, *last]
    weights = [torch.linspace(-1, 2, max(t.numel(), 1), device=t.device).double() for t in results]
    terms = [
        (t.double() * w[: t.numel()].view(t.shape)).sum()
        for t, w in zip(results, weights, strict=True)
    ]
    return results, torch.stack(terms).sum()


def check(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, at: dict[str, Any],
    reverse: bool = False, change: Callable[[dict[str, Any]], None] | None = None,
) -> None:  # fmt: skip
    """Values and gradients, twice; the second call is a kept one. at: device, backend and other
    options. change: of the arguments."""
    options = {name: value for name, value in at.items() if name != "device"}
    given = case.draw(shape, dtype, at["device"])
    leaves = [t.requires_grad_() for t in tree_leaves(given)]
    if change is not None:
        change(given)
    right, total = sums_of(case, given, reverse, None)
    want = torch.autograd.grad(total, leaves)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for _ in range(2):
        got, total = sums_of(case, given, reverse, options)
        assert all(t.dtype == dtype for t in got[: case.states])
        assert all(t.dtype == torch.float32 for t in got[case.states :])
        pairs = [*zip(got, right, strict=True)]
        pairs += zip(torch.autograd.grad(total, leaves), want, strict=True)
        for found, expected in pairs:
            scale = expected.abs().max().item() + 1 if expected.numel() else 1
            torch.testing.assert_close(
                found.double(), expected.double(), rtol=0, atol=tolerance * scale
            )
