"""The selective scan and the Mamba block as loops over the steps, and arguments for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]
F64 = torch.float64
OPTIONAL = ("D", "z", "delta_bias")


def draw(
    batch: int = 2, steps: int = 5, channels: int = 6, states: int = 2, groups: int = 0,
    optional: tuple[str, ...] = OPTIONAL, init: bool = True, sequences: int = 0, seed: int = 0,
) -> Tensors:  # fmt: skip
    """Arguments in float64; B and C [batch, L, N] where groups is 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    series = (batch, steps, channels)
    mixed = (batch, steps, groups, states) if groups else (batch, steps, states)
    found = {
        "u": normal(*series),
        "delta": normal(*series),
        "A": -torch.exp(normal(channels, states)),
        "B": normal(*mixed),
        "C": normal(*mixed),
        "D": normal(channels),
        "z": normal(*series),
        "delta_bias": normal(channels),
    }
    found = {name: t for name, t in found.items() if name not in OPTIONAL or name in optional}
    if init:
        state = (batch, channels, states)
        found["init"] = normal(*((sequences, *state) if sequences else state))
    return found


def selective_loop(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    init: Tensor | None = None,
    offsets: Iterable[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the last states; with offsets those of each sequence, [S, batch, channels, N]."""
    if offsets is not None:
        bounds = list(map(int, offsets))
        parts = []
        for s in range(len(bounds) - 1):
            cut = slice(bounds[s], bounds[s + 1])
            steps = [t if t is None else t[:, cut] for t in (u, delta, B, C, z)]
            first = None if init is None else init[s]
            parts.append(
                selective_loop(
                    steps[0], steps[1], A, steps[2], steps[3], D, steps[4], delta_bias,
                    delta_softplus, first,
                )
            )  # fmt: skip
        return torch.cat([y for y, _ in parts], 1), torch.stack([h for _, h in parts])
    channels = u.shape[2]
    delta = delta if delta_bias is None else delta + delta_bias
    delta = torch.log1p(delta.exp()) if delta_softplus else delta
    B, C = (t if t.dim() == 4 else t[:, :, None] for t in (B, C))
    B, C = (t[:, :, torch.arange(channels) // (channels // t.shape[2])] for t in (B, C))
    h = u.new_zeros(u.shape[0], channels, A.shape[1]) if init is None else init
    rows = []
    for u_t, delta_t, b, c in zip(*(t.unbind(1) for t in (u, delta, B, C)), strict=True):
        h = torch.exp(delta_t[..., None] * A) * h + (delta_t * u_t)[..., None] * b
        rows.append((c * h).sum(-1))
    y = torch.stack(rows, 1) if rows else u
    y = y if D is None else y + D * u
    return y if z is None else y * z * z.sigmoid(), h


def mamba_loop(layer: Any, x: Tensor) -> Tensor:
    """The output of a `Mamba`, by its parameters alone."""
    inner, z = F.linear(x, layer.in_proj.weight, layer.in_proj.bias).chunk(2, -1)
    width, taps = layer.conv1d.weight.shape[0], layer.conv1d.weight.shape[2]
    rows = []
    for t in range(x.shape[1]):
        row = torch.zeros_like(inner[:, t])
        for k in range(min(taps, t + 1)):
            row = row + layer.conv1d.weight[:, 0, taps - 1 - k] * inner[:, t - k]
        rows.append(row if layer.conv1d.bias is None else row + layer.conv1d.bias)
    u = torch.stack(rows, 1)
    u = u * u.sigmoid()
    states = layer.A_log.shape[1]
    rank = layer.dt_proj.weight.shape[1]
    step, B, C = (u @ layer.x_proj.weight.T).split([rank, states, states], -1)
    y, _ = selective_loop(
        u, step @ layer.dt_proj.weight.T, -layer.A_log.exp(), B, C, layer.D, z,
        layer.dt_proj.bias, True,
    )  # fmt: skip
    assert y.shape[-1] == width
    return F.linear(y, layer.out_proj.weight, layer.out_proj.bias)
