"""What layers with diagonal recurrent weights share: one number per channel and gate.

Their steps are functions of one channel, (state, gates, weights) ↦ the next state, written with
torch operations. `nonlinear_recurrence` compiles them for `forward`; `step` calls them on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...api.flags_and_backends import flag
from ...errors import ScanTypeError
from ...functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence
from ...wording import kind_of
from ..states import checked_sequences, require_input, require_state, weight_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Step = Callable[[Any, Any, Any], Any]
Tensors = tuple[Tensor, ...]


class Cell(NamedTuple):
    """What sets one layer apart from another.

    step: of one channel. empty: the state of an empty past, a number or a tuple of numbers.
    names: of the parts of the state, the first of which is the output; none where the state is one
        tensor, the output.
    """

    step: Step
    empty: Any
    names: tuple[str, ...] = ()


def hidden(state: Tensors) -> Tensor:
    """What a layer with a state of several parts puts out."""
    return state[0]


def drawn_weights(gates: int, width: int) -> nn.Parameter:
    """Recurrent weights [gates, width], drawn uniformly between −1 and 1.

    What they add to a gate then varies as much as in a layer with matrices [width, width] drawn
    between ±1/√width, such as torch.nn.GRU.
    """
    return nn.Parameter(torch.empty(gates, width).uniform_(-1, 1))


def checked_arguments(
    layer: Any,
    names: Sequence[str],
    x: Tensor,
    state: object,
    positions: bool,
    group: ProcessGroup | None = None,
    offsets: Tensor | None = None,
) -> Tensor | None:
    """The offsets, checked like x [B, L, features] (or [B, features], one position) and the state.

    layer: with an nn.Linear `input` and weights `recurrent` [k, width].
    names: of the parts of the state, which is a tuple; none where it is one tensor.
    """
    require_input(x, layer.input.in_features, positions, weight_of(layer.input))
    offsets = checked_sequences(offsets, x, group)
    shape = x.shape[0], layer.recurrent.shape[1]
    if not names:
        require_state(state, shape, "[B, width]", x, offsets)
    elif state is not None:
        for name, part in zip(names, require_parts(state, names), strict=True):
            require_state(part, shape, "[B, width]", x, offsets, f"state.{name}")
    return offsets


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


def sequences(
    layer: Any,
    cell: Cell,
    x: Tensor,
    state: Any,
    reverse: bool,
    group: ProcessGroup | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Any]:
    """The outputs [B, L, width] of a layer and its last state, for x [B, L, features]."""
    offsets = checked_arguments(layer, cell.names, x, state, True, group, offsets)
    if state is None:
        state = cell.empty
    elif cell.names:
        state = tuple(state)
    lower = hidden if cell.names else None
    gates = layer.input(x)
    return along(cell.step, lower, gates, layer.recurrent, state, reverse, group, offsets)


def position(layer: Any, cell: Cell, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The output of a layer and its state for one position x [B, features], by torch operations."""
    checked_arguments(layer, cell.names, x, state, False)
    entering = layer.input(x)
    gates, weights = widened(entering, layer.recurrent)
    if state is None and cell.names:
        state = tuple([torch.full_like(gates[0], number) for number in cell.empty])
    elif state is None:
        state = torch.full_like(gates[0], cell.empty)
    state = cell.step(state, gates, weights)
    h = hidden(state) if cell.names else state
    return h.to(entering.dtype), state


def headers_of_turns(layer: object) -> int:
    """How many headers ranks that take turns exchange."""
    from ...distributed.pipeline import HEADERS

    return HEADERS


def along(
    step: Step,
    lower: Callable[[Any], Any] | None,
    gates: Tensor,
    weights: Tensor,
    state: Any,
    reverse: bool,
    group: ProcessGroup | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Any]:
    """The outputs [B, L, width] and the last state, for gates [B, L, k · width] and recurrent
    weights [k, width].

    state: a number or a tensor, or a tuple of them. group: of the ranks on whose parts the sequence
        lies, which run one after the other.
    """
    reverse = flag("reverse", reverse)

    def run(state: Any) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = nonlinear_recurrence(
            step, gates.chunk(weights.shape[0], -1), state, params=weights.unbind(), lower=lower,
            reverse=reverse, return_final=True, offsets=offsets,
        )  # fmt: skip
        return found

    if group is None:
        return run(state)
    from ...distributed.pipeline import pipeline

    name = step.__name__.removesuffix("_step")
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
            return run(tuple(entering))
        y, last = run(entering[0])
        return y, [last]

    y, last = pipeline(f"the layer of {name!r}", run_part, whole, [gates, weights], reverse, group)
    return y, tuple(last) if isinstance(state, tuple) else last[0]


def widened(gates: Tensor, weights: Tensor) -> tuple[Tensors, Tensors]:
    """The arguments of a step for one position, in which it computes: float32 at least.

    gates: [B, k · width]. weights: [k, width].
    """
    wide = torch.promote_types(torch.promote_types(gates.dtype, weights.dtype), torch.float32)
    return gates.to(wide).chunk(weights.shape[0], -1), weights.to(wide).unbind()
