"""Finite-state machines."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid


@monoid(element_ndim=1, identity=lambda f: torch.arange(f[-1]))
def finite_state(left: Tensor, right: Tensor) -> Tensor:
    """The states that a machine reaches: F[t] = f[t] ∘ … ∘ f[0].

    Inputs: f […, S], integers: f[i] is the state that follows state i on the symbol at t. Look the
        maps up before the scan, f = table[symbols], or in a lift.
    Element: f, a map of S states to S states.
    Outputs: F […, S]: F[t][i] is the state after t of a machine that was started in state i.
    Identity: (0, 1, …, S−1), the map that changes nothing.
    Cost: 3·S² operations (a selection in registers, no look-up); reads S integers, writes S.

    Combining composes the maps, the left one first: (f ∘ g)[i] = g[f[i]]. A state outside 0 … S−1
    leads to state 0.

    Source: W. D. Hillis, G. L. Steele, "Data parallel algorithms", Communications of the ACM
    29(12), 1986; R. E. Ladner, M. J. Fischer, "Parallel prefix computation", Journal of the ACM
    27(4), 1980.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> table = torch.tensor([[0, 1], [1, 0]])            # 0 keeps the parity, 1 changes it
    >>> bits = torch.tensor([1, 0, 1, 1])
    >>> associative_scan(ops.finite_state, table[bits])[:, 0]
    tensor([1, 1, 0, 1])
    """
    chosen = left[:, None] == torch.arange(left.shape[-1], dtype=left.dtype, device=left.device)
    return torch.where(chosen, right[None, :], 0).sum(1, dtype=right.dtype)
