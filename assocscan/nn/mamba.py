"""The block of Mamba, with the parameters of the published checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..api.flags_and_backends import flag
from ..errors import ScanValueError
from ..functional.selective_scan import NAMES, scan_by, scan_channels
from ..torch_state import loadable
from .causal_conv import convolved, halos, require_inputs
from .recurrent_layer import RecurrentLayer, recurrent
from .rglru import inverse_softplus
from .states import (
    Run,
    at_least_single,
    of_sequences,
    require_pair,
    require_sizes,
    squeezed,
    weight_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MIN_STEP, MAX_STEP, STEP_FLOOR = 1e-3, 1e-1, 1e-4  # of Δ at the start, as in the published code


@loadable
class MambaState(NamedTuple):
    """What one part of a sequence leaves to the next: the convolution's and the scan's states."""

    conv: Tensor  # [B, conv_width − 1, width], with a leading S for packed sequences
    scan: Tensor  # [B, width, states], the same

    def detach(self) -> MambaState:
        """The state without its graph: gradients end there."""
        return MambaState(*(t.detach() for t in self))


@recurrent(lambda layer: halos(layer.conv1d.weight.shape[2]) + 1)
class Mamba(RecurrentLayer[MambaState]):
    """The block of Mamba: a causal convolution and a selective scan, gated by a second branch.

        x, z = W_in x
        u = silu(conv(x)),  δ, B, C = W_x u,  Δ = softplus(W_Δ δ + b_Δ)
        h[t] = exp(−Δ[t] exp(A_log)) ⊙ h[t−1] + Δ[t] u[t] B[t]ᵀ
        y[t] = W_out ((h[t] C[t] + D ⊙ u[t]) ⊙ silu(z[t]))

    x [B, L, features] → (y [B, L, features], `MambaState` of conv [B, conv_width − 1, width] and
    scan [B, width, states]). The width of the branches is expand · features, δ has `dt_rank`
    entries, ⌈features / 16⌉ by default, and each channel has `states` states. `bias` is that of
    W_in and W_out. Normalisation and residual are the caller's. features, states and conv_width are
    `d_model`, `d_state` and `d_conv` elsewhere.

    The parameters have the names and shapes of Mamba-1 checkpoints: `in_proj`, `conv1d`, `x_proj`,
    `dt_proj`, `A_log` [width, states], `D` [width], `out_proj`. So a state dict of mamba_ssm's
    `Mamba`, or of a mixer of transformers' models, is loaded as it is. They start as in the paper:
    A[c, n] = −n, D = 1, softplus(b_Δ) drawn between 0.001 and 0.1, uniformly in the logarithm.

    >>> import torch
    >>> from assocscan.nn import Mamba
    >>> layer, x = Mamba(8, states=4), torch.randn(2, 50, 8)
    >>> y, state = layer(x)
    >>> y_next, state = layer.step(torch.randn(2, 8), state)

    The scan's state is float32 where the layer has 16 bits. The scan is `selective_scan`; its
    documentation says what runs where, and at which cost.

    Cost per position: 2 · width · (3 · features + 2 · dt_rank + 2 · states) flops of the products,
    and those of the scan, 6 · width · states.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    arXiv 2312.00752, section 3.4 and figure 3.
    """

    def __init__(
        self,
        features: int,
        states: int = 16,
        expand: int = 2,
        conv_width: int = 4,
        dt_rank: int | None = None,
        bias: bool = False,
        conv_bias: bool = True,
    ) -> None:
        super().__init__()
        require_sizes(features=features, states=states, expand=expand, conv_width=conv_width)
        if dt_rank is not None:
            require_sizes(dt_rank=dt_rank)
        bias, conv_bias = flag("bias", bias), flag("conv_bias", conv_bias)
        width = expand * features
        rank = math.ceil(features / 16) if dt_rank is None else dt_rank
        self.in_proj = nn.Linear(features, 2 * width, bias=bias)
        self.conv1d = nn.Conv1d(width, width, conv_width, groups=width, bias=conv_bias)
        self.x_proj = nn.Linear(width, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, width)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, features, bias=bias)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        step = torch.empty(width).uniform_(math.log(MIN_STEP), math.log(MAX_STEP)).exp()
        with torch.no_grad():
            self.dt_proj.bias.copy_(inverse_softplus(step.clamp(min=STEP_FLOOR)))

    def _entrance(self) -> tuple[int, Tensor | None]:
        return self.in_proj.in_features, weight_of(self.in_proj)

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_pair(state, "(conv, scan)")
        shape = x.shape[0], *self.A_log.shape
        wanted, names = of_sequences(offsets, shape, "[B, width, states]")
        if state[1] is not None and state[1].shape != wanted:
            raise ScanValueError(
                f"the state of the scan has shape {list(state[1].shape)}, expected {list(wanted)}: "
                f"{names} of x {list(x.shape)}; a state belongs to the layer and the batch that it "
                f"came from{squeezed('state.scan', state[1].shape, wanted)}"
            )
        require_inputs(state[0], self.conv1d.weight, x, offsets, "state.conv")

    def _along(self, x: Tensor, state: MambaState | None, run: Run) -> tuple[Tensor, MambaState]:
        entering, init = state or (None, None)
        u, z, conv = self.branches(x, entering, *run)
        delta, B, C = self.selected(u)
        given = u, delta, self.decay(), B, C, self.D, z, self.dt_proj.bias
        if run.group is None:
            y, scan = scan_channels(
                *given, True, reverse=run.reverse, init=init, return_final=True,
                offsets=run.offsets,
            )  # fmt: skip
        else:
            tensors = dict(zip(NAMES, (*given, init, None), strict=True))
            over_ranks = functools.partial(scan_over_ranks, run.group)
            y, scan = scan_by(over_ranks, tensors, True, run.reverse, True)
        return self.out_proj(y), MambaState(conv, scan)

    def _at(self, x: Tensor, state: MambaState | None) -> tuple[Tensor, MambaState]:
        entering, init = state or (None, None)
        u, z, conv = self.branches(x[:, None], entering, False)
        delta, B, C = self.selected(u)
        A = self.decay()
        wide = torch.promote_types(u.dtype, A.dtype)
        u, z, delta, B, C = (t[:, 0].to(wide) for t in (u, z, delta, B, C))
        delta = F.softplus(delta + self.dt_proj.bias)[..., None]  # [B, width, 1]
        h = delta * u[..., None] * B[:, None]
        h = h if init is None else torch.exp(delta * A) * init + h
        y = ((h * C[:, None]).sum(-1) + self.D * u) * F.silu(z)
        return self.out_proj(y.to(x.dtype)), MambaState(conv, h)

    def branches(
        self,
        x: Tensor,
        state: Tensor | None,
        reverse: bool,
        group: ProcessGroup | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u and z [B, L, width], and the state of the convolution."""
        x, z = self.in_proj(x).chunk(2, -1)
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        u, conv = convolved(x, weight, bias, state, Run(reverse, group, offsets))
        return F.silu(u), z, conv

    def selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """delta [B, L, width], without its bias, and B and C [B, L, states]."""
        rank, states = self.dt_proj.in_features, self.A_log.shape[1]
        delta, B, C = self.x_proj(u).split([rank, states, states], -1)
        return F.linear(delta, self.dt_proj.weight), B, C

    def decay(self) -> Tensor:
        """A [width, states], negative, in float32 at least."""
        return -torch.exp(at_least_single(self.A_log))


def scan_over_ranks(
    group: ProcessGroup,
    names: Mapping[str, str],
    op: Any,
    xs: Any,
    axis: int,
    reverse: bool,
    *,
    init: Any,
    return_final: bool,
    offsets: None,
) -> Any:
    """`named_scan` of a sequence whose parts lie on the ranks of a group."""
    from .. import distributed

    return distributed.associative_scan(
        op, xs, axis, reverse, init=init, return_final=return_final, group=group
    )
