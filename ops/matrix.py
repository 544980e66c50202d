"""Products of matrices and matrix recurrences.

Their Jacobians have d⁴ entries, so the derivative is written by hand. With Aᴴ the conjugate
transpose and g the cotangent of the state,

    λ[t] = g[t] + A[t+1]ᴴ @ λ[t+1]

for the matrix of products and for h alike: again a matrix recurrence, run backwards.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4; for states of this
kind S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers", IEEE
Transactions on Automatic Control 66(1), 2021.
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
    """Running product of matrices: Y[t] = A[t] @ … @ A[0].

    Inputs: A […, d, d], of any dtype that has products.
    Element: one matrix. The earlier one acts first, so left ∘ right is right @ left.
    Outputs: Y […, d, d].
    Identity: I.
    Cost: 2d³ flops; reads d² numbers, writes d².

    For the other order take `reversed_order(ops.matmul)`.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> fibonacci = torch.tensor([[1, 1], [1, 0]]).expand(6, 2, 2)
    >>> associative_scan(ops.matmul, fibonacci)[:, 0, 1]
    tensor([1, 1, 2, 3, 5, 8])
    """
    return right @ left


@monoid(
    element_ndim=(2, 1),
    identity=lambda a, b: (torch.eye(a[-1]), torch.zeros(b)),
    adjoint=(_MATRIX_AFFINE_ADJOINT, lambda y, x_next, g: (x_next[0].mH, g[0], g[1])),
)
def matrix_affine(left: Pair, right: Pair) -> Pair:
    """Matrix recurrence: h[t] = A[t] @ h[t−1] + b[t], with h[−1] = 0.

    Inputs: (A […, d, d], b […, d]), of any dtype that has products.
    Element: the same, the map h ↦ A @ h + b.
    Outputs: (A[t] @ … @ A[0], h[t]). `assocscan.matrix_recurrence` gives h alone.
    Identity: (I, 0).
    Cost: 2d³ + 2d² flops; reads d² + d numbers, writes as many.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> A = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).expand(4, 2, 2)     # a quarter turn
    >>> b = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> _, h = associative_scan(ops.matrix_affine, (A, b))
    >>> h.tolist()
    [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
    """
    a1, b1 = left
    a2, b2 = right
    return a2 @ a1, a2 @ b1 + b2
