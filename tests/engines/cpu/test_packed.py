"""Packed sequences on the CPU: many short ones, long ones beside them, any number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, linear_recurrence, monoid, offsets_of, ops, reduce
from assocscan.engines.cpu import kernel, threads_and_jobs
from assocscan.runtime import backends
from assocscan.testing import bicyclic

pytestmark = pytest.mark.skipif(
    backends.availability()["cpu"] is not None, reason="needs a C++ compiler"
)

SHORT, RUN = kernel.SHORT, kernel.RUN


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The number of threads, which small scans use too."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads_and_jobs, "SERIAL_BYTES", 0)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(count: int, most: int) -> Tensor:
    return torch.randint(0, most, (count,), generator=torch.Generator().manual_seed(count))


# Lengths of sequences; some are about those at which another way is taken.
LENGTHS = {
    "short": drawn(300, 33),
    "at the limit": torch.tensor([SHORT - 1, SHORT, 0, SHORT + 1, 1, 32, 31, 33]),
    "at the limit of runs": torch.tensor([RUN, RUN - 1, 0, RUN + 1, RUN - 1, 1, 1, RUN, 0, 16, 17]),
    "long first": torch.cat([torch.tensor([3000]), drawn(60, 20)]),
    "long between": torch.cat([drawn(60, 20), torch.tensor([3000, 0]), drawn(30, 20)]),
    "long last": torch.cat([drawn(60, 20), torch.tensor([3000])]),
    "empty at both ends": torch.cat([torch.zeros(40).long(), drawn(50, 9), torch.zeros(40).long()]),
    "ones": torch.ones(100).long(),
    "one": torch.tensor([700]),
}
each_case = pytest.mark.parametrize("case", LENGTHS)


def alone(op: Any, xs: Any, offsets: Tensor, axis: int, **options: Any) -> list[Tensor]:
    """Outputs and finals of each sequence on its own, by calls without offsets."""
    init, outputs, finals = options.pop("init", None), [], []
    for s, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        part = tuple(x.narrow(axis, a, b - a) for x in xs)
        enters = None if init is None else tuple(t[s] for t in init)
        y, last = associative_scan(
            op, part if len(part) > 1 else part[0], axis, init=enters, return_final=True,
            backend="cpu", **options,
        )  # fmt: skip
        outputs.append(y if isinstance(y, tuple) else (y,))
        finals.append(last if isinstance(last, tuple) else (last,))
    joined = [torch.cat(leaves, axis) for leaves in zip(*outputs, strict=True)]
    return joined + [torch.stack(leaves) for leaves in zip(*finals, strict=True)]


def integers(*shape: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(1))


@monoid(identity=(0, 0), name="bicyclic_of_test_packed")
def pairs(left: Any, right: Any) -> Any:
    return bicyclic(left, right)


@pytest.mark.thinned(7)
@each_case
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_beside_each_alone(case: str, reverse: bool, inclusive: bool, threads: int) -> None:
    """An operator that does not commute, exactly; along each axis of two rows and of twenty
    channels; twice, then one element further in memory; with and without init."""
    offsets = offsets_of(LENGTHS[case])
    length, count = int(offsets[-1]), len(offsets) - 1
    options: Any = {"reverse": reverse, "inclusive": inclusive}
    for shape, axis in (((2, length + 1), 1), ((length + 1, 20), 0)):
        whole = [integers(*shape).abs(), integers(*shape).abs().flip(0)]
        for start, carried in ((0, True), (0, True), (1, False)):
            xs = tuple(x.narrow(axis, start, length) for x in whole)
            batch = [n for d, n in enumerate(shape) if d != axis]
            init = tuple(integers(count, *batch).abs() for _ in range(2)) if carried else None
            want = alone(pairs, xs, offsets, axis, init=init, **options)
            y, last = associative_scan(
                pairs, xs, axis, init=init, return_final=True, offsets=offsets, backend="cpu",
                **options,
            )  # fmt: skip
            for got, expected in zip((*y, *last), want, strict=True):
                assert torch.equal(got, expected)
            total = reduce(pairs, xs, axis, reverse, init=init, offsets=offsets, backend="cpu")
            for got, expected in zip(total, want[2:], strict=True):
                assert torch.equal(got, expected)


@pytest.mark.thinned(7)
@each_case
def test_without_an_identity(case: str, threads: int) -> None:
    """The first element begins the state; no sequence is empty."""
    offsets = offsets_of(LENGTHS[case].clamp(min=1))
    x = integers(int(offsets[-1])).double()
    positions = torch.arange(len(x))
    want = alone(ops.argmax, (x, positions), offsets, 0)
    y, last = associative_scan(
        ops.argmax, (x, positions), return_final=True, offsets=offsets, backend="cpu"
    )
    for got, expected in zip((*y, *last), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.thinned(7)
@each_case
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients(case: str, reverse: bool, threads: int) -> None:
    """Of kernels that read the step before, and know the last step of each sequence."""
    offsets = offsets_of(LENGTHS[case])
    length, count = int(offsets[-1]), len(offsets) - 1
    generator = torch.Generator().manual_seed(2)
    a, b, init = (
        torch.rand(n, generator=generator, dtype=torch.float64) for n in (length, length, count)
    )

    def scan(start: Tensor, offsets: Tensor | None, part: slice) -> tuple[Tensor, Tensor]:
        return linear_recurrence(
            a[part], b[part], start, axis=0, reverse=reverse, return_final=True,
            offsets=offsets, backend="cpu",
        )  # fmt: skip

    check_gradients(scan, [a, b, init], init, offsets)


def check_gradients(
    scan: Callable[[Tensor, Tensor | None, slice], tuple[Tensor, Tensor]],
    leaves: list[Tensor],
    init: Tensor,
    offsets: Tensor,
) -> None:
    """Outputs, finals and gradients of packed sequences equal those of separate scans."""
    for leaf in leaves:
        leaf.requires_grad_()
    parts = [
        scan(init[s], None, slice(i, j)) for s, (i, j) in enumerate(itertools.pairwise(offsets))
    ]
    alone = torch.cat([y for y, _ in parts]), torch.stack([y for _, y in parts])
    found = []
    for results in (scan(init, offsets, slice(None)), alone):
        weights = [torch.rand(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(3))
                   for t in results]  # fmt: skip
        found.append([*results, *torch.autograd.grad(results, leaves, weights)])
    torch.testing.assert_close(*found)


@pytest.mark.thinned(7)
@each_case
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_operators_that_call_the_library(
    case: str, reverse: bool, threads: int
) -> None:
    """Sequences side by side, of which some end before others, in more than one batch."""
    lengths = LENGTHS[case]
    offsets = offsets_of(torch.cat([lengths, drawn(1100, 4)]) if case == "ones" else lengths)
    generator = torch.Generator().manual_seed(2)
    x, init = (
        torch.randn(n, generator=generator, dtype=torch.float64)
        for n in (int(offsets[-1]), len(offsets) - 1)
    )

    def scan(start: Tensor, offsets: Tensor | None, part: slice) -> tuple[Tensor, Tensor]:
        return associative_scan(
            ops.logaddexp, x[part], 0, reverse=reverse, init=start, return_final=True,
            offsets=offsets, backend="cpu",
        )  # fmt: skip

    check_gradients(scan, [x, init], init, offsets)


@pytest.mark.thinned(7)
@each_case
def test_operators_that_call_the_library(case: str, threads: int) -> None:
    offsets = offsets_of(LENGTHS[case])
    x = integers(3, int(offsets[-1])).double()
    for y in (x[0], x, x.mT.contiguous()):
        axis = 0 if y.dim() == 1 or y.shape[1] == 3 else 1
        got = associative_scan(ops.logaddexp, y, axis, offsets=offsets, backend="cpu")
        want = alone(ops.logaddexp, (y,), offsets, axis)[0]
        torch.testing.assert_close(got, want)


@monoid(identity=(False, 0.0), name="restarted_sum_of_test_packed")
def restarted(left: Any, right: Any) -> Any:
    (was, before), (restarts, x) = left, right
    return was | restarts, torch.where(restarts, x, before + x)


def looped(
    x: Tensor, restarts: Tensor, init: Tensor, offsets: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The values and finals of `restarted`, step by step in float64."""
    x, carries, found, flags = x.double(), init.double(), {}, restarts.tolist()
    finals = []
    for s, (i, j) in enumerate(itertools.pairwise(offsets.tolist())):
        carry = carries[s]
        for t in reversed(range(i, j)) if reverse else range(i, j):
            carry = found[t] = x[t] if flags[t] else carry + x[t]
        finals.append(carry)
    return torch.stack([found[t] for t in range(len(x))]), torch.stack(finals)


@pytest.mark.slow
@pytest.mark.thinned(7)
@each_case
@pytest.mark.parametrize("reverse", [False, True])
def test_operators_that_select(case: str, reverse: bool, threads: int) -> None:
    """In runs, beside a loop: twice, then elsewhere in memory, then float64; what is not finite
    stays in its sequence, and before a restart."""
    offsets = offsets_of(LENGTHS[case])
    length, count = int(offsets[-1]), len(offsets) - 1
    generator = torch.Generator().manual_seed(4)
    whole, init = (
        torch.randn(length, 4, generator=generator),
        torch.randn(count, generator=generator),
    )
    restarts = torch.rand(length, generator=generator) < 0.2
    weights = torch.randn(length, generator=generator), torch.randn(count, generator=generator)
    column = whole[:, 0].contiguous()
    spoilt = column.clone()
    spoilt[torch.rand(length, generator=generator) < 0.01] = float("nan")
    spoilt[torch.rand(length, generator=generator) < 0.01] = float("inf")
    never = torch.zeros(count, dtype=torch.bool)
    for x in (column, column, whole[:, 1], whole[:, 2].double(), spoilt):
        leaf, start = x.detach().requires_grad_(), init.to(x.dtype).requires_grad_()
        (_, y), (_, last) = associative_scan(
            restarted, (restarts, leaf), reverse=reverse, init=(never, start),
            return_final=True, offsets=offsets, backend="cpu",
        )  # fmt: skip
        got, want = (y, last), looped(leaf, restarts, start, offsets, reverse)
        torch.testing.assert_close(got, want, check_dtype=False, equal_nan=True)
        with torch.no_grad():
            total = reduce(
                restarted, (restarts, leaf), 0, reverse, init=(never, start), offsets=offsets,
                backend="cpu",
            )  # fmt: skip
        torch.testing.assert_close(total[1], last, equal_nan=True)
        found = [
            torch.autograd.grad(
                results, (leaf, start), [w.to(t) for w, t in zip(weights, results, strict=True)]
            )
            for results in (got, want)
        ]
        torch.testing.assert_close(*found)


@pytest.mark.thinned(7)
@each_case
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_a_maximum(case: str, reverse: bool, threads: int) -> None:
    """With ties; the kernel of the gradient selects."""
    offsets = offsets_of(LENGTHS[case])
    x = integers(int(offsets[-1])).float().requires_grad_()
    y = associative_scan(ops.max, x, reverse=reverse, offsets=offsets, backend="cpu")
    wide, found = x.double(), {}
    for i, j in itertools.pairwise(offsets.tolist()):
        order = list(range(i, j))[:: -1 if reverse else 1]
        for before, t in zip([None, *order], order, strict=False):
            found[t] = wide[t] if before is None else torch.maximum(found[before], wide[t])
    want = torch.stack([found[t] for t in range(len(x))])
    torch.testing.assert_close(y, want, check_dtype=False)
    weights = torch.randn(len(x), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        got = torch.autograd.grad(y, x, weights, retain_graph=True)
        expected = torch.autograd.grad(want, x, weights.double(), retain_graph=True)
        torch.testing.assert_close(got, expected)


def test_wrong_offsets_are_told_before_anything_runs() -> None:
    x = torch.ones(1000)
    for wrong in ([0, 5, 4, 1000], [0, 500], [1, 1000], [0, -1, 1000]):
        for dtype in (torch.int32, torch.int64):
            with pytest.raises(ValueError, match="offsets"):
                reduce(ops.sum, x, offsets=torch.tensor(wrong, dtype=dtype), backend="cpu")
    strided = torch.arange(0, 2002, 1)[::2].clamp(max=1000)
    torch.testing.assert_close(
        reduce(ops.sum, x, offsets=strided, backend="cpu"), strided.diff().float()
    )
