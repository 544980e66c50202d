"""`windowed` beside a scan of every window by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from table import CASES, Engine
from torch import Tensor
from torch.utils._pytree import tree_map
from window_cases import clear_prepared_calls

from assocscan import (
    AxisError,
    FallbackWarning,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    explain,
    monoid,
    ops,
    segmented,
    windowed,
    with_lower,
)
from assocscan.engines.cpu import windows as cpu
from assocscan.functional.series import windows_in_one_pass as one_pass
from assocscan.testing import assert_scan_close, reference_scan

F64, NAN, INF = torch.float64, torch.nan, torch.inf
LENGTH = 13
WIDTHS = (1, 2, 5, LENGTH - 1, LENGTH, LENGTH + 1)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


@pytest.fixture(autouse=True)
def without_prepared_calls() -> Iterator[None]:
    """Tests change what decides how a call is prepared."""
    clear_prepared_calls()
    yield
    clear_prepared_calls()


def each_window(op: Any, xs: Any, width: int, axis: int = 0, reverse: bool = False) -> Any:
    """The last output of a loop over each window."""
    length, rows = torch.utils._pytree.tree_leaves(xs)[0].shape[axis], []
    for t in range(length):
        begin, end = (t, min(t + width, length)) if reverse else (max(t - width + 1, 0), t + 1)
        part = tree_map(lambda x, b=begin, e=end: x.narrow(axis, b, e - b), xs)
        ys = reference_scan(op, part, axis, reverse)
        rows.append(tree_map(lambda y, e=end - begin: y.select(axis, 0 if reverse else e - 1), ys))
    return tree_map(lambda *parts: torch.stack(parts, axis), *rows)


@monoid(identity=0.0, name="test_windowed_decibels", lift=torch.exp,
        lower=lambda state, x: {"level": state.log(), "above": x - state.log()})  # fmt: skip
def decibels(left: Tensor, right: Tensor) -> Tensor:
    return left + right


# Operators without identity, without inverse, not commutative; of several leaves, with lift and
# lower that takes the inputs.
OPERATORS: dict[str, tuple[Any, Any]] = {
    "sum": (ops.sum, rand(2, LENGTH)),
    "max": (ops.max, rand(2, LENGTH)),
    "logaddexp": (ops.logaddexp, rand(2, LENGTH)),
    "affine": (ops.affine, (rand(2, LENGTH), rand(2, LENGTH, seed=1))),
    "broadcast": (ops.affine, (rand(1, LENGTH), rand(2, LENGTH, seed=1))),
    "welford": (ops.welford, rand(2, LENGTH)),
    "argmax": (ops.argmax, (rand(2, LENGTH), torch.arange(LENGTH).expand(2, LENGTH))),
    "matmul": (ops.matmul, rand(2, LENGTH, 2, 2)),
    "decibels": (decibels, rand(2, LENGTH)),
    "segmented": (segmented(ops.sum), (rand(2, LENGTH), rand(2, LENGTH, seed=1) > 1)),
    **{name: (CASES[name].op, CASES[name].draw(torch.Generator().manual_seed(0), (2, LENGTH)))
       for name in ("bicyclic", "band")},
}  # fmt: skip


@pytest.mark.thinned(8)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_window_by_itself(engine: Engine, name: str, reverse: bool) -> None:
    """The same call twice, then with other widths: their kernels are the same."""
    op, xs = OPERATORS[name]
    if engine.interpreted and name not in ("bicyclic", "decibels"):
        pytest.skip("the interpreter takes long")
    for width in (3, 3) if engine.interpreted else (2, *WIDTHS):
        ys = windowed(op, engine.put(xs), width, 1, reverse, backend=engine.name)
        want = each_window(op, xs, width, 1, reverse)
        assert_scan_close(tree_map(lambda t: t.cpu(), ys), want, LENGTH)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_lengths(backend: str) -> None:
    """Around the width, and around multiples of it; of both directions, on both axes."""
    for length in (0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 40):
        x = torch.randint(-9, 9, (length, 2))
        total = torch.nn.functional.pad(x.cumsum(0), (0, 0, 4, 0))
        want = total[4:] - total[:length]
        for y in (
            windowed(ops.sum, x, 4, backend=backend),
            windowed(ops.sum, x.mT.contiguous(), 4, -1, backend=backend).mT,
            windowed("sum", x.flip(0), np.int64(4), 0, True, backend=backend).flip(0),
        ):
            assert torch.equal(y, want)


@pytest.mark.slow(3)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape,axis", [((37, 3, 17), 0), ((3, 37, 17), 1), ((2, 17, 37), 2)])
def test_one_pass_of_the_cpu(shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    """Lanes beside one another and rows; also permuted in memory, with a leaf that is broadcast.
    Blocks of the kernel are shorter and longer than its tiles of 16 steps."""
    other = (axis + 1) % len(shape)
    gates = [rand(*shape), rand(*(1 if d == other else n for d, n in enumerate(shape)))]
    b = rand(*shape, seed=1).transpose(0, -1).contiguous().transpose(0, -1)
    for width, a in product((1, 2, 7, 16, 19, 36), gates):
        xs = a.requires_grad_(), b.requires_grad_()
        ys, want = (f(ops.affine, xs, width, axis, reverse) for f in (windowed, each_window))
        torch.testing.assert_close(ys, want)
        cotangents = [rand(*shape, seed=k) for k in range(2)]
        found, loop = (torch.autograd.grad(t, xs, cotangents) for t in (ys, want))
        torch.testing.assert_close(found, loop)


def step_by_step(
    op: Any, xs: Any, width: int, axis: int, reverse: bool = False, offsets: Tensor | None = None
) -> tuple[Tensor, ...]:
    """A loop from the last step of windows to the first, of all windows at once."""

    def ordered(t: Tensor) -> Tensor:
        return t.flip(axis).movedim(axis, 0) if reverse else t.movedim(axis, 0)

    states = tree_map(ordered, xs)
    if op.lift is not None:
        states = op.lift(states)
    shape = torch.utils._pytree.tree_leaves(states)[0].shape
    length = shape[0]
    step, bounds = torch.arange(length), torch.tensor([0, length]) if offsets is None else offsets
    if reverse:
        bounds = length - bounds.flip(0)
    first = bounds[torch.searchsorted(bounds, step, right=True) - 1]
    begin = torch.maximum(step - width + 1, first)
    total = states
    for k in range(1, min(width, length)):
        longer = op.combine(tree_map(lambda t, k=k: t.roll(k, 0), states), total)
        inside = (step - k >= begin).view(-1, *(1 for _ in shape[1:]))
        total = tree_map(lambda t, u, b=inside: torch.where(b, t, u), longer, total)
    ys = torch.utils._pytree.tree_leaves(total if op.lower is None else op.lower(total))
    return tuple([y.movedim(0, axis).flip(axis) if reverse else y.movedim(0, axis) for y in ys])


def check_step_by_step(
    op: Any, leaves: list[Tensor], width: int, axis: int, reverse: bool, offsets: Tensor | None
) -> None:
    """Values and gradients; leaves: of float64 or of integers."""
    is_float = leaves[0].is_floating_point()
    xs = [t.detach().requires_grad_(is_float) for t in leaves]
    given = tuple(xs) if len(xs) > 1 else xs[0]
    ys = windowed(op, given, width, axis, reverse, offsets=offsets)
    ys = tuple(torch.utils._pytree.tree_leaves(ys))
    want = step_by_step(op, given, width, axis, reverse, offsets)
    torch.testing.assert_close(ys, want)
    if is_float:
        losses = [
            sum((y * rand(*y.shape, seed=k)).sum() for k, y in enumerate(t)) for t in (ys, want)
        ]
        found, loop = (torch.autograd.grad(loss, xs) for loss in losses)
        torch.testing.assert_close(found, loop)


FEW_CHAINS = [((1, -1), 1), ((3, -1), 1), ((15, -1), 1), ((-1, 1), 0), ((-1, 4), 0), ((-1, 15), 0),
              ((2, -1, 3), 1)]  # fmt: skip
# Of numbers of blocks around those of lanes, that divide and do not.
CUTS = [(1, 40), (2, 31), (2, 65), (15, 15 * 16), (16, 16 * 17 + 1), (17, 17 * 33 - 1),
        (99, 100), (100, 100), (101, 100)]  # fmt: skip
STEPPED = {
    **{name: (ops_, 1) for name, ops_ in (("sum", ops.sum), ("max", ops.max),
                                          ("logaddexp", ops.logaddexp), ("welford", ops.welford))},
    "affine": (ops.affine, 2), "bicyclic": (CASES["bicyclic"].op, 2),
}  # fmt: skip


def drawn(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    if name == "bicyclic":
        return list(CASES[name].draw(torch.Generator().manual_seed(0), shape))
    return [rand(*shape, seed=k) for k in range(STEPPED[name][1])]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape,axis", FEW_CHAINS)
@pytest.mark.parametrize("name", STEPPED)
def test_pieces_of_few_chains(name: str, shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    """Chains are cut into pieces, which are lanes of the kernel: of all lengths of the last block,
    also in packed sequences; then leaves of another address and of other strides."""
    op = STEPPED[name][0]
    for width, length in CUTS:
        leaves = drawn(name, tuple(length if n < 0 else n for n in shape))
        check_step_by_step(op, leaves, width, axis, reverse, None)
    for width, length in ((5, 200), (16, 300)):
        leaves = drawn(name, tuple(length if n < 0 else n for n in shape))
        offsets = torch.tensor([0, 0, 1, 82, 99, 180, length])
        check_step_by_step(op, leaves, width, axis, reverse, offsets)
        further = [torch.cat([t, t], axis).narrow(axis, 1, length) for t in leaves]
        check_step_by_step(op, further, width, axis, reverse, offsets)
        turned = [t.mT.contiguous().mT for t in leaves]
        check_step_by_step(op, turned, width, axis, reverse, None)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose blocks are cut into segments of 5 steps at most."""
    cpu.source.cache_clear()
    monkeypatch.setattr(cpu, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(cpu, "SEGMENT_STEPS", 5)
    yield
    cpu.source.cache_clear()


@pytest.mark.usefixtures("short_segments")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape,axis", [*FEW_CHAINS, ((-1, 18), 0), ((2, -1, 35), 1)])
@pytest.mark.parametrize("name", STEPPED)
def test_segments(name: str, shape: tuple[int, ...], axis: int, reverse: bool) -> None:
    """Two segments and many, of equal lengths and not; pieces that end in any of them."""
    op = STEPPED[name][0]
    for width, length in ((7, 50), (11, 41), (17, 250), (34, 103), (41, 161)):
        leaves = drawn(name, tuple(length if n < 0 else n for n in shape))
        check_step_by_step(op, leaves, width, axis, reverse, None)
    for width, length in ((12, 200), (38, 300)):
        leaves = drawn(name, tuple(length if n < 0 else n for n in shape))
        offsets = torch.tensor([0, 0, 1, 82, 99, 180, length])
        check_step_by_step(op, leaves, width, axis, reverse, offsets)


@pytest.mark.slow(2)
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("shape", [(90, 1), (90, 18)])
def test_segments_keep_windows_apart(shape: tuple[int, int]) -> None:
    """A NaN and infinities are in the windows that hold them, and in no other; in gradients too,
    where those windows have a cotangent of 0 or not."""
    x = rand(*shape)
    x[30], x[52], x[75] = NAN, INF, -INF
    cotangent = rand(*shape, seed=1)
    cotangent[52:69] = 0
    for op, reverse in product((ops.logaddexp, ops.sum, ops.max), (False, True)):
        t = x.clone().requires_grad_()
        y, want = windowed(op, t, 17, 0, reverse), each_window(op, t, 17, 0, reverse)
        torch.testing.assert_close(y, want, equal_nan=True)
        found, loop = (torch.autograd.grad(z, t, cotangent)[0] for z in (y, want))
        touched = (torch.isnan(loop) | torch.isnan(found)).any(1)
        near = torch.zeros(len(x), dtype=torch.bool)
        for at in (30, 52, 75):  # what shares a window with them
            near[max(at - 16, 0) : at + 17] = True
        assert not (touched & ~near).any()
        torch.testing.assert_close(found[~near], loop[~near])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STEPPED)
def test_pieces_of_wide_windows(name: str) -> None:
    """Gradients where the loop's fit into memory."""
    op = STEPPED[name][0]
    for shape, axis, reverse in (((1, 772), 1, False), ((772, 2), 0, True)):
        check_step_by_step(op, drawn(name, shape), 257, axis, reverse, None)
    if name == "logaddexp":
        return  # the loop takes minutes
    for shape, axis, reverse in (((1, 4097), 1, False), ((2 * 4096 + 17, 1), 0, True)):
        leaves = drawn(name, shape)
        given = tuple(leaves) if len(leaves) > 1 else leaves[0]
        ys = windowed(op, given, 4096, axis, reverse)
        want = step_by_step(op, given, 4096, axis, reverse)
        torch.testing.assert_close(tuple(torch.utils._pytree.tree_leaves(ys)), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sum", "logaddexp", "affine", "welford"])
def test_gradients_of_wide_windows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the composition of scans."""
    for length in (4097, 3 * 4096, 20 * 4096 + 17):
        leaves = [t.requires_grad_() for t in drawn(name, (1, length))]
        given = tuple(leaves) if len(leaves) > 1 else leaves[0]
        grads = []
        for steps in (1 << 60, 0):
            clear_prepared_calls()
            monkeypatch.setattr(one_pass, "FEW_STEPS", steps)
            monkeypatch.setattr(one_pass, "FEW_BLOCKS", 1 << 60)
            monkeypatch.setattr(one_pass, "FEW_OF_CHEAP", 1 << 60)
            ys = torch.utils._pytree.tree_leaves(windowed(STEPPED[name][0], given, 4096, 1))
            loss = sum((y * rand(1, length, seed=k)).sum() for k, y in enumerate(ys))
            grads.append(torch.autograd.grad(loss, leaves))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "shape,axis,width",
    [
        ((1, 100003), 1, 257),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ((3, 40000), 1, 4096),
                ((50001, 2), 0, 16),
                ((9001, 16), 0, 100),
                ((9001, 40), 0, 5000),
            )
        ),
    ],
)
@pytest.mark.parametrize("op", [ops.logaddexp, pytest.param(ops.sum, marks=pytest.mark.exhaustive)])
def test_threads_change_no_bit(op: Any, shape: tuple[int, ...], axis: int, width: int) -> None:
    x = rand(*shape, dtype=torch.float32).requires_grad_()
    cotangent = rand(*shape, seed=1, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            y = windowed(op, x, width, axis)
            found.append((y, *torch.autograd.grad(y, x, cotangent)))
    finally:
        torch.set_num_threads(before)
    for y, grad in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(grad, found[0][1])


def test_a_long_row_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are few lanes; where there is one, scans are faster."""
    calls, call = [], one_pass.cpu.call
    monkeypatch.setattr(one_pass.cpu, "call", lambda *a: calls.append(a) or call(*a))
    x = rand(1, 1 << 15)
    for width, is_one in ((16, True), (1 << 12, True), (30000, False)):
        windowed(ops.sum, x, width, 1)
        assert bool(calls) == is_one
        calls.clear()


def test_one_pass_does_not_leave_its_sequence() -> None:
    """Values and gradients of packed sequences, empty ones among them, in which some windows hold
    an infinite value that is in no window of the loss."""
    offsets = torch.tensor([0, 0, 1, 9, 9, 12, 40, 40])
    x = rand(40, 18)
    x[8] = float("inf")
    cotangent = rand(40, 18, seed=1)
    cotangent[1:9] = 0
    for width, reverse in product((1, 3, 8, 30), (False, True)):
        t = x.clone().requires_grad_()
        y = windowed(ops.logaddexp, t, width, 0, reverse, offsets=offsets)
        parts = [p for p in t.split(offsets.diff().tolist()) if len(p)]
        want = torch.cat([each_window(ops.logaddexp, p, width, 0, reverse) for p in parts])
        torch.testing.assert_close(y, want)
        found, loop = (torch.autograd.grad(z, t, cotangent)[0] for z in (y, want))
        torch.testing.assert_close(found[9:], loop[9:])
        torch.testing.assert_close(found[:1], loop[:1])


@pytest.mark.slow
def test_derivatives_of_one_pass_are_those_of_scans() -> None:
    """Further ones, and of a batch of cotangents; leaves that were changed since are refused."""
    x = rand(20, 6).requires_grad_()

    def f(t: torch.Tensor) -> torch.Tensor:
        return windowed(ops.logaddexp, t, 3, 1)

    assert torch.autograd.gradgradcheck(f, (x,))
    y, batch = f(x), rand(4, 20, 6, seed=1)
    (found,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in batch]
    torch.testing.assert_close(found, torch.stack(each))
    z = x * 1
    y = f(z)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("axis", [0, 1])
def test_results_may_be_changed_in_place(axis: int) -> None:
    """As those of a scan; the CPU's kernel moves the axis, and so made views."""
    x = rand(8, 9, 3).requires_grad_()
    for _ in range(2):
        y = windowed(ops.max, x, 4, axis)
        want = torch.autograd.grad(y.mul(3).sum(), x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(y.mul_(3).sum(), x), want)


def test_packed(engine: Engine) -> None:
    """No window begins before its sequence; some sequences are empty or shorter than the width."""
    x = rand(2, 30, dtype=torch.float32)
    offsets = torch.tensor([0, 1, 9, 9, 12, 28, 30])
    parts = x.split(offsets.diff().tolist(), 1)
    for width, reverse in ((4, False), (4, True), (8, False), (1, False), (50, True)):
        y = windowed(ops.logaddexp, engine.put(x), width, 1, reverse,
                     offsets=offsets, backend=engine.name)  # fmt: skip
        alone = [each_window(ops.logaddexp, t, width, 1, reverse) for t in parts if t.shape[1]]
        torch.testing.assert_close(y.cpu(), torch.cat(alone, 1).float())
        if engine.interpreted:
            break


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", ["sum", "max", "logaddexp", "affine"])
def test_special_values_stay_in_their_windows(name: str, backend: str) -> None:
    """NaN, infinities and values whose products overflow: windows without them are not touched, nor
    gradients of what is in no window with them."""
    op, xs = OPERATORS[name]
    if name == "affine":
        op = with_lower(op, lambda s: s[1])
    bad = torch.zeros(2, LENGTH, dtype=torch.bool)
    bad[0, [4, 9]] = True
    for value in (NAN, INF, -INF, 1e300):
        leaves = [t.masked_fill(bad, value).requires_grad_() for t in
                  (xs if isinstance(xs, tuple) else (xs,))]  # fmt: skip
        for width, reverse in ((3, False), (4, True)):
            given = tuple(leaves) if len(leaves) > 1 else leaves[0]
            y = windowed(op, given, width, 1, reverse, backend=backend)
            want = each_window(op, given, width, 1, reverse)
            torch.testing.assert_close(y, want, equal_nan=True)
            clean = want.detach().abs() < 1e200
            grads = torch.autograd.grad(y[clean].sum(), leaves)
            for found, expected in zip(
                grads, torch.autograd.grad(want[clean].sum(), leaves), strict=True
            ):
                step = torch.arange(LENGTH)
                far = ((step[:, None] - step).abs() >= width) | ~bad[:, None]
                torch.testing.assert_close(found[far.all(-1)], expected[far.all(-1)])
                assert not expected[far.all(-1)].isnan().any() and far.all(-1)[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "logaddexp", "affine", "welford", "argmax"])
def test_repeated_calls(name: str) -> None:
    """Each call three times, then with one thing changed; every one is like the loop, and the same
    call gives the same bits."""
    op = STEPPED[name][0] if name in STEPPED else OPERATORS[name][0]
    xs = OPERATORS[name][1]
    first = tuple(xs) if isinstance(xs, tuple) else (xs,)
    shape = first[0].shape

    def changed(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [f(t) if t.is_floating_point() else t for t in first]

    kinds: dict[str, Callable[[], list[Tensor]]] = {
        "plain": lambda: list(first),
        "another address": lambda: [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(shape)
                                    for t in first],
        "transposed": lambda: [t.mT.contiguous().mT for t in first],
        "every other": lambda: [torch.stack([t, t], -1)[..., 0] for t in first],
        "broadcast": lambda: [t[:1].expand(shape) for t in first],
        "float32": lambda: changed(Tensor.float),
        "with a gradient": lambda: changed(lambda t: t.detach().requires_grad_()),
        "plain again": lambda: list(first),
    }  # fmt: skip
    for kind, make in kinds.items():
        found: list[Any] = []
        for _ in range(3):
            leaves = make()
            given = tuple(leaves) if len(leaves) > 1 else leaves[0]
            ys = torch.utils._pytree.tree_leaves(windowed(op, given, 4, 1))
            wanted = [t for t in leaves if t.requires_grad]
            if wanted:
                sums = [y for y in ys if y.requires_grad]  # their cotangents are expanded
                ys += torch.autograd.grad(sum(y.sum() for y in sums), wanted)
                ys[0].detach().zero_()  # memory of one call is not that of another
                ys = ys[1:]
            found.append([y.detach() for y in ys])
        assert all(
            torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
        ), kind
        if kind != "with a gradient":
            want = torch.utils._pytree.tree_leaves(each_window(op, given, 4, 1))
            rtol = 1e-4 if kind == "float32" else 1e-9
            for y, z in zip(found[0], want, strict=True):
                torch.testing.assert_close(y, z.to(y.dtype), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_repeated_calls_check_their_offsets(dtype: torch.dtype) -> None:
    x = rand(20, 3).requires_grad_()
    for bounds in ((0, 4, 20), (0, 4, 20), (0, 9, 20), (0, 0, 20)):
        offsets = torch.tensor(bounds, dtype=dtype)
        y = windowed(ops.sum, x, 3, offsets=offsets)
        parts = [x[a:b] for a, b in pairwise(bounds) if b > a]
        want = torch.cat([each_window(ops.sum, p, 3) for p in parts])
        torch.testing.assert_close(y, want)
        found, loop = (torch.autograd.grad((z * z).sum(), x)[0] for z in (y, want))
        torch.testing.assert_close(found, loop)
    for bounds in ((0, 4, 21), (1, 4, 20), (0, 21, 20), (0, -1, 20)):
        with pytest.raises(ScanValueError, match="offsets"):
            windowed(ops.sum, x, 3, offsets=torch.tensor(bounds, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["scan", "sum", "max", "logaddexp", "affine"])
def test_saved_offsets_may_come_back_strided(name: str, dtype: torch.dtype) -> None:
    """A hook may give back a tensor of other strides; gradients beside those without a hook."""
    offsets = torch.tensor([0, 9, 9, 64], dtype=dtype)
    x, a = rand(64).requires_grad_(), rand(64, seed=1).requires_grad_()

    def call() -> Tensor:
        if name == "scan":
            return associative_scan(ops.sum, x, offsets=offsets)
        xs = (a, x) if name == "affine" else x
        ys = windowed(OPERATORS[name][0], xs, 4, offsets=offsets)
        return ys[1] if isinstance(ys, tuple) else ys

    def strided(t: Tensor) -> Tensor:
        return torch.stack([t, t], -1)[..., 0]

    (want,) = torch.autograd.grad(call().sum(), x)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, strided):
            y = call()
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, want)


def test_gradients_of_repeated_calls() -> None:
    """Of parts of the outputs, with hooks that move what is saved, under checkpoint, mapped, and
    twice differentiated."""
    x = rand(2, 30).requires_grad_()
    a = (rand(2, 30, seed=1) / 2).requires_grad_()
    for op, given in ((ops.logaddexp, (x,)), (ops.affine, (a, x)), (ops.max, (x,))):

        def call(*leaves: Tensor, op: Any = op) -> Tensor:
            ys = windowed(op, leaves if len(leaves) > 1 else leaves[0], 5, 1)
            return ys[-1] if isinstance(ys, tuple) else ys  # affine: no cotangent for a

        want = torch.autograd.grad(each_last(op, given).square().sum(), given)
        for _ in range(3):
            y = call(*given)
            torch.testing.assert_close(torch.autograd.grad(y.square().sum(), given), want)
            with torch.autograd.graph.save_on_cpu():
                y = call(*given)
            torch.testing.assert_close(torch.autograd.grad(y.square().sum(), given), want)
            y = torch.utils.checkpoint.checkpoint(call, *given, use_reentrant=False)
            torch.testing.assert_close(torch.autograd.grad(y.square().sum(), given), want)
            batch = torch.randn(3, 2, 30, dtype=F64)
            rows = torch.autograd.grad(call(*given), given, batch, is_grads_batched=True)
            each = [torch.autograd.grad(call(*given), given, g) for g in batch]
            for k, row in enumerate(rows):
                torch.testing.assert_close(row, torch.stack([g[k] for g in each]))
        if op is not ops.max:
            few = [t[:1, :7].detach().requires_grad_() for t in given]
            for _ in range(2):
                torch.autograd.gradgradcheck(call, few)


def each_last(op: Any, given: tuple[Tensor, ...]) -> Tensor:
    ys = each_window(op, given if len(given) > 1 else given[0], 5, 1)
    return ys[-1] if isinstance(ys, tuple) else ys


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1e3, -1e5])
def test_log_sums_are_as_exact_as_a_loop(shift: float, reverse: bool) -> None:
    """Values and gradients, beside a loop over windows in float32 too. Errors grow with |x|, but no
    more than the loop's."""
    x = (3 * rand(300, 5) + shift).float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    cotangent = rand(300, 5, seed=1).float()
    errors = []
    for windows in (windowed, step_by_step, windowed):
        y, z = windows(ops.logaddexp, x, 65, 0, reverse), step_by_step(
            ops.logaddexp, wide, 65, 0, reverse)[0]  # fmt: skip
        y = y[0] if isinstance(y, tuple) else y
        pair = (
            torch.autograd.grad(y, x, cotangent),
            torch.autograd.grad(z, wide, cotangent.double()),
        )
        errors.append([(y - z).abs().max(), (pair[0][0] - pair[1][0]).abs().max()])
    assert errors[0] == errors[2]
    for found, loop in zip(errors[0], errors[1], strict=True):
        assert found <= 1.5 * loop


def test_infinite_log_sums_pass_no_gradient_on() -> None:
    x = torch.tensor([1.0, -INF, -INF, -INF, 2.0, INF, 3.0, 4.0, 5.0], requires_grad=True)
    y = windowed(ops.logaddexp, x, 2)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    # Of the windows of 1.0, of −∞ and 2.0, of 3.0 and 4.0, and of 4.0 and 5.0.
    late = torch.sigmoid(torch.tensor(1.0))
    want = torch.tensor([2.0, 0, 0, 0, 1.0, 0, 1 - late, 1.0, late])
    torch.testing.assert_close(found, want)
    # What shares a window with a NaN gets NaN, whatever its other windows are.
    x = torch.tensor([0.0, INF, 0.0, NAN, 0.0, -INF, 0.0], requires_grad=True)
    for reverse, touched in ((False, [0, 0, 1, 1, 1, 0, 0]), (True, [0, 0, 1, 1, 1, 0, 0])):
        y = windowed(ops.logaddexp, x, 2, 0, reverse)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found.isnan(), torch.tensor(touched).bool())


@pytest.mark.slow
@pytest.mark.thinned(8)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", ["logaddexp", "affine", "matmul", "welford", "decibels", "raw"])
def test_derivatives(name: str, backend: str) -> None:
    op, xs = OPERATORS["logaddexp" if name == "raw" else name]
    op = torch.logaddexp if name == "raw" else op
    many = isinstance(xs, tuple)
    leaves = [t[:1, :7].clone().requires_grad_() for t in (xs if many else (xs,))]

    def call(*leaves: Tensor) -> Any:
        ys = windowed(op, leaves if many else leaves[0], 3, 1, backend=backend)
        return tuple(torch.utils._pytree.tree_leaves(ys))

    torch.autograd.gradcheck(call, leaves)
    torch.autograd.gradgradcheck(call, leaves)


def test_plain_functions() -> None:
    """Kernels where all is pointwise; products of slices; leaves of several ranks; captured
    tensors."""

    def steps(left: Any, right: Any) -> Any:
        return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}

    xs = {"a": rand(2, LENGTH), "b": rand(2, LENGTH, seed=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for width in (3, 3, 1, LENGTH, 99):
            torch.testing.assert_close(
                windowed(steps, xs, width, 1), each_window(steps, xs, width, 1)
            )
        for factor in (2.0, 3.0, 2.0):  # a captured number is part of the function

            def scaled(a: Tensor, b: Tensor, factor: float = factor) -> Tensor:
                return (factor * a) * (factor * b) / factor

            torch.testing.assert_close(
                windowed(scaled, xs["a"], 4, 1), each_window(scaled, xs["a"], 4, 1)
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        matrices = rand(LENGTH, 3, 2, 2)
        torch.testing.assert_close(
            windowed(lambda a, b: a @ b, matrices, 4, reverse=True),
            each_window(lambda a, b: a @ b, matrices, 4, reverse=True),
        )

        def map_after(left: Any, right: Any) -> Any:
            return right[0] @ left[0], (right[0] @ left[1][..., None])[..., 0] + right[1]

        pair = rand(LENGTH, 2, 2), rand(LENGTH, 2)
        torch.testing.assert_close(windowed(map_after, pair, 4), each_window(map_after, pair, 4))
        scale = torch.tensor(2.0, dtype=F64)
        torch.testing.assert_close(
            windowed(lambda a, b: (scale * a + scale * b) / scale, pair[1], 4),
            windowed(ops.sum, pair[1], 4),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ops.sum, torch.add, ops.mean], ids=["sum", "raw", "mean"])
def test_16_bits_are_rounded_once(op: Any, dtype: torch.dtype) -> None:
    x = rand(2, 500).to(dtype)
    y = windowed(op, x, 100, 1)
    exact = windowed(op, x.double(), 100, 1)
    assert y.dtype == dtype
    error = (y.double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() * 1.001 + 1e-5).all()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.complex64, torch.float32]
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(0, 3, (2, LENGTH)).to(dtype)
    op = ops.any if dtype == torch.bool else ops.prod
    y = windowed(op, x, 3, 1)
    assert y.dtype == dtype
    assert_scan_close(y, each_window(op, x, 3, 1), LENGTH)


def test_nothing_is_left_of_what_a_window_has_passed() -> None:
    """As it is where a window is the difference of two sums: in float32, over 10⁵ steps."""
    x = rand(100000, dtype=torch.float32)
    x[10] = 1e12
    y = windowed(ops.sum, x, 1000)
    exact = windowed(ops.sum, x.double(), 1000)
    assert (y - exact)[1010:].abs().max() < 1e-4


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_large_tensors(axis: int) -> None:
    """Moved on huge pages: values and gradients, of several layouts."""
    whole = torch.randint(-9, 9, (1050, 1050)).float()
    for x in (whole.narrow(axis, 1, 1040), whole.mT):
        total = x.cumsum(axis)
        want = total.clone()
        want.narrow(axis, 7, x.shape[axis] - 7).sub_(total.narrow(axis, 0, x.shape[axis] - 7))
        leaf = x.clone().requires_grad_()
        for given in (x, leaf):
            y = windowed(ops.sum, given, 7, axis)
            torch.testing.assert_close(y.detach(), want)
        (grad,) = torch.autograd.grad(y, leaf, x)
        torch.testing.assert_close(grad, windowed(ops.sum, x, 7, axis, reverse=True))


@pytest.mark.exhaustive
def test_compiled_and_mapped() -> None:
    x = rand(4, LENGTH)
    want = windowed(ops.logaddexp, x, 3, 1)

    def call(x: Tensor) -> Tensor:
        return windowed(ops.logaddexp, x, 3, 1)

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    leaf = x.clone().requires_grad_()
    grads = [torch.autograd.grad(f(leaf).square().sum(), leaf) for f in (call, compiled, compiled)]
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
    for given in (x, x[:, :9], x[:2]):
        torch.testing.assert_close(compiled(given), call(given))
    torch.testing.assert_close(torch.func.vmap(lambda t: windowed(ops.logaddexp, t, 3))(x), want)
    torch.testing.assert_close(
        torch.func.vmap(lambda t: windowed(torch.logaddexp, t, 3), 0)(x), want
    )
    tangent = torch.func.jvp(call, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(tangent, torch.ones_like(x))


@pytest.mark.exhaustive
def test_other_compiled_calls() -> None:
    x, offsets = rand(4, LENGTH), torch.tensor([0, 4, LENGTH])

    def raw(x: Tensor) -> Tensor:
        return windowed(lambda a, b: a + b, x, 3, 1, True)

    def packed(x: Tensor, offsets: Tensor) -> Any:
        return windowed("welford", x, 3, 1, offsets=offsets)

    for function, arguments in ((raw, (x,)), (packed, (x, offsets))):
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(*arguments), function(*arguments))


@pytest.mark.parametrize("op", [ops.logaddexp, torch.logaddexp], ids=["monoid", "raw"])
def test_one_thing_changes_after_another(op: Any) -> None:
    """The same call again, one element further, of other strides, dtypes, widths and grad modes."""
    whole = rand(6, LENGTH + 1, dtype=torch.float32)
    calls = [whole[:, :-1], whole[:, :-1], whole[:, 1:], whole[::2, ::3], whole.double(),
             whole.mT.contiguous().mT, whole[:1].expand(6, -1), whole[:, :-1]]  # fmt: skip
    for k, x in enumerate(calls):
        width = 3 + k % 2
        want = each_window(ops.logaddexp, x, width, 1)
        for given in (x, x.clone().requires_grad_(), x):
            y = windowed(op, given, width, 1, backend="cpu")
            assert y.dtype == x.dtype and y.requires_grad == given.requires_grad
            torch.testing.assert_close(y.detach().double(), want, rtol=1e-5, atol=1e-5)


def test_results_are_new() -> None:
    x = rand(LENGTH)
    for width in (1, 3, LENGTH):
        for op in (ops.max, torch.maximum):
            y = windowed(op, x, width)
            assert y.data_ptr() != x.data_ptr() and y.is_contiguous()


x = torch.ones(4, 5)


@pytest.mark.parametrize(
    "call,error,words",
    [
        *((lambda w=w: windowed(ops.sum, x, w), ScanValueError, f"width is {said}, expected an int")
          for w, said in ((0, "0"), (-2, "-2"), (2.0, "2.0"), (True, "True"), ("3", "'3'"),
                           (None, "None"), (torch.tensor(3), "a tensor"))),
        (lambda: windowed(ops.sum, x, 2, 3), AxisError, r"axis 3.*\[4, 5\]"),
        (lambda: windowed(ops.affine, (x, x[:3]), 2), ScanValueError, r"xs\[0\].*xs\[1\]"),
        (lambda: windowed(ops.affine, x, 2), ScanTypeError, "xs"),
        (lambda: windowed("summ", x, 2), ScanValueError, "summ"),
        (lambda: windowed(3, x, 2), ScanTypeError, "op must be"),
        (lambda: windowed(ops.sum, [1.0], 2), ScanTypeError, r"xs\[0\] is"),
        (lambda: windowed(ops.sum, x, 2, backend="gpu"), ScanValueError, "gpu"),
        (lambda: windowed(ops.sum, x, 2, deterministic=2), ScanTypeError, "deterministic is 2"),
        (lambda: windowed(ops.sum, x, 2, reverse="no"), ScanTypeError, "reverse is 'no'"),
        (lambda: windowed(ops.sum, x, 2, offsets=torch.tensor([0, 3])), ScanValueError, "length 4"),
        (lambda: windowed(lambda a, b: (a, b), x, 2), ScanTypeError, "tuple"),
        (lambda: associative_scan(windowed, x), ScanTypeError, "windowed"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_operators_are_named_in_messages() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        windowed(ops.matmul, torch.randn(6, 40, 40), 3)
    said = {str(w.message) for w in caught if issubclass(w.category, FallbackWarning)}
    assert all("'windowed(matmul)'" in text for text in said)
    assert explain(ops.sum, x).operator == "sum"
