"""Copies of chunks between host and GPU, on streams of their own beside the scans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ScanValueError
from ..pytrees import TreeSpec, flatten, leaf_paths, unflatten

Tensors = list[torch.Tensor]


@dataclass
class Chunk:
    """Tensors, and the event after which they may be read; None: at once."""

    tensors: Tensors
    spec: TreeSpec
    event: Any = None

    @property
    def tree(self) -> Any:
        return unflatten(self.tensors, self.spec)

    def wait(self) -> None:
        """Make the host wait until the tensors may be read, and their sources written."""
        if self.event is not None:
            self.event.synchronize()


class Copies:
    """Copies chunks to a device and results into buffers, at once. None: chunks stay where they
    are."""

    is_asynchronous = False

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def bring(self, chunk: Any) -> Chunk:
        """The chunk on the device."""
        leaves, spec = flatten(chunk)
        return Chunk([self.moved(t) for t in leaves], spec)

    def moved(self, t: Any) -> Any:
        """A leaf on the device; what is no tensor is left to the scan's own error."""
        return t.to(self.device) if self.device is not None and isinstance(t, torch.Tensor) else t

    def receive(self, chunk: Chunk) -> Any:
        """The chunk for the scan that comes next."""
        return chunk.tree

    def store(self, results: Any, buffer: Any, axis: int) -> Chunk:
        """The results in a buffer: in the front of it, where it is longer."""
        leaves, spec = flatten(results)
        places = fitted(leaves, spec, buffer, axis)
        for place, t in zip(places, leaves, strict=True):
            place.copy_(t)
        return Chunk(places, spec)


class GPUCopies(Copies):
    """Asynchronous copies, on one stream for each direction.

    Host memory should be pinned: the host waits for copies of other memory. Tensors that a stream
    reads are recorded on it, so that their memory is not given away before.
    """

    is_asynchronous = True
    device: torch.device

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def bring(self, chunk: Any) -> Chunk:
        """The copies are under way when this returns. Chunks that lie on the device may be the
        results of work on the current stream, which they wait for."""
        leaves, spec = flatten(chunk)
        if any(isinstance(t, torch.Tensor) and t.is_cuda for t in leaves):
            self.inward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.inward):
            moved = [
                t.to(self.device, non_blocking=True) if isinstance(t, torch.Tensor) else t
                for t in leaves
            ]
            return Chunk(moved, spec, self.inward.record_event())

    def receive(self, chunk: Chunk) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(chunk.event)
        for t in chunk.tensors:
            if isinstance(t, torch.Tensor) and t.is_cuda:
                t.record_stream(current)
        return chunk.tree

    def store(self, results: Any, buffer: Any, axis: int) -> Chunk:
        leaves, spec = flatten(results)
        places = fitted(leaves, spec, buffer, axis)
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            for place, t in zip(places, leaves, strict=True):
                place.copy_(t, non_blocking=True)
                t.record_stream(self.outward)
            return Chunk(places, spec, self.outward.record_event())


def copies_to(device: torch.device | None) -> Copies:
    """What copies chunks to this device."""
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return GPUCopies(torch.device("cuda", index))
    return Copies(device)


def fitted(results: Sequence[torch.Tensor], spec: TreeSpec, buffer: Any, axis: int) -> Tensors:
    """The tensors of a buffer, as long along the axis as the results are.

    Raises ScanValueError where the buffer has another structure, dtype or shape, or is shorter.
    """
    places, given = flatten(buffer)
    if given != spec:
        raise ScanValueError(
            f"a buffer of out has the leaves {', '.join(leaf_paths(given, 'out'))}, but the "
            f"results have {', '.join(leaf_paths(spec, 'out'))}"
        )
    fitting = []
    for path, place, t in zip(leaf_paths(spec, "out"), places, results, strict=True):
        cut = place
        if isinstance(place, torch.Tensor) and place.dim() == t.dim() > axis:
            cut = place.narrow(axis, 0, min(place.shape[axis], t.shape[axis]))
        if not isinstance(cut, torch.Tensor) or cut.shape != t.shape or cut.dtype != t.dtype:
            seen = (f"shape {list(place.shape)} and dtype {place.dtype}"
                    if isinstance(place, torch.Tensor) else type(place).__name__)  # fmt: skip
            raise ScanValueError(
                f"{path} has {seen}, but the result has shape {list(t.shape)} and dtype {t.dtype}; "
                f"only along axis {axis} a buffer may be longer"
            )
        fitting.append(cut)
    return fitting
