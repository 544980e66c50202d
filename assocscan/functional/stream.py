"""`stream`: a scan of data that comes in chunks, with the carry kept between them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from ..api.bind_arguments import batch_axis, resolve_operator
from ..api.flags_and_backends import checked_backend, flag
from ..errors import ScanTypeError, ScanValueError
from ..monoids.call_errors import checked_call
from ..monoids.leaf_checks import check_leaves
from ..monoids.leaf_names import LeafNames
from ..pytrees import flatten, leaf_paths
from ..wording import is_of_numpy, shown
from .argument_errors import named_scan
from .chunk_copies import Chunk, Copies, copies_to


@checked_call
def stream(
    op: Any,
    chunks: Iterable[Any],
    axis: int = 0,
    *,
    init: Any = None,
    inclusive: bool = True,
    device: torch.device | str | None = None,
    out: Iterable[Any] | None = None,
    backend: str | None = "auto",
) -> Generator[Any, None, Any]:
    """The scan of a sequence that comes in chunks: yields the scanned chunks, one by one.

        y[t] = x[0] ∘ x[1] ∘ … ∘ x[t],   t over all chunks, one after the other

    >>> import torch, assocscan
    >>> chunks = torch.arange(1, 7).split(2)
    >>> [y.tolist() for y in assocscan.stream("sum", chunks)]
    [[1, 3], [6, 10], [15, 21]]

    The generator's return value is the carry that leaves the last chunk:

    >>> def scanned():
    ...     final = yield from assocscan.stream("sum", chunks)
    ...     print("the sum is", final.item())
    >>> ys = list(scanned())
    the sum is 21

    op, axis, init, inclusive, backend: as in `associative_scan`; init enters the first chunk.
    chunks: an iterable of what `associative_scan` takes as xs, all of the same dtypes and shapes
        but for their lengths. Of a NumPy array, a memory map too: (torch.from_numpy(x[k : k + n])
        for k in range(0, len(x), n)).
    device: where the scans run; None: where the chunks are. On a GPU the next chunk is copied there
        while one is scanned, at the full speed of the link if it lies in pinned memory.
    out: an iterable of buffers in the structure of the results, one for each chunk, that receive
        the results and are yielded in their place, cut to the result's length along the axis. With
        device they are copied while the next chunk is scanned.

    So that data larger than a GPU's memory, and than the host's, can be scanned, memory may be used
    again: with a GPU a chunk is read until the next but one is asked for, and a buffer is written
    until it is yielded. Two chunks of host memory and two buffers, used in turn, are enough.
    Elsewhere a chunk is read before the next one is asked for.

    Raises TypeError and ValueError for arguments that do not fit, at the call where that can be
    known; what `associative_scan` raises for a chunk; ValueError where `out` ends before the chunks
    and where a buffer does not fit. The return value is init where there are no chunks.

    Cost: that of the scans; on a GPU the memory of three chunks and of two results.
    """
    resolve_operator(op, chunks)
    if is_of_numpy(chunks) and hasattr(chunks, "__array__"):
        raise ScanTypeError(
            f"chunks is {shown(chunks)}, expected an iterable of chunks of tensors: "
            f"torch.from_numpy(chunks).split(n, {axis})"
        )
    if isinstance(chunks, torch.Tensor) or not isinstance(chunks, Iterable):
        hint = f": chunks.split(n, {axis})" if isinstance(chunks, torch.Tensor) else ""
        raise ScanTypeError(f"chunks is {shown(chunks)}, expected an iterable of chunks{hint}")
    if out is not None and (isinstance(out, torch.Tensor) or not isinstance(out, Iterable)):
        raise ScanTypeError(f"out is {shown(out)}, expected an iterable of buffers")
    options = {"inclusive": flag("inclusive", inclusive), "backend": checked_backend(backend, None)}
    copies = copies_to(None if device is None else device_of(device))
    scans = Scans(op, axis, init, options)
    return run(scans, ahead(iter(chunks), copies), copies, None if out is None else iter(out))


def device_of(device: Any) -> torch.device:
    """The device that is meant. Raises ScanTypeError and ScanValueError where none is."""
    expected = 'expected a torch.device or the name of one, as "cuda"'
    if not isinstance(device, (torch.device, str, int)):
        raise ScanTypeError(f"device is {shown(device)}, {expected}")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ScanValueError(f"device is {shown(device)}, {expected}") from None


class Scans:
    """The scans of the chunks: each takes the carry that the one before left."""

    def __init__(self, op: Any, axis: int, init: Any, options: dict[str, Any]) -> None:
        self.op, self.axis, self.carry, self.options = op, axis, init, options
        self.number, self.first = -1, ""  # of the chunk; a description of the first one

    def scan(self, xs: Any) -> tuple[Any, int]:
        """The scanned chunk, and its axis, not negative."""
        self.number += 1
        refuse_arrays(xs, self.number)
        names = LeafNames({"xs": f"chunk {self.number}"})
        axis = positive_axis(self.op, xs, self.axis, names)
        described = "; ".join(
            f"{str(t.dtype).removeprefix('torch.')} "
            f"{['…' if d == axis else n for d, n in enumerate(t.shape)]}".replace("'", "")
            for t in flatten(xs)[0]
        )
        self.first = self.first or described
        if described != self.first:
            raise ScanValueError(
                f"chunk {self.number} is {described}, but the first chunk is {self.first} "
                "(… is the axis); chunks are parts of one sequence"
            )
        if self.carry is None and any(t.shape[axis] == 0 for t in flatten(xs)[0]):
            # Nothing entered yet, and nothing leaves; no identity is needed.
            return named_scan(names, self.op, xs, self.axis, **self.options), axis
        ys, self.carry = named_scan(
            names, self.op, xs, self.axis, init=self.carry, return_final=True, **self.options
        )
        return ys, axis


def refuse_arrays(xs: Any, number: int) -> None:
    """Raise ScanTypeError for a chunk of NumPy arrays."""
    leaves, spec = flatten(xs)
    for path, leaf in zip(leaf_paths(spec, f"chunk {number}"), leaves, strict=True):
        if is_of_numpy(leaf):
            alone = len(leaves) == 1 and path == f"chunk {number}"
            example = "torch.from_numpy(x) for x in chunks"
            example = example if alone else "tuple(map(torch.from_numpy, xs)) for xs in chunks"
            raise ScanTypeError(
                f"{path} is {shown(leaf)}, expected a tensor; pass chunks of tensors: ({example})"
            )


def positive_axis(op: Any, xs: Any, axis: int, names: LeafNames) -> int:
    """The axis as a non-negative index. Raises what the scan would raise for these xs."""
    operator = resolve_operator(op, xs)
    leaves, spec = flatten(xs)
    check_leaves(leaves, spec, names)
    return batch_axis(operator, axis, leaves, spec, names)[0]


def ahead(chunks: Iterator[Any], copies: Copies) -> Iterator[Chunk]:
    """The chunks on the device, each with the copy of the next one under way.

    Where copies take their time, a chunk's has ended before the next but one is asked for.
    """
    waiting: Chunk | None = None
    for chunk in chunks:
        brought = copies.bring(chunk)
        if not copies.is_asynchronous:
            yield brought
            continue
        if waiting is not None:
            yield waiting
            waiting.wait()
        waiting = brought
    if waiting is not None:
        yield waiting


def run(
    scans: Scans, chunks: Iterator[Chunk], copies: Copies, buffers: Iterator[Any] | None
) -> Generator[Any, None, Any]:
    """The generator that `stream` returns."""
    storing: Chunk | None = None  # the results before, on their way into a buffer
    for number, chunk in enumerate(chunks):
        ys, axis = scans.scan(copies.receive(chunk))
        if buffers is None:
            yield ys
            continue
        buffer = next(buffers, buffers)
        if buffer is buffers:
            raise ScanValueError(f"out ended after {number} buffers, but there are more chunks")
        stored = copies.store(ys, buffer, axis)
        if not copies.is_asynchronous:
            yield stored.tree
            continue
        if storing is not None:
            storing.wait()
            yield storing.tree
        storing = stored
    if storing is not None:
        storing.wait()
        yield storing.tree
    return scans.carry
