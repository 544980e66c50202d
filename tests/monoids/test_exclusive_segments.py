"""An exclusive scan of a segmented operator starts each segment with the identity, as one of packed
sequences does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import (
    Monoid,
    associative_scan,
    ops,
    product,
    reversed_order,
    segmented,
    stream,
    with_lift,
    with_lower,
)

LENGTH = 9
OFFSETS = torch.tensor([0, 3, 4, 9])
RESET = torch.tensor([t in (3, 4) for t in range(LENGTH)])


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) + 0.5


X = rand(LENGTH)
# Built of `segmented` by the function; the same of plain operators runs on packed sequences.
CASES: dict[str, tuple[Callable[[Callable[[Any], Monoid]], Monoid], Any]] = {
    "sum": (lambda seg: seg(ops.sum), X),
    "max of int8": (lambda seg: seg("max"), (X * 100).to(torch.int8)),
    "any": (lambda seg: seg(ops.any), X > 1),
    "affine": (lambda seg: seg(ops.affine), (X, rand(2, LENGTH)[1])),
    "welford": (lambda seg: seg(ops.welford), X),
    "matmul": (lambda seg: seg(ops.matmul), rand(LENGTH, 2, 2)),
    "finite_state": (lambda seg: seg(ops.finite_state), (rand(LENGTH, 3) * 2).long()),
    "bfloat16": (lambda seg: seg(ops.prod), X.bfloat16()),
    "product": (lambda seg: seg(product(ops.sum, ops.max)), X),
    "lowered": (lambda seg: with_lower(seg(ops.sum), torch.sin), X),
    "twice": (lambda seg: seg(with_lower(seg(ops.sum), torch.cos)), None),
}
INTERPRETED = ("sum", "max of int8", "affine")


@pytest.mark.thinned(12)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_packed_sequences(case: str, reverse: bool, engine: Engine) -> None:
    if engine.interpreted and case not in INTERPRETED:
        pytest.skip("the interpreter runs fewer operators")
    make, xs = CASES[case]
    op, plain = make(segmented), make(lambda op: op if isinstance(op, Monoid) else ops.max)
    # In reverse a segment starts at its last step.
    reset = RESET.roll(-1) if reverse else RESET
    given: Any = (xs, reset)
    if case == "twice":
        xs, given = X, ((X, torch.zeros(LENGTH, dtype=torch.bool)), reset)
    want = associative_scan(plain, xs, 0, reverse, False, offsets=OFFSETS, backend="eager")
    for _ in range(2):
        got = engine.scan_from_cpu(op, given, 0, reverse=reverse, inclusive=False)
        for one, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_gradients(engine: Engine) -> None:
    def gradients(scan: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(scan(x), x, rand(LENGTH), create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, x, rand(LENGTH))]

    options = {"reverse": False, "inclusive": False}
    got = gradients(lambda x: engine.scan_from_cpu(segmented(ops.prod), (x, RESET), **options))
    want = gradients(
        lambda x: associative_scan(ops.prod, x, offsets=OFFSETS, backend="eager", **options)
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_init_enters_the_first_segment_alone(engine: Engine) -> None:
    x = torch.tensor([1, 2, 3, 4])
    for first, want in ((False, [10, 11, 0, 3]), (True, [0, 1, 0, 3])):
        reset = torch.tensor([first, False, True, False])
        y, (total, cut) = engine.scan_from_cpu(
            segmented(ops.sum), (x, reset), inclusive=False,
            init=(torch.tensor(10), torch.tensor(False)), return_final=True,
        )  # fmt: skip
        assert y.tolist() == want
        assert int(total) == 7
        assert bool(cut)


def test_streams(engine: Engine) -> None:
    if engine.device != "cpu":
        pytest.skip("chunks of the CPU")
    chunks = [(X[:4], RESET[:4]), (X[4:], RESET[4:])]
    parts = list(stream(segmented(ops.sum), chunks, inclusive=False, backend=engine.name))
    whole = associative_scan(segmented(ops.sum), (X, RESET), inclusive=False)
    torch.testing.assert_close(torch.cat(parts), whole)


def test_an_identity_is_needed() -> None:
    xs = (X, torch.arange(LENGTH)), RESET
    with pytest.raises(ValueError, match=r"segmented\(argmax\).*'argmax' declares none"):
        associative_scan(segmented(ops.argmax), xs, inclusive=False, init=((0.0, 0), False))


def test_other_operators_are_left_alone() -> None:
    for op in (ops.sum, with_lift(ops.sum, torch.sin), reversed_order(segmented(ops.sum))):
        assert op.exclusive_form is op
    assert segmented(ops.sum).exclusive_form is segmented("sum").exclusive_form
