"""Exported programs that return named tuples: saved, and loaded in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import assocscan
from assocscan.nn import DiagonalLSTM, DiagonalSLSTM, Hawk, Mamba

LOADED = """
import sys, torch, {module}
program = torch.export.load(sys.argv[1]).module()
result = program(torch.load(sys.argv[2]))
kind = type(result if {whole} else result[1])
leaves = torch.utils._pytree.tree_leaves(result)
torch.save((kind.__module__, kind.__name__, leaves), sys.argv[3])
"""


class Call(nn.Module):
    """A function as a module, which is what torch.export takes."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def markov(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Initial, transition and emission log-probabilities for observations x [T, 4]."""
    even = torch.full((4,), 0.25).log()
    return even, even.expand(4, 4), x.log_softmax(-1)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "cummax": lambda x: assocscan.cummax(x, 0),
    "cummin": lambda x: assocscan.cummin(x, 0),
    "hmm_filter": lambda x: assocscan.hmm_filter(*markov(x)),
    "viterbi": lambda x: assocscan.viterbi(*markov(x)),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: Mamba(4),
    "Hawk": lambda: Hawk(4),
    "DiagonalLSTM": lambda: DiagonalLSTM(4, 4),
    "DiagonalSLSTM": lambda: DiagonalSLSTM(4, 4),
}


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("cummax", "Mamba") else [pytest.mark.slow])
        for name in (*FUNCTIONS, *LAYERS)
    ],
)
def test_named_results(name: str, tmp_path: Path) -> None:
    """The class and its values come back where `assocscan` is imported, for layers its `nn`."""
    torch.manual_seed(0)
    if name in FUNCTIONS:
        model, x = Call(FUNCTIONS[name]), torch.randn(9, 4)
    else:
        model, x = LAYERS[name](), torch.randn(2, 9, 4)
    want = model(x)
    program, given, got = tmp_path / "program.pt2", tmp_path / "x.pt", tmp_path / "result.pt"
    torch.export.save(torch.export.export(model, (x,)), program)
    torch.save(x, given)
    module = "assocscan" if name in FUNCTIONS else "assocscan.nn"
    script = LOADED.format(module=module, whole=name in FUNCTIONS)
    subprocess.run([sys.executable, "-c", script, program, given, got], check=True)
    module_of_result, kind, leaves = torch.load(got)
    named = type(want if name in FUNCTIONS else want[1])
    assert (module_of_result, kind) == (named.__module__, named.__name__)
    torch.testing.assert_close(leaves, tree_leaves(want))
