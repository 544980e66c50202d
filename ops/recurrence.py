"""First-order linear recurrences."""

from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(1.0, 0.0))
def affine(left: Pair, right: Pair) -> Pair:
    """First-order linear recurrence: h[t] = a[t] · h[t−1] + b[t], with h[−1] = 0.

    Inputs: (a, b), numbers of any dtype, real or complex.
    Element: the same, the map h ↦ a·h + b. Combining composes two, the left one first: (a₁, b₁) ∘
        (a₂, b₂) = (a₂·a₁, a₂·b₁ + b₂).
    Outputs: (a[t] · … · a[0], h[t]).
    Identity: (1, 0).
    Cost: 3 flops (complex 14); reads a and b, writes two numbers.

    `assocscan.linear_recurrence` gives h alone, and never writes the products. A complex gradient
    is conjugated, as everywhere in torch.

    Source: G. E. Blelloch, "Prefix sums and their applications", 1990, section 1.4; E. Martin and
    C. Cundy, "Parallelizing linear recurrent neural nets over sequence length", ICLR 2018.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> a, b = torch.full((4,), 0.5), torch.tensor([8.0, 0.0, 0.0, 1.0])
    >>> A, h = associative_scan(ops.affine, (a, b))
    >>> h
    tensor([8., 4., 2., 2.])
    """
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2
