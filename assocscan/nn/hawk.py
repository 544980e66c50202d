"""The recurrent block of Hawk and Griffin."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from ..monoids.call_errors import checked_methods
from ..torch_state import loadable
from .causal_conv import CausalConv
from .norm_linear_gelu import NormLinearGELU
from .over_ranks import headers_of, layer_over_ranks
from .rglru import RGLRU
from .states import checked_sequences, require_input, require_pair, require_sizes, weight_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@loadable
class HawkState(NamedTuple):
    """What one part of a sequence leaves to the next: the convolution's and the RG-LRU's states."""

    conv: Tensor  # [B, conv_width − 1, width], with a leading S for packed sequences
    recurrence: Tensor  # [B, width], the same

    def detach(self) -> HawkState:
        """The state without its graph: gradients end there."""
        return HawkState(*(t.detach() for t in self))


@layer_over_ranks(lambda layer: headers_of(layer.conv) + headers_of(layer.recurrence))
@checked_methods
class Hawk(nn.Module):
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

    def forward(
        self,
        x: Tensor,
        state: HawkState | None = None,
        reverse: bool = False,
        *,
        group: ProcessGroup | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, HawkState]:
        """(y, state) for x [B, L, features]; with `group`, x is this rank's part of a sequence;
        with `offsets` [S + 1], S sequences are packed along L, and states have a leading S."""
        require_input(x, self.input.in_features, True, weight_of(self.input))
        before = (None, None) if state is None else state
        require_pair(before, "(conv, recurrence)")
        options = {"group": group, "offsets": checked_sequences(offsets, x, group)}
        u, conv = self.conv(self.input(self.norm(x)), before[0], reverse, **options)
        h, recurrence = self.recurrence(u, before[1], reverse, **options)
        return self.output(self.gate(x) * h), HawkState(conv, recurrence)

    def step(self, x: Tensor, state: HawkState | None = None) -> tuple[Tensor, HawkState]:
        """(y, state) for one position x [B, features].

        A state that S packed sequences left, [S, 1, …], enters as [S, …] (`[:, 0]` of its tensors),
        beside an x of S rows.
        """
        require_input(x, self.input.in_features, False, weight_of(self.input))
        before = (None, None) if state is None else state
        require_pair(before, "(conv, recurrence)")
        u, conv = self.conv.step(self.input(self.norm(x)), before[0])
        h, recurrence = self.recurrence.step(u, before[1])
        return self.output(self.gate(x) * h), HawkState(conv, recurrence)
