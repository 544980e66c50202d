"""One call of a scan, checked and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engines.base.problem import ScanProblem
from ..monoids.monoid import Monoid
from ..monoids.slice_function import SliceFunction
from ..program.operator import Leaf
from ..pytrees import TreeSpec
from ..trace.monoid import TracedMonoid


@dataclass
class ScanCall:
    """One checked call. `spec` is None for a raw callable that cannot be traced."""

    operator: Monoid | SliceFunction
    spec: TracedMonoid | None
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
    why_eager: str
    final_only: bool = False  # a reduction: no outputs

    @property
    def length(self) -> int:
        return self.leaves[0].shape[self.axis]

    @property
    def is_raw(self) -> bool:
        return isinstance(self.operator, SliceFunction)

    @property
    def state_spec(self) -> TreeSpec:
        return self.spec.state_spec if self.spec is not None else self.input_spec

    @property
    def state(self) -> tuple[Leaf, ...]:
        """The state leaves; a raw callable's elements are scalars."""
        if self.spec is not None:
            return self.spec.state
        return tuple(Leaf(t.dtype) for t in self.leaves)

    def carry_batch(self, leaf: int) -> tuple[int, ...]:
        """The batch shape of a carry of this state leaf."""
        batch = tuple(self.leaves[leaf].shape) if self.is_raw else self.batch
        rest = batch[: self.axis] + batch[self.axis + 1 :]
        return rest if self.offsets is None else (self.offsets.shape[0] - 1, *rest)

    def problem(self) -> ScanProblem:
        """The scan of the call, without gradients."""
        assert self.spec is not None and self.spec.operator is not None
        exclusive = not self.inclusive
        return ScanProblem(
            self.spec.operator, list(self.leaves), self.batch, self.axis, self.reverse, exclusive,
            None if self.init is None else list(self.init), exclusive and self.init is None,
            tuple(range(len(self.spec.state))) if self.return_final else (),
            offsets=self.offsets,
        )  # fmt: skip
