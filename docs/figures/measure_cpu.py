"""Measures everything on the CPU that the documents have tables of.

python docs/figures/measure_cpu.py docs/benchmarks/DATE-cpu [NAME …]

It takes about twenty minutes, on a machine that does nothing else. Each run of
`python -m assocscan bench` leaves NAME.csv; runs.json has its words, the date, the versions and the
number of threads. `cpu_tables` and `operators_table` name the folder that they read.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Run(NamedTuple):
    """words: what follows `bench`, the suite first. threads: None for as many as there are."""

    words: str
    threads: int | None = None


SERIES, ROWS = "--shape 4,8192,512", "--shape 8,1048576,1"
STATES = "selective --shape 1,2048,256,16 --shape 1,2048,256,64 --peers none"
RUNS = {
    "cumsum": Run(f"cumsum {SERIES} {ROWS}"),
    "recurrence": Run(f"recurrence {SERIES} --pass forward --peers none"),
    "recurrence-backward": Run(f"recurrence {SERIES} --pass backward --peers none"),
    "long": Run("long --lengths 16777216"),
    "welford": Run(f"operators --op welford {SERIES}"),
    "logaddexp": Run(f"operators --op logaddexp {SERIES} {ROWS}"),
    "packed": Run("packed"),
    "calls": Run("calls"),
    "calls-1-thread": Run("calls", 1),
    "windows": Run("windows"),
    "compensated": Run("compensated"),
    "nonlinear": Run("nonlinear"),
    "selective": Run(STATES),
    "selective-1-thread": Run(STATES, 1),
    "operators": Run("operators"),
    "precision": Run("precision --peers none"),
}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Leaves the CSV in the folder; the run's words and environment."""
    run = RUNS[name]
    threads = {} if run.threads is None else {"OMP_NUM_THREADS": str(run.threads)}
    with tempfile.TemporaryDirectory() as written:
        command = [sys.executable, "-m", "assocscan", "bench", *run.words.split()]
        options = ["--device", "cpu", "--out", written]
        subprocess.run([*command, *options], check=True, cwd=ROOT, env={**os.environ, **threads})
        suite = Path(written) / run.words.split()[0]
        (folder / f"{name}.csv").write_bytes(suite.with_suffix(".csv").read_bytes())
        content = json.loads(suite.with_suffix(".json").read_text(encoding="utf-8"))
    return {"words": run.words, "environment": content["environment"]}


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / "runs.json"
    known = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    for name in sys.argv[2:] or RUNS:
        known[name] = measure(name, folder)
        notes.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
