"""The long short-term memory with diagonal recurrent weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...torch_state import loadable
from ..recurrent_layer import recurrent
from .layer import Cell, DiagonalLayer, Tensors, headers_of_turns

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


@recurrent(headers_of_turns)
class DiagonalLSTM(DiagonalLayer[LSTMState]):
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

    _cell = Cell(lstm_step, 4, (0.0, 0.0), LSTMState)

    def __init__(self, features: int, width: int | None = None) -> None:
        super().__init__(features, width)
        width = self.recurrent.shape[1]
        with torch.no_grad():
            self.input.bias[width : 2 * width] = FORGET_BIAS
