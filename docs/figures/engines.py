"""An axis in four tiles: three passes, and one pass.

python docs/figures/engines.py
"""

from typing import Any

from drawing import Colours, arrow, both, box, empty

TILES = ((3, 1), (4, 1), (5, 9), (2, 6))


def label(axes: Any, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="left", va="center", fontsize=10)


def row(axes: Any, c: Colours, y: float, texts: list[str], fill: str, width: float = 1.1) -> None:
    for k, text in enumerate(texts):
        box(axes, 0.8 + 1.4 * k, y, text, fill, c.line, width)


def down(axes: Any, c: Colours, y: float) -> None:
    for k in range(4):
        arrow(axes, (0.8 + 1.4 * k, y + 0.27), (0.8 + 1.4 * k, y + 0.93), c.series[0])


def across(axes: Any, c: Colours, y: float) -> None:
    for k in range(3):
        arrow(axes, (1.37 + 1.4 * k, y), (1.63 + 1.4 * k, y), c.series[2])


def draw(c: Colours) -> Any:
    tiles = [f"{a}  {b}" for a, b in TILES]
    totals = [a + b for a, b in TILES]
    carries = [sum(totals[:k]) for k in range(4)]
    results = [f"{n + a}  {n + a + b}" for n, (a, b) in zip(carries, TILES, strict=True)]

    figure, axes = empty(8.5, 6.2, 9.6, 7.9)
    axes.text(0.2, 0.2, "multipass: three passes", fontsize=12, weight="bold")
    row(axes, c, 0.9, tiles, c.box)
    label(axes, 5.9, 0.9, "the inputs, in four tiles")
    down(axes, c, 0.9)
    row(axes, c, 2.1, list(map(str, totals)), c.box)
    label(axes, 5.9, 2.1, "1. the total of each tile")
    down(axes, c, 2.1)
    row(axes, c, 3.3, list(map(str, carries)), c.box)
    across(axes, c, 3.3)
    label(axes, 5.9, 3.3, "2. scan the totals: the carries")
    down(axes, c, 3.3)
    row(axes, c, 4.5, results, c.result)
    label(axes, 5.9, 4.5, "3. read again, scan from the carry")

    axes.text(0.2, 5.5, "single pass", fontsize=12, weight="bold")
    row(axes, c, 6.2, tiles, c.box)
    across(axes, c, 6.2)
    label(axes, 5.9, 6.2, "the carry goes from tile to tile")
    down(axes, c, 6.2)
    row(axes, c, 7.4, results, c.result)
    label(axes, 5.9, 7.4, "each input was read once")
    return figure


if __name__ == "__main__":
    both("engines", draw)
