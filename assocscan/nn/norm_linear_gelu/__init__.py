"""LayerNorm, Linear and GELU as one layer: with its kernels, their tiles, and repeated calls."""

from .layer import NormLinearGELU, norm_linear_gelu
from .tiles import Tile as NormLinearTile

__all__ = ["NormLinearGELU", "NormLinearTile", "norm_linear_gelu"]
