"""A linear recurrent unit whose transition is a block-diagonal matrix chosen by the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..monoids.monoid import Monoid
from .over_ranks import one_header
from .recurrent_layer import RecurrentLayer, recurrent
from .states import Run, require_sizes, require_state, scan_pairs, weight_of

Pair = tuple[Tensor, Tensor]


def _adjoint_element(y: Pair, x_next: Pair, g: Pair) -> Pair:
    """(A[t+1]ᵀ, g[t]): λ[t] = g[t] + A[t+1]ᵀ λ[t+1]. Nothing depends on the products of A."""
    return x_next[0].mT, g[1]


_RECURRENCE = Monoid(
    ops.matrix_affine.combine,
    identity=ops.matrix_affine.identity,
    name="matrix_recurrence",
    element_ndim=(2, 1),
    lower=lambda state: state[1],
    adjoint=(
        Monoid(
            ops.matrix_affine.combine,
            name="matrix_recurrence_adjoint",
            element_ndim=(2, 1),
            lower=lambda state: (torch.zeros_like(state[0]), state[1]),
        ),
        _adjoint_element,
    ),
)


@recurrent(one_header)
class MatrixLRU(RecurrentLayer[Tensor]):
    """A recurrence whose heads mix the channels of their block at every step.

        [A[t] | b[t]] = softmax over each row of W_h x[t] + c_h,   A[t] size×size, b[t] size
        h[t] = A[t] h[t−1] + b[t] ⊙ (W_v x[t])     in each of the heads
        y[t] = W_o h[t] + b_o

    x [B, L, features] → (y [B, L, features], state [B, heads, size], float32 where x has 16 bits).
    The rows of [A | b] are positive and sum to 1, so |h| never exceeds the greatest |W_v x|, and
    one-hot rows make A a permutation, which no diagonal transition can be. Parameters: `transition`
    (features → heads · size · (size + 1)), `value`, `output`. On GPUs sizes of 8, 16, 32 and 64
    have kernels of their own; on the CPU a size of 8 takes some seconds to compile.

    >>> import torch
    >>> from assocscan.nn import MatrixLRU
    >>> layer = MatrixLRU(8, heads=4, size=2)
    >>> y, state = layer(torch.randn(2, 50, 8))
    >>> y_next, state = layer.step(torch.randn(2, 8), state)

    Raises ValueError for x of another shape.

    Cost per position and head: 2 · size³ + 2 · size² flops for the scan, 2 · features · size ·
    (size + 3) for the projections.

    Source: the normalised gates of block-diagonal LRUs, I. Dubinin, A. Orvieto, F. Effenberger,
    "Improved state mixing in higher-order and block diagonal linear recurrent networks",
    arXiv 2602.12021; here a softmax does the normalising.
    """

    def __init__(self, features: int, heads: int, size: int) -> None:
        super().__init__()
        require_sizes(features=features, heads=heads, size=size)
        self.heads, self.size = heads, size
        self.transition = nn.Linear(features, heads * size * (size + 1))
        self.value = nn.Linear(features, heads * size, bias=False)
        self.output = nn.Linear(heads * size, features)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, size={self.size}"

    def _entrance(self) -> tuple[int, Tensor | None]:
        return self.output.out_features, weight_of(self.transition)

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_state(state, (x.shape[0], self.heads, self.size), "[B, heads, size]", x, offsets)

    def _along(self, x: Tensor, state: Tensor | None, run: Run) -> tuple[Tensor, Tensor]:
        init = None
        if state is not None:
            init = torch.eye(self.size, dtype=state.dtype, device=state.device), state
        xs = self.elements(x)
        # Under autocast x itself may be wider than xs[1].
        h, last = scan_pairs(_RECURRENCE, xs, xs[1].dtype, init, run)
        return self.output(h.flatten(-2)), last

    def _at(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        A, b = self.elements(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        h = b.to(wide)
        if state is not None:
            h = (A.to(wide) @ state.expand_as(h)[..., None].to(wide))[..., 0] + h
        return self.output(h.to(x.dtype).flatten(-2)), h

    def elements(self, x: Tensor) -> Pair:
        """A [..., heads, size, size] and b ⊙ W_v x [..., heads, size]."""
        rows = self.transition(x).unflatten(-1, (self.heads, self.size, self.size + 1))
        rows = F.softmax(rows, -1)
        value = self.value(x).unflatten(-1, (self.heads, self.size))
        return rows[..., :-1], rows[..., -1] * value
