"""The backward of the C++ runner's autograd node where it needs Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engines.base.scan_spec import MaybeTensor
from ..autograd import Differentiable, Scan
from ..backward_cache import layout_key
from . import runner
from .programs import program_of


class Context:
    """What `Scan.backward` reads of an autograd context."""

    def __init__(
        self, scan: Differentiable, saved: Sequence[MaybeTensor], needed: Sequence[bool]
    ) -> None:
        self.scan, self.saved_tensors, self.needs_input_grad = scan, saved, (False, *needed)


def backward(
    scan: Any,
    gradient: Any,
    saved: tuple[MaybeTensor, ...],
    needed: tuple[bool, ...],
    cotangents: tuple[MaybeTensor, ...],
) -> tuple[MaybeTensor, ...]:
    """The gradient of each tensor. If Python has kept the executable of this backward pass, the
    runner gets it too.

    scan: a `Differentiable` that keeps its executables in `backward`.
    gradient: what the runner's nodes of one call share.
    """
    found = Scan.backward(Context(scan, saved, needed), *cotangents)[1:]
    given = (*saved, *cotangents)
    key = layout_key(needed, given)
    known = None if key is None else scan.backward.get(key)
    if known is not None:
        program = program_of(runner.module, known.executable)
        if program is not None:
            runner.module.keep_backward(
                gradient, needed, given, program, numbered(known.places), numbered(known.results)
            )
    return found


def numbered(places: Sequence[int | None]) -> tuple[int, ...]:
    """−1 in the place of None."""
    return tuple([-1 if k is None else k for k in places])
