"""A semiseparable layer whose rank adapts to the input."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..api import associative_scan
from ..errors import ScanValueError
from ..monoid import Monoid
from ..plan import explain
from .causal_conv import CausalConv

_CONTEXT = Monoid(
    ops.sum.combine,
    identity=0.0,
    name="gated_context",
    lift=lambda key, query, gate: key * gate,
    lower=lambda total, xs: total * (xs[1] * xs[2]),
)


class AdaptiveRankSemiseparable(nn.Module):
    """AR-SSM: a banded matrix plus a causal one of low rank, gated rank by rank.

        g[t] = σ(W₂ ReLU(W₁ x[t] + b₁) + b₂)                      the complexity gate, in (0, 1)
        s[t] = Σ_{τ ≤ t} g[τ] ⊙ (U x[τ])                           the running sum of the gated keys
        y[t] = Σ_k w[k] ⊙ x[t − k] + W_o (s[t] ⊙ g[t] ⊙ (V x[t])) + b_o

    x [B, L, features] → (y [B, L, features], diagnostics). A rank whose gate is 0 takes no part, so
    Σ_r g[t, r] is the effective rank at t. Along the sequence this is H = T + (lower triangle of
    U Vᵀ), T a band of `conv_width`. Parameters: `local` (a `CausalConv`), `complexity` (the gate),
    U, V (features → rank, no bias), `output`.

    use_fused_scan: True: gate, running sum and product with the gated queries are one scan, and so
    one kernel; False: torch.cumsum between torch's products. The results are equal but for
    rounding.

    The diagnostics: "engine" (who ran the sum: "cpu", "triton", …, or "torch.cumsum"),
    "used_fused_scan", "gates" [B, L, rank], "effective_rank" (mean over positions), "gate_l1" (mean
    gate, for a penalty on the rank; differentiable).

    >>> import torch
    >>> from assocscan.nn import AdaptiveRankSemiseparable
    >>> layer = AdaptiveRankSemiseparable(16, rank=8)
    >>> y, diagnostics = layer(torch.randn(2, 50, 16))
    >>> diagnostics["used_fused_scan"], diagnostics["gates"].shape
    (True, torch.Size([2, 50, 8]))

    Cost per position: 6 · features · rank + 2 · features · gate_width flops, 2 · conv_width ·
    features for the band, 4 · rank for the scan.

    Source: the semiseparable form of state-space models, T. Dao and A. Gu, "Transformers are SSMs",
    arXiv 2405.21060, section 3; the running sum is linear attention with one channel per rank,
    A. Katharopoulos et al., arXiv 2006.16236.
    """

    def __init__(
        self,
        features: int,
        rank: int = 32,
        gate_width: int | None = None,
        conv_width: int = 3,
        use_fused_scan: bool = True,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ScanValueError(f"AdaptiveRankSemiseparable needs a rank of 1 or more, got {rank}")
        gate_width = max(features // 4, 1) if gate_width is None else gate_width
        self.use_fused_scan = use_fused_scan
        self.local = CausalConv(features, conv_width, bias=False)
        self.complexity = nn.Sequential(
            nn.Linear(features, gate_width), nn.ReLU(), nn.Linear(gate_width, rank), nn.Sigmoid()
        )
        self.U = nn.Linear(features, rank, bias=False)
        self.V = nn.Linear(features, rank, bias=False)
        self.output = nn.Linear(rank, features)

    def forward(self, x: Tensor, reverse: bool = False) -> tuple[Tensor, dict[str, Any]]:
        """(y, diagnostics) for x [B, L, features]; with `reverse` every sum runs from the end."""
        parts = self.U(x), self.V(x), self.complexity(x)
        y = self.local(x, reverse=reverse)[0] + self.output(self.context(parts, reverse))
        return y, self.diagnostics(parts)

    def forward_bidirectional(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The mean of the layer run from the start and run from the end."""
        parts = self.U(x), self.V(x), self.complexity(x)
        local = self.local(x)[0] + self.local(x, reverse=True)[0]
        context = self.context(parts, False) + self.context(parts, True)
        return 0.5 * local + self.output(0.5 * context), self.diagnostics(parts)

    def context(self, parts: tuple[Tensor, Tensor, Tensor], reverse: bool) -> Tensor:
        """s ⊙ g ⊙ V x [B, L, rank]."""
        if self.use_fused_scan:
            result: Tensor = associative_scan(_CONTEXT, parts, 1, reverse)
            return result
        key, query, gate = parts
        gated = key * gate
        if reverse:
            gated = gated.flip(1)
        total = gated.cumsum(1)
        return (total.flip(1) if reverse else total) * (query * gate)

    def diagnostics(self, parts: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
        """What ran, and what the gates did."""
        gate = parts[2]
        engine = "torch.cumsum"
        if torch.compiler.is_compiling():
            engine = "compiled"
        elif self.use_fused_scan:
            engine = fused_engine(gate.dtype, gate.device, tuple(gate.shape))
        return {
            "engine": engine,
            "used_fused_scan": self.use_fused_scan,
            "gates": gate,
            "effective_rank": gate.detach().sum(-1).mean(),
            "gate_l1": gate.mean(),
        }


@functools.lru_cache(maxsize=256)
def fused_engine(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> str:
    """The engine that `associative_scan` takes for the fused sum of this shape."""
    example = torch.empty(shape, dtype=dtype, device=device)
    return explain(_CONTEXT, (example, example, example), 1).engine.partition(" ")[0]
