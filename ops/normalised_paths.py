"""`log_matmul` and `max_matmul` of long series: weights of paths whose common growth is kept apart.

Weights add up along paths. After many steps all of them are large, and their differences, which
posteriors and best paths are made of, have few digits left. Here an element is (W [K, K], s [K],
r [K]): the weight from state i to state j is W[i, j] + s[i] + r[i], and the greatest in a row of W
is 0. s is a sum over the steps, and r is what rounding took from it.

Derivatives pass through W alone, as if s and r were constants: what is computed from weights does
not depend on how they are divided between W and s.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from assocscan.ops.compensated import rounding
from assocscan.ops.semiring import log_sum

Paths = tuple[Tensor, Tensor, Tensor]


def log_paths(left: Paths, right: Paths) -> Paths:
    """The weights of all paths: `log_matmul`."""
    return _combined(log_sum, left, right)


def max_paths(left: Paths, right: Paths) -> Paths:
    """The weights of the best paths: `max_matmul`."""
    return _combined(torch.amax, left, right)


def finite(high: Tensor) -> Tensor:
    """What to subtract from weights of which `high` is the greatest: 0 where it is infinite."""
    return torch.where(torch.isinf(high), 0.0, high)


def _combined(total: Callable[[Tensor, int], Tensor], left: Paths, right: Paths) -> Paths:
    W1, s1, r1 = left
    W2, s2, r2 = right
    s1, r1, s2, r2 = (t.detach() for t in (s1, r1, s2, r2))
    # The state k through which most of the weight from i passes has base[i] = s2[k]. The difference
    # s2 − base is exact wherever it is small, and so wherever a path has a share in the total.
    reached = W1.detach() + s2
    most = reached == reached.amax(1, keepdim=True)
    base = torch.where(most, s2, -math.inf).amax(1)
    through = W1 + (s2 - base[:, None] + r2)
    W = total(through[:, :, None] + W2, 1)
    high = finite(W.detach().amax(1))
    growth = base + high
    s = s1 + growth
    r = r1 + rounding(base, high, growth) + rounding(s1, growth, s)
    return W - high[:, None], s, r
