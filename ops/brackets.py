"""Bracket matching.

    brackets:  (m[t], n[t]): the closing brackets without an opening one, and the open ones

The input is an integer: positive for an opening bracket, negative for a closing one, 0 for anything
else. The element is (m, n), the normal form of a string of brackets once all pairs are removed: m
closing and then n opening ones, both in the input's dtype. (m, n) ∘ (r, s) = (m + r − k, n + s − k)
with k = min(n, r): the bicyclic monoid, not commutative. Identity (0, 0). A string is balanced up
to t where both are 0, and broken for good where m > 0; n is the depth of nesting.

Cost per element: 5 operations, reads one integer and writes two.

Source: A. H. Clifford, G. B. Preston, "The Algebraic Theory of Semigroups", 1961, section 1.12.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> text = "(a(b)))"
>>> x = torch.tensor([(c == "(") - (c == ")") for c in text])
>>> unmatched, depth = associative_scan(ops.brackets, x)
>>> depth, int(unmatched[-1])
(tensor([1, 1, 2, 2, 1, 0, 0]), 1)
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


def _lift(x: Tensor) -> Pair:
    return (x < 0).to(x.dtype), (x > 0).to(x.dtype)


@monoid(identity=(0, 0), lift=_lift)
def brackets(left: Pair, right: Pair) -> Pair:
    """What is left of both strings."""
    m, n = left
    r, s = right
    matched = torch.minimum(n, r)
    return m + r - matched, s + n - matched
