"""What single suites compare with: windows, packed sequences, steps that are not linear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assocscan import ops, windowed
from assocscan.__main__ import main
from assocscan.functional.packing.padding import offsets_of
from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten
from assocscan_bench import command
from assocscan_bench.measuring import busy
from assocscan_bench.measuring.checks import largest_error
from assocscan_bench.output.records import Record
from assocscan_bench.settings import BOTH, FORWARD, Settings
from assocscan_bench.suite import calls, nonlinear, packed, windows
from assocscan_bench.suite.sums import compensated

CPU = Settings(torch.device("cpu"), quick=True)


def window_by_window(op: Monoid, xs: Any, width: int) -> Any:
    """The definition: from the first step of each window to its last."""
    leaves, spec = flatten(xs)
    found = []
    for t in range(leaves[0].shape[1]):
        steps = range(max(t - width + 1, 0), t + 1)
        parts = [unflatten([leaf[:, k] for leaf in leaves], spec) for k in steps]
        total = parts[0]
        for part in parts[1:]:
            total = op.combine(total, part)
        found.append(flatten(total)[0])
    return unflatten([torch.stack(column, 1) for column in zip(*found, strict=True)], spec)


@pytest.mark.parametrize("width", [1, 2, 3, 6, 7, 8, 11, 12, 40])
@pytest.mark.parametrize("op", windows.OPERATORS, ids=lambda op: op.name)
def test_windows_are_compared_with_their_definition(op: Monoid, width: int) -> None:
    x = torch.rand(2, 11, 3, dtype=torch.float64)
    xs: Any = (x, x.flip(1)) if op is ops.affine else x
    want = flatten(window_by_window(op, xs, width))[0]
    got = flatten(windows.windows_by_doubling(op, xs, width))[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [FORWARD, BOTH])
def test_windows_of_another_width_are_wrong(which: str) -> None:
    x, g = torch.rand(2, 64, 3), torch.rand(2, 64, 3)

    def result(width: int) -> Any:
        t = x.clone().requires_grad_()
        y = windowed(ops.logaddexp, t, width, 1)
        return y.detach() if which == FORWARD else torch.autograd.grad(y, t, g)

    _, spec = flatten(x)
    check = windows.check_of(ops.logaddexp, [x], spec, 9, which, [g])
    assert not check(result(9)).is_wrong
    assert check(result(8)).is_wrong and check(result(10)).is_wrong


def test_widths_are_shorter_than_the_axis() -> None:
    shapes = Settings(torch.device("cpu"), shapes=((1, 300, 2),))
    found = [maker.args[1:4] for maker in windows.cases(shapes)]  # type: ignore[attr-defined]
    assert {(op.name, width) for op, _, width in found} == {
        (op.name, width) for op in windows.OPERATORS for width in (16, 257)
    }


@pytest.mark.parametrize("name", packed.SCANS)
def test_packed_sequences_start_afresh(name: str) -> None:
    """Empty ones too; a scan that goes on into the next sequence is found."""
    scan, op = packed.SCANS[name]
    lengths = torch.tensor([3, 0, 5, 1])
    offsets, x = offsets_of(lengths), torch.rand(9)
    check = packed.check_of(op, x, offsets, name.startswith("total"), 5)
    assert not check(scan(op, x, 0, offsets=offsets)).is_wrong
    assert check(scan(op, x, 0, offsets=torch.tensor([0, 3, 3, 7, 9]))).is_wrong


def test_packed_cases_have_all_elements() -> None:
    for make in packed.cases(CPU):
        case = make()
        assert case.shape[0] == pytest.approx(packed.QUICK_ELEMENTS, rel=0.5)


def test_gradients_of_a_step_are_those_of_the_loop() -> None:
    """All slopes at once and a linear scan, beside autograd through the loop."""
    xs = [torch.rand(2, 37, 3, dtype=torch.float64) - 0.5 for _ in range(3)]
    weights = [torch.rand(3, dtype=torch.float64) for _ in range(3)]
    g = torch.rand(2, 37, 3, dtype=torch.float64)
    h = nonlinear.loop(xs[0], xs[1], xs[2], *weights)
    got = nonlinear.gradients([x.clone() for x in xs], weights, h, g)
    leaves = [x.requires_grad_() for x in xs]
    want = torch.autograd.grad(nonlinear.loop(leaves[0], leaves[1], leaves[2], *weights), leaves, g)
    assert largest_error(list(got), list(want)) < 1e-12


@pytest.mark.parametrize("make", [compensated.sum_case, compensated.layer_case])
def test_compensation_makes_sums_exact(make: Any) -> None:
    case = make(CPU, (1, 1 << 14, 4), torch.float32, FORWARD)
    errors = {}
    for name, contender in case.contenders.items():
        verdict = (contender.check or case.check)(contender.make()())
        assert not verdict.is_wrong
        errors[name] = verdict.error
    assert errors["assocscan, compensated"] < 2e-7 < errors["assocscan"]


def test_calls_have_64_numbers() -> None:
    for make in calls.cases(CPU):
        case = make()
        assert case.shape == (1, 64) and all(c.wall for c in case.contenders.values())


def test_rows_are_printed_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one before the second is measured."""
    seen: list[str] = []

    def run(suite: str, makers: Any, timer: Any) -> Iterator[Record]:
        for name in ("first", "second"):
            yield Record(suite, "a group", "L", 8, "8", "float32", name, 1.0, 1.0, 1.0,
                         of_copy=1.0)  # fmt: skip
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(busy, "warning", lambda: None)
    monkeypatch.setattr(command.runner, "run", run)
    assert main(["bench", "cumsum", "--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "a group" in seen[0] and "first" in seen[0] and "second" not in seen[0]
    assert "second" in seen[1] and "a group" not in seen[1]
