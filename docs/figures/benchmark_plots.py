"""Draws the plots of docs/benchmarks from the CSVs there, as `python -m assocscan bench` does.

python docs/figures/benchmark_plots.py
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from tables import CPU, GPU, Row, Runs

from assocscan_bench.output import plots, records
from assocscan_bench.output.records import Record

PLOTS: dict[Runs, tuple[str, ...]] = {
    GPU: (
        "recurrence", "cumsum", "long", "selective", "operators", "engines", "rglru",
        "norm_linear_gelu", "precision",
    ),
    CPU: ("precision",),
}  # fmt: skip
TEXTS = {"suite", "group", "x_name", "shape", "dtype", "contender", "kind", "limit", "note"}


def record(row: Row) -> Record:
    found: dict[str, Any] = {}
    for field in fields(Record):
        text = row[field.name]
        if field.name in TEXTS:
            found[field.name] = text
        elif field.name == "is_wrong":
            found[field.name] = text == "True"
        elif text:
            found[field.name] = float(text)
    return Record(**found)


def read(runs: Runs, name: str) -> list[Record]:
    return [record(row) for row in runs.read(name)]


def drawn(folder: Path, name: str) -> list[Path]:
    """The plots of a run, in their order."""
    every = [folder / f"{name}.png", *(folder / f"{name}-{k}.png" for k in range(2, 100))]
    return [path for path in every if path.exists()]


if __name__ == "__main__":
    for runs, names in PLOTS.items():
        for name in names:
            origin = records.origin(runs.notes[name]["environment"]) if runs.read(name) else ""
            print(*plots.draw(runs.folder, name, read(runs, name), origin))
