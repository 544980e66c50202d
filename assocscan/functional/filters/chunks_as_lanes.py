"""A filter of few channels on CPUs: chunks of the axis are the lanes of one scan.

A kernel that walks along the axis with many channels at once passes on n numbers of each, in n²
products. One channel offers it no such lanes, and a scan of maps z ↦ M z + g multiplies matrices,
in n³ products per step. But M is the same at every step, so that the axis can be cut into K chunks
of C steps with known powers of it:

    1. e[k] = Σ M^(C−1−t) g x[t] over the steps t of chunk k: the state that it ends with, from the
       state 0; one product of matrices for all chunks;
    2. the state before chunk k, z[k] = Mᶜ z[k−1] + e[k−1], in log₂ K rounds;
    3. one scan of all chunks from these states.

As in `lattice_states`, D stands for M − I, also for powers of M.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

# The lanes for which a kernel of the CPU engine needs about the time that it needs for more of
# them, for each thread.
LANES = 32
# A scan of maps takes as long as products of matrices, and the rounds, for order² · elements of
# this size; 0.3 ms on one core.
LEAST_WORK = 1 << 18
FEW_CHANNELS = 8  # fewer than these the engine scans as maps

Powers = tuple[Tensor, Tensor]
Scan = Callable[[Tensor, Tensor], Tensor]


def is_worth_cutting(order: int, length: int, channels: int) -> bool:
    return 0 < channels < FEW_CHANNELS and order * order * length * channels >= LEAST_WORK


def chunk_count(channels: int) -> int:
    return -(-LANES * torch.get_num_threads() // channels)


def scanned(D: Tensor, g: Tensor, x: Tensor, reverse: bool, scan: Scan) -> Tensor | None:
    """The response to x [batch…, L] of the states D [batch…, n, n] and g [batch…, n], whose batch
    broadcasts; None where a power of M overflows.

    scan(chunks [batch…, K, C], states [batch…, K, n]): the responses [batch…, K, C] of all chunks
    from these states.
    """
    length = x.shape[-1]
    chunks = chunk_count(math.prod(x.shape[:-1]))
    steps = -(-length // chunks)
    responses, power = responses_and_power(D, g, steps)
    missing = -length % steps
    chunks = (length + missing) // steps
    powers = [power]
    while 2 ** len(powers) < chunks:
        powers.append(twice(powers[-1]))
    if not bool((responses.abs().amax() + powers[-1].abs().amax()).isfinite()):
        return None
    cut = pad(x, (missing, 0) if reverse else (0, missing)) if missing else x
    cut = cut.unflatten(-1, (chunks, steps))
    weights = responses.flip(-1) if reverse else responses
    ends = (weights @ cut.to(D.dtype).mT).mT
    states = before_chunks(powers, ends.flip(-2) if reverse else ends)
    y = scan(cut, states.flip(-2) if reverse else states).flatten(-2)
    return y.narrow(-1, missing if reverse else 0, length)


def responses_and_power(D: Tensor, g: Tensor, steps: int) -> Powers:
    """M^(C−1−t) g of C steps [batch…, n, C], and D of Mᶜ, by doubling."""
    found, power, of_power = g.unsqueeze(-1), D, 1  # of the last `of_power` steps
    total: Tensor | None = None  # D of M to the bits of `steps` so far
    rest = steps
    while rest:
        if rest % 2:
            total = power if total is None else total + (power + total @ power)
        rest //= 2
        if of_power < steps:
            found = torch.cat([found + power @ found, found], -1)
        if rest:
            power, of_power = twice(power), 2 * of_power
    assert total is not None
    return found[..., found.shape[-1] - steps :], total


def twice(D: Tensor) -> Tensor:
    """(I + D)² − I."""
    return 2.0 * D + D @ D


def before_chunks(powers: list[Tensor], ends: Tensor) -> Tensor:
    """z[k] of the chunks' ends e [batch…, K, n] in scan order. powers: D of Mᶜ to the powers 1, 2,
    4, …

    z[k] begins as e[k−1]; the round of s adds Mˢᶜ z[k−s].
    """
    z = pad(ends[..., :-1, :], (0, 0, 1, 0))
    for i, D in enumerate(powers):
        before = z[..., : -(2**i), :] if 2**i < z.shape[-2] else z[..., :0, :]
        z = z + pad(before + before @ D.mT, (0, 0, z.shape[-2] - before.shape[-2], 0))
    return z
