"""How each engine cuts the work: engine_walk, engine_multipass and engine_single_pass.

python docs/figures/engines.py
"""

from typing import Any

from drawing import Colours, arrow, both, box, empty

TILES = ((3, 1), (4, 1), (5, 9), (2, 6))
TEXTS = [f"{a}  {b}" for a, b in TILES]
TOTALS = [a + b for a, b in TILES]
CARRIES = [sum(TOTALS[:k]) for k in range(4)]
RESULTS = [f"{n + a}  {n + a + b}" for n, (a, b) in zip(CARRIES, TILES, strict=True)]
WIDTH, DISTANCE = 1.1, 1.4


def place(k: int) -> float:
    return 0.8 + DISTANCE * k


def row(axes: Any, c: Colours, y: float, texts: list[str], fill: str, said: str) -> None:
    for k, text in enumerate(texts):
        box(axes, place(k), y, text, fill, c.line, WIDTH)
    axes.text(5.9, y, said, ha="left", va="center", fontsize=10)


def down(axes: Any, c: Colours, y: float) -> None:
    for k in range(4):
        arrow(axes, (place(k), y + 0.27), (place(k), y + 0.93), c.series[0])


def across(axes: Any, c: Colours, y: float) -> None:
    for k in range(3):
        arrow(axes, (place(k) + WIDTH / 2, y), (place(k + 1) - WIDTH / 2, y), c.series[2])


def walk(c: Colours) -> Any:
    """Three rows, each with a program that goes from tile to tile."""
    figure, axes = empty(8.5, 2.2, 9.6, 2.7)
    for k in range(3):
        y = 0.4 + 0.9 * k
        row(axes, c, y, [f"tile {t}" for t in range(4)], c.box, f"program {k} walks row {k}")
        across(axes, c, y)
    return figure


def multipass(c: Colours) -> Any:
    figure, axes = empty(8.5, 3.6, 9.6, 4.5)
    row(axes, c, 0.4, TEXTS, c.box, "the inputs of one row, in tiles")
    down(axes, c, 0.4)
    row(axes, c, 1.6, list(map(str, TOTALS)), c.box, "1. the total of each tile")
    down(axes, c, 1.6)
    row(axes, c, 2.8, list(map(str, CARRIES)), c.box, "2. scan the totals: the carries")
    across(axes, c, 2.8)
    down(axes, c, 2.8)
    row(axes, c, 4.0, RESULTS, c.result, "3. read again, scan from the carry")
    return figure


def single_pass(c: Colours) -> Any:
    figure, axes = empty(8.5, 1.7, 9.6, 2.1)
    row(axes, c, 0.4, TEXTS, c.box, "blocks hand the carry on")
    across(axes, c, 0.4)
    down(axes, c, 0.4)
    row(axes, c, 1.6, RESULTS, c.result, "each input was read once")
    return figure


if __name__ == "__main__":
    both("engine_walk", walk)
    both("engine_multipass", multipass)
    both("engine_single_pass", single_pass)
