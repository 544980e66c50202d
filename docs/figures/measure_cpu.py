"""Measures everything on the CPU that the documents have tables of.

python docs/figures/measure_cpu.py docs/benchmarks/DATE-cpu [NAME …]

It takes about twenty minutes, on a machine that does nothing else. `measuring` says what it leaves.
`cpu_tables` and `operators_table` name the folder that they read.
"""

import sys
from pathlib import Path

from measuring import Run, measure_all, start_process

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
    "calls-1-thread": Run("calls", threads=1),
    "windows": Run("windows"),
    "windows-large": Run("windows --shape 8,8192,1536"),
    "compensated": Run("compensated"),
    "nonlinear": Run("nonlinear"),
    "selective": Run(STATES),
    "selective-1-thread": Run(STATES, threads=1),
    "operators": Run("operators"),
    "precision": Run("precision --peers none"),
}

if __name__ == "__main__":
    chosen = sys.argv[2:] or list(RUNS)
    made = measure_all(
        RUNS, chosen, Path(sys.argv[1]).resolve(), start_process, ["--device", "cpu"]
    )
    raise SystemExit(made.keys() != set(chosen))
