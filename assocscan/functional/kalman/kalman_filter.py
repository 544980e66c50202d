"""Linear-Gaussian state-space models: the Kalman filter in parallel over time.

    x[t] = F x[t−1] + B u[t] + q,  q ~ N(0, Q)          y[t] = H x[t] + r,  r ~ N(0, R)

Shapes: y [..., T, m], F and Q [n, n], H [m, n], R [m, m], or any of these with leading dimensions
that broadcast to those of y (so [T, n, n] varies in time: F[t] and Q[t] lead to x[t]). Where there
are controls u, or a mask of what was observed, the elements have one leaf more for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable, takes_parts
from ...engines.base.shifted_leaves import carry_shape, edge_mask, previous_state
from ...errors import ScanTypeError, ScanValueError
from ...monoids.call_errors import checked_call
from ...torch_state import in_own_dtype, loadable
from ..argument_errors import check_floats, check_mask, named_reduce, named_scan
from ..operands import checked_offsets, expanded_elements, wide_on_cpus
from .elements import (
    DRIVEN_LIKELIHOOD,
    DRIVEN_STEP,
    EXACT_STEP,
    LIKELIHOOD,
    STEP,
    apply,
    at_starts,
    nearby,
    updated,
)
from .square_root import about_roots

__all__ = ["KalmanResult", "kalman_filter"]


@loadable
@takes_parts
class KalmanResult(NamedTuple):
    """What `kalman_filter` returns: mean [..., T, n], covariance [..., T, n, n], and
    log_likelihood [...]."""

    mean: Tensor
    covariance: Tensor
    log_likelihood: Tensor


@overridable
@in_own_dtype
@checked_call
def kalman_filter(
    y: Tensor,
    F: Tensor,
    H: Tensor,
    Q: Tensor,
    R: Tensor,
    mean: Tensor,
    covariance: Tensor,
    *,
    controls: Tensor | None = None,
    B: Tensor | None = None,
    observed: Tensor | None = None,
    square_root: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> KalmanResult:
    """The distribution of x[t] given y[0], …, y[t], for all t at once.

        x[t] = F[t] x[t−1] + B[t] controls[t] + N(0, Q[t])   for t ≥ 1,   x[0] ~ N(mean, covariance)
        y[t] = H[t] x[t] + N(0, R[t])                        for t ≥ 0

    >>> import torch, assocscan
    >>> y = torch.tensor([[1.0], [2.0], [float("nan")], [3.0]])
    >>> one = torch.ones(1, 1)
    >>> m, P, log_likelihood = assocscan.kalman_filter(y, one, one, one, one, torch.zeros(1), one)
    >>> m[:, 0]
    tensor([0.5000, 1.4000, 1.4000, 2.5556])

    Observations that are missing may be NaN, as above, or be named by a mask:

    >>> seen = torch.tensor([True, True, False, True])
    >>> start = torch.zeros(1), one
    >>> assocscan.kalman_filter(y, one, one, one, one, *start, observed=seen).mean[:, 0]
    tensor([0.5000, 1.4000, 1.4000, 2.5556])

    What is known to move the state, as what a motor was told to do:

    >>> u = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    >>> assocscan.kalman_filter(y, one, one, one, one, *start, controls=u, B=one).mean[:, 0]
    tensor([0.5000, 1.8000, 2.8000, 3.2222])

    All tensors have one dtype, float32 or float64, for T ≥ 1 steps, n states, m observed numbers
    and k controls:

    y: [..., T, m]. An entry that is NaN was not observed; a row of NaN is a step without any.
    F: [n, n], leading from x[t−1] to x[t]. F[0] is not read.
    H: [m, n]; y[t] is H x[t].
    Q: [n, n], the covariance of the noise on the way from x[t−1] to x[t]. Q[0] is not read.
    R: [m, m], the covariance of the noise of y[t].
    mean, covariance: [n] or [..., n], and [n, n] or [..., n, n]: the distribution of x[0] before
        y[0] is seen (a1 and P1 of Durbin and Koopman). To go on with later observations: F m and
        F P Fᵀ + Q of the last m and P.
    controls: [T, k], or [..., T, k] as y, known inputs. controls[t] acts on the way from x[t−1] to
        x[t], as F[t] does; controls[0] is not read. Inputs that add D u[t] to y[t]: pass y − D u.
    B: [n, k], what controls do to the state; given with `controls`.
    observed: bool, [..., T] as y without its last dimension, for whole rows, or else a shape that
        broadcasts to y. False: not observed, whatever y holds there. With it a NaN of y that was
        observed makes means NaN from its step on; without it NaN means "not observed".
    square_root: compute covariances as products of factors (see "Numbers").
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along T. mean is then
        [S, ..., n], covariance [S, ..., n, n], or both without S if all begin alike, which is meant
        where both fit; F, Q and controls of the first step of each sequence are not read. Models
        that differ between sequences are passed for every step, as [T, n, n].

    F, H, Q, R and B may change in time, F as [T, n, n]; differ between series, F as [..., 1, n, n];
    or both, F as [..., T, n, n]. [B, n, n] is read as [T, n, n]. Returns, in the dtype of y:

    mean: [..., T, n], of x[t] given y[0], …, y[t].
    covariance: [..., T, n, n], of the same.
    log_likelihood: [...], log p(y[0], …, y[T−1]) of what was observed; [S, ...] with `offsets`.

    Elements are made of the model inside the kernel: constant F, H, Q and R cost no memory per
    step. Differentiable in everything, so that the log-likelihood can be maximised. Q, R and
    covariance are symmetric: of a gradient G only G + Gᵀ has a meaning, of second derivatives only
    those along symmetric changes. Make them of parameters, as L @ L.mT.

    Numbers: R may be 0 or singular (exact observations, ARMA models) if the noise Q makes what is
    observed uncertain: H P Hᵀ + R is invertible, P being the covariance that n steps of Q make of a
    state that was known exactly. Otherwise results are NaN, in early steps too, also where a wide
    `covariance` lets a loop through its first steps. CPUs compute float32 filters in float64. GPUs
    compute float32 in float32: errors are a loop's or smaller, but where a state about which
    nothing is known stays unobserved at first, and is then observed precisely, they may be hundreds
    of times larger. Pass float64 there. In float64 covariances are off by up to 1e-9 of their
    size where Q is 10¹⁵ times R.

    With `square_root`, covariances are exactly symmetric, and positive semidefinite but for the
    rounding of their entries, also where the greatest variance is 10⁸ times the least. Factors are
    computed in float64. The eager engine scans the factors, whatever the backend, in some 20 times
    the time. H Q[t] Hᵀ + R has to be invertible at every step.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one dtype, float32 or float64, `observed` not one
            of bool, or `square_root` no bool.
        ValueError: shapes do not fit, or one of `controls` and B is missing.

    Cost per step: two scans with about 20 n³ flops and one inverse each of size n and m per step
    (generated for both up to 4, run eagerly beyond). Gradients are generated up to n = 4 on CPUs,
    from n = 3 on as loops along each series. On GPUs they are generated up to n = 3: n = 4 is run
    eagerly, with a warning, and takes up to a hundred times as long.

    Source: S. Särkkä and Á. F. García-Fernández, "Temporal parallelization of Bayesian smoothers",
    IEEE Transactions on Automatic Control 66(1), 2021; J. Durbin and S. J. Koopman, "Time Series
    Analysis by State Space Methods", 2nd ed., 2012, sections 4.3, 4.10 and 7.2.
    """
    checked_backend(backend, deterministic)
    by_factors = flag("square_root", square_root)
    check_floats("y", y, F=F, H=H, Q=Q, R=R, mean=mean, covariance=covariance)
    check_controls("y", y, controls, B)
    check_solvable("y", y)
    dtype, wide = y.dtype, wide_on_cpus(y, backend)
    y, F, H, Q, R, mean, covariance = (t.to(wide) for t in (y, F, H, Q, R, mean, covariance))
    batch, T, m = tuple(y.shape[:-2]), y.shape[-2], y.shape[-1]
    n = side("F", F)
    steps, model = (*batch, T), (F, H, Q, R, covariance)
    of_state, of_rows = {"n": "F"}, {"m": "y"}
    F = expanded_elements(F, steps, (n, n), "F", of_state, in_time=True)
    Q = expanded_elements(Q, steps, (n, n), "Q", of_state, in_time=True)
    H = expanded_elements(H, steps, (m, n), "H", of_rows | of_state, in_time=True)
    R = expanded_elements(R, steps, (m, m), "R", of_rows, in_time=True)
    axis = len(batch)
    sequences = checked_offsets(offsets, y, axis)
    starts = tuple(carry_shape(y[..., 0], axis, sequences))
    mean = expanded_elements(mean, starts, (n,), "mean", of_state)
    covariance = expanded_elements(covariance, starts, (n, n), "covariance", of_state)
    first = edge_mask(steps, axis, False, sequences, y.device).expand(steps)
    shift = shifts(controls, B, y, first, n)
    zero = y.new_zeros(())
    mask = None if observed is None else mask_of(observed, y)
    seen = ~y.isnan() if mask is None else mask
    y0, H0, R0, seen0 = (at_starts(t, axis, sequences) for t in (y, H, R, seen))
    start, spread = updated(y0, H0, R0, seen0, mean, covariance)
    engine: Any = {"offsets": sequences, "backend": backend, "deterministic": deterministic}
    if by_factors:
        near = about_roots(F, H, Q, R, covariance, seen, first, sequences)
        rest = spread - spread.detach()
    else:
        near = nearby(*model, seen, names=FILTERED, **engine)
        rest = spread - at_starts(near[1], axis, sequences)
    init = zero.expand(n, n), start, rest, zero.expand(n), zero.expand(n, n)
    xs: tuple[Tensor, ...] = y, first, F, H, Q, R
    step, likelihood = STEP, LIKELIHOOD
    if by_factors or mask is not None or shift is not None:
        step, likelihood = EXACT_STEP if by_factors else DRIVEN_STEP, DRIVEN_LIKELIHOOD
        xs = *xs, seen, zero.expand(*steps, n) if shift is None else shift
    means, covariances = named_scan(FILTERED, step, (*xs, *near), -1, init=init, **engine)
    before = previous_state(means, mean, axis, False, sequences)
    known = previous_state(covariances, covariance, axis, False, sequences)
    total, rounding = named_reduce(FILTERED, likelihood, (*xs, before, known), -1, **engine)
    return KalmanResult(*(t.to(dtype) for t in (means, covariances, total + rounding)))


# What the leaves of the scans were passed as.
FILTERED = {
    "xs": "y", "xs[2]": "F", "xs[3]": "H", "xs[4]": "Q", "xs[5]": "R",
    "init[1]": "mean", "init[2]": "covariance",
}  # fmt: skip


def mask_of(observed: Tensor, y: Tensor) -> Tensor:
    """Which entries of y were observed. In the shape of y without its last dimension, the mask
    speaks of whole rows."""
    check_mask("observed", observed, y, "y")
    if observed.shape == y.shape[:-1]:
        observed = observed.unsqueeze(-1)
    try:
        return observed.expand(y.shape)
    except RuntimeError:
        raise ScanValueError(
            f"observed has shape {list(observed.shape)}, expected {list(y.shape[:-1])}, for whole "
            f"rows of y, or a shape that broadcasts to that of y, {list(y.shape)}"
        ) from None


def check_controls(name: str, series: Tensor, controls: Tensor | None, B: Tensor | None) -> None:
    """Raise unless both or none are given, and have the dtype of the series, called `name`."""
    if controls is None and B is None:
        return
    if controls is None or B is None:
        missing = "controls" if controls is None else "B"
        raise ScanValueError(
            f"{missing} is missing: the model has B controls[t]; pass both or none"
        )
    check_floats(name, series, controls=controls, B=B)


def shifts(
    controls: Tensor | None, B: Tensor | None, series: Tensor, first: Tensor, n: int
) -> Tensor | None:
    """B[t] controls[t] at each step of the series [..., T, n], in its dtype; 0 where `first` is
    True, as no step leads there. None without controls."""
    if controls is None or B is None:
        return None
    controls, B = controls.to(series.dtype), B.to(series.dtype)
    if controls.dim() == 0 or controls.shape[-1] == 0:
        raise ScanValueError(
            f"controls has shape {list(controls.shape)}, expected [..., T, k] with k ≥ 1"
        )
    steps, k = tuple(series.shape[:-1]), controls.shape[-1]
    controls = expanded_elements(controls, steps, (k,), "controls", {"k": ""}, in_time=True)
    controls = torch.where(first.unsqueeze(-1), 0.0, controls)
    sizes = {"n": "F", "k": "controls"}
    expanded = expanded_elements(B, steps, (n, k), "B", sizes, in_time=True)
    return controls @ B.mT if B.dim() == 2 else apply(expanded, controls)


def check_solvable(name: str, t: Tensor) -> None:
    if t.dtype not in (torch.float32, torch.float64):
        raise ScanTypeError(f"{name} has dtype {t.dtype}, expected torch.float32 or torch.float64")


def side(name: str, t: Tensor) -> int:
    """n of a matrix [..., n, n]."""
    if t.dim() < 2 or t.shape[-1] == 0 or t.shape[-1] != t.shape[-2]:
        raise ScanValueError(f"{name} has shape {list(t.shape)}, expected [..., n, n] with n ≥ 1")
    return t.shape[-1]
