"""Softmax over a stream.

Combining two elements rescales both to the greater maximum, so that nothing overflows. A score of
−∞ is masked: it weighs nothing.

Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
2018; M. N. Rabe, C. Staats, "Self-attention does not need O(n²) memory", arXiv:2112.05682, 2021.
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _weight(x: Tensor) -> Tensor:
    """1; 0 where x is −∞, and NaN where it is NaN."""
    return torch.where(x > -math.inf, torch.ones_like(x), torch.where(x == x, 0.0, x.detach()))


def _rescale(old: Tensor, new: Tensor) -> Tensor:
    """exp(old − new), 1 where both are the same infinity, or NaN as the weights then are.

    Where they are equal and finite a 0 in place of the difference would have no derivative."""
    gap = old - new
    return torch.exp(torch.where(gap == gap, gap, 0.0))


@monoid(identity=(-math.inf, 0.0), lift=lambda x: (x, _weight(x)))
def online_softmax(left: Pair, right: Pair) -> Pair:
    """The maximum and normaliser of a softmax: m = max x, s = Σ exp(x − m), over x[0 … t].

    Inputs: x, a real float: the score.
    Element: (m, s). x enters as (x, 1).
    Outputs: (m, s). log Σ exp(x) is m + log s; the softmax of the last step is exp(x − m) / s.
    Identity: (−∞, 0).
    Cost: 2 exp and 4 flops; reads one number, writes two.

    >>> import torch
    >>> from assocscan import ops, reduce
    >>> x = torch.tensor([1000.0, 1001.0, 999.0])
    >>> m, s = reduce(ops.online_softmax, x)
    >>> bool(torch.allclose(m + s.log(), x.logsumexp(0)))
    True
    """
    m1, s1 = left
    m2, s2 = right
    m = torch.maximum(m1, m2)
    return m, s1 * _rescale(m1, m) + s2 * _rescale(m2, m)


def _lift_attention(x: Tensor, v: Tensor) -> Triple:
    masked = x == -math.inf
    one = (x - x + 1).detach()  # NaN where x is infinite or NaN, and so is its softmax
    return x, torch.where(masked, 0.0, one), torch.where(masked, 0.0, v)


@monoid(
    element_ndim=(0, 1),
    identity=lambda m, s, u: (-math.inf, 0.0, torch.zeros(u)),
    lift=_lift_attention,
    lower=lambda state: state[2] * (1 / state[1]),  # s is at least 1
)
def online_attention(left: Triple, right: Triple) -> Triple:
    """Attention over a stream: o[t] = Σ exp(x[s])·v[s] / Σ exp(x[s]), over s ≤ t.

    Inputs: (x, v […, d]), real floats: a score and a value.
    Element: (m, s, u [d]): the greatest score, the sum of exp(x − m), and the sum of exp(x − m)·v.
    Outputs: o […, d] = u / s; NaN where all scores are −∞ and from a score of +∞ on, as softmax is.
    Identity: (−∞, 0, 0).
    Cost: 2 exp and 3d + 4 flops; reads d + 1 numbers, writes d.

    Reduced instead of scanned, it is attention of one query over a stream of keys and values.

    >>> import torch
    >>> from assocscan import ops, reduce
    >>> x = torch.tensor([1000.0, 1001.0, 999.0])
    >>> reduce(ops.online_attention, (x, torch.eye(3))), x.softmax(0)
    (tensor([0.2447, 0.6652, 0.0900]), tensor([0.2447, 0.6652, 0.0900]))
    """
    m1, s1, u1 = left
    m2, s2, u2 = right
    m = torch.maximum(m1, m2)
    a, b = _rescale(m1, m), _rescale(m2, m)
    return m, s1 * a + s2 * b, u1 * a + u2 * b
