"""`ScanSpec` and `TensorSpec`: hashable descriptions of a scan and of its tensors.

The dimensions of a tensor are the batch dimensions, which include the scan axis, followed by the
dimensions of an element. Batch dimensions of size 1 broadcast. The tensors of a scan are one list,
in the order of `ScanSpec.names`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...errors import BackendError
from ...program.operator import Leaf

Name = tuple[str, int]
Strides = tuple[int, ...]
MaybeTensor = torch.Tensor | None


@dataclass(frozen=True)
class NewtonOptions:
    """A scan of steps that are not associative is to be solved by Newton's method in windows.

    tolerance: on |h[t] − f(h[t−1], x[t])| / (1 + |h[t]|). max_iterations: in a window, before it is
    walked.
    """

    tolerance: float
    max_iterations: int


class ElementOperator(Protocol):
    """What `Operator` (over scalars) and `MatrixOperator` (over matrices) have in common."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[Leaf, ...]: ...
    @property
    def state(self) -> tuple[Leaf, ...]: ...
    @property
    def outputs(self) -> tuple[Leaf, ...]: ...
    @property
    def identity(self) -> tuple[Any, ...] | None: ...


Op = TypeVar("Op", bound=ElementOperator, covariant=True)


@dataclass(frozen=True)
class ScanSpec(Generic[Op]):
    """A scan: its operator, shape and options.

    batch: the shape of the batch dimensions.
    axis: the batch dimension that is scanned.
    init: the numbers of the state leaves whose initial carry is a tensor; the other leaves start
        from the identity. Such a tensor has the shape `carry_batch` + element. None: the scan
        starts without a carry, or from the identity if `from_identity` is set.
    from_identity: the scan starts from the identity; only read where init is None. init=None with
        from_identity=True means the same as init=(); use `initial_leaves`, which is () for both.
    final: the numbers of the state leaves whose last carry is returned.
    shifted: the numbers of the input leaves that are read one step ahead in scan order.
    boundary: the numbers of the shifted leaves that have a tensor (shaped as a carry) for the step
        after the last one; the others read zero there.
    sequences: the number of packed sequences; None where the axis is one sequence.
    followed_by: of a pass that writes nothing at its steps (a reduction, or the gradient of init
        alone): the operator of the pass over the same elements that follows. Where an engine cuts
        the axis into segments and computes their totals first, this pass cuts it as that one will,
        and returns the totals as one more output.
    segments: the number of segments whose totals are given, as one more tensor. None: the engine
        computes them, if it needs any.
    newton: of steps that are not associative, how they are solved in parallel; None: one after
        another.
    """

    operator: Op
    batch: tuple[int, ...]
    axis: int
    device: torch.device
    reverse: bool = False
    exclusive: bool = False
    init: tuple[int, ...] | None = None
    from_identity: bool = False
    final: tuple[int, ...] = ()
    shifted: tuple[int, ...] = ()
    boundary: tuple[int, ...] = ()
    sequences: int | None = None
    followed_by: Any = None
    segments: int | None = None
    newton: NewtonOptions | None = None

    @property
    def length(self) -> int:
        return self.batch[self.axis]

    @cached_property
    def carry_batch(self) -> tuple[int, ...]:
        """The batch shape of a carry: `batch` without the axis; for packed sequences, with the
        number of sequences in front."""
        rest = self.batch[: self.axis] + self.batch[self.axis + 1 :]
        return rest if self.sequences is None else (self.sequences, *rest)

    @cached_property
    def chains(self) -> int:
        """The number of independent scans: the product of `carry_batch`."""
        return math.prod(self.carry_batch)

    @property
    def sequence_count(self) -> int:
        return 1 if self.sequences is None else self.sequences

    @cached_property
    def names(self) -> tuple[Name, ...]:
        """The role and the leaf number of each tensor, in the order of the list of tensors."""
        return (
            *(("input", k) for k in range(len(self.operator.inputs))),
            *(("init", k) for k in self.init or ()),
            *(("boundary", k) for k in self.boundary),
            *([("offsets", 0)] if self.sequences is not None else []),
            *([("totals", 0)] if self.segments is not None else []),
        )

    def leaf(self, name: Name) -> Leaf:
        """The operator's leaf that an input, init or boundary tensor holds."""
        role, k = name
        return self.operator.state[k] if role == "init" else self.operator.inputs[k]

    @property
    def initial_leaves(self) -> tuple[int, ...] | None:
        """The state leaves whose initial carry is a tensor; (): all start from the identity; None:
        the scan starts without a carry."""
        return () if self.init is None and self.from_identity else self.init

    @property
    def begins_alone(self) -> bool:
        """Whether the first step has no carry before it: its element becomes the carry."""
        return self.initial_leaves is None and not self.exclusive


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a strided tensor.

    alignment: the largest power of two up to 16 that divides its address; 16 where there is no
        address. Kernels of GPUs load as many bytes at a time as it allows.
    """

    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    device: torch.device
    alignment: int = 16

    @staticmethod
    def of(t: torch.Tensor, with_address: bool = False) -> TensorSpec:
        """with_address: store the alignment of `data_ptr()`; else 16 is assumed."""
        alignment = ALIGNMENTS[t.data_ptr() & 15] if with_address else 16
        return TensorSpec(tuple(t.shape), t.stride(), t.dtype, t.device, alignment)

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorSpec:
        """A newly allocated contiguous tensor; its address is a multiple of 16."""
        shape = tuple(shape)
        return TensorSpec(shape, dense_strides(shape), dtype, device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def distinct_bytes(self) -> int:
        """The bytes of the elements, of which a stride of 0 repeats some."""
        return self.itemsize * math.prod(
            n for n, s in zip(self.shape, self.strides, strict=True) if s != 0
        )

    @property
    def is_dense(self) -> bool:
        """Whether the elements are contiguous in the order of the dimensions."""
        expected = dense_strides(self.shape)
        return all(
            s == e or n == 1 for n, s, e in zip(self.shape, self.strides, expected, strict=True)
        )

    def expand(self, shape: Sequence[int]) -> TensorSpec:
        """Broadcast to a shape of as many dimensions or more, as `torch.Tensor.expand` does."""
        shape, more = tuple(shape), len(shape) - len(self.shape)
        if more == 0 and shape == self.shape:
            return self
        strides = [
            s if n == size else 0
            for n, s, size in zip(self.shape, self.strides, shape[more:], strict=True)
        ]
        return TensorSpec(shape, (*[0] * more, *strides), self.dtype, self.device, self.alignment)


# The largest power of two that divides an address, by the address modulo 16.
ALIGNMENTS = (16, *(n & -n for n in range(1, 16)))


def dense_strides(shape: Sequence[int]) -> Strides:
    return contiguous_strides(tuple(shape), tuple(range(len(shape))), ())


def plain(t: torch.Tensor) -> torch.Tensor:
    """`t` without lazy conjugation and negation: a copy whose memory holds the values, because
    kernels read memory and not torch's flags. Other tensors are returned as they are."""
    if t.is_conj() or t.is_neg():
        return t.resolve_conj().resolve_neg()
    return t


def check_memory(addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Raise BackendError for a tensor with elements but without memory (a wrapper subclass, a freed
    storage): a kernel would read address 0."""
    for address, t in zip(addresses, tensors, strict=True):
        if address == 0 and t.numel() > 0:
            raise BackendError(
                f"a {type(t).__name__} of shape {list(t.shape)} has no memory of its own that a "
                "kernel could read"
            )


def contiguous_strides(
    batch: tuple[int, ...], order: tuple[int, ...], element: tuple[int, ...]
) -> Strides:
    """The strides of a dense tensor whose batch dimensions have this order in memory, outermost
    first; the element dimensions are innermost."""
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
    batch: tuple[int, ...], signatures: Sequence[tuple[tuple[int, ...], Strides]]
) -> tuple[int, ...]:
    """The order of batch dimensions in memory, outermost first, for the outputs of a scan whose
    inputs have these (shape, strides): the order of the first input that has the full batch shape
    and positive strides, else the order of the dimensions."""
    n = len(batch)
    for shape, stride in signatures:
        if tuple(shape[:n]) == batch and all(
            s > 0 for s, size in zip(stride, batch, strict=False) if size > 1
        ):
            return tuple(sorted(range(n), key=lambda d: (bool(batch[d] > 1), -stride[d])))
    return tuple(range(n))
