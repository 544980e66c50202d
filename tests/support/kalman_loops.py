"""Filters and smoothers of linear-Gaussian models as loops, in the dtype of their tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Model(NamedTuple):
    """F, H and Q are constant or have a dimension of time."""

    F: Tensor
    H: Tensor
    Q: Tensor
    R: Tensor
    mean: Tensor
    covariance: Tensor


def at(t: Tensor, step: int) -> Tensor:
    return t[step] if t.dim() == 3 else t


def filter_loop(
    y: Tensor, model: Model, observed: Tensor | None = None, shifts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Means, covariances in the form of Joseph, and the log-likelihood.

    observed: the entries of y that count; by default those that are not NaN.
    shifts: what known inputs add to the state at each step [T, n]; that of step 0 is not read.
    """
    F, H, Q, R, m, P = model
    unit = torch.eye(len(m), dtype=y.dtype)
    means, covariances, total = [], [], torch.zeros((), dtype=y.dtype)
    for t, observation in enumerate(y):
        if t:
            m, P = at(F, t) @ m, at(F, t) @ P @ at(F, t).mT + at(Q, t)
            m = m if shifts is None else m + shifts[t]
        seen = ~observation.isnan() if observed is None else observed[t]
        h, r = at(H, t)[seen], R[seen][:, seen]
        S, error = h @ P @ h.mT + r, observation[seen] - h @ m
        gain = torch.linalg.solve(S, h @ P).mT
        distance = error @ torch.linalg.solve(S, error)
        total = total - (torch.logdet(2 * math.pi * S) + distance) / 2
        left = unit - gain @ h
        m, P = m + gain @ error, left @ P @ left.mT + gain @ r @ gain.mT
        means.append(m)
        covariances.append(P)
    return torch.stack(means), torch.stack(covariances), total


def smoother_loop(
    means: Tensor, covariances: Tensor, model: Model, shifts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    m, P = [means[-1]], [covariances[-1]]
    for t in range(len(means) - 2, -1, -1):
        F, Q = at(model.F, t + 1), at(model.Q, t + 1)
        predicted = F @ covariances[t] @ F.mT + Q
        gain = torch.linalg.solve(predicted, F @ covariances[t]).mT
        moved = F @ means[t] if shifts is None else F @ means[t] + shifts[t + 1]
        m.append(means[t] + gain @ (m[-1] - moved))
        P.append(covariances[t] + gain @ (P[-1] - predicted) @ gain.mT)
    return torch.stack(m[::-1]), torch.stack(P[::-1])


def innovations_smoother(y: Tensor, model: Model) -> tuple[Tensor, Tensor]:
    """The smoother of Bryson and Frazier, which inverts no covariance of states. Without gaps."""
    F, H, Q, R, start, P = model
    means, covariances, _ = filter_loop(y, model)
    unit = torch.eye(len(start), dtype=y.dtype)
    after, spread = torch.zeros_like(start), torch.zeros_like(P)
    smoothed = []
    for t in range(len(y) - 1, -1, -1):
        m, P = means[t], covariances[t]
        smoothed.append((m - P @ after, P - P @ spread @ P))
        before, known = (F @ means[t - 1], F @ covariances[t - 1] @ F.mT + Q) if t else model[4:]
        S = torch.linalg.inv(H @ known @ H.mT + R)
        rest = unit - known @ H.mT @ S @ H
        spread = F.mT @ (H.mT @ S @ H + rest.mT @ spread @ rest) @ F
        after = F.mT @ (rest.mT @ after - H.mT @ S @ (y[t] - H @ before))
    return tuple(torch.stack(part) for part in zip(*smoothed[::-1], strict=True))


def in_long_double(y: Tensor, model: Model, dtype: type = np.longdouble) -> tuple[Any, Any]:
    """The smoother's means and covariances, of a constant model with one number per observation."""
    F, H, Q, R, m, P = (t.numpy().astype(dtype) for t in model)
    unit = np.eye(len(m), dtype=dtype)
    means, covariances = [], []
    for t, observed in enumerate(y[:, 0].numpy().astype(dtype)):
        if t:
            m, P = F @ m, F @ P @ F.T + Q
        gain = (P @ H.T) / (H @ P @ H.T + R)
        m, left = m + gain[:, 0] * (observed - (H @ m)[0]), unit - gain @ H
        P = left @ P @ left.T + gain @ R @ gain.T
        means.append(m)
        covariances.append(P)
    for t in reversed(range(len(means) - 1)):
        ahead = F @ covariances[t] @ F.T + Q
        (a, b), (c, d) = ahead  # numpy solves nothing in long double
        gain = covariances[t] @ F.T @ np.array([[d, -b], [-c, a]]) / (a * d - b * c)
        change, spread = means[t + 1] - F @ means[t], covariances[t + 1] - ahead
        means[t] = means[t] + gain @ change
        covariances[t] = covariances[t] + gain @ spread @ gain.T
    return np.array(means), np.array(covariances)
