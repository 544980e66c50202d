"""The gated recurrent unit with diagonal recurrent weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..recurrent_layer import recurrent
from .layer import Cell, DiagonalLayer, Tensors, headers_of_turns


def gru_step(h: Tensor, gates: Tensors, weights: Tensors) -> Tensor:
    """h[t] of one channel; in the dtype of the gates."""
    z, r, n = gates
    a, b, c = weights
    update = torch.sigmoid(z + a * h)
    reset = torch.sigmoid(r + b * h)
    candidate = torch.tanh(n + reset * (c * h))
    return ((1 - update) * candidate + update * h).to(n.dtype)


@recurrent(headers_of_turns)
class DiagonalGRU(DiagonalLayer[Tensor]):
    """The gated recurrent unit, each channel of which sees only itself in the past.

        z[t] = σ(W_z x[t] + b_z + u_z ⊙ h[t−1])                 how much of h stays
        r[t] = σ(W_r x[t] + b_r + u_r ⊙ h[t−1])                 how much of h the candidate sees
        n[t] = tanh(W_n x[t] + b_n + r[t] ⊙ u_n ⊙ h[t−1])       the candidate
        h[t] = (1 − z[t]) ⊙ n[t] + z[t] ⊙ h[t−1]

    x [B, L, features] → (h [B, L, width], state [B, width], float32 where the layer has 16 bits);
    the width is that of the features where it is left out. Parameters: `input` (an nn.Linear from
    the features to the gates z, r, n, in this order) and `recurrent` [3, width], the rows u_z, u_r,
    u_n, drawn between −1 and 1. With matrices in place of u this is torch.nn.GRU (without its
    recurrent biases), whose weights hold the gates in another order: r, z, n. Channels meet
    in `input`, and in layers above.

    The recurrence is not linear in h and no associative scan: it is `nonlinear_recurrence`, one
    kernel that walks along L, all channels of all rows beside one another.

    >>> import torch
    >>> from assocscan.nn import DiagonalGRU
    >>> layer, x = DiagonalGRU(8, width=16), torch.randn(2, 50, 8)
    >>> h, state = layer(x)
    >>> h_next, state = layer.step(torch.randn(2, 8), state)

    Raises ValueError for x of another shape and for a state that does not broadcast to
    [B, width], TypeError for other dtypes.

    Cost per position: 6 · features · width flops of the product; 13 flops, two sigmoids and a tanh
    per channel.

    Sources: K. Cho et al., "Learning phrase representations using RNN encoder–decoder for
    statistical machine translation", EMNLP 2014, arXiv 1406.1078, equations 5 to 8; S. Li et al.,
    "Independently recurrent neural network (IndRNN)", CVPR 2018, arXiv 1803.04831, for one
    recurrent weight per channel; F. Danieli et al., "ParaRNN: unlocking parallel training of
    nonlinear RNNs for large language models", 2025, arXiv 2510.21450, for GRUs of this kind in
    large models.
    """

    _cell = Cell(gru_step, 3, 0.0)
