"""The README of the folder of `measure_gpu`, and the figures that `python -m assocscan env` shows.

python docs/figures/gpu_folder.py
"""

import re
from pathlib import Path

from benchmark_plots import PLOTS, drawn
from tables import DOCS, GPU, lines, paragraph, rewrite

ENVIRONMENT = DOCS.parent / "assocscan" / "cli" / "env.py"
README = GPU.folder / "README.md"
ENDED = {0: "", 130: "cut short"}  # by the status of the command


def environment_module(text: str) -> str:
    """The fractions of copy that `python -m assocscan env` shows."""

    def line(found: re.Match[str]) -> str:
        where = {"group": found[1], "shape": found[2]}
        without = [GPU.find("engines", name, **where) for name in ("triton", "multipass")]
        measured = [float(row["of_copy"]) for row in without if row]
        with_cupy = GPU.find("engines", "auto", **where)
        if not measured or with_cupy is None:
            return found[0]
        figures = f"{max(measured):.2f}, {float(with_cupy['of_copy']):.2f}"
        return f'("{found[1]}", "{found[2]}", {figures})'

    title = ", ".join(re.split(", torch.*, ", GPU.title("engines")))
    text = re.sub(r'(?<=MEASURED_WITH = ").*(?=")', title, text)
    return re.sub(r'\("([^"]+)", "([^"]+)", [\d.]+, [\d.]+\)', line, text)


def wrong(name: str) -> list[str]:
    """Whose results of a run differ from the reference by more than is expected of the dtype."""
    return sorted({row["contender"] for row in GPU.read(name) if row["is_wrong"] == "True"})


def readme() -> str:
    """Of the folder: which runs, by which commands, with the plots."""
    title = f"One {GPU.title(next(iter(GPU.notes))).removeprefix('one ')}"
    table = [
        [f"`{name}`", f"`{GPU.command(name)}`", f"{run['seconds']:.0f}",
         ENDED.get(run["status"], f"wrong: {', '.join(wrong(name))}")]
        for name, run in GPU.notes.items()
    ]  # fmt: skip
    plots = [path.name for name in PLOTS[GPU] for path in drawn(GPU.folder, name)]
    parts = (
        f"# {title}",
        versions(),
        f"    python docs/figures/measure_gpu.py docs/benchmarks/{GPU.folder.name}\n"
        "    python docs/figures/redraw.py",
        paragraph(
            "The first command leaves the CSVs, and `runs.json` with the versions. `ms` is the "
            "median, `ms_low` and `ms_high` are the quantiles 0.2 and 0.8, by CUDA events; the L2 "
            "cache is overwritten before each call. Figures of calls that take less than the host "
            "needs to launch them are the host's. The second command draws the plots, and writes "
            "this page, the GPU's tables of the documents and the figures that "
            "`python -m assocscan env` shows."
        ),
        lines("run | command | seconds | ", table),
        paragraph(
            "Lines are medians, bands the quantiles. Hollow points and pale bars are figures whose "
            "time, or that of the copy, has quantiles more than 30 % of the median apart. Red "
            "crosses and hatched bars are results that differ from the reference by more than is "
            "expected of the dtype: `unfused`, a layer of torch operations, rounds to 16 bits in "
            "each of them."
        ),
        "\n".join(f"![{Path(name).stem}]({name})" for name in plots),
    )
    return "\n\n".join(parts) + "\n"


def versions() -> str:
    """Of Python, of what compiles, and of the peers that took part in any run."""
    where = GPU.environment
    peers = {
        name.removesuffix(" warp").removesuffix(" chunk"): number
        for run in GPU.notes.values()
        for name, number in run["environment"]["peers"].items()
        if number != "not installed"
    }
    named = {"Python": where["python"], "Triton": where["triton"], "CuPy": where["cupy"], **peers}
    return paragraph(f"{', '.join(f'{name} {number}' for name, number in named.items())}. Made by")


PAGES = {ENVIRONMENT: environment_module, README: lambda _: readme()}

if __name__ == "__main__":
    README.touch()
    rewrite(PAGES)
