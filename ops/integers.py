"""Running greatest common divisors.

    gcd:  y[t] = gcd(x[0], …, x[t])

The element is one integer; the result is not negative, and gcd(0, x) = |x|. The identity 0 is
neutral for elements that are not negative, which is what a scan combines after its first.

Cost per element: some ten divisions of Euclid's algorithm, reads and writes one integer. On GPUs
every thread walks its chains alone (a scan within a tile cannot loop).

Source: Euclid, Elements, VII.2.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> associative_scan(ops.gcd, torch.tensor([84, 36, 30, 7]))
tensor([84, 12,  6,  1])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0, lift=torch.abs)
def gcd(left: Tensor, right: Tensor) -> Tensor:
    """The greatest common divisor of both."""
    return torch.gcd(left, right)
