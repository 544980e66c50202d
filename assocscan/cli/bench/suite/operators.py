"""`operators`: every built-in operator along the middle axis, beside torch's where it has one.

Of each as many lanes of [4, L, lanes] as move some 60 MB: each input read once, each output written
once. Numbers are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import ops
from ....api.associative_scan import associative_scan
from ....api.explain import explain
from ....monoids.combinators import product, segmented
from ....monoids.monoid import Monoid
from ....pytrees import flatten
from ..cases import SEED, Case, Settings, contender

BATCH, LENGTH, BYTES = 4, 8192, 60 << 20
SMALL_LENGTH, SMALL_BYTES = 512, 1 << 20  # where quick
QUICK = ("sum", "max", "argmax", "logaddexp", "affine", "welford")
TORCH: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: torch.cumsum(x, 1),
    "prod": lambda x: torch.cumprod(x, 1),
    "argmax": lambda x: torch.cummax(x, 1),
    "argmin": lambda x: torch.cummin(x, 1),
    "logaddexp": lambda x: torch.logcumsumexp(x, 1),
}

Draw = Callable[[tuple[int, ...]], Tensor]
Draws = tuple[Any, ...]  # of draws, and of the inputs of an operator made of operators


def number(batch: tuple[int, ...], *element: int) -> Tensor:
    return torch.randn(*batch, *element)


def gate(batch: tuple[int, ...]) -> Tensor:
    return 0.9 + 0.1 * torch.rand(batch)


def integer(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(1, 100, batch)


def flag(batch: tuple[int, ...]) -> Tensor:
    return torch.rand(batch) > 0.5


def sign(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, batch, dtype=torch.int8) * 2 - 1


def bracket(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(-1, 2, batch, dtype=torch.int32)


def vector(d: int) -> Draw:
    return lambda batch: torch.nn.functional.normalize(number(batch, d), dim=-1)


def matrix(d: int) -> Draw:
    return lambda batch: number(batch, d, d) / (2 * d)


def covariance(d: int) -> Draw:
    return lambda batch: torch.eye(d).expand(*batch, d, d).contiguous()


def states(s: int) -> Draw:
    return lambda batch: torch.randint(0, s, (*batch, s), dtype=torch.int32)


def constant(draw: Draw) -> Draw:
    """One element for all."""
    return lambda batch: (lambda x: x.expand(*batch, *x.shape))(draw(())) if batch else draw(())


NUMBERS = [
    ops.sum, ops.compensated_sum, ops.max, ops.min, ops.minmax, ops.any, ops.all, ops.count,
    ops.logaddexp, ops.rotation2d, ops.mean, ops.welford, ops.online_softmax, ops.max_subarray,
    product(ops.min, ops.max, ops.mean),
]  # fmt: skip
OPERATORS: dict[Monoid, Draws] = {
    **dict.fromkeys(NUMBERS, (number,)),
    ops.prod: (gate,),
    ops.argmax: (number, integer),
    ops.argmin: (number, integer),
    ops.xor: (integer,),
    ops.gcd: (integer,),
    ops.signed_log_prod: (number, sign),
    ops.signed_log_sum: (number, sign),
    ops.affine: (gate, number),
    segmented(ops.affine): ((gate, number), flag),
    ops.log_affine: (number, number),
    ops.max_affine: (number, number),
    ops.covariance: (number, number),
    ops.ema: (number, constant(gate)),
    ops.ema_variance: (number, constant(gate)),
    ops.last_valid: (number, flag),
    ops.brackets: (bracket,),
    ops.quaternion: (vector(4),),
    ops.se3: (vector(4), vector(3)),
    ops.autoregression: (constant(lambda batch: torch.tensor([0.5, 0.2])), number),
    ops.matmul: (matrix(4),),
    ops.matrix_affine: (matrix(4), vector(4)),
    ops.log_matmul: (matrix(4),),
    ops.max_matmul: (matrix(4),),
    ops.online_attention: (number, vector(16)),
    ops.scalar_kalman: (gate, number, gate, number, gate),
    ops.kalman: (matrix(2), vector(2), covariance(2), vector(2), covariance(2)),
    ops.rts: (matrix(2), vector(2), covariance(2)),
    ops.finite_state: (states(4),),
}
SIZES = {ops.matmul: "4×4", ops.matrix_affine: "4×4", ops.log_matmul: "K = 4", ops.kalman: "n = 2",
         ops.max_matmul: "K = 4", ops.autoregression: "k = 2, constant", ops.rts: "n = 2",
         ops.online_attention: "d = 16", ops.finite_state: "S = 4"}  # fmt: skip


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """One case for each operator."""
    found = [op for op in OPERATORS if not settings.quick or op.name in QUICK]
    return [functools.partial(case, settings, op) for op in found]


def case(settings: Settings, op: Monoid) -> Case:
    length, moved = (SMALL_LENGTH, SMALL_BYTES) if settings.quick else (LENGTH, BYTES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        few = inputs(op, (1, 2, 16), "cpu")
        per_element = explain(op, few, 1, backend="eager").bytes_moved / 32
        lanes = max(16, int(moved / per_element / (BATCH * length)) // 16 * 16)
        xs = inputs(op, (BATCH, length, lanes), settings.device)
    contenders = {"assocscan": contender(lambda: associative_scan(op, xs, 1))}
    if op.name in TORCH:
        first = flatten(xs)[0][0]
        contenders["torch"] = contender(lambda: TORCH[op.name](first))
    return Case(
        "all", op.name + (f" ({SIZES[op]})" if op in SIZES else ""), 0, (BATCH, length, lanes),
        torch.float32, explain(op, xs, 1).bytes_moved, contenders,
    )  # fmt: skip


def inputs(op: Monoid, batch: tuple[int, ...], device: torch.device | str) -> Any:
    """What the operator scans."""

    def drawn(draws: Draws) -> Any:
        xs = tuple(drawn(d) if isinstance(d, tuple) else d(batch).to(device) for d in draws)
        return xs if len(xs) > 1 else xs[0]

    return drawn(OPERATORS[op])
