"""Two recurrent layers, one from each end."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ScanTypeError
from ..monoids.call_errors import checked_methods
from ..wording import shown
from .over_ranks import headers_of, layer_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@layer_over_ranks(lambda layer: headers_of(layer.forward_layer) + headers_of(layer.backward_layer))
@checked_methods
class Bidirectional(nn.Module):
    """y[t] = [forward(x)[t], backward(x, reverse)[t]]: every position sees the whole sequence.

    x [B, L, D] → y [B, L, D_forward + D_backward]. Both layers are recurrent ones of this package,
    or like them: called as layer(x, None, reverse), which returns a tuple of y and something else.
    The second runs from the end by indexing; nothing is flipped in memory.

    >>> import torch
    >>> from assocscan.nn import LRU, Bidirectional
    >>> Bidirectional(LRU(8), LRU(8))(torch.randn(2, 50, 8)).shape
    torch.Size([2, 50, 16])

    Raises TypeError for a layer that is not called so.

    Cost: that of both layers.

    Source: M. Schuster and K. K. Paliwal, "Bidirectional recurrent neural networks", IEEE
    Transactions on Signal Processing 45(11), 1997.
    """

    def __init__(self, forward_layer: nn.Module, backward_layer: nn.Module) -> None:
        super().__init__()
        for name, layer in (("forward_layer", forward_layer), ("backward_layer", backward_layer)):
            if not isinstance(layer, nn.Module):
                raise ScanTypeError(f"{name} is {shown(layer)}, expected a layer")
            try:
                inspect.signature(layer.forward).bind(None, None, False)
            except TypeError:
                raise ScanTypeError(
                    f"a {type(layer).__name__} has no direction: Bidirectional joins layers that "
                    "are called as layer(x, state, reverse)"
                ) from None
        self.forward_layer, self.backward_layer = forward_layer, backward_layer

    def forward(
        self, x: Tensor, *, group: ProcessGroup | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """y [B, L, D_forward + D_backward]; with `group`, x is this rank's part of a sequence; with
        `offsets` [S + 1], sequences are packed along L."""
        options = {"group": group, "offsets": offsets}
        options = {name: value for name, value in options.items() if value is not None}
        ahead, _ = self.forward_layer(x, None, False, **options)
        back, _ = self.backward_layer(x, None, True, **options)
        return torch.cat([ahead, back], -1)
