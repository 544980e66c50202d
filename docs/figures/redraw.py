"""All figures and tables that are made of runs of the benchmarks, and all drawings.

python docs/figures/redraw.py

It reads docs/benchmarks. New runs come from `python -m assocscan bench --out FOLDER`, on an idle
machine with the peers installed; the scripts name the folders that they read.
"""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "what_is_a_scan",
    "engines",
    "main_result",
    "benchmark_plots",
    "operators_table",
    "cpu_tables",
    "speed_table",
)

if __name__ == "__main__":
    for name in SCRIPTS:
        print(name)
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
