"""The last valid value."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(0.0, False), lift=lambda x, valid: (torch.where(valid, x, False), valid))
def last_valid(left: Pair, right: Pair) -> Pair:
    """The last valid value so far.

    Inputs: (x, valid): a number of any dtype, and a bool.
    Element: (x, valid), with 0 for x where it is not valid.
    Outputs: (x[s], True), s the last step ≤ t that is valid; (0, False) where there is none.
    Identity: (0, False).
    Cost: 1 selection; reads a number and a bool, writes both.

    `assocscan.forward_fill` fills gaps with it.

    Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.5 (copy-scan).

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x, valid = torch.tensor([5, 7, 8, 9]), torch.tensor([False, True, False, True])
    >>> associative_scan(ops.last_valid, (x, valid))
    (tensor([0, 7, 7, 9]), tensor([False,  True,  True,  True]))
    """
    return torch.where(right[1], right[0], left[0]), left[1] | right[1]
