"""Inputs of selective scans, and what the ways that write all states out have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .settings import SEED, Settings


class Inputs(NamedTuple):
    """The tensors of `selective_scan`, in the order of its parameters, or their gradients."""

    u: Tensor  # [B, L, D]
    delta: Tensor  # [B, L, D]
    A: Tensor  # [D, N]
    B: Tensor  # [B, L, N]
    C: Tensor  # [B, L, N]
    D: Tensor  # [D]
    z: Tensor  # [B, L, D]
    delta_bias: Tensor  # [D]


PARAMETERS = ("A", "D", "delta_bias")


def draw(
    settings: Settings, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Inputs, Tensor]:
    """Inputs as those of a Mamba layer that begins to train, and a cotangent of y.

    Step sizes are about 0.02 to 0.12, decays −1 to −N. Parameters are float32, as Mamba keeps them
    beside 16-bit activations, or of a wider dtype.
    """
    batch, length, width, states = shape
    device = settings.device
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    series, mixed = (batch, length, width), (batch, length, states)
    decays = torch.arange(1.0, states + 1, device=device).expand(width, states)
    drawn = Inputs(
        u=normal(*series),
        delta=normal(*series),
        A=-decays * torch.exp(0.1 * normal(width, states)),
        B=normal(*mixed),
        C=normal(*mixed),
        D=1 + 0.1 * normal(width),
        z=normal(*series),
        delta_bias=-3 + 0.5 * normal(width),
    )
    wide = torch.promote_types(dtype, torch.float32)
    pairs = zip(Inputs._fields, drawn, strict=True)
    inputs = Inputs(*(t.to(wide if name in PARAMETERS else dtype) for name, t in pairs))
    return inputs, normal(*series).to(dtype)


def discretised(x: Inputs) -> tuple[Tensor, Tensor]:
    """exp(Δ·A), by which each step multiplies the states, and Δ·u·B, which it adds: [B, L, D, N].

    Δ = softplus(delta + delta_bias).
    """
    delta = F.softplus(x.delta + x.delta_bias)[..., None]
    decay = torch.exp(delta * x.A)
    return decay, (delta * x.u[..., None] * x.B[:, :, None]).to(decay.dtype)


def gated(x: Inputs, y: Tensor) -> Tensor:
    """(y + D·u) · silu(z), in the dtype of u."""
    return ((y + x.D * x.u) * F.silu(x.z)).to(x.u.dtype)
