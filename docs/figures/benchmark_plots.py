"""Draws the plots of docs/benchmarks from the CSVs there, as `python -m assocscan bench` does.

python docs/figures/benchmark_plots.py [FOLDER …]

The CSVs do not name the device and the versions: ORIGINS does, as the README of each folder. How
many threads the host had was not written down. Older CSVs lack columns, which follow from others or
stay empty.
"""

import csv
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from assocscan_bench.output import plots
from assocscan_bench.output.records import Record

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ORIGINS = {
    "2026-11-21-h100": "H100 80GB, torch 2.11, 2026-11-21",
    "2026-11-21-h200": "H200, torch 2.11, 2026-11-21",
    "2026-11-22-h100": "H100 80GB, torch 2.11, 2026-11-22",
    "2026-11-22-h200": "H200, torch 2.11, 2026-11-22",
    "2026-11-24-h200": "H200, torch 2.11, 2026-11-24",
    "2026-11-26-cpu": "AMD EPYC with AVX-512, torch 2.14.1, 2 threads, 2026-11-26",
}
TEXTS = {"suite", "group", "x_name", "shape", "dtype", "contender", "kind", "note"}


def record(row: dict[str, str]) -> Record:
    found: dict[str, Any] = {}
    for field in fields(Record):
        text = row.get(field.name, "")
        if field.name in TEXTS:
            found[field.name] = text
        elif field.name == "is_wrong":
            found[field.name] = text == "True" or row["note"].startswith("wrong")
        elif text:
            found[field.name] = float(text)
    if "spread" not in found and found.get("ms_high"):
        found["spread"] = (found["ms_high"] - found["ms_low"]) / found["ms"]
    return Record(**found)


def read(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as file:
        return [record(row) for row in csv.DictReader(file)]


if __name__ == "__main__":
    for name in sys.argv[1:] or ORIGINS:
        folder = BENCHMARKS / name
        for path in sorted(folder.glob("*.csv")):
            if (folder / f"{path.stem}.png").exists():
                print(*plots.draw(folder, path.stem, read(path), ORIGINS[name]))
