"""``python -m assocscan demo``: real series, each result checked against a plain Python loop."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from math import inf

import torch

from assocscan import __version__, associative_scan, cummax, cumsum, explain, linear_recurrence, ops
from assocscan.cli.data import nile, sunspots
from assocscan.monoids.monoid import monoid
from assocscan.runtime.backends import availability

SMOOTHING = 0.1
TOLERANCE = 1e-10
SHAPE = (4, 8192, 512)
RUNS = 9

Stretch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CheckFailed(Exception):
    """A result differs from its plain loop."""


@monoid(
    identity=(-inf, inf, 0.0),
    lift=lambda x: (x, x, torch.zeros_like(x)),
    lower=lambda state: state[2],
)
def drawdown(left: Stretch, right: Stretch) -> Stretch:
    """Largest fall from an earlier value to a later one.

    An element is a stretch of the series: its highest value, its lowest, and the largest fall
    inside it. The largest fall of two stretches lies in one of them, or leads from the peak of the
    earlier to the trough of the later.
    """
    high1, low1, fall1 = left
    high2, low2, fall2 = right
    fall = torch.maximum(torch.maximum(fall1, fall2), high1 - low2)
    return torch.maximum(high1, high2), torch.minimum(low1, low2), fall


def run() -> int:
    """Run the demo; return 1 if a result differs from its plain loop, else 0."""
    engines = ", ".join(name for name, reason in availability().items() if reason is None)
    threads = torch.get_num_threads()
    print(f"assocscan {__version__}, torch {torch.__version__}, {threads} threads; {engines}")
    try:
        for name, (_, x) in {"nile": nile(), "sunspots": sunspots()}.items():
            check_series(name, x)
        fit_smoothing(nile()[1])
        compare_speed()
    except CheckFailed as failure:
        print(f"demo failed: {failure}")
        return 1
    return 0


def check_series(name: str, x: torch.Tensor) -> None:
    """Scan one series five ways and compare with loops over its values."""
    values = x.tolist()
    mean, variance = associative_scan(ops.welford, x)
    title = f"{name}, {len(values)} values"
    print(f"\n{title:34}{'last value':>14}{'relative error':>18}")
    check("exponential average", exponential_average(x, SMOOTHING), average_loop(values))
    check("running mean", associative_scan(ops.mean, x), mean_loop(values))
    check("running mean (Welford)", mean, mean_loop(values))
    check("running variance (Welford)", variance, variance_loop(values))
    check("drawdown (operator in demo.py)", associative_scan(drawdown, x), drawdown_loop(values))


def check(what: str, got: torch.Tensor, loop: Iterable[float]) -> None:
    """Print one line of the table; raise CheckFailed where scan and loop differ."""
    want = torch.tensor(list(loop), dtype=got.dtype)
    error = float((got.detach() - want).abs().max() / want.abs().max())
    print(f"  {what:32}{float(got[-1]):14.4f}{error:18.1e}")
    if not error <= TOLERANCE:
        raise CheckFailed(f"{what}: relative error {error:.1e}, at most {TOLERANCE:.0e} expected")


def exponential_average(x: torch.Tensor, smoothing: torch.Tensor | float) -> torch.Tensor:
    """h[0] = x[0], h[t] = (1 − smoothing) h[t−1] + smoothing x[t]."""
    tail = linear_recurrence(1 - smoothing, smoothing * x[1:], init=x[0], axis=0)
    return torch.cat([x[:1], tail])


def average_loop(values: list[float]) -> Iterator[float]:
    h = values[0]
    for x in values:
        h += SMOOTHING * (x - h)
        yield h


def mean_loop(values: list[float]) -> Iterator[float]:
    total = 0.0
    for count, x in enumerate(values, 1):
        total += x
        yield total / count


def variance_loop(values: list[float]) -> Iterator[float]:
    mean = squares = 0.0
    for count, x in enumerate(values, 1):
        delta = x - mean
        mean += delta / count
        squares += delta * (x - mean)
        yield squares / count


def drawdown_loop(values: list[float]) -> Iterator[float]:
    peak, fall = -inf, 0.0
    for x in values:
        peak = max(peak, x)
        fall = max(fall, peak - x)
        yield fall


def fit_smoothing(x: torch.Tensor) -> None:
    """Fit the exponential average to predict the next value, by descent on the scan's gradient."""
    smoothing = torch.tensor(SMOOTHING, dtype=x.dtype, requires_grad=True)
    title = "nile, error of predicting a step"
    print(f"\n{title:34}{'d/d smoothing':>14}{'relative error':>18}")
    check("gradient of the average", slope(x, smoothing)[None], [slope_loop(x.tolist(), SMOOTHING)])
    steps = 40
    step_size = 0.5 / float(x.var())
    for _ in range(steps):
        gradient = slope(x, smoothing)
        smoothing = (smoothing - step_size * gradient).detach().requires_grad_()
    fitted = smoothing.item()
    print(f"  smoothing after {steps} descent steps: {fitted:.4f} (HoltWinters in R: 0.2466)")
    if abs(fitted - 0.2466) > 1e-4:
        raise CheckFailed("gradient descent did not find the smoothing factor of the series")


def slope(x: torch.Tensor, smoothing: torch.Tensor) -> torch.Tensor:
    """Derivative of mean (x[t+1] − h[t])² with respect to the smoothing factor."""
    loss = (x[1:] - exponential_average(x, smoothing)[:-1]).square().mean()
    return torch.autograd.grad(loss, smoothing)[0]


def slope_loop(values: list[float], smoothing: float) -> float:
    """The same derivative, carried forward along the series beside h."""
    h, dh, total = values[0], 0.0, 0.0
    for x in values[1:]:
        error = x - h
        total -= 2 * error * dh
        h, dh = h + smoothing * error, (1 - smoothing) * dh + error
    return total / (len(values) - 1)


def compare_speed() -> None:
    """Time scans of a real-size tensor, the copy that moves as many bytes, and torch's own way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(SHAPE, generator=generator)
    a = torch.rand(SHAPE, generator=generator)
    print(f"\nplan of associative_scan(drawdown, x, axis=1), x {SHAPE} float32")
    print(explain(drawdown, x, axis=1))
    print(
        f"\n{SHAPE} float32, axis 1, medians of {RUNS} runs; of copy: copy of the same bytes / scan"
    )
    print(f"  {'':20}{'ms':>8}{'of copy':>10}{'torch ms':>11}{'speed-up':>10}  torch's way")
    compare("cumsum", lambda: cumsum(x, 1), 2, lambda: torch.cumsum(x, 1), "torch.cumsum")
    compare("cummax", lambda: cummax(x, 1), 4, lambda: torch.cummax(x, 1), "torch.cummax")
    compare(
        "linear_recurrence",
        lambda: linear_recurrence(a, x, axis=1),
        3,
        lambda: loop_over_steps(a, x),
        "loop of torch.addcmul",
    )
    compare("drawdown", lambda: associative_scan(drawdown, x, axis=1), 2)


def compare(
    name: str,
    scan: Callable[[], object],
    arrays: int,
    peer: Callable[[], object] | None = None,
    way: str = "none",
) -> None:
    """Print one line of the table; the scan must move `arrays` tensors of SHAPE, float32."""
    source = torch.ones(arrays * torch.Size(SHAPE).numel() // 2)
    copy_time = median_time(lambda: torch.empty_like(source).copy_(source))
    scan_time = median_time(scan)
    line = f"  {name:20}{scan_time * 1e3:8.1f}{copy_time / scan_time:10.2f}"
    if peer is None:
        print(f"{line}{'-':>11}{'-':>10}  {way}")
        return
    peer_time = median_time(peer)
    print(f"{line}{peer_time * 1e3:11.1f}{peer_time / scan_time:9.1f}x  {way}")


def loop_over_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """h[t] = a[t] h[t−1] + b[t] by one torch call per step."""
    out = torch.empty_like(b)
    out[:, 0] = b[:, 0]
    for t in range(1, b.shape[1]):
        torch.addcmul(b[:, t], a[:, t], out[:, t - 1], out=out[:, t])
    return out


def median_time(call: Callable[[], object]) -> float:
    """Median seconds of RUNS calls, after one that compiles and warms up."""
    call()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
