"""Covariances of a Kalman filter as products U Uᵀ, so that they stay positive semidefinite.

Where the condition of a covariance is beyond the digits of its dtype, sums and differences of
covariances have wrong eigenvalues, even negative ones. Factors have the square root of this
condition. An element of the filter without its vectors is (A, C, J) with C = U Uᵀ and J = Z Zᵀ; in
products of elements U and Z come from triangular factors of matrices set side by side, and never
from a difference. They are computed in float64, so that covariances of float32 are rounded once: a
tree of factors in float32 was off by 4e-4 where the condition was 5e8.

Source: F. Yaghoobi, A. Corenflos, S. Hassan, S. Särkkä, "Parallel square-root statistical linear
regression for inference in nonlinear state space models", arXiv 2207.00426, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...api.associative_scan import associative_scan
from ...engines.base.shifted_leaves import previous_state
from ...monoids.monoid import Monoid
from .elements import observed

Factors = tuple[Tensor, Tensor, Tensor]


def about_roots(
    F: Tensor, H: Tensor, Q: Tensor, R: Tensor, covariance: Tensor, seen: Tensor, first: Tensor,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The filter's covariances before and after each step: P[t−1] and P[t] [..., T, n, n]; at the
    first step of a sequence P[t] twice. Without derivatives.

    F, H, Q, R: in the shapes of all steps. covariance: of each sequence. seen: [..., T, m].
    """
    axis, dtype = first.dim() - 1, F.dtype
    # The time goes into the calls of small factorisations; float64 adds little to it.
    F, H, Q, R, covariance = (t.detach().double() for t in (F, H, Q, R, covariance))
    start = first[..., None, None]
    # A step to which nothing leads is one from any state by the noise of the first covariance.
    prior = previous_state(torch.zeros_like(F), root(covariance), axis, False, offsets)
    noise = torch.where(start, prior, root(torch.where(start, 0.0, Q)))
    F = torch.where(start, 0.0, F)
    _, H, R = observed(torch.zeros_like(seen, dtype=F.dtype), H, R, seen)
    steps = elements(F, H, noise, root(R))
    # Whole slices take a third of the time, but a graph holds monoids only.
    op = FACTORS if torch.compiler.is_dynamo_compiling() else combine
    U: Tensor = associative_scan(op, steps, axis, backend="eager")[1]
    after = (U @ U.mT).to(dtype)
    before = previous_state(after, None, axis, False, offsets)
    return torch.where(start, after, before), after


def elements(F: Tensor, H: Tensor, noise: Tensor, R: Tensor) -> Factors:
    """(A, U, Z) of each step, from the factors of Q and R."""
    m, n = H.shape[-2:]
    rows = torch.cat((H @ noise, noise), -2)
    error = torch.cat((R, R.new_zeros(*R.shape[:-2], n, m)), -2)
    L = triangular(rows, error)
    S, gain, U = L[..., :m, :m], L[..., m:, :m], L[..., m:, m:]
    moved = torch.linalg.solve_triangular(S, H @ F, upper=False)
    return F - gain @ moved, square(U), square(moved.mT)


def combine(left: Factors, right: Factors) -> Factors:
    A1, U1, Z1 = left
    A2, U2, Z2 = right
    n = A1.shape[-1]
    unit = torch.eye(n, dtype=A1.dtype, device=A1.device).expand_as(A1)
    seen = Z2.mT @ U1  # what right observes of the state between them, Z2ᵀ x + N(0, I)
    L = triangular(torch.cat((seen, U1), -2), torch.cat((unit, torch.zeros_like(unit)), -2))
    S, gain, rest = L[..., :n, :n], L[..., n:, :n], L[..., n:, n:]
    moved = torch.linalg.solve_triangular(S, Z2.mT, upper=False)
    return (
        A2 @ (A1 - gain @ (moved @ A1)),
        triangular(A2 @ rest, U2),
        triangular((moved @ A1).mT, Z1),
    )


def triangular(left: Tensor, right: Tensor) -> Tensor:
    """The lower triangular L with L Lᵀ = left leftᵀ + right rightᵀ."""
    both = torch.cat((left, right), -1).mT
    upper: Tensor = torch.linalg.qr(both, mode="r")[1]
    return upper.mT


def square(t: Tensor) -> Tensor:
    """As a matrix [..., n, n] with the same t tᵀ, where t [..., n, k] is not one."""
    n, k = t.shape[-2:]
    if k < n:
        return torch.cat((t, t.new_zeros(*t.shape[:-1], n - k)), -1)
    if k == n:
        return t
    upper: Tensor = torch.linalg.qr(t.mT, mode="r")[1]
    return upper.mT


def root(P: Tensor) -> Tensor:
    """A factor of a covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(P)
    factor: Tensor = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return factor


FACTORS = Monoid(combine, name="square_root_covariances", element_ndim=2)
