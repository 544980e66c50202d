"""`RecurrentLayer`: the calls that all recurrent layers have, of a sequence and of one position."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from torch import Tensor, nn

from ..api.flags_and_backends import flag
from ..monoids.call_errors import checked_methods
from .over_ranks import layer_over_ranks
from .states import Run, checked_sequences, require_input

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

State = TypeVar("State")
Layer = TypeVar("Layer", bound=type[nn.Module])


class RecurrentLayer(nn.Module, Generic[State]):
    """A layer whose output at a position depends on those before it through a state."""

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        reverse: bool = False,
        *,
        group: ProcessGroup | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(y, state) for x [B, L, D], beginning with the state that a call before returned, or with
        that of an empty past; with `reverse`, from the end; with `group`, x is this rank's part of
        a sequence; with `offsets` [S + 1], S sequences are packed along L, and states have a
        leading S. What D, y and the state are is described with the layer."""
        features, weight = self._entrance()
        require_input(x, features, weight, True)
        offsets = checked_sequences(offsets, x, group)
        if state is not None:
            self._check_state(state, x, offsets)
        return self._along(x, state, Run(flag("reverse", reverse), group, offsets))

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """(y, state) for one position x [B, D], by torch operations.

        A state that S packed sequences left, [S, 1, …], enters as [S, …] (`[:, 0]` of its tensors),
        beside an x of S rows.
        """
        features, weight = self._entrance()
        require_input(x, features, weight, False)
        if state is not None:
            self._check_state(state, x)
        return self._at(x, state)

    def _entrance(self) -> tuple[int, Tensor | None]:
        """The features of x, and the weight that it meets; see `require_input`."""
        raise NotImplementedError

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        """Refuse a state that does not fit x, or the sequences that are packed in it."""
        raise NotImplementedError

    def _along(self, x: Tensor, state: State | None, run: Run) -> tuple[Tensor, State]:
        """`forward` of arguments that are checked."""
        raise NotImplementedError

    def _at(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """`step` of arguments that are checked."""
        raise NotImplementedError


def recurrent(headers: Callable[[Any], int]) -> Callable[[Layer], Layer]:
    """Class decorator of a `RecurrentLayer`, which gives it copies of the methods that it inherits.

    They are its own, so that the error of a call that does not fit names the class, as in
    `LRU.forward() has no argument …`, and so that their signatures show the class of its state.
    All ranks raise such an error.

    headers: how many headers the ranks exchange in a call of the layer.
    """

    def decorated(cls: Layer) -> Layer:
        for name in ("__init__", "forward", "step"):
            if name not in vars(cls):
                setattr(cls, name, method_of(cls, getattr(cls, name)))
        return layer_over_ranks(headers)(checked_methods(cls))

    return decorated


def method_of(cls: type, function: Any) -> FunctionType:
    """A copy of an inherited method that is this class's own, with the class of its state in place
    of `State` in the annotations."""
    code, name = function.__code__.replace(), function.__name__
    copy = FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    state = state_of(cls)
    copy.__annotations__ = {
        key: text.replace("State", state) for key, text in function.__annotations__.items()
    }
    copy.__qualname__, copy.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return copy


def state_of(cls: type) -> str:
    """The name of the class that `RecurrentLayer[…]`, or a base made from it, is given."""
    bases = [base for c in cls.__mro__ for base in vars(c).get("__orig_bases__", ())]
    given = [state for base in bases for state in get_args(base)]
    name: str = next(state.__name__ for state in given if not isinstance(state, TypeVar))
    return name
