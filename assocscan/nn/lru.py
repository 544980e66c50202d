"""The linear recurrent unit: a complex diagonal recurrence between two matrices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..monoids.call_errors import checked_methods
from .over_ranks import layer_over_ranks, one_header
from .states import (
    at_least_single,
    checked_sequences,
    recur,
    require_carry,
    require_input,
    require_number,
    require_range,
    require_sizes,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@layer_over_ranks(one_header)
@checked_methods
class LRU(nn.Module):
    """The linear recurrent unit, in its stable exponential parametrisation.

        λ = exp(−exp(ν) + i exp(θ)),   |λ| < 1 whatever ν and θ are
        h[t] = λ ⊙ h[t−1] + exp(γ) ⊙ (B x[t])
        y[t] = Re(C h[t]) + D ⊙ x[t]

    x [B, L, features] → (y [B, L, features], state complex [B, states]). λ is drawn uniformly over
    the ring min_radius < |λ| < max_radius with a phase of at most max_phase; γ starts where
    h has the variance of B x. Parameters, all real: nu, theta, gamma [states]; D [features];
    B [2 · states, features], whose rows are real and imaginary parts in turn, `B[0::2] + 1j *
    B[1::2]`; C [features, 2 · states], in turn the real parts and the negated imaginary ones,
    `C[:, 0::2] - 1j * C[:, 1::2]`.
    Computed in the dtype of the parameters, or in float32 where that has 16 bits.

    >>> import torch
    >>> from assocscan.nn import LRU
    >>> layer, x = LRU(8, states=16), torch.randn(2, 50, 8)
    >>> y, state = layer(x)
    >>> y_next, state = layer.step(torch.randn(2, 8), state)

    Raises ValueError for x of another shape.

    Cost per position: 8 · features · states + 14 · states flops.

    Source: A. Orvieto et al., "Resurrecting recurrent neural networks for long sequences",
    arXiv 2303.06349, section 3.
    """

    def __init__(
        self,
        features: int,
        states: int | None = None,
        min_radius: float = 0.9,
        max_radius: float = 0.999,
        max_phase: float = math.tau,
    ) -> None:
        super().__init__()
        states = features if states is None else states
        require_sizes(features=features, states=states)
        require_range(("min_radius", "max_radius"), min_radius, max_radius, most=1)
        require_number("max_phase", max_phase)
        squared = torch.empty(states).uniform_(min_radius**2, max_radius**2)
        phase = max_phase * (1 - torch.rand(states))  # never 0, whose logarithm is not finite
        self.nu = nn.Parameter(torch.log(-0.5 * torch.log(squared)))
        self.theta = nn.Parameter(torch.log(phase))
        self.gamma = nn.Parameter(0.5 * torch.log1p(-squared))
        self.B = nn.Parameter(torch.randn(2 * states, features) / math.sqrt(2 * features))
        self.C = nn.Parameter(torch.randn(features, 2 * states) / math.sqrt(states))
        self.D = nn.Parameter(torch.randn(features))

    def extra_repr(self) -> str:
        return f"{self.D.shape[0]}, states={self.nu.shape[0]}"

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        reverse: bool = False,
        *,
        group: ProcessGroup | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(y, state) for x [B, L, features]; with `group`, x is this rank's part of a sequence;
        with `offsets` [S + 1], S sequences are packed along L, and states have a leading S."""
        require_input(x, self.D.shape[0], True)
        offsets = checked_sequences(offsets, x, group)
        require_carry(state, (x.shape[0], self.nu.shape[0]), "[B, states]", x, offsets)
        h, last = recur(self.eigenvalues(), self.drive(x), state, reverse, group, offsets)
        return self.read(h, x), last

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(y, state) for one position x [B, features].

        A state that S packed sequences left, [S, 1, …], enters as [S, …] (`[:, 0]` of its tensors),
        beside an x of S rows.
        """
        require_input(x, self.D.shape[0], False)
        require_carry(state, (x.shape[0], self.nu.shape[0]), "[B, states]", x)
        h = self.drive(x)
        if state is not None:
            h = self.eigenvalues() * state + h
        return self.read(h, x), h

    def eigenvalues(self) -> Tensor:
        """λ, complex [states]."""
        nu, theta = at_least_single(self.nu), at_least_single(self.theta)
        return torch.exp(torch.complex(-torch.exp(nu), torch.exp(theta)))

    def drive(self, x: Tensor) -> Tensor:
        """exp(γ) B x, complex [..., states]."""
        scale = torch.exp(at_least_single(self.gamma)).repeat_interleave(2)
        scaled = self.B * scale[:, None]
        return torch.view_as_complex(F.linear(x.to(scaled.dtype), scaled).unflatten(-1, (-1, 2)))

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        """Re(C h) + D x; C holds its imaginary parts negated."""
        y = F.linear(torch.view_as_real(h).flatten(-2), at_least_single(self.C))
        return (y + self.D * x).to(x.dtype)
