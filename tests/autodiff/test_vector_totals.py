"""Totals of segments of a backward pass over vectors: the map μ ↦ M·μ + l, built step by step,
against autograd through a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vector_cases import CASES, affine, as_tuple, case, expanded, leaves_of, loop, starts_of

from assocscan.api.bind_arguments import bind
from assocscan.autodiff.evaluate import evaluate
from assocscan.autodiff.vector_adjoint import total_step, vector_adjoint
from assocscan.program.dtypes import EXACT_DTYPES
from assocscan.program.vectors.vector_adjoint import VectorAdjoint

STEPS, STATES = 6, 3


def adjoint_of(
    given: Any, leaves: list[torch.Tensor], inclusive: bool, finals: bool
) -> VectorAdjoint:
    """The backward pass of a scan with cotangents of all outputs, and of all finals if asked."""
    call = bind(given.op, expanded(leaves), 1, False, inclusive, None, False, None)
    op = call.traced.vectors
    assert op is not None
    seeded = tuple(range(len(op.state))) if finals else ()
    wanted = tuple(range(len(leaves)))
    return vector_adjoint(
        op, not inclusive, False, seeded, wanted, tuple(range(len(op.outputs))), seeded, True,
        ((),) * len(leaves), 2,
    )  # fmt: skip


@pytest.mark.parametrize("finals", [False, True])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize(
    "name", ["selective", "gated", "two decays", "clamped input", "attention", "turning"]
)
def test_totals_are_the_derivative_of_a_segment(name: str, inclusive: bool, finals: bool) -> None:
    given = CASES[name]
    leaves = leaves_of(given, 2, STEPS, 2, STATES, torch.float64)
    adjoint = adjoint_of(given, leaves, inclusive, finals)
    program, carry, width = total_step(adjoint), adjoint.carry, adjoint.op.width
    assert program is not None
    size = len(carry)
    assert size == {(False, "turning"): 2, (True, "turning"): 6}.get(
        (finals, name), 2 if finals or name == "two decays" else 1
    )

    # Autograd: how the carry that enters a segment changes what leaves it.
    init = [x.requires_grad_() for x in starts_of(given, leaves)]
    ys, last = loop(given.op, expanded(leaves), False, inclusive, tuple(init))
    generator = torch.Generator().manual_seed(4)
    seeds = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in as_tuple(ys)]
    mu = [torch.randn(last[c].shape, generator=generator, dtype=torch.float64) for c in carry]
    wanted = torch.autograd.grad([*ys, *(last[c] for c in carry)], [init[c] for c in carry],
                                 [*seeds, *mu])  # fmt: skip

    shape = mu[0].shape
    total = [torch.zeros(shape, dtype=torch.float64) for _ in range(size)]
    total += [torch.full(shape, float(row == column), dtype=torch.float64)
              for column in range(size) for row in range(size)]  # fmt: skip
    unknown = [torch.full(shape, torch.nan, dtype=torch.float64)] * width
    xs = expanded(leaves)
    for t in reversed(range(STEPS)):
        # A cotangent without states has them as a dimension of size 1.
        step = [s[:, t] if s.dim() == 4 else s[:, t, :, None] for s in seeds]
        total = evaluate(program, [*unknown, *(x[:, t] for x in xs), *step, *total], EXACT_DTYPES)
        total = [v.expand(shape) for v in total]
    for row in range(size):
        columns = (total[size * (column + 1) + row] * mu[column] for column in range(size))
        torch.testing.assert_close(total[row] + sum(columns), wanted[row])
    off_diagonal = [total[size * (c + 1) + r].any() for c in range(size) for r in range(size)
                    if c != r]  # fmt: skip
    assert any(off_diagonal) == (name == "turning")


@pytest.mark.parametrize("inclusive", [True, False])
def test_maxima_depend_on_the_states(inclusive: bool) -> None:
    leaves = leaves_of(CASES["max-plus"], 1, STEPS, 2, STATES)
    assert total_step(adjoint_of(CASES["max-plus"], leaves, inclusive, False)) is None


def test_squares_of_states_depend_on_them() -> None:
    given = case("squares_test", lambda a, b: (a, b), lambda s: (s[1] * s[1]).sum(-1),
                 "decay:btc", "any:btcn", combine=affine)  # fmt: skip
    leaves = leaves_of(given, 1, STEPS, 2, STATES)
    assert total_step(adjoint_of(given, leaves, True, False)) is None


def test_a_carry_that_states_share_has_no_map_for_each_state() -> None:
    leaves = leaves_of(CASES["scalar decay"], 1, STEPS, 2, STATES)
    assert total_step(adjoint_of(CASES["scalar decay"], leaves, True, True)) is None
    assert total_step(adjoint_of(CASES["scalar decay"], leaves, True, False)) is not None
