"""The last valid value.

    last_valid:  (v[t], k[t]) = (x[s], True), s the last step ≤ t with valid[s]; (0, False) if none

The input is (x, valid): a number of any dtype and a bool. The element is the same pair, with 0
where it is not valid. Identity (0, False). `forward_fill` fills gaps with it.

Cost per element: 1 selection, reads and writes a number and a bool.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.5 (copy-scan).

>>> import torch
>>> from assocscan import associative_scan, ops
>>> x, valid = torch.tensor([5, 7, 8, 9]), torch.tensor([False, True, False, True])
>>> associative_scan(ops.last_valid, (x, valid))
(tensor([0, 7, 7, 9]), tensor([False,  True,  True,  True]))
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, False), lift=lambda x, valid: (torch.where(valid, x, 0), valid))
def last_valid(left: Pair, right: Pair) -> Pair:
    """The right value where it is valid, else the left one."""
    return torch.where(right[1], right[0], left[0]), left[1] | right[1]
