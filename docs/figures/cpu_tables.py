"""The tables of what things take on a CPU, from the runs of `measure_cpu`.

python docs/figures/cpu_tables.py
"""

import shared_tables
from tables import CPU, OURS, Block, digits, error, lines, ms, of_copy, pages, rewrite, sizes

NAME = "cpu_tables"
WINDOWS = "windows", "windows-large"
SERIES, ROWS, LONG = "4 x 8192 x 512", "8 x 1048576 x 1", "16777216"
TORCH = {"cumsum": "`torch.cumsum`", "long": "`torch.cumsum`", "logaddexp": "`torch.logcumsumexp`"}


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
        ours, factor = CPU.found(name, **where), ""
        if torchs is not None:
            times = ms(CPU.found(name, torchs, **where)) / ms(ours)
            factor = f"{digits(times)} × as fast as {TORCH[name]}"
        table.append([title, CPU.time(ours), of_copy(ours), factor])
    return lines("scan | ms | of copy | beside torch", table)


def compensated() -> str:
    cases = (
        ("`cumsum(x, 1)`", "cumsum", OURS),
        ("`cumsum(x, 1, compensated=True)`", "cumsum", "assocscan, compensated"),
        ("`torch.cumsum(x, 1)`", "cumsum", "torch.cumsum"),
        ("the scan of the layer", "layer", OURS),
        ("the same, compensated", "layer", "assocscan, compensated"),
        ("the same by `torch.cumsum` and products", "layer", "torch.cumsum and products"),
    )
    rows = [(title, CPU.found("compensated", who, group=part)) for title, part, who in cases]
    return lines("| error | ms", [[title, error(row), CPU.time(row)] for title, row in rows])


def nonlinear() -> str:
    contenders = OURS, "assocscan, Newton", "loop of torch operations"
    head = "B, L, D | | `nonlinear_recurrence` | by Newton's method | torch loop"
    return lines(head, shared_tables.passes(CPU, "nonlinear", False, contenders))


def layers() -> str:
    contenders = "nn.DiagonalGRU", "torch.nn.GRU"
    head = "B, L, D | | `nn.DiagonalGRU` | `torch.nn.GRU`"
    return lines(head, shared_tables.passes(CPU, "nonlinear", True, contenders))


def vectors() -> str:
    table = []
    for shape in dict.fromkeys(r["shape"] for r in CPU.read("selective")):
        for name in ("selective-1-thread", "selective"):
            forward, both = (
                next(r for r in CPU.read(name) if r["contender"] == OURS and r["shape"] == shape
                     and r["group"].endswith(f", {which}"))
                for which in ("forward", "forward and backward")
            )  # fmt: skip
            first = f"({sizes(shape)})" if name.endswith("thread") else ""
            factor = f"{ms(both) / ms(forward):.1f}"
            times = CPU.time(forward), CPU.time(both)
            table.append([first, str(CPU.threads(name)), *times, factor])
    return lines(
        "(batch, L, channels, N) | threads | forward, ms | both passes, ms | both / forward", table
    )


BLOCKS = {
    "scans": Block("performance/index.md", scans),
    "packed": Block(
        "performance/index.md", lambda: shared_tables.packed(CPU), ("packed",)
    ),
    "windows": Block("windows.md", lambda: shared_tables.windows(CPU, WINDOWS), WINDOWS),
    "compensated": Block("how/numbers.md", compensated, ("compensated",)),
    "nonlinear": Block("nonlinear.md", nonlinear, ("nonlinear",)),
    "layers": Block("nonlinear.md", layers),
    "vectors": Block("performance/vectors.md", vectors, ("selective",)),
    "calls": Block(
        "performance/executables.md",
        lambda: shared_tables.calls(CPU, ("calls-1-thread", "calls")),
        ("calls",),
    ),
}  # fmt: skip
PAGES = pages(NAME, CPU, BLOCKS)

if __name__ == "__main__":
    rewrite(PAGES)
