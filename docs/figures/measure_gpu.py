"""Measures everything on one NVIDIA GPU that the documents have figures and tables of.

python docs/figures/measure_gpu.py FOLDER [NAME …]

At first it compiles the kernels in as many processes as there are processors. It then measures, the
most important runs first, until the time is over (--seconds): a run that is cut short leaves what
it measured until then. `measuring` says what it leaves. Peers that are installed take part
(docs/performance/index.md). `gpu_runs` names the folder that the documents read.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, Run, measure_all

FOLDERS = [str(ROOT), str(ROOT / "bench"), str(ROOT / "docs" / "figures")]
sys.path[:0] = FOLDERS

PEERS = "accelerated-scan,fpscan,'fla chunk'"
SHORT = "--shape 8,256,1536 --shape 8,300,1536"
LONG_SUMS = "--shape 1,131072,32 --shape 4,131072,512 --shape 8,8192,1536"
FEW_CHAINS = " ".join(
    f"--shape {shape}" for shape in ("1,8192,16", "4,16384,64", "1,65536,64", "1,65536,512")
)
RUNS = {
    "recurrence": Run(
        f"recurrence --dtype bfloat16,float32 --peers {PEERS}",
        "--shape 8,1024,1536 --lengths 256,1024,2048,8192,32768",
    ),
    "cumsum": Run("cumsum"),
    "long": Run("long"),
    "selective": Run("selective --peers mamba_ssm"),
    "operators": Run("operators"),
    "engines": Run("engines"),
    "calls": Run("calls"),
    "rglru": Run("rglru"),
    "norm_linear_gelu": Run("norm_linear_gelu"),
    "compensated": Run("compensated --dtype float32,bfloat16", LONG_SUMS),
    "compensated-both": Run("compensated --dtype float32,bfloat16 --pass both", LONG_SUMS),
    "short-sums": Run("cumsum", SHORT),
    "short-recurrences": Run("recurrence --pass forward --peers none", SHORT),
    "precision": Run(f"precision --peers {PEERS},jax", "--lengths 32,512,8192,131072"),
    "packed": Run("packed"),
    "windows": Run("windows"),
    "others": Run(
        "recurrence --pass forward --peers jax,'torch associative_scan'", "--shape 8,8192,1536"
    ),
    "newton": Run("nonlinear --dtype float32 --pass forward", FEW_CHAINS),
    "nonlinear": Run("nonlinear --dtype float32", "--shape 8,2048,1536"),
}
MODULES = ["torch", "triton", "assocscan_bench.command", "compiling"]
PATIENCE = 30  # seconds for a run to write what it has, after it was interrupted


def bench(words: list[str]) -> None:
    """The command, in a process that has imported it."""
    from assocscan.__main__ import main
    from assocscan_bench.output import plots

    plots.draw = lambda *_: []  # `benchmark_plots` draws them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(["bench", *words]))


def start_fork(context: Any, until: float, run: Run, words: list[str]) -> int:
    """The command in a process of its own, interrupted at that time of `time.monotonic`."""
    process = context.Process(target=bench, args=(words,))
    process.start()
    process.join(max(0.0, until - time.monotonic()))
    if process.is_alive():
        print("\nthe time is over", flush=True)
        os.kill(process.pid, signal.SIGINT)
        process.join(PATIENCE)
        process.kill()
        process.join()
    return int(process.exitcode)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(RUNS)}")
    add("--seconds", type=float, default=420, help="for all, compiling included (default: 420)")
    add("--compile", type=float, default=120, metavar="SECONDS",
        help="at most for compiling beforehand (default: 120; 0 for none)")  # fmt: skip
    add("--repeat", type=int, default=20, metavar="MS", help="of each timed call (default: 20)")
    add("--device", default="cuda")
    add("--quick", action="store_true", help="few and small cases, to try it")
    given = parser.parse_args()
    for name in given.names:
        if name not in RUNS:
            parser.error(f"unknown run {name!r}: choose from {', '.join(RUNS)}")
    names, began = given.names or list(RUNS), time.monotonic()
    until = began + given.seconds
    options = ["--device", given.device, "--repeat", str(given.repeat)]
    # Processes are forked from one that has imported everything and has not asked for the GPU. It
    # does not take over sys.path.
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *([others] if others else [])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    if given.compile:
        import compiling

        said = [f"{RUNS[name].said(given.quick)} {' '.join(options)}" for name in names]
        stop = min(until, began + given.compile)
        compiling.compile_all(context, said, len(os.sched_getaffinity(0)), stop)
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)

    def start(run: Run, words: list[str]) -> int:
        return start_fork(context, until, run, words)

    seconds = measure_all(
        RUNS, names, given.folder.resolve(), start, options, given.quick,
        lambda: time.monotonic() >= until,
    )  # fmt: skip
    print("\n" + "\n".join(f"{name:20}{took:8.1f} s" for name, took in seconds.items()))
    print(f"{'all':20}{time.monotonic() - began:8.1f} s", flush=True)
    return 0 if seconds.keys() == set(names) else 1


if __name__ == "__main__":
    raise SystemExit(main())
