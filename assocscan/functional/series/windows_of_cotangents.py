"""Gradients of windows that are themselves windows, of the cotangents in the other direction."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...engines.base.cpp_and_cuda.windows import adjoint_of_sums
from ...monoids.monoid import Monoid
from ...program.operator import Leaf, Operator
from ...torch_private import pytree

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Windowable:
    """operator: what windows are made of. adjoint: the operator whose windows in the other
    direction are the gradient; None where it is more than a sum over the windows that contain a
    step. It takes the cotangents of the outputs that are floats, and where it `reads_values` the
    outputs and the inputs after them; it gives the gradients of the inputs that are floats."""

    operator: Operator
    adjoint: Operator | None = None
    reads_values: bool = False


@functools.lru_cache(maxsize=256)
def windowable(op: Operator) -> Windowable:
    sums = adjoint_of_sums(op)
    if sums is not None:
        return Windowable(op, sums)
    if op.inputs in ((Leaf(torch.float32),), (Leaf(torch.float64),)):  # y of 16 bits is too coarse
        logs = of_leaves(ops.logaddexp, op.inputs)
        if (op.lift, op.combine, op.lower) == (logs.lift, logs.combine, logs.lower):
            return Windowable(
                of_leaves(LOG_SUMS, op.inputs), of_leaves(GRADIENT_OF_LOG_SUMS, op.inputs * 3), True
            )
    return Windowable(op)


def of_leaves(op: Monoid, leaves: tuple[Leaf, ...]) -> Operator:
    example = tuple(range(len(leaves))) if len(leaves) > 1 else 0
    found = op.trace_for(pytree.tree_flatten(example)[1], leaves).operator
    assert isinstance(found, Operator)
    return found


def ordered(left: Pair, right: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The larger of the first numbers, exp(smaller − larger), and what stands beside the larger and
    the smaller one. An infinite smaller one is as 0."""
    (log1, beside1), (log2, beside2) = left, right
    left_higher = log1 >= log2
    high, low = torch.where(left_higher, log1, log2), torch.where(left_higher, log2, log1)
    ratio = torch.exp(torch.where(torch.isinf(low), -math.inf, low - high))
    more = torch.where(left_higher, beside1, beside2)
    less = torch.where(left_higher, beside2, beside1)
    return high, ratio, more, less


def _sum(left: Pair, right: Pair) -> Pair:
    high, ratio, more, less = ordered(left, right)
    return high, more + ratio * (1 + less)


# log Σ e^x as a pair (m, r) that stands for m + log(1 + r): m is the largest x, r the sum of the
# others' e^(x − m). One exponential per combination and one logarithm per window, and the rounding
# of m + log(1 + r) is the only one that grows with |x|.
LOG_SUMS = Monoid(
    _sum, name="logaddexp", lift=lambda x: (x, torch.zeros_like(x)),
    lower=lambda state, x: state[0] + torch.log1p(state[1]),
)  # fmt: skip


def _lifted(cotangent: Tensor, y: Tensor, x: Tensor) -> Pair:
    infinite = torch.isinf(y)
    return torch.where(infinite, -math.inf, -y), torch.where(infinite, 0, cotangent)


def _sum_of_factors(left: Pair, right: Pair) -> Pair:
    high, ratio, more, less = ordered(left, right)
    return high, more + ratio * less


def _lowered(state: Pair, xs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    log, factor = state
    return torch.where(log == -math.inf, factor, factor * torch.exp(xs[2] + log))


# The gradient: Σ ȳ[t] e^(x[s] − y[t]), over the windows t that contain s. A pair (k, c) stands for
# c e^k, the sum of ȳ e^(−y); k is the largest −y. As no x of a window is above its y, x + k ≤ 0 and
# nothing overflows. Windows whose y is infinite are (−∞, 0), and pass no gradient on. The error is
# |y| times a rounding, since y is in the exponent.
GRADIENT_OF_LOG_SUMS = Monoid(
    _sum_of_factors, name="gradient of logaddexp", lift=_lifted, lower=_lowered
)
