"""Functions that cast to the dtype of an argument: compiled calls give what others do.

Dynamo reads such a cast as a constant, for the dtypes on which it called the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, nonlinear_recurrence, reduce

STEPS = 300
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


X, Y = torch.randn(2, STEPS, 2, generator=torch.Generator().manual_seed(0))
W = torch.tensor(0.5, dtype=F64)


def gated(h: Tensor, x: Any) -> Tensor:
    m, v = x
    return torch.where(m, torch.tanh(0.9 * h + v.to(h.dtype)), 0.5 * h)


def cast(h: Tensor, x: Tensor) -> Tensor:
    return (0.9 * h + x).to(h.dtype)


def cast_to_x(h: Tensor, x: Tensor) -> Tensor:
    return (0.9 * h.float() + x.float()).to(x.dtype)


def weighed(h: Tensor, x: Any, w: Tensor) -> Tensor:
    k, v = x
    return torch.tanh(w * h + v).to(w.dtype) + 0.001 * k


MASK, COUNTS = torch.arange(2 * STEPS).view(STEPS, 2) % 3 != 0, torch.arange(STEPS)[:, None]
CALLS: dict[str, Callable[[], Any]] = {
    "a mask first": lambda: nonlinear_recurrence(gated, (MASK, X), 0.0, axis=0),
    "a mask beside bfloat16": lambda: nonlinear_recurrence(
        gated, (MASK, X.to(BF16)), 0.0, axis=0, return_final=True
    ),
    "counts and params": lambda: nonlinear_recurrence(
        weighed, (COUNTS, X), 0.0, axis=0, params=W
    ),
    "lower": lambda: nonlinear_recurrence(
        cast, X.half(), 0.0, axis=0, lower=lambda h, x: (h * x.to(h.dtype), h.to(x.dtype))
    ),
    "states of numbers": lambda: nonlinear_recurrence(
        lambda h, x: (cast(h[0], x), h[1] + 1), X.to(BF16), (0.0, 0), axis=0
    ),
    "a state that widens": lambda: nonlinear_recurrence(cast_to_x, X, 0, axis=0),
    "a complex number": lambda: nonlinear_recurrence(cast, X.double(), 1j, axis=0),
    "an operator of bfloat16": lambda: associative_scan(
        lambda a, b: (a + b).to(a.dtype), X.to(BF16), axis=0
    ),
    "an operator of two dtypes": lambda: associative_scan(
        lambda a, b: (
            (a[0] * b[0]).to(a[0].dtype), (a[1] * b[0].to(a[1].dtype) + b[1]).to(b[1].dtype)
        ),
        (X.sigmoid().half(), Y), axis=0,
    ),
    "a reduction": lambda: reduce(lambda a, b: (a + b).to(b.dtype), X.half(), axis=0),
}  # fmt: skip
for _kind in (BF16, F32):
    for _step in (cast, cast_to_x):
        for _init in (0.0, torch.zeros((), dtype=_kind), torch.zeros(())):
            _name = f"{_step.__name__}, {_kind}, {getattr(_init, 'dtype', float)}"
            CALLS[_name] = lambda s=_step, d=_kind, h=_init: (  # type: ignore[misc]
                nonlinear_recurrence(s, X.to(d), h, axis=0)
            )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow(3)
def test_dtypes(name: str) -> None:
    call = CALLS[name]
    wanted = call()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(), wanted, rtol=0, atol=0)
