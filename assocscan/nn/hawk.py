"""The recurrent block of Hawk and Griffin."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..torch_state import loadable
from .causal_conv import CausalConv, require_inputs
from .norm_linear_gelu import NormLinearGELU
from .over_ranks import headers_of
from .recurrent_layer import RecurrentLayer, recurrent
from .rglru import RGLRU
from .states import Run, require_pair, require_sizes, require_state, weight_of


@loadable
class HawkState(NamedTuple):
    """What one part of a sequence leaves to the next: the convolution's and the RG-LRU's states."""

    conv: Tensor  # [B, conv_width − 1, width], with a leading S for packed sequences
    recurrence: Tensor  # [B, width], the same

    def detach(self) -> HawkState:
        """The state without its graph: gradients end there."""
        return HawkState(*(t.detach() for t in self))


@recurrent(lambda layer: headers_of(layer.conv) + headers_of(layer.recurrence))
class Hawk(RecurrentLayer[HawkState]):
    """The recurrent block of Hawk, with the normalisations in front of its two branches.

        y = W_o (GELU(W_g norm(x) + b_g) ⊙ RGLRU(conv(W_i norm(x) + b_i))) + b_o

    x [B, L, features] → (y [B, L, features], `HawkState` of conv [B, conv_width − 1, width] and
    recurrence [B, width], float32 where x has 16 bits). The gate's branch is `NormLinearGELU`,
    fused on GPUs; the other has a LayerNorm of its own. The residual is the caller's:
    x + block(x)[0]. `width` is that of the recurrence (4/3 of the features in the paper), `heads`
    the number of blocks of its gates, `conv_width` the length of the convolution.

    >>> import torch
    >>> from assocscan.nn import Hawk
    >>> block, x = Hawk(16, width=24, heads=4), torch.randn(2, 50, 16)
    >>> y, state = block(x)
    >>> y_next, state = block.step(torch.randn(2, 16), state)

    Raises ValueError where `heads` does not divide the width.

    Cost per position: 6 · features · width + 4 · width² / heads flops.

    Source: S. De et al., "Griffin", arXiv 2402.19427, section 2.3 and figure 2, which has RMSNorm
    where this has LayerNorm.
    """

    def __init__(
        self, features: int, width: int | None = None, heads: int = 1, conv_width: int = 4
    ) -> None:
        super().__init__()
        width = features if width is None else width
        require_sizes(features=features, width=width, heads=heads, conv_width=conv_width)
        self.gate = NormLinearGELU(features, width, approximate="tanh")
        self.norm = nn.LayerNorm(features)
        self.input = nn.Linear(features, width)
        self.conv = CausalConv(width, conv_width)
        self.recurrence = RGLRU(width, heads)
        self.output = nn.Linear(width, features)

    def _entrance(self) -> tuple[int, Tensor | None]:
        return self.input.in_features, weight_of(self.input)

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_pair(state, "(conv, recurrence)")
        width = self.conv.weight.shape[0]
        require_inputs(state[0], self.conv.weight, x, offsets, "state.conv")
        require_state(state[1], (x.shape[0], width), "[B, width]", x, offsets, "state.recurrence")

    def _along(self, x: Tensor, state: HawkState | None, run: Run) -> tuple[Tensor, HawkState]:
        conv, recurrence = state or (None, None)
        options = {"group": run.group, "offsets": run.offsets}
        u, conv = self.conv(self.input(self.norm(x)), conv, run.reverse, **options)
        h, recurrence = self.recurrence(u, recurrence, run.reverse, **options)
        return self.output(self.gate(x) * h), HawkState(conv, recurrence)

    def _at(self, x: Tensor, state: HawkState | None) -> tuple[Tensor, HawkState]:
        conv, recurrence = state or (None, None)
        u, conv = self.conv.step(self.input(self.norm(x)), conv)
        h, recurrence = self.recurrence.step(u, recurrence)
        return self.output(self.gate(x) * h), HawkState(conv, recurrence)
