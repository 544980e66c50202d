"""Contenders of `bench` in processes of their own: the suite survives what they do."""

from __future__ import annotations

import functools
import multiprocessing
import os

import bench_cases
import pytest
import torch

from assocscan_bench import peers
from assocscan_bench.measuring import own_process, runner
from assocscan_bench.measuring.timing import Timer
from assocscan_bench.settings import Settings
from assocscan_bench.suite import precision

CPU = Settings(torch.device("cpu"), quick=True)


@pytest.mark.exhaustive
def test_a_contender_that_ends_its_process_is_measured_in_the_other_cases(
    capfd: pytest.CaptureFixture[str],
) -> None:
    makers = [functools.partial(bench_cases.case, n) for n in (4, bench_cases.ENDS, 16)]
    records = list(runner.run("suite", makers, Timer(CPU)))
    found = {(r.contender, int(r.x)): r for r in records}
    assert len(found) == 9
    for length in (4, 16):
        r = found["apart", length]
        assert r.ms is not None and not r.is_wrong and r.kind == "peer"
        assert r.copy_ms == found["here", length].copy_ms  # one copy for all of a case
        assert found["apart, wrong", length].is_wrong
    ended = found["apart", bench_cases.ENDS]
    assert ended.ms is None and ended.note == "its process ended with status 9"
    assert found["here", bench_cases.ENDS].ms is not None
    text = bench_cases.printed(records)
    assert "without apart in 1 of 3 cases: its process ended with status 9" in text
    assert "text for people" not in capfd.readouterr().out  # which is for the records
    assert not multiprocessing.active_children()


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_an_error_leaves_the_process_as_it_is() -> None:
    makers = [functools.partial(bench_cases.case, n, "error") for n in (bench_cases.ENDS, 16)]
    found = {(r.contender, int(r.x)): r for r in runner.run("suite", makers, Timer(CPU))}
    assert found["apart", bench_cases.ENDS].note == "RuntimeError: no such kernel"
    assert found["apart", 16].ms is not None


@pytest.mark.exhaustive
def test_a_failed_device_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = own_process.OwnProcess("apart", CPU, runner.errors_of)
    try:
        first = process.run(functools.partial(bench_cases.error_case, 4), {})["error"]
        assert first != os.getpid()
        assert process.run(functools.partial(bench_cases.error_case, 8), {})["error"] == first
        assert process.ended("it failed") == "it failed"
        assert process.run(functools.partial(bench_cases.error_case, 8), {})["error"] != first
        monkeypatch.setattr(own_process, "SECONDS", 0.0)
        slow = process.run(functools.partial(bench_cases.slow_case, 60.0), {})
        assert slow == {"note": "no answer in 0 seconds"} and process.pipe is None
    finally:
        process.close()


@pytest.mark.exhaustive
def test_a_contender_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process, "MOST_LOST", 1)
    makers = [functools.partial(bench_cases.case, n) for n in (bench_cases.ENDS, 4, 16)]
    records = [r for r in runner.run("suite", makers, Timer(CPU)) if r.contender == "apart"]
    assert [r.note for r in records] == [
        "its process ended with status 9",
        *["not run: 1 processes of its own were lost before"] * 2,
    ]


def test_which_peers_have_their_own() -> None:
    apart = {name for name, peer in peers.PEERS.items() if peer.apart}
    assert apart == {"accelerated-scan", "accelerated-scan warp"}


def test_precision_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peers.Peer("torch", (), lambda: lambda a, b: b, gpu=False, apart=True)
    monkeypatch.setattr(peers, "PEERS", {"theirs": peer})
    case = precision.recurrence_case(CPU, 8, torch.float32)
    assert case.contenders["theirs"].apart and not case.contenders["assocscan"].apart
