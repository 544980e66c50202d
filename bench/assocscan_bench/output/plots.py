"""Figures of a suite: a panel for each group, a line or bars for each contender.

A figure is as wide as the text of a page and at most as high; a suite that needs more room has more
figures. Curves that lie on one another are named below their panel. What the table marks, times or
copies that varied and copies that were held up, is hollow or pale, and a line below the title says
so.
"""

from __future__ import annotations

import importlib.util
import math
import textwrap
from pathlib import Path
from typing import Any

from .records import Record
from .report import MOST_OF_COPY, MOST_SPREAD, grouped, is_copy_slow, is_flagged, varies
from .styles import Style, styles_of

WIDTH, HEIGHT = 7.0, 9.5  # inches
PANEL_HEIGHT, BAR_HEIGHT, HIGHEST_BAR = 2.3, 0.15, 0.3
AROUND = 0.75  # of the height of a panel, for its title and axis
WIDE = 100  # errors that differ by more are bars on a logarithmic axis
GAP = 0.4  # between the bars of two things, in heights of a bar
LETTERS = 13  # per inch of a line below a panel
TITLE = 90  # letters of a line above the figure
LONG = 26  # letters beside a bar: the panel is then as wide as the page
SMALL, TINY = 8, 7  # points
FEW_SIZES, MANY = 2, 6  # contenders at so few sizes are bars
PALE = 0.4  # of the colour of bars that the table marks
NEAR = 0.012  # of a panel's height: curves no further apart lie on one another

Panel = tuple[str, list[Record]]


def why_not() -> str | None:
    """Why nothing can be drawn; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (python -m pip install matplotlib)"
    return None


def draw(folder: Path, name: str, records: list[Record], origin: str) -> list[Path]:
    """Write `<name>.png`, and `<name>-2.png` and so on where one is not enough.

    origin: where and when it was measured, for the titles.
    """
    drawn = [r for r in records if r.is_measured]
    groups = list(grouped(drawn).items())
    if not groups or why_not() is not None:
        return []
    import matplotlib

    matplotlib.use("agg")
    styles = styles_of(drawn)
    pages, paths = pages_of(groups), []
    for k, page in enumerate(pages):
        path = folder / (f"{name}-{k + 1}.png" if k else f"{name}.png")
        number = f", {k + 1} of {len(pages)}" if len(pages) > 1 else ""
        draw_page(path, f"{name}: {origin}{number}", page, styles)
        paths.append(path)
    return paths


def pages_of(groups: list[Panel]) -> list[list[list[Panel]]]:
    """The panels in rows, and the rows on pages: two in a row, or one where its labels are long."""
    labels = [label(r) for _, members in groups if is_bars(members) for r in members]
    columns = 1 if max(map(len, labels), default=0) > LONG or len(groups) == 1 else 2
    rows = [groups[k : k + columns] for k in range(0, len(groups), columns)]
    pages: list[list[list[Panel]]] = [[]]
    for row in rows:
        used = sum(height_of(r) for r in pages[-1])
        if pages[-1] and used + height_of(row) > HEIGHT - 1:
            pages.append([])
        pages[-1].append(row)
    return pages


def draw_page(path: Path, title: str, rows: list[list[Panel]], styles: dict[str, Style]) -> None:
    from matplotlib import pyplot as plt

    groups = [panel for row in rows for panel in row]
    in_lines = {r.contender for _, members in groups if not is_bars(members) for r in members}
    names = [name for name in styles if name in in_lines]
    entries = (
        ["copy of the same bytes"] if any(r.ms for _, g in groups for r in g) and names else []
    )
    across = legend_columns([*names, *entries])
    below = 0.2 * math.ceil((len(names) + len(entries)) / across)
    heights = [height_of(row) for row in rows]
    figure, axes = plt.subplots(
        len(rows), len(rows[0]), figsize=(WIDTH, sum(heights) + 0.4 + below), squeeze=False,
        layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for axis, (group, members) in zip(axes.flat, groups, strict=False):
        if len(groups) > 1 or group != "all":
            axis.set_title(group, fontsize=SMALL)
        axis.tick_params(which="both", labelsize=TINY)
        axis.xaxis.get_offset_text().set_fontsize(TINY)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        if is_bars(members):
            row = next(row for row in rows if any(members is m for _, m in row))
            lowest = (height_of(row) - AROUND) / HIGHEST_BAR
            bars(axis, members, styles, max(lowest, *(slots(m) for _, m in row)))
        else:
            lines(axis, members, styles)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    if names:
        handles = [
            plt.Line2D([], [], color=s.colour, marker=s.marker, markersize=s.size,
                       markeredgecolor="white", markeredgewidth=0.5, linestyle=s.dashes,
                       linewidth=s.width) for s in (styles[n] for n in names)
        ]  # fmt: skip
        if entries:
            handles.append(plt.Line2D([], [], color="0.6", linestyle="--", linewidth=1))
        figure.legend(handles, [*names, *entries], loc="outside lower center", ncols=across,
                      fontsize=TINY, frameon=False, handlelength=3)  # fmt: skip
    flags = flags_of([r for _, members in groups for r in members])
    figure.suptitle("\n".join([*textwrap.wrap(title, TITLE), *textwrap.wrap(flags, TITLE)]),
                    fontsize=SMALL + 1)  # fmt: skip
    fit_texts(figure)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def flags_of(records: list[Record]) -> str:
    """What the marks of flagged figures mean; empty where there are none."""
    said = []
    if any(varies(r.spread) or varies(r.copy_spread) for r in records):
        said.append(
            f"hollow, or pale with ±: the time or its copy varied by over {MOST_SPREAD:.0%}"
        )
    if any(map(is_copy_slow, records)):
        said.append(f"slow copy: over {MOST_OF_COPY:g} of copy, so that the copy was held up")
    return "; ".join(said)


def fit_texts(figure: Any) -> None:
    """Break titles and labels that are wider than their panel; after a comma, if that is enough."""
    figure.canvas.draw()
    shown = [axis for axis in figure.axes if axis.get_visible()]
    for axis, text in [(a, t) for a in shown for t in (a.title, a.xaxis.label)]:
        words = text.get_text()
        if not words or "\n" in words:
            continue
        share = axis.get_window_extent().width / text.get_window_extent().width
        if share >= 1:
            continue
        letters = max(int(len(words) * share), 1)
        first, _, second = words.rpartition(", ")
        if first and max(len(first) + 1, len(second)) <= letters:
            text.set_text(f"{first},\n{second}")
        else:
            text.set_text(textwrap.fill(words, letters))


def legend_columns(names: list[str]) -> int:
    """How many entries fit side by side into the width of the figure."""
    widest = max((len(n) for n in names), default=0) * 0.06 + 0.75  # inches
    return max(1, min(len(names), int(WIDTH / widest)))


def is_bars(members: list[Record]) -> bool:
    """Whether lines would be points: one size only, or many contenders at two."""
    sizes = {r.x for r in members}
    contenders = {r.contender for r in members}
    return len(sizes) == 1 or (len(sizes) <= FEW_SIZES and len(contenders) > MANY)


def slots(members: list[Record]) -> float:
    """Heights of a bar that a panel of bars needs; 0 for lines."""
    if not is_bars(members):
        return 0.0
    return len(members) + GAP * (len({thing(r) for r in members}) - 1)


def height_of(row: list[Panel]) -> float:
    """Inches of a row of panels."""
    has_lines = any(not is_bars(members) for _, members in row)
    high = min(AROUND + BAR_HEIGHT * max(slots(members) for _, members in row), HEIGHT - 1)
    return max(high, PANEL_HEIGHT) if has_lines else high


def lines(axis: Any, members: list[Record], styles: dict[str, Style]) -> None:
    """Milliseconds (or errors) over the group's size, both logarithmic. Bands are the quantiles of
    the times, or the least and largest error; a cross marks a wrong result."""
    is_timed = any(r.ms is not None for r in members)
    curves: dict[str, dict[float, float]] = {}
    for name, style in styles.items():  # wide lines first, which others would hide
        line = sorted((r for r in members if r.contender == name), key=lambda r: r.x)
        xs = [r.x for r in line]
        ys = [r.ms if is_timed else drawable(r.error) for r in line]
        low = [r.ms_low if is_timed else drawable(r.error_low) for r in line]
        high = [r.ms_high if is_timed else drawable(r.error_high) for r in line]
        axis.plot(xs, ys, color=style.colour, linestyle=style.dashes, linewidth=style.width,
                  marker=style.marker, markersize=style.size, markeredgecolor="white",
                  markeredgewidth=0.5)  # fmt: skip
        for r, y in ((r, y) for r, y in zip(line, ys, strict=True) if is_flagged(r)):
            axis.plot([r.x], [y], marker=style.marker, markersize=style.size, color="white",
                      markeredgecolor=style.colour)  # fmt: skip
        curves[name] = {x: y for x, y in zip(xs, ys, strict=True) if y is not None}
        if None not in low and None not in high:
            axis.fill_between(xs, low, high, color=style.colour, alpha=0.15, linewidth=0)
        for r in line:
            if r.is_wrong:
                axis.plot([r.x], [r.ms], "x", color="red", markersize=9, markeredgewidth=2)
    copies = {r.x: r.copy_ms for r in reversed(members) if r.copy_ms is not None}
    if copies:
        places = sorted(copies)
        axis.plot(places, [copies[x] for x in places], "--", color="0.6", linewidth=1)
    axis.set_xscale("log", base=2)
    scale_times(axis) if is_timed else axis.set_yscale("log")
    axis.margins(y=0.08)  # for crosses at the edge
    notes = [" ≈ ".join(found) for found in equal_curves(curves)]
    below = [line for note in notes for line in textwrap.wrap(note, letters_below(axis))]
    axis.set_xlabel("\n".join([f"{members[0].x_name} (log scale)", *below]), fontsize=SMALL)
    axis.set_ylabel(f"{'ms' if is_timed else 'error'} (log scale)", fontsize=SMALL)


def letters_below(axis: Any) -> int:
    """How many letters fit on a line below a panel."""
    columns = axis.get_subplotspec().get_gridspec().ncols
    return int(WIDTH / columns * LETTERS)


def equal_curves(curves: dict[str, dict[float, float]]) -> list[list[str]]:
    """The contenders whose curves cannot be told apart, in a panel that is as high as all of them:
    at every size that two have in common, and they have one at least."""
    values = [y for curve in curves.values() for y in curve.values() if y > 0]
    near = NEAR * math.log(max(values) / min(values)) if values else 0.0
    found: list[list[str]] = []
    for name, curve in curves.items():
        for group in found:
            first = curves[group[0]]
            common = first.keys() & curve.keys()
            if common and all(abs(math.log(first[x] / curve[x])) <= near for x in common):
                group.append(name)
                break
        else:
            found.append([name])
    return [group for group in found if len(group) > 1]


def scale_times(axis: Any) -> None:
    """A logarithmic axis whose ticks are plain numbers: 0.5, 1, 2, 5, 10."""
    from matplotlib import ticker

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    few = high / low > 200
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1,) if few else (1, 2, 5), numticks=20))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def drawable(error: float | None) -> float | None:
    """An error of 0 has no place on a logarithmic axis: it is drawn at the smallest of float64."""
    return None if error is None else max(error, 1e-17)


def bars(axis: Any, members: list[Record], styles: dict[str, Style], room: float) -> None:
    """Fractions of copy (or errors), one bar for each contender of each thing that was timed, with
    the quantiles of its times (or the least and largest error) as a line at its end.

    room: how many bars the panel has room for; its neighbour may have more.
    """
    from matplotlib import ticker

    is_timed = any(r.ms is not None for r in members)
    names, places, place = [], [], 0.0
    for what in dict.fromkeys(thing(r) for r in members):
        for r in (r for r in members if thing(r) == what):
            length = (r.of_copy if is_timed else drawable(r.error)) or 0.0
            text = fraction(length) if is_timed else f"{length:.1e}"
            text += marks(r)
            low, high = ends(r, is_timed)
            if is_copy_slow(r):  # a bar as long would leave nothing to see of the others
                length, low, high = MOST_OF_COPY, None, None
            axis.barh(place, length, 0.8, color=styles[r.contender].colour,
                      alpha=PALE if is_flagged(r) else 1,
                      hatch="xx" if r.is_wrong else None)  # fmt: skip
            if low is not None and high is not None:
                axis.plot([low, high], [place, place], color="0.25", linewidth=0.8)
            axis.annotate(text, (max(length, high or 0), place), (2, 0),
                          textcoords="offset points", va="center", fontsize=TINY - 1,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # fmt: skip
            names.append(label(r))
            places.append(place)
            place += 1
        place += GAP
    axis.set_yticks(places, names)
    axis.set_ylim(room - 0.3, -0.7)
    axis.grid(visible=False, axis="y")
    axis.set_axisbelow(True)
    axis.margins(x=0.1)  # for the numbers
    if is_timed:
        axis.axvline(1, color="0.5", linestyle="--", linewidth=0.8)
        axis.set_xlabel("time of a copy / time, longer is faster", fontsize=SMALL)
    else:
        errors = [drawable(r.error) or 0 for r in members]
        is_wide = max(errors) > WIDE * min(errors)
        if is_wide:
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel(f"error{' (log scale)' if is_wide else ''}", fontsize=SMALL)


def fraction(value: float) -> str:
    """Two digits, zeros at the end included: 0.90 beside 0.98; whole numbers from 10 on."""
    return f"{value:#.{2 if value < 100 else 3}g}".rstrip(".")


def marks(r: Record) -> str:
    """Behind the number at the end of a bar."""
    varied = " ±" if varies(r.spread) or varies(r.copy_spread) else ""
    return varied + (", slow copy" if is_copy_slow(r) else "")


def ends(r: Record, is_timed: bool) -> tuple[float | None, float | None]:
    """Where a bar would end at the quantiles of the times, or at the least and largest error."""
    if not is_timed:
        return drawable(r.error_low), drawable(r.error_high)
    if not (r.of_copy and r.ms and r.ms_low and r.ms_high):
        return None, None
    return r.of_copy * r.ms / r.ms_high, r.of_copy * r.ms / r.ms_low


def label(r: Record) -> str:
    """What stands beside a bar."""
    wrong = ", wrong" if r.is_wrong else ""
    return f"{thing(r)}, {r.contender}{wrong}"


def thing(r: Record) -> str:
    return f"{r.x_name} {int(r.x)}" if r.x else r.x_name
