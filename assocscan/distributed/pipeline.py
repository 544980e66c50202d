"""A recurrence that is no associative scan, over ranks: one part after the other.

Each rank walks along its part when the state of the part before has arrived. Nothing runs at the
same time, so this divides the memory of a sequence, not its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ScanValueError
from .agreement import Facts, agreed, compared_ranks, in_turn
from .collectives import gather, tied, token_of
from .facts import surroundings
from .ranks import Ranks, process_group, require_sendable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = list[torch.Tensor]

HEADERS = 2  # before the first turn, and after the last one: a walk may fail on one rank


def pipeline(
    name: str,
    run: Callable[[Tensors], tuple[torch.Tensor, Sequence[torch.Tensor]]],
    state: Tensors,
    inputs: Tensors,
    reverse: bool = False,
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, Tensors]:
    """The outputs of the local part, and the last state of the whole, on every rank.

    name: of the caller, in errors.
    run: the recurrence along the local part: the entering state ↦ (outputs, the leaving state, in
        the shapes and dtypes of the entering one).
    state: before the whole, the same on every rank; its gradient is whole on the rank whose part
        comes first.
    inputs: the tensors that `run` reads, of which the first has the local length as dimension 1.

    Differentiable, of any order. The outputs depend on every collective on every rank: a loss must
    depend on them.

    Cost: as many all-gathers of a state as there are ranks, one after the other, and as many
    collectives again in a backward pass.

    Raises ScanValueError where the ranks disagree, and inside torch.compile, which may exchange
    collectives where the graphs of the ranks differ.
    """
    if torch.compiler.is_compiling():
        raise ScanValueError(
            f"{name} with group= inside torch.compile: its ranks run one after the other, each at "
            "another place among the collectives, and compiled graphs of ranks must not differ; "
            "call it outside of the compiled part"
        )
    found = process_group(group)

    def bound() -> None:
        require_sendable(found, (*inputs, *state))

    def facts(_: Any) -> tuple[Facts, int]:
        grad = torch.is_grad_enabled()
        described = {"the function": name, "reverse": str(reverse)}
        described |= surroundings((*inputs, *state))
        described["the device of input 0"] = inputs[0].device.type
        for k, t in enumerate((*inputs, *state)):
            what = f"input {k}" if k < len(inputs) else f"part {k - len(inputs)} of the state"
            shape = [*t.shape] if k else [t.shape[0], "any", *t.shape[2:]]
            described[f"the dtype of {what}"] = str(t.dtype).removeprefix("torch.")
            described[f"the shape of {what}"] = str(shape)
            described[f"whether {what} requires a gradient"] = str(grad and t.requires_grad)
        return described, inputs[0].shape[1]

    def compared(facts: Callable[[Any], tuple[Facts, int]]) -> Ranks:
        return compared_ranks(found, agreed(bound, facts, found, inputs[0].device, None)[1])

    def ran() -> tuple[torch.Tensor, Tensors]:
        y, last, failure = turns(run, state, inputs, compared(facts), reverse)
        if failure is not None:
            raise failure
        compared(lambda _: ({"the function": f"the end of {name}"}, 0))
        return y, last

    return in_turn(found, HEADERS, ran, lambda: inputs)


def turns(
    run: Callable[[Tensors], tuple[torch.Tensor, Sequence[torch.Tensor]]],
    state: Tensors,
    inputs: Tensors,
    ranks: Ranks,
    reverse: bool,
) -> tuple[torch.Tensor, Tensors, Exception | None]:
    """What `pipeline` returns, and the error of this rank's walk: where the ranks compare, a rank
    whose walk fails takes part in the other ranks' turns all the same."""
    token = token_of(*inputs, *state)
    y, failure = inputs[0], None
    for rank in ranks.in_order(reverse):
        leaving = [torch.zeros_like(t) for t in state]
        if rank == ranks.rank:
            try:
                y, last = run(state)
                leaving = list(last)
            except Exception as error:
                if not ranks.call:
                    raise
                failure = error
        token, stacked = gather(ranks, 0, leaving, token)
        state = [t[rank].clone() for t in stacked]
    return tied(y, token), [tied(t, token) for t in state], failure
