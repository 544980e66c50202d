"""The demo's second half: what runs a scan, and how fast, beside torch's own way."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from assocscan import associative_scan, cummax, cumsum, explain, linear_recurrence
from assocscan.monoids.monoid import Monoid

SHAPE = (4, 2048, 512)
RUNS, LEAST, SECONDS = 9, 3, 0.5  # fewer runs where they take longer than that


class Way(NamedTuple):
    """A scan that is timed, and torch's own way."""

    name: str
    scan: Callable[[], object]
    peer: Callable[[], object] | None = None
    peer_name: str = "none"


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and values, uniform in [0, 1)."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(SHAPE, generator=generator), torch.rand(SHAPE, generator=generator)


def ways(op: Monoid, tensors: tuple[torch.Tensor, torch.Tensor]) -> list[Way]:
    """What is timed; `op` is an operator of one number per step."""
    a, x = tensors
    return [
        Way("cumsum", lambda: cumsum(x, 1), lambda: torch.cumsum(x, 1), "torch.cumsum"),
        Way("cummax", lambda: cummax(x, 1), lambda: torch.cummax(x, 1), "torch.cummax"),
        Way("linear_recurrence", lambda: linear_recurrence(a, x, axis=1),
            lambda: loop_over_steps(a, x), "loop of torch.addcmul"),
        Way(op.name, lambda: associative_scan(op, x, axis=1),
            lambda: associative_scan(op, x, axis=1, backend="eager"), "without a compiler (eager)"),
    ]  # fmt: skip


def show_plans(op: Monoid) -> None:
    """Print what runs the operator on tensors of SHAPE, and what would run without a compiler."""
    x = inputs()[1]
    plan = explain(op, x, axis=1)
    print(f"\nplan of associative_scan({op.name}, x, axis=1), x {SHAPE} float32")
    print(plan)
    if plan.engine == "eager":
        return
    print('\nwithout a C++ compiler, or with backend="eager"')
    for line in str(explain(op, x, axis=1, backend="eager")).splitlines():
        if line.startswith(("engine", "tile", "commands")):
            print(line)


def compare_speed(op: Monoid) -> None:
    """Time scans of a real-size tensor, and torch's own way."""
    print(f"\n{SHAPE} float32, axis 1, medians of up to {RUNS} runs")
    print(f"  {'':20}{'ms':>8}{'torch ms':>11}{'speed-up':>10}  torch's way")
    for way in ways(op, inputs()):
        compare(way)


def compare(way: Way) -> None:
    """Print one line of the table."""
    scan_time = median_time(way.scan)
    line = f"  {way.name:20}{scan_time * 1e3:8.1f}"
    if way.peer is None:
        print(f"{line}{'-':>11}{'-':>10}  {way.peer_name}")
        return
    peer_time = median_time(way.peer)
    print(f"{line}{peer_time * 1e3:11.1f}{peer_time / scan_time:9.1f}x  {way.peer_name}")


def loop_over_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """h[t] = a[t] h[t−1] + b[t] by one torch call per step."""
    out = torch.empty_like(b)
    out[:, 0] = b[:, 0]
    for t in range(1, b.shape[1]):
        torch.addcmul(b[:, t], a[:, t], out[:, t - 1], out=out[:, t])
    return out


def median_time(call: Callable[[], object]) -> float:
    """Median seconds of up to RUNS calls, after one that compiles and warms up."""
    call()
    times: list[float] = []
    while len(times) < LEAST or (len(times) < RUNS and sum(times) < SECONDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
