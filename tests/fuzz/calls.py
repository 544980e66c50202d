"""Random calls of the public functions: `python tests/fuzz/calls.py --seconds 300 --processes 16`.

Every call is made three times: twice alike, as the second one takes what the first one prepared,
then with its tensors in another layout in memory. Results and gradients are compared with the eager
engine in float64; they may be off by a few times what the eager engine is in the same dtype. Where
there is a GPU, the engines run there; most of the time goes to compiling, so that many processes
share one.
"""

from __future__ import annotations

import argparse
import collections
import random
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed package

import assocscan
from assocscan import BackendError, ops

GPU = torch.cuda.is_available()
STEPS = (1, 2, 3, 17, 31, 32, 33, 64, 100, 129, 257, 512, 1000, 1024, 4099, 8192, 30000)
CHANNELS = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 96, 128, 257, 512)
ROUNDINGS = {"value": 32, "gradient": 64}  # that a result may be off beside the eager engine's
NAN = float("nan")


class Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    differentiable: bool = True

    def __str__(self) -> str:
        shown = [*map(describe, self.arguments)]
        shown += [f"{name}={describe(value)}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(shown)})"


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or repr(value))


class Draw:
    """Random numbers of a case. Tensors are drawn in float64, then rounded to the dtype."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        self.rng, self.dtype = rng, dtype
        self.generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        wide = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (wide * scale).to(self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def mask(self, share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < share

    def positive_definite(self, n: int) -> Tensor:
        root = self.normal(n, n).double()
        return (0.3 * root @ root.mT + 0.5 * torch.eye(n)).to(self.dtype)

    def often(self, share: float) -> bool:
        return self.rng.random() < share

    def one_of(self, *several: Any) -> Any:
        return self.rng.choice(several)

    def shape(self, most: int) -> tuple[tuple[int, ...], int]:
        """A shape of at most so many elements, and the axis."""
        while True:
            sizes = [self.rng.choice(CHANNELS) for _ in range(self.rng.randint(0, 2))]
            axis = self.rng.randint(0, len(sizes))
            sizes.insert(axis, self.rng.choice(STEPS))
            if torch.Size(sizes).numel() <= most:
                return tuple(sizes), axis

    def offsets(self, length: int) -> Tensor:
        kind = self.one_of("few", "ones", "giant", "empty", "even")
        cuts = {
            "few": [self.rng.randint(0, length) for _ in range(self.rng.randint(0, 6))],
            "ones": [*range(1, min(length, 400))],
            "giant": [min(length, n) for n in (1, 1, 2, 3, length - 1)],
            "empty": [0, 0, length // 2, length // 2, length],
            "even": [*range(0, length, self.one_of(7, 32, 64, 100))],
        }[kind]
        return torch.tensor([0, *sorted(cuts), length], dtype=self.one_of(torch.int64, torch.int32))

    def pieces(self, shape: Sequence[int], axis: int, resets: bool = False) -> dict[str, Any]:
        """Offsets, or a mask of resets, or nothing."""
        if self.often(0.3):
            return {"offsets": self.offsets(shape[axis])}
        if resets and self.often(0.3):
            return {"reset": self.mask(self.one_of(0.01, 0.2, 0.9), *shape)}
        return {}


def starts(options: dict[str, Any]) -> tuple[int, ...]:
    """The leading dimension of states: that of the sequences, where they are packed."""
    return (len(options["offsets"]) - 1,) if "offsets" in options else ()


def without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def cumulative(draw: Draw) -> Call:
    name = draw.one_of("cumsum", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    shape, axis = draw.shape(400_000)
    options = {"axis": axis, "reverse": draw.often(0.4), **draw.pieces(shape, axis, resets=True)}
    x = draw.normal(*shape)
    if name == "cumprod":
        x = (1 + 0.05 * x.double()).to(draw.dtype)
    if name not in ("cummax", "cummin"):
        options["inclusive"] = draw.often(0.7)
    if name == "cumsum" and draw.often(0.2):
        options["compensated"] = True
    return Call(name, (x,), options, name not in ("cummax", "cummin"))


def recurrence(draw: Draw) -> Call:
    shape, axis = draw.shape(400_000)
    options = {"axis": axis, "reverse": draw.often(0.4), **draw.pieces(shape, axis, resets=True)}
    options["return_final"] = draw.one_of(False, True, "only")
    if draw.often(0.5):
        options["init"] = draw.normal(*starts(options), *without(shape, axis))
    a = draw.one_of(0.9, -0.5) if draw.often(0.2) else draw.uniform(*shape)
    return Call("linear_recurrence", (a, draw.normal(*shape)), options)


def matrices(draw: Draw) -> Call:
    n = draw.rng.randint(1, 6)
    shape, axis = draw.shape(30_000 // n)
    options = {"axis": axis, "reverse": draw.often(0.4), **draw.pieces(shape, axis)}
    if draw.often(0.5):
        options["init"] = draw.normal(*starts(options), *without(shape, axis), n)
    batch = shape if draw.often(0.7) else ()
    A = draw.normal(*batch, n, n, scale=0.5 / n**0.5)
    return Call("matrix_recurrence", (A, draw.normal(*shape, n)), options)


def averages(draw: Draw) -> Call:
    shape, axis = draw.shape(200_000)
    x = draw.normal(*shape)
    if draw.often(0.5):
        x = x.masked_fill(draw.mask(0.2, *shape), NAN)
    options = {"adjust": draw.often(0.5), "ignore_na": draw.often(0.5), "axis": axis}
    name = draw.one_of("ewm_mean", "ewm_var")
    return Call(name, (x, draw.one_of(0.01, 0.1, 0.5, 0.9)), options | draw.pieces(shape, axis))


def filters(draw: Draw) -> Call:
    from scipy import signal  # type: ignore[import-untyped]

    shape, axis = draw.shape(100_000)
    options = {"axis": axis, "return_final": draw.often(0.4), **draw.pieces(shape, axis)}
    order, x = draw.rng.randint(1, 4), draw.normal(*shape)
    if draw.often(0.5):
        sections = torch.tensor(signal.butter(order, draw.one_of(0.1, 0.4), output="sos"))
        if draw.often(0.4) and not starts(options):
            options["zi"] = draw.normal(len(sections), *without(shape, axis), 2)
        return Call("sosfilt", (sections.to(draw.dtype), x), options)
    b, a = map(torch.tensor, signal.butter(min(order, 3), draw.one_of(0.1, 0.4)))
    return Call("lfilter", (b.to(draw.dtype), a.to(draw.dtype), x), options)


def returns(draw: Draw) -> Call:
    shape, axis = draw.shape(200_000)
    options = {"axis": axis, **draw.pieces(shape, axis)}
    if draw.often(0.5):
        options["done"] = draw.mask(0.05, *shape)
    if draw.often(0.3):
        options |= {"truncated": draw.mask(0.05, *shape), "next_values": draw.normal(*shape)}
    last = draw.normal(*starts(options), *without(shape, axis))
    rewards, values = draw.normal(*shape), draw.normal(*shape)
    name = draw.one_of("discounted_returns", "gae", "vtrace")
    if name == "gae":
        return Call(name, (rewards, values, last, 0.97, 0.9), options)
    if name == "vtrace":
        return Call(name, (draw.normal(*shape), rewards, values, last, 0.97), options)
    return Call(name, (rewards, 0.97), {"bootstrap": last, **options})


def hidden_markov(draw: Draw) -> Call:
    name = draw.one_of("hmm_filter", "hmm_smoother", "viterbi")
    # Kernels of five and more states compile for minutes on a GPU.
    several = (1, 2, 2, 3, 3, 4, 9, 12) if GPU and draw.often(0.95) else (1, 2, 3, 4, 5, 8, 9, 12)
    states, steps = draw.one_of(*several), draw.one_of(1, 2, 33, 100, 513, 2000)
    options = draw.pieces((steps,), 0)
    if draw.often(0.3):
        options["observed"] = draw.mask(0.8, steps)
    transition = draw.normal(*draw.one_of((), (steps,)), states, states)
    likelihood = draw.normal(*draw.one_of((), (1,), (3,), (2, 2)), steps, states)
    arguments = draw.normal(states), transition, likelihood
    return Call(name, arguments, options, name != "viterbi")


def kalman(draw: Draw) -> Call:
    n, m = draw.rng.randint(1, 4), draw.rng.randint(1, 3)
    batch, steps = draw.one_of((), (3,)), draw.one_of(1, 2, 40, 300)
    F = (draw.normal(n, n).double() * 0.4 + 0.3 * torch.eye(n)).to(draw.dtype)
    options: dict[str, Any] = draw.pieces((steps,), 0)
    if draw.often(0.4):
        options["observed"] = draw.mask(0.7, *batch, steps)
    if draw.often(0.3):
        options["square_root"] = True
    arguments = (draw.normal(*batch, steps, m), F, draw.normal(m, n), draw.positive_definite(n),
                 draw.positive_definite(m), draw.normal(n), draw.positive_definite(n))  # fmt: skip
    return Call("kalman_filter", arguments, options, differentiable=draw.often(0.3))


def selective(draw: Draw) -> Call:
    batch, channels = draw.rng.randint(1, 3), draw.one_of(1, 8, 16, 33, 64, 128)
    steps, states = draw.one_of(1, 5, 64, 129, 400), draw.one_of(1, 2, 3, 4, 8, 16, 17, 32)
    groups = draw.one_of((), (1,), (2,)) if channels % 2 == 0 else ()
    softplus = draw.often(0.6)
    options = {"delta_softplus": softplus, **draw.pieces((batch, steps), 1)}
    if draw.often(0.6):
        options["D"] = draw.normal(channels)
    if draw.often(0.6):
        options["z"] = draw.normal(batch, steps, channels)
    if draw.often(0.5):
        options["delta_bias"] = draw.uniform(channels)
    if draw.often(0.4):
        options["init"] = draw.normal(*starts(options), batch, channels, states)
    if draw.often(0.4):
        options["return_final"] = True
    u = draw.normal(batch, steps, channels)
    delta = draw.normal(*u.shape) if softplus else draw.uniform(*u.shape)
    B, C = (draw.normal(batch, steps, *groups, states) for _ in range(2))
    return Call("selective_scan", (u, delta, -draw.uniform(channels, states), B, C), options)


def gated(h: Tensor, gates: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
    keep = torch.sigmoid(gates[0] + weights[0] * h)
    reset = torch.sigmoid(gates[1] + weights[1] * h)
    new = torch.tanh(gates[2] + reset * (weights[2] * h))
    return ((1 - keep) * new + keep * h).to(gates[2].dtype)


def leaky(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.5 * h + x)


def two_numbers(h: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    c = torch.sigmoid(x[0]) * h[0] + torch.tanh(x[1] + 0.3 * h[1])
    return c, torch.sigmoid(x[1]) * torch.tanh(c)


def nonlinear(draw: Draw) -> Call:
    shape, axis = draw.shape(40_000)
    options = {"axis": axis, "reverse": draw.often(0.3), **draw.pieces(shape, axis, resets=True)}
    options["return_final"] = draw.often(0.4)
    step = draw.one_of(gated, leaky, two_numbers)

    def inputs(count: int) -> Any:
        return tuple([draw.normal(*shape) for _ in range(count)])

    def state() -> Tensor:
        return draw.normal(*starts(options), *without(shape, axis))

    if step is gated:
        last = () if axis == len(shape) - 1 else shape[-1:]
        options["params"] = tuple([draw.normal(*last) for _ in range(3)])
        return Call("nonlinear_recurrence", (step, inputs(3), state()), options)
    if step is two_numbers:
        return Call("nonlinear_recurrence", (step, inputs(2), (state(), state())), options)
    if draw.often(0.4):
        options["method"] = draw.one_of("loop", "newton")
    return Call("nonlinear_recurrence", (step, *inputs(1), state()), options)


def windows(draw: Draw) -> Call:
    shape, axis = draw.shape(200_000)
    name = draw.one_of("sum", "max", "min", "logaddexp", "affine")
    pair = (draw.uniform(*shape), draw.normal(*shape))
    options = {"axis": axis, "reverse": draw.often(0.3), **draw.pieces(shape, axis)}
    width = draw.one_of(1, 2, 7, 32, 100, 1000)
    arguments = getattr(ops, name), pair if name == "affine" else pair[1], width
    return Call("windowed", arguments, options, name not in ("max", "min"))


def operators(draw: Draw) -> Call:
    shape, axis = draw.shape(300_000)
    name = draw.one_of("sum", "logaddexp", "affine", "log_affine", "welford", "minmax", "mean",
                       "max_affine", "rotation2d", "max_subarray")  # fmt: skip
    pair = (draw.uniform(*shape), draw.normal(*shape))
    options = {"axis": axis, "reverse": draw.often(0.4), **draw.pieces(shape, axis)}
    arguments = getattr(ops, name), pair if name.endswith("affine") else pair[1]
    smooth = name in ("sum", "logaddexp", "affine", "welford", "mean")
    return Call(draw.one_of("associative_scan", "reduce"), arguments, options, smooth)


def positions(draw: Draw) -> Call:
    shape, axis = draw.shape(300_000)
    x, some = draw.normal(*shape), draw.mask(0.4, *shape)
    name = draw.one_of("forward_fill", "run_lengths", "compact")
    if name == "run_lengths":
        return Call(name, (x > 0,), {"axis": axis}, differentiable=False)
    if name == "compact":
        return Call(name, (x, some), {"axis": axis})
    options = {"axis": axis, "reverse": draw.often(0.4), **draw.pieces(shape, axis)}
    if draw.often(0.4):
        options["limit"] = draw.one_of(1, 3, 50)
    return Call(name, (x.masked_fill(some, NAN),), options, differentiable=False)


FAMILIES: dict[Callable[[Draw], Call], int] = {  # how often each is drawn
    cumulative: 2, recurrence: 2, matrices: 1, averages: 1, filters: 1, returns: 1,
    hidden_markov: 1, kalman: 1, selective: 3, nonlinear: 2, windows: 1, operators: 2, positions: 1,
}  # fmt: skip
DTYPES = {torch.float32: 5, torch.bfloat16: 3, torch.float16: 1, torch.float64: 2}
WIDE = {kalman, filters, averages}  # float32 or float64 only
BACKENDS = ([None] * 4 + ["triton"] * 2 + ["multipass"]) if GPU else [None]
LAYOUTS = ("misaligned", "strided", "transposed")


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def laid_out(layout: str, t: Any) -> Any:
    """The same numbers elsewhere in memory. Offsets stay."""
    if not isinstance(t, Tensor) or t.dim() == 0 or t.dtype in (torch.int32, torch.int64):
        return t
    if layout == "misaligned":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if layout == "strided":
        return t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t)
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def run(call: Call, gradients: bool, **more: Any) -> dict[str, list[Tensor]]:
    """The results of a call, and its gradients, for cotangents that are always the same."""
    given = [t for t in tree_leaves((call.arguments, call.options)) if is_float(t)]
    fresh = {id(t): t.detach().requires_grad_(gradients) for t in given}
    arguments, options = tree_map(
        lambda t: fresh.get(id(t), t), (call.arguments, call.options)
    )  # fmt: skip
    results = getattr(assocscan, call.name)(*arguments, **options, **more)
    values = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
    found = {"value": [t.detach() for t in values], "gradient": []}
    if gradients:
        generator = torch.Generator().manual_seed(0)
        random_ = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in values]
        smooth = [k for k, t in enumerate(values) if t.requires_grad]
        cotangents = [random_[k].to(values[k].device, values[k].dtype) for k in smooth]
        made = torch.autograd.grad(
            [values[k] for k in smooth], [fresh[id(t)] for t in given], cotangents,
            allow_unused=True,
        ) if smooth else [None] * len(given)  # fmt: skip
        found["gradient"] = [
            torch.zeros_like(t) if g is None else g for g, t in zip(made, given, strict=True)
        ]
    return found


def error(found: Tensor, right: Tensor) -> float:
    """The largest difference, of the largest magnitude; infinite where one is NaN or infinite and
    the other is not."""
    x, y = found.cpu().double(), right.double()
    if x.shape != y.shape:
        return float("inf")
    if x.numel() == 0:
        return 0.0
    alike = (x == y) | (x.isnan() & y.isnan())
    finite = x.isfinite() & y.isfinite()
    if not bool((alike | finite).all()):
        return float("inf")
    difference = (x - y).abs().masked_fill(alike, 0).max()
    return float(difference / y.abs().masked_fill(~finite, 0).max().clamp_min(1e-30))


def faults(call: Call, dtype: torch.dtype, gradients: bool, rng: random.Random) -> list[str]:
    """What is wrong with a call, if anything."""
    wide = Call(call.name, *tree_map(
        lambda t: t.double() if is_float(t) else t, (call.arguments, call.options)
    ))  # fmt: skip
    right = run(wide, gradients, backend="eager")
    eager = run(call, gradients, backend="eager")
    backend = rng.choice(BACKENDS)
    there = tree_map(
        lambda t: t.to("cuda") if GPU and isinstance(t, Tensor) else t,
        (call.arguments, call.options),
    )
    said = []
    first: dict[str, list[Tensor]] = {}
    for layout in ("first", "again", rng.choice(LAYOUTS)):
        moved = tree_map(lambda t, k=layout: laid_out(k, t) if k in LAYOUTS else t, there)
        try:
            found = run(Call(call.name, *moved), gradients, backend=backend)
        except BackendError:
            return said  # the backend refuses this call in words
        where = f"{layout}, backend={backend}"
        for part, several in found.items():
            for k, (x, y, z) in enumerate(zip(several, right[part], eager[part], strict=True)):
                allowed = ROUNDINGS[part] * torch.finfo(dtype).eps if x.is_floating_point() else 0.0
                off, usual = error(x, y), error(z, y)
                if x.dtype != z.dtype:
                    said.append(f"{part} {k} is {x.dtype}, and {z.dtype} by eager ({where})")
                if not off <= 8 * usual + allowed:
                    said.append(f"{part} {k} is off by {off:.2g}, eager by {usual:.2g} ({where})")
                if layout == "again" and not torch.equal(
                    x.nan_to_num(), first[part][k].nan_to_num()
                ):
                    said.append(f"{part} {k} is another one the second time ({where})")
        first = first or found
    return said


def run_case(seed: int, number: int, verbose: bool = False) -> tuple[str, list[str]]:
    """The name of the function, and what is wrong."""
    rng = random.Random(f"{seed} {number}")
    family = rng.choices([*FAMILIES], [*FAMILIES.values()])[0]
    dtype = rng.choices([*DTYPES], [*DTYPES.values()])[0]
    if family in WIDE and dtype.itemsize == 2:
        dtype = torch.float32
    call = family(Draw(rng, dtype))
    shown = f"--seed {seed} --case {number}: {call}"
    if verbose:
        print(shown, flush=True)
    try:
        said = faults(call, dtype, call.differentiable and rng.random() < 0.5, rng)
    except Exception:
        return call.name, [f"{shown}\n{traceback.format_exc()}"]
    return call.name, [f"{shown}\n  {what}" for what in said]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--processes", type=int, default=1, help="of seeds from --seed on")
    parser.add_argument("--verbose", action="store_true", help="print every call before it is made")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        seeds = range(arguments.seed, arguments.seed + arguments.processes)
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds)]
        command += ["--verbose", "--seed"] if arguments.verbose else ["--seed"]
        running = [subprocess.Popen([*command, str(seed)]) for seed in seeds]
        return max([process.wait() for process in running])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = range(1 << 30) if arguments.case is None else [arguments.case]
    end = time.monotonic() + arguments.seconds
    tried: collections.Counter[str] = collections.Counter()
    wrong = 0
    for number in numbers:
        begin = time.monotonic()
        name, said = run_case(arguments.seed, number, arguments.verbose)
        if arguments.verbose and time.monotonic() > begin + 20:
            took = time.monotonic() - begin
            print(f"--seed {arguments.seed} --case {number}: {took:.0f} s", flush=True)
        tried[name] += 1
        wrong += bool(said)
        for what in said:
            print(what, flush=True)
        if time.monotonic() > end:
            break
    print(f"seed {arguments.seed}: {sum(tried.values())} calls, {wrong} wrong; {dict(tried)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
