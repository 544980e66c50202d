"""Running extrema, alone or with the position where they were met.

    max:     y[t] = max(x[0], …, x[t])                       identity −inf
    min:     y[t] = min(x[0], …, x[t])                       identity +inf
    minmax:  (min, max)[t] of x[0], …, x[t]                  identity (+inf, −inf)
    argmax:  (v, i)[t] = the pair (v, i)[s], s ≤ t, of greatest v
    argmin:  (v, i)[t] = the pair (v, i)[s], s ≤ t, of least v

For max and min the element is one number, real or bool, for minmax a pair made of one; an infinite
identity saturates to the dtype's bound for integers. For argmax and argmin it is (value, index),
and the index may be of any dtype: it is carried along, never compared.

NaN propagates. At ties argmax and argmin keep the pair that comes later in the scan, and so the
later NaN, as torch.cummax does. This is associative: among three pairs either grouping selects the
last of those that rank highest, NaN above everything. With `reverse` the scan ends at the start of
the axis, so the later pair is the one with the smaller position.

argmax and argmin have no identity: (−inf, i) loses to every pair on its right, but it also wins
against −inf on its left. An exclusive scan takes `init=(value, index)`.

Cost per element: max, min 1 comparison, reads and writes one number; minmax 2 comparisons, reads
one number and writes two; argmax, argmin 3 comparisons, reads and writes value and index.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> x = torch.tensor([2.0, 7.0, 7.0, 1.0])
>>> associative_scan(ops.min, x)
tensor([2., 2., 2., 1.])
>>> value, index = associative_scan(ops.argmax, (x, torch.arange(4)))
>>> index
tensor([0, 1, 2, 2])
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=-math.inf)
def max(left: Tensor, right: Tensor) -> Tensor:
    """The greater of the two, or NaN if either is."""
    return torch.maximum(left, right)


@monoid(identity=math.inf)
def min(left: Tensor, right: Tensor) -> Tensor:
    """The lesser of the two, or NaN if either is."""
    return torch.minimum(left, right)


@monoid(identity=(math.inf, -math.inf), lift=lambda x: (x, x))
def minmax(left: Pair, right: Pair) -> Pair:
    """The lesser of the minima, the greater of the maxima."""
    return torch.minimum(left[0], right[0]), torch.maximum(left[1], right[1])


@monoid
def argmax(left: Pair, right: Pair) -> Pair:
    """The pair of the greater value, the right one at ties."""
    return _select(right[0] >= left[0], left, right)


@monoid
def argmin(left: Pair, right: Pair) -> Pair:
    """The pair of the lesser value, the right one at ties."""
    return _select(right[0] <= left[0], left, right)


argmax.fields = argmin.fields = ("value", "index")


def _select(right_ranks: Tensor, left: Pair, right: Pair) -> Pair:
    """The right pair where it ranks or is NaN; a NaN on the left fails the comparison and stays."""
    take_right = right_ranks | (right[0] != right[0])
    value = torch.where(take_right, right[0], left[0])
    index = torch.where(take_right, right[1], left[1])
    return value, index
