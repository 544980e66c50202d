"""Command line: ``python -m assocscan demo``, ``env``, ``bench`` and ``stress``."""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m assocscan", description="Associative scans for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="scan real series, check against loops, time against torch")
    commands.add_parser("env", help="versions, compiler, devices, and the engines available")
    bench_options = commands.add_parser("bench", help="time scans against a copy and their peers")
    stress_options = commands.add_parser("stress", help="random scans, many times, checked")
    # The suites are imported only where they are asked for.
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["bench"]:
        from assocscan.cli.bench import command as bench

        bench.add_arguments(bench_options)
        return bench.run(parser.parse_args(given))
    if given[:1] == ["stress"]:
        from assocscan.cli import stress

        stress.add_arguments(stress_options)
        return stress.run(parser.parse_args(given))
    if parser.parse_args(given).command == "demo":
        from assocscan.cli import demo
        from assocscan.runtime.native import runner

        runner.default = "python"  # its compiler would take a core from what is timed
        return demo.run()
    from assocscan.cli import env

    return env.run()


if __name__ == "__main__":
    sys.exit(main())
