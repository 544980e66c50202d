"""Leaves of different float dtypes in one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Engine, sampled
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import Monoid, associative_scan, ops, reduce
from assocscan.testing import assert_scan_close, reference_scan

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PAIRS = [(BF16, F32), (F32, BF16), (F16, BF16), (F64, F32), (F32, F64), (F64, BF16), (F16, F64)]
SAMPLE = sampled(PAIRS, [(F32, BF16), (F64, F32)])
LENGTH = 9


def affine(left: Any, right: Any) -> Any:
    return right[0] * left[0], right[0] * left[1] + right[1]


def sums(left: Any, right: Any) -> Any:
    return tuple(x + y for x, y in zip(left, right, strict=True))


# Operators of (a, b), and the dtype of each output for given dtypes of a and b.
OPERATORS: dict[str, tuple[Any, Callable[[torch.dtype, torch.dtype], list[torch.dtype]]]] = {
    "affine": (ops.affine, lambda a, b: [a, b]),
    "raw": (affine, lambda a, b: [a, b]),
    "lifted": (
        Monoid(affine, identity=(1.0, 0.0), name="mixed_lifted", lift=lambda a, b: (a, a * b)),
        lambda a, b: [a, torch.promote_types(a, b)],
    ),
    "lowered": (
        Monoid(affine, identity=(1.0, 0.0), name="mixed_lowered",
               lower=lambda s, xs: (s[1], s[1] * xs[0])),
        lambda a, b: [b, torch.promote_types(a, b)],
    ),
    "counted": (  # three leaves of a state from inputs of two
        Monoid(sums, identity=(0, 0, 0),
               name="mixed_counted", lift=lambda a, b: (a, b, 1),
               lower=lambda s: (s[0] + s[1]) / s[2]),
        lambda a, b: [torch.promote_types(a, b)],
    ),
    "vectors": (
        Monoid(affine, identity=(1.0, 0.0), name="mixed_vectors", element_ndim=1),
        lambda a, b: [a, b],
    ),
}  # fmt: skip


def inputs(name: str, a: torch.dtype, b: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, LENGTH, 9) if name == "vectors" else (2, LENGTH)
    x, y = (torch.rand(shape, generator=generator, dtype=F64) + 0.5 for _ in range(2))
    return x.to(a), y.to(b)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("dtypes", SAMPLE, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_scan(engine: Engine, name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    op, expected = OPERATORS[name]
    xs = inputs(name, *dtypes)
    init = None
    if name not in ("raw", "counted"):
        init = tuple(torch.full((2, *x.shape[2:]), 0.75, dtype=BF16) for x in xs)
    for reverse in (False, True):
        got, final = engine.scan_from_cpu(op, xs, 1, reverse=reverse, init=init, return_final=True)
        want, last = reference_scan(op, xs, 1, reverse, init=init, return_final=True)
        assert [t.dtype for t in tree_leaves(got)] == expected(*dtypes)
        assert_scan_close(got, want, LENGTH)
        assert_scan_close(final, last, LENGTH)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtypes", SAMPLE, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    op, _ = OPERATORS[name]
    narrow = [x.requires_grad_() for x in inputs(name, *dtypes)]
    wide = [x.detach().to(F64).requires_grad_() for x in narrow]
    grads = []
    for leaves, scan in ((narrow, associative_scan), (wide, reference_scan)):
        ys = tree_leaves(scan(op, tuple(leaves), 1))
        total = sum((y.to(F64) * (k + 1)).sum() for k, y in enumerate(ys))
        grads.append(torch.autograd.grad(total, leaves))
    for got, want, x in zip(*grads, narrow, strict=True):
        assert got.dtype == x.dtype
        coarsest = max(torch.finfo(d).eps for d in dtypes)
        torch.testing.assert_close(got.to(F64), want, rtol=4 * LENGTH * coarsest, atol=0.0)


def test_float64_is_kept_where_one_leaf_has_it(engine: Engine) -> None:
    """The carry of a float32 leaf beside a float64 one is float64."""
    a, b = torch.ones(50, dtype=F64), torch.full((50,), 0.1, dtype=F32)
    _, (_, total) = engine.scan_from_cpu(ops.affine, (a, b), return_final=True)
    assert total.dtype == F64
    assert total.item() == pytest.approx(50 * float(b[0]), rel=1e-14)
    assert reduce(ops.affine, (a, b))[1].dtype == F64


@pytest.mark.parametrize("a,b", [(F32, torch.int64), (torch.complex64, F32), (F64, torch.bool)])
def test_other_changes_of_a_dtype_are_refused(a: torch.dtype, b: torch.dtype) -> None:
    xs = (torch.ones(4, dtype=a), torch.ones(4, dtype=b))
    for op in (Monoid(affine, name="mixed_refused"), affine):
        for backend in ("auto", "eager"):
            with pytest.raises(TypeError, match=r"changes the dtype of element\[1\]"):
                associative_scan(op, xs, backend=backend)


def test_beyond_all_leaves_is_refused() -> None:
    def widening(left: Tensor, right: Tensor) -> Tensor:
        return (left.double() + right).to(F64)

    with pytest.raises(TypeError, match=r"from torch\.float32 to torch\.float64"):
        associative_scan(Monoid(widening, name="mixed_widening"), torch.ones(4))


@pytest.mark.slow
def test_under_compile() -> None:
    xs = inputs("affine", F32, BF16)
    compiled = torch.compile(lambda *xs: associative_scan(ops.affine, xs, 1), fullgraph=True)
    got, want = compiled(*xs), associative_scan(ops.affine, xs, 1)
    assert tree_map(lambda t: t.dtype, got) == tree_map(lambda t: t.dtype, want)
    torch.testing.assert_close(got, want)
