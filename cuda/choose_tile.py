"""The choice of the kernel, its mode and its tile, from the shape."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ..engines.base.forced_choices import Override
from .kernel import LanesTile
from .lanes_tiles import choose_lanes
from .rows_tiles import choose_rows
from .tile_choice_inputs import Choice, Shape
from .walk.tile import choose_walk

_OVERRIDE: Override[Choice] = Override()


def forced(choice: Choice) -> AbstractContextManager[None]:
    """In the `with` block, use this choice for all scans of its kind (lanes or rows); for tests and
    measurements."""
    return _OVERRIDE.forced(choice)


def choose(shape: Shape) -> Choice:
    """The tile, mode and group size for a shape."""
    known = _OVERRIDE.current
    if known is not None and (isinstance(known.tile, LanesTile), known.mode == "WALKED") == (
        shape.lanes, shape.walked,
    ):  # fmt: skip
        return known
    if shape.walked:
        return choose_walk(shape)
    return choose_lanes(shape) if shape.lanes else choose_rows(shape)
