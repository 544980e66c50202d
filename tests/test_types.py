"""What type checkers know of results, and which calls they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT

# A comment gives the type that mypy reveals, or the error that it reports.
PROGRAM = """
import torch
from torch import Tensor

import assocscan
from assocscan import associative_scan, monoid, ops, reduce, with_lower

x = torch.ones(3)
pair = (x, x)

def add(left: Tensor, right: Tensor) -> Tensor:
    return left + right

@monoid(identity=(1.0, 0.0), name="typed")
def typed(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left

@monoid(lift=lambda x: (x, x), name="lifted")
def lifted(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left

reveal_type(associative_scan(ops.sum, x))  # Tensor
reveal_type(associative_scan(ops.affine, pair, 0, True))  # tuple[Tensor, Tensor]
reveal_type(associative_scan(typed, pair))  # tuple[Tensor, Tensor]
reveal_type(associative_scan(typed, pair, return_final=True)[1])  # tuple[Tensor, Tensor]
reveal_type(associative_scan(ops.sum, {"a": x}))  # dict[str, Tensor]
reveal_type(associative_scan(add, x))  # Tensor
reveal_type(associative_scan(torch.maximum, x, return_final=True))  # tuple[Tensor, Tensor]
reveal_type(associative_scan(torch.add, x))  # Tensor
reveal_type(associative_scan(lambda left, right: left + right, [x]))  # list[Tensor]
reveal_type(associative_scan(ops.welford, x))  # Any
reveal_type(associative_scan(lifted, x))  # Any
reveal_type(associative_scan(with_lower(ops.affine, lambda s: s[1]), pair))  # Any
reveal_type(associative_scan("sum", x))  # Any
reveal_type(associative_scan(ops.welford, x, return_final=True))  # tuple[Any, Any]
reveal_type(associative_scan(ops.sum, x, return_final=bool(x)))  # Any
reveal_type(reduce(ops.sum, x))  # Tensor
reveal_type(reduce(add, x))  # Tensor
reveal_type(reduce(ops.welford, x))  # Any
reveal_type(reduce(ops.sum, x, backend=None))  # Tensor
reveal_type(assocscan.cumsum(x, backend="cpu", deterministic=True))  # Tensor
reveal_type(assocscan.linear_recurrence(x, x, backend="cpu"))  # Tensor
reveal_type(assocscan.linear_recurrence(x, x, return_final=True, backend=None)[1])  # Tensor
reveal_type(assocscan.nn.RGLRU(4).heads)  # int
associative_scan(ops.sum, x, dim=0)  # error: call-overload
reduce(ops.sum, x, dim=0)  # error: call-overload
assocscan.cumsum(x, dim=0)  # error: arg-type
assocscan.cumsum(x, backend=0)  # error: arg-type
assocscan.cumsum()  # error: call-arg
assocscan.cumsum(x, 0, False, True, torch.float32)  # error: arg-type
assocscan.gae(x, x, x, 0.9, 0.9, dim=0)  # error: call-arg
assocscan.nn.LRU(d_model=8)  # error: call-arg
"""


@pytest.mark.exhaustive
def test_what_mypy_reveals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    said, trouble, _ = api.run(
        [str(file), "--config-file", str(ROOT / "pyproject.toml"), cache, "--no-error-summary"]
    )
    assert not trouble
    found: dict[int, str] = {}
    for number, kind, text in re.findall(r"^.*program\.py:(\d+): (note|error): (.*)$", said, re.M):
        revealed = re.search(r'Revealed type is "(.*)"', text)
        code = re.search(r"\[([a-z-]+)\]$", text)
        if revealed is not None:
            found[int(number)] = revealed[1].replace("builtins.", "").replace("torch._tensor.", "")
        elif kind == "error" and code is not None:
            found[int(number)] = f"error: {code[1]}"
    lines = PROGRAM.splitlines()
    wanted = {k: line.rpartition("  # ")[2] for k, line in enumerate(lines, 1) if "  # " in line}
    assert found == wanted
