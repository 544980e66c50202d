"""Short runs of `python tests/fuzz` and `tests/fuzz/calls.py`; the long ones are by hand."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import needs_compiler, needs_fork

import assocscan

pytestmark = [needs_fork, needs_compiler]


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("part", ["cache", "compiler", "names", "texts", "arguments"])
def test_random_faults(part: str) -> None:
    """In a process of its own: the cases forget what the package keeps from call to call."""
    command = [sys.executable, str(Path(__file__).parent), "--cases", "20", part]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert run.stdout.startswith(f"{part}: 20 cases, 0 failures\n")


@pytest.mark.slow
def test_random_calls() -> None:
    """Of the public functions; on a GPU, where there is one."""
    command = [sys.executable, str(Path(__file__).parent / "calls.py"), "--seconds", "5"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert run.stdout.startswith("seed 0: ")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)
def test_folders_that_other_users_cannot_enter(tmp_path: Path) -> None:
    """The package, and the folder for temporary files. Cases become another user, who then needs
    nothing that was not read before."""
    package = Path(assocscan.__file__).parent
    shutil.copytree(package, tmp_path / "assocscan", ignore=shutil.ignore_patterns("__pycache__"))
    tmp_path.chmod(0o700)
    command = [sys.executable, str(Path(__file__).parent), "--first", "14", "--cases", "5", "cache"]
    places = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **places}
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
