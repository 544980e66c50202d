"""What is scanned to time an operator: draws for the built-in ones, and a guess for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import ops
from assocscan.api.printed_source import default_example
from assocscan.errors import ScanTypeError
from assocscan.monoids.combinators import product, segmented
from assocscan.monoids.monoid import Monoid
from assocscan.pytrees import flatten, unflatten
from assocscan.trace.signatures import positional_count

SIDE = 4  # of the vectors and matrices of an operator that is not built in

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


# Where a sum cancels, its logarithm has no correct digits: the sums themselves are compared.
VIEWS: dict[Monoid, Callable[..., Tensor]] = {
    ops.signed_log_sum: lambda log, sign: sign * log.double().exp()
}


def inputs(
    op: Monoid,
    batch: tuple[int, ...],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Tensors that the operator scans, with these batch dimensions; floats have the dtype.

    Raises ScanTypeError where nothing says what an operator takes that is not built in.
    """

    def drawn(draws: Draws) -> Any:
        xs = tuple(drawn(d) if isinstance(d, tuple) else placed(d(batch)) for d in draws)
        return xs if len(xs) > 1 else xs[0]

    def placed(t: Tensor) -> Tensor:
        return (t.to(dtype) if t.is_floating_point() else t).to(device)

    if op in OPERATORS:
        return drawn(OPERATORS[op])
    leaves, spec = flatten(example(op))
    return unflatten([placed(uniform(batch, t)) for t in leaves], spec)


def example(op: Monoid) -> Any:
    """One element of xs: numbers where the operator has them; vectors of 4 and matrices of 4 × 4
    where only the number of its leaves is known."""
    try:
        return default_example(op)
    except ScanTypeError:
        pass
    function = op.lift if op.lift is not None else op.identity
    if op.lift is None and not callable(op.identity):
        count = None if op.identity is None else len(flatten(op.identity)[0])
    else:
        count = positional_count(function)
    if not count:
        raise ScanTypeError(
            f"bench cannot tell what {op.name!r} scans: give it an identity (numbers in the "
            "structure of xs), or a lift with one parameter for each tensor"
        )
    ndims = flatten(op.element_ndim)[0]
    ndims = ndims * count if len(ndims) == 1 else ndims
    leaves = tuple(torch.ones((SIDE,) * n) for n in ndims)
    return leaves[0] if len(leaves) == 1 else leaves


def uniform(batch: tuple[int, ...], like: Tensor) -> Tensor:
    """Floats in [0, 1), rows of matrices with a sum below 1; integers from 1 to 8; bools."""
    shape = (*batch, *like.shape)
    if like.dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if not (like.is_floating_point() or like.is_complex()):
        return torch.randint(1, 9, shape, dtype=like.dtype)
    drawn = torch.rand(shape, dtype=like.dtype)
    return drawn / like.shape[-1] if like.dim() >= 2 else drawn
