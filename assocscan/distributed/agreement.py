"""Ranks compare what they are called with, before a collective that would not fit.

Each rank describes its call in a few named facts. A header of fixed size goes first: a flag, the
length of the local part and a hash of the description. Where all are equal, nothing more is sent.
Otherwise the descriptions follow, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed as dist

from .. import errors
from ..errors import AssocScanError, ScanValueError, UnsupportedOperation
from ..monoids.leaf_names import OWN, LeafNames
from ..program.serialization import write
from ..runtime.scan_call import ScanCall
from ..torch_private import all_gather_bytes
from ..wording import shown
from .ranks import Ranks, header_device, ranks_of, reads_header

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Facts = dict[str, str]
Bound = TypeVar("Bound")

WORDS = 8  # of 64 bits: 1 for a description and 0 for an error, the length, 32 bytes of a hash


def agreed(
    bind: Callable[[], Bound],
    describe: Callable[[Bound], tuple[Facts, int]],
    group: ProcessGroup,
    device: torch.device,
    check: bool | None,
) -> tuple[Bound, list[int] | None]:
    """What `bind` returns, and the length of every rank's part.

    bind: checks the arguments of this rank. Where it raises on some rank, all raise.
    describe: the facts in which ranks must agree, and the length of the local part.

    The lengths are None where the ranks do not compare (`check`).

    Raises ScanValueError where ranks disagree.
    """
    if not reads_header(group, device, check):
        return bind(), None
    ranks = ranks_of(group)
    try:
        bound = bind()
        facts, length = describe(bound)
    except AssocScanError as error:
        failure = {"error": type(error).__name__, "message": str(error)}
        exchange(ranks, group, failure, 0, False)
        raise
    return bound, exchange(ranks, group, facts, length, True)


def exchange(
    ranks: Ranks,
    group: ProcessGroup,
    facts: Facts,
    length: int,
    is_description: bool,
) -> list[int]:
    """The lengths of all parts. Raises where ranks disagree or one has an error."""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode(errors="replace")).digest()
    words = [int(is_description), length, *(int.from_bytes(digest[k : k + 8], "little", signed=True)
                                           for k in range(0, 32, 8))]  # fmt: skip
    words += [0] * (WORDS - len(words))
    header = torch.tensor(words, dtype=torch.int64, device=header_device(group)).view(torch.uint8)
    received = all_gather_bytes(header, ranks.size, ranks.name).view(torch.int64)
    rows = received.view(ranks.size, WORDS).tolist()
    if any(row[0] != 1 or row[2:] != rows[0][2:] for row in rows):
        gathered: list[Any] = [None] * ranks.size
        dist.all_gather_object(gathered, facts, group)
        refuse(gathered, ranks)
    return [row[1] for row in rows]


def refuse(gathered: Sequence[Facts], ranks: Ranks) -> None:
    """Raise the error of the first rank that has one, or ScanValueError for the first fact in which
    the ranks disagree. A rank with an error of its own raises that one instead."""
    if "error" in gathered[ranks.rank]:
        return
    for rank, facts in enumerate(gathered):
        if "error" in facts:
            raise getattr(errors, facts["error"])(f"rank {rank}: {facts['message']}")
    names = dict.fromkeys(name for facts in gathered for name in facts)
    different = [name for name in names if len({facts.get(name) for facts in gathered}) > 1]
    raise ScanValueError("; ".join(disagreement(gathered, name) for name in different[:3]))


def disagreement(gathered: Sequence[Facts], name: str) -> str:
    """`the ranks disagree on the dtype of xs[0]: float32 on rank 0, float64 on ranks 1 and 2`."""
    holders: dict[str, list[int]] = {}
    for rank, facts in enumerate(gathered):
        holders.setdefault(facts.get(name, "absent"), []).append(rank)
    seen = ", ".join(f"{value} on {listed(where)}" for value, where in holders.items())
    return f"the ranks disagree on {name}: {seen}"


def listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def description(
    call: ScanCall, function: str, options: Mapping[str, Any], names: LeafNames = OWN
) -> tuple[Facts, int]:
    """The facts in which ranks must agree about a call, and the length of this rank's part.

    options: arguments of the public function beside op, xs and init. names: of the leaves.
    """
    paths = names.paths(call.input_spec)
    facts = {"the function": function, f"the structure of {names.of('xs')}": ", ".join(paths)}
    facts |= {name: shown(value) for name, value in options.items()}
    grad = torch.is_grad_enabled()
    facts["whether gradients are enabled"] = str(grad)
    for path, t in zip(paths, call.leaves, strict=True):
        shape = [*t.shape[: call.axis], "any", *t.shape[call.axis + 1 :]]
        facts[f"the dtype of {path}"] = str(t.dtype).removeprefix("torch.")
        facts[f"the shape of {path}"] = f"[{', '.join(map(str, shape))}]"
        facts[f"the device of {path}"] = t.device.type
        facts[f"whether {path} requires a gradient"] = str(grad and t.requires_grad)
    facts["the batch shape without the axis"] = str([*call.carry_batch(0)])
    facts["whether init is given"] = str(call.init is not None)
    inits = names.paths(call.state_spec, "init")
    for path, init in zip(inits, call.init or (), strict=False):
        facts[f"whether {path} requires a gradient"] = str(grad and init.requires_grad)
    facts["the operator"] = identity_of(call)  # last: its programs depend on dtypes and structure
    return facts, call.length


def identity_of(call: ScanCall) -> str:
    """The operator's name and a hash of its programs; of its code where it has no program."""
    name = call.operator.name
    if call.traced.operator is not None:
        try:
            return f"{name!r} ({write(call.traced.operator)[0].rpartition(':')[2][:12]})"
        except UnsupportedOperation:
            pass
    code = getattr(inspect.unwrap(call.operator.combine), "__code__", None)
    if code is None:
        return repr(name)
    text = repr((code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")]))
    return f"{name!r} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
