"""torch's tracer where it cannot be imported: not the operator's fault, and not for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import assocscan

SETUP = """
import sys, tempfile, warnings
import pytest, torch
from assocscan import BackendError, FallbackWarning, associative_scan, monoid, ops, reduce

warnings.simplefilter("error")
x = torch.arange(5.0)
mean = monoid(
    lambda a, b: (a[0] + b[0], a[1] + b[1]), identity=(0.0, 0), name="mean",
    lift=lambda x: (x.float(), 1), lower=lambda s: s[0] / s[1],
)
"""
# The first import of a module is interrupted, as by Ctrl-C.
INTERRUPTED = """
import importlib.abc

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
with pytest.raises(KeyboardInterrupt):
    associative_scan(ops.sum, x)
assert "{module}" not in sys.modules
for _ in range(2):
    assert associative_scan(ops.sum, x, backend="eager").equal(x.cumsum(0))
"""
NO_TEMPORARY_FOLDER = """
tempfile._candidate_tempdir_list = lambda: ["/nonexistent"]
with pytest.warns(FallbackWarning) as caught:
    for _ in range(2):
        assert associative_scan(ops.sum, x).equal(x.cumsum(0))
        assert associative_scan(mean, x.bfloat16()).equal(x.cumsum(0) / torch.arange(1, 6))
        assert associative_scan(lambda a, b: a + b, x).equal(x.cumsum(0))
        assert reduce(mean, x).equal(x.mean())
        y = x.clone().requires_grad_()
        associative_scan(ops.prod, y).sum().backward()
        assert y.grad.isfinite().all()
(warning,) = caught
assert "operator" not in str(warning.message).replace("trace operators", "")
assert "No usable temporary directory" in str(warning.message)
assert associative_scan(mean, x, backend="eager").equal(x.cumsum(0) / torch.arange(1, 6))
with pytest.raises(BackendError, match="'sum': torch cannot trace.*No usable temporary"):
    associative_scan(ops.sum, x, backend="cpu")
with pytest.raises(TypeError, match="changes the dtype"):
    associative_scan(monoid(lambda a, b: (a + b).double(), name="widening"), x)
"""


def run(script: str, folder: Path) -> None:
    command = [sys.executable, "-c", SETUP + script]
    environment = {**os.environ, "ASSOCSCAN_CACHE_DIR": str(folder)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    root = Path(assocscan.__file__).parents[1]
    process = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.exhaustive
@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    "module", ["sympy", "sympy.functions", "sympy.core.numbers", "mpmath.libmp"]
)
def test_an_interrupt_while_sympy_is_imported(module: str, tmp_path: Path) -> None:
    run(INTERRUPTED.format(module=module), tmp_path)


@pytest.mark.exhaustive
def test_no_folder_for_temporary_files(tmp_path: Path) -> None:
    run(NO_TEMPORARY_FOLDER, tmp_path)
