"""The command: which suites, on which device, and where the results go."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import plots, records, runner
from .cases import Settings
from .peers import PEERS
from .report import table
from .suites import SUITES
from .timing import Timer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m assocscan bench`."""
    parser.add_argument("suites", nargs="*", metavar="suite", type=known_suite,
                        help=f"which to run, by default all: {', '.join(SUITES)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few and small cases, under a minute")
    parser.add_argument("--peers", type=known_peers, metavar="NAMES",
                        help=f"other libraries, separated by commas: {', '.join(PEERS)} "
                        "or none (default: all that are installed)")  # fmt: skip
    parser.add_argument(
        "--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks"),
                        help="folder for CSV, JSON and plots (default: benchmarks)")  # fmt: skip


def known_suite(name: str) -> str:
    """The name itself; an error of the command line where no suite has it."""
    if name not in SUITES:
        raise argparse.ArgumentTypeError(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
    return name


def usable_device(name: str) -> str:
    """The name itself; an error of the command line where torch has no such device here."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"device {name!r}: {reason}") from error
    return name


def known_peers(names: str) -> tuple[str, ...]:
    """The names between commas; an error of the command line for one that is none."""
    if names == "none":
        return ()
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(
                f"unknown peer {name!r}: choose from {', '.join(PEERS)}"
            )
    return found


def run(options: argparse.Namespace) -> int:
    """Run the suites and write what they found; 1 where nothing could be measured at all."""
    settings = Settings(torch.device(options.device), options.quick, options.peers)
    where = records.environment(settings)
    print(f"assocscan {where['assocscan']}, torch {where['torch']}, {where['device']}")
    for name, peer in PEERS.items():
        reason = peer.missing(settings)
        if reason is not None and (settings.peers is None or name in settings.peers):
            print(f"  without {name}: {reason}")
    timer, measured = Timer(settings), 0
    for suite in options.suites or SUITES:
        found = list(runner.run(suite, SUITES[suite](settings), timer))
        measured += sum(r.ms is not None or r.error is not None for r in found)
        print(f"\n{suite}{table(found)}")
        written = records.write(options.out, suite, found, where)
        figure = options.out / f"{suite}.png"
        if plots.why_not() is None and plots.draw(figure, suite, found, where["device"]):
            written.append(figure)
        print(f"  → {', '.join(map(str, written))}")
    if plots.why_not() is not None:
        print(f"no plots: {plots.why_not()}")
    return 0 if measured else 1
