"""What `measure_cpu` and `measure_gpu` share: runs of `python -m assocscan bench`, kept by name.

Each run leaves NAME.csv in the folder. runs.json has its words, the seconds that it took, the date,
the versions and the number of threads.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NOTES = "runs.json"


class Run(NamedTuple):
    """words: what follows `bench`, the suite first. sizes: more words, which a quick run leaves
    out. threads: None for as many as there are."""

    words: str
    sizes: str = ""
    threads: int | None = None

    def said(self, is_quick: bool = False) -> str:
        """All words of its command, options of the whole measurement aside."""
        return f"{self.words} --quick" if is_quick else f"{self.words} {self.sizes}".strip()


# Runs the command with these words; its status.
Start = Callable[[Run, list[str]], int]


def start_process(run: Run, words: list[str]) -> int:
    """In a process of its own, with the run's number of threads."""
    threads = {} if run.threads is None else {"OMP_NUM_THREADS": str(run.threads)}
    command = [sys.executable, "-m", "assocscan", "bench", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}).returncode


def measure(
    run: Run, name: str, folder: Path, start: Start, options: list[str], is_quick: bool = False
) -> dict[str, Any] | None:
    """Leaves the CSV in the folder; what runs.json says of the run, or None of one that wrote
    nothing. options: those of every run, not among its words."""
    said = run.said(is_quick)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as written:
        status = start(run, [*shlex.split(said), *options, "--out", written])
        suite = Path(written) / said.split()[0]
        if not suite.with_suffix(".json").exists():
            return None
        (folder / f"{name}.csv").write_bytes(suite.with_suffix(".csv").read_bytes())
        content = json.loads(suite.with_suffix(".json").read_text(encoding="utf-8"))
    seconds = round(time.perf_counter() - began, 1)
    return {"words": said, "seconds": seconds, "status": status,
            "environment": content["environment"]}  # fmt: skip


def measure_all(
    runs: Mapping[str, Run],
    names: Iterable[str],
    folder: Path,
    start: Start,
    options: list[str],
    is_quick: bool = False,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """The seconds of each run that was made; none begins when it is late."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / NOTES
    known = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    seconds: dict[str, float] = {}
    for name in names:
        if is_late():
            print(f"\n{name}: no time is left", flush=True)
            continue
        found = measure(runs[name], name, folder, start, options, is_quick)
        if found is None:
            print(f"\n{name}: nothing was measured", flush=True)
            continue
        seconds[name] = found["seconds"]
        wrong = f", with status {found['status']}" if found["status"] else ""
        print(f"\n{name}: {found['seconds']:.1f} s{wrong}", flush=True)
        known[name] = found
        notes.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return seconds
