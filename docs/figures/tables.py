"""What the scripts that write tables share: rows of runs, numbers as text, tables between marks.

CPU and GPU are the runs that the documents are of, in docs/benchmarks.
"""

import csv
import functools
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from measuring import NOTES

DOCS = Path(__file__).resolve().parents[1]
BENCHMARKS = DOCS / "benchmarks"
END = "<!-- end -->"
OURS, MOST_SPREAD = "assocscan", 0.3
NONE = "–"

Row = dict[str, str]


class Runs:
    """What `measure_cpu` or `measure_gpu` left in a folder of docs/benchmarks.

    unit: how many of the tables' unit of time a millisecond has, `unit_name`.
    """

    def __init__(self, name: str, device: str, unit: float, unit_name: str) -> None:
        self.folder = BENCHMARKS / name
        self.device, self.unit, self.unit_name = device, unit, unit_name
        self.read = functools.cache(self._read)

    def _read(self, name: str) -> list[Row]:
        """The rows of a run that have a time or an error; none of a run that was not made."""
        path = self.folder / f"{name}.csv"
        if not path.exists():
            return []
        with path.open(encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if row["ms"] or row["error"]]

    def find(self, name: str, contender: str = OURS, **wanted: str) -> Row | None:
        """The row of a run whose columns have these words; of the group a part is enough."""
        group = wanted.pop("group", "")
        rows = [
            row
            for row in self.read(name)
            if row["contender"] == contender
            and group in row["group"]
            and all(row[column] == value for column, value in wanted.items())
        ]
        if len(rows) > 1:
            raise ValueError(f"{name}: {len(rows)} rows of {contender} {group} {wanted}")
        return rows[0] if rows else None

    def found(self, name: str, contender: str = OURS, **wanted: str) -> Row:
        row = self.find(name, contender, **wanted)
        if row is None:
            raise ValueError(f"{name}: no row of {contender} {wanted}")
        return row

    @functools.cached_property
    def notes(self) -> dict[str, dict[str, Any]]:
        notes: dict[str, dict[str, Any]] = json.loads((self.folder / NOTES).read_text("utf-8"))
        return notes

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """Of the first run."""
        environment: dict[str, Any] = next(iter(self.notes.values()))["environment"]
        return environment

    def threads(self, name: str) -> int:
        return int(self.notes[name]["environment"]["threads"])

    def command(self, name: str) -> str:
        repeat = self.notes[name]["environment"]["repeat"]
        options = f"--device {self.device}" + (f" --repeat {repeat}" if repeat else "")
        return f"python -m assocscan bench {self.notes[name]['words']} {options}"

    def origin(self, *names: str) -> str:
        """By which commands, and where and when the first of them was run."""
        where, count = self.notes[names[0]]["environment"], self.threads(names[0])
        on = f"{count} thread{'s' * (count != 1)}" if self.device == "cpu" else gpu(where)
        commands = " and ".join(f"`{self.command(name)}`" for name in names)
        return f"{commands}, torch {version(where['torch'])}, {on}, {where['date'][:10]}"

    def title(self, name: str) -> str:
        """The machine, the versions and the day of a run."""
        where = self.notes[name]["environment"]
        return (
            f"one {gpu(where)}, torch {version(where['torch'])}, CUDA {where['cuda']}, "
            f"{where['date'][:10]}"
        )

    def time(self, row: Row | None, unit: float | None = None) -> str:
        """The median, with the quantiles where they are far apart. unit: in place of the own."""
        if row is None or not row["ms"]:
            return NONE
        unit = self.unit if unit is None else unit
        low, middle, high = (unit * float(row[key]) for key in ("ms_low", "ms", "ms_high"))
        if high - low <= MOST_SPREAD * middle:
            return digits(middle)
        return f"{digits(middle)} ({digits(low)} – {digits(high)})"


CPU = Runs("2026-11-26-cpu", "cpu", 1, "ms")
GPU = Runs("2026-11-27-h100", "cuda", 1000, "µs")


def gpu(where: Mapping[str, Any]) -> str:
    """The model of an NVIDIA GPU in short: H100 80GB, H200."""
    return str(where["device"]).removeprefix("NVIDIA ").removesuffix(" HBM3")


def version(text: str) -> str:
    return text.partition("+")[0]


def ms(row: Row) -> float:
    return float(row["ms"])


def digits(value: float) -> str:
    """Two, or all before the point."""
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def of_copy(row: Row | None, form: Callable[[float], str] = digits) -> str:
    """The fraction; none where the copy's own times are far apart."""
    if row is None or float(row["copy_spread"]) > MOST_SPREAD:
        return NONE
    return form(float(row["of_copy"]))


def ratio(a: Row | None, b: Row | None, form: str = ".2f") -> str:
    """The time of a over that of b."""
    return NONE if a is None or b is None else format(ms(a) / ms(b), form)


def error(row: Row | None) -> str:
    if row is None or not row["error"]:
        return NONE
    return f"{float(row['error']):.1e}".replace("e-0", "e-")


def sizes(shape: str) -> str:
    return shape.replace(" x ", ", ")


def lines(head: str, rows: list[list[str]]) -> str:
    """A table; the head as the cells of its line."""
    columns = head.count("|") + 1
    every = [f"| {head} |", "|" + "---|" * columns]
    return "\n".join([*every, *(f"| {' | '.join(row)} |" for row in rows)])


def paragraph(text: str) -> str:
    """In lines as those of the documents."""
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


class Block(NamedTuple):
    """What stands between two marks. page: the document, below docs. named: the runs that are named
    above it."""

    page: str
    text: Callable[[], str]
    named: tuple[str, ...] = ()


def mark(script: str, name: str) -> str:
    return f"<!-- made by figures/{script}.py: {name} -->\n"


def between(page: str, begin: str, text: str, gap: str = "\n") -> str:
    """The page with this text between the mark and the next end. gap: before and after it."""
    head, rest = page.split(begin)
    if text:
        text = f"{gap}{text}\n{gap}"
    return f"{head}{begin}{text}{END}{rest.split(END, 1)[1]}"


def written(runs: Runs, block: Block) -> str:
    """The text of a block below the commands of its runs; nothing where none of them was made."""
    made = [run for run in block.named if run in runs.notes]
    if block.named and not made:
        return ""
    return (f"By {runs.origin(*made)}:\n\n" if made else "") + block.text()


def updated(script: str, runs: Runs, blocks: Mapping[str, Block], page: str) -> str:
    """The page with all of its blocks made anew."""
    for name, block in blocks.items():
        begin = mark(script, name)
        if begin in page:
            page = between(page, begin, written(runs, block))
    return page


def pages(script: str, runs: Runs, blocks: Mapping[str, Block]) -> dict[Path, Callable[[str], str]]:
    """How each page is made anew."""
    change = functools.partial(updated, script, runs, blocks)
    return {DOCS / block.page: change for block in blocks.values()}


def rewrite(changes: Mapping[Path, Callable[[str], str]]) -> None:
    for path, change in changes.items():
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
