"""The real-gated linear recurrent unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..api.tensor_subclasses import overridable
from ..errors import ScanValueError
from ..monoids.call_errors import checked_call
from ..monoids.leaf_checks import check_tensor
from ..monoids.leaf_names import LeafNames
from ..monoids.monoid import Monoid
from .block_linear import BlockLinear
from .over_ranks import one_header, shares_errors
from .recurrent_layer import RecurrentLayer, recurrent
from .states import Run, checked_sequences, require_sizes, require_state, scan_pairs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_SLOPE = 1000.0
# What the leaves of the scan are called in errors.
NAMES = LeafNames({
    "xs[0]": "x", "xs[1]": "recurrence", "xs[2]": "gate", "xs[3]": "decay", "init": "state",
})  # fmt: skip


def bounded_sqrt(x: Tensor) -> Tensor:
    """√x, with a derivative of at most MAX_SLOPE: near x = 0 the true one grows without bound.

    For x < 1 / (4 MAX_SLOPE²) = 2.5e-7 the derivative is MAX_SLOPE; the value is √x everywhere.
    """
    near = x < 0.25 / MAX_SLOPE**2
    root = torch.sqrt(torch.where(near, x.detach(), x))
    return root + torch.where(near, (x - x.detach()) * MAX_SLOPE, 0.0)


def lift(x: Tensor, recurrence: Tensor, gate: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The affine map h ↦ a h + √(1 − a²) σ(gate) x with log a = −decay σ(recurrence).

    1 − a² = −expm1(2 log a) loses nothing where a is near 1. The state has the dtype of x; a scan
    of 16-bit numbers computes all of this in float32.
    """
    log_a = -decay * torch.sigmoid(recurrence)
    scale = bounded_sqrt(-torch.expm1(2 * log_a))
    b = scale * torch.sigmoid(gate) * x
    return torch.exp(log_a).to(x.dtype), b.to(x.dtype)


_RGLRU = Monoid(
    ops.affine.combine,
    identity=ops.affine.identity,
    name="rglru",
    lift=lift,
    lower=lambda state: state[1],
)


@overridable
@shares_errors(one_header)
@checked_call
def rglru(
    x: Tensor,
    recurrence: Tensor,
    gate: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    reverse: bool = False,
    *,
    group: ProcessGroup | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of the RG-LRU, from the values that enter its gates.

        a[t] = exp(−decay ⊙ σ(recurrence[t]))
        h[t] = a[t] ⊙ h[t−1] + √(1 − a[t]²) ⊙ σ(gate[t]) ⊙ x[t]

    x, recurrence, gate [B, L, D], floats of one dtype; decay [D], positive; state [B, D], h before
    the first position (zero where absent). Returns h [B, L, D] in the dtype of x and the last h
    [B, D], which is float32 where x has 16 bits. With `reverse` the recurrence runs from the end.
    With `group`, x, recurrence and gate are this rank's part of a sequence, and both states are
    those of the whole (`assocscan.distributed`). With `offsets` [S + 1], S sequences are packed
    along L, each with a start of its own: both states are [S, B, D].

    Gates, scaling and recurrence are one operator, and so one kernel where kernels are generated;
    its derivative is another. The derivative of the root is bounded by MAX_SLOPE = 1000, as in the
    published implementation of Griffin: without a bound it is infinite at a = 1.

    >>> import torch
    >>> from assocscan.nn import rglru
    >>> x = torch.ones(1, 3, 1)
    >>> h, last = rglru(x, 0 * x, 100 * x, torch.tensor([1.0]))
    >>> h.flatten()
    tensor([0.7951, 1.2773, 1.5698])

    Raises TypeError and ValueError for tensors that do not fit (as `associative_scan`).

    Cost per element: 3 flops and 4 exponentials, reads 3 numbers and writes one.

    Source: S. De et al., "Griffin: mixing gated linear recurrences with local attention for
    efficient language models", arXiv 2402.19427, equations 1 to 4.
    """
    tensors = {"x": x, "recurrence": recurrence, "gate": gate, "decay": decay}
    for name, t in (tensors if state is None else {**tensors, "state": state}).items():
        check_tensor(name, t)
    if x.dim() != 3:
        raise ScanValueError(f"x has shape {list(x.shape)}, expected [B, L, D]")
    offsets = checked_sequences(offsets, x, group)
    init = None if state is None else (torch.ones_like(state), state)
    try:
        decay = decay.expand(1, x.shape[1], x.shape[2])
    except RuntimeError:
        raise ScanValueError(
            f"decay has shape {list(decay.shape)}, expected [{x.shape[2]}], the D of x "
            f"{list(x.shape)}"
        ) from None
    xs = (x, recurrence, gate, decay)
    return scan_pairs(_RGLRU, xs, x.dtype, init, Run(reverse, group, offsets), NAMES)


@recurrent(one_header)
class RGLRU(RecurrentLayer[Tensor]):
    """The real-gated linear recurrent unit (RG-LRU).

        r[t] = σ(W_a x[t] + b_a),  i[t] = σ(W_x x[t] + b_x)
        a[t] = σ(Λ)^(c r[t])
        h[t] = a[t] ⊙ h[t−1] + √(1 − a[t]²) ⊙ i[t] ⊙ x[t]

    x [B, L, width] → (h [B, L, width], state [B, width], float32 where x has 16 bits). The gates'
    matrices are block-diagonal with `heads` blocks. Parameters: `gates`, a `BlockLinear` with
    2 · width outputs (for each head first r, then i, before the sigmoid); `decay` [width], which is
    softplus⁻¹(−log σ(Λ)), drawn so that a^c is spread between 0.9 and 0.999; it enters the
    recurrence in float32 at least.

    >>> import torch
    >>> from assocscan.nn import RGLRU
    >>> layer = RGLRU(16, heads=4)
    >>> h, state = layer(torch.randn(2, 100, 16))
    >>> h_next, state = layer.step(torch.randn(2, 16), state)

    Raises ValueError where `heads` does not divide the width.

    Cost per position: 4 · width² / heads flops for the gates; the recurrence as `rglru`.

    Source: S. De et al., "Griffin", arXiv 2402.19427, section 2.4 and appendix A; c = 8.
    """

    C = 8.0

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        require_sizes(width=width, heads=heads)
        self.gates = BlockLinear(width, 2 * width, heads)
        self.heads = heads
        # a^c uniform over the ring between the radii 0.9 and 0.999, as the published code draws it.
        squared = torch.empty(width).uniform_(0.9**2, 0.999**2)
        self.decay = nn.Parameter(inverse_softplus(-0.5 * torch.log(squared) / self.C))

    def _entrance(self) -> tuple[int, Tensor]:
        return self.decay.shape[0], self.gates.weight

    def _check_state(self, state: Any, x: Tensor, offsets: Tensor | None = None) -> None:
        require_state(state, (x.shape[0], x.shape[-1]), "[B, width]", x, offsets)

    def _along(self, x: Tensor, state: Tensor | None, run: Run) -> tuple[Tensor, Tensor]:
        given = x, *self.gate_inputs(x), self.decays(), state, run.reverse
        return rglru(*given, group=run.group, offsets=run.offsets)

    def _at(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        recurrence, gate = (t.to(wide) for t in self.gate_inputs(x))
        a, b = lift(x.to(wide), recurrence, gate, self.decays())
        h = b if state is None else a * state + b
        return h.to(x.dtype), h

    def gate_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the sigmoids, [..., width] each."""
        both = self.gates(x).unflatten(-1, (self.heads, 2, -1))
        recurrence, gate = both.unbind(-2)
        return recurrence.flatten(-2), gate.flatten(-2)

    def decays(self) -> Tensor:
        """−c log σ(Λ) [width], positive."""
        wide = torch.promote_types(self.decay.dtype, torch.float32)
        return self.C * F.softplus(self.decay.to(wide))


def inverse_softplus(y: Tensor) -> Tensor:
    """The x with log(1 + exp(x)) = y > 0, without loss for small and large y."""
    return y + torch.log(-torch.expm1(-y))
