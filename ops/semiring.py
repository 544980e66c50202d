"""Products of matrices whose entries are weights of paths.

    log_matmul:  Y[t][i, j] = log Σ over paths i → … → j of exp(their weight)
    max_matmul:  Y[t][i, j] = max over paths i → … → j of their weight

The element is a real K×K matrix (leaf […, K, K]): entry [i, j] is the weight of the step from state
i before to state j after, so that a product is left ⊗ right, with (+, ·) replaced by (logaddexp, +)
or by (max, +). (The matrices of `matmul` act on columns: there the product is right @ left.)
Identity: 0 on the diagonal, −∞ elsewhere; −∞ is a step that cannot be taken, and has a finite
derivative.

With log transition probabilities plus log likelihoods these are the forward recursion of a hidden
Markov model and Viterbi's; see `hmm_filter` and `viterbi`.

Cost per element: K³ additions and maxima, log_matmul K³ exp and K² log besides; reads and writes
K² numbers.

Source: S. Hassan, S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of inference in
hidden Markov models", IEEE Transactions on Signal Processing 69, 2021.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> weights = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).expand(3, 2, 2)
>>> associative_scan(ops.max_matmul, weights)[-1]
tensor([[3., 4.],
        [5., 3.]])
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


def _unit(shape: torch.Size) -> Tensor:
    return torch.full(shape, -math.inf).fill_diagonal_(0.0)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """[i, k, j]: the weight of the path from i to j through k."""
    return left[:, :, None] + right[None, :, :]


@monoid(element_ndim=2, identity=_unit)
def max_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The heaviest paths of `left` and then `right`."""
    return _sums(left, right).amax(1)


@monoid(element_ndim=2, identity=_unit)
def log_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The logarithms of the paths' sums, of `left` and then `right`."""
    paths = _sums(left, right)
    high = paths.detach().amax(1, keepdim=True)
    high = torch.where(high == -math.inf, 0.0, high)
    total = torch.exp(paths - high).sum(1)
    reached = total > 0
    log = torch.log(torch.where(reached, total, 1.0)) + high[:, 0, :]
    return torch.where(reached, log, -math.inf)
