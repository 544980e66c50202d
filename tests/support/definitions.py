"""What the operators compute, written out: from x[0 … t] of every leaf to the output at t."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def met_last(x: Tensor, index: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """`best` and the index of the last x that equals it or is NaN."""
    steps = torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1))
    last = torch.where((x == best) | x.isnan(), steps, -1).amax(0, keepdim=True)
    return best, index.gather(0, last)[0]


def product_of_matrices(a: Tensor) -> Tensor:
    total = a[0]
    for matrix in a[1:]:
        total = matrix @ total
    return total


def affine_loop(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = b[0]
    for s in range(1, len(b)):
        h = a[s] * h + b[s]
    return a.prod(0), h


def matrix_affine_loop(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = b[0]
    for matrix, shift in zip(a[1:], b[1:], strict=True):
        h = (matrix @ h[..., None])[..., 0] + shift
    return product_of_matrices(a), h


def xor_loop(x: Tensor) -> Tensor:
    total = x[0]
    for value in x[1:]:
        total = total ^ value
    return total


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(0), (x - x.mean(0)).abs().square().mean(0)


def log_affine_loop(a: Tensor, b: Tensor) -> Pair:
    h = torch.zeros_like(b[0])
    for gate, value in zip(a, b, strict=True):
        h = gate.exp() * h + value.exp()
    return a.sum(0), h.log()


def max_affine_loop(a: Tensor, b: Tensor) -> Pair:
    h = b[0]
    for s in range(1, len(b)):
        h = torch.maximum(a[s] + h, b[s])
    return a.sum(0), h


def signed_log_total(size: Tensor, sign: Tensor) -> Pair:
    total = (sign * size.exp()).sum(0)
    return total.abs().log(), torch.where(total < 0, -1, 1).to(sign.dtype)


def log_matrix_product(weights: Tensor) -> Tensor:
    total = weights[0].exp()
    for matrix in weights[1:]:
        total = total @ matrix.exp()
    return total.log()


def heaviest_paths(weights: Tensor) -> Tensor:
    best = weights[0]
    for matrix in weights[1:]:
        best = torch.stack(
            [(best + matrix[..., :, j].unsqueeze(-2)).amax(-1) for j in range(matrix.shape[-1])], -1
        )
    return best


def recurrence_of_order(c: Tensor, x: Tensor) -> Tensor:
    y: list[Tensor] = []
    for t in range(len(x)):
        past = [c[t, ..., k] * y[t - 1 - k] for k in range(min(t, c.shape[-1]))]
        y.append(x[t] + sum(past))
    return y[-1]


def rotation_matrix(q: Tensor) -> Tensor:
    """Of unit quaternions."""
    w, x, y, z = q.unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def left_multiplication(q: Tensor) -> Tensor:
    """The matrix of p ↦ q p."""
    w, x, y, z = q.unbind(-1)
    rows = [[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def quaternion_product(q: Tensor) -> Tensor:
    total = q[-1]
    for turn in q[:-1].flip(0):
        total = (left_multiplication(turn) @ total[..., None])[..., 0]
    return total


def motion(q: Tensor, p: Tensor) -> Pair:
    """The last joint's frame, from the end of the arm to its base."""
    point = p[-1]
    for turn, step in zip(q[:-1].flip(0), p[:-1].flip(0), strict=True):
        point = (rotation_matrix(turn) @ point[..., None])[..., 0] + step
    return quaternion_product(q), point


def covariance_of(x: Tensor, y: Tensor) -> Triple:
    m, k = x.mean(0), y.mean(0)
    return m, k, ((x - m) * (y - k)).mean(0)


def weights_of(decay: Tensor) -> Tensor:
    """The product of the decays after each step."""
    return torch.stack([decay[s + 1 :].prod(0) for s in range(len(decay))])


def weighted_moments(x: Tensor, decay: Tensor) -> Pair:
    w = weights_of(decay)
    mean = (w * x).sum(0) / w.sum(0)
    return mean, (w * (x - mean).square()).sum(0) / w.sum(0)


def softmax_sums(x: Tensor) -> Pair:
    high = x.amax(0)
    return high, torch.where(x == -torch.inf, 0, (x - high).exp()).sum(0)


def attention(x: Tensor, v: Tensor) -> Tensor:
    return (x.softmax(0)[..., None] * torch.where(x[..., None] == -torch.inf, 0, v)).sum(0)


def scalar_filter(*element: Tensor) -> Pair:
    a, b, c, eta, j = (t[..., None] for t in element)
    mean, covariance = gaussian_filter(a[..., None], b, c[..., None], eta, j[..., None])
    return mean[..., 0], covariance[..., 0, 0]


def gaussian_filter(A: Tensor, b: Tensor, C: Tensor, eta: Tensor, J: Tensor) -> Pair:
    """Step by step from the state 0: weigh it by its likelihood, then move it."""
    m, P = torch.zeros_like(b[0]), torch.zeros_like(C[0])
    unit = torch.eye(b.shape[-1], dtype=b.dtype)
    for t in range(len(b)):
        known = torch.linalg.inv(unit + P @ J[t])
        m = (known @ (m + (P @ eta[t][..., None])[..., 0])[..., None])[..., 0]
        m = (A[t] @ m[..., None])[..., 0] + b[t]
        P = A[t] @ known @ P @ A[t].mT + C[t]
    return m, P


def backward_moments(E: Tensor, g: Tensor, L: Tensor) -> Pair:
    mean, covariance = g[0], L[0]
    for t in range(1, len(g)):
        mean = (E[t] @ mean[..., None])[..., 0] + g[t]
        covariance = E[t] @ covariance @ E[t].mT + L[t]
    return mean, covariance


def machine(maps: Tensor) -> Tensor:
    state = torch.arange(maps.shape[-1]).expand(maps.shape[1:])
    for step in maps:
        state = step.gather(-1, state)
    return state


def unmatched(x: Tensor) -> Pair:
    closing = opened = torch.zeros_like(x[0])
    for symbol in x:
        lacking = (symbol < 0) & (opened == 0)
        closing = closing + lacking.to(x.dtype)
        opened = opened + (symbol > 0).to(x.dtype) - ((symbol < 0) & ~lacking).to(x.dtype)
    return closing, opened


def best_stretch(x: Tensor) -> Tensor:
    sums = [x[i : j + 1].sum(0) for i in range(len(x)) for j in range(i, len(x))]
    return torch.stack(sums).amax(0)


def filled(x: Tensor, valid: Tensor) -> Pair:
    value, known = torch.zeros_like(x[0]), torch.zeros_like(valid[0])
    for number, here in zip(x, valid, strict=True):
        value, known = torch.where(here, number, value), known | here
    return value, known
