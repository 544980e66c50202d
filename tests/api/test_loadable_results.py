"""`torch.load` reads results and states that are named tuples, as it is called by default."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import assocscan
from assocscan import nn

X = torch.randn(2, 5, 8)
LOGS = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
START, SEEN, EYE = LOGS[0], torch.rand(5, 2).log(), torch.eye(2)
FILTERED = assocscan.kalman_filter(torch.randn(5, 2), EYE, EYE, EYE, EYE, torch.zeros(2), EYE)
MADE: dict[str, Callable[[], Any]] = {
    "cummax": lambda: assocscan.cummax(X, 1),
    "hmm_filter": lambda: assocscan.hmm_filter(START, LOGS, SEEN),
    "hmm_smoother": lambda: assocscan.hmm_smoother(START, LOGS, SEEN, pairs=True),
    "viterbi": lambda: assocscan.viterbi(START, LOGS, SEEN),
    "kalman_filter": lambda: FILTERED,
    "rts_smoother": lambda: assocscan.rts_smoother(FILTERED.mean, FILTERED.covariance, EYE, EYE),
    "vtrace": lambda: assocscan.vtrace(X[0], X[0], X[0], X[0, 0], 0.9, axis=0),
    "DiagonalLSTM": lambda: nn.DiagonalLSTM(8)(X)[1],
    "DiagonalSLSTM": lambda: nn.DiagonalSLSTM(8)(X)[1],
    "Hawk": lambda: nn.Hawk(8, 2)(X)[1],
    "Mamba": lambda: nn.Mamba(8)(X)[1],
    "AdaptiveRankSemiseparable": lambda: nn.AdaptiveRankSemiseparable(8)(X)[1]["state"],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


@pytest.mark.parametrize("name", MADE)
def test_a_result_is_loaded_as_it_was_saved(name: str) -> None:
    made = MADE[name]()
    assert isinstance(made, tuple) and hasattr(made, "_fields")
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert same(torch.load(file), made)


@pytest.mark.parametrize("layer", [name for name in MADE if hasattr(nn, name)])
def test_states_are_detached_as_tensors_are(layer: str) -> None:
    state = MADE[layer]()
    assert any(t.requires_grad for t in state)
    detached = state.detach()
    assert same(detached, state) and not any(t.requires_grad for t in detached)


def test_in_a_process_that_has_made_no_state(tmp_path: Path) -> None:
    state = nn.DiagonalLSTM(8)(X)[1]
    torch.save(state, tmp_path / "state.pt")
    code = "import sys, torch, assocscan.nn; print(type(torch.load(sys.argv[1])).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "state.pt"], capture_output=True, text=True
    )
    assert done.stdout.strip() == type(state).__name__, done.stderr
