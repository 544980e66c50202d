"""The sLSTM, whose gates are exponentials, with diagonal recurrent weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...torch_state import loadable
from ..recurrent_layer import recurrent
from .layer import Cell, DiagonalLayer, Tensors, headers_of_turns

# m where nothing was stored: log 0, finite so that a product with a derivative of 0 is 0.
NOTHING = -1e30
# The forget gate's biases are spread over this range: memories of 20 to 400 positions at the start.
FORGET_BIASES = (3.0, 6.0)


@loadable
class SLSTMState(NamedTuple):
    """What one part of a sequence leaves to the next: h, c, n and m of `DiagonalSLSTM`."""

    hidden: Tensor  # [B, width], with a leading S for packed sequences
    cell: Tensor  # the same, and so the others
    normaliser: Tensor
    stabiliser: Tensor

    def detach(self) -> SLSTMState:
        """The state without its graph: gradients end there."""
        return SLSTMState(*(t.detach() for t in self))


def slstm_step(state: Tensors, gates: Tensors, weights: Tensors) -> Tensors:
    """(h, c, n, m)[t] of one channel; in the dtype of the gates, and m, which is a logarithm and
    has no digits to spare, in float32 at least."""
    h, c, n, m = state
    i, f, z, o = (gate + u * h for gate, u in zip(gates, weights, strict=True))
    dtype = gates[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    kept, entering = (F.logsigmoid(f) + m).to(wide), i.to(wide)
    m = torch.maximum(kept, entering)
    f, i = torch.exp(kept - m), torch.exp(entering - m)
    c = f * c + i * torch.tanh(z)
    n = f * n + i
    h = torch.sigmoid(o) * c / n
    return h.to(dtype), c.to(dtype), n.to(dtype), m


@recurrent(headers_of_turns)
class DiagonalSLSTM(DiagonalLayer[SLSTMState]):
    """The sLSTM of xLSTM: an exponential input gate, a memory divided by the sum of its weights.

        ĩ[t], f̃[t], z̃[t], õ[t] = W x[t] + b + u ⊙ h[t−1]        of each gate, its own W, b and u
        m[t] = max(log σ(f̃[t]) + m[t−1], ĩ[t])                  the stabiliser
        c[t] = exp(log σ(f̃[t]) + m[t−1] − m[t]) ⊙ c[t−1] + exp(ĩ[t] − m[t]) ⊙ tanh(z̃[t])
        n[t] = exp(log σ(f̃[t]) + m[t−1] − m[t]) ⊙ n[t−1] + exp(ĩ[t] − m[t])
        h[t] = σ(õ[t]) ⊙ c[t] / n[t]

    So c / n is a weighted mean of all tanh(z̃) so far, whose weights exp(ĩ) may outweigh what was
    stored before. The true memory is exp(m) c: m keeps c and n within the range of floats, and h
    does not depend on it. Of two forget gates in the paper, σ and exp, this is σ.

    x [B, L, features] → (h [B, L, width], `SLSTMState` of h, c, n and m, [B, width] each, float32
    where the layer has 16 bits); the width is that of the features where it is left out.
    Parameters: `input` (an nn.Linear from the features to the gates i, f, z, o, in this order; the
    biases of f are spread evenly from 3 to 6 over the channels) and `recurrent` [4, width], the
    rows u_i, u_f, u_z, u_o, drawn between −1 and 1. An empty memory is c = n = 0, m = −1e30.

    The recurrence is `nonlinear_recurrence` with four numbers of state per channel.

    >>> import torch
    >>> from assocscan.nn import DiagonalSLSTM
    >>> layer, x = DiagonalSLSTM(8, width=16), torch.randn(2, 50, 8)
    >>> h, state = layer(x)
    >>> h_next, state = layer.step(torch.randn(2, 8), state)
    >>> bool((state.normaliser >= 1).all())
    True

    Raises ValueError for x of another shape and for a state that does not broadcast to
    [B, width], TypeError for other dtypes and for a state that is no tuple of four
    tensors.

    Cost per position: 8 · features · width flops of the product; 18 flops, four exponentials, a
    logarithm, a tanh and a division per channel.

    Sources: M. Beck et al., "xLSTM: extended long short-term memory", NeurIPS 2024, arXiv
    2405.04517, section 2.2 and appendix A; S. Li et al., arXiv 1803.04831, for one recurrent weight
    per channel, where the paper has a matrix per head.
    """

    _cell = Cell(slstm_step, 4, (0.0, 0.0, 0.0, NOTHING), SLSTMState)

    def __init__(self, features: int, width: int | None = None) -> None:
        super().__init__(features, width)
        width = self.recurrent.shape[1]
        with torch.no_grad():
            self.input.bias[width : 2 * width] = torch.linspace(*FORGET_BIASES, width)
