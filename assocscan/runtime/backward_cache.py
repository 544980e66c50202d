"""Executables of backward passes, kept for one forward scan by the strides of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base import forced_choices as overrides
from ..engines.base.executable import Executable
from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..errors import BackendError
from . import executable_cache as executables
from .call_keys import tensor_key

MAX_BACKWARD = 64  # entries of one forward scan; each has other needed gradients or strides


class CachedBackward:
    """The executable of a backward pass, run on `given`: the saved tensors, then the cotangents.

    places[i]: the index in `given` of the executable's tensor i; None where it has none.
    results[k]: the number of the executable's result (outputs, then finals) that is the gradient of
    tensor k; None where tensor k has no gradient.
    """

    def __init__(
        self, executable: Executable, places: Sequence[int | None], results: Sequence[int | None]
    ) -> None:
        self.executable, self.places, self.results = executable, places, results

    def run(self, given: Sequence[MaybeTensor]) -> list[MaybeTensor]:
        outputs, finals = self.executable.run(
            [None if k is None else given[k] for k in self.places]
        )
        if finals:
            outputs += finals
        return [None if k is None else outputs[k] for k in self.results]


def layout_key(needed: Sequence[bool], given: Sequence[MaybeTensor]) -> Any:
    """The key of a backward executable; None where it may not be used or kept.

    needed: which gradients are needed; given: the saved tensors and the cotangents. The forward
    scan fixes their shapes, but a hook on saved tensors may return others.
    """
    if torch.is_grad_enabled() or overrides.generation:
        return None
    kinds = tensor_key(given, with_grad=False)
    return None if kinds is None else (tuple(needed), kinds)


def as_different_objects(given: Sequence[MaybeTensor]) -> list[MaybeTensor]:
    """The tensors, none of which is the same object as another: `cached_backward` tells them apart
    by identity. Two of them may happen to be one tensor in this call; in a later call with the same
    key they may be two."""
    seen: set[int] = set()
    found: list[MaybeTensor] = []
    for t in given:
        found.append(t.detach() if t is not None and id(t) in seen else t)
        seen.add(id(t))
    return found


def cached_backward(
    backend: str,
    spec: ScanSpec[Any],
    tensors: Sequence[MaybeTensor],
    given: Sequence[MaybeTensor],
    results: Sequence[torch.Tensor],
    gradients: Sequence[MaybeTensor],
) -> CachedBackward | None:
    """The cache entry for the backward pass that was just run.

    None where the pass is not the adjoint's scan alone: where a gradient was summed over broadcast
    dimensions, or tensors were split into components.

    tensors, results: of the adjoint's scan; given: the saved tensors and the cotangents, as
    different objects.
    """
    places = [index_of(t, given) for t in tensors]
    numbers = [index_of(t, results) for t in gradients]
    if -1 in places or -1 in numbers:
        return None
    try:
        executable = executables.prepare(backend, spec, tensors)
    except BackendError:  # no kernel could be made, and the scan ran by torch operations
        return None
    return CachedBackward(executable, places, numbers)


def index_of(t: MaybeTensor, among: Sequence[MaybeTensor]) -> int | None:
    """The index of the same tensor object; None for None, −1 where it is not in the list."""
    if t is None:
        return None
    return next((k for k, other in enumerate(among) if other is t), -1)
