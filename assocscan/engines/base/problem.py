"""`ScanProblem`: one scan, as every engine takes it.

Tensors have batch dimensions (the scan axis among them) and then their element dimensions; batch
dimensions of size 1 broadcast. Engines return the outputs and the final carries.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...errors import BackendError
from ...program.operator import Operator


@dataclass
class ScanProblem:
    """What to scan.

    `init`: the carry that enters, per state leaf (batch dimensions without the axis; one leading
    dimension of sequences with `offsets`), an entry of None standing for the identity's component;
    `init=None` starts without a carry, or from the identity with `from_identity`.
    `final`: the state leaves whose last carry is wanted.
    `ahead`: input leaves that are read one step ahead in scan order, with the value that stands
    beyond the edge (shaped as `init`), or None where there is none.
    """

    operator: Operator
    inputs: list[torch.Tensor | None]
    batch: tuple[int, ...]
    axis: int
    reverse: bool = False
    exclusive: bool = False
    init: list[torch.Tensor | None] | None = None
    from_identity: bool = False
    final: tuple[int, ...] = ()
    ahead: dict[int, torch.Tensor | None] = field(default_factory=dict)
    offsets: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.batch[self.axis]

    @property
    def carry_batch(self) -> tuple[int, ...]:
        """The batch shape of a carry: without the axis, with the sequences in front."""
        rest = self.batch[: self.axis] + self.batch[self.axis + 1 :]
        return rest if self.offsets is None else (self.offsets.shape[0] - 1, *rest)

    @property
    def device(self) -> torch.device:
        """That of any tensor: the derivative of a sum reads no inputs, only a carry."""
        tensors = itertools.chain(self.inputs, self.init or (), self.ahead.values())
        return next(t.device for t in tensors if t is not None)


def plain(t: torch.Tensor) -> torch.Tensor:
    """Lazy conjugation and negation made real: kernels read memory as it is."""
    if t.is_conj() or t.is_neg():
        return t.resolve_conj().resolve_neg()
    return t


def check_memory(addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that have elements and no memory (wrappers, freed storages): kernels would
    read address 0."""
    for address, t in zip(addresses, tensors, strict=True):
        if address == 0 and t.numel() > 0:
            raise BackendError(
                f"a {type(t).__name__} of shape {list(t.shape)} has no memory of its own that a "
                "kernel could read"
            )


def contiguous_strides(
    batch: tuple[int, ...], order: tuple[int, ...], element: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides of a dense tensor whose batch dimensions lie in `order`, outermost first."""
    strides = [0] * (len(batch) + len(element))
    step = 1
    for k in reversed(range(len(element))):
        strides[len(batch) + k] = step
        step *= element[k]
    for d in reversed(order):
        strides[d] = step
        step *= max(batch[d], 1)
    return tuple(strides)


def memory_order(
    batch: tuple[int, ...], signatures: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[int, ...]:
    """The order of batch dimensions, outermost first, that outputs take over from the inputs:
    that of the first (shape, stride) that has the full batch shape and overlaps nowhere."""
    n = len(batch)
    for shape, stride in signatures:
        if tuple(shape[:n]) == batch and all(
            s > 0 for s, size in zip(stride, batch, strict=False) if size > 1
        ):
            return tuple(sorted(range(n), key=lambda d: (bool(batch[d] > 1), -stride[d])))
    return tuple(range(n))
