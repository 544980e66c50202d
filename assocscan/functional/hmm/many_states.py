"""The filter of a hidden Markov model with many states: by matrix products, not by logarithms.

An element of the filter's scan is a K×K matrix of weights. For K above some ten no kernel is
generated, and the sums of each pair of elements take K³ exponentials. Products of the probabilities
themselves are matrix products of K³ multiply-adds. Every factor is divided by its greatest entry,
so that nothing overflows.

What underflows is lost. That is harmless where every state can follow every state. Let no
transition be R times as probable as another one. Then rows of a product differ by R at most, so
that only states below 2^-126 R of a row's greatest are lost, and all that they add to the next
prediction is K R times that part of it: less than a float32 can show where R is at most e^RANGE.
Where that does not hold, or where a number is infinite or NaN, the scan in log space runs
(`filter_and_viterbi`). Whether it holds is read from the device, once.

The products are those of a tree: of neighbours, of pairs of pairs, and so on. What enters each step
comes down the tree as a vector: the left one of two nodes gets what enters both, the right one that
times the left one's product. (At the top, where nodes are few, products of all before them are as
quick.) Where all steps have one transition, the steps themselves need no
matrices.

Source: G. E. Blelloch, "Prefix sums and their applications", 1990; here with vectors on the way
down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...torch_state import is_forward_mode, needs_dispatcher, without_autocast
from ..operands import carry_dtype

LEAST_STATES, LEAST_STEPS = 9, 64  # kernels of fewer states are generated
RANGE = 30.0
FEW_NODES = 256  # levels of so few nodes cost a launch or two each, whatever they compute
Filtered = tuple[Tensor, Tensor]


def filtered(initial: Tensor, transition: Tensor, likelihood: Tensor) -> Filtered | None:
    """log p(z[t] | y[0 … t]) [..., T, K] and log p(y) [...]; None where the scan in log space is
    needed. initial [..., K], transition [K, K] or [..., T, K, K], likelihood [..., T, K]."""
    *_, steps, states = likelihood.shape
    if states < LEAST_STATES or steps < LEAST_STEPS or not likelihood.numel():
        return None
    if needs_dispatcher() or is_forward_mode() or torch.compiler.is_compiling():
        return None
    if likelihood.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if transition.dim() > 2:
        transition = transition[..., 1:, :, :]  # that of step 0 is not read
    if not is_harmless(initial.detach(), transition.detach(), likelihood.detach()):
        return None
    dtype = carry_dtype(likelihood.dtype)
    initial, transition, weights = (t.to(dtype) for t in (initial, transition, likelihood))
    high = weights.detach().amax(-1, keepdim=True)  # apart: posteriors keep its digits
    weights = weights - high
    joint = (initial + weights[..., 0, :]).unsqueeze(-2)
    with without_autocast(likelihood.device.type):
        ahead = predictions(joint.squeeze(-2), transition, weights[..., 1:, :])
    joint = torch.cat((joint, ahead.to(dtype) + weights[..., 1:, :]), -2)
    evidence = torch.logsumexp(joint, -1, keepdim=True)
    total = (evidence + high).squeeze(-1).sum(-1, dtype=sum_dtype(likelihood))
    return (joint - evidence).to(likelihood.dtype), total.to(likelihood.dtype)


def is_harmless(initial: Tensor, transition: Tensor, likelihood: Tensor) -> bool:
    """Whether what underflows changes no digit. Waits for the device."""
    high, low = transition.amax(), transition.amin()
    finite = torch.isfinite(high) & torch.isfinite(low)
    greatest = initial.amax(-1).sum() + likelihood.amax(-1).sum()  # NaN wins, and so does infinity
    return bool(finite & (high - low <= RANGE) & torch.isfinite(greatest))


def predictions(start: Tensor, transition: Tensor, weights: Tensor) -> Tensor:
    """log p(z[t] | y[0 … t−1]) [..., n, K] for the n steps after the first one, from the joint log
    probability [..., K] of the first one. weights: of these steps, with 0 as the greatest."""
    dtype = product_dtype(weights)
    chance = torch.exp(transition - transition.detach().amax()).to(dtype)
    seen = torch.exp(weights).to(dtype)
    first = torch.exp(start - start.detach().amax(-1, keepdim=True)).to(dtype)
    before = entering(first, chance, seen)
    ahead = times(before, chance) / before.sum(-1, keepdim=True)
    return torch.log(ahead) + transition.detach().amax()


def product_dtype(weights: Tensor) -> torch.dtype:
    """float64 where products of float32 matrices would be taken in TF32."""
    is_coarse = weights.is_cuda and torch.backends.cuda.matmul.fp32_precision not in (
        "ieee",
        "none",
    )
    return torch.float64 if is_coarse else weights.dtype


def sum_dtype(x: Tensor) -> torch.dtype:
    """That of sums over all steps; Apple's GPUs have no float64."""
    return carry_dtype(x.dtype) if x.device.type == "mps" else torch.float64


def entering(first: Tensor, chance: Tensor, seen: Tensor) -> Tensor:
    """What enters each of n steps [..., n, K], each up to a factor. first [..., K] enters the first
    step, whose matrix is chance · diag(seen); chance [K, K] or [..., n, K, K], seen [..., n, K]."""
    n = seen.shape[-2]
    levels = [] if chance.dim() == 2 else [chance * seen.unsqueeze(-2)]
    if chance.dim() == 2 and n > 1:
        left, right = (seen[..., k : n // 2 * 2 : 2, :].unsqueeze(-2) for k in (0, 1))
        levels.append(scaled(((chance * left) @ chance) * right, (-2, -1)))
    while levels and levels[-1].shape[-3] > FEW_NODES:
        nodes = levels[-1]
        pairs = nodes.shape[-3] // 2
        joined = nodes[..., 0 : 2 * pairs : 2, :, :] @ nodes[..., 1 : 2 * pairs : 2, :, :]
        levels.append(scaled(joined, (-2, -1)))
    vectors = first.unsqueeze(-2)
    if levels:
        before = products(levels[-1][..., :-1, :, :])
        later = scaled((vectors.unsqueeze(-2) @ before).squeeze(-2), (-1,))
        vectors = torch.cat((vectors, later), -2)
    for nodes in levels[-2::-1]:
        vectors = down(vectors, nodes.shape[-3], through(nodes))
    if chance.dim() == 2:
        vectors = down(vectors, n, lambda x, at: times(x, chance) * seen[..., at, :])
    return vectors


def products(nodes: Tensor) -> Tensor:
    """The products of all nodes up to each, by doubling."""
    apart = 1
    while apart < nodes.shape[-3]:
        joined = nodes[..., :-apart, :, :] @ nodes[..., apart:, :, :]
        nodes = torch.cat((nodes[..., :apart, :, :], scaled(joined, (-2, -1))), -3)
        apart *= 2
    return nodes


def down(vectors: Tensor, count: int, step: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """What enters the `count` nodes of a level, from what enters those above. `step` takes vectors
    through the nodes of a slice."""
    pairs = count // 2
    if pairs == 0:
        return vectors
    right = scaled(step(vectors, slice(0, 2 * pairs, 2)), (-1,))
    both = torch.stack((vectors, right), -2).flatten(-3, -2)
    if count % 2 == 0:
        return both
    last = scaled(step(both[..., -1:, :], slice(2 * pairs - 1, 2 * pairs)), (-1,))
    return torch.cat((both, last), -2)


def through(nodes: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """A step of `down`: the products of these nodes."""
    return lambda vectors, at: times(vectors, nodes[..., at, :, :])


def times(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Each vector times its matrix, or all times one."""
    if matrices.dim() == 2:
        return vectors @ matrices
    return (vectors.unsqueeze(-2) @ matrices).squeeze(-2)


def scaled(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """With 1 as the greatest entry; the factor takes no part in derivatives."""
    return x / x.detach().amax(dims, keepdim=True)
