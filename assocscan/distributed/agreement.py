"""Ranks compare what they are called with, before a collective that would not fit.

Each rank describes its call in a few named facts. A header of fixed size goes first: a flag, the
length of the local part and a hash of the description. Where all are equal, nothing more is sent.
Otherwise the descriptions follow, and every rank raises the same error.

What a rank does before its header goes may raise on this rank alone: it checks its arguments,
traces its operator, reduces its part. `in_turn` then sends a header that says so in the place of
the one that the others wait for, and all of them raise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from .. import errors
from ..errors import AssocScanError, ScanValueError
from ..monoids.call_errors import with_own_code
from ..pytrees import flatten
from ..torch_private import (
    all_gather_into,
    group_of_name,
    without_dispatch_modes,
    without_transforms,
)
from ..torch_state import is_traced, needs_dispatcher
from .ranks import (
    Ranks,
    header_device,
    process_group,
    ranks_of,
    reads_header,
    refuse_transforms,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Facts = dict[str, str]
Bound = TypeVar("Bound")
Function = TypeVar("Function", bound=Callable[..., Any])

# How many exchanges a group has had: the same number on all of its ranks.
EXCHANGED: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

WORDS = 8  # of 64 bits: 1 for a description and 0 for an error, the length, 32 bytes of a hash


class Turn:
    """A call over ranks that is running.

    awaited: how many headers the other ranks still wait for from this rank in the call. Turns are
        nested (a layer, its convolution): a header counts for all of them. After an exchange that
        raised, which it does on all ranks, nobody waits for any.
    """

    def __init__(self, group: ProcessGroup, awaited: int) -> None:
        self.group, self.awaited = group, awaited


class Turns(threading.local):
    def __init__(self) -> None:
        self.running: list[Turn] = []


TURNS = Turns()


def in_turn(
    group: ProcessGroup,
    headers: int,
    run: Callable[[], Bound],
    given: Callable[[], Any],
    check: Any = None,
) -> Bound:
    """What `run` returns. An error is sent to the other ranks, as long as they wait for a header.

    headers: how many headers `run` exchanges if nothing is wrong.
    given: the arguments, of which the first tensor tells the device. check: as of `reads_header`.
    """
    turn = Turn(group, headers)
    TURNS.running.append(turn)
    try:
        return run()
    except Exception as error:
        if turn.awaited > 0 and reads_header(group, device_of(given()), check):
            failure = {"error": type(error).__name__, "message": str(error)}
            exchange(group, failure, 0, False)
        raise
    finally:
        TURNS.running.pop()


def over_ranks(function: Function) -> Function:
    """Decorator of a public function that exchanges one header over `group`: `in_turn`. Also an
    error of a call that does not fit its signature is sent."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        return call_in_turn(function, 1, args, kwargs, kwargs.get("check"))

    return with_own_code(call, function)


def call_in_turn(
    function: Callable[..., Any], headers: int, args: Sequence[Any], kwargs: dict[str, Any],
    check: Any = None,
) -> Any:  # fmt: skip
    """A call of a function, `in_turn` over the group among its arguments."""
    try:
        group = process_group(group_among(args, kwargs))
    except AssocScanError:
        return function(*args, **kwargs)  # raises it, or another one that comes first
    return in_turn(group, headers, lambda: function(*args, **kwargs), lambda: (args, kwargs), check)


def group_among(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The group that a call is given, by position too, where it does not belong."""
    if kwargs.get("group") is not None or not dist.is_available():
        return kwargs.get("group")
    return next((value for value in args if isinstance(value, dist.ProcessGroup)), None)


def device_of(xs: Any) -> torch.device:
    """The device of the first tensor of xs; the CPU where there is none, and where xs is no tree:
    that is said later, to all ranks."""
    try:
        leaves = flatten(xs)[0]
    except Exception:
        leaves = []
    return next((t.device for t in leaves if isinstance(t, torch.Tensor)), torch.device("cpu"))


def agreed(
    bind: Callable[[], Bound],
    describe: Callable[[Bound], tuple[Facts, int]],
    group: ProcessGroup,
    device: torch.device,
    check: bool | None,
) -> tuple[Bound, list[int] | None]:
    """What `bind` returns, and the length of every rank's part. Called within `in_turn`.

    bind: checks the arguments of this rank.
    describe: the facts in which ranks must agree, and the length of the local part. Called where
        the ranks compare; what else may raise on one rank alone is done in it.

    The lengths are None where the ranks do not compare (`check`).

    Raises ScanValueError where ranks disagree.
    """
    refuse_transforms()
    compares = reads_header(group, device, check)
    bound = bind()
    return bound, exchange(group, *describe(bound), True) if compares else None


def compared_ranks(group: ProcessGroup, lengths: Sequence[int] | None) -> Ranks:
    """The ranks for a call that `agreed` on these lengths."""
    return ranks_of(group, 0 if lengths is None else EXCHANGED[group])


def meet(ranks: Ranks, what: str) -> None:
    """Raise ScanValueError where the ranks are at other steps of their backward passes: what one
    sends would be taken for something else. Called before every collective of such a pass."""
    if ranks.call and not is_traced():
        group = group_of_name(ranks.name)
        exchange(group, {"the step of the backward pass": f"{what} of call {ranks.call}"}, 0, True)


def exchange(group: ProcessGroup, facts: Facts, length: int, is_description: bool) -> list[int]:
    """The lengths of all parts. Raises where ranks disagree or another one has an error; then, and
    where this one has an error, no header is awaited any more."""
    agree = False
    EXCHANGED[group] = EXCHANGED.get(group, 0) + 1
    try:
        with as_it_is():
            lengths = compared(group, facts, length, is_description)
        agree = is_description
        return lengths
    finally:
        name = group.group_name
        for turn in TURNS.running:
            if turn.group.group_name == name:
                turn.awaited = turn.awaited - 1 if agree else 0


def as_it_is() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are memory, whatever surrounds the call."""
    found = contextlib.ExitStack()
    if needs_dispatcher():
        found.enter_context(without_transforms())
        found.enter_context(without_dispatch_modes())
    return found


def compared(group: ProcessGroup, facts: Facts, length: int, is_description: bool) -> list[int]:
    """`exchange`, without the turns."""
    ranks = ranks_of(group)
    digest = hashlib.sha256(repr(sorted(facts.items())).encode(errors="replace")).digest()
    words = [int(is_description), length, *(int.from_bytes(digest[k : k + 8], "little", signed=True)
                                           for k in range(0, 32, 8))]  # fmt: skip
    words += [0] * (WORDS - len(words))
    header = torch.tensor(words, dtype=torch.int64, device=header_device(group))
    received = header.new_empty(ranks.size * WORDS)
    all_gather_into(received, header, ranks.name)
    rows = received.view(ranks.size, WORDS).tolist()
    if any(row[0] != 1 or row[2:] != rows[0][2:] for row in rows):
        gathered: list[Any] = [None] * ranks.size
        dist.all_gather_object(gathered, facts, group)
        refuse(gathered, ranks.rank)
    return [row[1] for row in rows]


def refuse(gathered: Sequence[Facts], own: int) -> None:
    """Raise the error of the first rank that has one, or ScanValueError for the first fact in which
    the ranks disagree. A rank with an error of its own raises that one instead."""
    if "error" in gathered[own]:
        return
    for rank, facts in enumerate(gathered):
        if "error" in facts:
            raise error_of(rank, facts["error"], facts["message"])
    names = dict.fromkeys(name for facts in gathered for name in facts)
    different = [name for name in names if len({facts.get(name) for facts in gathered}) > 1]
    raise ScanValueError("; ".join(disagreement(gathered, name) for name in different[:3]))


def error_of(rank: int, name: str, message: str) -> AssocScanError:
    """The error of another rank: of its class where that is one of the package."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, AssocScanError):
        return kind(f"rank {rank}: {message}")
    return AssocScanError(f"rank {rank}: {name}: {message}")


def disagreement(gathered: Sequence[Facts], name: str) -> str:
    """`the ranks disagree on the dtype of xs[0]: float32 on rank 0, float64 on ranks 1 and 2`."""
    holders: dict[str, list[int]] = {}
    for rank, facts in enumerate(gathered):
        holders.setdefault(facts.get(name, "absent"), []).append(rank)
    seen = ", ".join(f"{value} on {listed(where)}" for value, where in holders.items())
    return f"the ranks disagree on {name}: {seen}"


def listed(ranks: Iterable[int]) -> str:
    *rest, last = ranks
    return f"ranks {', '.join(map(str, rest))} and {last}" if rest else f"rank {last}"
