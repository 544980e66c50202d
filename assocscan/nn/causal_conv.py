"""A depthwise convolution that sees the past only, and can be fed in pieces."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..api.flags_and_backends import flag
from ..engines.base.shifted_leaves import sequence_of_steps
from ..errors import ScanTypeError, ScanValueError
from ..wording import kind_of
from .recurrent_layer import RecurrentLayer, recurrent
from .states import Run, of_sequences, require_sizes, squeezed


def halos(width: int) -> int:
    """How many times ranks exchange inputs for a convolution of this width."""
    return int(width > 1)


@recurrent(lambda layer: halos(layer.weight.shape[1]))
class CausalConv(RecurrentLayer[Tensor]):
    """y[t] = b + Σ_k w[k] ⊙ x[t − k], k = 0 … width − 1, one filter per channel.

    x [B, L, channels] → (y, state). The state [B, width − 1, channels] holds the last inputs; zeros
    stand before the first. With `reverse` the sum runs over x[t + k], and the state holds the first
    inputs. Parameters: weight [channels, width] (weight[:, k] is w[k]), bias [channels].

    >>> import torch
    >>> from assocscan.nn import CausalConv
    >>> conv, x = CausalConv(3, width=4), torch.randn(2, 10, 3)
    >>> y, state = conv(x)
    >>> y_next, state = conv.step(torch.randn(2, 3), state)

    Cost per element: 2 · width flops, reads and writes one number.

    Source: the temporal convolution of S. De et al., "Griffin", arXiv 2402.19427, section 2.3.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        require_sizes(channels=channels, width=width)
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if flag("bias", bias) else None
        nn.init.normal_(self.weight, std=1 / math.sqrt(width))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[1]}, bias={self.bias is not None}"

    def _entrance(self) -> tuple[int, Tensor]:
        return self.weight.shape[0], self.weight

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_inputs(state, self.weight, x, offsets, "state")

    def _along(self, x: Tensor, state: Tensor | None, run: Run) -> tuple[Tensor, Tensor]:
        # torch's convolution is a correlation: its first weight meets the earliest input.
        return convolved(x, self.weight.flip(1), self.bias, state, run)

    def _at(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = self(x[:, None], state)
        return y[:, 0], state


def require_inputs(
    state: object, weight: Tensor, x: Tensor, offsets: Tensor | None, called: str = "state"
) -> None:
    """Refuse a state of a convolution that is not in the shape of the last inputs; None is one that
    is not there yet.

    weight: of the convolution, its channels first and its width last. x: what the caller passed to
    the layer, whatever of it enters the convolution. called: where the layer has the state.
    """
    if state is None:
        return
    alone = x.shape[0], weight.shape[-1] - 1, weight.shape[0]
    shape, names = of_sequences(offsets, alone, "[B, conv_width − 1, channels]")
    if not isinstance(state, Tensor):
        raise ScanTypeError(
            f"the state of the convolution is {kind_of(state)}, expected a tensor {names}"
        )
    if state.dim() != len(shape) or state.shape != shape:
        raise ScanValueError(
            f"the state of the convolution has shape {list(state.shape)}, expected "
            f"{list(shape)}: {names} of x {list(x.shape)}; a state belongs to the layer and the "
            f"batch that it came from{squeezed(called, state.shape, shape)}"
        )


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, run: Run
) -> tuple[Tensor, Tensor]:
    """y[t] = bias + Σ_k weight[:, k] ⊙ x[t − width + 1 + k], and the state, as of `CausalConv`.

    weight: [channels, width], in torch's order: the last entry meets the latest input.
    """
    channels, width = weight.shape
    reverse, group, offsets = run
    if state is None:
        alone = x.shape[0], width - 1, channels
        state = x.new_zeros(of_sequences(offsets, alone, "")[0])
    leaving = None
    if group is not None and halos(width):
        from ..distributed.halo import halo

        state, leaving = halo(x, width - 1, state.to(x.dtype), reverse, group)
        x = torch.cat([x, state[:, :0]], 1)  # an empty part, too, depends on the exchange
    if x.shape[1] == 0:
        # The convolution of zeros, of which nothing is kept: it has the dtype of others, and its
        # gradients, which are zeros.
        zeros = torch.cat([x, x.new_zeros(x.shape[0], width, channels)], 1)
        y = correlated(zeros, weight, bias, reverse)[:, :0]
        return y, state.to(x.dtype, copy=True) if leaving is None else leaving
    if offsets is not None:
        return convolved_sequences(x, weight, bias, state.to(x.dtype), reverse, offsets)
    pieces = [x, state.to(x.dtype)] if reverse else [state.to(x.dtype), x]
    padded = torch.cat(pieces, 1)  # [B, width − 1 + L, channels]
    y = correlated(padded, weight, bias, reverse)
    if leaving is not None:
        return y, leaving
    kept = padded[:, : width - 1] if reverse else padded[:, padded.shape[1] - width + 1 :]
    return y, kept.clone()


def correlated(padded: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool) -> Tensor:
    """The sums over all windows of padded [B, L, channels]."""
    weight = weight.flip(1) if reverse else weight
    y = F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0])
    return y.transpose(1, 2)


def convolved_sequences(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, reverse: bool, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """`convolved` of packed sequences: one convolution of all of them, each behind its own state of
    width − 1 inputs (in front of it, if reverse), so that no window that counts meets another one.

    state: [S, B, width − 1, channels]. Sequence s begins at offsets[s] + s · (width − 1).
    """
    (batch, length, channels), count = x.shape, state.shape[0]
    more = weight.shape[1] - 1
    bounds = offsets.to(x.device).clamp(0, length)
    position = torch.arange(length, device=x.device)
    shifted = position + more * sequence_of_steps(bounds, length)
    step = (
        torch.arange(more, device=x.device) + more * torch.arange(count, device=x.device)[:, None]
    )
    first, last = (bounds[:-1, None] + step).flatten(), (bounds[1:, None] + step).flatten()
    entering, leaving = (last, first) if reverse else (first, last)
    place = torch.cat([shifted if reverse else shifted + more, entering])
    inputs = torch.cat([x, state.movedim(0, 1).flatten(1, 2)], 1)
    padded = x.new_zeros(batch, length + more * count, channels).index_copy(1, place, inputs)
    y = correlated(padded, weight, bias, reverse).index_select(1, shifted)
    kept = padded.index_select(1, leaving).view(batch, count, more, channels)
    return y, kept.movedim(1, 0)
