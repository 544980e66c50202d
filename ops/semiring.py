"""Products of matrices whose entries are weights of paths.

A product is left ⊗ right, with (+, ·) replaced by (logaddexp, +) or by (max, +). (The matrices of
`matmul` act on columns: there the product is right @ left.) A weight of −∞ is a step that cannot be
taken; its derivative is finite.

With log transition probabilities plus log likelihoods these are the forward recursion of a hidden
Markov model and Viterbi's; see `assocscan.hmm_filter` and `assocscan.viterbi`.

Source: S. Hassan, S. Särkkä, Á. F. García-Fernández, "Temporal parallelization of inference in
hidden Markov models", IEEE Transactions on Signal Processing 69, 2021.
"""

import math

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


def _unit(shape: torch.Size) -> Tensor:
    # Not in place: an exclusive segmented scan traces it.
    return torch.where(torch.eye(shape[-1], dtype=torch.bool), 0.0, -math.inf)


def log_sum(x: Tensor, dim: int) -> Tensor:
    """log Σ exp(x), as torch.logsumexp, but with a finite derivative where all x are −∞."""
    high = x.detach().amax(dim, keepdim=True)
    high = torch.where(torch.isinf(high), 0.0, high)
    total = torch.exp(x - high).sum(dim)
    none = total == 0
    log = torch.log(torch.where(none, 1.0, total)) + high.squeeze(dim)
    # A sum, where a choice between log and −∞ would do: compilers follow a constant through later
    # comparisons by branches, which no vector instructions have.
    return log + torch.where(none, -math.inf, torch.zeros_like(log))


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """[i, k, j]: the weight of the path from i to j through k."""
    return left[:, :, None] + right[None, :, :]


@monoid(element_ndim=2, identity=_unit)
def max_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The weight of the best path: Y[t][i, j] = max over paths i → … → j.

    Inputs: x […, K, K], real: x[i, j] is the weight of the step from state i before to state j
        after.
    Element: the same matrix. Weights add along a path.
    Outputs: Y […, K, K].
    Identity: 0 on the diagonal, −∞ elsewhere.
    Cost: K³ additions and K³ maxima; reads K² numbers, writes K².

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> weights = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).expand(3, 2, 2)
    >>> associative_scan(ops.max_matmul, weights)[-1]
    tensor([[3., 4.],
            [5., 3.]])
    """
    return _sums(left, right).amax(1)


@monoid(element_ndim=2, identity=_unit)
def log_matmul(left: Tensor, right: Tensor) -> Tensor:
    """The weight of all paths: Y[t][i, j] = log Σ exp(weight), over paths i → … → j.

    Inputs: x […, K, K], real floats: x[i, j] is the weight, a log probability as a rule, of the
        step from state i before to state j after.
    Element: the same matrix. Weights add along a path.
    Outputs: Y […, K, K].
    Identity: 0 on the diagonal, −∞ elsewhere.
    Cost: K³ additions, maxima and exp, and K² log; reads K² numbers, writes K².

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> steps = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).expand(3, 2, 2)
    >>> associative_scan(ops.log_matmul, steps.log())[-1].exp()        # probabilities after 3 steps
    tensor([[0.8250, 0.1750],
            [0.7000, 0.3000]])
    """
    return log_sum(_sums(left, right), 1)
