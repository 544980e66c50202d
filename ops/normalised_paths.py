"""`log_matmul` and `max_matmul` of long series: weights of paths whose common growth is kept apart.

Weights add up along paths. After many steps all of them are large, and their differences, which
posteriors and best paths are made of, have few digits left. Here the weight from state i to state j
is W[i, j] + s[i] + c, with s[0] = 0: the greatest in a row of W is near 0, and s and c are whole
numbers, which floats add without rounding up to 2^24 (2^53 in float64). c grows with the number of
steps; s, which posteriors and paths depend on, does not where states are reached from one another.

Derivatives pass through W alone, as if s and c were constants: what is computed from weights does
not depend on how they are divided between W, s and c.

An element is (W[0], c, W[1:], s[1:]), without the last two for one state. Row 0 is a leaf of its
own, since a carry holds no other row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from assocscan.ops.semiring import log_sum

Paths = tuple[Tensor, ...]


def log_paths(left: Paths, right: Paths) -> Paths:
    """The weights of all paths: `log_matmul`."""
    return _combined(log_sum, left, right)


def max_paths(left: Paths, right: Paths) -> Paths:
    """The weights of the best paths: `max_matmul`."""
    return _combined(torch.amax, left, right)


def element(W: Tensor, s: Tensor, c: Tensor) -> Paths:
    """The element of these weights. W [K, K], s [K], c []."""
    return (W[0], s[0] + c) if len(s) == 1 else (W[0], s[0] + c, W[1:], s[1:] - s[0])


def whole(high: Tensor) -> Tensor:
    """The whole number to subtract from weights of which `high` is the greatest: 0 where it is
    infinite."""
    high = high.detach().round()
    return torch.where(torch.isinf(high), 0.0, high)


def _weights(paths: Paths) -> tuple[Tensor, Tensor, Tensor]:
    first, c, *rest = paths
    W, s = first.unsqueeze(0), torch.zeros_like(first[:1])
    if rest:
        W, s = torch.cat((W, rest[0])), torch.cat((s, rest[1]))
    return W, s.detach(), c.detach()


def _combined(total: Callable[[Tensor, int], Tensor], left: Paths, right: Paths) -> Paths:
    (W1, s1, c1), (W2, s2, c2) = _weights(left), _weights(right)
    # base[i] = s2[k] for the state k that the heaviest paths from i pass through, other than states
    # that no path leaves: their s has no meaning.
    is_end = W2.detach().amax(1) == -torch.inf
    reached = torch.where(is_end, -torch.inf, W1.detach() + s2)
    most, base = reached[:, 0], s2[0].expand_as(s1)
    for k in range(1, len(s2)):
        more = reached[:, k] > most
        most, base = torch.where(more, reached[:, k], most), torch.where(more, s2[k], base)
    through = W1 + (s2 - base.unsqueeze(1))
    W = total(through.unsqueeze(2) + W2, 1)
    high = whole(W.amax(1))
    return element(W - high.unsqueeze(1), s1 + base + high, c1 + c2)
