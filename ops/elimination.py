"""Inverses of small matrices, written so that kernels can be generated.

`inverse` is Gauss-Jordan elimination with row pivoting by selection: an exchange of two rows is a
`where` on each of their entries. It unrolls to about 3n³ scalar operations; beyond n = 4 it is
torch.linalg.inv, which has no generated form: operators then run eagerly.

>>> import torch
>>> from assocscan.ops.elimination import inverse, inverse_and_logdet
>>> matrix = torch.tensor([[0.0, 2.0], [1.0, 4.0]])
>>> inverse(matrix)
tensor([[-2.0000,  1.0000],
        [ 0.5000,  0.0000]])
>>> inverse_and_logdet(matrix)[1].exp()
tensor(2.)
"""

import torch
from torch import Tensor

from assocscan.torch_state import in_functorch_or_forward_mode

LARGEST = 4


def inverse(matrix: Tensor, by_reciprocals: bool = False) -> Tensor:
    """The inverse of one n×n matrix; inf and NaN where it is singular.

    by_reciprocals: divide once per row and multiply by that: a fraction of the time on GPUs, one
    rounding more. Not for matrices whose pivots may be below 2^-126, the least normal number.
    """
    if matrix.shape[-1] > LARGEST:
        inverted: Tensor = torch.linalg.inv_ex(matrix)[0]
        return inverted
    return eliminated(matrix, by_reciprocals)[0]


def inverse_and_logdet(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of one n×n matrix and log |det|."""
    if matrix.shape[-1] > LARGEST:
        factors = torch.linalg.lu_factor_ex(matrix)[0]  # not by slogdet, as `solved` says
        return torch.linalg.inv_ex(matrix)[0], factors.diagonal(0, -2, -1).abs().log().sum(-1)
    inverted, pivots = eliminated(matrix)
    return inverted, torch.stack(pivots).abs().log().sum()


def solved(A: Tensor, B: Tensor) -> Tensor:
    """A⁻¹ B, for any batch of matrices.

    Where a `jvp` may be differentiated, by `lu_factor_ex` and `lu_solve`: torch (2.11 to 2.14)
    differentiates the `jvp` of solve, det and slogdet as if the factors of A were constants. Else
    by `solve_ex`, whose gradient takes a tenth of the time for small matrices.
    """
    if not (in_functorch_or_forward_mode() or torch.compiler.is_compiling()):
        solution: Tensor = torch.linalg.solve_ex(A, B)[0]
        return solution
    factors, pivots, _ = torch.linalg.lu_factor_ex(A)
    found: Tensor = torch.linalg.lu_solve(factors, pivots, B)
    return found


def eliminated(matrix: Tensor, by_reciprocals: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The inverse and the pivots, whose product is ±det."""
    n = matrix.shape[-1]
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    rows = list(torch.cat([matrix, unit], 1).unbind())
    pivots = []
    for k in range(n):
        for i in range(k + 1, n):
            swap = rows[i][k].abs() > rows[k][k].abs()
            upper, lower = rows[k], rows[i]
            rows[k] = torch.where(swap, lower, upper)
            rows[i] = torch.where(swap, upper, lower)
        pivots.append(rows[k][k])
        rows[k] = rows[k] * (1 / rows[k][k]) if by_reciprocals else rows[k] / rows[k][k]
        for i in range(n):
            if i != k:
                rows[i] = rows[i] - rows[i][k] * rows[k]
    return torch.stack(rows)[:, n:], pivots
