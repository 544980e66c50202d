"""Selective scans of other libraries, and the loop that one writes without them.

All but mamba_ssm's kernel write the decays and the states of all steps to memory: arrays of the
size [B, L, D, N].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import TORCH, Contender, passes_of
from .peers import Peer, taking_part, torch_scan
from .selective_inputs import Inputs, discretised, gated
from .settings import FORWARD, Settings
from .suite.rnn import LONGEST_LOOP

MOST_BYTES = 1 << 30  # of one array [B, L, D, N]: a pass with its gradient keeps several
LOOP = "loop of torch operations"
# Tensors that mamba_ssm takes with the steps last.
SERIES = frozenset(("u", "delta", "B", "C", "z"))


def loop(*tensors: Tensor) -> Tensor:
    """One multiplication and addition of states and one contraction for each step, as the Mamba of
    transformers does without kernels.

    Steps are cut out by `unbind`: its gradient is one array, where that of an index is one for each
    step.
    """
    x = Inputs(*tensors)
    decays, added = discretised(x)
    h = torch.zeros_like(decays[:, 0])  # [B, D, N]
    ys = []
    for a, b, c in zip(decays.unbind(1), added.unbind(1), x.C.unbind(1), strict=True):
        h = a * h + b
        ys.append((h @ c[..., None].to(h.dtype)).squeeze(-1))
    return gated(x, torch.stack(ys, 1))


def torch_associative_scan() -> Callable[..., Tensor]:
    """torch's prototype on the arrays of all steps, compiled, as it asks to be and as transformers
    calls it."""
    states = torch_scan()

    def scan(*tensors: Tensor) -> Tensor:
        x = Inputs(*tensors)
        h = states(*discretised(x))  # [B, L, D, N]
        return gated(x, (h @ x.C[..., None].to(h.dtype)).squeeze(-1))

    return torch.compile(scan)


def mamba_ssm() -> Callable[..., Tensor]:
    """The CUDA kernel of Mamba's authors."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def scan(*tensors: Tensor) -> Tensor:
        y: Tensor = selective_scan_fn(*tensors, delta_softplus=True)
        return y

    return scan


SELECTIVE_PEERS: dict[str, Peer] = {
    "torch associative_scan": Peer("torch", (), torch_associative_scan, gpu=False, compiles=True),
    "mamba_ssm": Peer("mamba_ssm", ("mamba-ssm",), mamba_ssm, rows=True),
}


def selective_contenders(
    settings: Settings, x: Inputs, which: str, cotangent: Tensor | None
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The loop and the peers that can scan these inputs, and why the others cannot."""
    peers, missing = taking_part(SELECTIVE_PEERS, settings, which)
    found = {LOOP: Contender(lambda: passes_of(loop, x, which, cotangent), TORCH)}
    for name, peer in peers.items():
        found[name] = Contender(
            functools.partial(prepared, peer, x, which, cotangent),
            peer.kind,
            functools.partial(turned, peer, which),
        )
    if x.u.shape[1] > LONGEST_LOOP:
        missing[LOOP] = f"not run beyond {LONGEST_LOOP} steps"
    reason = too_large(x)
    if reason is not None:
        missing |= {name: reason for name in (LOOP, "torch associative_scan") if name in found}
    return {name: entry for name, entry in found.items() if name not in missing}, missing


def too_large(x: Inputs) -> str | None:
    """Why nothing that writes all states is run; None where it is."""
    shape = (*x.u.shape, x.A.shape[1])
    size = x.A.dtype.itemsize * x.u.numel() * x.A.shape[1]
    if size <= MOST_BYTES:
        return None
    return (
        f"writes arrays of {shape}, {size / 2**30:.1f} GiB each; left out above "
        f"{MOST_BYTES / 2**30:g} GiB"
    )


def prepared(peer: Peer, x: Inputs, which: str, cotangent: Tensor | None) -> Callable[[], Any]:
    """The call of a peer on inputs in its layout."""
    if peer.rows:
        x = Inputs(*(t.mT.contiguous() if name in SERIES else t
                     for name, t in zip(Inputs._fields, x, strict=True)))  # fmt: skip
        cotangent = None if cotangent is None else cotangent.mT.contiguous()
    return passes_of(peer.load(), x, which, cotangent)


def turned(peer: Peer, which: str, result: Any) -> Any:
    """What a peer returned, with the steps in the middle."""
    if not peer.rows:
        return result
    if which == FORWARD:
        return result.mT
    return Inputs(*(t.mT if name in SERIES else t
                    for name, t in zip(Inputs._fields, result, strict=True)))  # fmt: skip
