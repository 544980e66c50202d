"""Command line: ``python -m assocscan demo``, ``env``, ``bench`` and ``stress``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

Parser = argparse.ArgumentParser
Command = Callable[[Parser, list[str]], int]


def demo(parser: Parser, words: list[str]) -> int:
    parser.parse_args(words)
    from assocscan.cli import demo
    from assocscan.runtime.native import runner

    runner.default = "python"  # its compiler would take a core from what is timed
    return demo.run()


def env(parser: Parser, words: list[str]) -> int:
    parser.parse_args(words)
    from assocscan.cli import env

    return env.run()


def bench(parser: Parser, words: list[str]) -> int:
    beside = Path(__file__).resolve().parents[1] / "bench"
    if (beside / "assocscan_bench").is_dir():  # a checkout: the benchmarks of the same code
        sys.path.insert(0, str(beside))
    from assocscan_bench import command

    command.add_arguments(parser)
    return command.run(parser.parse_intermixed_args(words), parser)


def stress(parser: Parser, words: list[str]) -> int:
    from assocscan.cli import stress

    stress.add_arguments(parser)
    return stress.run(parser.parse_args(words))


# What a command needs is imported only when it is asked for.
COMMANDS: dict[str, tuple[Command, str]] = {
    "demo": (demo, "scan real series, check against loops, time against torch"),
    "env": (env, "versions, compiler, devices, and the engines available"),
    "bench": (bench, "time scans against a copy and their peers"),
    "stress": (stress, "random scans, many times, checked"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    name = given[0] if given else ""
    if name in COMMANDS:
        run, what = COMMANDS[name]
        return run(Parser(prog=f"python -m assocscan {name}", description=what), given[1:])
    parser = Parser(prog="python -m assocscan", description="Associative scans for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, (_, what) in COMMANDS.items():
        commands.add_parser(command, help=what)
    parser.parse_args(given)  # prints the help, or what is wrong, and exits
    return 2


if __name__ == "__main__":
    sys.exit(main())
