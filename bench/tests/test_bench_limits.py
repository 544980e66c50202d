"""What an operator computes per element, and the nearest limit of a GPU."""

from __future__ import annotations

import types

import pytest
import torch

from assocscan import ops
from assocscan_bench.measuring import operation_counts
from assocscan_bench.measuring.operation_counts import Arithmetic, arithmetic_of, nearest_limit
from assocscan_bench.operator_inputs import OPERATORS, inputs
from assocscan_bench.output.records import Record
from assocscan_bench.output.report import outcome

H100 = types.SimpleNamespace(multi_processor_count=132, clock_rate=1_980_000)


def test_what_is_counted() -> None:
    """A sum is one addition; a product of 4 × 4 matrices 64 products and 48 sums; what no output
    needs is not counted, nor is a function free."""
    counts = {op.name: arithmetic_of(op, inputs(op, (1, 2, 4), "cpu"), 1) for op in OPERATORS}
    assert None not in counts.values()
    assert counts["sum"] == Arithmetic(1, 0)
    assert counts["matmul"] == Arithmetic(112, 0)
    exponentials = counts["log_matmul"]
    assert exponentials is not None and exponentials.special == 64


def test_of_positions_and_of_raw_numbers() -> None:
    """64-bit integers take more slots than floats do."""
    numbers = torch.zeros(2, 3)
    floats, longs = (arithmetic_of(ops.sum, t, 1) for t in (numbers, numbers.long()))
    assert floats == Arithmetic(1, 0)
    assert longs == Arithmetic(4, 0)


@pytest.mark.parametrize(
    "arithmetic,copy_ms,name,ms",
    [
        (Arithmetic(128 * 132, 0), 1.0, "memory", 1.0),
        (Arithmetic(2 * 128 * 132 * 1_980_000, 0), 1.0, "FP32", 2.0),
        (Arithmetic(128 * 132, 3 * 16 * 132 * 1_980_000), 1.0, "special functions", 3.0),
    ],
)
def test_the_nearest_limit(
    arithmetic: Arithmetic, copy_ms: float, name: str, ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(operation_counts.torch.version, "hip", None)
    found = nearest_limit(arithmetic, copy_ms, torch.device("cuda"))
    assert found is not None
    assert (found.name, found.ms) == (name, pytest.approx(ms))


def test_rates_that_are_not_known() -> None:
    assert nearest_limit(Arithmetic(1, 1), 1.0, torch.device("cpu")) is None
    assert nearest_limit(None, 1.0, torch.device("cuda")) is None


def test_the_table_names_it() -> None:
    r = Record(
        "operators", "all", "sum", 0, "4", "float32", "assocscan", ms=1.0, ms_low=1.0, ms_high=1.0,
        of_copy=0.3, spread=0.0, copy_spread=0.0, limit="FP32", of_limit=0.84,
    )  # fmt: skip
    assert "0.30 of copy  0.84 of FP32" in outcome(r)
