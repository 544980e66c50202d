"""Products of cotangents that are taken in another order, so that one is computed less."""

from __future__ import annotations

import pytest

from assocscan.autodiff.vector_adjoint import with_shared_products
from assocscan.program.program_builder import Builder, Program

KINDS = ("f32", "f32", "f32")


def program(kind: str = "f32", uses_inner: bool = False) -> Program:
    """(e, h, m) → e·(h·m), e·m, and h·m if asked."""
    builder = Builder((kind,) * 3)
    e, h, m = range(3)
    inner = builder.emit("mul", h, m)
    results = [builder.emit("mul", e, inner), builder.emit("mul", e, m)]
    return builder.build([*results, inner] if uses_inner else results)


def products(found: Program) -> list[set[int]]:
    return [set(i.args) for i in found.instructions if i.op == "mul"]


def test_a_product_that_is_computed_anyway_is_used() -> None:
    found = with_shared_products(program(), Builder(KINDS), 2)
    shared = len(KINDS)  # e·m, the first instruction
    assert products(found) == [{0, 2}, {shared, 1}]
    assert found.outputs == (shared + 1, shared)


@pytest.mark.parametrize(
    ("given", "first"),
    [(program(), 3), (program(uses_inner=True), 2), (program("i32"), 2)],
    ids=["no cotangent", "the inner product is used", "integers"],
)
def test_other_products_stay(given: Program, first: int) -> None:
    assert with_shared_products(given, Builder(given.inputs), first) == given
