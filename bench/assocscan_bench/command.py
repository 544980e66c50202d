"""The command: which suites, on which device, and where the results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from assocscan.runtime.backends import BACKENDS
from assocscan.runtime.native import build as native_build
from assocscan.runtime.native import runner as native

from . import options
from .cases import ENGINE, OURS
from .measuring import busy, runner
from .measuring.timing import Timer
from .output import plots, records, report
from .output.records import Record
from .settings import PASSES, Settings
from .suites import ON_GPUS_ONLY, STATES_TOO, SUITES, TAKES, peers_of

INTERRUPTED = 130  # the status that shells give to a program that Ctrl-C ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m assocscan bench`."""
    add = parser.add_argument
    add("suites", nargs="*", metavar="suite", type=options.known_suite,
        help=f"which to run, by default all: {', '.join(SUITES)}")  # fmt: skip
    add("--shape", action="append", metavar="B,L,D", type=options.shape, default=[],
        help="batch, length and width, for selective also the states (B,L,D,N; 16 by default); "
        "once or several times")  # fmt: skip
    add("--lengths", metavar="L,L,…", type=options.lengths, default=(),
        help="lengths of the axis, in place of the suite's or of the L of --shape")  # fmt: skip
    add("--dtype", metavar="NAMES", type=options.dtypes, default=(),
        help="dtypes, separated by commas: float32, bfloat16, float16, …")  # fmt: skip
    add("--pass", dest="which", metavar=f"{{{','.join(PASSES)}}}", type=options.known_pass,
        help="the scan, its gradient alone (by a graph that is kept), or both")  # fmt: skip
    add("--backend", metavar="NAME", type=options.known_backend,
        help=f"of the contender assocscan: {', '.join(BACKENDS)} (default: auto)")  # fmt: skip
    add("--op", metavar="NAME", type=options.operator,
        help="a registered operator, or module:name for a Monoid of yours")  # fmt: skip
    add("--peers", type=options.known_peers, metavar="NAMES",
        help=f"other libraries, separated by commas: {', '.join(peers_of(SUITES))} "
        "or none (default: all that are installed)")  # fmt: skip
    add("--device", type=options.usable_device,
        default="cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    add("--repeat", metavar="MS", type=options.milliseconds,
        help="milliseconds for which each timed call is repeated (default: 100 by GPU events, 250 "
        "by the clock, 20 with --quick)")  # fmt: skip
    add("--quick", action="store_true", help="few and small cases, under a minute")
    add("--out", type=Path, metavar="DIR",
        help="folder for CSV, JSON and plots (default: benchmarks; none with --json)")  # fmt: skip
    add("--plot", metavar="NAME", default="", help="the names of the plots begin with it: "
        "NAME-recurrence.png")  # fmt: skip
    add("--json", action="store_true",
        help="print the records as JSON on standard output, and all else on standard "
        "error")  # fmt: skip


def chosen_suites(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Those that were named, or all that take the options; exits where one does not."""
    used = {
        name for name, value in (
            ("shape", given.shape), (STATES_TOO, any(len(s) == 4 for s in given.shape)),
            ("lengths", given.lengths), ("dtype", given.dtype),
            ("pass", given.which), ("backend", given.backend), ("op", given.op),
            ("peers", given.peers),  # none: no suite minds
        ) if value
    }  # fmt: skip
    if not given.suites:
        used -= {"peers"}
        return [name for name in SUITES if used <= TAKES[name]]
    for suite in given.suites:
        for option in sorted(used - TAKES[suite]):
            others = [name for name in SUITES if option in TAKES[name]]
            do = "do" if len(others) > 1 else "does"
            parser.error(f"suite {suite} takes no --{option}: {', '.join(others)} {do}")
    theirs = peers_of(given.suites)
    for name in given.peers or ():
        if name not in theirs:
            parser.error(
                f"{name} is no peer of {', '.join(given.suites)}: choose from {', '.join(theirs)}"
            )
    return list(given.suites)


def settings_of(given: argparse.Namespace) -> Settings:
    return Settings(
        torch.device(given.device), given.quick, given.peers, tuple(given.shape), given.lengths,
        given.dtype, (given.which,) if given.which else (), given.backend or "auto", given.op,
        given.repeat,
    )  # fmt: skip


def run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the suites and write what they found; 1 where nothing could be measured at all, or where
    a result of assocscan is wrong. An interrupt (Ctrl-C) ends it after what was measured until then
    is written."""
    suites = chosen_suites(given, parser)
    if not suites:
        parser.error("no suite takes all of these options")
    settings = settings_of(given)
    said: TextIO = sys.stderr if given.json else sys.stdout
    prepare_runner(given.quick)
    where = records.environment(settings)
    print(f"assocscan {where['assocscan']}, torch {where['torch']}, {where['device']}", file=said)
    warning = busy.warning()
    if warning is not None:
        print(f"  {warning}", file=said)
    for name, peer in peers_of(suites).items():
        reason = peer.missing(settings)
        if reason is not None and (settings.peers is None or name in settings.peers):
            print(f"  without {name}: {reason}", file=said)
    folder = given.out or (None if given.json else Path("benchmarks"))
    found: list[Record] = []
    is_interrupted = False
    for suite in suites:
        own: list[Record] = []
        print(f"\n{suite}", file=said, flush=True)
        try:  # one by one, so that rows are seen at once, and an interrupt leaves those before it
            measured = kept(runner.run(suite, SUITES[suite](settings), Timer(settings)), own)
            for row in report.rows(measured):
                print(row, file=said, flush=True)
        except KeyboardInterrupt:
            is_interrupted = True
        found += own
        print(report.notes(own), end="", file=said)
        if suite in ON_GPUS_ONLY and not settings.is_gpu:
            print(f"  {ON_GPUS_ONLY[suite]}", file=said)
        print(report.speed_ups(own), end="", file=said)
        if folder is not None:
            written = records.write(folder, suite, own, where)
            written += plots.draw(folder, file_name(given.plot, suite), own, records.origin(where))
            print(f"\n  → {', '.join(map(str, written))}", file=said)
        if is_interrupted:
            print(f"  interrupted: {suite} is not complete", file=said)
            break
    if folder is not None and plots.why_not() is not None:
        print(f"no plots: {plots.why_not()}", file=said)
    if given.json:
        print(json.dumps([asdict(r) for r in found], indent=1))
    return INTERRUPTED if is_interrupted else exit_status(found)


def kept(records: Iterable[Record], own: list[Record]) -> Iterator[Record]:
    """The same records, each put into the list as it comes."""
    for record in records:
        own.append(record)
        yield record


def file_name(prefix: str, suite: str) -> str:
    return f"{prefix}-{suite}" if prefix else suite


def exit_status(found: list[Record]) -> int:
    """0 where something was measured and every result of ours is right."""
    is_wrong = any(r.is_wrong and r.kind in (OURS, ENGINE) for r in found)
    return 0 if any(r.is_measured for r in found) and not is_wrong else 1


def prepare_runner(is_quick: bool) -> None:
    """Load the C++ runner before anything is timed, so that no compiler works beside it and no call
    is timed in another way than the next. A quick run takes it only if it was compiled before."""
    try:
        mode = native.mode()
    except Exception:  # the first call will say what is wrong with the variable
        return
    if mode == "python" or (is_quick and mode != "wait" and not native_build.is_cached()):
        native.default = "python"
        return
    if native.module is None and native.why_not is None:
        native.load()
