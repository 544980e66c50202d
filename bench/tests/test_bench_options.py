"""The options of `python -m assocscan bench`: what each changes, and what is said of wrong ones."""

from __future__ import annotations

import itertools
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assocscan import ops
from assocscan.__main__ import main
from assocscan.runtime.native import build, runner
from assocscan_bench import command, options
from assocscan_bench.measuring import busy, timing
from assocscan_bench.output import plots
from assocscan_bench.output.records import Record
from assocscan_bench.settings import Settings
from assocscan_bench.suites import PEERS_OF, SUITES, TAKES, peers_of

MODULE = """
import torch
from assocscan import monoid

@monoid(identity=(1.0, 0.0), lower=lambda state: state[1])
def of_bench_tests(left, right):
    return right[0] * left[0], right[0] * left[1] + right[1]

@monoid(identity=0.0)
def not_associative(left, right):
    return left - right

@monoid(element_ndim=2, identity=lambda A: torch.eye(A[-1]))
def of_matrices(left, right):
    return right @ left

@monoid
def without_identity(left, right):
    return left + right

def plain(left, right):
    return left + right
"""


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "warning", lambda: None)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's, in the working directory."""
    (tmp_path / "operators_of_mine.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "operators_of_mine"


def records(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What a quick run on the CPU printed with --json."""
    main(["bench", *words, "--quick", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, list)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: python -m assocscan bench [-h] [--shape B,L,D]")
    return captured.err


@pytest.mark.exhaustive
def test_sizes_dtypes_and_passes_are_those_that_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = records(
        capsys, "recurrence", "--shape", "2,9,4", "--shape", "1,5,3", "--dtype", "float64,float16",
        "--pass", "both", "--peers", "none",
    )  # fmt: skip
    assert {(r["shape"], r["dtype"]) for r in found} == {
        (shape, dtype) for shape in ("2 x 9 x 4", "1 x 5 x 3") for dtype in ("float64", "float16")
    }
    assert all("forward and backward" in r["group"] for r in found)
    assert all(r["ms"] > 0 and not r["is_wrong"] for r in found if not r["note"])


def test_lengths_replace_those_of_shapes_and_suites(capsys: pytest.CaptureFixture[str]) -> None:
    found = records(capsys, "rnn", "--shape", "2,9,4", "--lengths", "3,5")
    assert {r["shape"] for r in found} == {"2 x 3 x 4", "2 x 5 x 4"}
    found = records(capsys, "long", "--lengths", "70", "--dtype", "float64")
    assert {(r["x"], r["shape"], r["dtype"]) for r in found} == {(70, "70", "float64")}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
@pytest.mark.parametrize("suite", ["cumsum", "operators", "engines", "rglru", "selective"])
def test_every_pass_is_right(suite: str, which: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients too are compared with those of the float64 reference."""
    op = ["--op", "affine"] if suite in ("operators", "engines") else []
    found = records(capsys, suite, "--shape", "2,7,3", "--pass", which, *op)
    measured = [r for r in found if r["ms"] is not None]
    assert measured and all(r["error"] is not None and not r["is_wrong"] for r in measured)


@pytest.mark.parametrize("is_quick", [False, True])
def test_calls_are_repeated_as_long_as_was_asked_for(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, which here says that a call takes 8 ms, and by GPU events."""
    asked: list[tuple[int, int]] = []

    def do_bench(call: Any, warmup: int, rep: int, quantiles: list[float]) -> list[float]:
        asked.append((warmup, rep))
        return [1.0, 1.0, 1.0]

    testing: Any = types.ModuleType("triton.testing")
    testing.do_bench = do_bench
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    clock = itertools.count(0.0, 0.008)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []
    by_clock, by_events = (5, (5, 20)) if is_quick else (32, (25, 100))
    for repeat, count, milliseconds in ((None, by_clock, by_events), (100, 13, (25, 100)),
                                        (2, 5 if is_quick else 9, (1, 2))):  # fmt: skip
        calls.clear()
        cpu = Settings(torch.device("cpu"), is_quick, repeat=repeat)
        timing.Timer(cpu).measure(lambda: calls.append(0))
        assert len(calls) == count
        timing.Timer(replace(cpu, device=torch.device("cuda"))).measure(lambda: None)
        assert asked.pop() == milliseconds


def test_the_time_of_repetitions_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cumsum", "--shape", "1,4,2", "--repeat", "3", "--out", str(tmp_path)]
    assert all(r["ms"] > 0 for r in records(capsys, *words))
    content = json.loads((tmp_path / "cumsum.json").read_text(encoding="utf-8"))
    assert content["environment"]["repeat"] == 3


def test_backend_is_that_of_assocscan(capsys: pytest.CaptureFixture[str]) -> None:
    found = records(capsys, "cumsum", "--shape", "1,4,2", "--backend", "cuda")
    (ours,) = (r for r in found if r["contender"] == "assocscan")
    assert ours["ms"] is None and ours["note"].startswith("BackendError: the cuda backend")
    assert [r["ms"] > 0 for r in found if r["contender"] == "torch.cumsum"] == [True]


@pytest.mark.exhaustive
def test_operators_of_the_registry_and_of_the_user(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options.operator("affine") is ops.affine
    for name, shape in (("of_bench_tests", "2 x 6 x 3"), ("of_matrices", "2 x 6 x 3")):
        found = records(
            capsys, "operators", "--op", f"{module}:{name}", "--shape", "2,6,3", "--pass", "both"
        )
        assert [r["contender"] for r in found] == ["assocscan", "eager"]
        assert all(r["shape"] == shape and not r["is_wrong"] and r["ms"] for r in found), found


def test_an_operator_that_is_not_associative_is_marked(
    module: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["operators", "--op", f"{module}:not_associative", "--shape", "1,64,2", "--quick"]
    status = main(["bench", *words, "--device", "cpu", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 1
    assert "wrong: error" in printed and "expected" in printed


def test_what_is_said_of_wrong_words(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["recurrence", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["recurrence", "--op", "sum"], "suite recurrence takes no --op: operators, engines do"),
        (["long", "--shape", "1,2,3"], "suite long takes no --shape: recurrence, cumsum, rnn"),
        (
            ["recurrence", "--shape", "1,2,3,4"],
            "recurrence takes no --shape B,L,D,N: selective does",
        ),
        (["selective", "--op", "sum"], "suite selective takes no --op: operators, engines do"),
        (["selective", "--peers", "jax"], "jax is no peer of selective: choose from torch assoc"),
        (["recurrence", "--peers", "mamba_ssm"], "mamba_ssm is no peer of recurrence: choose"),
        (["--op", "sum", "--peers", "jax"], None),
        (["long", "--peers", "none", "--shape", "1,2,3"], "suite long takes no --shape"),
        (["--shape", "1,2"], "'1,2' has 2 sizes: expected B,L,D, such as 8,1024,1536"),
        (["selective", "--shape", "1,2,3,4,5"], "'1,2,3,4,5' has 5 sizes: expected B,L,D, such as"),
        (["selective", "--shape", "1,2,3,0"], "'0' is no size: expected a whole number from 1"),
        (["--shape", "1,0,2"], "'0' is no size: expected a whole number from 1"),
        (["--lengths", "4,x"], "'x' is no size"),
        (["--dtype", "int32"], "unknown dtype 'int32': choose from"),
        (["--repeat", "0"], "'0' is no time: expected milliseconds, a whole number from 1"),
        (["--repeat", "0.5"], "'0.5' is no time: expected milliseconds"),
        (["--pass", "sideways"], "unknown pass 'sideways': choose from forward, backward, both"),
        (["--backend", "gpu"], "unknown backend 'gpu': choose from auto, triton"),
        (["--device", "nonsense"], "device 'nonsense': Expected one of"),
        (["--op", "affin"], "no operator is registered as 'affin'; did you mean 'affine'?"),
        (["--op", "no_such_module:f"], "module 'no_such_module' cannot be imported"),
        (["--op", f"{module}:absent"], f"module '{module}' has no attribute 'absent'"),
        (["--op", f"{module}:plain"], "is of type function, expected a Monoid: put @assocscan"),
    ):
        if expected is not None:
            assert expected in refusal(capsys, *words), words


def test_other_commands_print_their_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("demo", "env", "stress"):
        with pytest.raises(SystemExit):
            main([name, "--frobnicate"])
        said = capsys.readouterr().err
        assert said.startswith(f"usage: python -m assocscan {name} ")
        assert "unrecognized arguments: --frobnicate" in said


def test_operators_of_which_nothing_says_what_they_take(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match="cannot tell what 'without_identity' scans: give it an"):
        records(capsys, "operators", "--op", f"{module}:without_identity")


def test_suites_are_those_that_take_the_options() -> None:
    assert set(TAKES) == set(SUITES)
    assert set(PEERS_OF) == {name for name in SUITES if "peers" in TAKES[name]}
    assert set(peers_of(["selective", "long"])) == {"torch associative_scan", "mamba_ssm"}
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)

    def chosen(*words: str) -> list[str]:
        return command.chosen_suites(parser.parse_intermixed_args(words), parser)

    assert chosen() == list(SUITES)
    assert chosen("--op", "sum") == ["operators", "engines"]
    assert chosen("cumsum", "--quick", "long") == ["cumsum", "long"]
    assert chosen("--peers", "none") == list(SUITES)
    assert chosen("--shape", "1,2,3", "--shape", "1,2,3,4") == ["selective"]


def test_files_and_names_of_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "cumsum", "--shape", "1,4,2", "--device", "cpu", "--quick", "--json"]
    main(words)
    assert list(tmp_path.iterdir()) == []
    main([*words, "--out", str(tmp_path), "--plot", "paper"])
    captured = capsys.readouterr()
    assert json.loads(captured.out.split("]\n[")[0] + "]")
    names = {"cumsum.csv", "cumsum.json"}
    assert {p.name for p in tmp_path.iterdir()} == (
        names if plots.why_not() else names | {"paper-cumsum.png"}
    )
    assert "→" in captured.err


def test_an_interrupt_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = command.runner.run

    def interrupted(*arguments: Any) -> Iterator[Record]:
        yield next(iter(whole(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(command.runner, "run", interrupted)
    words = ["bench", "cumsum", "rnn", "--shape", "1,4,2", "--device", "cpu", "--quick"]
    assert main([*words, "--out", str(tmp_path)]) == command.INTERRUPTED
    assert len((tmp_path / "cumsum.csv").read_text().splitlines()) == 2
    assert not (tmp_path / "rnn.csv").exists()
    assert "interrupted: cumsum is not complete" in capsys.readouterr().out


def test_a_quick_run_waits_for_no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one that is there; a full run compiles it before anything is timed."""
    loaded: list[bool] = []
    monkeypatch.setattr(runner, "load", lambda: loaded.append(True))
    monkeypatch.setattr(runner, "module", None)
    monkeypatch.setattr(runner, "why_not", None)
    monkeypatch.setattr(runner, "default", "background")
    monkeypatch.delenv(runner.VARIABLE, raising=False)
    monkeypatch.setattr(build, "is_cached", lambda: False)
    command.prepare_runner(is_quick=True)
    assert not loaded and runner.mode() == "python"
    monkeypatch.setattr(runner, "default", "background")
    command.prepare_runner(is_quick=False)
    assert loaded == [True]
    monkeypatch.setattr(build, "is_cached", lambda: True)
    command.prepare_runner(is_quick=True)
    assert loaded == [True, True]
    monkeypatch.setenv(runner.VARIABLE, "python")
    command.prepare_runner(is_quick=False)
    assert loaded == [True, True]


def test_busy_machines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(busy, "SECONDS", 0.0)
    monkeypatch.setattr(busy, "processors", lambda: 2)
    looks = iter([(10.0, 100.0), (70.0, 200.0), (10.0, 100.0), (15.0, 200.0)])
    monkeypatch.setattr(busy, "counters", lambda: next(looks))
    assert "other programs use 60% of the 2 processors: this machine is busy" in str(busy.warning())
    assert busy.warning() is None
    monkeypatch.setattr(busy, "counters", lambda: None)
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    assert busy.share() == 0.5
    assert torch.get_num_threads() >= 1


def test_counters_of_the_system() -> None:
    found = busy.counters()
    if found is not None:
        assert 0 < found[0] < found[1]
