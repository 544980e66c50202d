"""Finite-state machines.

    finite_state:  F[t] = f[t] ∘ … ∘ f[0],  the state reached from every state

The element is a map of S states as a leaf […, S] of integers: f[i] is the state that follows state
i on the input at t. Combining two composes them, the left one first: (f ∘ g)[i] = g[f[i]]; a state
outside 0 … S−1 leads to state 0. Identity (0, 1, …, S−1). The state of the machine started in i is
F[t][i]. The table of maps is looked up before the scan: f = table[symbols], or in a lift.

Cost per element: 3·S² operations (a selection in registers, no look-up), reads and writes S
integers.

Source: W. D. Hillis, G. L. Steele, "Data parallel algorithms", Communications of the ACM 29(12),
1986; R. E. Ladner, M. J. Fischer, "Parallel prefix computation", Journal of the ACM 27(4), 1980.

>>> import torch
>>> from assocscan import associative_scan, ops
>>> table = torch.tensor([[0, 1], [1, 0]])            # 0 keeps the parity, 1 changes it
>>> bits = torch.tensor([1, 0, 1, 1])
>>> associative_scan(ops.finite_state, table[bits])[:, 0]
tensor([1, 1, 0, 1])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(element_ndim=1, identity=lambda f: torch.arange(f[-1]))
def finite_state(left: Tensor, right: Tensor) -> Tensor:
    """The map `left` followed by the map `right`."""
    chosen = left[:, None] == torch.arange(left.shape[-1], dtype=left.dtype)
    return torch.where(chosen, right[None, :], 0).sum(1, dtype=right.dtype)
