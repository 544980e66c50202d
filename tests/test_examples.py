"""The examples run, and learn."""

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive
def test_hawk_learns_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller one, for a few steps: it beats the frequencies of the characters."""
    hawk = load("hawk_characters")
    sizes = {"FEATURES": 32, "WIDTH": 32, "LENGTH": 32, "BATCH": 8, "BLOCKS": 1}
    for name, value in {**sizes, "WARMUP": 5, "PEAK_RATE": 1e-2, "EVERY": 20}.items():
        monkeypatch.setattr(hawk, name, value)
    final = hawk.main(["--steps", "40", "--device", "cpu", "--out", str(tmp_path)])
    with (tmp_path / "hawk_characters.csv").open(encoding="utf-8") as file:
        curve = [float(row["held_out_bits"]) for row in csv.DictReader(file)]
    assert len(curve) == 2 and curve[1] == pytest.approx(final, abs=1e-4)
    assert curve[1] < curve[0]
    text = hawk.Text(torch.device("cpu"))
    assert curve[1] < text.unigram_bits() < 5
    assert "The class statement " in capsys.readouterr().out


def test_the_saved_curve_is_that_of_a_whole_run() -> None:
    with (EXAMPLES / "hawk_characters.csv").open(encoding="utf-8") as file:
        curve = [float(row["held_out_bits"]) for row in csv.DictReader(file)]
    assert len(curve) > 20 and curve[-1] < 2.5


def test_the_speed_of_streams(capsys: pytest.CaptureFixture[str]) -> None:
    speed = load("stream_speed").main(["--gib", "0.01", "--mib", "1", "--device", "cpu"])
    assert speed > 0 and "stream: 0.0 GiB in " in capsys.readouterr().out
