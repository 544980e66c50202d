"""Returns, filters, gaps, runs and selections against plain loops and their peers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assocscan import (
    FallbackWarning,
    ScanTypeError,
    ScanValueError,
    compact,
    discounted_returns,
    forward_fill,
    gae,
    lfilter,
    matrix_recurrence,
    run_length_encode,
    run_lengths,
)

F64 = torch.float64
NAN = math.nan


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def assert_same(
    actual: Callable[..., Tensor], expected: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """The values, and the gradients of random cotangents."""
    found = []
    for function in (actual, expected):
        given = [t.clone().requires_grad_() for t in inputs]
        y = function(*given)
        found.append((y, torch.autograd.grad(y, given, rand(*y.shape, seed=9).to(y.dtype))))
    torch.testing.assert_close(found[0], found[1], equal_nan=True)


DONE = torch.tensor([[0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0]]).bool()


def returns_loop(rewards: Tensor, discount: Tensor, bootstrap: Tensor) -> Tensor:
    g, rows = bootstrap, []
    for t in reversed(range(rewards.shape[1])):
        g = rewards[:, t] + discount * torch.where(DONE[:, t], 0.0, g)
        rows.append(g)
    return torch.stack(rows[::-1], 1)


def gae_loop(rewards: Tensor, values: Tensor, bootstrap: Tensor) -> Tensor:
    a, after, rows = torch.zeros_like(bootstrap), bootstrap, []
    for t in reversed(range(rewards.shape[1])):
        a, after = (torch.where(DONE[:, t], 0.0, later) for later in (a, after))
        a = rewards[:, t] + 0.9 * after - values[:, t] + 0.9 * 0.8 * a
        after = values[:, t]
        rows.append(a)
    return torch.stack(rows[::-1], 1)


def test_returns_with_resets() -> None:
    discount = torch.tensor(0.9, dtype=F64)
    assert_same(
        lambda r, d, v: discounted_returns(r, d, DONE, v), returns_loop, rand(2, 6), discount,
        rand(2),
    )  # fmt: skip
    assert_same(
        lambda r, v, b: gae(r, v, b, 0.9, 0.8, DONE), gae_loop, rand(2, 6), rand(2, 6), rand(2)
    )
    torch.testing.assert_close(
        discounted_returns(rand(6, 2), 0.9, DONE.T, axis=0),
        returns_loop(rand(6, 2).T, discount, torch.zeros(2, dtype=F64)).T,
    )
    with pytest.raises(ScanTypeError, match=r"torch\.bool"):
        discounted_returns(rand(6), 0.9, torch.zeros(6))
    with pytest.raises(ScanValueError, match="values has shape"):
        gae(rand(6), rand(5), rand(), 0.9, 0.8)


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_nothing_reaches_back_over_the_end_of_an_episode(worst: float) -> None:
    """Both rows end before the worst: it reaches what is behind DONE, and no gradient before it."""
    rewards, values, discount = rand(2, 6), rand(2, 6, seed=1), torch.tensor(0.9, dtype=F64)
    rewards[0, 3] = values[0, 3] = worst
    bootstrap = torch.full((2,), worst, dtype=F64)
    y = discounted_returns(rewards, discount, DONE, bootstrap)
    finite = [[True, True, True, False, True, True], [True, True, False, False, False, False]]
    assert y.isfinite().tolist() == finite
    assert_same(
        lambda r, v: discounted_returns(r, discount, DONE, v),
        lambda r, v: returns_loop(r, discount, v),
        rewards,
        bootstrap,
    )
    assert_same(lambda r, v, b: gae(r, v, b, 0.9, 0.8, DONE), gae_loop, rewards, values, bootstrap)
    each = torch.full((2, 6), 0.9, dtype=F64, requires_grad=True)
    kept = torch.where(y.isfinite(), discounted_returns(rewards, each, DONE, bootstrap), 0.0)
    assert torch.autograd.grad(kept.sum(), each)[0][torch.tensor(finite)].isfinite().all()


def test_nothing_reaches_back_in_a_long_row() -> None:
    """In one that is cut into segments and chunks."""
    length, end = 40000, 20011
    done = torch.arange(length) == end
    rewards, values = rand(length), rand(length, seed=1)
    rewards[end + 1 :], values[end + 1 :] = math.nan, math.inf
    y = discounted_returns(rewards, 0.9, done)
    torch.testing.assert_close(y[: end + 1], discounted_returns(rewards[: end + 1], 0.9))
    a = gae(rewards, values, rand(), 0.9, 0.8, done)
    alone = gae(rewards[: end + 1], values[: end + 1], torch.zeros((), dtype=F64), 0.9, 0.8)
    torch.testing.assert_close(a[: end + 1], alone)
    assert not y[end + 1 :].isfinite().any() and not a[end + 1 :].isfinite().any()


@pytest.mark.parametrize("order", [0, 1, 3])
def test_lfilter_against_scipy(order: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    b, a, x = rand(3), 0.4 * rand(order + 1), rand(2, 30)
    a[0] = 2.0
    y = signal.lfilter(b.numpy(), a.numpy(), x.numpy(), axis=-1)
    torch.testing.assert_close(lfilter(b, a, x), torch.as_tensor(y))
    if order == 3:
        y = signal.lfilter(b.numpy(), a.numpy(), x.T.numpy(), axis=0)
        torch.testing.assert_close(lfilter(b, a, x.T, axis=0), torch.as_tensor(y))


def test_gradient_of_a_filter() -> None:
    def loop(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
        y: list[Tensor] = []
        for t in range(len(x)):
            total = sum(b[k] * x[t - k] for k in range(min(len(b), t + 1)))
            past = sum(a[k] * y[t - k] for k in range(1, min(len(a), t + 1)))
            y.append((total - past) / a[0])
        return torch.stack(y)

    a = torch.tensor([2.0, -0.4, 0.3], dtype=F64)
    assert_same(lfilter, loop, rand(2), a, rand(7))
    with pytest.raises(ScanValueError, match="a has shape"):
        lfilter(a, a[:0], rand(7))
    with pytest.raises(ScanTypeError, match="float32"):
        lfilter(a.float(), a, rand(7))


def test_matrix_recurrence_of_blocks() -> None:
    """Three blocks of a block-diagonal matrix, which varies along the axis, and an init."""
    A, b, init = 0.5 * rand(2, 6, 3, 2, 2), rand(2, 6, 3, 2), rand(2, 3, 2)

    def loop(A: Tensor, b: Tensor, init: Tensor) -> Tensor:
        h, rows = init, []
        for t in range(b.shape[1]):
            h = (A[:, t] @ h[..., None])[..., 0] + b[:, t]
            rows.append(h)
        return torch.stack(rows, 1)

    assert_same(matrix_recurrence, loop, A, b, init)
    whole, last = matrix_recurrence(A[0, 0, 0], b, return_final=True)
    assert torch.equal(whole[:, -1], last)
    dense = torch.block_diag(*A[0, 0]).expand(2, 6, 6, 6)
    torch.testing.assert_close(
        matrix_recurrence(dense, b.flatten(-2)), matrix_recurrence(A[0, 0], b).flatten(-2)
    )
    with pytest.raises(ScanValueError, match="A has shape"):
        matrix_recurrence(A[0, 0, 0, :1, :1].expand(3, 3), b)


def fill_loop(x: Tensor, valid: Tensor) -> Tensor:
    rows = []
    for t in range(len(x)):
        seen = [s for s in range(t + 1) if bool(valid[s])]
        rows.append(x[seen[-1]] if seen else x[t])
    return torch.stack(rows)


def test_forward_fill_of_large_integers() -> None:
    x = torch.tensor([1, 2**64 - 1, 3], dtype=torch.uint64)
    with pytest.warns(FallbackWarning):
        y = forward_fill(x, torch.tensor([False, True, False]))
    assert y.tolist() == [1, 2**64 - 1, 2**64 - 1]


def test_forward_fill() -> None:
    x = torch.tensor([NAN, 1.0, NAN, NAN, 2.0, NAN], dtype=F64)
    valid = ~x.isnan()
    torch.testing.assert_close(forward_fill(x), fill_loop(x, valid), equal_nan=True)
    torch.testing.assert_close(
        forward_fill(x, reverse=True), fill_loop(x.flip(0), valid.flip(0)).flip(0), equal_nan=True
    )
    assert_same(lambda x: forward_fill(x, valid), lambda x: fill_loop(x, valid), rand(6))
    names = torch.tensor([[7, 8, 9], [4, 5, 6]])
    filled = forward_fill(names, torch.tensor([[False, True, False]]))
    assert filled.tolist() == [[7, 8, 8], [4, 5, 5]]
    with pytest.raises(ScanTypeError, match=r"torch\.bool"):
        forward_fill(names, names)
    with pytest.raises(ScanValueError, match="valid has shape"):
        forward_fill(names, torch.ones(2).bool())


def test_runs() -> None:
    x = torch.tensor([3, 3, 1, 1, 1, 3, 2, 2])
    groups = [(value, len(list(group))) for value, group in itertools.groupby(x.tolist())]
    values, lengths = run_length_encode(x)
    assert list(zip(values.tolist(), lengths.tolist(), strict=True)) == groups
    within = [k + 1 for _, length in groups for k in range(length)]
    assert run_lengths(x).tolist() == within
    assert run_lengths(x[:, None], axis=0)[:, 0].tolist() == within
    assert run_lengths(x[:0]).tolist() == [] and run_length_encode(x[:0])[1].tolist() == []
    with pytest.raises(ScanValueError, match="one dimension"):
        run_length_encode(x[None])


def test_compaction() -> None:
    x, keep = rand(3, 7), torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    packed, count = compact(x, keep)
    for row in range(3):
        kept = x[row][keep[row]]
        assert count[row] == len(kept)
        torch.testing.assert_close(packed[row], torch.cat([kept, x.new_zeros(7 - len(kept))]))
    lengthwise, _ = compact(x.T, keep.T, axis=0)
    assert torch.equal(lengthwise, packed.T)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(compact(x, keep)[0].sum(), x)
    assert torch.equal(gradient, keep.to(F64))
    with pytest.raises(ScanTypeError, match="keep has dtype"):
        compact(x, x)
