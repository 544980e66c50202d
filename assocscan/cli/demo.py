"""``python -m assocscan demo``: real series, each result checked against a plain Python loop."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf

import torch

from assocscan import __version__, associative_scan, cumsum, linear_recurrence, ops
from assocscan.cli import demo_speed
from assocscan.cli.data import nile, sunspots
from assocscan.errors import FallbackWarning
from assocscan.monoids.monoid import monoid
from assocscan.nn import RGLRU
from assocscan.runtime.backends import availability

SMOOTHING = 0.1
TOLERANCE = 1e-10

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
    with warnings.catch_warnings():  # the first lines and the plan say it
        warnings.simplefilter("ignore", FallbackWarning)
        try:
            introduce()
            compile_kernels()
            for name, (_, x) in {"nile": nile(), "sunspots": sunspots()}.items():
                check_series(name, x)
            fit_smoothing(nile()[1])
            check_layer(nile()[1])
            demo_speed.show_plans(drawdown)
            demo_speed.compare_speed(drawdown)
        except CheckFailed as failure:
            print(f"demo failed: {failure}")
            return 1
    return 0


def introduce() -> None:
    """Print versions and engines; and what runs where kernels cannot be compiled."""
    reasons = availability()
    engines = ", ".join(name for name, reason in reasons.items() if reason is None)
    threads = torch.get_num_threads()
    print(f"assocscan {__version__}, torch {torch.__version__}, {threads} threads; {engines}")
    if reasons["cpu"] is not None:
        print(
            f"{reasons['cpu']}\nuntil then every scan on the CPU runs as torch operations (eager)"
        )


Scan = Callable[[torch.Tensor], torch.Tensor]
SCANS: dict[str, tuple[Scan, Callable[[list[float]], Iterable[float]]]] = {
    "exponential average": (
        lambda x: exponential_average(x, SMOOTHING), lambda v: average_loop(v)),
    "running mean": (lambda x: associative_scan(ops.mean, x), lambda v: mean_loop(v)),
    "running mean (Welford)": (
        lambda x: associative_scan(ops.welford, x)[0], lambda v: mean_loop(v)),
    "running variance (Welford)": (
        lambda x: associative_scan(ops.welford, x)[1], lambda v: variance_loop(v)),
    "sum before (exclusive)": (
        lambda x: cumsum(x, inclusive=False), lambda v: sum_before_loop(v)),
    "sum after (reverse, exclusive)": (
        lambda x: cumsum(x, reverse=True, inclusive=False), lambda v: sum_after_loop(v)),
    "highest from here on (reverse)": (
        lambda x: associative_scan("max", x, reverse=True), lambda v: highest_after_loop(v)),
    "drawdown (operator in demo.py)": (
        lambda x: associative_scan(drawdown, x), lambda v: drawdown_loop(v)),
    "drawdown by torch operations": (
        lambda x: associative_scan(drawdown, x, backend="eager"), lambda v: drawdown_loop(v)),
}  # fmt: skip


def compile_kernels() -> None:
    """Run each scan once, two at a time: a compiler uses one core."""
    print("compiling kernels: at the first run about half a minute …", flush=True)
    x = nile()[1]
    smoothing = torch.tensor(SMOOTHING, dtype=x.dtype, requires_grad=True)
    layer = gated_layer(x.dtype)
    jobs: list[Callable[[], object]] = [
        lambda: slope(x, smoothing),
        lambda: gradients(layer, layer(standardised(x))[0]),
        *(lambda scan=scan: scan(x) for scan, _ in SCANS.values()),
        *(way.scan for way in demo_speed.ways(drawdown, demo_speed.inputs())),
    ]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def check_series(name: str, x: torch.Tensor) -> None:
    """Scan one series in several ways and compare with loops over its values."""
    values = x.tolist()
    title = f"{name}, {len(values)} values"
    print(f"\n{title:34}{'last value':>14}{'relative error':>18}")
    for what, (scan, loop) in SCANS.items():
        check(what, scan(x), loop(values))


def check(what: str, got: torch.Tensor, loop: Iterable[float]) -> None:
    """Print one line of the table; raise CheckFailed where scan and loop differ."""
    want = torch.tensor(list(loop), dtype=got.dtype)
    error = float((got.detach() - want).abs().max() / want.abs().max())
    print(f"  {what:32}{float(got.detach()[-1]):14.4f}{error:18.1e}")
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


def sum_before_loop(values: list[float]) -> Iterator[float]:
    total = 0.0
    for x in values:
        yield total
        total += x


def sum_after_loop(values: list[float]) -> list[float]:
    return list(sum_before_loop(values[::-1]))[::-1]


def highest_after_loop(values: list[float]) -> list[float]:
    highest, found = -inf, []
    for x in reversed(values):
        highest = max(highest, x)
        found.append(highest)
    return found[::-1]


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


def check_layer(x: torch.Tensor) -> None:
    """A layer over the whole series, and its gradients, against the layer step by step."""
    layer = gated_layer(x.dtype)
    scanned, last = layer(standardised(x))
    steps, state = [], None
    for value in standardised(x).unbind(1):
        y, state = layer.step(value, state)
        steps.append(y)
    looped = torch.stack(steps, 1)
    print(f"\n{'nile, a layer (assocscan.nn.RGLRU)':34}{'last value':>14}{'relative error':>18}")
    check("output, all at once", scanned.flatten(), looped.flatten().tolist())
    assert state is not None
    check("its last state", last.flatten(), state.flatten().tolist())
    check("gradient of its parameters", gradients(layer, scanned),
          gradients(layer, looped).tolist())  # fmt: skip


def gated_layer(dtype: torch.dtype) -> RGLRU:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RGLRU(1).to(dtype)


def standardised(x: torch.Tensor) -> torch.Tensor:
    """The series with mean 0 and variance 1, as a batch of one with one feature: [1, L, 1]."""
    return ((x - x.mean()) / x.std())[None, :, None]


def gradients(layer: RGLRU, y: torch.Tensor) -> torch.Tensor:
    """The derivatives of mean y² by all parameters, one after the other."""
    found = torch.autograd.grad(y.square().mean(), list(layer.parameters()))
    return torch.cat([g.flatten() for g in found])
