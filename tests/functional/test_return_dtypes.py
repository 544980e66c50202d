"""Returns and advantages of several float dtypes: they promote, and nothing is rounded before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor

from assocscan import cumsum, discounted_returns, gae, linear_recurrence, vtrace

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTH = 12


def rand(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=F64).to(dtype)


def returns_loop(rewards: Tensor, discount: Tensor, bootstrap: Tensor) -> Tensor:
    g, steps = bootstrap, []
    for t in reversed(range(LENGTH)):
        g = rewards[t] + discount[t] * g
        steps.append(g)
    return torch.stack(steps[::-1])


def advantages_loop(rewards: Tensor, values: Tensor, decay: Tensor, bootstrap: Tensor) -> Tensor:
    after, a, steps = bootstrap, torch.zeros_like(bootstrap), []
    for t in reversed(range(LENGTH)):
        a = rewards[t] + 0.5 * after - values[t] + 0.5 * decay[t] * a
        after = values[t]
        steps.append(a)
    return torch.stack(steps[::-1])


def check(
    scan: Callable[..., Tensor], loop: Callable[..., Tensor], tensors: list[Tensor],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Values and gradients, beside the loop in float64; twice, so that the call is repeated."""
    wide = [t.to(F64).requires_grad_() for t in tensors]
    want = loop(*wide)
    cotangent = rand(dtype, LENGTH, 2, seed=7)
    grads = torch.autograd.grad(want, wide, cotangent.to(F64))
    eps = torch.finfo(dtype).eps
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = scan(*leaves)
        assert y.dtype == dtype
        torch.testing.assert_close(y.to(F64), want, rtol=8 * eps, atol=8 * eps)
        for g, t, other in zip(
            torch.autograd.grad(y, leaves, cotangent), tensors, grads, strict=True
        ):
            assert g.dtype == t.dtype
            near = 16 * torch.finfo(t.dtype).eps
            torch.testing.assert_close(g.to(F64), other, rtol=near, atol=near)


PAIRS = [(BF16, F32, F32), (F32, BF16, F32), (F32, F64, F64), (F64, F32, F64), (BF16, F16, F32)]


@pytest.mark.thinned(11)
@pytest.mark.parametrize(("first", "second", "dtype"), PAIRS, ids=str)
def test_pairs(engine: Engine, first: torch.dtype, second: torch.dtype, dtype: torch.dtype) -> None:
    if engine.device != "cpu" or (engine.interpreted and first != BF16):
        pytest.skip("other dtypes are left to the other engines")
    rewards, other = rand(first, LENGTH, 2), rand(second, LENGTH, 2, seed=1)
    bootstrap, decay = rand(dtype, 2, seed=2), rand(dtype, LENGTH, 2, seed=3)
    check(
        lambda r, d, b: discounted_returns(r, d, None, b, 0, backend=engine.name),
        returns_loop, [rewards, other, bootstrap], dtype,
    )  # fmt: skip
    check(
        lambda r, v, d, b: gae(r, v, b, 0.5, d, axis=0, backend=engine.name),
        advantages_loop, [rewards, other, decay, bootstrap], dtype,
    )  # fmt: skip


@pytest.mark.slow
def test_every_argument_promotes() -> None:
    """The widest of them decides, whichever it is."""
    for dtypes in set(permutations([F32, F32, F32, F64])):
        rewards, values, decay = (rand(d, LENGTH, 2, seed=k) for k, d in enumerate(dtypes[:3]))
        bootstrap = rand(dtypes[3], 2, seed=5)
        check(
            lambda r, v, d, b: gae(r, v, b, 0.5, d, axis=0), advantages_loop,
            [rewards, values, decay, bootstrap], F64,
        )  # fmt: skip
    rewards, discount = rand(F32, LENGTH, 2), rand(F32, LENGTH, 2, seed=1)
    check(
        lambda r, d, b: discounted_returns(r, d, None, b, 0), returns_loop,
        [rewards, discount, rand(F64, 2, seed=2)], F64,
    )  # fmt: skip


def test_numbers_and_carries_do_not_widen() -> None:
    x, wide = rand(BF16, LENGTH, 2), torch.tensor(0.5, dtype=F64)
    start = torch.ones(2)
    assert discounted_returns(x, wide).dtype == BF16
    assert discounted_returns(x, 0.5, None, start, 0).dtype == BF16
    assert gae(x, x, start, 0.5, wide, axis=0).dtype == BF16
    assert gae(x, x, start.to(F64), 0.5, 0.5, axis=0).dtype == F64
    row = x[:, 0]
    assert discounted_returns(row, 0.5, None, wide).dtype == BF16
    assert gae(row, row, wide, 0.5, 0.5).dtype == BF16


def test_a_carry_is_not_rounded() -> None:
    """A float32 bootstrap of 16-bit rewards enters the sum as it is."""
    zero, start = torch.zeros(1, 1, dtype=BF16), torch.tensor([1 + 2.0**-10])
    one = torch.ones((), dtype=BF16)
    # 1 + 2⁻¹⁰ − (1 − 2⁻⁸) is a number of bfloat16; with the bootstrap rounded to 1 it is 2⁻⁸
    reward = zero - (1 - 2.0**-8)
    want = 2.0**-8 + 2.0**-10
    assert float(discounted_returns(reward, one, None, start, 0)) == want
    assert float(gae(reward, zero, start, one, one, axis=0)) == want


@pytest.mark.slow(5)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("wrapped", [float, torch.tensor, lambda x: torch.tensor(x, dtype=F64)])
def test_numbers_are_not_rounded_to_16_bits(
    engine: Engine, dtype: torch.dtype, wrapped: Callable[[float], Any]
) -> None:
    """In bfloat16 0.999 is 1, and what is left of a sum after some steps would be all of it."""
    if engine.device != "cpu":
        pytest.skip("tensors of CPUs")
    x, start = torch.zeros(2, 30, dtype=dtype), torch.ones(2, dtype=dtype)
    y, left, near = x.clone(), 0.999**30, {"rtol": 4e-3, "atol": 0.0}
    y[:, 0] = 1
    for h in (
        linear_recurrence(wrapped(0.999), x, start, backend=engine.name)[:, -1],
        linear_recurrence(wrapped(0.999), x, start, return_final="only", backend=engine.name),
        linear_recurrence(wrapped(0.999), y, backend=engine.name)[:, -1] * 0.999,
        discounted_returns(x, wrapped(0.999), bootstrap=start, backend=engine.name)[:, 0],
        gae(x, x, start, 1.0, wrapped(0.999), backend=engine.name)[:, 0] * 0.999,
        vtrace(x, x, x, start, wrapped(0.999), backend=engine.name).targets[:, 0],
    ):
        torch.testing.assert_close(h.double(), torch.full((2,), left, dtype=F64), **near)


def test_a_step_is_not_rounded_to_16_bits() -> None:
    """Discounts enter the differences of advantages as they are, and these are not rounded."""
    x, values = rand(BF16, 64), rand(BF16, 64, seed=1)
    start = rand(BF16, 1, seed=2)[0]
    wide = gae(x.double(), values.double(), start.double(), 0.99, 0.97)
    torch.testing.assert_close(
        gae(x, values, start, 0.99, 0.97).double(), wide, rtol=2**-8, atol=2**-12
    )


def test_the_gradient_of_a_number() -> None:
    """A discount in a tensor without dimensions: its gradient is a sum over all steps."""
    rewards, discount = rand(BF16, 64), torch.tensor(0.99, requires_grad=True)
    wide = torch.tensor(0.99, dtype=F64, requires_grad=True)
    discounted_returns(rewards, discount).sum().backward()
    discounted_returns(rewards.double(), wide).sum().backward()
    torch.testing.assert_close(discount.grad, wide.grad, rtol=1e-2, atol=0.0, check_dtype=False)
    a = torch.tensor(0.99, requires_grad=True)
    linear_recurrence(a, rewards, axis=0, reverse=True).sum().backward()
    torch.testing.assert_close(a.grad, wide.grad, rtol=1e-2, atol=0.0, check_dtype=False)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_complex_numbers_beside_16_bits(dtype: torch.dtype) -> None:
    """torch has hardly any operation for complex numbers of two 16-bit floats."""
    b = torch.ones(3, dtype=dtype)
    h = linear_recurrence(0.5j, b, axis=0)
    assert h.dtype == torch.complex64
    assert h.tolist() == [1, 1 + 0.5j, 0.75 + 0.5j]


@pytest.mark.parametrize(("own", "other"), [(F16, BF16), (BF16, F16)], ids=str)
def test_autocast_to_the_other_dtype_of_16_bits(own: torch.dtype, other: torch.dtype) -> None:
    """Changes nothing; torch.cat refuses such tensors there."""
    x = rand(own, 2, LENGTH)
    calls: dict[str, Callable[[], Any]] = {
        "gae": lambda: gae(x, x, x[:, 0], 0.9, 0.9),
        "vtrace": lambda: vtrace(x, x, x, x[:, 0], 0.9),
        "cumsum": lambda: cumsum(x, include_initial=True),
        "returns": lambda: discounted_returns(x, 0.9, None, x[:, 0]),
    }
    for name, call in calls.items():
        wanted = call()
        with torch.autocast("cpu", dtype=other):
            got = call()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=name)
