"""Products of floats, beside a loop of the same dtype.

After a 0 all products are 0, whatever a product of the factors behind it is by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from table import Engine
from torch import Tensor

from assocscan import associative_scan, cumprod, linear_recurrence, monoid, ops, reduce


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def loop(x: Tensor, init: float | None = None) -> Tensor:
    """The products of the last dimension one after the other, each rounded; exclusive of init."""
    steps = x.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype).numpy()
    if init is not None:
        first = np.full((*steps.shape[:-1], 1), init, steps.dtype)
        steps = np.concatenate([first, steps], -1)
    with np.errstate(all="ignore"):
        products = np.multiply.accumulate(steps, axis=-1, dtype=steps.dtype)
    return torch.from_numpy(products[..., 0 if init is None else 1 :].copy()).to(x.dtype)


def assert_same(got: Tensor, want: Tensor) -> None:
    """The same zeros (with their signs), infinities and NaN; other numbers up to roundings."""
    near = 0.02 if want.dtype == torch.bfloat16 else 1e-3
    least = torch.finfo(want.dtype).smallest_normal
    torch.testing.assert_close(got, want, rtol=near, atol=least * near, equal_nan=True)
    numbers = ~want.isnan()
    assert torch.equal(got[numbers].signbit(), want[numbers].signbit())


LONG = 200
RUNS: dict[str, list[float]] = {
    "0, then an overflow": [3.0, 0.0, *[2.0] * LONG],
    "-0, then an overflow of either sign": [-3.0, -0.0, *[-2.0] * LONG],
    "0, an overflow, infinity": [3.0, 0.0, *[2.0] * LONG, inf, *[2.0] * LONG],
    "0, an overflow, NaN": [0.0, *[2.0] * LONG, nan, 1.0],
    "0, an underflow, infinity": [0.0, *[0.5] * LONG, inf, 1.0],
    "infinity, then an underflow": [-3.0, inf, *[0.5] * LONG],
    "infinity, an underflow, 0": [inf, *[0.5] * LONG, 0.0, *[2.0] * LONG],
    "an underflow, then an overflow": [*[1e-30] * 20, *[1e30] * 20],
    "an overflow, then an underflow": [*[-1e30] * 20, *[1e-30] * 20],
    "nothing special": [1.5, -0.5, 1.25, 0.75] * 40,
}
# Where an aggregate of the last of the factors and what follows them stays in the range, as that of
# 2, 2, 0, the products of a tree may stay in it too.
IN_ORDER = {
    "an overflow, then 0": [*[2.0] * LONG, 0.0, *[2.0] * LONG],
    "an underflow, then infinity": [*[0.5] * LONG, inf, 1.0],
    "there and back": [1e30, 1e20, 1e-20, 1e-30] * 40,
}


ANYWHERE = ("0, an underflow, infinity", "infinity, then an underflow", "nothing special")


def skip_kernels_of_gpus(engine: Engine) -> None:
    if engine.name not in ("cpu", "eager"):
        pytest.skip("kernels of GPUs form plain products (docs/how/numbers.md)")


@pytest.mark.parametrize("run", [*RUNS, *IN_ORDER])
def test_runs(engine: Engine, run: str) -> None:
    if run in IN_ORDER and engine.name == "eager":
        pytest.skip("the CPU engine alone finds out")
    if run not in ANYWHERE:
        skip_kernels_of_gpus(engine)
    x = torch.tensor((RUNS | IN_ORDER)[run])
    for _ in range(2):
        assert_same(engine.scan_from_cpu(ops.prod, x), loop(x))
    assert_same(engine.scan_from_cpu(ops.prod, x.flip(0), reverse=True).flip(0), loop(x))
    if engine.interpreted:
        return
    for init in (0.0, inf, 2.0):
        y, last = engine.scan_from_cpu(ops.prod, x, init=torch.tensor(init), return_final=True)
        assert_same(y, loop(x, init))
        assert_same(last, loop(x, init)[-1])
    assert_same(reduce(ops.prod, engine.put(x), backend=engine.name).cpu(), loop(x)[-1])
    wide = torch.stack([x, x.flip(0)], 1)
    assert_same(engine.scan_from_cpu(ops.prod, wide).T, loop(wide.T))


@monoid(identity=1.0, name="test_product_of_two")
def own_product(left: Tensor, right: Tensor) -> Tensor:
    return left * right


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_and_operators(engine: Engine, dtype: torch.dtype) -> None:
    skip_kernels_of_gpus(engine)
    count = 1100 if dtype == torch.float64 and not engine.interpreted else 200
    x = torch.tensor([3.0, 0.0, *[4.0] * count], dtype=dtype)
    for op in (ops.prod, own_product, lambda left, right: left * right):
        assert_same(engine.scan_from_cpu(op, x), loop(x))


def test_packed_sequences(engine: Engine) -> None:
    """Each sequence has its own zeros."""
    skip_kernels_of_gpus(engine)
    x = torch.tensor([0.0, *[2.0] * 149, 3.0, *[1.0] * 149])
    offsets = torch.tensor([0, 150, 150, 300], device=engine.device)
    got = engine.scan_from_cpu(ops.prod, x, offsets=offsets)
    assert got.tolist() == [0.0] * 150 + [3.0] * 150


def test_a_long_row(threads: int) -> None:
    """In chunks of threads, and in segments."""
    x = torch.full((1 << 20,), 2.0)
    x[0] = 0.0
    for _ in range(2):
        assert not cumprod(x).any()
        assert float(reduce(ops.prod, x)) == 0.0
    x[0] = 1.0
    assert_same(cumprod(x), loop(x))
    x[1 << 19] = 0.0
    assert_same(cumprod(x), loop(x))
    x = torch.exp(0.01 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)))
    assert_same(cumprod(x), loop(x))


SPECIAL = (0.0, -0.0, inf, -inf, nan, 1e30, 1e-30, 1e20, 1e-20, 2.0, 0.5, -3.0, 1e38, 1e-45)


def wild(length: int, generator: np.random.Generator) -> Any:
    """Factors of any size, with runs of special ones."""
    x = np.exp(generator.normal(size=length) * generator.choice([0.01, 1, 10]))
    for _ in range(generator.integers(0, 6)):
        start = generator.integers(0, length)
        x[start : start + generator.choice([1, 2, 5, 40, length])] = generator.choice(SPECIAL)
    return x


@pytest.mark.thinned(5)
@pytest.mark.parametrize("seed", range(24))
def test_any_products_on_the_cpu(threads: int, seed: int) -> None:
    """There they are those of a loop, whatever leaves the range of the dtype, and comes back."""
    generator = np.random.default_rng(seed)
    rows, length = ((1, 300), (1, 40000), (3, 3000), (20, 700))[seed % 4]
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 3]
    x = torch.from_numpy(np.stack([wild(length, generator) for _ in range(rows)])).to(dtype)
    init = float(generator.choice(SPECIAL))
    for flip, lanes in ((False, False), (True, False), (False, True)):
        given = x.flip(1) if flip else x
        given, axis = (given.T.contiguous(), 0) if lanes else (given, 1)
        y, last = associative_scan(
            ops.prod, given, axis, flip, init=torch.tensor(init), return_final=True, backend="cpu"
        )
        y = y.T if lanes else y.flip(1) if flip else y
        assert_same(y, loop(x, init))
        if dtype != torch.bfloat16:
            assert_same(last, loop(x, init)[:, -1])


def products_in_order(x: Tensor) -> Tensor:
    """By operations that autograd differentiates."""
    found = [x[0]]
    for factor in x[1:]:
        found.append(found[-1] * factor)
    return torch.stack(found)


COTANGENT = torch.tensor([1.0, 0.5] * 4)


def test_gradients_are_those_of_a_loop(engine: Engine) -> None:
    x = torch.tensor([3.0, 0.0, -2.0, 0.5, 0.0, 4.0, 1.0, 3.0])
    found = []
    for scan in (lambda x: engine.scan_from_cpu(ops.prod, x), products_in_order):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(scan(leaf), leaf, COTANGENT, create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first, leaf, COTANGENT)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_the_slope_of_0_is_infinite_where_the_product_of_the_others_is(backend: str) -> None:
    found = []
    for scan in (lambda x: cumprod(x, backend=backend), products_in_order):
        leaf = torch.tensor([3.0, 0.0, *[1e20] * 6], requires_grad=True)
        found.append(torch.autograd.grad(scan(leaf), leaf, COTANGENT)[0])
    got, want = found
    assert got[1] == want[1] == inf
    if backend == "cpu":
        torch.testing.assert_close(got, want, equal_nan=True)


def test_maps_that_overflow_where_a_loop_stays_finite(threads: int) -> None:
    """Of any operator, on the CPU: a NaN that a loop would not give."""
    b = torch.zeros(1 << 18)
    assert not linear_recurrence(2.0, b, axis=0).any()
    assert not linear_recurrence(2.0, b.view(-1, 1).expand(-1, 3), axis=0).any()
    a = torch.full_like(b, 2.0, requires_grad=True)
    h = linear_recurrence(a, b, axis=0)
    assert not torch.autograd.grad(h, a, torch.zeros_like(h))[0].any()
    b[7] = nan
    h = linear_recurrence(2.0, b, axis=0)
    assert not h[:7].any() and h[7:].isnan().all()


def test_recurrences_that_overflow_for_a_while(threads: int) -> None:
    """The product of consecutive a is infinite where no h is, and no NaN tells so."""
    a = torch.tensor([66.0, 66.0, -66.0, -66.0]).exp2().repeat(10_000)
    b = torch.zeros_like(a)
    b[0] = 2.0**-33
    states, h = [], np.float32(0)
    for gate, value in zip(a.numpy(), b.numpy(), strict=True):
        h = gate * h + value
        states.append(h)
    want = torch.tensor(states)
    assert want.isfinite().all()
    for width in (1, 3):
        rows = [t.expand(width, -1).contiguous() for t in (a, b)]
        got = linear_recurrence(*rows, axis=1, backend="cpu")
        assert torch.equal(got, want.expand_as(got))
        columns = [t.mT.contiguous() for t in rows]
        assert torch.equal(linear_recurrence(*columns, axis=0, backend="cpu"), got.mT)
        last = linear_recurrence(*rows, axis=1, backend="cpu", return_final="only")
        assert torch.equal(last, got[:, -1])


def test_carries_that_become_infinite_in_earnest(threads: int) -> None:
    a = torch.full((3000,), 1.5)
    got = linear_recurrence(a, torch.ones_like(a), axis=0, backend="cpu")
    assert got[:200].isfinite().all()
    assert (got[400:] == inf).all()
