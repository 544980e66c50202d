"""All figures and tables that are made of runs of the benchmarks, and all drawings.

python docs/figures/redraw.py

It reads docs/benchmarks, of which `tables` names the folders. `measure_cpu` and `measure_gpu` make
new runs, on idle machines; on the GPU with the peers installed.
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
    "gpu_tables",
    "speed_table",
    "gpu_folder",
)

if __name__ == "__main__":
    for name in SCRIPTS:
        print(name)
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
