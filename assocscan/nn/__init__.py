"""Layers for sequences, as torch modules: recurrences and what stands around them.

Recurrent layers take x [B, L, D] and the state that the sequence before left, and return the
output [B, L, D] and the state that this one leaves; `step` takes one position x_t [B, D]. Feeding
states on, chunk by chunk or step by step, gives what one call on the whole sequence gives. With
`reverse=True` they run from the end. (`AdaptiveRankSemiseparable` has its state in diagnostics.)

RGLRU, Hawk, Mamba, LRU, S5, MatrixLRU, the diagonal layers, CausalConv and Bidirectional take a
process group as `group=`: x is then this rank's part of a sequence, and states are those of the
whole sequence, on every rank. DiagonalGRU, DiagonalLSTM and DiagonalSLSTM are not linear in their
state, and their ranks take turns. Gradients of parameters are this rank's share, to be summed over
the group.

They and AdaptiveRankSemiseparable take `offsets=` [S + 1], the boundaries of S sequences packed
along L, the same in each row of the batch. Each sequence then starts with a state of its own:
states that enter and leave have a leading S, [S, B, …], and convolutions start afresh too.

>>> import torch
>>> from assocscan.nn import RGLRU
>>> layer, x = RGLRU(8, heads=2), torch.randn(4, 100, 8)
>>> y, state = layer(x)
>>> first, state = layer(x[:, :60])
>>> second, state = layer(x[:, 60:], state)
>>> torch.allclose(torch.cat([first, second], 1), y, atol=1e-5)
True
"""

from .ar_ssm import AdaptiveRankSemiseparable
from .bidirectional import Bidirectional
from .block_linear import BlockLinear
from .causal_conv import CausalConv
from .diagonal.gru import DiagonalGRU
from .diagonal.lstm import DiagonalLSTM
from .diagonal.slstm import DiagonalSLSTM
from .hawk import Hawk
from .lru import LRU
from .mamba import Mamba
from .matrix_lru import MatrixLRU
from .norm_linear_gelu import NormLinearGELU, NormLinearTile, norm_linear_gelu
from .rglru import RGLRU, rglru
from .s5 import S5

__all__ = [
    "LRU",
    "RGLRU",
    "S5",
    "AdaptiveRankSemiseparable",
    "Bidirectional",
    "BlockLinear",
    "CausalConv",
    "DiagonalGRU",
    "DiagonalLSTM",
    "DiagonalSLSTM",
    "Hawk",
    "Mamba",
    "MatrixLRU",
    "NormLinearGELU",
    "NormLinearTile",
    "norm_linear_gelu",
    "rglru",
]
