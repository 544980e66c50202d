"""The command line: python -m assocscan demo and env."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT

import assocscan
from assocscan.__main__ import main
from assocscan.cli import demo, env
from assocscan.cli.data import nile, sunspots
from assocscan.runtime import backends
from assocscan.runtime.native import runner


def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assocscan", *arguments],
        capture_output=True, text=True, env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.exhaustive
def test_demo_checks_every_scan() -> None:
    result = run_command("demo")
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "exponential average",
        "running mean",
        "running variance",
        r"sum before \(exclusive\)",
        r"sum after \(reverse, exclusive\)",
        r"highest from here on \(reverse\)",
        r"drawdown \(",
        "drawdown by torch operations",
        "gradient of the average",
        "output, all at once",
        "gradient of its parameters",
    ):
        errors = re.findall(rf"^  {line}.* (\S+)$", result.stdout, re.MULTILINE)
        assert errors, line
        assert all(float(error) <= demo.TOLERANCE for error in errors), line
    assert re.search(r"^  cumsum .*x  torch\.cumsum$", result.stdout, re.MULTILINE)
    assert re.search(r"smoothing after \d+ descent steps: 0\.246\d", result.stdout)
    assert 'without a C++ compiler, or with backend="eager"' in result.stdout
    # A busy machine may take more than five seconds for a kernel, and then says so.
    said = [line for line in result.stderr.splitlines() if "takes longer than" not in line]
    assert said == []


@pytest.mark.exhaustive
def test_demo_runs_without_a_compiler() -> None:
    """It says what runs then, on its second line and in the plan, and gives no warning."""
    result = run_command("demo", CXX="/no/such/compiler", ASSOCSCAN_RUNNER="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "no C++ compiler was found (looked for /no/such/compiler)" in result.stdout
    assert "every scan on the CPU runs as torch operations (eager)" in result.stdout
    assert re.search(r"^engine +eager$", result.stdout, re.MULTILINE)


def test_demo_compiles_no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the background either: the compiler would take one of the cores that are timed."""
    modes = []
    monkeypatch.setattr(demo, "run", lambda: modes.append(runner.mode()) or 0)
    monkeypatch.setattr(runner, "default", "background")
    monkeypatch.delenv(runner.VARIABLE, raising=False)
    assert main(["demo"]) == 0
    monkeypatch.setenv(runner.VARIABLE, "wait")
    assert main(["demo"]) == 0
    assert modes == ["python", "wait"]


@pytest.mark.parametrize("values", [[3.0], [2.0, 5.0, 1.0, 4.0]])
def test_loops_of_the_demo(values: list[float]) -> None:
    n = len(values)
    assert list(demo.sum_before_loop(values)) == [sum(values[:t]) for t in range(n)]
    assert demo.sum_after_loop(values) == [sum(values[t + 1 :]) for t in range(n)]
    assert demo.highest_after_loop(values) == [max(values[t:]) for t in range(n)]


def test_demo_fails_on_a_wrong_result() -> None:
    with pytest.raises(demo.CheckFailed, match="made up"):
        demo.check("made up", torch.tensor([1.0, 2.0]), [1.0, 2.1])
    with pytest.raises(demo.CheckFailed, match="made up"):
        demo.check("made up", torch.tensor([1.0, torch.nan]), [1.0, 2.0])


def test_demo_reports_a_failure_by_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "mean_loop", lambda values: [0.5 * value for value in values])
    assert demo.run() == 1
    assert "demo failed: running mean" in capsys.readouterr().out


def test_env_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSOCSCAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ASSOCSCAN_RUNNER", "python")  # it would be compiled into that folder
    result = run_command("env")
    assert result.returncode == 0, result.stderr
    lines = dict(re.findall(r"^(\w+) +(.+)$", result.stdout, re.MULTILINE))
    assert lines["assocscan"] == assocscan.__version__
    assert lines["torch"].startswith(torch.__version__)
    assert lines["cache"] == str(tmp_path)
    assert {"compiler", "cupy", "devices", "python", "triton"} <= set(lines)
    assert lines["threads"] == str(torch.get_num_threads())
    for name, reason in backends.availability().items():
        state = "available" if reason is None else "no:"
        assert re.search(rf"^  {name} +{state}", result.stdout, re.MULTILINE)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of POSIX")
def test_env_says_why_the_cache_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("ASSOCSCAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ASSOCSCAN_RUNNER", "python")  # it would be compiled into that folder
    result = run_command("env")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("cache"))
    assert "a temporary folder" in line and f"all users can write to {tmp_path}" in line


def test_what_cupy_would_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shown where a GPU is there and the CUDA engine cannot run; figures are the benchmark's."""
    env.run()
    is_missing = torch.cuda.is_available() and backends.availability()["cuda"] is not None
    assert ("would run" in capsys.readouterr().out) == is_missing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(env, "availability", lambda: {"cuda": "CuPy is not installed"})
    env.run()
    shown = capsys.readouterr().out
    found: dict[tuple[str, str], dict[str, float]] = {}
    with open(ROOT / "docs/benchmarks/2026-11-27-h100/engines.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["of_copy"]:
                key = row["group"], row["shape"]
                found.setdefault(key, {})[row["contender"]] = float(row["of_copy"])
    for group, shape, without, with_cupy in env.WITH_CUPY:
        measured = found[group, shape]
        best = max(measured["triton"], measured["multipass"])
        assert (without, with_cupy) == (round(best, 2), round(measured["auto"], 2)), (group, shape)
        assert re.search(rf"{group} +{shape} +{without:.2f} +{with_cupy:.2f}", shown)


def test_unknown_command_is_refused() -> None:
    result = run_command("frobnicate")
    assert result.returncode == 2
    assert "invalid choice" in result.stderr


def test_series_have_their_known_values() -> None:
    years, flow = nile()
    assert years.tolist() == list(range(1871, 1971))
    assert flow[:4].tolist() == [1120.0, 1160.0, 963.0, 1210.0]
    assert flow.mean().item() == pytest.approx(919.35)
    years, numbers = sunspots()
    assert len(numbers) == 12 * (2009 - 1749)
    assert years[0].item() == pytest.approx(1749 + 1 / 24)
    assert numbers.max().item() == 253.8
    assert years[numbers.argmax()].item() == pytest.approx(1957 + 9.5 / 12)  # October
