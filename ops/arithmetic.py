"""Running sums and products.

Source: G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.
"""

from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(identity=0.0)
def sum(left: Tensor, right: Tensor) -> Tensor:
    """Running sum: y[t] = x[0] + … + x[t].

    Inputs: x, a number of any dtype.
    Element: the same number.
    Outputs: y, in the dtype of x. Integers wrap; for bool the sum is "or". (`assocscan.cumsum`
        promotes integers to int64, as torch does.)
    Identity: 0.
    Cost: 1 flop; reads one number, writes one.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.sum, torch.tensor([3, 1, 4, 1]))
    tensor([3, 4, 8, 9])
    """
    return left + right


@monoid(identity=1.0)
def prod(left: Tensor, right: Tensor) -> Tensor:
    """Running product: y[t] = x[0] · … · x[t].

    Inputs: x, a number of any dtype.
    Element: the same number.
    Outputs: y, in the dtype of x. Integers wrap; for bool the product is "and".
        (`assocscan.cumprod` promotes integers to int64, as torch does.)
    Identity: 1.
    Cost: 1 flop; reads one number, writes one.

    After a 0 the products of real floats are 0, also where the factors behind it overflow by
    themselves. On GPUs such products are NaN. The gradient divides by nothing, so zeros among the x
    do no harm.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.prod, torch.tensor([3, 1, 4, 1]), inclusive=False)
    tensor([ 1,  3,  3, 12])
    """
    return left * right
