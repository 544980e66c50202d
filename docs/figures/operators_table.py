"""The table of costs in docs/operators.md, from two runs of `bench operators`.

python docs/figures/operators_table.py
"""

import re
from typing import NamedTuple

from tables import CPU, DOCS, GPU, NONE, OURS, Runs, between, gpu, lines

PAGE = DOCS / "operators.md"
BEGIN = "<!-- made by figures/operators_table.py -->\n"


class Cost(NamedTuple):
    """Of one element: bytes, ns (median, quantiles 0.2 and 0.8), and the fraction of copy."""

    size: float
    ns: float
    low: float
    high: float
    of_copy: float


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def read(runs: Runs) -> dict[str, Cost]:
    """The cost of each operator."""
    found = {}
    for row in runs.read("operators"):
        if row["contender"] == OURS:
            elements = 1
            for size in row["shape"].split(" x "):
                elements *= int(size)
            ns = (float(row[key]) * 1e6 / elements for key in ("ms", "ms_low", "ms_high"))
            found[row["x_name"]] = Cost(int(row["bytes"]) / elements, *ns, float(row["of_copy"]))
    return found


def table() -> str:
    """Operators in the order of the CPU's run."""
    on_gpu, cells = read(GPU), []
    for name, here in read(CPU).items():
        title = re.sub(r"^(\w+(?:\(.*?\))?)", r"`\1`", name)
        there = on_gpu.get(name)
        on_cpu = f"{number(here.ns)} ({number(here.low)} – {number(here.high)})"
        gpus = (number(there.ns), f"{there.of_copy:.2f}") if there else (NONE, NONE)
        cells.append([title, f"{here.size:.0f}", on_cpu, *gpus])
    return lines(f"operator | bytes | CPU, ns | {gpu(GPU.environment)}, ns | of copy", cells)


def updated(page: str) -> str:
    return between(page, BEGIN, table())


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
