"""The tables of what things take on a CPU, from the runs of `measure_cpu`.

python docs/figures/cpu_tables.py
"""

import csv
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
RUN = DOCS / "benchmarks" / "2026-11-26-cpu"
BEGIN, END = "<!-- made by figures/cpu_tables.py: {} -->\n", "<!-- end -->"
OURS, MOST_SPREAD = "assocscan", 0.3

Row = dict[str, str]


@functools.cache
def read(name: str) -> list[Row]:
    with (RUN / f"{name}.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["ms"]]


def found(name: str, contender: str = OURS, **wanted: str) -> Row:
    """The row of a run whose columns have these words; of the group a part is enough."""
    group = wanted.pop("group", "")
    (row,) = (
        row
        for row in read(name)
        if row["contender"] == contender
        and group in row["group"]
        and all(row[column] == value for column, value in wanted.items())
    )
    return row


def ms(row: Row) -> float:
    return float(row["ms"])


def digits(value: float) -> str:
    """Two, or all before the point."""
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def time(row: Row, unit: float = 1) -> str:
    """The median, with the quantiles where they are far apart."""
    low, middle, high = (unit * float(row[key]) for key in ("ms_low", "ms", "ms_high"))
    if high - low <= MOST_SPREAD * middle:
        return digits(middle)
    return f"{digits(middle)} ({digits(low)} – {digits(high)})"


def of_copy(row: Row) -> str:
    """The fraction; none where the copy's own times are far apart."""
    return "–" if float(row["copy_spread"]) > MOST_SPREAD else digits(float(row["of_copy"]))


def lines(head: str, rows: list[list[str]]) -> str:
    """A table; the head as the cells of its line."""
    columns = head.count("|") + 1
    every = [f"| {head} |", "|" + "---|" * columns]
    return "\n".join([*every, *(f"| {' | '.join(row)} |" for row in rows)])


def threads(name: str) -> int:
    return int(runs()[name]["environment"]["threads"])


@functools.cache
def runs() -> dict[str, dict]:
    return json.loads((RUN / "runs.json").read_text(encoding="utf-8"))


def origin(name: str) -> str:
    """By which command, where and when."""
    run = runs()[name]
    where, count = run["environment"], threads(name)
    return (
        f"`python -m assocscan bench {run['words']} --device cpu`, torch "
        f"{where['torch'].partition('+')[0]}, {count} thread{'s' * (count != 1)}, "
        f"{where['date'][:10]}"
    )


SERIES, ROWS, LONG = "4 x 8192 x 512", "8 x 1048576 x 1", "16777216"


def scans() -> str:
    cases = (
        ("`cumsum`, axis 1 of (4, 8192, 512)", "cumsum", {"shape": SERIES}, "torch.cumsum"),
        ("`cumsum`, last axis of (8, 2^20)", "cumsum", {"shape": ROWS}, "torch.cumsum"),
        ("`cumsum` of one row of 2^24", "long", {"group": "sum", "shape": LONG}, "torch.cumsum"),
        ("`linear_recurrence`, axis 1 of (4, 8192, 512)", "recurrence", {}, None),
        ("its backward pass (five arrays)", "recurrence-backward", {}, None),
        ("`linear_recurrence` of one row of 2^24", "long", {"group": "recurrence"}, None),
        ("`ops.logaddexp`, axis 1 of (4, 8192, 512)", "logaddexp", {"shape": SERIES}, "torch"),
        ("`ops.logaddexp`, last axis of (8, 2^20)", "logaddexp", {"shape": ROWS}, "torch"),
        ("running Welford mean and variance, axis 1 of (4, 8192, 512)", "welford", {}, None),
    )
    table = []
    for title, name, where, torchs in cases:
        ours = found(name, **where)
        theirs = "" if torchs is None else found(name, torchs, **where)
        ratio = f"{digits(ms(theirs) / ms(ours))} × as fast as {TORCH[name]}" if theirs else ""
        table.append([title, time(ours), of_copy(ours), ratio])
    return lines("scan | ms | of copy | beside torch", table)


TORCH = {"cumsum": "`torch.cumsum`", "long": "`torch.cumsum`", "logaddexp": "`torch.logcumsumexp`"}


def packed() -> str:
    names = {
        "sum": "`cumsum`",
        "total of each": "`reduce(ops.sum, …)`",
        "logaddexp": "`ops.logaddexp`",
    }
    counts = sorted({int(row["x"]) for row in read("packed")})
    table = []
    for part, title in names.items():
        cells = [title]
        for count in counts:
            where = {"group": part, "x": str(count)}
            theirs = found("packed", "one sequence", **where)
            cells.append(f"{time(found('packed', **where))}, {time(theirs)}")
        table.append(cells)
    return lines("ms, packed and as one sequence | " + " | ".join(
        f"{count} sequences" for count in counts
    ), table)  # fmt: skip


def windows() -> str:
    table = []
    groups = list(dict.fromkeys(row["group"] for row in read("windows")))
    forward = [g for g in groups if g.endswith(", forward")]
    widths = ("16", "257", "4096")
    for group in forward:
        name, _, rest = group.partition(", ")
        cells = [f"`{name}`, {rest.partition(' float')[0]}"]
        for which in ("forward", "forward and backward"):
            own = [
                r
                for r in read("windows")
                if r["group"] == f"{name}, {rest.removesuffix('forward')}{which}"
            ]
            times = {(r["contender"], r["x"]): r for r in own}
            scan = sorted((r for r in own if r["contender"] == "the scan"), key=ms)
            cells.append(time(scan[len(scan) // 2]))
            for width in widths:
                pair = times.get((OURS, width)), times.get(("the scan", width))
                cells.append(digits(ms(pair[0]) / ms(pair[1])) if all(pair) else "")
        table.append(cells)
    head = "operator, float32, axis 1 | scan, ms | width 16 | width 257 | width 4096"
    return lines(f"{head} | scan and gradient, ms | 16 | 257 | 4096", table)


def compensated() -> str:
    cases = (
        ("`cumsum(x, 1)`", "cumsum", OURS),
        ("`cumsum(x, 1, compensated=True)`", "cumsum", "assocscan, compensated"),
        ("`torch.cumsum(x, 1)`", "cumsum", "torch.cumsum"),
        ("the scan of the layer", "layer", OURS),
        ("the same, compensated", "layer", "assocscan, compensated"),
        ("the same by `torch.cumsum` and products", "layer", "torch.cumsum and products"),
    )
    table = []
    for title, part, contender in cases:
        row = found("compensated", contender, group=part)
        table.append([title, f"{float(row['error']):.1e}".replace("e-0", "e-"), time(row)])
    return lines("| error | ms", table)


def sizes(row: Row) -> str:
    return row["shape"].replace(" x ", ", ")


def passes(name: str, is_layer: bool, contenders: tuple[str, ...]) -> list[list[str]]:
    """A line for each size and pass, a column for each contender."""
    own = [r for r in read(name) if r["group"].startswith("layers") == is_layer]
    table = []
    for shape in dict.fromkeys(r["shape"] for r in own):
        for which in ("forward", "forward and backward"):
            cells = [r for r in own if r["shape"] == shape and r["group"].endswith(f", {which}")]
            times = {r["contender"]: time(r) for r in cells}
            first = sizes(cells[0]) if which == "forward" else ""
            table.append([first, which, *(times[c] for c in contenders)])
    return table


def nonlinear() -> str:
    contenders = OURS, "assocscan, Newton", "loop of torch operations"
    head = "B, L, D | | `nonlinear_recurrence` | by Newton's method | torch loop"
    return lines(head, passes("nonlinear", False, contenders))


def layers() -> str:
    contenders = "nn.DiagonalGRU", "torch.nn.GRU"
    head = "B, L, D | | `nn.DiagonalGRU` | `torch.nn.GRU`"
    return lines(head, passes("nonlinear", True, contenders))


def vectors() -> str:
    table = []
    for shape in dict.fromkeys(r["shape"] for r in read("selective")):
        for name in ("selective-1-thread", "selective"):
            forward, both = (
                next(r for r in read(name) if r["contender"] == OURS and r["shape"] == shape
                     and r["group"].endswith(f", {which}"))
                for which in ("forward", "forward and backward")
            )  # fmt: skip
            first = f"({sizes(forward)})" if name.endswith("thread") else ""
            ratio = f"{ms(both) / ms(forward):.1f}"
            table.append([first, str(threads(name)), time(forward), time(both), ratio])
    return lines(
        "(batch, L, channels, N) | threads | forward, ms | both passes, ms | both / forward", table
    )


def calls() -> str:
    names = list(dict.fromkeys(r["contender"] for r in read("calls")))
    table = []
    for name in names:
        cells = [f"`{name}`" if " " not in name else name]
        for run in ("calls-1-thread", "calls"):
            for which in ("forward", "forward and backward"):
                row, torchs = (found(run, c, x_name=which) for c in (name, "torch.cumsum"))
                ratio = "" if name == "torch.cumsum" else f" ({ms(row) / ms(torchs):.2f})"
                cells.append(f"{time(row, 1000)}{ratio}")
        table.append(cells)
    head = [f"{p}, {threads(run)} thread{'s' * (threads(run) > 1)}"
            for run in ("calls-1-thread", "calls") for p in ("forward", "both")]  # fmt: skip
    return lines("call | " + " | ".join(head), table)


# Where each table stands, and the runs that are named above it.
TABLES: dict[str, tuple[str, Callable[[], str], tuple[str, ...]]] = {
    "scans": ("performance/index.md", scans, ()),
    "packed": ("performance/index.md", packed, ("packed",)),
    "windows": ("windows.md", windows, ("windows",)),
    "compensated": ("how/numbers.md", compensated, ("compensated",)),
    "nonlinear": ("nonlinear.md", nonlinear, ("nonlinear",)),
    "layers": ("nonlinear.md", layers, ()),
    "vectors": ("performance/vectors.md", vectors, ("selective",)),
    "calls": ("performance/executables.md", calls, ("calls",)),
}


def block(name: str) -> str:
    _, table, named = TABLES[name]
    said = "".join(f"By {origin(run)}:\n\n" for run in named)
    return f"{said}{table()}\n"


def updated(page: str) -> str:
    """The page with all of its tables made anew."""
    for name in TABLES:
        begin = BEGIN.format(name)
        if begin in page:
            head, rest = page.split(begin)
            page = f"{head}{begin}\n{block(name)}\n{END}{rest.split(END, 1)[1]}"
    return page


def readme(page: str) -> str:
    """The README with the CPU's time of its first scan."""
    ours, theirs = (found("cumsum", c, shape=SERIES) for c in (OURS, "torch.cumsum"))
    line = f"{time(ours)} ms | `torch.cumsum` {digits(ms(theirs))} ms |"
    return re.sub(r"(on two CPU cores.*\n\| [^|]+ \| ).*", lambda m: m[1] + line, page)


PAGES: dict[Path, Callable[[str], str]] = {
    **{DOCS / page: updated for page, *_ in TABLES.values()},
    DOCS.parent / "README.md": readme,
}

if __name__ == "__main__":
    for path, change in PAGES.items():
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
