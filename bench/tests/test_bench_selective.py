"""`python -m assocscan bench selective`: its contenders, their checks, its columns."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import printed
from selective_loops import selective_loop
from torch import Tensor

from assocscan.__main__ import main
from assocscan_bench import selective_peers
from assocscan_bench.cases import OURS, Case, Contender, contender
from assocscan_bench.measuring import busy, device_limits, runner, selective_reference
from assocscan_bench.measuring.selective_reference import exact
from assocscan_bench.measuring.timing import Timer, Times
from assocscan_bench.output.records import Record
from assocscan_bench.peers import Peer
from assocscan_bench.selective_inputs import Inputs, draw
from assocscan_bench.selective_peers import LOOP, SELECTIVE_PEERS
from assocscan_bench.settings import BACKWARD, BOTH, FORWARD, Settings
from assocscan_bench.suite import selective

CPU = Settings(torch.device("cpu"), quick=True)
SHAPE = (2, 11, 5, 3)
PASSES = [FORWARD, BACKWARD, BOTH]


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "warning", lambda: None)


def measured(case: Case, timer: Timer | None = None) -> dict[str, Record]:
    return {r.contender: r for r in runner.run("suite", [lambda: case], timer or Timer(CPU))}


def by_loop(*tensors: Tensor) -> Tensor:
    return selective_loop(*tensors, delta_softplus=True)[0]


def one_case(which: str, dtype: torch.dtype = torch.float32, settings: Settings = CPU) -> Case:
    return selective.case(settings, SHAPE, dtype, which)


@pytest.mark.parametrize("part", [1, 8 * 11 * 3 * 2, 1 << 24], ids=["one", "two", "all"])
def test_the_reference_is_the_loop(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """y, and all gradients for random and for partly zero cotangents, however the channels are cut:
    one by one, two and a rest, all at once. Both sides are float64: only the order of sums differs.
    """
    monkeypatch.setitem(selective_reference.PART_BYTES, "cpu", part)
    inputs, cotangent = draw(CPU, SHAPE, torch.float32)
    wide = [t.double().requires_grad_() for t in inputs]
    y = by_loop(*wide)
    found = exact(inputs)
    assert isinstance(found, Tensor) and found.dtype == torch.float64
    torch.testing.assert_close(found, y.detach(), rtol=1e-12, atol=1e-12)
    zeros = torch.rand(cotangent.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    for g in (cotangent, cotangent.masked_fill(zeros, 0)):
        want = torch.autograd.grad(y, wide, g.double(), retain_graph=True)
        for name, a, b in zip(Inputs._fields, exact(inputs, g), want, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n} {m}"
            )


def test_inputs_are_those_of_a_layer() -> None:
    """No two series are equal, states fade, parameters are float32 beside 16-bit activations."""
    inputs, g = draw(CPU, SHAPE, torch.bfloat16)
    assert inputs.u.shape == inputs.z.shape == g.shape == (2, 11, 5)
    assert inputs.B.shape == inputs.C.shape == (2, 11, 3) and inputs.A.shape == (5, 3)
    series = [inputs.u, inputs.delta, inputs.z, g]
    assert all(not torch.equal(a, b) for k, a in enumerate(series) for b in series[:k])
    assert (inputs.A < 0).all()
    wide = {name for name, t in zip(Inputs._fields, inputs, strict=True)
            if t.dtype == torch.float32}  # fmt: skip
    assert wide == {"A", "D", "delta_bias"}
    assert all(t.dtype == torch.float64 for t in draw(CPU, SHAPE, torch.float64)[0])


@pytest.mark.thinned(7)
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_contenders_do_the_same_work(
    which: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, the loop, and torch's scan, which is not compiled here."""
    monkeypatch.setattr(torch, "compile", lambda f: f)
    found = measured(one_case(which, dtype, replace(CPU, quick=False)))
    assert set(found) == {"assocscan", *SELECTIVE_PEERS, LOOP}
    for name in ("assocscan", LOOP, "torch associative_scan"):
        r = found[name]
        assert r.ms is not None and r.error is not None and not r.is_wrong, (name, r.note)
        assert r.of_copy is not None and r.memory is None and r.of_exponentials is None
    assert found["mamba_ssm"].note in ("not installed", "runs on GPUs only")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 2, 3), (1, 2, 1, 1), (2, 3, 4, 1)])
@pytest.mark.parametrize("which", PASSES)
def test_smallest_sizes(
    shape: tuple[int, int, int, int], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step among them, on which A has no influence."""
    monkeypatch.setattr(torch, "compile", lambda f: f)
    found = measured(selective.case(replace(CPU, quick=False), shape, torch.float32, which))
    for name in ("assocscan", LOOP, "torch associative_scan"):
        assert found[name].ms is not None and not found[name].is_wrong, (name, found[name].note)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", Inputs._fields)
@pytest.mark.parametrize("which", [FORWARD, BOTH])
def test_wrong_contenders_are_marked(which: str, name: str) -> None:
    """One that takes one of the tensors for another, or has one wrong gradient."""
    case = one_case(which)
    index = Inputs._fields.index(name)

    def spoiled(result: Any) -> Any:
        if which == FORWARD:
            return result
        return tuple(1.3 * g if k == index else g for k, g in enumerate(result))

    def other(*tensors: Tensor) -> Tensor:
        return by_loop(*(t.flip(0).roll(1, -1) if k == index else t for k, t in enumerate(tensors)))

    inputs, g = draw(CPU, SHAPE, torch.float32)
    wrong = selective.passes_of(other if which == FORWARD else by_loop, inputs, which, g)
    right = selective.passes_of(by_loop, inputs, which, g)
    found = measured(
        replace(case, contenders={"right": contender(right),
                                  "wrong": contender(lambda: spoiled(wrong()))})
    )  # fmt: skip
    assert not found["right"].is_wrong and found["right"].error is not None
    assert found["wrong"].is_wrong and found["wrong"].note.startswith("wrong: error ")


@pytest.mark.parametrize("which", PASSES)
def test_mamba_ssm_gets_its_layout(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in its place: the steps last and contiguous, softplus; a wrong one is marked."""

    def theirs(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None,
        delta_bias: Any = None, delta_softplus: bool = False,
    ) -> Tensor:  # fmt: skip
        assert u.shape == delta.shape == z.shape == (2, 5, 11)
        assert B.shape == C.shape == (2, 3, 11) and A.shape == (5, 3)
        assert all(t.is_contiguous() for t in (u, delta, z, B, C)) and delta_softplus
        return by_loop(u.mT, delta.mT, A, B.mT, C.mT, scale * D, z.mT, delta_bias).mT

    module: Any = types.ModuleType("mamba_ssm.ops.selective_scan_interface")
    module.selective_scan_fn = theirs
    for name in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    peer = replace(SELECTIVE_PEERS["mamba_ssm"], module="torch", gpu=False)
    monkeypatch.setitem(SELECTIVE_PEERS, "mamba_ssm", peer)
    for scale in (1.0, 1.5):
        r = measured(one_case(which))["mamba_ssm"]
        assert r.ms is not None and r.is_wrong == (scale != 1), r.note


def test_peers_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Peer("no_such_module", (), selective_peers.mamba_ssm, rows=True)
    monkeypatch.setitem(SELECTIVE_PEERS, "mamba_ssm", absent)
    missing = one_case(FORWARD).missing
    assert missing["mamba_ssm"] == "not installed"
    assert missing["torch associative_scan"].startswith("torch compiles it for longer")
    chosen = one_case(FORWARD, settings=replace(CPU, peers=()))
    assert set(chosen.contenders) == {"assocscan", LOOP} and not chosen.missing


def test_nothing_writes_all_states_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """[2, 11, 5, 3] in float32 are 1320 bytes."""
    full = replace(CPU, quick=False)
    for limit, is_left_out in ((1320, False), (1319, True)):
        monkeypatch.setattr(selective_peers, "MOST_BYTES", limit)
        case = one_case(FORWARD, settings=full)
        assert (set(case.contenders) == {"assocscan"}) == is_left_out
    assert case.missing[LOOP] == case.missing["torch associative_scan"]
    assert case.missing[LOOP].startswith("writes arrays of (2, 11, 5, 3), 0.0 GiB each; left out")
    monkeypatch.setattr(selective_peers, "MOST_BYTES", 1 << 30)
    monkeypatch.setattr(selective_peers, "LONGEST_LOOP", 10)
    case = one_case(FORWARD, settings=full)
    assert case.missing[LOOP] == "not run beyond 10 steps"
    assert "torch associative_scan" in case.contenders


def test_bytes_are_those_of_inputs_and_results() -> None:
    g = draw(CPU, SHAPE, torch.bfloat16)[1]
    read = 3 * 2 * g.numel() + 2 * 2 * 2 * 11 * 3 + 4 * (5 * 3 + 5 + 5)
    y = 2 * g.numel()
    expected = {FORWARD: read + y, BACKWARD: 2 * read + y, BOTH: 3 * read + 2 * y}
    for which in PASSES:
        case = one_case(which, torch.bfloat16)
        assert case.bytes == expected[which]
        assert case.exponentials == 2 * 11 * 5 * 3 * (2 if which == BOTH else 1)


@pytest.mark.exhaustive
def test_the_command_has_the_sizes_that_were_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["bench", "selective", "--shape", "1,9,4", "--shape", "2,6,3,2", "--dtype",
             "float32,float16", "--quick", "--device", "cpu"]  # fmt: skip
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    timed = [r for r in found if r["ms"] is not None]
    assert {(r["shape"], r["dtype"], r["contender"]) for r in timed} == {
        (shape, dtype, name) for shape in ("1 x 9 x 4 x 16", "2 x 6 x 3 x 2")
        for dtype in ("float32", "float16") for name in ("assocscan", LOOP)
    }  # fmt: skip
    assert len(timed) == 2 * 8  # forward, and with backward
    assert all(r["error"] is not None and not r["is_wrong"] for r in timed)
    assert {r["contender"] for r in found} >= set(SELECTIVE_PEERS)
    assert main([*words, "--lengths", "3,5", "--pass", "backward", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "(2, L, 3, 2) float16, backward\n    L 3 " in printed and "L 5" in printed
    assert "exponential limit are measured on GPUs only" in printed
    assert "without mamba_ssm: " in printed and "without jax" not in printed
    assert (tmp_path / "selective.csv").exists()


def test_a_wrong_result_of_ours_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = selective.selective_scan
    monkeypatch.setattr(selective, "selective_scan", lambda *t, **o: 1.3 * right(*t, **o))
    words = ["bench", "selective", "--shape", "1,7,3,2", "--quick", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    ours = [line for line in lines if " assocscan  " in line]
    assert len(ours) == 2 and all("wrong: error" in line and "expected" in line for line in ours)
    assert not any("wrong" in line for line in lines if LOOP in line)


def test_full_suites_have_the_sizes_they_promise() -> None:
    for device, batches in (("cpu", {1}), ("cuda", {2, 8})):
        settings = Settings(torch.device(device), chosen_dtypes=(torch.float32,))
        sizes = [maker.args[1] for maker in selective.cases(settings)]  # type: ignore[attr-defined]
        assert {s[0] for s in sizes} == batches and {s[3] for s in sizes} == {16}
        assert len(sizes) == 2 * 3 * len(batches)


class FakeTimer(Timer):
    """As on a GPU, where each call takes 2 ms and each copy 1."""

    def measure(self, call: Callable[[], Any], wall: bool = False) -> Times:
        return Times(2.0, 2.0, 2.0)

    def copy(self, count: int) -> Times:
        return Times(1.0, 1.0, 1.0)


def test_columns_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^30 exponentials at 16 × 64 per clock at 1.048576 GHz are 1 ms; memory is the peak of one
    call, without what was there before."""
    cuda: Any = torch.cuda
    steps: list[str] = []
    properties = types.SimpleNamespace(multi_processor_count=64, clock_rate=1 << 20)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "synchronize", lambda device: steps.append("wait"))
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda device: steps.append("reset"))
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 5 << 20)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device: 8 << 20)
    gpu = Settings(torch.device("cuda"))
    case = Case("group", "L", 8, (2, 8), torch.float32, 1 << 20,
                {"a": Contender(lambda: lambda: steps.append("call"), OURS)}, memory=True,
                exponentials=1 << 30)  # fmt: skip
    found = measured(case, FakeTimer(gpu))["a"]
    assert found.memory == 3 << 20 and found.of_exponentials == pytest.approx(0.5)
    assert steps == ["call", "wait", "reset", "call", "wait"]
    (line,) = (line for line in printed([found]).splitlines() if " ms " in line)
    assert line.endswith("0.50 of copy        3.0 MiB  0.50 of exponentials")
    plain = measured(replace(case, memory=False, exponentials=0), FakeTimer(gpu))["a"]
    assert plain.memory is None and plain.of_exponentials is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device_limits.exponentials_ms(1, gpu.device) is None
    assert device_limits.exponentials_ms(1, CPU.device) is None
