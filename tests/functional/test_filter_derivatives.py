"""Second derivatives of filters by torch.func, beside those of a loop over the steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from filter_designs import rand
from filter_transforms import CASES, TRANSFORMS, check, loop, of_order
from torch import Tensor
from torch.func import jvp, vmap

from assocscan import lfilter

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow(3)
def test_nested(case: str, transform: str) -> None:
    check(CASES[case], transform, 6)


@pytest.mark.parametrize("moving", ["b", "a", "x", "zi"])
@pytest.mark.parametrize("transform", ["jvp of jvp", "jacfwd of jacfwd", "hessian"])
def test_nested_in_one_argument(transform: str, moving: str) -> None:
    check(CASES["with a state"], transform, 6, moving)


@pytest.mark.parametrize("length", [1, 2, 3, 50])
@pytest.mark.parametrize("case", ["order 1", "order 3", "sections with states"])
def test_short_and_long_rows(case: str, length: int) -> None:
    for transform in ("jvp of jvp", "jvp of grad", "grad of jvp"):
        check(CASES[case], transform, length)


def test_packed() -> None:
    """The sequences one by one."""
    (b, a), x, offsets = of_order(2), rand(9, seed=2), torch.tensor([0, 4, 4, 9])
    v, w = rand(3, seed=4), rand(3, seed=5)

    def twice(function: Callable[[Tensor], Tensor]) -> Tensor:
        found: Tensor = jvp(lambda a: jvp(function, (a,), (v,))[1], (a,), (w,))[1]
        return found

    got = twice(lambda a: lfilter(b, a, x, offsets=offsets))
    want = twice(lambda a: torch.cat([loop(b, a, x[:4])[0], loop(b, a, x[4:])[0]]))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("places", [(0, None, None), (None, 1, None), (1, 0, 2), (None, None, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_mapped_over_any_argument(axis: int, places: tuple[int | None, ...]) -> None:
    """Coefficients of channels, the first dimension of x or the last one."""
    (b, a), x = of_order(2, 3), rand(*((8, 3) if axis == 0 else (3, 8)), seed=2)
    many = [
        t if place is None else torch.stack([t, t.cos() + 1.0], place)
        for t, place in zip((b, a, x), places, strict=True)
    ]
    got = vmap(lambda b, a, x: lfilter(b, a, x, axis=axis), places)(*many)
    for k in range(2):
        one = [
            t if p is None else t.select(p, k).contiguous()
            for t, p in zip(many, places, strict=True)
        ]
        torch.testing.assert_close(got[k], lfilter(*one, axis=axis))


def test_mapped_offsets_are_refused() -> None:
    (b, a), x, offsets = of_order(1), rand(9), torch.tensor([[0, 4, 9], [0, 5, 9]])
    with pytest.raises(NotImplementedError, match="over offsets"):
        vmap(lambda offsets: lfilter(b, a, x, offsets=offsets))(offsets)
