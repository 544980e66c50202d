"""Wide elements on the CPU engine: what a call and its threads need of their stacks.

In fresh processes, since a stack that overflows ends one.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from processes import needs_compiler, needs_fork

import assocscan

pytestmark = [needs_fork, needs_compiler]
SMALL_STACK = 256 << 10  # the least that is usual for threads

# `turned` is associative, and no component of it stands alone: 64 of float64 fill 256 KiB with the
# carries of 512 lanes, or with a tile of 16 rows.
SCRIPT = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
import torch
from assocscan import associative_scan, monoid
from assocscan.engines.cpu import compiler

compiler.SHORT = compiler.LONG = compiler.LONG_FOR_FEW = ("-O1",)
torch.set_num_threads(int(sys.argv[1]))
layout, length = sys.argv[2], int(sys.argv[3])

def turned(left, right):
    return torch.where(right > 0, right, left.flip(-1).flip(-1)) + 0 * left.flip(-1)

turned = monoid(turned, name="turned", element_ndim=1)
x = torch.randn(40, length, 64, dtype=torch.float64)
if layout == "lanes":
    x = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
if layout == "one row":
    x = x[:1]
results = []

def work():
    results.append(associative_scan(turned, x, 1, backend="cpu"))

def state(t):
    return torch.where(x[:, t] > 0, x[:, t], expected[-1])

work()
if int(sys.argv[4]):
    threading.stack_size(int(sys.argv[4]))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
expected = [x[:, 0]]
for t in range(1, length):
    expected.append(state(t))
for result in results:
    assert torch.equal(result, torch.stack(expected, 1))
print(len(results))
"""


def run_in(soft_limit: int, *arguments: object) -> str:
    """The script in a process whose new threads have stacks of the limit."""
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False,
        cwd=Path(assocscan.__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (soft_limit, hard)),
    )  # fmt: skip
    assert process.returncode == 0, (process.returncode, process.stderr[-2000:])
    return process.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["rows", "lanes"])
def test_a_call_from_a_thread_with_a_small_stack(layout: str) -> None:
    assert run_in(8 << 20, 1, layout, 50, SMALL_STACK) == "2\n"


@pytest.mark.exhaustive
@pytest.mark.thinned(9)
@pytest.mark.parametrize("layout,length", [("rows", 1000), ("lanes", 1000), ("one row", 13000)])
def test_workers_where_the_systems_stacks_are_small(layout: str, length: int) -> None:
    """Threads over rows, over lanes, and over the chunks of one row."""
    assert run_in(SMALL_STACK, 2, layout, length, 0) == "1\n"
