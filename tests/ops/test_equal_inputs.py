"""Derivatives of smooth operators where inputs are equal: scores of an attention that begins at 0,
probabilities that are all the same. A maximum inside must not show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import associative_scan, hmm_filter, ops

F64 = torch.float64
EQUAL = {
    "all": torch.zeros(5, dtype=F64),
    "some": torch.tensor([0.0, 1, 1, 0, 1], dtype=F64),
}
VALUES = torch.randn(5, 2, dtype=F64, generator=torch.Generator().manual_seed(0))


def log_sum_exp(x: Tensor, backend: str) -> Tensor:
    m, s = associative_scan(ops.online_softmax, x, backend=backend)
    return m + s.log()  # type: ignore[no-any-return]


def of(op: Any) -> Callable[..., Any]:
    return lambda *xs_and_backend: associative_scan(
        op, xs_and_backend[:-1] if len(xs_and_backend) > 2 else xs_and_backend[0],
        backend=xs_and_backend[-1],
    )  # fmt: skip


def matrices(x: Tensor) -> Tensor:
    return x[:, None, None].expand(-1, 2, 2).contiguous()


CALLS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Sequence[Tensor]]]] = {
    "online_attention": (of(ops.online_attention), lambda x: (x, VALUES)),
    "online_softmax": (log_sum_exp, lambda x: (x,)),
    "logaddexp": (of(ops.logaddexp), lambda x: (x,)),
    "log_affine": (of(ops.log_affine), lambda x: (x, x.clone())),
    "log_matmul": (of(ops.log_matmul), lambda x: (matrices(x),)),
    "signed_log_sum": (
        lambda x, backend: associative_scan(
            ops.signed_log_sum, (x, torch.ones_like(x)), backend=backend
        )[0],
        lambda x: (x,),
    ),
    "hmm_filter": (
        lambda e, p, backend: hmm_filter(p[0], p, e, backend=backend)[:2],
        lambda x: (x[:, None].expand(-1, 2).contiguous(), matrices(x)[0]),
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("equal", EQUAL)
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_of_equal_inputs(name: str, equal: str, backend: str) -> None:
    call, inputs = CALLS[name]
    given = [t.clone().requires_grad_() for t in inputs(EQUAL[equal])]
    for _ in range(2):
        assert torch.autograd.gradcheck(lambda *xs: call(*xs, backend), given)
    if backend == "eager":
        assert torch.autograd.gradgradcheck(lambda *xs: call(*xs, backend), given)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_nan_stays(backend: str) -> None:
    x = torch.tensor([1.0, -torch.inf, torch.nan, 3])
    for _ in range(2):
        for result in associative_scan(ops.online_softmax, x, backend=backend):
            assert result[2:].isnan().all() and result[:2].isfinite().all()
