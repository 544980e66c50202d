"""The long short-term memory with diagonal recurrent weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ...monoids.call_errors import checked_methods
from ...torch_state import loadable
from ..over_ranks import layer_over_ranks
from ..states import require_sizes
from .layer import Cell, Tensors, drawn_weights, headers_of_turns, position, sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FORGET_BIAS = 1.0  # so that cells keep what they hold before they have learnt what to forget


@loadable
class LSTMState(NamedTuple):
    """What one part of a sequence leaves to the next: the output h and the cell c."""

    hidden: Tensor  # [B, width], with a leading S for packed sequences
    cell: Tensor  # the same

    def detach(self) -> LSTMState:
        """The state without its graph: gradients end there."""
        return LSTMState(*(t.detach() for t in self))


def lstm_step(state: Tensors, gates: Tensors, weights: Tensors) -> Tensors:
    """(h, c)[t] of one channel; in the dtype of the gates."""
    h, c = state
    i, f, g, o = (gate + u * h for gate, u in zip(gates, weights, strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h.to(gates[0].dtype), c.to(gates[0].dtype)


CELL = Cell(lstm_step, (0.0, 0.0), LSTMState._fields)


@layer_over_ranks(headers_of_turns)
@checked_methods
class DiagonalLSTM(nn.Module):
    """The long short-term memory, each channel of which sees only itself in the past.

        i[t] = σ(W_i x[t] + b_i + u_i ⊙ h[t−1])                 the input gate
        f[t] = σ(W_f x[t] + b_f + u_f ⊙ h[t−1])                 the forget gate
        g[t] = tanh(W_g x[t] + b_g + u_g ⊙ h[t−1])              what may enter the cell
        o[t] = σ(W_o x[t] + b_o + u_o ⊙ h[t−1])                 the output gate
        c[t] = f[t] ⊙ c[t−1] + i[t] ⊙ g[t]
        h[t] = o[t] ⊙ tanh(c[t])

    x [B, L, features] → (h [B, L, width], `LSTMState` of h and c, [B, width] each, float32 where
    the layer has 16 bits); the width is that of the features where it is left out. Parameters:
    `input` (an nn.Linear from the features to the gates i, f, g, o, in torch.nn.LSTM's order; b_f
    starts at 1) and `recurrent` [4, width], the rows u_i, u_f, u_g, u_o, drawn between −1 and 1.

    The recurrence is `nonlinear_recurrence` with two numbers of state per channel.

    >>> import torch
    >>> from assocscan.nn import DiagonalLSTM
    >>> layer, x = DiagonalLSTM(8, width=16), torch.randn(2, 50, 8)
    >>> h, state = layer(x)
    >>> h_next, state = layer.step(torch.randn(2, 8), state)
    >>> state.cell.shape
    torch.Size([2, 16])

    Raises ValueError for x of another shape and for a state that does not broadcast to
    [B, width], TypeError for other dtypes and for a state that is no pair of tensors.

    Cost per position: 8 · features · width flops of the product; 12 flops, three sigmoids and two
    tanh per channel.

    Sources: S. Hochreiter and J. Schmidhuber, "Long short-term memory", Neural Computation 9(8),
    1997; F. A. Gers, J. Schmidhuber and F. Cummins, "Learning to forget: continual prediction with
    LSTM", Neural Computation 12(10), 2000, for the forget gate; R. Jozefowicz et al., "An empirical
    exploration of recurrent network architectures", ICML 2015, for its bias of 1; S. Li et al.,
    arXiv 1803.04831, for one recurrent weight per channel.
    """

    def __init__(self, features: int, width: int | None = None) -> None:
        super().__init__()
        width = features if width is None else width
        require_sizes(features=features, width=width)
        self.input = nn.Linear(features, 4 * width)
        self.recurrent = drawn_weights(4, width)
        with torch.no_grad():
            self.input.bias[width : 2 * width] = FORGET_BIAS

    def forward(
        self,
        x: Tensor,
        state: LSTMState | None = None,
        reverse: bool = False,
        *,
        group: ProcessGroup | None = None,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, LSTMState]:
        """(h, state) for x [B, L, features], from the state that a call before returned, or from
        an empty past; with `reverse`, from the end; with `group`, x is this rank's part of a
        sequence, and ranks run one after the other; with `offsets` [S + 1], S sequences are packed
        along L, and states are [S, B, width]."""
        h, last = sequences(self, CELL, x, state, reverse, group, offsets)
        return h, LSTMState(*last)

    def step(self, x: Tensor, state: LSTMState | None = None) -> tuple[Tensor, LSTMState]:
        """(h, state) for one position x [B, features], by torch operations.

        A state that S packed sequences left, [S, 1, …], enters as [S, …] (`[:, 0]` of its tensors),
        beside an x of S rows.
        """
        h, last = position(self, CELL, x, state)
        return h, LSTMState(*last)
