"""The most probable path of a hidden Markov model with many states.

The weights of the best paths to each state come from `log_space`, with maxima in place of sums, in
float64. The probability is the sum of what lies on the path, and so is its derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import ops
from ...api.associative_scan import associative_scan
from ...torch_state import without_autocast
from .log_space import by_logarithms
from .many_states import of_steps, relative, unread


def path_of_many(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """The path [..., T] and the logarithm of its probability [...], in float64. initial [..., K],
    transition [K, K] or [..., 1 or T, K, K], likelihood [..., T, K], of any float dtype."""
    with torch.no_grad(), without_autocast(likelihood.device.type):
        weights, _ = relative(likelihood.double())
        joint = (initial.double() + weights[..., 0, :]).unsqueeze(-2)
        if likelihood.shape[-2] > 1:
            later = weights[..., 1:, :]
            ahead = by_logarithms(joint[..., 0, :], of_steps(transition), later, torch.amax)
            joint = torch.cat((joint, ahead + later), -2)
        ends = torch.zeros_like(joint[..., :1], dtype=torch.bool)
        ends[..., -1:, :] = True
        path = followed(maps_back(joint, transition.double(), ends))
        is_nan = joint[..., -1, :].isnan().any(-1)
    return path, torch.where(is_nan, math.nan, weight_of(path, initial, transition, likelihood))


def maps_back(weights: Tensor, transition: Tensor, ends: Tensor) -> Tensor:
    """[..., T, K]: from each state at the next step to the best one now. The last step of a
    sequence, where `ends` [..., T, 1] is True, leads nowhere: its map is the best state, whatever
    comes. weights [..., T, K]: of the best paths to each state."""
    *steps, states = weights.shape
    leaving = transition if transition.dim() == 2 else transition.roll(-1, -3)
    leaving = leaving.expand(*steps, states, states)
    before = (weights[..., None] + leaving).argmax(-2)
    return torch.where(ends, weights.argmax(-1, keepdim=True), before)


def followed(maps: Tensor) -> Tensor:
    """The path that the maps [..., T, K] lead along, from the last step to the first."""
    if maps.device.type != "cpu":
        return associative_scan(ops.finite_state, maps, -1, True, backend="eager")[..., 0]
    state, found = torch.zeros_like(maps[..., 0, :1]), []
    for step in maps.unbind(-2)[::-1]:
        state = step.gather(-1, state)
        found.append(state)
    return torch.cat(found[::-1], -1)


def weight_of(path: Tensor, initial: Tensor, transition: Tensor, likelihood: Tensor) -> Tensor:
    """log p(path, y) [...], in float64."""
    *batch, steps = path.shape
    start = initial.double().expand(*batch, likelihood.shape[-1]).gather(-1, path[..., :1])
    seen = likelihood.double().gather(-1, path.unsqueeze(-1))
    total = start.squeeze(-1) + seen.sum((-2, -1))
    if steps == 1:
        return total + unread(transition)
    moves = of_steps(transition)
    leading = []  # numbers of series and step, as far as transitions differ among them
    for k, size in enumerate(moves.shape[-3::-1]):
        number = torch.arange(size, device=path.device)
        leading.append(number.view(-1, *[1] * k))
    chosen = moves[(*leading[::-1], path[..., :-1], path[..., 1:])]
    return total + chosen.sum(-1)
