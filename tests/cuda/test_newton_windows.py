"""Newton's method in one kernel (`cuda/newton`): in the emulator and on a real GPU, beside a loop
in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cuda_emulator
import pytest
import steps
import torch
import walked_cases
from cuda_emulator import Emulated, emulated
from torch import Tensor
from torch.utils._pytree import tree_map
from walked_cases import CASES, Case, loop

from assocscan import explain_recurrence, nonlinear_recurrence
from assocscan.cuda.kernel import LanesTile
from assocscan.cuda.newton import prepare as newton
from assocscan.functional.nonlinear import nonlinear_recurrence as nonlinear
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables

REASON = cuda_emulator.why_unavailable()
NO_GPU = not torch.cuda.is_available() or engines.availability()["cuda"] is not None
on_emulator = pytest.param(
    "emulator", marks=pytest.mark.skipif(REASON is not None, reason=str(REASON))
)
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="no GPU")])
everywhere = pytest.mark.parametrize("engine", [on_emulator, on_cuda])


def three_numbers(state: Any, x: Any, weights: Any) -> Any:
    """Each on its own: the Jacobian is diagonal."""
    (a, b, c), (i, f, o), (u, v) = state, x, weights
    return torch.tanh(i + u * a), torch.sigmoid(f + v * b), torch.sin(o + c)


ALL = CASES | {"three numbers": Case(three_numbers, 3, 2, 3)}


@contextlib.contextmanager
def where(engine: str) -> Iterator[dict[str, Any]]:
    """The backend and the device on which an engine is tested. Forward, no other kernel than that
    of Newton's method runs: the first launch is one."""
    if engine == "cuda":
        yield {"backend": "cuda", "device": "cuda"}
        return
    with emulated(processors=3):
        yield {"backend": "cuda", "device": "cpu"}
        kernel, _ = Emulated.launches[0]
        assert kernel is not None and kernel.mode == "NEWTON"


def check(
    engine: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, reverse: bool
) -> None:
    with where(engine) as at:
        walked_cases.check(ALL[name], shape, dtype, at | {"method": "newton"}, reverse)


@pytest.mark.slow(4)
@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients(engine: str, name: str, reverse: bool) -> None:
    check(engine, name, (2, 300, 3), torch.float32, reverse)


@pytest.mark.slow
@pytest.mark.thinned(4)
@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 2, 33])
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 511, 513])
def test_edges_of_windows(engine: str, length: int, channels: int, dtype: torch.dtype) -> None:
    check(engine, "gated", (1, length, channels), dtype, length % 2 == 0)


TILES = {"one warp": (1, 1, 4), "one step": (2, 2, 1), "four chains": (2, 4, 2), "more": (3, 8, 3)}


@pytest.mark.thinned(2)
@everywhere
@pytest.mark.parametrize("name", ["gated", "two numbers"])
@pytest.mark.parametrize("tile", TILES)
def test_forced_tiles(engine: str, tile: str, name: str) -> None:
    """One warp, threads of one step, blocks whose last chains do not exist."""
    warps, chains, items = TILES[tile]
    made = LanesTile(32 * warps, chains, 1, items, 0)
    with mock.patch.object(newton, "choose_tile", lambda *_: made):
        check(engine, name, (1, 300, 6), torch.float32, False)


def solved(
    engine: str, given: dict[str, Any], step: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """States by Newton's method, by the loop, and what the kernel told."""
    with where(engine) as at:
        given = {k: move(v, at["device"]) for k, v in given.items()}
        options["backend"] = at["backend"]
        found = nonlinear_recurrence(step, **given, method="newton", **options)
        [report] = [e.report for e in executables._PREPARED.values() if e.report is not None]
        told = report.cpu()
        walked = nonlinear_recurrence(step, **given, backend=at["backend"])
    return found.cpu(), walked.cpu(), told


def move(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(move(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@everywhere
def test_what_converges_is_not_walked(engine: str) -> None:
    executables._PREPARED.clear()
    given = {"xs": drawn(1, 2000, 2), "init": 0.0}
    step = lambda h, x: torch.tanh(0.5 * h + x)  # noqa: E731
    found, walked, told = solved(engine, given, step)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-6)
    assert (told[:, 1] == 0).all() and (told[:, 0] >= 2).all()


@everywhere
@pytest.mark.parametrize("most", [1, 24])
def test_windows_that_do_not_converge_are_walked(engine: str, most: int) -> None:
    """The logistic map at 3.9, and too few iterations: the result is bitwise that of the loop."""
    executables._PREPARED.clear()
    given = {"xs": torch.zeros(1, 300, 2), "init": torch.tensor([[0.3, 0.7]])}
    step = lambda h, x: 3.9 * h * (1 - h) + x  # noqa: E731
    found, walked, told = solved(engine, given, step, max_iterations=most)
    assert torch.equal(found, walked)
    assert (told[:, 1] >= 1).all()


@everywhere
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(engine: str, bad: float) -> None:
    """NaN and infinities go where the loop takes them, and end where it ends them."""
    executables._PREPARED.clear()
    x = drawn(1, 700, 3)
    x[0, 300, 1] = bad

    def step(h: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 2, 0.0, 0.5 * torch.relu(h) + x)

    found, walked, _ = solved(engine, {"xs": x, "init": 0.0}, step)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not found[0, :, 0].isnan().any() and not found[0, :300].isnan().any()


@everywhere
def test_guesses_beyond_the_finite_range(engine: str) -> None:
    """From a start far away, corrections overflow; the states do not."""
    executables._PREPARED.clear()
    given = {"xs": 4 * drawn(1, 500, 2), "init": 50.0}
    step = lambda h, x: torch.cos(torch.exp(0.3 * h)) + x  # noqa: E731
    found, walked, _ = solved(engine, given, step)
    assert found.isfinite().all()
    right, _ = loop(Case(step, 1, 0), given | {"params": (), "init": torch.full((1, 2), 50.0)})
    error = lambda y: (y.double() - right[0]).abs()[:, :20].max()  # noqa: E731
    assert error(found) <= 10 * error(walked) + 1e-4


@everywhere
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_states_of_any_size(engine: str, size: float) -> None:
    """Residuals are compared with the states, also where these are far from 1: an exact solution,
    whatever the tolerance."""
    executables._PREPARED.clear()
    x = size * drawn(1, 1000, 3)
    step = lambda h, x: 0.9 * torch.sin(h / size) * size + x  # noqa: E731
    found, walked, told = solved(engine, {"xs": x, "init": 0.0}, step, tolerance=1e-30)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-6 * size)
    assert (told[:, 1] == 0).all()


@everywhere
def test_a_tail_of_zeros(engine: str) -> None:
    """As padding is: states fade beyond the smallest floats, and are solved there, too."""
    executables._PREPARED.clear()
    x = drawn(1, 1500, 2)
    x[:, 100:] = 0
    step = lambda h, x: torch.tanh(0.9 * h + x)  # noqa: E731
    found, walked, told = solved(engine, {"xs": x, "init": 0.0}, step, tolerance=1e-38)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-37)
    assert (told[:, 1] == 0).all()


FORGETS = {  # the step, the start, and what is added at step 40
    "from far away": (lambda h, x: torch.exp(-h) + 0 * x, -20.0, 0.0),
    "a spike": (lambda h, x: torch.tanh(2 * h) + x, 0.5, 1e10),
    "an infinite spike": (lambda h, x: torch.tanh(2 * h) + x, 0.5, float("inf")),
    "a spike whose roundings stay": (lambda h, x: torch.sin(h) + x, 0.5, 1e8),
    "from near a pole": (lambda h, x: 1 / h + torch.sin(h) + x, 1e-7, 0.0),
    "a spike that fades": (lambda h, x: 0.5 * h + torch.sin(h) + x, 0.5, 1e7),
}


@everywhere
@pytest.mark.parametrize("tolerance", [None, 1e-30])
@pytest.mark.parametrize("name", FORGETS)
def test_large_states_that_are_forgotten(engine: str, name: str, tolerance: float | None) -> None:
    """They are no measure of what comes after them."""
    executables._PREPARED.clear()
    step, start, spike = FORGETS[name]
    x = 1e-3 * drawn(1, 600, 2)
    x[:, 40] += spike
    found, walked, _ = solved(engine, {"xs": x, "init": start}, step, tolerance=tolerance)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-6)


JUMPS = {
    "relu": lambda h, x: torch.relu(h) + x,  # compares
    "compares": lambda h, x: torch.where(h > 0, h, 0.5 * x),
    "signs": lambda h, x: torch.sign(h) + x,
    "rounds": lambda h, x: torch.round(3 * h) / 4 + x,
    "floors": lambda h, x: torch.floor(3 * h) / 4 + x,
    "casts": lambda h, x: h.long().float() / 2 + x,
    "rounds to 16 bits": lambda h, x: torch.tanh(h.half().float()) + x,
    "detaches": lambda h, x: torch.tanh(h).detach() + x,
    "remainder": lambda h, x: torch.remainder(h, 1.0) + x,
    "fmod": lambda h, x: torch.fmod(h, 1.0) + x,
    "floor division": lambda h, x: h // 0.3 + x,
    "copysign": lambda h, x: torch.copysign(x, h),
    "angle": lambda h, x: torch.atan2(h, x),
    "heaviside": lambda h, x: torch.heaviside(h, x),
}
SMOOTH = {
    "max": lambda h, x: torch.maximum(0.9 * h, 0 * x) + x,
    "clamp": lambda h, x: torch.clamp(torch.sin(h) + x, -1, 1),
    "of x alone": lambda h, x: torch.tanh(h) + torch.floor(x) * (x > 0),
}


@pytest.mark.parametrize("name", [*JUMPS, *SMOOTH])
def test_steps_that_jump(name: str) -> None:
    with mock.patch.object(nonlinear, "derive_newton", wraps=nonlinear.derive_newton) as derived:
        step = (JUMPS | SMOOTH)[name]
        nonlinear_recurrence(step, drawn(1, 20, 2), 0.1, method="newton", backend="cpu")
    assert derived.called
    operator = derived.call_args.args[0]
    assert nonlinear.derive_newton(operator).jumps == (name in JUMPS)


@everywhere
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_random_steps(engine: str, seed: int) -> None:
    """Random expressions, with a step that is far from the others: as the loop, up to what its own
    roundings make of it."""
    executables._PREPARED.clear()
    step, states, inputs, weights = steps.random_step(seed)
    xs = [drawn(1, 400, 3) + k for k in range(inputs)]
    xs[0][0, 150] *= 10.0 ** (seed % 12)
    given: dict[str, Any] = {"xs": tuple(xs), "init": (0.1,) * states}
    given |= {"params": tuple(drawn(3 + k)[:3] for k in range(weights))}
    with where(engine) as at:
        given = {name: move(value, at["device"]) for name, value in given.items()}
        options = {"backend": at["backend"], "method": "newton", "tolerance": 1e-30}
        found = nonlinear_recurrence(step, **given, **options)
        walked = nonlinear_recurrence(step, **given, backend=at["backend"])
    given = {name: move(value, "cpu") for name, value in given.items()}
    right, _ = steps.loop(
        step,
        tree_map(Tensor.double, given["xs"]),
        given["init"],
        params=tree_map(Tensor.double, given["params"]),
    )
    for got, by_loop, want in zip(move(found, "cpu"), move(walked, "cpu"), right, strict=True):
        noise = (by_loop.double() - want).abs().max().item()
        torch.testing.assert_close(got, by_loop, rtol=1e-5, atol=1e-5 + 30 * noise)


@everywhere
def test_states_that_fade(engine: str) -> None:
    """A state that halves at each step is right to its own last digits."""
    executables._PREPARED.clear()
    step = lambda h, x: 0.5 * torch.tanh(h) + x  # noqa: E731
    x = torch.zeros(1, 90, 2)
    x[:, 0] = 1
    found, walked, _ = solved(engine, {"xs": x, "init": 0.0}, step, tolerance=1e-30)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=0)


@everywhere
def test_chains_of_a_block_do_not_depend_on_one_another(engine: str) -> None:
    """Three chains keep their bits, whether the fourth of their block converges or is chaotic."""
    tile = LanesTile(64, 4, 1, 2, 0)
    step = lambda h, x, rate: rate * h * (1 - h) + x  # noqa: E731
    found, solutions = [], []
    with where(engine) as at, mock.patch.object(newton, "choose_tile", lambda *_: tile):
        x = 1e-3 * drawn(1, 300, 4).to(at["device"])
        for rate in (2.5, 3.9):
            options = {"params": x.new_tensor([2.2, 2.4, 2.7, rate]), "method": "newton"}
            options["backend"] = at["backend"]
            found.append(nonlinear_recurrence(step, x, 0.4, **options)[..., :3])
            plan = explain_recurrence(step, x, 0.4, **options, last=True)
            solutions.append(plan.solution.split(", ")[1])
    assert torch.equal(*found)
    assert solutions[0] == "0 of 40 windows were walked" != solutions[1]


@everywhere
def test_what_auto_takes(engine: str) -> None:
    """The kernel where the axis is long enough, unless the step jumps."""
    step = lambda h, x: torch.tanh(0.7 * h + x)  # noqa: E731
    fires = lambda h, x: 0.9 * h + x - (h > 1).to(h.dtype)  # noqa: E731
    x = drawn(1, 700, 3)
    with where(engine) as at, mock.patch.object(nonlinear, "LONG", 600):
        given = x.to(at["device"])
        cases = ((step, 700, "newton"), (step, 500, "walked"), (fires, 700, "walked"))
        for f, length, kernel in cases:
            part, backend = given[:, :length], {"backend": at["backend"]}
            assert explain_recurrence(f, part, 0.0, **backend).engine == f"cuda ({kernel})"
            for _ in range(2):
                found = nonlinear_recurrence(f, part, 0.0, **backend)
                walked = nonlinear_recurrence(f, part, 0.0, method="loop", **backend)
                torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-6)
                assert torch.equal(found, walked) or kernel == "newton"


@pytest.mark.slow
@everywhere
def test_strides(engine: str) -> None:
    """Leaves each in its own way, and an axis that is innermost in memory."""
    executables._PREPARED.clear()
    x = drawn(2, 3, 300).transpose(1, 2)
    given = {"xs": (x, drawn(2, 300, 1), drawn(1, 300, 6)[..., ::2]), "init": drawn(3)}
    step = lambda h, x: torch.tanh(x[0] + 0.5 * h) * torch.sigmoid(x[1]) + x[2]  # noqa: E731
    found, walked, _ = solved(engine, given, step)
    torch.testing.assert_close(found, walked, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="no GPU")
def test_graphs() -> None:
    """The host waits for nothing, so that a call can be captured in a CUDA graph."""
    case = CASES["gated"]
    given = case.draw((1, 4096, 64), torch.float32, "cuda")
    for _ in range(3):
        y = nonlinear_recurrence(case.step, **given, method="newton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nonlinear_recurrence(case.step, **given, method="newton")
    given["xs"][0].normal_()
    graph.replay()
    assert torch.equal(y, nonlinear_recurrence(case.step, **given, method="newton"))
