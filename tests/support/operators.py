"""The table of operators: how to draw inputs, and what the output is by definition.

A new operator is one entry of CASES: laws, values and gradients are then tested on every engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import definitions
import torch
from torch import Tensor

from assocscan import Monoid, ops

LENGTH = 9
INF, NAN = math.inf, math.nan
F64, C128 = torch.float64, torch.complex128

Draw = Callable[[torch.Generator, tuple[int, ...]], Any]


def normal(*element: int, dtype: torch.dtype = F64) -> Draw:
    return lambda generator, batch: torch.randn(
        (*batch, *element), generator=generator, dtype=dtype
    )


def positive() -> Draw:
    return lambda generator, batch: torch.rand(batch, generator=generator, dtype=F64)


def integers(low: int, high: int, dtype: torch.dtype = torch.int64, *element: int) -> Draw:
    def draw(generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, (*batch, *element), generator=generator).to(dtype)

    return draw


def values(*numbers: float, element: tuple[int, ...] = (), dtype: torch.dtype = F64) -> Draw:
    """Drawn from a list: for edge values."""

    def draw(generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
        chosen = torch.randint(len(numbers), (*batch, *element), generator=generator)
        return torch.tensor(numbers, dtype=dtype)[chosen]

    return draw


def together(*draws: Draw) -> Draw:
    return lambda generator, batch: tuple(draw(generator, batch) for draw in draws)


@dataclass(frozen=True)
class Case:
    """One operator on one kind of input.

    `prefix` is the definition: it takes x[0 … t] of every leaf and returns the output at t.
    `states` draws the elements that `check` combines, where those are not the inputs.
    `smooth`: its gradient is compared with that of the loop.
    """

    op: Monoid
    draw: Draw
    prefix: Callable[..., Any]
    label: str = ""
    states: Draw | None = None
    smooth: bool = True

    def __str__(self) -> str:
        return f"{self.op.name}-{self.label}" if self.label else self.op.name

    def sample(self, *batch: int, states: bool = False, seed: int = 0) -> Any:
        draw = self.states if states and self.states else self.draw
        return draw(torch.Generator().manual_seed(seed), batch)


def scaled(draw: Draw, factor: float) -> Draw:
    return lambda generator, batch: factor * draw(generator, batch)


def unit(*element: int) -> Draw:
    """Vectors of size 1."""
    draw = normal(*element)
    return lambda generator, batch: torch.nn.functional.normalize(draw(generator, batch), dim=-1)


def covariances(n: int) -> Draw:
    """Positive definite matrices."""

    def draw(generator: torch.Generator, batch: tuple[int, ...]) -> Tensor:
        root = torch.randn((*batch, n, n), generator=generator, dtype=F64)
        return root @ root.mT / n

    return draw


SIGNS = values(-1, 1, dtype=torch.int8)
LOGS = values(-INF, 0.0, 1.0)
MATRIX, VECTOR, SQUARE = normal(2, 2), normal(2), covariances(2)
GAUSSIAN = together(scaled(MATRIX, 0.5), VECTOR, SQUARE, VECTOR, SQUARE)
SCALAR_GAUSSIAN = together(normal(), normal(), positive(), normal(), positive())
MAPS = integers(0, 3, torch.int64, 3)
DECAY = positive()


def signed(draw: Draw) -> Draw:
    """Logarithms with signs; that of zero and of NaN is 1."""

    def pair(generator: torch.Generator, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size, sign = draw(generator, batch), SIGNS(generator, batch)
        return size, torch.where(size > -INF, sign, 1).to(sign.dtype)

    return pair


def lifted_fill(draw: Draw) -> Draw:
    """A number, or 0 and False."""

    def pair(generator: torch.Generator, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        valid = torch.randint(0, 2, batch, generator=generator).bool()
        return torch.where(valid, draw(generator, batch), 0.0), valid

    return pair


EDGES = values(INF, -INF, NAN, 0.0, 1.0)
INDEX = integers(0, 99)
BITS = integers(0, 2, torch.bool)
COUNT = integers(1, 9)

CASES = [
    Case(ops.sum, normal(), lambda x: x.sum(0)),
    Case(ops.sum, EDGES, lambda x: x.sum(0), "edges"),
    Case(ops.sum, integers(-128, 128, torch.int8), lambda x: x.sum(0).to(torch.int8), "int8"),
    Case(ops.sum, BITS, lambda x: x.any(0), "bool"),
    Case(ops.prod, normal(), lambda x: x.prod(0)),
    Case(ops.prod, EDGES, lambda x: x.prod(0), "edges"),
    Case(ops.prod, normal(dtype=C128), lambda x: x.prod(0), "complex"),
    Case(ops.max, normal(), lambda x: x.amax(0)),
    Case(ops.max, EDGES, lambda x: x.amax(0), "edges"),
    Case(ops.max, integers(-128, 128, torch.int8), lambda x: x.amax(0), "int8"),
    Case(ops.min, normal(), lambda x: x.amin(0)),
    Case(ops.min, EDGES, lambda x: x.amin(0), "edges"),
    Case(ops.any, BITS, lambda x: x.any(0)),
    Case(ops.any, values(0.0, 0.0, NAN), lambda x: x.bool().any(0), "floats", BITS),
    Case(ops.all, BITS, lambda x: x.all(0)),
    Case(ops.all, integers(0, 4), lambda x: x.bool().all(0), "integers", BITS),
    Case(ops.xor, integers(-99, 99), definitions.xor_loop),
    Case(ops.logaddexp, normal(), lambda x: x.logsumexp(0)),
    Case(ops.logaddexp, EDGES, lambda x: x.logsumexp(0), "edges"),
    Case(ops.argmax, together(normal(), INDEX), lambda x, i: definitions.met_last(x, i, x.amax(0))),
    Case(
        ops.argmax,
        together(EDGES, INDEX),
        lambda x, i: definitions.met_last(x, i, x.amax(0)),
        "edges",
    ),
    Case(ops.argmin, together(normal(), INDEX), lambda x, i: definitions.met_last(x, i, x.amin(0))),
    Case(
        ops.argmin,
        together(EDGES, INDEX),
        lambda x, i: definitions.met_last(x, i, x.amin(0)),
        "edges",
    ),
    Case(ops.affine, together(normal(), normal()), definitions.affine_loop),
    Case(
        ops.affine,
        together(normal(dtype=C128), normal(dtype=C128)),
        definitions.affine_loop,
        "complex",
    ),
    Case(ops.matmul, normal(2, 2), definitions.product_of_matrices),
    Case(ops.matmul, normal(2, 2, dtype=C128), definitions.product_of_matrices, "complex"),
    Case(ops.matrix_affine, together(normal(2, 2), normal(2)), definitions.matrix_affine_loop),
    Case(
        ops.matrix_affine, together(normal(3, 3), normal(3)), definitions.matrix_affine_loop, "3x3"
    ),
    Case(
        ops.matrix_affine,
        together(normal(2, 2, dtype=C128), normal(2, dtype=C128)),
        definitions.matrix_affine_loop,
        "complex",
    ),
    Case(ops.mean, normal(), lambda x: x.mean(0), states=together(normal(), COUNT)),
    Case(
        ops.mean, integers(-9, 9), lambda x: x.sum(0) / len(x), "integers", together(COUNT, COUNT)
    ),
    Case(ops.welford, normal(), definitions.moments, states=together(COUNT, normal(), positive())),
    Case(
        ops.welford,
        normal(dtype=C128),
        definitions.moments,
        "complex",
        together(COUNT, normal(dtype=C128), positive()),
    ),
    Case(ops.compensated_sum, normal(), lambda x: x.sum(0), states=together(normal(), normal())),
    Case(ops.compensated_sum, EDGES, lambda x: x.sum(0), "edges", together(EDGES, values(0.0))),
    Case(ops.count, values(0.0, 1.0, NAN), lambda x: x.bool().sum(0), states=COUNT, smooth=False),
    Case(
        ops.gcd,
        integers(-60, 60),
        lambda x: functools.reduce(torch.gcd, x, 0 * x[0]),
        states=integers(0, 60),
        smooth=False,
    ),
    Case(
        ops.minmax, normal(), lambda x: (x.amin(0), x.amax(0)), states=together(normal(), normal())
    ),
    Case(ops.minmax, EDGES, lambda x: (x.amin(0), x.amax(0)), "edges", together(EDGES, EDGES)),
    Case(
        ops.signed_log_prod,
        together(normal(), SIGNS),
        lambda x, s: (x.sum(0), s.prod(0).to(s.dtype)),
    ),
    Case(ops.signed_log_sum, together(normal(), SIGNS), definitions.signed_log_total),
    Case(
        ops.signed_log_sum,
        signed(values(-INF, 0.0, 1.0, INF, NAN)),
        definitions.signed_log_total,
        "edges",
    ),
    Case(ops.log_affine, together(normal(), normal()), definitions.log_affine_loop),
    Case(ops.log_affine, together(LOGS, LOGS), definitions.log_affine_loop, "edges"),
    Case(ops.max_affine, together(normal(), normal()), definitions.max_affine_loop),
    Case(ops.max_affine, together(normal(), LOGS), definitions.max_affine_loop, "edges"),
    Case(ops.max_matmul, MATRIX, definitions.heaviest_paths),
    Case(ops.log_matmul, MATRIX, definitions.log_matrix_product),
    Case(
        ops.log_matmul,
        values(-INF, 0.0, 1.0, INF, NAN, element=(2, 2)),
        definitions.log_matrix_product,
        "edges",
        values(-INF, 0.0, 1.0, element=(2, 2)),  # with ∞ and −∞ the order of products matters
    ),
    Case(
        ops.autoregression,
        together(VECTOR, normal()),
        definitions.recurrence_of_order,
        states=together(MATRIX, VECTOR),
    ),
    Case(
        ops.rotation2d,
        normal(),
        lambda x: (x.sum(0).cos(), x.sum(0).sin()),
        states=together(normal(), normal()),
    ),
    Case(ops.quaternion, normal(4), definitions.quaternion_product),
    Case(ops.se3, together(unit(4), normal(3)), definitions.motion),
    Case(
        ops.covariance,
        together(normal(), normal()),
        definitions.covariance_of,
        states=together(COUNT, normal(), normal(), normal()),
    ),
    Case(
        ops.ema,
        together(normal(), DECAY),
        lambda x, d: definitions.weighted_moments(x, d)[0],
        states=together(positive(), positive(), normal()),
    ),
    Case(
        ops.ema_variance,
        together(normal(), DECAY),
        definitions.weighted_moments,
        states=together(positive(), positive(), normal(), positive()),
    ),
    Case(
        ops.online_softmax,
        normal(),
        definitions.softmax_sums,
        states=together(normal(), positive()),
    ),
    Case(ops.online_softmax, LOGS, definitions.softmax_sums, "edges", together(LOGS, values(0.0))),
    Case(
        ops.online_attention,
        together(normal(), VECTOR),
        definitions.attention,
        states=together(normal(), positive(), VECTOR),
    ),
    Case(
        ops.online_attention,
        together(values(-INF, 0.0, 9.0, INF, NAN), VECTOR),
        definitions.attention,
        "edges",
        together(normal(), positive(), VECTOR),
    ),
    Case(ops.scalar_kalman, SCALAR_GAUSSIAN, definitions.scalar_filter),
    Case(ops.kalman, GAUSSIAN, definitions.gaussian_filter),
    Case(ops.rts, together(MATRIX, VECTOR, SQUARE), definitions.backward_moments),
    Case(ops.finite_state, MAPS, definitions.machine, smooth=False),
    Case(
        ops.brackets,
        integers(-1, 2),
        definitions.unmatched,
        states=together(COUNT, COUNT),
        smooth=False,
    ),
    Case(
        ops.max_subarray,
        normal(),
        definitions.best_stretch,
        states=together(normal(), normal(), normal(), normal()),
    ),
    Case(
        ops.max_subarray,
        values(-INF, -1.0, 2.0),
        definitions.best_stretch,
        "edges",
        together(LOGS, LOGS, LOGS, LOGS),
    ),
    Case(
        ops.last_valid,
        together(normal(), BITS),
        definitions.filled,
        states=lifted_fill(normal()),
    ),
    Case(ops.last_valid, together(EDGES, BITS), definitions.filled, "edges", lifted_fill(EDGES)),
]
