"""Command line: ``python -m assocscan demo`` and ``python -m assocscan env``."""

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
    command = parser.parse_args(argv).command
    if command == "demo":
        from assocscan import demo

        return demo.run()
    from assocscan import env

    return env.run()


if __name__ == "__main__":
    sys.exit(main())
