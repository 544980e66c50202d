"""First-order linear recurrences.

    affine:  h[t] = a[t] · h[t−1] + b[t],    A[t] = a[t] · … · a[0]

The element (a, b) is the map h ↦ a·h + b; combining two composes them, the left one first:
(a₁, b₁) ∘ (a₂, b₂) = (a₂·a₁, a₂·b₁ + b₂). The state is (A, h), with h starting from 0. Identity
(1, 0). Real or complex; a complex gradient is conjugated as everywhere in torch.

`assocscan.linear_recurrence` is this with a lower that keeps h, so that A is never written.

Cost per element: 3 flops (complex 14), reads a and b, writes A and h.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4; E. Martin and
C. Cundy, "Parallelizing linear recurrent neural nets over sequence length", ICLR 2018.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> a, b = torch.full((4,), 0.5), torch.tensor([8.0, 0.0, 0.0, 1.0])
>>> A, h = associative_scan(ops.affine, (a, b))
>>> h
tensor([8., 4., 2., 2.])
"""

from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(1.0, 0.0))
def affine(left: Pair, right: Pair) -> Pair:
    """The map `left` followed by the map `right`."""
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2
