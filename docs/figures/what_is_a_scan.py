"""Running totals of four numbers: by a loop, and in parallel.

python docs/figures/what_is_a_scan.py
"""

from typing import Any

from drawing import Colours, arrow, both, box, empty

INPUTS = (3, 1, 4, 1)
TOTALS = (3, 4, 8, 9)


def loop(axes: Any, c: Colours, left: float) -> None:
    """One addition in each row."""
    axes.text(left + 1.5, 0.15, "a loop: 3 steps", ha="center", fontsize=12, weight="bold")
    rows = [INPUTS]
    for t in range(1, 4):
        rows.append((*TOTALS[: t + 1], *INPUTS[t + 1 :]))
    for step, row in enumerate(rows):
        y = 0.9 + 1.2 * step
        for t, value in enumerate(row):
            done = step > 0 and t <= step
            box(axes, left + t, y, str(value), c.result if done or t == 0 else c.box, c.line)
            if step and t == step:
                arrow(axes, (left + t - 1, y - 0.95), (left + t - 0.15, y - 0.27), c.series[0])
                arrow(axes, (left + t, y - 0.95), (left + t, y - 0.27), c.series[0])


def parallel(axes: Any, c: Colours, left: float) -> None:
    """Each row adds what stood 1, then 2 places before."""
    axes.text(left + 1.5, 0.15, "in parallel: 2 steps", ha="center", fontsize=12, weight="bold")
    rows, distances = [INPUTS], (1, 2)
    for distance in distances:
        last = rows[-1]
        before = (0,) * distance + last[:-distance]
        rows.append(tuple(v + b for v, b in zip(last, before, strict=True)))
    assert rows[-1] == TOTALS
    for step, row in enumerate(rows):
        y = 0.9 + 1.8 * step
        for t, value in enumerate(row):
            done = value == TOTALS[t] and (step == 2 or t < 2**step)
            box(axes, left + t, y, str(value), c.result if done else c.box, c.line)
            if step and t >= distances[step - 1]:
                begin = left + t - distances[step - 1]
                arrow(axes, (begin, y - 1.55), (left + t - 0.15, y - 0.27), c.series[0])
                arrow(axes, (left + t, y - 1.55), (left + t, y - 0.27), c.series[0])


def draw(c: Colours) -> Any:
    figure, axes = empty(9, 4, 9.5, 5)
    loop(axes, c, 0.6)
    parallel(axes, c, 5.6)
    return figure


if __name__ == "__main__":
    both("what_is_a_scan", draw)
