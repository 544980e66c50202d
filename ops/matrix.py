"""Products of matrices and matrix recurrences.

    matmul:         Y[t] = A[t] @ … @ A[0]                       identity I
    matrix_affine:  h[t] = A[t] @ h[t−1] + b[t], h[−1] = 0       identity (I, 0)

The element of matmul is one d×d matrix (leaf […, d, d]), a transition: the earlier one is applied
first, so the combination is right @ left. The element of matrix_affine is the map h ↦ A @ h + b as
(A [d, d], b [d]), and the state is (A[t] @ … @ A[0], h[t]).

Their Jacobians have d⁴ entries, so the derivative is written by hand. With Aᴴ the conjugate
transpose and g the cotangent of the state,

    λ[t] = g[t] + A[t+1]ᴴ @ λ[t+1]

for the matrix of products and for h alike: again a matrix recurrence, run backwards.

Cost per element: matmul 2d³ flops, reads and writes d² numbers; matrix_affine 2d³ + 2d² flops,
reads and writes d² + d numbers.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4; for states of this
kind S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers", IEEE
Transactions on Automatic Control 66(1), 2021.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> fibonacci = torch.tensor([[1, 1], [1, 0]]).expand(6, 2, 2)
>>> associative_scan(ops.matmul, fibonacci)[:, 0, 1]
tensor([1, 1, 2, 3, 5, 8])
>>> A = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).expand(4, 2, 2)     # a quarter turn
>>> b = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
>>> _, h = associative_scan(ops.matrix_affine, (A, b))
>>> h.tolist()
[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import Monoid, monoid

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _matmul_adjoint(left: Pair, right: Pair) -> Pair:
    """(Aᴴ, λ): as `matrix_affine`, with a matrix in the place of h."""
    a1, g1 = left
    a2, g2 = right
    return a2 @ a1, a2 @ g1 + g2


def _matrix_affine_adjoint(left: Triple, right: Triple) -> Triple:
    """(Aᴴ, λ of the products, λ of h)."""
    a1, p1, g1 = left
    a2, p2, g2 = right
    return a2 @ a1, a2 @ p1 + p2, a2 @ g1 + g2


_MATMUL_ADJOINT = Monoid(_matmul_adjoint, element_ndim=2, lower=lambda state: state[1])
_MATRIX_AFFINE_ADJOINT = Monoid(
    _matrix_affine_adjoint, element_ndim=(2, 2, 1), lower=lambda state: state[1:]
)


@monoid(
    element_ndim=2,
    identity=lambda a: torch.eye(a[-1]),
    adjoint=(_MATMUL_ADJOINT, lambda y, x_next, g: (x_next.mH, g)),
)
def matmul(left: Tensor, right: Tensor) -> Tensor:
    """right @ left: the earlier matrix acts first."""
    return right @ left


@monoid(
    element_ndim=(2, 1),
    identity=lambda a, b: (torch.eye(a[-1]), torch.zeros(b)),
    adjoint=(_MATRIX_AFFINE_ADJOINT, lambda y, x_next, g: (x_next[0].mH, g[0], g[1])),
)
def matrix_affine(left: Pair, right: Pair) -> Pair:
    """The map `left` followed by the map `right`."""
    a1, b1 = left
    a2, b2 = right
    return a2 @ a1, a2 @ b1 + b2
