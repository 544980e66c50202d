"""How contenders look in figures: ours first, each in a colour of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..cases import OURS
from .records import Record

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# After these their lighter and darker shades: how far towards which grey.
SHADES = ((0.0, 0.0), (0.55, 1.0), (0.45, 0.15))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
WIDEST, THINNEST = 3.0, 1.3  # points
LARGEST, SMALLEST = 8.0, 4.5  # markers


class Style(NamedTuple):
    """How a contender looks in every panel of a suite."""

    colour: str
    marker: str
    dashes: Any
    width: float
    size: float


def styles_of(records: list[Record]) -> dict[str, Style]:
    """A style for each contender, ours first: so `assocscan` looks the same in every figure.

    Lines and markers get smaller from one to the next, and most lines are dashed: equal curves show
    each other at their edges and gaps.
    """
    names = list(dict.fromkeys(r.contender for r in sorted(records, key=lambda r: r.kind != OURS)))
    last = max(len(names) - 1, 1)
    return {
        name: Style(
            colour_of(k), MARKERS[k % len(MARKERS)], DASHES[k % len(DASHES)],
            WIDEST - (WIDEST - THINNEST) * k / last, LARGEST - (LARGEST - SMALLEST) * k / last,
        )
        for k, name in enumerate(names)
    }  # fmt: skip


def colour_of(k: int) -> str:
    """The k-th colour: no two of the first 21 are equal."""
    colour = COLOURS[k % len(COLOURS)]
    share, grey = SHADES[k // len(COLOURS) % len(SHADES)]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round((1 - share) * p + share * 255 * grey):02X}" for p in parts)
