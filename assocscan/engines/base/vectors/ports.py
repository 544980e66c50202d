"""How the tensors of a scan over vectors lie: the ports of a kernel, and the strides that are its
arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....program.operator import Leaf
from ....program.vectors.vector_operator import parts
from ..layout import Given
from ..scan_spec import TensorSpec
from .kernel import STRIDES, VectorPort

# A dimension of fewer lanes leaves threads without work (an estimate).
ENOUGH_LANES = 16


def best_lanes(batch: Sequence[int], axis: int, given: Given) -> int | None:
    """The batch dimension of the lanes: one of enough lanes, then of small strides. None where
    there is no other dimension than the axis."""

    def value(d: int) -> tuple[int, int]:
        strides = [
            abs(t.strides[d])
            for (role, _), t in given.items() if role == "input" and t.shape[d] > 1
        ]  # fmt: skip
        return min(batch[d], ENOUGH_LANES), -sum(strides)

    return max((d for d in range(len(batch)) if d != axis), key=value, default=None)


@dataclass
class Ports:
    """The ports of a kernel, as they are added.

    axis, lane, outer: the batch dimensions that are scanned, are the lanes, and are neither.
    size: N, the number of states.
    values: the strides of every leaf, by role, number and name, in scalars.
    reach: the largest distance that an address may have from its tensor's first scalar.
    """

    batch: tuple[int, ...]
    axis: int
    lane: int | None
    size: int
    packed: bool
    outer: tuple[int, ...] = ()
    found: list[tuple[str, int, VectorPort]] = field(default_factory=list)
    values: dict[tuple[str, int, str], int] = field(default_factory=dict)
    reach: int = 0

    def __post_init__(self) -> None:
        rank = range(len(self.batch))
        self.outer = tuple(d for d in rank if d not in (self.axis, self.lane))

    @property
    def lanes(self) -> int:
        return 1 if self.lane is None else self.batch[self.lane]

    @property
    def rows(self) -> int:
        return math.prod(self.batch[d] for d in self.outer)

    def add(
        self, role: str, k: int, t: TensorSpec, leaf: Leaf, *,
        lane: bool | None = None, carry: bool = False, leading: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """A leaf. lane: whether it has an element for each lane; None: if its stride says so.
        carry: it has no axis, and a leading dimension for packed sequences. leading: what its
        leading dimensions are ("sequence", "block"), before those of the batch."""
        scale = parts(leaf)
        strides = [scale * s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        reach = sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True))
        self.reach = max(self.reach, reach + scale)
        if carry and self.packed:
            leading = ("sequence",)
        by_name = dict(zip(leading, strides, strict=False))
        strides = strides[len(leading) :]
        if carry:
            strides = [*strides[: self.axis], 0, *strides[self.axis :]]
        rank = len(self.batch)
        by_name["time"] = strides[self.axis]
        by_name["lane"] = 0 if self.lane is None else strides[self.lane]
        has_states = leaf.shape == (self.size,)
        by_name["state"] = strides[rank] if has_states else 0
        by_name.update({f"outer{n}": strides[d] for n, d in enumerate(self.outer)})
        names = (*STRIDES, *(f"outer{n}" for n in range(len(self.outer))))
        found = tuple((name, unit(by_name.get(name, 0))) for name in names)
        has_lane = by_name["lane"] != 0 if lane is None else lane
        self.found.append((role, k, VectorPort(t.dtype, found, has_lane, has_states)))
        self.values.update({(role, k, name): by_name.get(name, 0) for name in names})

    def add_whole(self, role: str, t: TensorSpec) -> None:
        """A tensor that the kernel addresses by itself."""
        self.reach = max(self.reach, math.prod(t.shape))
        self.found.append((role, 0, VectorPort(t.dtype, (), False, False)))


def unit(stride: int) -> int | None:
    """A stride that is written into the kernel, or None."""
    return stride if stride in (0, 1) else None
