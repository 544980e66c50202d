"""The S5 layer: a diagonal state-space model with many inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ScanValueError
from .lru import ComplexRecurrence, complex_product, real_product
from .over_ranks import one_header
from .recurrent_layer import recurrent
from .states import at_least_single, require_range, require_sizes


def hippo_normal(states: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the normal part of the HiPPO-LegS matrix.

    The matrix has −½ on its diagonal and ∓√((2n+1)(2k+1)) / 2 beside it, so that it is −½ I plus a
    skew-symmetric matrix. Returns the half with positive imaginary parts: eigenvalues complex128
    [states / 2], eigenvectors [states, states / 2].
    """
    root = torch.sqrt(2 * torch.arange(states, dtype=torch.float64) + 1)
    outer = torch.outer(root, root) / 2
    skew = outer.triu(1) - outer.tril(-1)
    frequencies, vectors = torch.linalg.eigh(torch.complex(torch.zeros_like(skew), -skew))
    half = slice(states // 2, None)  # they come in ascending order, in pairs ±ω
    return torch.complex(torch.full_like(frequencies, -0.5), frequencies)[half], vectors[:, half]


@recurrent(one_header)
class S5(ComplexRecurrence):
    """A diagonal state-space model, discretised by a zero-order hold, as one scan.

        λ̄ = exp(λ Δ),  B̄ = (λ̄ − 1) / λ ⊙ B
        h[t] = λ̄ ⊙ h[t−1] + B̄ x[t]
        y[t] = 2 Re(C h[t]) + D ⊙ x[t]

    x [B, L, features] → (y [B, L, features], state complex [B, states / 2]). Of the `states`
    complex numbers, which come in conjugate pairs, half are kept. λ starts as the eigenvalues of
    the normal part of HiPPO-LegS, B and C in its eigenvectors; the real part stays negative,
    −exp(·). The step Δ of each state is drawn between min_step and max_step, uniform in its
    logarithm. Parameters, all real: decay, frequency, log_step [states / 2], with λ = −exp(decay) +
    i frequency and Δ = exp(log_step); D [features]; B [states, features], whose rows are real and
    imaginary parts in turn, `B[0::2] + 1j * B[1::2]`; C [features, states], in turn the real parts
    and the negated imaginary ones, `C[:, 0::2] - 1j * C[:, 1::2]`.

    >>> import torch
    >>> from assocscan.nn import S5
    >>> layer, x = S5(8, states=16), torch.randn(2, 50, 8)
    >>> y, state = layer(x)
    >>> y_next, state = layer.step(torch.randn(2, 8), state)

    Raises ValueError where `states` is not even and positive.

    Cost per position: 4 · features · states + 7 · states flops.

    Source: J. T. H. Smith, A. Warrington, S. W. Linderman, "Simplified state space layers for
    sequence modeling", arXiv 2208.04933, section 3 and appendix B.1.
    """

    _names = "[B, states / 2]"

    def __init__(
        self, features: int, states: int, min_step: float = 0.001, max_step: float = 0.1
    ) -> None:
        super().__init__()
        require_sizes(features=features, states=states)
        require_range(("min_step", "max_step"), min_step, max_step, above_0=True)
        if states % 2:
            raise ScanValueError(f"S5 keeps conjugate pairs: states must be even, got {states}")
        eigenvalues, vectors = hippo_normal(states)
        B = vectors.mH @ torch.randn(states, features, dtype=torch.complex128)
        C = torch.randn(features, states, dtype=torch.complex128) @ vectors
        steps = torch.empty(states // 2).uniform_(math.log(min_step), math.log(max_step))
        self.decay = nn.Parameter(_real(torch.log(-eigenvalues.real)))
        self.frequency = nn.Parameter(_real(eigenvalues.imag))
        self.log_step = nn.Parameter(steps)
        self.B = nn.Parameter(_real(torch.view_as_real(B / math.sqrt(features)).mT.flatten(0, 1)))
        # Re(C h) = Re C Re h − Im C Im h: the imaginary parts are held negated.
        self.C = nn.Parameter(_real(torch.view_as_real(C.conj() / math.sqrt(states)).flatten(1)))
        self.D = nn.Parameter(torch.randn(features))

    def extra_repr(self) -> str:
        return f"{self.D.shape[0]}, states={2 * self.decay.shape[0]}"

    def _decay_and_drive(self, x: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        decay, scale = self.discretised()
        return lambda: decay, self.drive(x, scale)

    def discretised(self) -> tuple[Tensor, Tensor]:
        """λ̄ and (λ̄ − 1) / λ, complex [states / 2]."""
        decay, frequency = at_least_single(self.decay), at_least_single(self.frequency)
        eigenvalues = torch.complex(-torch.exp(decay), frequency)
        exponent = eigenvalues * torch.exp(at_least_single(self.log_step))
        return torch.exp(exponent), torch.expm1(exponent) / eigenvalues

    def drive(self, x: Tensor, scale: Tensor) -> Tensor:
        """B̄ x, complex [..., states / 2]."""
        return scale * complex_product(at_least_single(self.B), x)

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        """2 Re(C h) + D x."""
        return (2 * real_product(self.C, h) + self.D * x).to(x.dtype)


def _real(x: Tensor) -> Tensor:
    return x.to(torch.get_default_dtype()).contiguous()
