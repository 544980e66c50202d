"""Which kernel and which tile, from the shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .choice import Choice, Shape
from .kernel import LanesTile
from .lanes_tuning import choose_lanes
from .rows_tuning import choose_rows

_FORCED: ContextVar[Choice | None] = ContextVar("forced_choice", default=None)


@contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Scans inside use this choice where tensors lie as it wants; for tests and measurements."""
    token = _FORCED.set(choice)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced_choice() -> Choice | None:
    return _FORCED.get()


def choose(shape: Shape) -> Choice:
    """The kernel, tile and number of blocks per chain for a shape."""
    known = _FORCED.get()
    if known is not None and isinstance(known.tile, LanesTile) == shape.lanes:
        return known
    return choose_lanes(shape) if shape.lanes else choose_rows(shape)
