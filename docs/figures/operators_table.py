"""The table of costs in docs/operators.md, from the CSVs of two runs of `bench operators`.

python docs/figures/operators_table.py
"""

import csv
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "operators.md"
CPU = DOCS / "benchmarks" / "2026-11-23-cpu" / "operators.csv"
GPU = DOCS / "benchmarks" / "2026-11-22-h100" / "operators.csv"
BEGIN, END = "<!-- made by figures/operators_table.py -->\n", "<!-- end -->"


def read(path: Path) -> dict[str, tuple[float, float, float]]:
    """(bytes per element, ns per element, of copy) by operator."""
    found = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["contender"] == "assocscan" and row["ms"]:
                elements = 1
                for size in row["shape"].split(" x "):
                    elements *= int(size)
                per_element = float(row["ms"]) * 1e6 / elements
                found[row["x_name"]] = int(row["bytes"]) / elements, per_element, row["of_copy"]
    return {name: (b, ns, float(copy)) for name, (b, ns, copy) in found.items()}


def table() -> str:
    """Operators in the order of the CPU's run."""
    cpu, gpu = read(CPU), read(GPU)
    lines = [
        "| operator | bytes | CPU, ns | of copy | GPU, ns | of copy |",
        "|---|---|---|---|---|---|",
    ]
    for name, (size, ns, copy) in cpu.items():
        title = re.sub(r"^(\w+(?:\(.*?\))?)", r"`\1`", name)
        there = gpu.get(name)
        on_gpu = f"{there[1]:.2g} | {there[2]:.2f}" if there else "– | –"
        lines.append(f"| {title} | {size:.0f} | {ns:.2g} | {copy:.2f} | {on_gpu} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
