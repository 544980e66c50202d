"""A short run of `python tests/fuzz`; the long one is by hand."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import needs_compiler, needs_fork

pytestmark = [needs_fork, needs_compiler]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("part", ["cache", "compiler", "names", "texts", "arguments"])
def test_random_faults(part: str) -> None:
    """In a process of its own: the cases forget what the package keeps from call to call."""
    command = [sys.executable, str(Path(__file__).parent), "--cases", "20", part]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert run.stdout.startswith(f"{part}: 20 cases, 0 failures\n")
