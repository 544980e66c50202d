"""`python -m assocscan bench`: what it measures, and what it says of what it cannot."""

from __future__ import annotations

import csv
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import printed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assocscan import associative_scan, ops
from assocscan.__main__ import main
from assocscan.runtime.backends import BACKENDS
from assocscan.testing import tolerance
from assocscan_bench import operator_inputs, options, peers
from assocscan_bench.cases import Case, Contender, contender, passes_of
from assocscan_bench.measuring import runner
from assocscan_bench.measuring.checks import scan_check
from assocscan_bench.measuring.timing import Timer, quantiles
from assocscan_bench.output import plots
from assocscan_bench.output.records import Record
from assocscan_bench.settings import BACKWARD, BOTH, FORWARD, Settings
from assocscan_bench.suite import precision
from assocscan_bench.suite.rnn import RECURRENCE, differentiable_loop, final_state, loop
from assocscan_bench.suites import SUITES

CPU = Settings(torch.device("cpu"), quick=True)


def case_of(contenders: dict[str, Contender], **options: Any) -> Case:
    return Case("group", "L", 8, (2, 8), torch.float32, 1 << 20, contenders, **options)


def measured(case: Case) -> dict[str, Record]:
    return {r.contender: r for r in runner.run("suite", [lambda: case], Timer(CPU))}


@pytest.mark.slow
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
    ours = [r for r in rows if r["contender"].startswith("assocscan")]
    assert {r["dtype"] for r in ours} == {"float32", "float16", "bfloat16"}
    for r in ours:  # the rounding of the output and of each step
        bound = sum(tolerance(getattr(torch, r["dtype"]), int(r["x"])))
        assert 0 < float(r["error_low"]) <= float(r["error"]) <= float(r["error_high"]) < bound
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
    assert options.known_peers("none") == ()
    chosen = Settings(torch.device("cpu"), quick=True, peers=options.known_peers("fla, jax"))
    a = torch.rand(1, 3, 2)
    found, missing = peers.recurrence_contenders(chosen, a, a, BOTH, a)
    assert {*found, *missing} == {"fla", "jax"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [precision.recurrence_case, precision.sum_case])
def test_rounding_in_each_combination_is_worse(
    make: Callable[..., Case], dtype: torch.dtype
) -> None:
    """The ablation is what it is called: as far off as a loop that rounds every step, where a scan
    that combines in float32 is as good as its output's rounding; compensated sums are no worse."""
    case = make(CPU, 512, dtype)
    found = {r.contender: r for r in measured(case)
             .values() if r.error is not None}  # fmt: skip
    ours, rounded = found["assocscan"], found[precision.ROUNDED]
    assert ours.error is not None and rounded.error is not None
    assert ours.error < torch.finfo(dtype).eps < 2 * rounded.error
    assert rounded.error > 2 * ours.error
    assert found["loop of torch operations"].error == pytest.approx(rounded.error, rel=0.5)
    if "assocscan, compensated" in found:
        assert float(found["assocscan, compensated"].error or 1) <= 1.01 * ours.error


def test_compensated_sums_are_exact_to_rounding() -> None:
    found = measured(precision.sum_case(CPU, 1 << 15, torch.float32))
    eps = torch.finfo(torch.float32).eps
    assert float(found["assocscan, compensated"].error or 1) < eps
    assert float(found["assocscan"].error or 0) > eps


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
    text = printed(list(found.values()))
    assert "without absent: not installed" in text and "without large: OutOfMemory" in text
    assert "fine" in text and "of copy" in text


@pytest.mark.thinned(5)
@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("which", [FORWARD, BACKWARD, BOTH])
def test_peers_get_their_layout(
    rows: bool, logarithm: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's output and gradients, turned back, pass the check of the tensors that the others
    scan; those of a peer with another recurrence do not."""

    def scan(a: Tensor, b: Tensor) -> Tensor:
        a = a.exp() if logarithm else a
        return (differentiable_loop(a.mT, b.mT).mT if rows else differentiable_loop(a, b)) + 0 * a

    def wrong(a: Tensor, b: Tensor) -> Tensor:
        return scan(a, 1.01 * b)

    absent = peers.Peer("no_such_module", (), lambda: scan, gpu=False)
    fakes = {
        name: peers.Peer("torch", (), lambda f=f: f, rows=rows, gpu=False, logarithm=logarithm)
        for name, f in (("right", scan), ("wrong", wrong))
    }
    monkeypatch.setattr(peers, "PEERS", {**fakes, "absent": absent})
    a, b, g = torch.rand(2, 5, 3) + 0.01, torch.rand(2, 5, 3), torch.rand(2, 5, 3)
    found, missing = peers.recurrence_contenders(CPU, a, b, which, g)
    case = case_of(found, check=scan_check(RECURRENCE, (a, b), 1, which, g))
    records = measured(case)
    assert missing == {"absent": "not installed"}
    assert not records["right"].is_wrong and records["right"].ms is not None
    assert records["wrong"].is_wrong and records["wrong"].note.startswith("wrong: error ")


def test_peers_without_gradients_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = peers.Peer("torch", (), lambda: loop, gpu=False, differentiable=False)
    monkeypatch.setattr(peers, "PEERS", {"fake": fake})
    a = torch.rand(2, 5, 3)
    found, missing = peers.recurrence_contenders(CPU, a, a, BOTH, a)
    assert not found and missing["fake"] == "has no gradient here (forward and backward)"


@pytest.mark.exhaustive
def test_torch_compiles_its_scan_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for other sizes is forgotten: after eight of them torch would run the scan
    as it is, and time that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (4, 6):
            a = torch.rand(2, length, 3)
            h = peers.torch_associative_scan()(a, a)
            torch.testing.assert_close(h, loop(a, a))


def test_the_gradient_of_the_loop_has_no_whole_array_for_each_step() -> None:
    a, steps = torch.rand(2, 64, 3), 64
    written: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            written.append(result.numel() if isinstance(result, Tensor) else 0)
            return result

    with Sizes():
        passes_of(differentiable_loop, (a, a), BOTH, a)()
    assert len(written) > steps
    assert sum(n >= a.numel() for n in written) < steps // 2


def test_final_state_is_that_of_the_loop() -> None:
    a, b = torch.rand(2, 6, 3), torch.rand(2, 6, 3)
    torch.testing.assert_close(final_state(a, b), loop(a, b)[:, -1])


def test_passes_are_the_scan_and_its_gradients() -> None:
    """Integers among the inputs have none."""
    x, k, g = torch.rand(4), torch.arange(4), torch.rand(4)
    called = []

    def scan(t: Tensor, n: Tensor) -> Tensor:
        called.append(1)
        return 3 * t + n

    torch.testing.assert_close(passes_of(scan, (x, k), FORWARD)(), 3 * x + k)
    both = passes_of(scan, (x, k), BOTH, g)
    torch.testing.assert_close(both(), (3 * g,))
    backward = passes_of(scan, (x, k), BACKWARD, g)
    before = len(called)
    torch.testing.assert_close((backward(), backward()), ((3 * g,), (3 * g,)))
    assert len(called) == before and not x.requires_grad


@pytest.mark.slow(7)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name == "distributed" else [])
        for name in SUITES
        if name != "precision"
    ],
)
def test_every_suite_has_cases_that_run(name: str) -> None:
    """The smallest case: all its contenders do the same work, on tensors of the stated size."""
    makers = SUITES[name](CPU)
    assert len(makers) >= 2
    case = makers[0]()
    assert case.bytes > 0
    found = [r for r in measured(case).values() if r.contender not in case.missing]
    for r in found:
        assert r.is_measured and not r.is_wrong, (r.contender, r.note)
    checked = [r for r in found if r.error is not None]
    assert len(checked) == sum(entry.checked for entry in case.contenders.values())


@pytest.mark.parametrize("name", ["rnn", "engines"])
def test_engines_have_the_names_of_the_interface(name: str) -> None:
    """Those that `backend=` takes, whether they can run here or not."""
    case = SUITES[name](CPU)[0]()
    assert {*case.contenders, *case.missing} >= set(BACKENDS[1:])
    assert "look-back" not in {*case.contenders, *case.missing}


def test_every_operator_is_measured() -> None:
    """On inputs that it takes."""
    assert {op.name for op in operator_inputs.OPERATORS} >= set(ops.__all__)
    for op in operator_inputs.OPERATORS:
        associative_scan(op, operator_inputs.inputs(op, (1, 2, 3), "cpu"), 1, backend="eager")


def test_full_suites_have_the_sizes_they_promise() -> None:
    full = Settings(torch.device("cpu"))
    lengths = [maker.args[2] for maker in SUITES["recurrence"](full)]  # type: ignore[attr-defined]
    assert min(lengths) == 128
    swept = [m.args[1:] for m in SUITES["precision"](full)]  # type: ignore[attr-defined]
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert sorted(swept, key=str) == sorted(
        [(1 << k, dtype) for k in range(5, 18) for dtype in dtypes] * 2, key=str
    )
    assert precision.SEEDS == (3407, 4, 42, 57)


def test_plots_need_matplotlib_only_to_be_drawn(tmp_path: Path) -> None:
    if plots.why_not() is not None:
        assert "python -m pip install matplotlib" in str(plots.why_not())
        return
    records = list(measured(case_of({"a": contender(lambda: 0)})).values())
    assert plots.draw(tmp_path, "a", records, "cpu") == [tmp_path / "a.png"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert plots.draw(tmp_path, "b", [], "cpu") == []
