"""exp, log and their like in generated C++ (`elementary.h`), against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, monoid
from assocscan.runtime import backends as engines

pytestmark = [
    pytest.mark.release_flags,
    pytest.mark.skipif(engines.availability()["cpu"] is not None, reason="no C++ compiler"),
]

# Units in the last place, over all floats.
FUNCTIONS = {
    "exp": (torch.exp, 1.01), "expm1": (torch.expm1, 1.7), "log": (torch.log, 0.9),
    "log1p": (torch.log1p, 0.9), "tanh": (torch.tanh, 2.6),
}  # fmt: skip


def applied(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By the CPU engine: the scan of one step shows what its lift makes of it."""
    op = monoid(lambda a, b: a + b, identity=0.0, lift=function, name="elementary")
    y = associative_scan(op, x[None], 0, backend="cpu")
    assert isinstance(y, Tensor)
    return y[0]


def all_floats(step: int) -> Tensor:
    """Every step-th of all bit patterns."""
    return torch.arange(-(2**31), 2**31, step).to(torch.int32).view(torch.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_over_all_floats(name: str) -> None:
    function, most = FUNCTIONS[name]
    x = all_floats(9973)
    got, want = applied(function, x), function(x.double())
    rounded = want.float()
    regular = rounded.isfinite() & (rounded != 0)
    torch.testing.assert_close(got[~regular], rounded[~regular], rtol=0, atol=0, equal_nan=True)
    exponent = torch.frexp(rounded[regular])[1].clamp(min=-125)
    ulp = torch.ldexp(torch.ones_like(want[regular]), exponent - 24)
    error = (got[regular].double() - want[regular]).abs() / ulp
    assert float(error.max()) < most, x[regular][error.argmax()]


@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    """Also the sign of zeros; at each place of a vector and after the last whole one."""
    function, _ = FUNCTIONS[name]
    tiny, inf = torch.finfo(torch.float32).smallest_normal, math.inf
    special = torch.tensor([0.0, -0.0, inf, -inf, math.nan, 1.0, -1.0, tiny, -tiny, tiny / 8,
                            -tiny / 8, 88.8, -104.5, 3e38, -3e38])  # fmt: skip
    x = torch.stack([special.roll(k) for k in range(len(special))]).flatten()
    got, want = applied(function, x), function(x.double()).float()
    zero = want == 0
    assert torch.equal(got[zero].signbit(), want[zero].signbit())
    torch.testing.assert_close(got, want, rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_does_not_depend_on_its_place(name: str) -> None:
    function, _ = FUNCTIONS[name]
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 8
    whole = applied(function, x)
    for begin, end in ((0, 7), (1, 1000), (3, 40), (990, 1000)):
        assert torch.equal(applied(function, x[begin:end].clone()), whole[begin:end])


def test_float64_is_the_librarys() -> None:
    x = torch.linspace(-0.9, 3, 101, dtype=torch.float64)
    for function, _ in FUNCTIONS.values():
        given = x.abs() if function is torch.log else x
        torch.testing.assert_close(applied(function, given), function(given), rtol=1e-15, atol=0)
