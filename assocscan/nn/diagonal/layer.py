"""What layers with diagonal recurrent weights share: one number per channel and gate.

Their steps are functions of one channel, (state, gates, weights) ↦ the next state, written with
torch operations. `nonlinear_recurrence` compiles them for `forward`; `step` calls them on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...errors import ScanTypeError
from ...functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence
from ...wording import kind_of
from ..recurrent_layer import RecurrentLayer
from ..states import Run, require_sizes, require_state, weight_of

Step = Callable[[Any, Any, Any], Any]
Tensors = tuple[Tensor, ...]
State = TypeVar("State")


class Cell(NamedTuple):
    """What sets one layer apart from another.

    step: of one channel. gates: how many enter it, each with a recurrent weight.
    empty: the state of an empty past, a number or a tuple of numbers.
    state: the class of a state of several parts, the first of which is the output; None where the
        state is one tensor, the output.
    """

    step: Step
    gates: int
    empty: Any
    state: Any = None

    def returned(self, state: Any) -> Any:
        """The state as the layer returns it."""
        return state if self.state is None else self.state(*state)


def hidden(state: Tensors) -> Tensor:
    """What a layer with a state of several parts puts out."""
    return state[0]


class DiagonalLayer(RecurrentLayer[State]):
    """A layer with one recurrent weight per channel and gate, of which `_cell` is one step.

    Parameters: `input`, an nn.Linear from the features to the gates, and `recurrent`
    [gates, width].
    """

    _cell: Cell

    def __init__(self, features: int, width: int | None = None) -> None:
        super().__init__()
        width = features if width is None else width
        require_sizes(features=features, width=width)
        gates = self._cell.gates
        self.input = nn.Linear(features, gates * width)
        # So u ⊙ h varies as much as U h does in torch.nn.GRU, which draws its matrices
        # U [width, width] between ±1/√width.
        self.recurrent = nn.Parameter(torch.empty(gates, width).uniform_(-1, 1))

    def _entrance(self) -> tuple[int, Tensor | None]:
        return self.input.in_features, weight_of(self.input)

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        shape = x.shape[0], self.recurrent.shape[1]
        if self._cell.state is None:
            require_state(state, shape, "[B, width]", x, offsets)
        else:
            names = self._cell.state._fields
            for name, part in zip(names, require_parts(state, names), strict=True):
                require_state(part, shape, "[B, width]", x, offsets, f"state.{name}")

    def _along(self, x: Tensor, state: Any, run: Run) -> tuple[Tensor, State]:
        cell = self._cell
        if state is None:
            state = cell.empty
        elif cell.state is not None:
            state = tuple(state)
        y, last = along(cell, self.input(x), self.recurrent, state, run)
        return y, cell.returned(last)

    def _at(self, x: Tensor, state: Any) -> tuple[Tensor, State]:
        cell = self._cell
        entering = self.input(x)
        gates, weights = widened(entering, self.recurrent)
        if state is None and cell.state is not None:
            state = tuple([torch.full_like(gates[0], number) for number in cell.empty])
        elif state is None:
            state = torch.full_like(gates[0], cell.empty)
        state = cell.step(state, gates, weights)
        h = state if cell.state is None else hidden(state)
        return h.to(entering.dtype), cell.returned(state)


def require_parts(state: object, names: Sequence[str]) -> tuple[object, ...]:
    """The state, refused where it is no tuple of tensors."""
    wanted = f"expected ({', '.join(names)}), tensors, as the layer returns it"
    if not isinstance(state, tuple) or len(state) != len(names):
        count = f" of {len(state)}" if isinstance(state, tuple) else ""
        raise ScanTypeError(f"state is {kind_of(state)}{count}, {wanted}")
    for name, part in zip(names, state, strict=True):
        if not isinstance(part, Tensor):
            raise ScanTypeError(f"state.{name} is {kind_of(part)}, {wanted}")
    return state


def headers_of_turns(layer: object) -> int:
    """How many headers ranks that take turns exchange."""
    from ...distributed.pipeline import HEADERS

    return HEADERS


def along(cell: Cell, gates: Tensor, weights: Tensor, state: Any, run: Run) -> tuple[Tensor, Any]:
    """The outputs [B, L, width] and the last state, for gates [B, L, k · width] and recurrent
    weights [k, width]. Ranks of a group run one after the other.

    state: a number or a tensor, or a tuple of them.
    """

    def walk(state: Any) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = nonlinear_recurrence(
            cell.step, gates.chunk(cell.gates, -1), state, params=weights.unbind(),
            lower=None if cell.state is None else hidden, reverse=run.reverse, return_final=True,
            offsets=run.offsets,
        )  # fmt: skip
        return found

    if run.group is None:
        return walk(state)
    from ...distributed.pipeline import pipeline

    name = cell.step.__name__.removesuffix("_step")
    shape = gates.shape[0], weights.shape[1]
    wide = torch.promote_types(gates.dtype, torch.float32)
    parts = state if isinstance(state, tuple) else (state,)
    whole = [
        part.to(wide).expand(shape)
        if isinstance(part, Tensor)
        else torch.full(shape, part, dtype=wide, device=gates.device)
        for part in parts
    ]

    def run_part(entering: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        if isinstance(state, tuple):
            return walk(tuple(entering))
        y, last = walk(entering[0])
        return y, [last]

    y, last = pipeline(
        f"the layer of {name!r}", run_part, whole, [gates, weights], run.reverse, run.group
    )
    return y, tuple(last) if isinstance(state, tuple) else last[0]


def widened(gates: Tensor, weights: Tensor) -> tuple[Tensors, Tensors]:
    """The arguments of a step for one position, in which it computes: float32 at least.

    gates: [B, k · width]. weights: [k, width].
    """
    wide = torch.promote_types(torch.promote_types(gates.dtype, weights.dtype), torch.float32)
    return gates.to(wide).chunk(weights.shape[0], -1), weights.to(wide).unbind()
