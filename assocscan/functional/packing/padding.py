"""Offsets of packed sequences, and sequences that are padded to one length."""

from __future__ import annotations

import torch
from torch import Tensor

from ...api.tensor_subclasses import overridable
from ...engines.base.packed_offsets import validated
from ...engines.base.shifted_leaves import sequence_of_steps
from ...errors import ScanTypeError, ScanValueError
from ...monoids.leaf_checks import check_axis, check_tensor
from ...torch_state import innermost
from ...wording import shown
from ..operands import as_dtype, is_readable, placeable

__all__ = ["from_padded", "lengths_of", "offsets_of", "to_padded"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # of positions


@overridable
def offsets_of(lengths: Tensor) -> Tensor:
    """The boundaries of sequences of these lengths, packed along one axis: 0 and the running sum.

        offsets[s] = lengths[0] + … + lengths[s − 1]

    >>> import torch, assocscan
    >>> assocscan.offsets_of(torch.tensor([3, 0, 2]))
    tensor([0, 3, 3, 5])

    lengths: integers [S]. Returns int64 [S + 1] on their device, which is not waited for.

    Raises:
        TypeError: lengths are not a tensor of integers.
        ValueError: they have not one dimension; on the CPU also where one is negative.
    """
    check_counts("lengths", lengths, "[S] for S sequences")
    if is_readable(lengths) and bool((lengths < 0).any()):
        k = int((lengths < 0).nonzero()[0])
        raise ScanValueError(f"lengths[{k}] is {int(lengths[k])}, but no sequence is so short")
    return summed(lengths)


@overridable
def lengths_of(offsets: Tensor) -> Tensor:
    """The lengths of packed sequences: differences of neighbouring boundaries.

        lengths[s] = offsets[s + 1] − offsets[s]

    >>> import torch, assocscan
    >>> assocscan.lengths_of(torch.tensor([0, 3, 3, 5]))
    tensor([3, 0, 2])

    offsets: integers [S + 1], as `associative_scan` takes them. Returns int64 [S] on their device,
    which is not waited for.

    Raises:
        TypeError: offsets are not a tensor of integers.
        ValueError: they are not [S + 1]; on the CPU also where they do not begin with 0, or
            decrease.
    """
    check_boundaries(offsets)
    if is_readable(offsets):
        validated(offsets.long(), int(offsets[-1]))
    return offsets.long().diff()


@overridable
def to_padded(x: Tensor, offsets: Tensor, value: float = 0, axis: int = 0) -> Tensor:
    """Packed sequences, each on a row of its own and filled up to the length of the longest.

        y[s, t] = x[offsets[s] + t],  `value` where sequence s has no step t

    >>> import torch, assocscan
    >>> x = torch.tensor([1, 2, 3, 4, 5])
    >>> assocscan.to_padded(x, torch.tensor([0, 3, 3, 5]))
    tensor([[1, 2, 3],
            [0, 0, 0],
            [4, 5, 0]])

    x: a tensor of any shape and dtype, with the sequences back to back along `axis`.
    offsets: integers [S + 1], the boundaries of the sequences.
    value: what stands behind the end of a sequence, a number.

    Returns [S, longest, …] in the dtype of x, whatever `axis` is; … are the other dimensions of x.
    `from_padded` is the way back. Differentiable in x.

    How long the longest is decides the shape, so that offsets on a GPU are waited for, and
    torch.compile breaks the graph; with offsets on the CPU nothing is waited for.

    Raises:
        TypeError: x or offsets are not dense tensors, or value is no number that x's dtype holds:
            NaN or 0.5 for integers.
        ValueError: offsets are not those of x's axis.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: reads x once and writes the result twice.
    """
    check_tensor("x", x)
    axis = check_axis(axis, x.shape, x.dim(), "x")
    check_boundaries(offsets)
    check_value(value, x.dtype)
    bounds = offsets.detach().to("cpu", torch.int64)
    if not torch.compiler.is_compiling():
        bounds = innermost(bounds)
    if bounds.dim() != 1:
        raise NotImplementedError(
            "torch.vmap over offsets: how long the longest sequence is decides the shape of the "
            "result; pack the sequences of the batch one after another"
        )
    read = validated(bounds, x.shape[axis])
    count = read.shape[0] - 1
    longest = int(read.diff().max()) if count else 0
    x = x.movedim(axis, 0)
    rows = x.new_full((count * longest, *x.shape[1:]), value)
    # No place is taken twice: the gradient of x is read from these places.
    place = places(offsets.to(x.device, torch.int64), x.shape[0], longest)
    rows = placeable(rows).index_copy(0, place, placeable(x))
    return as_dtype(rows, x.dtype).view(count, longest, *x.shape[1:])


@overridable
def from_padded(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Padded sequences packed back to back, and their boundaries: the way back from `to_padded`.

    >>> import torch, assocscan
    >>> x = torch.tensor([[1, 2, 3], [4, 5, 0]])
    >>> assocscan.from_padded(x, torch.tensor([3, 2]))
    (tensor([1, 2, 3, 4, 5]), tensor([0, 3, 5]))

    x: [S, longest, …], any dtype; what stands behind the end of a sequence is not read, be it NaN.
    lengths: integers [S], each at most `longest`.

    Returns (packed [L, …], offsets int64 [S + 1]), with L the sum of the lengths, and the offsets
    on the device of the lengths. Differentiable in x.

    L decides the shape, so that lengths on a GPU are waited for, and torch.compile breaks the
    graph; with lengths on the CPU nothing is waited for.

    Raises:
        TypeError: x is not a dense tensor, or lengths are not one of integers.
        ValueError: lengths are not [S], or one is negative or greater than `longest`.

    Cost per element: reads and writes the elements of the result once.
    """
    check_tensor("x", x)
    check_counts("lengths", lengths, "[S] for x [S, longest, …]")
    if x.dim() < 2 or x.shape[0] != lengths.shape[0]:
        raise ScanValueError(
            f"x has shape {list(x.shape)} and lengths {list(lengths.shape)}, expected "
            "[S, longest, …] and [S]; of offsets, lengths are assocscan.lengths_of(offsets)"
        )
    longest = x.shape[1]
    read = lengths.detach().to("cpu", torch.int64)
    wrong = ((read < 0) | (read > longest)).nonzero()
    if len(wrong):
        k = int(wrong[0])
        raise ScanValueError(
            f"lengths[{k}] is {int(read[k])}, expected 0 to {longest}: x has shape {list(x.shape)}"
        )
    offsets = summed(lengths)
    place = places(offsets.to(x.device), int(read.sum()), longest)
    return x.flatten(0, 1).index_select(0, place), offsets


def summed(lengths: Tensor) -> Tensor:
    """0 and the running sum."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))


def places(offsets: Tensor, length: int, longest: int) -> Tensor:
    """Where each of the `length` packed steps stands among S rows of `longest` steps."""
    position = torch.arange(length, device=offsets.device)
    sequence = sequence_of_steps(offsets, length)
    return position - offsets[sequence] + sequence * longest


def check_boundaries(offsets: Tensor) -> None:
    check_counts("offsets", offsets, "[S + 1] for S sequences")
    if offsets.shape[0] == 0:
        raise ScanValueError("offsets have shape [0], expected [S + 1] for S sequences")


def check_counts(name: str, counts: Tensor, shape: str) -> None:
    """Raise where these are no integers of one dimension."""
    check_tensor(name, counts)
    if counts.dtype not in INTEGERS:
        is_mask = name == "lengths" and counts.dtype == torch.bool and counts.dim() == 2
        remedy = "mask.sum(1) for a mask [S, longest]" if is_mask else f"{name}.long()"
        raise ScanTypeError(f"{name} have dtype {counts.dtype}, expected integers: {remedy}")
    if counts.dim() != 1:
        raise ScanValueError(f"{name} have shape {list(counts.shape)}, expected {shape}")


def check_value(value: object, dtype: torch.dtype) -> None:
    """Raise where `value` is no number, or one that a tensor of this dtype would change."""
    if not isinstance(value, (bool, int, float, complex)):
        raise ScanTypeError(f"value is {shown(value)}, expected a number")
    try:
        if dtype.is_complex or (dtype.is_floating_point and not isinstance(value, complex)):
            held = torch.tensor(value, dtype=dtype).to(torch.complex128)
            fits = value - value != 0 or bool(held.isfinite())  # not finite, or held
        elif isinstance(value, complex):
            fits = False
        elif dtype == torch.bool:
            fits = value in (0, 1)
        else:
            limits = torch.iinfo(dtype)
            fits = limits.min <= value <= limits.max and value == int(value)
    except (RuntimeError, OverflowError):
        fits = False
    if not fits:
        raise ScanTypeError(f"value is {value!r}, which {dtype}, the dtype of x, cannot hold")
