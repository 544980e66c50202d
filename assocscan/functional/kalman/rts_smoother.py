"""The smoother of Rauch, Tung and Striebel, in parallel over time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...api.flags_and_backends import checked_backend
from ...api.tensor_subclasses import overridable, takes_parts
from ...engines.base.shifted_leaves import edge_mask
from ...monoids.call_errors import checked_call
from ...ops.elimination import solved
from ...torch_state import in_own_dtype, loadable
from ..argument_errors import check_floats, named_scan
from ..operands import checked_offsets, expanded_elements, wide_on_cpus
from .elements import apply, recent_noise
from .kalman_filter import check_controls, check_solvable, shifts, side

__all__ = ["SmootherResult", "rts_smoother"]


@loadable
@takes_parts
class SmootherResult(NamedTuple):
    """What `rts_smoother` returns: mean [..., T, n] and covariance [..., T, n, n]."""

    mean: Tensor
    covariance: Tensor


@overridable
@in_own_dtype
@checked_call
def rts_smoother(
    mean: Tensor,
    covariance: Tensor,
    F: Tensor,
    Q: Tensor,
    *,
    controls: Tensor | None = None,
    B: Tensor | None = None,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> SmootherResult:
    """The distribution of x[t] given all y, from that of the filter.

    >>> import torch, assocscan
    >>> y, one = torch.tensor([[1.0], [2.0], [3.0]]), torch.ones(1, 1)
    >>> m, P, _ = assocscan.kalman_filter(y, one, one, one, one, torch.zeros(1), one)
    >>> assocscan.rts_smoother(m, P, one, one).mean[:, 0]
    tensor([0.9231, 1.7692, 2.3846])

    All tensors have one dtype, float32 or float64, for T ≥ 1 steps and n states:

    mean, covariance: [..., T, n] and [..., T, n, n], as `kalman_filter` returned them.
    F, Q: as `kalman_filter` was given them: [n, n]; [T, n, n] where they change in time;
        [..., 1, n, n] where they differ between series; [..., T, n, n] for both. [B, n, n] is read
        as [T, n, n]. F[t] and Q[t] lead from x[t−1] to x[t]; F[0] and Q[0] are not read.
    controls, B: as the filter was given them, where it was, in any of its shapes.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along T, where the filter
        was given them.

    Returns, in the shapes and the dtype of the arguments of these names:

    mean: [..., T, n], of x[t] given y[0], …, y[T−1].
    covariance: [..., T, n, n], of the same.

    Differentiable in all of them.

    Numbers: CPUs compute float32 in float64. After a start of which little was known, covariances
    keep more digits than a loop's, which subtracts. Where observations are exact and Q is singular
    (models of type ARMA), gains grow going back, and a loop may amplify rounding errors without
    bound. Here no variance is taken for smaller than rounding errors: means keep about half their
    digits, covariances may keep none. For such models use float64, and the covariances of the
    filter.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of one dtype, float32 or float64.
        ValueError: shapes do not fit, or one of `controls` and B is missing.

    Cost per step: 6n³ flops in the scan, and one solution of a linear system of size n. Gradients
    are generated up to n = 7 on CPUs, from n = 4 on as loops along each series, and up to n = 3 on
    GPUs; beyond they run eagerly, with a warning.

    Source: as `kalman_filter`; H. E. Rauch, F. Tung, C. T. Striebel, "Maximum likelihood estimates
    of linear dynamic systems", AIAA Journal 3(8), 1965.
    """
    checked_backend(backend, deterministic)
    check_floats("mean", mean, F=F, Q=Q, covariance=covariance)
    check_controls("mean", mean, controls, B)
    check_solvable("mean", mean)
    side("F", F), side("Q", Q)
    dtype, wide = mean.dtype, wide_on_cpus(mean, backend)
    mean, covariance, F, Q = (t.to(wide) for t in (mean, covariance, F, Q))
    batch, n = tuple(mean.shape[:-1]), mean.shape[-1]
    of_mean = {"n": "mean"}
    covariance = expanded_elements(covariance, batch, (n, n), "covariance", of_mean, in_time=True)
    axis = len(batch) - 1
    sequences = checked_offsets(offsets, mean, axis)
    first, last = (edge_mask(batch, axis, end, sequences, mean.device) for end in (False, True))
    shift = shifts(controls, B, mean, first.expand(batch), n)
    for name, t in (("F", F), ("Q", Q)):
        expanded_elements(t, batch, (n, n), name, of_mean, in_time=True)
    brought = recent_noise(F.detach(), Q.detach(), first.expand(batch), axis, sequences)
    F, Q = (leading_on(t, last).expand(*batch, n, n) for t in (F, Q))
    gain = solved(regular(F @ covariance @ F.mT + Q, mean, brought), F @ covariance).mT
    gain = torch.where(last[..., None, None], 0, gain)
    predicted = apply(F, mean)
    if shift is not None:
        predicted = predicted + shift.roll(-1, -2)
    # The scan is over the difference from the filter's means. Where observations are exact it is 0,
    # while products of gains, by which means would be multiplied, may grow without bound.
    surprise = torch.where(last.unsqueeze(-1), 0.0, mean.roll(-1, -2) - predicted)
    # Joseph's form of (I − G F) P, whose digits the difference would lose after a wide start.
    left = torch.eye(n, dtype=wide, device=mean.device) - gain @ F
    spread = left @ covariance @ left.mT + gain @ Q @ gain.mT
    xs = gain, apply(gain, surprise), spread
    distance, smoothed = named_scan(
        SMOOTHED, ops.rts, xs, -1, reverse=True,
        offsets=sequences, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return SmootherResult((mean + distance).to(dtype), smoothed.to(dtype))


def leading_on(t: Tensor, last: Tensor) -> Tensor:
    """The matrix that leads on from each state, in place of that which leads to it. From the last
    state of a sequence none leads on: what stands there is not read."""
    if t.dim() == 2:
        return t
    unit = torch.eye(t.shape[-1], dtype=t.dtype, device=t.device)
    return torch.where(last[..., None, None], unit, t.roll(-1, -3))


def regular(S: Tensor, mean: Tensor, brought: Tensor) -> Tensor:
    """Covariances S [..., T, n, n] of states with the means [..., T, n], plus a little noise: where
    S has no inverse, or is smaller than rounding errors.

    As where observations are exact and Q is singular too: S G = F P then has several solutions, any
    of which gives the same result, and the noise chooses a small one. Between states that are all
    but exact gains grow going back, and amplify the rounding errors of means. So a variance is at
    least that of such an error. The filter's rounding errors are those of the covariance that noise
    `brought` in few steps. If any variance of the series is below them, all are at least as large.
    """
    n, S_ = S.shape[-1], S.detach()
    variances, exact = S_.diagonal(0, -2, -1), torch.finfo(torch.float64).eps
    noise = 4 * n * torch.finfo(S.dtype).eps * variances
    noise = torch.where(variances > 0, noise, 1.0)
    singular = torch.linalg.cholesky_ex(S_ - torch.diag_embed(noise))[1] > 0
    floor = (100 * exact * mean.detach().abs().amax(-2, keepdim=True)) ** 2
    rounding = 4 * n * exact * brought.diagonal(0, -2, -1).amax(-2, keepdim=True)
    doubtful = singular | (variances < rounding).any(-1)
    floor = torch.where(
        doubtful.any(-1, keepdim=True).unsqueeze(-1), torch.maximum(floor, rounding), floor
    ).nan_to_num(0.0, 0.0, 0.0)
    more = torch.where(singular.unsqueeze(-1), noise, 0.0) + floor
    return S + torch.diag_embed(more)


# What the first leaf of the scan, which is computed from all arguments, was passed as.
SMOOTHED = {"xs": "mean"}
