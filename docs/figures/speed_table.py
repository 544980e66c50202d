"""The GPU's times in the README's table of speed, from the CSVs of one run of the benchmarks.

python docs/figures/speed_table.py
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS.parent / "README.md"
RUN = DOCS / "benchmarks" / "2026-11-24-h200"


class Row(NamedTuple):
    """A row of the table: what is timed, and where the times stand.

    others: what a contender is called in the table, by its name in the CSV.
    """

    title: str
    suite: str
    group: str
    shape: str
    ours: str
    others: dict[str, str]


MAMBA = {"mamba_ssm": "mamba_ssm"}
ROWS = (
    Row("`cumsum`, axis 1 of (4, 8192, 512), float32", "cumsum", "(4, L, 512) float32",
        "4 x 8192 x 512", "assocscan", {"torch.cumsum": "`torch.cumsum`"}),
    Row("`cumsum` of one row of 2^28, float32", "long", "sum, float32", "268435456", "assocscan",
        {"torch.cumsum": "`torch.cumsum`", "CUB": "CUB (NVIDIA's C++ library)"}),
    Row("recurrence and gradient, last axis of (8, 1536, 8192), bfloat16", "recurrence",
        "(8, L, 1536) bfloat16, forward and backward", "8 x 8192 x 1536", "assocscan, rows",
        {"accelerated-scan": "accelerated-scan", "fpscan": "fpscan"}),
    Row("Mamba's `selective_scan` with D, z and bias, (8, 2048, 1536), 16 states, bfloat16",
        "selective", "(8, L, 1536, 16) bfloat16, forward", "8 x 2048 x 1536 x 16",
        "assocscan", MAMBA),
    Row("the same, with gradient", "selective", "(8, L, 1536, 16) bfloat16, forward and backward",
        "8 x 2048 x 1536 x 16", "assocscan", MAMBA),
)  # fmt: skip


def microseconds(row: Row) -> dict[str, str]:
    """The median of each contender."""
    with (RUN / f"{row.suite}.csv").open(encoding="utf-8") as file:
        return {
            found["contender"]: f"{float(found['ms']) * 1000:.0f} µs"
            for found in csv.DictReader(file)
            if (found["group"], found["shape"]) == (row.group, row.shape) and found["ms"]
        }


def line(row: Row) -> str:
    times = microseconds(row)
    others = ", ".join(f"{name} {times[contender]}" for contender, name in row.others.items())
    return f"| {row.title} | {times[row.ours]} | {others} |"


def updated(page: str) -> str:
    for row in ROWS:
        start = re.escape(f"| {row.title} | ")
        new = line(row)
        page = re.sub(rf"^{start}\d+ µs \|.*$", lambda _, new=new: new, page, count=1, flags=re.M)
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
