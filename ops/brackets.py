"""Bracket matching."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


def _lift(x: Tensor) -> Pair:
    return (x < 0).to(x.dtype), (x > 0).to(x.dtype)


@monoid(identity=(0, 0), lift=_lift)
def brackets(left: Pair, right: Pair) -> Pair:
    """The brackets that have no partner so far.

    Inputs: x, an integer: positive for an opening bracket, negative for a closing one, 0 for
        anything else.
    Element: (m, n), integers of the dtype of x: m closing brackets and then n opening ones, which
        is what remains of a text when all pairs are removed. In int8 more than 127 wrap: pass
        x.long() for deep texts.
    Outputs: (m, n). n is the depth of nesting. Where m > 0 a closing bracket had no partner. Where
        both are 0 the text is balanced so far.
    Identity: (0, 0).
    Cost: 5 operations; reads one integer, writes two.

    (m, n) ∘ (r, s) = (m + r − k, n + s − k) with k = min(n, r). This is the bicyclic monoid; it is
    not commutative.

    Source: A. H. Clifford, G. B. Preston, "The Algebraic Theory of Semigroups", 1961, section 1.12.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> text = "(a(b)))"
    >>> x = torch.tensor([(c == "(") - (c == ")") for c in text])
    >>> unmatched, depth = associative_scan(ops.brackets, x)
    >>> depth, int(unmatched[-1])
    (tensor([1, 1, 2, 2, 1, 0, 0]), 1)
    """
    m, n = left
    r, s = right
    matched = torch.minimum(n, r)
    return m + r - matched, s + n - matched
