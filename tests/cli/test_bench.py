"""`python -m assocscan bench`: what it measures, and what it says of what it cannot."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, ops
from assocscan.__main__ import main
from assocscan.cli.bench import command, peers, plots, runner
from assocscan.cli.bench.cases import Case, Contender, Settings, contender, forward_backward
from assocscan.cli.bench.records import Record
from assocscan.cli.bench.report import table
from assocscan.cli.bench.suite import operators
from assocscan.cli.bench.suite.rnn import final_state, loop
from assocscan.cli.bench.suites import SUITES
from assocscan.cli.bench.timing import Timer, quantiles

CPU = Settings(torch.device("cpu"), quick=True)


def case_of(contenders: dict[str, Contender], **options: Any) -> Case:
    return Case("group", "L", 8, (2, 8), torch.float32, 1 << 20, contenders, **options)


def measured(case: Case) -> dict[str, Record]:
    return {r.contender: r for r in runner.run("suite", [lambda: case], Timer(CPU))}


def test_command_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "precision", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "precision.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    content = json.loads((tmp_path / "precision.json").read_text(encoding="utf-8"))
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["quick"] is True
    assert [r["contender"] for r in content["records"]] == [r["contender"] for r in rows]
    ours = [r for r in rows if r["contender"] == "assocscan"]
    assert {r["dtype"] for r in ours} == {"float32", "float16", "bfloat16"}
    for r in ours:
        bound = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 5e-3}[r["dtype"]]
        assert 0 < float(r["error"]) < bound
    for name, peer in peers.PEERS.items():
        reason = peer.missing(CPU)
        if reason is not None:
            assert f"without {name}: {reason}" in printed
            assert {r["note"] for r in rows if r["contender"] == name} == {reason}


def test_unknown_suites_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speed"])
    assert "unknown suite 'speed': choose from recurrence" in capsys.readouterr().err


def test_peers_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "recurrence", "--peers", "jax,cub"])
    assert "unknown peer 'cub': choose from torch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "recurrence", "--device", "nonsense"])
    assert "device 'nonsense': Expected one of" in capsys.readouterr().err
    assert command.known_peers("none") == ()
    chosen = Settings(torch.device("cpu"), quick=True, peers=command.known_peers("fla, jax"))
    a = torch.rand(1, 3, 2)
    _, missing = peers.recurrence_contenders(chosen, a, a, backward=True)
    assert missing["fpscan"] == "not asked for" and missing["jax"] != "not asked for"


def test_times_are_those_of_the_calls() -> None:
    """A call that waits 4 ms takes about that, and its fraction of a copy is the copy's share."""
    found = measured(case_of({"waits": contender(lambda: time.sleep(4e-3))}))["waits"]
    assert found.ms is not None and found.copy_ms is not None and found.of_copy is not None
    assert found.ms >= 4 and found.ms_low is not None and found.ms_high is not None
    assert found.ms_low <= found.ms <= found.ms_high
    assert found.of_copy == pytest.approx(found.copy_ms / found.ms)
    assert found.bytes == 1 << 20


def test_quantiles_of_times() -> None:
    assert quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == (3.5, 2.0, 5.0)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)


def test_failures_and_missing_contenders_are_named() -> None:
    def out_of_memory() -> Callable[[], object]:
        raise torch.OutOfMemoryError("2 TiB\nmore")

    found = measured(
        case_of(
            {"large": Contender(out_of_memory), "fine": contender(lambda: 0)},
            missing={"absent": "not installed"},
        )
    )
    assert found["large"].note == "OutOfMemoryError: 2 TiB" and found["large"].ms is None
    assert found["absent"].note == "not installed"
    assert found["fine"].ms is not None
    text = table(list(found.values()))
    assert "without absent: not installed" in text and "without large: OutOfMemory" in text
    assert "fine" in text and "of copy" in text


@pytest.mark.parametrize("rows", [False, True])
def test_peers_get_their_layout(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's output, turned back, is the recurrence of the tensors that the others scan."""

    def scan(a: Tensor, b: Tensor) -> Tensor:
        return loop(a.mT, b.mT).mT if rows else loop(a, b)

    fake = peers.Peer("torch", (), lambda: scan, rows=rows, gpu=False, differentiable=False)
    absent = peers.Peer("no_such_module", (), lambda: scan, gpu=False)
    monkeypatch.setattr(peers, "PEERS", {"fake": fake, "absent": absent})
    a, b = torch.rand(2, 5, 3), torch.rand(2, 5, 3)
    found, missing = peers.recurrence_contenders(CPU, a, b, backward=False)
    result = found["fake"].make()()
    torch.testing.assert_close(result.mT if rows else result, loop(a, b))
    assert missing == {"absent": "not installed"}
    found, missing = peers.recurrence_contenders(CPU, a, b, backward=True)
    assert not found and missing["fake"] == "has no gradient here"


def test_final_state_is_that_of_the_loop() -> None:
    a, b = torch.rand(2, 6, 3), torch.rand(2, 6, 3)
    torch.testing.assert_close(final_state(a, b), loop(a, b)[:, -1])


def test_forward_backward_gives_gradients() -> None:
    x = torch.rand(4)
    (slope,) = forward_backward(lambda t: 3 * t, (x,))()
    assert ((slope >= 0) & (slope < 3)).all() and slope.max() > 0
    assert not x.requires_grad


@pytest.mark.parametrize("name", [n for n in SUITES if n != "precision"])
def test_every_suite_has_cases_that_run(name: str) -> None:
    """The smallest case: all its contenders do the same work, on tensors of the stated size."""
    makers = SUITES[name](CPU)
    assert len(makers) >= 2
    case = makers[0]()
    assert case.bytes > 0
    for label, entry in case.contenders.items():
        result = entry.make()()
        assert result is not None, label


def test_every_operator_is_measured() -> None:
    """On inputs that it takes."""
    assert {op.name for op in operators.OPERATORS} >= set(ops.__all__)
    for op in operators.OPERATORS:
        associative_scan(op, operators.inputs(op, (1, 2, 3), "cpu"), 1, backend="eager")


def test_full_suites_have_the_sizes_they_promise() -> None:
    full = Settings(torch.device("cpu"))
    lengths = [maker.args[2] for maker in SUITES["recurrence"](full)]  # type: ignore[attr-defined]
    assert min(lengths) == 128
    assert {m.args[1] for m in SUITES["precision"](full)} == {3407, 4, 42, 57}  # type: ignore[attr-defined]


def test_plots_need_matplotlib_only_to_be_drawn(tmp_path: Path) -> None:
    if plots.why_not() is not None:
        assert "matplotlib" in str(plots.why_not())
        return
    records = list(measured(case_of({"a": contender(lambda: 0)})).values())
    assert plots.draw(tmp_path / "a.png", "suite", records, "cpu")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert not plots.draw(tmp_path / "b.png", "suite", [], "cpu")
