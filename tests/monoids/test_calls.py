"""Direct calls of monoids: elements without batch dimensions, numbers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import (
    AssocScanError,
    Monoid,
    TraceError,
    associative_scan,
    monoids,
    ops,
    product,
    segmented,
)

x = torch.ones(3)


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def test_elements_without_batch_dimensions() -> None:
    assert torch.equal(ops.sum(scalar(1.0), scalar(2.0)), scalar(3.0))
    a, b = ops.affine((scalar(2.0), scalar(3.0)), (scalar(5.0), scalar(7.0)))
    assert a.shape == b.shape == () and (a.item(), b.item()) == (10.0, 22.0)
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert torch.equal(ops.matmul(left, right), right @ left)
    A, h = ops.matrix_affine((left, left[0]), (right, right[0]))
    assert torch.equal(A, right @ left) and torch.equal(h, right @ left[0] + right[0])


def test_lifted_states_without_batch_dimensions() -> None:
    """The ranks of a state that a lift makes: of an operator that was never scanned."""
    values, valid = scalar(5.0), torch.tensor(True)
    kept, _ = ops.last_valid((values, valid), (scalar(7.0), ~valid))
    assert kept.shape == () and kept.item() == 5.0
    batch = torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 3, 2)
    for state, shape in ((batch, (4, 3)), (tuple(t[0, 0] for t in batch), ())):
        m, s, u = ops.online_attention(state, state)
        assert m.shape == s.shape == shape and u.shape == (*shape, 2)
        assert torch.equal(u, torch.full((*shape, 2), 2.0))


def test_numbers_give_numbers() -> None:
    got = ops.affine((0.1, 0.2), (0.3, 0.4))
    assert got == (0.3 * 0.1, 0.3 * 0.2 + 0.4)  # in the precision of Python
    assert all(type(v) is float for v in got)
    assert type(ops.sum(1, 2)) is int and ops.sum(1 << 40, 1) == (1 << 40) + 1
    assert ops.any(False, True) is True
    assert ops.prod(1j, 2j) == -2
    assert ops.mean((1.5, 1), (2.5, 3)) == (4.0, 4)
    assert segmented(ops.sum)((1.0, False), (2.0, True)) == (2.0, True)
    assert product(ops.sum, ops.mean)((1.0, (2.0, 1)), (2.0, (3.0, 1))) == (3.0, (5.0, 2))


def test_numbers_beside_tensors_take_their_dtype() -> None:
    b = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    A, h = ops.affine((1.0, 0.5), (b, b))
    assert A.dtype == h.dtype == torch.bfloat16 and h.tolist() == [1.5, 3.0]
    assert ops.sum(torch.tensor([1, 2]), 3).tolist() == [4, 5]
    assert ops.sum(0.5, torch.tensor(1)).item() == 1.5


def test_every_scalar_monoid_takes_its_identity_as_an_element() -> None:
    """e ∘ e = e, in numbers and in 0-dimensional tensors."""
    taken = 0
    for name, op in monoids().items():
        if not op.combine.__module__.startswith("assocscan.ops"):
            continue
        if op.identity is None or callable(op.identity):
            continue
        e = op.identity
        flat = e if isinstance(e, tuple) else (e,)
        tensors = tuple(torch.tensor(v) for v in flat)
        got = op(e, e)
        same = op(tensors if isinstance(e, tuple) else tensors[0], e)
        same = same if isinstance(same, tuple) else (same,)
        for number, tensor, t in zip(flat, same, tensors, strict=True):
            assert isinstance(tensor, Tensor) and tensor.dtype == t.dtype, name
            assert tensor.shape == () and tensor.item() == number, name
        assert got == e, name
        taken += 1
    assert taken >= 20


def test_calls_inside_transforms() -> None:
    assert torch.vmap(ops.sum)(x, x).tolist() == [2.0, 2.0, 2.0]
    slope = torch.func.grad(lambda a: ops.affine((a, a), (a, a))[1])(scalar(2.0))
    assert slope.item() == 5.0  # of a² + a


def test_one_call_is_one_step_of_a_scan() -> None:
    elements = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    step = ops.matmul(elements[0], elements[1])
    assert torch.equal(step, associative_scan(ops.matmul, elements, backend="eager")[1])


def branching(left: Tensor, right: Tensor) -> Tensor:
    return left if left > right else right


def pairing(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left, right


REFUSED: list[tuple[Any, Any, Any, type[Exception], list[str]]] = [
    (ops.sum, torch.ones(3), torch.ones(4), ValueError, ["left: [3]", "right: [4]"]),
    (ops.affine, (x, x), (x, torch.ones(4)), ValueError, ["left[1]: [3]", "right[1]: [4]"]),
    (ops.sum, "a", "b", TypeError, ["left is a str", "a tensor or a number"]),
    (ops.sum, x, None, TypeError, ["right is None"]),
    (ops.affine, (x, None), (x, x), TypeError, ["left[1] is None"]),
    (ops.sum, x, x.to_sparse(), TypeError, ["right has the layout", "to_dense"]),
    (ops.sum, x, torch.ones(3, device="meta"), ValueError, ["left is on cpu", "right is on meta"]),
    (ops.matmul, scalar(1.0), scalar(1.0), ValueError, ["left has shape []", "2 dimensions"]),
    (ops.matmul, torch.eye(2), 1.0, ValueError, ["right has shape []", "2 dimensions"]),
    (ops.matmul, torch.ones(2, 3), torch.ones(4, 2), ValueError, ["left", "[2, 3]", "[4, 2]"]),
    (ops.matrix_affine, torch.eye(2), torch.eye(2), TypeError, ["left is a tensor", "(a, b)"]),
    (ops.sum, (x, x), (x, x), TypeError, ["left is a tuple of 2", "one tensor"]),
    (ops.sum, [x], [x], TypeError, ["left is a list of 1", "one tensor", "left[0]"]),
    (ops.affine, x, x, TypeError, ["left is a tensor", "a tuple of 2 tensors", "(left0, left1)"]),
    (ops.affine, (x, x), [x, x], TypeError, ["right is a list of 2", "pass tuple(right)"]),
    (ops.affine, (x, x), (x, x, x), TypeError, ["right is a tuple of 3", "a tuple of 2"]),
    (ops.affine, {"a": x, "b": x}, {"a": x, "b": x}, TypeError, ["left is a dict", "a tuple of 2"]),
    (ops.sum, x.to(torch.int8), 300, ValueError, ["right is 300", "int8"]),
    (Monoid(branching), scalar(1.0), scalar(2.0), TraceError, ["test_calls.py", "torch.where"]),
    (Monoid(pairing), x, x, TypeError, ["result of operator 'pairing'", "tuple"]),
    (ops.matmul, torch.eye(2), torch.eye(2).int(), TraceError, ["left: float32[2, 2]", "matmul"]),
]


@pytest.mark.parametrize("op,left,right,kind,mentions", REFUSED, ids=lambda v: str(v)[:20])
def test_refused(
    op: Monoid, left: Any, right: Any, kind: type[Exception], mentions: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        op(left, right)
    assert isinstance(caught.value, AssocScanError)
    for word in mentions:
        assert word in str(caught.value)
