"""Running extrema, alone or with the position where they were met.

NaN propagates. At ties argmax and argmin keep the pair that comes later in the scan, and so the
later NaN, as torch.cummax does. This is associative: among three pairs either grouping selects the
last of those that rank highest, NaN above everything. With `reverse` the scan ends at the start of
the axis, so the later pair is the one with the smaller position.
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=-math.inf)
def max(left: Tensor, right: Tensor) -> Tensor:
    """Running maximum: y[t] = max(x[0], …, x[t]).

    Inputs: x, a real number of any dtype, or bool.
    Element: the same number.
    Outputs: y, in the dtype of x.
    Identity: −∞; for integers the least value of the dtype.
    Cost: 1 comparison; reads one number, writes one.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.max, torch.tensor([2.0, 7.0, 3.0, 9.0]))
    tensor([2., 7., 7., 9.])
    """
    return torch.maximum(left, right)


@monoid(identity=math.inf)
def min(left: Tensor, right: Tensor) -> Tensor:
    """Running minimum: y[t] = min(x[0], …, x[t]).

    Inputs: x, a real number of any dtype, or bool.
    Element: the same number.
    Outputs: y, in the dtype of x.
    Identity: +∞; for integers the greatest value of the dtype.
    Cost: 1 comparison; reads one number, writes one.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.min, torch.tensor([2.0, 7.0, 1.0, 9.0]))
    tensor([2., 2., 1., 1.])
    """
    return torch.minimum(left, right)


@monoid(identity=(math.inf, -math.inf), lift=lambda x: (x, x))
def minmax(left: Pair, right: Pair) -> Pair:
    """Running minimum and maximum in one pass.

    Inputs: x, a real number of any dtype, or bool.
    Element: (low, high), both x at first.
    Outputs: (low, high), in the dtype of x.
    Identity: (+∞, −∞); for integers the bounds of the dtype.
    Cost: 2 comparisons; reads one number, writes two.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.minmax, torch.tensor([2.0, 7.0, 1.0, 9.0]))
    (tensor([2., 2., 1., 1.]), tensor([2., 7., 7., 9.]))
    """
    return torch.minimum(left[0], right[0]), torch.maximum(left[1], right[1])


@monoid
def argmax(left: Pair, right: Pair) -> Pair:
    """The greatest value so far, and where it was met.

    Inputs: (value, index): a real number, and a number of any dtype that is carried along, such as
        `torch.arange(length)`; beside a value [B, L, D] it is [1, L, 1]. The index is never
        compared.
    Element: (value, index).
    Outputs: (value, index)[s] of the greatest value among s ≤ t; at ties the later pair.
    Identity: none: (−∞, i) would win against −∞ on its left. An exclusive scan needs
        `init=(value, index)`; without it ValueError is raised.
    Cost: 3 comparisons; reads value and index, writes both.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x = torch.tensor([2.0, 7.0, 7.0, 1.0])
    >>> value, index = associative_scan(ops.argmax, (x, torch.arange(4)))
    >>> index
    tensor([0, 1, 2, 2])
    """
    return _select(right[0] >= left[0], left, right)


@monoid
def argmin(left: Pair, right: Pair) -> Pair:
    """The least value so far, and where it was met.

    Inputs: (value, index): a real number, and a number of any dtype that is carried along, such as
        `torch.arange(length)`; beside a value [B, L, D] it is [1, L, 1]. The index is never
        compared.
    Element: (value, index).
    Outputs: (value, index)[s] of the least value among s ≤ t; at ties the later pair.
    Identity: none: (+∞, i) would win against +∞ on its left. An exclusive scan needs
        `init=(value, index)`; without it ValueError is raised.
    Cost: 3 comparisons; reads value and index, writes both.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> x = torch.tensor([7.0, 2.0, 2.0, 3.0])
    >>> value, index = associative_scan(ops.argmin, (x, torch.arange(4)))
    >>> index
    tensor([0, 1, 2, 2])
    """
    return _select(right[0] <= left[0], left, right)


argmax.fields = argmin.fields = ("value", "index")


def _select(right_ranks: Tensor, left: Pair, right: Pair) -> Pair:
    """The right pair where it ranks or is NaN; a NaN on the left fails the comparison and stays."""
    take_right = right_ranks | (right[0] != right[0])
    value = torch.where(take_right, right[0], left[0])
    index = torch.where(take_right, right[1], left[1])
    return value, index
