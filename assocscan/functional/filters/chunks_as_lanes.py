"""A filter of few channels on CPUs: chunks of the axis are the lanes of one scan.

A kernel that walks along the axis with many channels at once passes on n numbers of each, in n²
products. One channel offers it no such lanes, and a scan of maps z ↦ M z + g multiplies matrices,
in n³ products per step. But M is the same at every step, so that the axis can be cut into K chunks
of C steps with known powers of it:

    1. e[k] = Σ M^(C−1−t) g x[t] over the steps t of chunk k: the state that it ends with, from the
       state 0; a reduction of weighted numbers;
    2. the state before chunk k, z[k] = Mᶜ z[k−1] + e[k−1], in log₂ K rounds;
    3. one scan of all chunks from these states.

As in `lattice_states`, D stands for M − I, also for powers of M.

What is as long as x is left to our kernels where that can be. A torch operation of that size, and
`torch.mm` from some hundred rows on, asks for all threads of a pool of its own, and waits for
milliseconds where other programs have the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 32  # for each thread: with fewer, a kernel of the CPU engine needs about the same time
# On one core a scan of maps takes longer from order² · elements of this size on (0.5 ms), and for
# so many channels; for more of them the engine passes on states by itself.
LEAST_WORK = 1 << 18
MOST_CHANNELS, MOST_OF_SECOND_ORDER = 7, 2

Powers = tuple[Tensor, Tensor]
OfTwo = Callable[[Tensor, Tensor], Tensor]


def is_worth_cutting(order: int, length: int, channels: int) -> bool:
    most = MOST_OF_SECOND_ORDER if order == 2 else MOST_CHANNELS
    return 0 < channels <= most and order * order * length * channels >= LEAST_WORK


def chunk_count(length: int, channels: int) -> int:
    """Enough for all threads, and about as many as a chunk has steps; where it can be, a number of
    which the length is a multiple."""
    least = max(-(-LANES * torch.get_num_threads() // channels), math.isqrt(length))
    return next((k for k in range(least, 2 * least) if length % k == 0), least)


def scanned(
    D: Tensor, g: Tensor, x: Tensor, reverse: bool, reduce: OfTwo, scan: OfTwo
) -> Tensor | None:
    """The response to x [batch…, L] of the states D [batch…, n, n] and g [batch…, n], whose batch
    broadcasts, in new memory; None where a power of M overflows.

    reduce(weights [batch…, C, n], chunks [batch…, K, C]): the sums of the weighted numbers of each
    chunk [batch…, K, n]. scan(chunks, states [batch…, K, n]): the responses [batch…, K, C] of all
    chunks from these states, in new memory.
    """
    length, order = x.shape[-1], g.shape[-1]
    if g.numel() == order:  # one filter: products of matrices without a batch
        D, g = D.reshape(order, order), g.reshape(order)
    chunks = chunk_count(length, math.prod(x.shape[:-1]))
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
    weights = (responses.flip(-1) if reverse else responses).mT
    ends = reduce(weights, cut)
    states = before_chunks(powers, ends.flip(-2) if reverse else ends)
    y = scan(cut, states.flip(-2) if reverse else states)
    return joined(y, length, missing if reverse else 0)


def joined(y: Tensor, length: int, begin: int) -> Tensor:
    """`length` numbers from `begin` of the chunks [batch…, K, C], as a tensor of its own: torch's
    forward mode takes no view for a result, and what is a view cannot be changed in place."""
    shape, row = (*y.shape[:-2], length), y.shape[-2] * y.shape[-1]
    if y.is_contiguous() and (length == row or y.numel() == row):
        strides = torch.empty(shape, device="meta").stride()
        return y.set_(y.untyped_storage(), y.storage_offset() + begin, shape, strides)
    return y.flatten(-2).narrow(-1, begin, length).clone(memory_format=torch.contiguous_format)


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
            found = torch.cat([found + product(power, found), found], -1)
        if rest:
            power, of_power = twice(power), 2 * of_power
    assert total is not None
    return found[..., found.shape[-1] - steps :], total


def twice(D: Tensor) -> Tensor:
    """(I + D)² − I."""
    return 2.0 * D + D @ D


def product(D: Tensor, columns: Tensor) -> Tensor:
    """D [batch…, n, n] times many columns [batch…, n, m]."""
    return (D.unsqueeze(-1) * columns.unsqueeze(-3)).sum(-2)


def before_chunks(powers: list[Tensor], ends: Tensor) -> Tensor:
    """z[k] of the chunks' ends e [batch…, K, n] in scan order. powers: D of Mᶜ to the powers 1, 2,
    4, …

    z[k] begins as e[k−1]; the round of s adds Mˢᶜ z[k−s].
    """
    z, chunks = pad(ends[..., :-1, :], (0, 0, 1, 0)), ends.shape[-2]
    for i, D in enumerate(powers):
        before = z[..., : chunks - 2**i, :]
        z = z + pad(before + product(D, before.mT).mT, (0, 0, 2**i, 0))
    return z
