"""Walks of which the axis is cut into parts, beside the same walks in one piece: every bit of
values and gradients of inputs is the same, whatever a step forgets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulator
import pytest
import torch
import walked_cases
from cuda_emulator import Emulated, emulated
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from walked_cases import CASES

from assocscan import explain_recurrence, nonlinear_recurrence
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda import workspace
from assocscan.cuda.kernel import LanesTile
from assocscan.cuda.tile_choice_inputs import Choice, Parts, Shape
from assocscan.cuda.walk import parts as cuts
from assocscan.cuda.walk import tile as tiles
from assocscan.runtime import backends as engines

REASON = cuda_emulator.why_unavailable()
NO_GPU = not torch.cuda.is_available() or engines.availability()["cuda"] is not None
everywhere = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(REASON is not None, reason=str(REASON))),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="no GPU")]),
    ],
)
Step = Callable[..., Any]


@contextlib.contextmanager
def on(device: str, seed: int = 1) -> Iterator[None]:
    with emulated(seed=seed, processors=5) if device == "cpu" else contextlib.nullcontext():
        yield


def called(
    step: Step, given: dict[str, Any], cut: Parts | None, tile: tuple[int, int, int] = (1, 8, 3),
    seed: int = 1, reverse: bool = False, weight: float = 1.0, times: int = 2,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Values, last states and gradients of several calls with this cut; all must give the same
    bits. tile: channels of a lane, steps, stages. weight: of the last states in the sum that is
    differentiated."""
    channels, items, stages = tile
    choice = Choice(LanesTile(32, 32 * channels, channels, items, stages), "WALKED", parts=cut)
    given = tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()), given)
    leaves = [t for t in tree_leaves(given) if t.requires_grad]
    device = leaves[0].device.type
    first: list[Tensor] | None = None
    with on(device, seed), tuning.forced(choice):
        for _ in range(times):
            y, last = nonlinear_recurrence(
                step, **given, reverse=reverse, return_final=True, method="loop", backend="cuda"
            )
            results = [*tree_leaves(y), *tree_leaves(last)]
            weights = [torch.linspace(-1, 2, t.numel(), device=t.device).view(t.shape)
                       for t in results]  # fmt: skip
            weights[-1] = torch.full_like(weights[-1], weight) if weight != 1 else weights[-1]
            total = sum((t * w).sum() for t, w in zip(results, weights, strict=True))
            found = [*results, *torch.autograd.grad(total, leaves)]
            first = first or found
            assert all(map(same, found, first))
        if device == "cpu":
            kernels = [kernel for kernel, _ in Emulated.launches if kernel]
            assert {kernel.in_parts for kernel in kernels} == {cut is not None}
    assert first is not None
    return first[: len(results)], first[len(results) :]


def same(x: Tensor, y: Tensor) -> bool:
    """Whether all numbers are equal, and NaN where the other has NaN."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def compare(step: Step, given: dict[str, Any], cut: Parts, sums: float = 1e-5, **how: Any) -> None:
    """Beside the walk in one piece. sums: the tolerance of the gradients of params, which are
    summed in another order."""
    params = len(tree_leaves(given.get("params", ())))
    values, gradients = called(step, given, None, **{k: v for k, v in how.items() if k != "seed"})
    got, found = called(step, given, cut, **how)
    assert all(map(same, got, values))
    count = len(found) - params
    assert all(map(same, found[:count], gradients[:count]))
    for x, y in zip(found[count:], gradients[count:], strict=True):
        scale = 1 + y.abs().nan_to_num(0, 0).max().item()
        torch.testing.assert_close(x, y, rtol=0, atol=sums * scale, equal_nan=True)


CUTS = {
    "early": Parts(4, 256, 96),
    "tried": Parts(8, 128, 64, 32),
    "two": Parts(2, 512, 128, 64),
    "hasty": Parts(3, 384, 32),
    "distant": Parts(8, 128, 64, 32, 0, 384, 1 << 16),
    "slow": Parts(8, 128, 64, 32, 1 << 13, 384, 1 << 15, slow=19),
}
TILES = {"usual": (1, 8, 3), "long": (1, 32, 4), "two channels": (2, 16, 3), "short": (1, 1, 3)}


@pytest.mark.slow(3)
@pytest.mark.thinned(3)
@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_bit(device: str, name: str, cut: str, tile: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    number = list(CUTS).index(cut) + list(TILES).index(tile) + list(CASES).index(name)
    reverse, length = bool(number % 2), (1000, 1024)[number % 4 < 2]
    given = case.draw((1, length, 71), dtype, device)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    compare(case.step, given, CUTS[cut], tolerance, tile=TILES[tile], seed=3, reverse=reverse)


@pytest.mark.slow(1)
@everywhere
@pytest.mark.parametrize("gate", [2.0, 4.0, 9.0])
@pytest.mark.parametrize("cut", CUTS)
def test_steps_that_hardly_forget(device: str, cut: str, gate: float) -> None:
    """Parts are mended for some 200 steps, begun earlier, or left; some channels alone, or all."""
    case = CASES["gated"]
    given = case.draw((1, 1000, 71), torch.float32, device)
    z, r, n = given["xs"]
    given["xs"] = (z + gate * (torch.arange(71, device=device) % 40 != 7), r, n)
    compare(case.step, given, CUTS[cut])


def leaky(h: Tensor, x: Any, params: Any) -> Tensor:
    """Forgets all where the first input is 0, and nothing where it is 1."""
    keep, new = x
    return keep * h + params[0] * new


def forgets_at(steps: list[int], length: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    keep = torch.ones(1, length, 32)
    keep[:, steps] = 0
    new = torch.randn(1, length, 32, generator=generator)
    return {
        "xs": (keep.to(device), new.to(device)), "init": torch.ones(1, 32, device=device),
        "params": (torch.linspace(1, 2, 32, device=device),),
    }  # fmt: skip


@everywhere
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [[], [300], [255, 260, 520, 600, 840], [256, 512, 768], [1000]])
def test_a_part_is_mended_until_it_is_right(device: str, steps: list[int], reverse: bool) -> None:
    """A guess that is wrong is forgotten in the midst of a part, at its edge, or never."""
    given = forgets_at([1023 - s for s in steps] if reverse else steps, 1024, device)
    cuts = (Parts(4, 256, 32), Parts(4, 256, 64, 32), Parts(8, 128, 32))
    for seed, cut in enumerate((*cuts, Parts(8, 128, 64, 32, 1 << 16)), 1):
        compare(leaky, given, cut, reverse=reverse, seed=seed)


@everywhere
@pytest.mark.parametrize("steps", [[200, 460, 800, 1010], [1010]])
@pytest.mark.parametrize("weight", [1.0, 1e4, 1e10, 1e38])
def test_sums_do_not_depend_on_guesses(device: str, weight: float, steps: list[int]) -> None:
    """Gradients are walked from the end. Parts begin with the gradient of the last state. What a
    wrong guess adds to a sum before it is forgotten may be far larger than the sum, or infinite."""
    given = forgets_at(steps, 1024, device)
    keep, new = given["xs"]
    given["xs"] = (keep, new * 8 * (torch.arange(1024, device=device) < 1010)[None, :, None])
    _, gradients = called(leaky, given, None, weight=weight)
    want = gradients[-1]  # that of params
    found = []
    for cut in (Parts(4, 256, 32), Parts(4, 256, 64, 32), Parts(4, 256, 256)):
        compare(leaky, given, cut, weight=weight)
        found.append(called(leaky, given, cut, weight=weight)[1][-1])
    assert want.isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@everywhere
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(device: str, bad: float) -> None:
    case = CASES["gated"]
    given = case.draw((1, 1024, 40), torch.float32, device)
    for step in (3, 255, 256, 600):
        given["xs"][2][0, step, step % 40] = bad
    compare(case.step, given, CUTS["early"])
    given = forgets_at([200, 460, 666, 960], 1024, device)
    given["xs"][1][0, [180, 520, 800]] = bad
    compare(leaky, given, CUTS["early"])


def differences(h: Tensor, x: Any, params: Any) -> Tensor:
    """Products in sums and differences, of which a compiler may fuse either one."""
    (m, y, p), (q,) = x, params
    a, b = m - y * h, p * q - h * y
    return torch.tanh(torch.where(h > m, a, b) * a - ((p * q - m * y) * h - (q * q - y * p)))


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [32, 40])
def test_all_copies_of_a_step_round_alike(device: str, channels: int, dtype: torch.dtype) -> None:
    """Whole tiles and others, walks that halt and walks that do not."""
    generator = torch.Generator().manual_seed(channels)

    def leaf(*shape: int) -> Tensor:
        return (0.8 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
            device, dtype
        )

    given = {
        "xs": tuple(leaf(2, 1000, channels) for _ in range(3)), "init": leaf(2, channels),
        "params": (leaf(channels),),
    }  # fmt: skip
    for cut in (*CUTS.values(), Parts(4, 256, 8)):
        compare(differences, given, cut, 1e-4)


@everywhere
def test_counters_and_states_of_several_dtypes(device: str) -> None:
    """A counter never forgets; int64 and float64 are two words."""

    def counts(state: Any, x: Tensor) -> Any:
        count, total = state
        return count + (x > 0).long(), 0.5 * total + x.double() * (count % 3)

    x = torch.randn(2, 1024, 33, generator=torch.Generator().manual_seed(1)).to(device)
    init = (torch.zeros(2, 33, dtype=torch.int64, device=device),
            torch.zeros(2, 33, dtype=torch.float64, device=device))  # fmt: skip
    results = []
    for cut in (None, Parts(4, 256, 96), Parts(4, 256, 96, 64)):
        choice = Choice(LanesTile(32, 32, 1, 8, 3), "WALKED", parts=cut)
        with on(device), tuning.forced(choice):
            found = nonlinear_recurrence(counts, x, init, return_final=True, backend="cuda")
        results.append(tree_leaves(found))
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def bounded(state: Any, x: Any) -> Any:
    """Keeps a state within bounds, and adds up what it was."""
    (h, total), (keep, low, high, new) = state, x
    h = keep * torch.clamp(h, low, high) + new
    return h, total + h


def bounded_walk(
    events: dict[int, dict[str, float]], device: str, cut: Parts | None, seed: int
) -> Any:
    """From h = 100, with these inputs at these steps; at all others h stays as it is. The total is
    read at the end alone, so that it is a sum for the kernel."""
    usual = {"keep": 1.0, "low": -1e4, "high": 1e4, "new": 0.0}
    xs = {name: torch.full((1, 1024, 33), value) for name, value in usual.items()}
    for step, event in events.items():
        for name, value in event.items():
            xs[name][:, step] = value
    init = torch.full((1, 33), 100.0, device=device), torch.zeros(1, 33, device=device)
    choice = Choice(LanesTile(32, 32, 1, 8, 3), "WALKED", parts=cut)
    given = tuple(x.to(device) for x in xs.values())
    with on(device, seed), tuning.forced(choice):
        found = nonlinear_recurrence(
            bounded, given, init, lower=lambda state, _: state[0], return_final=True,
            method="loop", backend="cuda",
        )  # fmt: skip
        if device == "cpu":
            kernels = [kernel for kernel, _ in Emulated.launches if kernel]
            assert kernels and {kernel.in_parts for kernel in kernels} == {cut is not None}
    return tree_leaves(found)


@everywhere
@pytest.mark.parametrize("name", ["a right guess", "two wrong states"])
def test_an_edge_that_was_mended_too_early(device: str, name: str) -> None:
    """The state before part 2 is not right yet when its edge is looked at."""
    events = {
        # Part 2 begins with h = 100, as guessed, part 1 does not.
        "a right guess": {10: {"new": 1.0}, 300: {"new": -1.0}},
        # Before part 2, h is 2 by the guess of part 1, then 1; both become 3, the guess of part 2
        # does not. All is forgotten in step 712.
        "two wrong states": {
            10: {"keep": 0.0, "new": 1.0}, 300: {"high": 2.0}, 530: {"low": 3.0},
            712: {"keep": 0.0, "new": 5.0},
        },
    }[name]  # fmt: skip
    wanted = bounded_walk(events, device, None, 1)
    for seed in range(1, 9 if device == "cpu" else 4):
        for cut in (Parts(4, 256, 64), Parts(4, 256, 64, 32, 1 << 16), Parts(8, 128, 32)):
            found = bounded_walk(events, device, cut, seed)
            assert all(map(torch.equal, found, wanted))


def latch(state: Any, x: Tensor) -> Any:
    """Whether x rose above 1.5 after it last fell below -1.5; and how long ago that changed."""
    (on, since) = state
    now = torch.where(x > 1.5, 1, torch.where(x < -1.5, 0, on))
    return now, torch.where(now == on, since + 1, 0)


def leaks(h: Tensor, x: Any) -> Tensor:
    keep, new = x
    return keep * h + new


def parts_walked(parts: Parts, words: int, chains: int) -> float:
    """The share of the parts, all but the first, that were walked and not left for the block that
    finishes last, by their records."""
    (space,) = (s for (_, _, kind), s in workspace._SPACES.items() if kind == cuts.SLOT_CLASS)
    flag, size = 2 * words, 2 * words + 1 + words * (parts.steps // cuts.CHECK)
    records = space.memory[workspace.HEADER_BYTES + cuts.COUNTER_BYTES :].view(torch.int32)
    records = records[: chains * parts.count * size * 32].view(chains, parts.count, size, 32)
    return records[:, 1:, flag, 0].float().mean().item()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("name", ["neuron", "latch", "leaky"])
def test_steps_that_decide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neuron that fires forgets all at once, in some channels late: if every channel must pass
    the trial, no part is walked. A latch forgets when it is set. `leaks` would pass with slow
    channels too, and is no step that decides."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(1, 4096, 64, generator=generator)
    keep = torch.where(torch.arange(64) % 32 < 2, 0.999, 0.5).expand_as(x)
    zero = torch.zeros(1, 64)
    # The step, its inputs and first state, the words of a state; which share of the parts is
    # walked with slow=0, and with slow=SLOW.
    step, xs, init, words, strict, lenient = {
        "neuron": (walked_cases.fires, 0.2 * x, zero, 1, 0, 1),
        "latch": (latch, 4 * x - 2, (zero.long(), zero.long()), 4, 1, 1),
        "leaky": (leaks, (keep, x), zero, 1, 0, 1),
    }[name]
    found = []
    for slow, share in ((0, strict), (cuts.SLOW, lenient)):
        for cut in (None, Parts(8, 512, 128, 64, cuts.residue_of(512), slow=slow)):
            choice = Choice(LanesTile(32, 32, 1, 8, 3), "WALKED", parts=cut)
            with emulated(processors=5), tuning.forced(choice):
                found.append(
                    nonlinear_recurrence(
                        step, xs, init, return_final=True, method="loop", backend="cuda"
                    )
                )
                if cut is not None:
                    assert parts_walked(cut, words, 2) == share
    for others in found[1:]:
        assert all(map(torch.equal, tree_leaves(others), tree_leaves(found[0])))
    shapes: list[Shape] = []

    def parts_of(shape: Shape, channels: int) -> Parts | None:
        shapes.append(shape)
        return cuts.parts_of(shape, channels)

    monkeypatch.setattr(tiles, "parts_of", parts_of)
    with emulated(processors=5):
        nonlinear_recurrence(step, xs, init, method="loop", backend="cuda")
    assert shapes and all(shape.decides == (name != "leaky") for shape in shapes)


@everywhere
def test_kernels_share_a_workspace(device: str) -> None:
    """With other numbers of chains and parts, in turn: counters are found at 0."""
    case = CASES["gated"]
    calls = []
    # Two have parts that are left or walked twice: their gates keep nearly all of the state.
    for channels, cut, gate in (
        (40, CUTS["early"], 0), (200, CUTS["tried"], 8), (33, CUTS["two"], 0),
        (64, CUTS["early"], 8),
    ):  # fmt: skip
        given = case.draw((2, 1024, channels), torch.float32, device)
        z, r, n = given["xs"]
        given["xs"] = (z + gate, r, n)
        choice = Choice(LanesTile(32, 32, 1, 8, 3), "WALKED", parts=cut)
        calls.append((given, choice))
    wanted = []
    for given, choice in calls:
        with on(device), tuning.forced(Choice(choice.tile, "WALKED")):
            wanted.append(nonlinear_recurrence(case.step, **given, method="loop", backend="cuda"))
    with on(device):
        for _ in range(3):
            for (given, choice), want in zip(calls, wanted, strict=True):
                with tuning.forced(choice):
                    y = nonlinear_recurrence(case.step, **given, method="loop", backend="cuda")
                assert torch.equal(y, want)


def shape(rows: int, length: int, channels: int, wait: float = 50.0) -> Shape:
    """A GRU in bfloat16 on an H200."""
    return Shape(True, rows, length, channels, 4, (2, 2, 2), 2, 132, 227 << 10, 4.8e12, 73, True,
                 wait)  # fmt: skip


def test_where_an_axis_is_cut() -> None:
    def count(*sizes: int, wait: float = 50.0) -> int:
        found = cuts.parts_of(shape(*sizes, wait=wait), 32)
        return 1 if found is None else found.count

    assert count(1, 65536, 64) == cuts.MOST
    assert count(1, 65536, 512) == 32  # a warp for each scheduler of the GPU
    assert count(4, 4096, 512) == 8  # parts of at least 512 steps
    assert count(8, 8192, 768) == 4  # up to one and a half
    assert count(8, 8192, 1536) == 2
    assert count(8, 8192, 3072) == 1  # that many chains fill the GPU
    assert count(1, 1000, 64) == 1  # too short
    assert count(1, 65536, 64, wait=0) == 1  # packed, or nothing is carried
    for length in range(1100, 9000, 37):
        found = cuts.parts_of(shape(1, length, 64), 32)
        if found is not None:
            last = length - (found.count - 1) * found.steps
            assert found.trial < found.warm <= last <= found.steps
            assert 0 < found.residue < 1 << 16
            if found.distant:
                assert found.residue < found.distant_residue < 1 << 16
                assert found.distant > found.steps and found.distant % cuts.CHECK == 0


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_what_explain_says() -> None:
    case = CASES["gated"]
    given = case.draw((1, 2048, 64), torch.float32, "cpu")
    with emulated(processors=5):
        plan = explain_recurrence(case.step, **given, method="loop", backend="cuda")
        assert "4 parts of 512 steps" in plan.why
        y = nonlinear_recurrence(case.step, **given, method="loop", backend="cuda")
        assert any(kernel.in_parts for kernel, _ in Emulated.launches if kernel)
    want, _ = walked_cases.loop(case, given)
    # The roundings of a step, of which later ones forget most: as in walked_cases.check.
    torch.testing.assert_close(y.double(), want[0], rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="no GPU")
@pytest.mark.parametrize("gate", [0.0, 4.0])
def test_graphs(gate: float) -> None:
    """Captured in a CUDA graph with both passes, and replayed on other values."""
    case = CASES["gated"]
    given = case.draw((2, 4096, 128), torch.float32, "cuda")

    def both() -> list[Tensor]:
        xs = [t.detach().requires_grad_() for t in given["xs"]]
        y = nonlinear_recurrence(case.step, **given | {"xs": tuple(xs)}, method="loop")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), xs)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for x in given["xs"]:
        x.normal_()
    given["xs"][0].add_(gate)
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, captured, both()))
