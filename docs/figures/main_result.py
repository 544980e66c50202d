"""The main result: a linear recurrence on a GPU, as a fraction of a copy.

python docs/figures/main_result.py

The figures are those of the run `recurrence`. Points whose times, or those of their copy, varied by
more than MOST_SPREAD of the median are hollow.
"""

from typing import Any

import matplotlib.pyplot as plt
from drawing import Colours, both
from tables import GPU, MOST_SPREAD

RUN = "recurrence"
GROUPS = {
    "(8, L, 1536) bfloat16, forward": "without gradient",
    "(8, L, 1536) bfloat16, forward and backward": "with gradient (forward and backward)",
}
SERIES = {
    "assocscan": "assocscan, (8, L, 1536)",
    "assocscan, rows": "assocscan, (8, 1536, L)",
    "accelerated-scan": "accelerated-scan, (8, 1536, L)",
    "fpscan": "fpscan, (8, 1536, L)",
    "fla chunk": "fla chunk_hgrn, (8, L, 1536)",
}


def read() -> dict[tuple[str, str], list[tuple[float, float, bool]]]:
    """Points (L, of copy, whether it varied) by group and contender."""
    points: dict[tuple[str, str], list[tuple[float, float, bool]]] = {}
    for row in GPU.read(RUN):
        if row["of_copy"] and row["group"] in GROUPS and row["contender"] in SERIES:
            key = row["group"], row["contender"]
            varied = max(float(row["spread"]), float(row["copy_spread"])) > MOST_SPREAD
            point = float(row["x"]), float(row["of_copy"]), varied
            points.setdefault(key, []).append(point)
    return {key: sorted(values) for key, values in points.items()}


def draw(c: Colours) -> Any:
    points = read()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axes, (group, title) in zip(panels, GROUPS.items(), strict=True):
        for colour, (contender, name) in zip(c.series, SERIES.items(), strict=True):
            if (group, contender) not in points:
                continue
            x, y, varied = zip(*points[group, contender], strict=True)
            ours = contender.startswith("assocscan")
            axes.plot(x, y, color=colour, label=name, linewidth=2.2 if ours else 1.4)
            for at, speed, hollow in zip(x, y, varied, strict=True):
                axes.plot(at, speed, "o", color=colour, markersize=6 if hollow else 3,
                          markerfacecolor="none" if hollow else colour)  # fmt: skip
        axes.axhline(1, color=c.line, linewidth=1, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="number of steps L", ylim=(0, 1.1))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(GPU.title(RUN), fontsize=10, color=c.text)
    panels[0].set_ylabel("speed (1: as fast as a copy)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    both("main_result", draw)
