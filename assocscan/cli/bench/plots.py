"""One figure per suite: a panel for each group, a line or bars for each contender."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from .records import Record
from .report import grouped

COLUMNS, BAR_COLUMNS = 4, 2


def why_not() -> str | None:
    """Why nothing can be drawn; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install 'torch-assocscan[bench]')"
    return None


def draw(path: Path, suite: str, records: list[Record], device: str) -> bool:
    """Write the figure; False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    drawn = [r for r in records if r.ms is not None or r.error is not None]
    groups = grouped(drawn)
    if not groups:
        return False
    is_bars = not any(r.x for r in drawn)
    columns = min(BAR_COLUMNS if is_bars else COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    heights = [2.6] * rows
    if is_bars:
        sizes = [0.8 + 0.12 * (len(g) + len({r.x_name for r in g})) for g in groups.values()]
        heights = [max(sizes[k * columns : (k + 1) * columns]) for k in range(rows)]
    names = list(dict.fromkeys(r.contender for r in drawn))
    colours = {name: f"C{k % 10}" for k, name in enumerate(names)}
    figure, axes = plt.subplots(
        rows, columns, figsize=((5.2 if is_bars else 3.4) * columns, sum(heights) + 0.6),
        squeeze=False, layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for axis, (group, members) in zip(axes.flat, groups.items(), strict=False):
        axis.set_title(group, fontsize=8)
        axis.tick_params(which="both", labelsize=7)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        (bars if is_bars else lines)(axis, members, colours)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    handles = [plt.Line2D([], [], color=colours[n], marker="o", markersize=3) for n in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), fontsize=8,
                  frameon=False)  # fmt: skip
    figure.suptitle(f"{suite}: {device}", fontsize=10)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return True


def lines(axis: Any, members: list[Record], colours: dict[str, str]) -> None:
    """Milliseconds (or errors) over the group's axis, both logarithmic; bands are quantiles."""
    for name in dict.fromkeys(r.contender for r in members):
        line = sorted((r for r in members if r.contender == name), key=lambda r: r.x)
        xs = [r.x for r in line]
        if line[0].error is not None:
            axis.plot(xs, [r.error for r in line], "o", color=colours[name], markersize=4)
            continue
        axis.plot(xs, [r.ms for r in line], "o-", color=colours[name], markersize=3, linewidth=1.2)
        low, high = [r.ms_low for r in line], [r.ms_high for r in line]
        axis.fill_between(xs, low, high, color=colours[name], alpha=0.15, linewidth=0)
    copies = {r.x: r.copy_ms for r in reversed(members) if r.copy_ms is not None}
    if copies:
        places = sorted(copies)
        axis.plot(places, [copies[x] for x in places], "--", color="0.6", linewidth=1)
        axis.annotate("copy", (places[-1], copies[places[-1]]), fontsize=7, color="0.4")
    axis.set_yscale("log")
    if members[0].error is None:
        axis.set_xscale("log", base=2)
    axis.set_xlabel(members[0].x_name, fontsize=8)
    axis.set_ylabel("error" if members[0].error is not None else "ms", fontsize=8)


def bars(axis: Any, members: list[Record], colours: dict[str, str]) -> None:
    """Fractions of copy, one bar for each contender of each thing that was timed."""
    things = list(dict.fromkeys(r.x_name for r in members))
    names = list(dict.fromkeys(r.contender for r in members))
    height = 0.8 / len(names)
    for r in members:
        place = things.index(r.x_name) + (names.index(r.contender) - (len(names) - 1) / 2) * height
        axis.barh(place, r.of_copy, height, color=colours[r.contender])
    axis.set_yticks(range(len(things)), things)
    axis.set_ylim(len(things) - 0.4, -0.6)
    axis.set_xlabel("fraction of copy", fontsize=8)
