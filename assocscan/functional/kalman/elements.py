"""The steps of a Kalman filter as elements of `ops.kalman`, taken about covariances near its own.

An element of Särkkä and García-Fernández says how x[t] depends on x[t−1] if that is known exactly.
Where observations have little noise, or none, this dependence may be far stronger than that of a
filter, which knows x[t−1] with an uncertainty. Products of such elements grow without bound and
lose their digits. Where H Q Hᵀ + R is singular, there is no such element.

So a step e[t] is replaced by N(Σ[t−1]) ∘ e[t] ∘ N(−Σ[t]), where N(Σ) = (I, 0, Σ, 0, 0) adds noise
of covariance Σ. In products N(−Σ) and N(Σ) cancel: but for rounding, results are the same for every
Σ. If Σ[t−1] is near the covariance P[t−1] of the filter, the element is near ((I − K H) F, K y, 0,
Fᵀ Hᵀ S⁻¹ y, Fᵀ Hᵀ S⁻¹ H F) with the filter's own K and S. Only S is inverted, as in a loop,
and products do not grow. The state is then (·, m[t], P[t] − Σ[t], ·, ·).

`nearby` finds Σ by a scan of elements about 0, with some noise added to R. What counts is that
HΣHᵀ + R is not far below H P Hᵀ + R, and that Σ is not far above P, which would cost digits of
P[t] − Σ[t]. So Σ begins with the first covariance of the filter and knows which observations are
missing. One Σ for all steps lost up to all digits after a start known far better or far worse than
what noise makes of the states, and after gaps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...engines.base.shifted_leaves import at_last_steps, edge_mask, previous_state
from ...monoids.combinators import with_lift, with_lower
from ...monoids.monoid import Monoid
from ...ops.elimination import inverse, inverse_and_logdet, solved
from ..argument_errors import named_scan

State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def observed(y: Tensor, H: Tensor, R: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The model of what was seen: the rest of y becomes 0 = 0·x + r with a variance of 1."""
    unit = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
    return (
        torch.where(seen, y, 0.0),
        torch.where(seen.unsqueeze(-1), H, 0.0),
        torch.where(both, R, unit),
    )


def unmoved(first: Tensor, F: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """F and Q, which do not act before the first observation of a sequence."""
    unit = torch.eye(F.shape[-1], dtype=F.dtype, device=F.device)
    return torch.where(first, unit, F), torch.where(first, 0.0, Q)


def reduced(P: Tensor, gain: Tensor, H: Tensor, R: Tensor) -> Tensor:
    """The covariance after an observation, (I − K H) P (I − K H)ᵀ + K R Kᵀ: Joseph's form,
    which keeps its digits where P − K H P cancels, as with small R."""
    left = P - gain @ (H @ P)
    return left - (left @ H.mT) @ gain.mT + gain @ R @ gain.mT


def element(
    y: Tensor, first: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, before: Tensor,
    after: Tensor,
) -> State:  # fmt: skip
    """One step about Σ[t−1] = before and Σ[t] = after. The first observation is in the carry: its
    element is the identity, as `before` equals `after` there."""
    y, H, R = observed(y, H, R, ~(y.isnan() | first))
    return step(y, *unmoved(first, F, Q), H, R, before, after)


def driven_element(
    y: Tensor, first: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, seen: Tensor,
    shift: Tensor, before: Tensor, after: Tensor,
) -> State:  # fmt: skip
    """`element` of a step that moves x by `shift` besides, 0 at the first. Entries of y that are
    `seen` count, NaN or not."""
    y, H, R = observed(y, H, R, seen & ~first)
    A, b, C, eta, J = step(y - H @ shift, *unmoved(first, F, Q), H, R, before, after)
    return A, b + shift, C, eta, J


def exact_element(
    y: Tensor, first: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, seen: Tensor,
    shift: Tensor, before: Tensor, after: Tensor,
) -> State:  # fmt: skip
    """`driven_element` about the filter's own covariances. C is then 0, but for derivatives and
    roundings, and products are those of a loop: m[t] = A m[t−1] + b."""
    A, b, C, eta, J = driven_element(y, first, F, H, Q, R, seen, shift, before, after)
    return A, b, C - C.detach(), eta, J


def step(
    y: Tensor, F: Tensor, Q: Tensor, H: Tensor, R: Tensor, before: Tensor, after: Tensor
) -> State:
    P = F @ before @ F.mT + Q
    precision = inverse(H @ P @ H.mT + R)
    gain = P @ H.mT @ precision
    moved = H @ F
    back = moved.mT @ precision
    return F - gain @ moved, gain @ y, reduced(P, gain, H, R) - after, back @ y, back @ moved


def distribution(state: State, xs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """m[t] and P[t]."""
    return state[1], state[2] + xs[-1]


def likelihood(
    y: Tensor, first: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, mean: Tensor, P: Tensor
) -> Tensor:
    """log p(y[t] | y before), from the distribution of x[t−1] given y before."""
    return driven_likelihood(y, first, F, H, Q, R, ~y.isnan(), None, mean, P)


def driven_likelihood(
    y: Tensor, first: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, seen: Tensor,
    shift: Tensor | None, mean: Tensor, P: Tensor,
) -> Tensor:  # fmt: skip
    """`likelihood` of a step that moves x by `shift` besides."""
    y, H, R = observed(y, H, R, seen)
    F, Q = unmoved(first, F, Q)
    moved = F @ mean if shift is None else F @ mean + shift
    error = y - H @ moved
    precision, logdet = inverse_and_logdet(H @ (F @ P @ F.mT + Q) @ H.mT + R)
    constant = torch.where(seen, math.log(2 * math.pi), torch.zeros_like(y)).sum()
    return -0.5 * ((error * (precision @ error)).sum() + logdet + constant)


def updated(
    y: Tensor, H: Tensor, R: Tensor, seen: Tensor, mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """The distribution of a state after y was observed where `seen`."""
    y, H, R = observed(y, H, R, seen)
    gain = solved(H @ covariance @ H.mT + R, H @ covariance).mT
    error = (y - apply(H, mean)).unsqueeze(-1)
    return mean + (gain @ error).squeeze(-1), reduced(covariance, gain, H, R)


def at_starts(t: Tensor, axis: int, offsets: Tensor | None) -> Tensor:
    """The leaf at the first step of each sequence [S, ...]; of an empty one, at any step."""
    return at_last_steps(t, axis, True, offsets)


def nearby(
    F: Tensor, H: Tensor, Q: Tensor, R: Tensor, covariance: Tensor, seen: Tensor,
    offsets: Tensor | None, names: Any, **engine: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Σ[t−1], Σ[t]), both [..., T, n, n].

    F, H, Q, R, covariance: as the caller gave them. seen: what was observed, [..., T, m]. Where the
    scan finds no Σ (it is NaN), Σ is 0, as in the elements of the paper.
    """
    F, H, Q, R, covariance = (t.detach() for t in (F, H, Q, R, covariance))
    n, steps, axis = F.shape[-1], seen.shape[:-1], seen.dim() - 2
    first = edge_mask(steps, axis, False, offsets, F.device).expand(steps)
    # To which the noise that is added to R is compared.
    around = recent_noise(F, Q, first, axis, offsets)
    R = torch.add(R, H @ around @ H.mT, alpha=torch.finfo(R.dtype).eps ** 0.5)
    F, H, Q, R = (t.expand(*steps, *t.shape[-2:]) for t in (F, H, Q, R))
    zero = F.new_zeros(())
    vector, matrix, zeros = zero.expand(n), zero.expand(n, n), zero.expand(F.shape)
    y = torch.where(seen, zero, math.nan)
    y0, H0, R0, seen0 = (at_starts(t, axis, offsets) for t in (y, H, R, seen))
    start = updated(y0, H0, R0, seen0, vector, covariance)[1]
    xs = y, first, F, H, Q, R, zeros, zeros
    init = matrix, vector, start, vector, matrix
    after = named_scan(names, STEP, xs, -1, init=init, offsets=offsets, **engine)[1]
    after = ((after + after.mT) / 2).nan_to_num(0.0, 0.0, 0.0)
    return previous_state(after, start, axis, False, offsets), after


def recent_noise(F: Tensor, Q: Tensor, first: Tensor, axis: int, offsets: Tensor | None) -> Tensor:
    """What the noise of the last n steps makes of a state that was known exactly: covariances
    [..., T, n, n], or [..., 1, n, n] where F and Q are the same at all steps. Of each step its own,
    so that an infinite or large noise reaches neither earlier steps nor other sequences. first: the
    first steps, whose F and Q are not read."""
    if all(t.dim() == 2 or t.shape[-3] == 1 for t in (F, Q)):
        move, noise = (t.squeeze(-3) if t.dim() > 2 else t for t in (F, Q))
        brought = noise
        for _ in range(F.shape[-1] - 1):
            brought = noise + move @ brought @ move.mT
        return brought.unsqueeze(-3)
    unread = first[..., None, None]
    move, noise = (torch.where(unread, 0.0, t) for t in (F, Q))
    brought = noise
    for _ in range(F.shape[-1] - 1):
        earlier = previous_state(brought, None, axis, False, offsets)
        brought = torch.where(unread, 0.0, noise + move @ earlier @ move.mT)
    return brought


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


NDIMS = (1, 0, 2, 2, 2, 2)
STEP, DRIVEN_STEP, EXACT_STEP = (
    Monoid(
        ops.kalman.combine, name=name, lift=lift, lower=distribution,
        element_ndim=(*NDIMS, *ndims, 2, 2),
    )
    for name, lift, ndims in (
        ("kalman_filter", element, ()), ("driven_kalman_filter", driven_element, (1, 1)),
        ("square_root_kalman_filter", exact_element, (1, 1)),
    )
)  # fmt: skip
# These give the sum and its rounding. No `lower`: the C++ runner keeps only such reductions.
LIKELIHOOD, DRIVEN_LIKELIHOOD = (
    with_lower(with_lift(ops.compensated_sum, lift, (*NDIMS, *ndims, 1, 2)), None)
    for lift, ndims in ((likelihood, ()), (driven_likelihood, (1, 1)))
)
