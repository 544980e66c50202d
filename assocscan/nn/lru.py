"""The linear recurrent unit: a complex diagonal recurrence between two matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .over_ranks import one_header
from .recurrent_layer import RecurrentLayer, recurrent
from .states import (
    Run,
    at_least_single,
    recur,
    require_carry,
    require_number,
    require_range,
    require_sizes,
)


class ComplexRecurrence(RecurrentLayer[Tensor]):
    """h[t] = a ⊙ h[t−1] + b[t], with complex a and h, and outputs C h[t] + D x[t]."""

    C: nn.Parameter  # [features, 2 · the number of complex states]
    D: nn.Parameter  # [features]
    _names: str  # of the dimensions of a state, in errors

    def _decay_and_drive(self, x: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        """A function that computes a, which only some calls need; and b."""
        raise NotImplementedError

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        """The outputs."""
        raise NotImplementedError

    def _entrance(self) -> tuple[int, None]:
        return self.D.shape[0], None

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_carry(state, (x.shape[0], self.C.shape[1] // 2), self._names, x, offsets)

    def _along(self, x: Tensor, state: Tensor | None, run: Run) -> tuple[Tensor, Tensor]:
        decay, b = self._decay_and_drive(x)
        h, last = recur(decay(), b, state, run)
        return self.read(h, x), last

    def _at(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        decay, h = self._decay_and_drive(x)
        if state is not None:
            h = decay() * state + h
        return self.read(h, x), h


def complex_product(B: Tensor, x: Tensor) -> Tensor:
    """B x, complex. Rows 2k and 2k + 1 of B are the real and the imaginary part of one."""
    return torch.view_as_complex(F.linear(x.to(B.dtype), B).unflatten(-1, (-1, 2)))


def real_product(C: Tensor, h: Tensor) -> Tensor:
    """Re(C h). Columns 2k and 2k + 1 of C are the real and the negated imaginary part of one."""
    return F.linear(torch.view_as_real(h).flatten(-2), at_least_single(C))


@recurrent(one_header)
class LRU(ComplexRecurrence):
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

    _names = "[B, states]"

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

    def _decay_and_drive(self, x: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        return self.eigenvalues, self.drive(x)

    def eigenvalues(self) -> Tensor:
        """λ, complex [states]."""
        nu, theta = at_least_single(self.nu), at_least_single(self.theta)
        return torch.exp(torch.complex(-torch.exp(nu), torch.exp(theta)))

    def drive(self, x: Tensor) -> Tensor:
        """exp(γ) B x, complex [..., states]."""
        scale = torch.exp(at_least_single(self.gamma)).repeat_interleave(2)
        return complex_product(self.B * scale[:, None], x)

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        """Re(C h) + D x; C holds its imaginary parts negated."""
        return (real_product(self.C, h) + self.D * x).to(x.dtype)
