"""A linear map whose matrix is block-diagonal."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import ScanTypeError, ScanValueError
from ..monoids.call_errors import checked_methods
from ..wording import kind_of
from .states import require_dtype, require_sizes


@checked_methods
class BlockLinear(nn.Module):
    """y = W x + b with W block-diagonal: one block per head.

    x [..., features] → y [..., out_features]; head k maps slice k of x, of features / heads
    numbers, to slice k of y. Parameters: weight [heads, in, out], bias [out_features]. With one
    head it is `torch.nn.Linear`.

    >>> import torch
    >>> from assocscan.nn import BlockLinear
    >>> BlockLinear(8, 8, heads=4)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])

    Raises ValueError where the features cannot be divided by the heads.

    Cost per position: 2 · features · out_features / heads flops.

    Source: the gates of the RG-LRU, S. De et al., "Griffin", arXiv 2402.19427, section 2.4.
    """

    def __init__(self, features: int, out_features: int, heads: int = 1) -> None:
        super().__init__()
        require_sizes(features=features, out_features=out_features, heads=heads)
        if features % heads or out_features % heads:
            raise ScanValueError(
                f"{heads} heads do not divide {features} features and {out_features} outputs"
            )
        self.heads = heads
        size = features // heads
        self.weight = nn.Parameter(torch.empty(heads, size, out_features // heads))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.normal_(self.weight, std=1 / math.sqrt(size))

    def extra_repr(self) -> str:
        return f"{self.heads * self.weight.shape[1]}, {self.bias.shape[0]}, heads={self.heads}"

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last dimension of x."""
        features = self.heads * self.weight.shape[1]
        if not isinstance(x, Tensor):
            raise ScanTypeError(f"x is {kind_of(x)}, the layer takes a tensor [..., {features}]")
        if x.dim() == 0 or x.shape[-1] != features:
            raise ScanValueError(f"x has shape {list(x.shape)}, the layer takes [..., {features}]")
        require_dtype(x, self.weight)
        if self.heads == 1:
            return nn.functional.linear(x, self.weight[0].T, self.bias)
        blocks = x.unflatten(-1, (self.heads, -1))
        y = torch.einsum("...hi,hio->...ho", blocks, self.weight).flatten(-2)
        return y + self.bias.to(y.dtype)  # that of autocast
