"""`ScanCall`: the arguments of one call, checked and normalised by `api.bind_arguments.bind`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..monoids.monoid import Monoid
from ..monoids.raw_callables import SliceFunction
from ..pytrees import TreeSpec
from ..trace.traced_monoid import TracedMonoid

if TYPE_CHECKING:
    from .vectors.handed_totals import HandedTotals


@dataclass
class ScanCall:
    """One call of `associative_scan` or `reduce`.

    operator: a monoid, or a raw callable on slices.
    traced: the operator at the dtypes and element shapes of this call, with its programs.
    input_spec: the structure of xs. leaves: its tensors, in that order.
    element_ndims: for each leaf, how many of its last dimensions are element dimensions.
    batch: the shape that the batch dimensions of the leaves broadcast to, the axis included. If the
        operator acts on each component separately (`TracedMonoid.by_component`), element dimensions
        are batch dimensions too. For a raw callable, the whole shape of the first leaf.
    axis: the scanned dimension of `batch`, not negative.
    init: the carry that enters, a tensor for each state leaf (of a sequential operator for its
        first ones), in the accumulator's dtype and expanded to `carry_batch`; None without one.
    return_final: whether the carry that leaves is a result.
    offsets: the boundaries of packed sequences; None for one sequence.
    final_only: a reduction: the final carry is the only result.
    leaving: with return_final, the numbers of the state leaves that are returned; None: all.
    leaving_spec: their structure, where the caller gets them.
    handed: takes totals of segments from a reduction to the scan of the same leaves. When such a
        call is made no transform, tracer or dispatch mode is active, and there are no offsets; in
        its backward passes one may be.
    """

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
    final_only: bool = False
    leaving: tuple[int, ...] | None = None
    leaving_spec: TreeSpec | None = None
    handed: HandedTotals | None = None

    @property
    def length(self) -> int:
        return self.leaves[0].shape[self.axis]

    @property
    def is_raw(self) -> bool:
        """Whether the operator is a raw callable on slices."""
        return isinstance(self.operator, SliceFunction)

    @property
    def state_spec(self) -> TreeSpec:
        return self.traced.state_spec

    @property
    def final(self) -> tuple[int, ...]:
        """The numbers of the state leaves whose final carry is returned."""
        if not self.return_final:
            return ()
        return tuple(range(len(self.traced.state))) if self.leaving is None else self.leaving

    @property
    def final_spec(self) -> TreeSpec:
        """The structure of the final carry that is returned."""
        return self.state_spec if self.leaving_spec is None else self.leaving_spec

    def changed(self, **fields: Any) -> ScanCall:
        """A copy in which these fields differ. As `dataclasses.replace`, but faster: names are not
        checked."""
        found = object.__new__(ScanCall)
        found.__dict__.update(self.__dict__, **fields)
        return found

    def carry_batch(self, leaf: int) -> tuple[int, ...]:
        """The batch shape of a carry of this state leaf: without the axis, and with the number of
        packed sequences, if any, as the first size."""
        batch = tuple(self.leaves[leaf].shape) if self.is_raw else self.batch
        rest = batch[: self.axis] + batch[self.axis + 1 :]
        return rest if self.offsets is None else (self.offsets.shape[0] - 1, *rest)

    def scan(self, operator: Any) -> tuple[ScanSpec[Any], list[MaybeTensor]]:
        """The `ScanSpec` of this call, and the tensors of the scan.

        operator: what the engine runs in place of `self.operator` (`operator_of` of
            `api/associative_scan`).
        """
        exclusive = not self.inclusive
        tensors: list[MaybeTensor] = [*self.leaves, *(self.init or ())]
        if self.offsets is not None:
            tensors.append(self.offsets)
        spec = ScanSpec(
            operator, self.batch, self.axis, self.leaves[0].device, self.reverse, exclusive,
            None if self.init is None else tuple(range(len(self.init))),
            exclusive and self.init is None,
            self.final,
            sequences=None if self.offsets is None else self.offsets.shape[0] - 1,
        )  # fmt: skip
        return spec, tensors
