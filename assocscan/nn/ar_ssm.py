"""A semiseparable layer whose rank adapts to the input."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..api.associative_scan import associative_scan
from ..api.eager_path import eager_scans
from ..api.explain import explain
from ..api.flags_and_backends import flag
from ..errors import ScanValueError
from ..functional.packing.padding import from_padded, to_padded
from ..monoids.call_errors import checked_methods
from ..monoids.monoid import Monoid
from ..runtime import backends as engines
from ..torch_private import without_transforms
from ..torch_state import loadable
from .causal_conv import CausalConv
from .states import (
    checked_sequences,
    require_input,
    require_pair,
    require_sizes,
    require_state,
    weight_of,
)

Parts = tuple[Tensor, Tensor, Tensor]

_CONTEXT = Monoid(
    ops.sum.combine,
    identity=0.0,
    name="gated_context",
    lift=lambda key, query, gate: key * gate,
    lower=lambda total, xs: total * (xs[1] * xs[2]),
)


def _lift_compensated(key: Tensor, query: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return key * gate, torch.zeros_like(key)


_COMPENSATED = Monoid(
    ops.compensated_sum.combine,
    identity=(0.0, 0.0),
    name="compensated_gated_context",
    lift=_lift_compensated,
    lower=lambda total, xs: (total[0] + total[1]) * (xs[1] * xs[2]),
)


@loadable
class SemiseparableState(NamedTuple):
    """What one part of a sequence leaves to the next: the band's last inputs and the sum s."""

    conv: Tensor  # [B, conv_width − 1, features], with a leading S for packed sequences
    total: Tensor  # [B, rank], the same; float32 where the keys have 16 bits

    def detach(self) -> SemiseparableState:
        """The state without its graph: gradients end there."""
        return SemiseparableState(*(t.detach() for t in self))


@checked_methods
class AdaptiveRankSemiseparable(nn.Module):
    """AR-SSM: a banded matrix plus a causal one of low rank, gated rank by rank.

        g[t] = σ(W₂ ReLU(W₁ x[t] + b₁) + b₂)                      the complexity gate, in (0, 1)
        s[t] = Σ_{τ ≤ t} g[τ] ⊙ (U x[τ])                           the running sum of the gated keys
        y[t] = Σ_k w[k] ⊙ x[t − k] + W_o (s[t] ⊙ g[t] ⊙ (V x[t])) + b_o

    x [B, L, features] → (y [B, L, features], diagnostics). A rank whose gate is 0 takes no part, so
    Σ_r g[t, r] is the effective rank at t. Along the sequence this is H = T + (lower triangle of
    U Vᵀ), T a band of `conv_width`. Parameters: `local` (a `CausalConv`), `complexity` (the gate),
    U, V (features → rank, no bias), `output`.

    forward also takes the state that the sequence before left, and returns its own among the
    diagnostics; `step` returns (y, state), as the other layers.

    features is the width of the model (`d_model` elsewhere), rank the largest rank (`max_rank`).

    use_fused_scan: True: gate, running sum and product with the gated queries are one scan, and so
    one kernel; False: torch.cumsum between torch's products. The results are equal but for
    rounding.

    compensated: the fused scan sums the roundings of s beside it (`ops.compensated_sum`). Over
    131072 positions of float32 the error of s ⊙ g ⊙ V x falls from 1e-5 to 1e-7 of its largest
    value on the CPU, that of torch.cumsum. As many numbers are read and written; gradients are
    plain sums.

    The diagnostics: "engine" (what ran the sum: "cpu", "triton", …, "eager" where no kernel could
    be generated, "compiled" inside torch.compile, or "torch.cumsum"), "used_fused_scan" (whether
    that was a fused kernel: neither "eager" nor "torch.cumsum"), "compensated" (whether roundings
    were summed), "state" (a `SemiseparableState` of conv [B, conv_width − 1, features] and total
    [B, rank]), "gates" [B, L, rank], "effective_rank" (mean over positions), "gate_l1" (mean gate,
    for a penalty on the rank; differentiable). The mean over no positions is 0.

    >>> import torch
    >>> from assocscan.nn import AdaptiveRankSemiseparable
    >>> layer = AdaptiveRankSemiseparable(16, rank=8)
    >>> y, diagnostics = layer(torch.randn(2, 50, 16))
    >>> diagnostics["used_fused_scan"], diagnostics["gates"].shape
    (True, torch.Size([2, 50, 8]))
    >>> y_next, state = layer.step(torch.randn(2, 16), diagnostics["state"])

    Raises ValueError for x of another shape, for a rank below 1, and for `compensated` without the
    fused scan.

    Cost per position: 6 · features · rank + 2 · features · gate_width flops, 2 · conv_width ·
    features for the band, 4 · rank for the scan (12 · rank if compensated).

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
        compensated: bool = False,
    ) -> None:
        super().__init__()
        use_fused_scan = flag("use_fused_scan", use_fused_scan)
        compensated = flag("compensated", compensated)
        if compensated and not use_fused_scan:
            raise ScanValueError(
                "AdaptiveRankSemiseparable: compensated=True is a fused scan, but use_fused_scan "
                "is False; leave one out"
            )
        require_sizes(features=features, rank=rank, conv_width=conv_width)
        gate_width = max(features // 4, 1) if gate_width is None else gate_width
        require_sizes(gate_width=gate_width)
        self.use_fused_scan, self.compensated = use_fused_scan, compensated
        self.local = CausalConv(features, conv_width, bias=False)
        self.complexity = nn.Sequential(
            nn.Linear(features, gate_width), nn.ReLU(), nn.Linear(gate_width, rank), nn.Sigmoid()
        )
        self.U = nn.Linear(features, rank, bias=False)
        self.V = nn.Linear(features, rank, bias=False)
        self.output = nn.Linear(rank, features)

    def forward(
        self,
        x: Tensor,
        state: SemiseparableState | None = None,
        reverse: bool = False,
        *,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """(y, diagnostics) for x [B, L, features]; with `reverse` every sum runs from the end; with
        `offsets` [S + 1], S sequences are packed along L, and states have a leading S."""
        require_input(x, self.output.out_features, weight_of(self.U), True)
        before = (None, None) if state is None else state
        require_pair(before, "(conv, total)", 'as diagnostics["state"]')
        offsets = checked_sequences(offsets, x)
        require_state(before[1], (x.shape[0], self.U.out_features), "[B, rank]", x, offsets)
        reverse = flag("reverse", reverse)
        parts = self.parts(x)
        local, conv = self.local(x, before[0], reverse, offsets=offsets)
        context, total, engine = self.context(parts, before[1], reverse, offsets)
        after = SemiseparableState(conv, total)
        found = self.diagnostics(parts, engine)
        return local + self.output(context), found | {"state": after}

    def step(
        self, x: Tensor, state: SemiseparableState | None = None
    ) -> tuple[Tensor, SemiseparableState]:
        """(y, state) for one position x [B, features], by torch operations.

        A state that S packed sequences left, [S, 1, …], enters as [S, …] (`[:, 0]` of its tensors),
        beside an x of S rows.
        """
        require_input(x, self.output.out_features, weight_of(self.U), False)
        before = (None, None) if state is None else state
        require_pair(before, "(conv, total)", 'as diagnostics["state"]')
        require_state(before[1], (x.shape[0], self.U.out_features), "[B, rank]", x)
        local, conv = self.local.step(x, before[0])
        before_0 = None if before[1] is None else before[1].expand(len(x), self.U.out_features)
        context, total = cumulative(self.parts(x[:, None]), before_0, False)
        return local + self.output(context[:, 0]), SemiseparableState(conv, total)

    def forward_bidirectional(
        self, x: Tensor, *, offsets: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The mean of the layer run from the start and run from the end; `offsets` as in a call."""
        require_input(x, self.output.out_features, weight_of(self.U), True)
        offsets = checked_sequences(offsets, x)
        parts = self.parts(x)
        local = self.local(x, offsets=offsets)[0] + self.local(x, reverse=True, offsets=offsets)[0]
        ahead, _, engine = self.context(parts, None, False, offsets)
        back, _, other = self.context(parts, None, True, offsets)
        engine = other if other == "eager" else engine
        return 0.5 * local + self.output(0.5 * (ahead + back)), self.diagnostics(parts, engine)

    def parts(self, x: Tensor) -> Parts:
        """U x, V x and the gates."""
        return self.U(x), self.V(x), self.complexity(x)

    def context(
        self, parts: Parts, total: Tensor | None, reverse: bool, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor, str]:
        """s ⊙ g ⊙ V x [B, L, rank], the last s, and what ran; `total` is the s before."""
        if not self.use_fused_scan:
            run = cumulative if offsets is None else functools.partial(cumulative_rows, offsets)
            return *run(parts, total, reverse), "torch.cumsum"
        if torch.compiler.is_compiling():
            results = fused(parts, total, reverse, self.compensated, offsets)
            return *results, compiled_engine(parts[0].device.type)
        with eager_scans() as eager:
            results = fused(parts, total, reverse, self.compensated, offsets)
        if eager:
            return *results, "eager"
        key = parts[2]
        shape = tuple(key.shape)
        packed = offsets is not None
        engine = fused_engine(key.dtype, key.device, shape, reverse, self.compensated, packed)
        return *results, engine

    def diagnostics(self, parts: Parts, engine: str) -> dict[str, Any]:
        """What ran, and what the gates did."""
        gate = parts[2]
        return {
            "engine": engine,
            "used_fused_scan": engine not in ("eager", "torch.cumsum"),
            "compensated": engine != "torch.cumsum" and self.compensated,
            "gates": gate,
            "effective_rank": mean(gate.detach().sum(-1)),
            "gate_l1": mean(gate),
        }


def fused(
    parts: Parts, total: Tensor | None, reverse: bool, compensated: bool, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The context and the last s, by one scan."""
    if not compensated:
        plain: tuple[Tensor, Tensor] = associative_scan(
            _CONTEXT, parts, 1, reverse, init=total, return_final=True, offsets=offsets
        )
        return plain
    init = None if total is None else (total, torch.zeros_like(total))
    context, (rounded, lost) = associative_scan(
        _COMPENSATED, parts, 1, reverse, init=init, return_final=True, offsets=offsets
    )
    return context, rounded + lost


def cumulative(parts: Parts, total: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """The context by torch operations; sums of 16-bit numbers are float32, as in the scan."""
    key, query, gate = parts
    wide = torch.promote_types(key.dtype, torch.float32)
    gated = (key * gate).to(wide)
    if total is None:
        total = gated.new_zeros(gated.shape[0], gated.shape[2])
    steps = torch.cat([total[:, None], gated.flip(1) if reverse else gated], 1).cumsum(1)
    sums = steps[:, 1:].flip(1) if reverse else steps[:, 1:]
    return (sums * (query * gate)).to(key.dtype), steps[:, -1].clone()


def cumulative_rows(
    offsets: Tensor, parts: Parts, total: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """`cumulative` of packed sequences: of rows filled up with zeros, which add nothing."""
    rows = [to_padded(t, offsets, axis=1).transpose(1, 2) for t in parts]
    count, batch, longest, rank = rows[0].shape
    if total is not None:
        total = total.expand(count, batch, rank).flatten(0, 1)
    key, query, gate = (t.flatten(0, 1) for t in rows)
    context, last = cumulative((key, query, gate), total, reverse)
    context = context.view(count, batch, longest, rank).transpose(1, 2)
    return from_padded(context, offsets.diff())[0].movedim(0, 1), last.view(count, batch, rank)


def mean(x: Tensor) -> Tensor:
    """The mean, 0 where there is nothing."""
    return x.mean() if x.numel() else x.sum()


@functools.lru_cache(maxsize=256)
def fused_engine(
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    reverse: bool,
    compensated: bool,
    packed: bool,
) -> str:
    """The engine that `associative_scan` plans for the fused sum of this shape."""
    op = _COMPENSATED if compensated else _CONTEXT
    with without_transforms():  # in which a new tensor has no memory
        example = torch.empty(shape, dtype=dtype, device=device)
        offsets = torch.tensor([0, shape[1]]) if packed else None
        xs = (example, example, example)
        plan = explain(op, xs, 1, reverse, return_final=True, offsets=offsets)
    return plan.engine.partition(" ")[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compiled_engine(device_type: str) -> str:
    """What runs the fused sum in a compiled graph: torch operations where no kernel can."""
    backend = "cpu" if device_type == "cpu" else "triton"
    reason = engines.why_not_here(torch.device(device_type), backend)
    return "compiled" if reason is None else "eager"
