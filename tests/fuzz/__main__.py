"""Random faults, reproducible: `python tests/fuzz --seed 1 --cases 10000 [part …]`.

A part is a function of a random number generator that sets a fault up, runs the package, asserts
what must hold, and returns the name of what it tried. Cases run in forked processes, a hundred in
each, so that one that kills its process is reported like one that fails. A short run is part of the
tests (`test_fuzz.py`).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parent / "support")]
    sys.path.append(str(here.parents[1]))  # after an installed package

# The cache folder holds only what a case puts there.
os.environ["ASSOCSCAN_RUNNER"] = "python"

import caches
import operations

Part = tuple[Callable[[], object], Callable[[random.Random], str]]  # once before all; each case
PARTS: dict[str, Part] = {
    "cache": (caches.material, caches.cache_case),
    "compiler": (caches.material, caches.compiler_case),
    "names": (operations.material, operations.names_case),
    "texts": (operations.material, operations.texts_case),
    "arguments": (operations.kernels, operations.arguments_case),
}
BATCH = 100
BATCH_SECONDS = 300


def run_batch(part: str, seed: int, numbers: range) -> tuple[collections.Counter[str], list[str]]:
    """What was tried how often, and the failures, of the cases with these numbers."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        signal.alarm(BATCH_SECONDS)
        with os.fdopen(writer, "w") as pipe:
            for number in numbers:
                print(json.dumps([number, *run_case(part, seed, number)]), file=pipe, flush=True)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        done = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    tried = collections.Counter(label for _, label, _ in done)
    failures = [f"{reproduce(part, seed, n)}\n{error}" for n, _, error in done if error]
    if len(done) < len(numbers):
        killer = numbers[len(done)]
        failures.append(f"{reproduce(part, seed, killer)}\nended the process ({status})")
        rest = range(killer + 1, numbers.stop)
        if rest:
            more, others = run_batch(part, seed, rest)
            return tried + more, failures + others
    return tried, failures


def run_case(part: str, seed: int, number: int) -> tuple[str, str]:
    """What was tried, and how it failed."""
    try:
        return PARTS[part][1](random.Random(f"{part} {seed} {number}")), ""
    except Exception:
        return "failed", traceback.format_exc()


def reproduce(part: str, seed: int, number: int) -> str:
    return f"python tests/fuzz --seed {seed} --first {number} --cases 1 {part}"


def run(part: str, seed: int, first: int, cases: int) -> tuple[collections.Counter[str], list[str]]:
    """A part's cases, batch by batch."""
    PARTS[part][0]()
    tried: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    for start in range(first, first + cases, BATCH):
        more, failed = run_batch(part, seed, range(start, min(start + BATCH, first + cases)))
        tried += more
        failures += failed
    return tried, failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults, reproducible by their seed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000, help="of every part")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    failed = 0
    for part in options.parts or PARTS:
        tried, failures = run(part, options.seed, options.first, options.cases)
        print(f"{part}: {options.cases} cases, {len(failures)} failures")
        for label, count in sorted(tried.items()):
            print(f"  {count:6} {label}")
        for failure in failures[:20]:
            print(failure)
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
