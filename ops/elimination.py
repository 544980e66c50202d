"""Inverses of small matrices, written so that kernels can be generated.

`inverse` is Gauss-Jordan elimination with row pivoting by selection: an exchange of two rows is a
`where` on each of their entries. It unrolls to about 3n³ scalar operations; beyond n = 4 it is
torch.linalg.inv, which has no generated form: operators then run eagerly.

>>> import torch
>>> from assocscan.ops.elimination import inverse
>>> inverse(torch.tensor([[0.0, 2.0], [1.0, 4.0]]))
tensor([[-2.0000,  1.0000],
        [ 0.5000,  0.0000]])
"""

import torch
from torch import Tensor

LARGEST = 4


def inverse(matrix: Tensor) -> Tensor:
    """The inverse of one n×n matrix; inf and NaN where it is singular."""
    n = matrix.shape[-1]
    if n > LARGEST:
        inverted: Tensor = torch.linalg.inv(matrix)
        return inverted
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    rows = list(torch.cat([matrix, unit], 1).unbind())
    for k in range(n):
        for i in range(k + 1, n):
            swap = rows[i][k].abs() > rows[k][k].abs()
            upper, lower = rows[k], rows[i]
            rows[k] = torch.where(swap, lower, upper)
            rows[i] = torch.where(swap, upper, lower)
        rows[k] = rows[k] / rows[k][k]
        for i in range(n):
            if i != k:
                rows[i] = rows[i] - rows[i][k] * rows[k]
    return torch.stack(rows)[:, n:]
