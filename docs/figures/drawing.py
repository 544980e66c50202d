"""What the figures share: colours for light and dark pages, boxes, arrows, files.

Each figure is written twice, NAME.svg and NAME_dark.svg.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


class Colours(NamedTuple):
    text: str
    line: str
    box: str
    result: str
    series: tuple[str, ...]


LIGHT = Colours(
    "#1f2328", "#8c959f", "#eaeef2", "#cfe4ff",
    ("#0969da", "#54aeff", "#bc4c00", "#8250df", "#6e7781"),
)  # fmt: skip
DARK = Colours(
    "#d7dce2", "#7d8590", "#2b3138", "#174a80",
    ("#4da3ff", "#9ecbff", "#f0883e", "#c297ff", "#9da7b1"),
)  # fmt: skip


def both(name: str, draw: Callable[[Colours], Any]) -> None:
    """Write NAME.svg and NAME_dark.svg; `draw` makes a figure in the given colours."""
    for colours, suffix in ((LIGHT, ""), (DARK, "_dark")):
        settings = {
            "svg.hashsalt": name,  # the same file from run to run
            "font.family": "DejaVu Sans",
            "text.color": colours.text,
            "axes.labelcolor": colours.text,
            "axes.edgecolor": colours.line,
            "xtick.color": colours.text,
            "ytick.color": colours.text,
        }
        with plt.rc_context(settings):
            figure = draw(colours)
            path = HERE / f"{name}{suffix}.svg"
            figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
        # matplotlib leaves spaces at the ends of lines.
        text = path.read_text(encoding="utf-8")
        path.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", encoding="utf-8")


def empty(width: float, height: float, across: float, down: float) -> tuple[Any, Any]:
    """A figure without axes; its coordinates are 0 … across and, from the top, 0 … down."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, across), ylim=(down, 0))
    axes.axis("off")
    return figure, axes


def box(axes: Any, x: float, y: float, text: str, fill: str, line: str, width: float = 0.8) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": fill, "edgecolor": line}
    patch = matplotlib.patches.FancyBboxPatch((x - width / 2, y - 0.25), width, 0.5, **style)
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=11)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
