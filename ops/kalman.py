"""Kalman filtering and smoothing as associative operators.

The model is x[t] = F x[t−1] + q, y[t] = H x[t] + r, with Gaussian q and r of covariances Q and R.
`assocscan.kalman_filter` and `assocscan.rts_smoother` make the elements from a model.

For one step of the filter, with S = H Q Hᵀ + R and K = Q Hᵀ S⁻¹, the element is ((I − K H) F, K y,
(I − K H) Q, Fᵀ Hᵀ S⁻¹ y, Fᵀ Hᵀ S⁻¹ H F). For one step of the smoother, from the filter's m and P:
E = P Fᵀ (F P Fᵀ + Q)⁻¹, g = m − E F m, L = P − E F P; at the last step (0, m, P).

Source: S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers", IEEE
Transactions on Automatic Control 66(1), 2021, lemmas 7 to 10.
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.elimination import inverse

State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@monoid(identity=(1.0, 0.0, 0.0, 0.0, 0.0), lower=lambda state: (state[1], state[2]))
def scalar_kalman(left: State, right: State) -> State:
    """The Kalman filter of a state with one number.

        (m[t], P[t]) = mean and variance of the state given y[0], …, y[t]

    Inputs: (A, b, C, η, J), five real numbers for each step, as in `kalman` with n = 1.
    Element: the same, for a stretch of time: with x the state before it, N(A·x + b, C) is the
        state's distribution at its end, and exp(η·x − J·x²/2) the likelihood of its observations,
        up to a factor.
    Outputs: (b, C), which are (m, P). A prior N(m, P) of the state before the first step enters
        as `init=(0, m, P, 0, 0)`; that of `kalman_filter` is of the state at it.
    Identity: (1, 0, 0, 0, 0).
    Cost: 18 flops; reads five numbers, writes two.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> y = torch.tensor([1.0, 2.0, 3.0])                    # a random walk seen through noise
    >>> Q, R = 1.0, 1.0
    >>> K, one = torch.full((3,), Q / (Q + R)), torch.ones(3)
    >>> elements = (1 - K, K * y, (1 - K) * Q, y / (Q + R), one / (Q + R))
    >>> prior = (0.0, 0.0, 1.0, 0.0, 0.0)
    >>> associative_scan(ops.scalar_kalman, elements, init=prior)[0]
    tensor([0.6667, 1.5000, 2.4286])
    """
    a1, b1, c1, eta1, j1 = left
    a2, b2, c2, eta2, j2 = right
    shrink = 1 / (1 + c1 * j2)
    ahead, back = a2 * shrink, a1 * shrink
    return (
        ahead * a1,
        ahead * (b1 + c1 * eta2) + b2,
        ahead * c1 * a2 + c2,
        back * (eta2 - j2 * b1) + eta1,
        back * j2 * a1 + j1,
    )


def _symmetric(matrix: Tensor) -> Tensor:
    """Rounding must not make a difference between C and Cᵀ, nor may derivatives find one."""
    return (matrix + matrix.mT) / 2


def _unit(A: torch.Size, b: torch.Size, *rest: torch.Size) -> tuple[Tensor, ...]:
    return torch.eye(A[-1]), *(torch.zeros(shape) for shape in (b, *rest))


@monoid(element_ndim=(2, 1, 2, 1, 2), identity=_unit, lower=lambda state: (state[1], state[2]))
def kalman(left: State, right: State) -> State:
    """The Kalman filter.

        (m[t], P[t]) = mean and covariance of the state given y[0], …, y[t]

    Inputs: (A […, n, n], b […, n], C […, n, n], η […, n], J […, n, n]), real, for each step.
    Element: the same, for a stretch of time: with x the state before it, N(A x + b, C) is the
        state's distribution at its end, and exp(ηᵀx − xᵀJx/2) the likelihood of its observations,
        up to a factor.
    Outputs: (b […, n], C […, n, n]), which are (m, P). A prior N(m, P) of the state before the
        first step enters as `init=(0, m, P, 0, 0)`, or in the first element; that of
        `kalman_filter` is of the state at the first step.
    Identity: (I, 0, 0, 0, 0).
    Cost: about 20n³ flops; reads 3n² + 2n numbers, writes n² + n. I + C J is inverted by unrolled
        elimination up to n = 4; larger states run eagerly.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> F, Q = torch.eye(2), torch.eye(2)                    # both numbers are observed: H = R = 1
    >>> y = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    >>> half = torch.eye(2).expand(3, 2, 2) / 2                 # K = Q (Q + R)⁻¹
    >>> prior = (torch.zeros(2, 2), torch.zeros(2), torch.eye(2), torch.zeros(2), torch.zeros(2, 2))
    >>> mean, _ = associative_scan(ops.kalman, (half, y / 2, half, y / 2, half), init=prior)
    >>> mean[:, 0]
    tensor([0.6667, 1.5000, 2.4286])
    """
    A1, b1, C1, eta1, J1 = left
    A2, b2, C2, eta2, J2 = right
    C1, J1, C2, J2 = (_symmetric(matrix) for matrix in (C1, J1, C2, J2))
    unit = torch.eye(A1.shape[-1], dtype=A1.dtype, device=A1.device)
    shrink = inverse(unit + C1 @ J2, by_reciprocals=True)  # its eigenvalues are at least 1
    ahead, back = A2 @ shrink, A1.mT @ shrink.mT
    return (
        ahead @ A1,
        ahead @ (b1 + C1 @ eta2) + b2,
        ahead @ C1 @ A2.mT + C2,
        back @ (eta2 - J2 @ b1) + eta1,
        back @ J2 @ A1 + J1,
    )


@monoid(element_ndim=(2, 1, 2), identity=_unit, lower=lambda state: (state[1], state[2]))
def rts(left: Triple, right: Triple) -> Triple:
    """The smoother of Rauch, Tung and Striebel, scanned with `reverse=True`.

        (m[t], P[t]) = mean and covariance of the state given all y

    Inputs: (E […, n, n], g […, n], L […, n, n]), real, for each step.
    Element: the same, for a stretch of time: with x the state after it, N(E x + g, L) is the
        state's distribution at its start.
    Outputs: (g […, n], L […, n, n]), which are (m, P).
    Identity: (I, 0, 0).
    Cost: 6n³ flops; reads 2n² + n numbers, writes n² + n.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> E = torch.tensor([0.5, 0.5, 0.0]).reshape(3, 1, 1)   # the last step depends on no later one
    >>> g, L = torch.tensor([[1.0], [2.0], [8.0]]), torch.ones(3, 1, 1)
    >>> mean, _ = associative_scan(ops.rts, (E, g, L), reverse=True)
    >>> mean[:, 0]
    tensor([4., 6., 8.])
    """
    E1, g1, L1 = left
    E2, g2, L2 = right
    return E2 @ E1, E2 @ g1 + g2, E2 @ L1 @ E2.mT + L2
