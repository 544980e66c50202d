"""Products and sums of numbers of either sign, stored as the logarithm of their size and a sign.

Zero is (−∞, 1), and a sum that cancels exactly gives that. A sum that is NaN has the sign 1. A sign
of an integer dtype takes no part in derivatives.

Source: F. A. Heinsen, "Efficient parallelization of a ubiquitous sequential computation",
arXiv:2311.06281, 2023, which writes the sign as an imaginary part.
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, 1))
def signed_log_prod(left: Pair, right: Pair) -> Pair:
    """Running product: s[t]·exp(l[t]) = Π s[u]·exp(l[u]), over u ≤ t.

    Inputs: (l, s): a real float, the logarithm of the size, and a sign of 1 or −1 of any dtype.
    Element: (l, s).
    Outputs: (l, s) of the product.
    Identity: (0, 1).
    Cost: 2 flops; reads l and s, writes both.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x = torch.tensor([2.0, -5.0, 1.0])
    >>> l, s = associative_scan(ops.signed_log_prod, (x.abs().log(), x.sign()))
    >>> s * l.exp()
    tensor([  2., -10., -10.])
    """
    return left[0] + right[0], left[1] * right[1]


def _with_signs(x: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    """x · s1 · s2. Signs of an integer dtype are compared, not converted to floats."""
    if s1.is_floating_point():
        return (s1 * s2).to(x.dtype) * x
    return torch.where(s1 == s2, x, -x)


@monoid(identity=(-math.inf, 1))
def signed_log_sum(left: Pair, right: Pair) -> Pair:
    """Running sum: s[t]·exp(l[t]) = Σ s[u]·exp(l[u]), over u ≤ t.

    Inputs: (l, s): a real float, the logarithm of the size, and a sign of 1 or −1 of any dtype.
    Element: (l, s).
    Outputs: (l, s) of the sum.
    Identity: (−∞, 1).
    Cost: about 40 flops (one exp, one log1p); reads l and s, writes both.

    With `high` the larger of two elements, their sum is high + log1p(±exp(low − high)): nothing
    overflows. Relative errors are those of the sum itself, large only where it cancels. ∞ − ∞ is
    NaN.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x = torch.tensor([2.0, -5.0, 1.0])
    >>> l, s = associative_scan(ops.signed_log_sum, (x.abs().log(), x.sign()))
    >>> s * l.exp()
    tensor([ 2.0000, -3.0000, -2.0000])
    """
    l1, s1 = left
    l2, s2 = right
    left_higher = l1 >= l2
    high, low = torch.where(left_higher, l1, l2), torch.where(left_higher, l2, l1)
    # Two +∞ have the ratio 1, so that ∞ − ∞ is NaN. The ratio of two −∞ is 0.
    difference = torch.where(low == -math.inf, low, torch.where(low == math.inf, 0.0, low - high))
    ratio = torch.exp(difference)
    size = high + torch.log1p(_with_signs(ratio, s1, s2))
    sign = torch.where(size > -math.inf, torch.where(left_higher, s1, s2), 1)
    return size, sign.to(s1.dtype)
