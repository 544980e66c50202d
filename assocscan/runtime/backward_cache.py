"""Backward passes that are one executable, kept by the layout of what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base import forced_choices as overrides
from ..engines.base.executable import Executable
from ..engines.base.spec import Optional, ScanSpec
from ..errors import BackendError
from ..torch_state import needs_dispatcher
from . import executable_cache as executables

MAX_BACKWARD = 64  # of one forward scan: by which gradients are wanted, and how cotangents lie


class CachedBackward:
    """An executable whose tensors are among those that were saved and the cotangents.

    places: of its tensors among them, None where one is not read; results: for each gradient the
    number of its result, None where there is no gradient.
    """

    def __init__(
        self, executable: Executable, places: Sequence[int | None], results: Sequence[int | None]
    ) -> None:
        self.executable, self.places, self.results = executable, places, results

    def run(self, given: Sequence[Optional]) -> list[Optional]:
        outputs, finals = self.executable.run(
            [None if k is None else given[k] for k in self.places]
        )
        if finals:
            outputs += finals
        return [None if k is None else outputs[k] for k in self.results]


def layout_key(needed: Sequence[bool], given: Sequence[Optional]) -> Any:
    """What a backward executable depends on, beside the forward scan: which gradients are needed,
    dtypes and strides of what was saved and of the cotangents. None where it is not to be kept."""
    if torch.is_grad_enabled() or needs_dispatcher() or overrides.generation:
        return None
    parts: list[Any] = [tuple(needed)]
    for t in given:
        if t is None:
            parts.append(None)
        elif type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_conj() or t.is_neg():
            return None
        else:
            parts += (t.dtype, t.stride())
    return tuple(parts)


def cached_backward(
    backend: str,
    spec: ScanSpec[Any],
    tensors: Sequence[Optional],
    given: Sequence[Optional],
    results: Sequence[torch.Tensor],
    gradients: Sequence[Optional],
) -> CachedBackward | None:
    """The backward pass that was just run, for later ones; None where it computes more than the
    adjoint's scan: gradients that are summed, components that are taken apart.

    tensors, results: of the adjoint's scan; given: what was saved, and the cotangents.
    """
    places = [index_of(t, given) for t in tensors]
    numbers = [index_of(t, results) for t in gradients]
    if -1 in places or -1 in numbers:
        return None
    try:
        executable = executables.prepare(backend, spec, tensors)
    except BackendError:  # torch operations ran instead
        return None
    return CachedBackward(executable, places, numbers)


def index_of(t: Optional, among: Sequence[Optional]) -> int | None:
    """The place of this very tensor; None for None, −1 where it is not among them."""
    if t is None:
        return None
    return next((k for k, other in enumerate(among) if other is t), -1)
