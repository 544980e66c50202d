"""Linear-Gaussian state-space models: the Kalman filter in parallel over time.

    x[t] = F x[t−1] + q,  q ~ N(0, Q)          y[t] = H x[t] + r,  r ~ N(0, R)

Shapes: y [..., T, m], F and Q [n, n], H [m, n], R [m, m], or any of these with leading dimensions
that broadcast to those of y (so [T, n, n] varies in time: F[t] and Q[t] lead to x[t]).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.tensor_subclasses import overridable, takes_parts
from ...engines.base.shifted_leaves import carry_shape, edge_mask, previous_state
from ...errors import ScanTypeError, ScanValueError
from ..argument_errors import check_floats, named_reduce, named_scan
from ..operands import checked_offsets, expanded_elements
from .elements import LIKELIHOOD, STEP, at_starts, nearby, updated

__all__ = ["KalmanResult", "kalman_filter"]


@takes_parts
class KalmanResult(NamedTuple):
    """What `kalman_filter` returns, in the shapes [..., T, n], [..., T, n, n] and [...]."""

    mean: Tensor
    covariance: Tensor
    log_likelihood: Tensor


@overridable
def kalman_filter(
    y: Tensor,
    F: Tensor,
    H: Tensor,
    Q: Tensor,
    R: Tensor,
    mean: Tensor,
    covariance: Tensor,
    *,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> KalmanResult:
    """The distribution of x[t] given y[0], …, y[t], for all t at once.

    >>> import torch, assocscan
    >>> y = torch.tensor([[1.0], [2.0], [float("nan")], [3.0]])
    >>> one = torch.ones(1, 1)
    >>> m, P, log_likelihood = assocscan.kalman_filter(y, one, one, one, one, torch.zeros(1), one)
    >>> m[:, 0]
    tensor([0.5000, 1.4000, 1.4000, 2.5556])

    `mean` [..., n] and `covariance` [..., n, n] are those of x[0] before y[0] is seen (a1 and P1 of
    Durbin and Koopman). Entries of y that are NaN were not observed. Elements are made of the model
    inside the kernel: constant F, H, Q and R cost no memory per step. Differentiable in everything,
    so that the log-likelihood can be maximised. float32 or float64.

    Numbers: R may be 0 or singular (exact observations, ARMA models), if the noise Q of the last n
    steps makes H P Hᵀ + R invertible; where it does not, results are NaN, also in early steps,
    for which a wide `covariance` is enough in a loop. Errors are within ten times those of a loop
    in Joseph's form for most models. In float32 they are larger after gaps of hundreds of steps, in
    which variances grow to 10⁵ times that of the noise: such series want float64.

    Returns (mean, covariance, log_likelihood), the last summed over time.

    With `offsets`, sequences packed along T, `mean` is [S, ..., n] and `covariance` [S, ..., n, n],
    or both without S if all begin alike, and the log-likelihood [S, ...].

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one floating dtype.
        ValueError: shapes do not fit.

    Cost per step: about 20 n³ flops and one inverse each of size n and m in the scan (generated for
    both up to 4, run eagerly beyond).

    Source: S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers",
    IEEE Transactions on Automatic Control 66(1), 2021; J. Durbin and S. J. Koopman, "Time Series
    Analysis by State Space Methods", 2nd ed., 2012, sections 4.3, 4.10 and 7.2.
    """
    check_floats("y", y, F=F, H=H, Q=Q, R=R, mean=mean, covariance=covariance)
    check_solvable("y", y)
    batch, T, m = tuple(y.shape[:-2]), y.shape[-2], y.shape[-1]
    n = side("F", F)
    steps, model = (*batch, T), (F, H, Q, R, covariance)
    F, Q = expanded_elements(F, steps, (n, n), "F"), expanded_elements(Q, steps, (n, n), "Q")
    H, R = expanded_elements(H, steps, (m, n), "H"), expanded_elements(R, steps, (m, m), "R")
    axis = len(batch)
    sequences = checked_offsets(offsets, y, axis)
    starts = tuple(carry_shape(y[..., 0], axis, sequences))
    mean = expanded_elements(mean, starts, (n,), "mean")
    covariance = expanded_elements(covariance, starts, (n, n), "covariance")
    first = edge_mask(steps, axis, False, sequences, y.device).expand(steps)
    zero = y.new_zeros(())
    y0, H0, R0 = (at_starts(t, axis, sequences) for t in (y, H, R))
    start, spread = updated(y0, H0, R0, mean, covariance)
    engine: Any = {"offsets": sequences, "backend": backend, "deterministic": deterministic}
    around = nearby(*model, T, axis, names=FILTERED, **engine)
    near = [t.expand(*steps, n, n) for t in around]
    nothing = zero.expand(n), zero.expand(n, n)
    init = (zero.expand(n, n), start, spread - at_starts(near[1], axis, sequences), *nothing)
    xs = y, first, F, H, Q, R
    means, covariances = named_scan(FILTERED, STEP, (*xs, *near), -1, init=init, **engine)
    before = previous_state(means, mean, axis, False, sequences)
    known = previous_state(covariances, covariance, axis, False, sequences)
    total, rounding = named_reduce(FILTERED, LIKELIHOOD, (*xs, before, known), -1, **engine)
    return KalmanResult(means, covariances, total + rounding)


# What the leaves of the scans were passed as.
FILTERED = {
    "xs": "y", "xs[2]": "F", "xs[3]": "H", "xs[4]": "Q", "xs[5]": "R",
    "init[1]": "mean", "init[2]": "covariance",
}  # fmt: skip


def check_solvable(name: str, t: Tensor) -> None:
    if t.dtype not in (torch.float32, torch.float64):
        raise ScanTypeError(f"{name} has dtype {t.dtype}, expected torch.float32 or torch.float64")


def side(name: str, t: Tensor) -> int:
    """n of a matrix [..., n, n]."""
    if t.dim() < 2 or t.shape[-1] == 0 or t.shape[-1] != t.shape[-2]:
        raise ScanValueError(f"{name} has shape {list(t.shape)}, expected [..., n, n] with n ≥ 1")
    return t.shape[-1]
