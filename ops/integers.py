"""Running greatest common divisors."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0, lift=torch.abs)
def gcd(left: Tensor, right: Tensor) -> Tensor:
    """Running greatest common divisor: y[t] = gcd(x[0], …, x[t]).

    Inputs: x, an integer.
    Element: |x|.
    Outputs: y, in the dtype of x, not negative unless every x so far is 0 or the least number of
        its dtype, whose |x| does not fit. gcd(0, x) = |x|.
    Identity: 0.
    Cost: some ten divisions of Euclid's algorithm; reads one integer, writes one. On GPUs every
        thread walks its chains alone (a scan within a tile cannot loop).

    Source: Euclid, Elements, VII.2.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.gcd, torch.tensor([84, 36, 30, 7]))
    tensor([84, 12,  6,  1])
    """
    # torch's own is negative where one of them is the least of its dtype, which has no |x|.
    return torch.gcd(left, right).abs()
