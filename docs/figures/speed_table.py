"""The table of speed in the README, and what it says of the runs, from the CSVs of the benchmarks.

python docs/figures/speed_table.py
"""

from typing import NamedTuple

from gpu_tables import ending, slower_than_mamba
from tables import CPU, DOCS, GPU, OURS, Row, between, digits, gpu, lines, ms, paragraph, version

NAME = "speed_table"
PAGE = DOCS.parent / "README.md"
BEGIN = f"<!-- made by docs/figures/{NAME}.py -->\n"


class Line(NamedTuple):
    """A line of the table: what is timed, and where the times stand.

    others: what a contender is called in the table, by its name in the CSV.
    """

    title: str
    run: str
    group: str
    shape: str
    ours: str
    others: dict[str, str]


MAMBA = {"mamba_ssm": "mamba_ssm"}
LINES = (
    Line("`cumsum`, axis 1 of (4, 8192, 512), float32", "cumsum", "(4, L, 512) float32",
         "4 x 8192 x 512", OURS, {"torch.cumsum": "`torch.cumsum`"}),
    Line("`cumsum` of one row of 2^28, float32", "long", "sum, float32", "268435456", OURS,
         {"torch.cumsum": "`torch.cumsum`", "CUB": "CUB (NVIDIA's C++ library)"}),
    Line("recurrence and gradient, last axis of (8, 1536, 8192), bfloat16", "recurrence",
         "(8, L, 1536) bfloat16, forward and backward", "8 x 8192 x 1536", "assocscan, rows",
         {"accelerated-scan": "accelerated-scan", "fpscan": "fpscan"}),
    Line("Mamba's `selective_scan` with its optional D, z and bias: batch 8, 2048 steps, 1536 "
         "channels, 16 states, bfloat16",
         "selective", "(8, L, 1536, 16) bfloat16, forward", "8 x 2048 x 1536 x 16", OURS, MAMBA),
    Line("the same, with gradient", "selective", "(8, L, 1536, 16) bfloat16, forward and backward",
         "8 x 2048 x 1536 x 16", OURS, MAMBA),
)  # fmt: skip
# Libraries that the table names, by what the runs call their versions.
LIBRARIES = {
    "accelerated-scan": "accelerated-scan",
    "fpscan": "fpscan",
    "fla chunk": "flash-linear-attention (fla-core)",
    "mamba_ssm": "mamba_ssm",
}


def cells(line: Line) -> list[str]:
    def row(contender: str) -> Row | None:
        return ending(line.run, contender, {"group": line.group, "shape": line.shape})

    found = {name: row(contender) for contender, name in line.others.items()}
    others = [f"{name} {GPU.time(row)} µs" for name, row in found.items() if row]
    return [line.title, f"{GPU.time(row(line.ours))} µs", ", ".join(others)]


def table() -> str:
    ours, theirs = (
        CPU.found("cumsum", c, shape="4 x 8192 x 512") for c in (OURS, "torch.cumsum")
    )  # fmt: skip
    how = "median; in brackets, the 20th to the 80th percentile of the calls"
    title = f"`cumsum` as in row 1, on two CPU cores ({how})"
    on_cpu = [title, f"{CPU.time(ours)} ms", f"`torch.cumsum` {digits(ms(theirs))} ms"]
    head = f"on one {gpu(GPU.environment)} | assocscan | others"
    return lines(head, [*map(cells, LINES), on_cpu])


def sources() -> str:
    """Where the figures come from, and in how many cases a peer is faster."""
    where, peers = GPU.environment, GPU.environment["peers"]
    named = [f"torch {version(where['torch'])}"]
    named += [
        f"{title} {peers[name]}" for name, title in LIBRARIES.items()
        if peers.get(name, "not installed") != "not installed"
    ]  # fmt: skip
    slower, count = slower_than_mamba()
    faster = (
        f"Of [{count} selective scans](docs/selective_scan.md#where-it-runs) that were timed, "
        f"mamba_ssm is faster in {slower}. "
    )
    dates = {
        runs: f"[{runs.environment['date'][:10]}](docs/benchmarks/{runs.folder.name}/README.md)"
        for runs in (GPU, CPU)
    }
    text = (
        f"GPU times are of {dates[GPU]}, with {', '.join(named)}. {faster if count else ''}"
        f"CPU times are of {dates[CPU]}, with torch {version(CPU.environment['torch'])}. "
        "On the CPU `torch.cumsum` adds in float64, so its error is smaller; our "
        "`cumsum(x, compensated=True)` is [as exact](docs/how/numbers.md#long-sums), but slower."
    )
    return paragraph(text)


def updated(page: str) -> str:
    return between(page, BEGIN, f"{table()}\n\n{sources()}", gap="")


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
