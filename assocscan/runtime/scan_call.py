"""One call of a scan, checked and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.base.spec import Optional, ScanSpec
from ..monoids.monoid import Monoid
from ..monoids.slice_function import SliceFunction
from ..pytrees import TreeSpec
from ..trace.traced_monoid import TracedMonoid


@dataclass
class ScanCall:
    """One checked call."""

    operator: Monoid | SliceFunction
    traced: TracedMonoid
    input_spec: TreeSpec
    leaves: list[torch.Tensor]
    element_ndims: Sequence[int]
    batch: tuple[int, ...]
    axis: int
    reverse: bool
    inclusive: bool
    init: list[torch.Tensor] | None
    return_final: bool
    offsets: torch.Tensor | None
    final_only: bool = False  # a reduction: no outputs

    @property
    def length(self) -> int:
        return self.leaves[0].shape[self.axis]

    @property
    def is_raw(self) -> bool:
        return isinstance(self.operator, SliceFunction)

    @property
    def state_spec(self) -> TreeSpec:
        return self.traced.state_spec

    def carry_batch(self, leaf: int) -> tuple[int, ...]:
        """The batch shape of a carry of this state leaf."""
        batch = tuple(self.leaves[leaf].shape) if self.is_raw else self.batch
        rest = batch[: self.axis] + batch[self.axis + 1 :]
        return rest if self.offsets is None else (self.offsets.shape[0] - 1, *rest)

    def scan(self, operator: Any) -> tuple[ScanSpec[Any], list[Optional]]:
        """The spec of the call with this form of its operator, and its tensors."""
        exclusive, state = not self.inclusive, tuple(range(len(operator.state)))
        tensors: list[Optional] = [*self.leaves, *(self.init or ())]
        if self.offsets is not None:
            tensors.append(self.offsets)
        spec = ScanSpec(
            operator, self.batch, self.axis, self.leaves[0].device, self.reverse, exclusive,
            None if self.init is None else state, exclusive and self.init is None,
            state if self.return_final else (),
            sequences=None if self.offsets is None else self.offsets.shape[0] - 1,
        )  # fmt: skip
        return spec, tensors
