"""The table of costs in docs/operators.md, from the CSVs of three runs of `bench operators`.

python docs/figures/operators_table.py
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "operators.md"
CPU = DOCS / "benchmarks" / "2026-11-26-cpu" / "operators.csv"
GPUS = {
    "H100": DOCS / "benchmarks" / "2026-11-22-h100" / "operators.csv",
    "H200": DOCS / "benchmarks" / "2026-11-24-h200" / "operators.csv",
}
BEGIN, END = "<!-- made by figures/operators_table.py -->\n", "<!-- end -->"


class Cost(NamedTuple):
    """Of one element: bytes, ns (median, quantiles 0.2 and 0.8), and the fraction of copy."""

    size: float
    ns: float
    low: float
    high: float
    of_copy: float


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def read(path: Path) -> dict[str, Cost]:
    """The cost of each operator."""
    found = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["contender"] == "assocscan" and row["ms"]:
                elements = 1
                for size in row["shape"].split(" x "):
                    elements *= int(size)
                ns = (float(row[key]) * 1e6 / elements for key in ("ms", "ms_low", "ms_high"))
                size = int(row["bytes"]) / elements
                found[row["x_name"]] = Cost(size, *ns, float(row["of_copy"]))
    return found


def table() -> str:
    """Operators in the order of the CPU's run."""
    cpu, gpus = read(CPU), [read(path) for path in GPUS.values()]
    columns = "".join(f" {name}, ns | of copy |" for name in GPUS)
    lines = [f"| operator | bytes | CPU, ns |{columns}", "|---|---|---|" + "---|---|" * len(GPUS)]
    for name, here in cpu.items():
        title = re.sub(r"^(\w+(?:\(.*?\))?)", r"`\1`", name)
        found = [costs.get(name) for costs in gpus]
        on_gpus = "".join(
            f" {number(there.ns)} | {there.of_copy:.2f} |" if there else " – | – |"
            for there in found
        )
        on_cpu = f"{number(here.ns)} ({number(here.low)} – {number(here.high)})"
        lines.append(f"| {title} | {here.size:.0f} | {on_cpu} |{on_gpus}")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
